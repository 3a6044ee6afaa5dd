"""Random problems that need a bounded number of compiled kernels: for the GPU tests, which compile ahead."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Hashable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from random import Random
from typing import Any, NamedTuple

import torch
from gpu_tools import workers
from random_cases import random_case
from torch import Tensor

from stream_attention.backends import BY_NAME
from stream_attention.backends.hopper.tuning import configure as configure_gluon
from stream_attention.backends.hopper.tuning import (
    has_edges,
    has_idle_queries,
    loads_masked_kv,
    masks_beyond_first_block,
)
from stream_attention.backends.triton.tuning import configure_backward, configure_forward
from stream_attention.base.problem import UNBOUNDED, Inputs, Wanted, state_problem
from stream_attention.gpu.arguments import WIDE, access
from stream_attention.gpu.decode_tuning import block_r, on_a_cache
from stream_attention.gpu.decode_tuning import configure as configure_decode
from stream_attention_tools.testing import Case, check_case
from stream_attention_tools.testing.inputs import _tile_laid_out, make, stated
from stream_attention_tools.testing.offline import compiling_for, in_fresh_processes

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Drawn(NamedTuple):
    """Random problems, one case of every kernel they need, and how long those and others took to compile."""

    cases: list[Case]
    variants: list[Case]
    seconds: float
    backend: str = "triton"


def perhaps_fewer(problems: int, templates: int, variants: int) -> tuple[int, int, int]:
    """The three numbers of a draw, or those of a short one: RANDOM_PROBLEMS=300 in the environment."""
    most = int(os.environ.get("RANDOM_PROBLEMS", "0"))
    return (min(problems, most), templates // 2, variants // 2) if most else (problems, templates, variants)


def draw(
    problems: int,
    templates: int,
    variants: int,
    also: list[Case],
    *,
    backward: bool,
    seed: int = 0,
    backend: str = "triton",
) -> Drawn:
    """A few templates (modifiers, dtypes, head dims) in random sizes.

    A problem that would need one more than `variants` compiled forms is drawn again. Those and the kernels of the cases
    in `also` are compiled here, in parallel. RANDOM_PROBLEMS=300 in the environment draws fewer, of half the templates.
    """
    problems, templates, variants = perhaps_fewer(problems, templates, variants)
    device = torch.cuda.get_device_properties(0)
    arch, num_sms = 10 * device.major + device.minor, device.multi_processor_count
    rng = Random(seed)
    dims = (64, 80, 128, 256)
    like = [random_case(rng, device="cuda", head_dims=dims) for _ in range(templates)]
    if backend == "gluon":
        like = [for_gluon(case, rng, backward) for case in like]
    cases: list[Case] = []
    found: dict[Hashable, Case] = {}
    while len(cases) < problems:
        template = like[len(cases) % templates]
        case = in_another_size(template, rng, backward)
        if backend == "gluon":
            if is_empty(case):
                continue
            case = replace(case, layout=case.layout if case.layout in ADDRESSABLE else "contiguous")
            if backward:  # one order of additions is another kernel
                case = replace(case, deterministic=template.deterministic, row_grad=template.row_grad)
        key = variant(case, arch, num_sms, backend)
        if key is not None and key not in found:
            if len(found) == variants:
                continue
            found[key] = case
        cases.append(case)
    started = time.perf_counter()
    errors = precompile([*found.values(), *also], arch, num_sms, workers(16), backend)
    assert not errors, "\n".join(errors)
    return Drawn(cases, list(found.values()), time.perf_counter() - started, backend)


def precompile(
    cases: Iterable[Case], arch: int, num_sms: int, workers: int | None = None, backend: str = "triton"
) -> list[str]:
    """Compile the kernels of `cases` on a backend into Triton's cache, in parallel and without a GPU.

    Returns what went wrong, a line each.
    """
    jobs = [(replace(case, device="cpu"), arch, num_sms, backend) for case in cases]
    errors = in_fresh_processes(_compile_case, jobs, workers)
    return [f"{job[0]!r} for sm_{arch}: {error}" for job, error in zip(jobs, errors, strict=True) if error]


def _compile_case(job: tuple[Case, int, int, str]) -> None:
    case, arch, num_sms, backend = job
    with compiling_for(arch):
        launch_case(case, arch, num_sms, backend=backend)


def launch_case(
    case: Case,
    arch: int,
    num_sms: int,
    forward_config: Any = None,
    backward_config: Any = None,
    backend: str = "triton",
) -> None:
    """Launch the kernels of a case as a GPU of `arch` would be given them; for use while compiling.

    All gradients are wanted. Without a configuration the one of the tables is taken.
    """
    query, key, value, options = make(case)
    problem, inputs = stated(case, {"query": query, "key": key, "value": value}, options)
    problem = problem.replace(device=torch.device("cuda"), arch=arch, num_sms=num_sms)
    chosen = BY_NAME[backend]
    out, lse = chosen.forward(problem, inputs, forward_config or chosen.configure(problem))
    if case.backward:
        has_bias, has_slopes, has_sink = (t is not None for t in (inputs.bias, inputs.alibi_slopes, inputs.sink))
        wanted = Wanted(bias=has_bias, alibi_slopes=has_slopes and case.row_grad, sink=has_sink and case.row_grad)
        row_grad = wanted.alibi_slopes or wanted.sink
        problem = problem.replace(backward=True, lse_grad=case.lse_grad, row_grad=row_grad)
        grad_lse = torch.zeros_like(lse) if case.lse_grad else None
        saved = out, lse, torch.zeros_like(out), grad_lse
        config = backward_config or chosen.configure(problem)
        chosen.backward(problem, inputs, config, *saved, wanted=wanted)


ADDRESSABLE = ("contiguous", "heads_first", "qkv_packed")
"""Layouts that TMA reads."""


def is_empty(case: Case) -> bool:
    if case.packed:
        return not (case.lengths_q and max(case.lengths_q) and case.lengths_k and max(case.lengths_k))
    return 0 in (case.B, case.Tq, case.Tk)


def for_gluon(case: Case, rng: Random, backward: bool) -> Case:
    """The case without what that backend leaves to Triton's kernels."""
    dim = rng.choice((64, 64, 80, 96, 128, 128, 192, 256))
    return replace(
        case,
        D=dim,
        Dv=128 if dim == 192 and not backward else dim,
        deterministic=case.deterministic and (dim <= 128 or not backward),
        row_grad=False,
        dtype=case.dtype if case.dtype in (F16, BF16) else BF16,
        mask=None,
        bias=None,
        bias_hides=False,
    )


def in_another_size(like: Case, rng: Random, backward: bool) -> Case:
    """The same kernel features in another random size."""
    longest = 1100 if rng.random() < 0.05 else 300
    size = random_case(rng, device="cuda", head_dims=(like.D,), max_length=longest, packed=like.packed)
    if rng.random() < 0.15 and not like.packed:  # few queries, many keys
        size = replace(size, Tq=rng.randint(1, 8), Tk=rng.randint(256, 1100))
    q_heads = size.Hkv * (like.Hq // like.Hkv)
    full = (size.B, q_heads, size.Tq, size.Tk)

    def broadcast(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return shape and tuple(1 if n == 1 else whole for n, whole in zip(shape, full[-len(shape) :], strict=True))

    return replace(
        size,
        Hq=q_heads,
        Dv=like.Dv,
        dtype=like.dtype,
        causal=like.causal,
        window=like.window and tuple(side if side == UNBOUNDED else rng.randint(0, 40) for side in like.window),
        mask=broadcast(like.mask),
        bias=broadcast(like.bias),
        bias_hides=like.bias_hides,
        alibi=like.alibi,
        sink=like.sink,
        aux_dtype=like.aux_dtype,
        softcap=like.softcap,
        scale=like.scale,
        dropout_p=like.dropout_p,
        layout="offset" if like.layout == "offset" else "contiguous" if size.layout == "offset" else size.layout,
        backward=backward,
        lse_grad=backward and like.lse_grad,
    )


def variant(case: Case, arch: int, num_sms: int, backend: str) -> Hashable:
    """What the compiled kernels of a case depend on; None if nothing is launched."""

    def shaped(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def tile(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor | None:
        laid_out = None if shape is None else _tile_laid_out(case.layout, shaped(*shape, dtype=dtype))
        return None if laid_out is None else laid_out[(None,) * (4 - laid_out.dim())]

    aux_dtype = case.aux_dtype or case.dtype
    lengths_q, lengths_k = case.lengths_q or (), case.lengths_k or ()
    lead_q, lead_k = ((sum(lengths_q),), (sum(lengths_k),)) if case.packed else ((case.B, case.Tq), (case.B, case.Tk))
    offsets = shaped(case.sequences + 1, dtype=torch.int32) if case.packed else None
    inputs = Inputs(
        shaped(*lead_q, case.Hq, case.D),
        shaped(*lead_k, case.Hkv, case.D),
        shaped(*lead_k, case.Hkv, case.Dv),
        mask=tile(case.mask, torch.bool),
        bias=tile(case.bias, aux_dtype),
        alibi_slopes=shaped(1, case.Hq) if case.alibi else None,
        sink=shaped(case.Hq) if case.sink else None,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
    )
    problem = state_problem(
        inputs,
        q_len=max(lengths_q, default=0),
        k_len=max(lengths_k, default=0),
        causal=case.causal,
        window=case.window or (UNBOUNDED, UNBOUNDED),
        softcap=case.softcap,
        scale=case.D**-0.5 if case.scale is None else case.scale,
        dropout_p=case.dropout_p,
        deterministic=case.deterministic,
    ).replace(device=torch.device("cuda"), arch=arch, num_sms=num_sms)
    if 0 in (problem.batch, problem.q_len):
        return None
    if backend == "gluon":
        config = configure_gluon(problem)
        unseen = case.packed or loads_masked_kv(problem)
        of_gluon = config, masks_beyond_first_block(problem, config.block_n), unseen, problem.scale > 0
        of_its_backward: Hashable = None
        if case.backward:
            cut = has_edges(problem), has_idle_queries(problem)
            of_its_backward = configure_gluon(problem.replace(backward=True)), cut, case.deterministic, case.lse_grad
        return (
            (case.D, case.Dv, case.dtype, aux_dtype, case.packed, of_gluon),
            (problem.left == UNBOUNDED, problem.right == UNBOUNDED),
            (case.alibi is None, case.sink, case.softcap == 0, case.dropout_p == 0),
            of_its_backward,
        )
    tiles_of_forward = configure_forward(problem)
    of_forward: Hashable = (
        *tiles_of_forward[:4],
        tiles_of_forward.num_splits > 1,
        tiles_of_forward.pack_heads,
        problem.scale > 0,
    )
    cached = on_a_cache(problem)
    if cached is not None:
        config = configure_decode(cached, None, False)
        of_forward = (*config[:3], config.num_splits > 1, block_r(cached))
    of_backward: Hashable = None
    if case.backward:
        tiles = configure_backward(problem.replace(backward=True))
        of_backward = (
            tuple(t and (*t[:4], t.num_splits > 1) for t in tiles),
            case.lse_grad,
            case.bias and (case.bias[-1:] == (1,), case.bias[-2:-1] == (1,)),
            access(inputs.mask),
            access(inputs.bias),
        )
    return (
        (case.D, case.Dv, case.dtype, aux_dtype, problem.group, case.packed, case.layout == "offset"),
        (problem.left == UNBOUNDED, problem.right == UNBOUNDED),
        tuple(min(access(t), WIDE.value) for t in (inputs.mask, inputs.bias)),
        (case.alibi is None, case.sink, case.softcap == 0, case.dropout_p == 0),
        of_forward,
        of_backward,
    )


def run_all(drawn: Drawn) -> dict[str, Any]:
    """Check every problem against the reference, in several processes on one GPU; what to keep of it."""
    started = time.perf_counter()
    parts = [drawn.cases[i : i + 50] for i in range(0, len(drawn.cases), 50)]
    failures: list[str] = []
    worst, worst_case, done = 0.0, None, 0
    with ProcessPoolExecutor(workers(6), mp_context=get_context("spawn")) as pool:
        for part, (failed, share, case) in zip(parts, pool.map(check_part, parts, repeat(drawn.backend)), strict=True):
            failures += failed
            done += len(part)
            if share > worst:
                worst, worst_case = share, case
            if done % 500 == 0:  # where a run that is cut off was
                sys.__stderr__.write(f"problem {done} of {len(drawn.cases)}, {time.perf_counter() - started:.0f} s\n")
    return {
        "problems": len(drawn.cases),
        "failed": len(failures),
        "failures": failures[:10],
        "variants": len(drawn.variants),
        "packed": sum(case.packed for case in drawn.cases),
        "dtypes": {str(dtype): sum(case.dtype is dtype for case in drawn.cases) for dtype in (F16, BF16, F32)},
        "largest share of what is allowed": worst,
        "its case": repr(worst_case),
        "seconds to compile": round(drawn.seconds, 1),
        "seconds to run": round(time.perf_counter() - started, 1),
        "processes": workers(6),
    }


def check_part(cases: list[Case], backend: str) -> tuple[list[str], float, Case | None]:
    """What is said of those that fail, and of the others the largest share of what is allowed, and whose it is."""
    failures: list[str] = []
    worst, worst_case = 0.0, None
    for case in cases:
        try:
            report = check_case(case, backend)
        except AssertionError as error:
            failures.append(str(error))
        else:
            if report.worst > worst:
                worst, worst_case = report.worst, case
    return failures, worst, worst_case
