"""Sweep launch configurations of the Triton kernels on this GPU and propose rows for the tables.

    python -m stream_attention_tools.tune --head-dims 64 128 --lengths 512 2048 8192 --out sweep.json
    python -m stream_attention_tools.tune --kernels query key --modifiers "" softcap mask

Every configuration is compiled first, in parallel and without the GPU, into Triton's cache; then each is checked
against SDPA (with a modifier: against each other) and timed beside it in one run, batch * length = 16384, hidden size
2048. A proposed row carries GPU, date, versions and its gain; nothing is tuned at run time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from stream_attention.backends.triton.tuning import Tile, TritonConfig, configure_backward, configure_forward
from stream_attention.base.problem import Inputs, Problem
from stream_attention.base.state import Saved

from .bench.results import conditions, save
from .bench.timing import Latency, interleaved
from .testing.inputs import Case, draw, stated

TOKENS, HIDDEN = 16384, 2048


KERNELS = {"forward": 2, "query": 3, "key": 4, "dk": 3, "dv": 2, "bias": 2}
"""The kernels, and how many products of a tile each computes; "dk" and "dv" are the halves of "key" by themselves."""

MODIFIERS = ("", "window", "mask", "key mask", "bias", "alibi", "softcap", "sink", "dropout")


class Cell(NamedTuple):
    """One problem of the sweep, plain or with one modifier."""

    head_dim: int
    length: int
    causal: bool
    dtype: torch.dtype = torch.bfloat16
    modifier: str = ""

    @property
    def variant(self) -> tuple[Any, ...]:
        """What a compiled kernel depends on."""
        return self.head_dim, self.causal, self.dtype, self.modifier

    def case(self, device: str, batch: int | None = None) -> Case:
        heads, length, batch = HIDDEN // self.head_dim, self.length, batch or TOKENS // self.length
        modifiers: dict[str, dict[str, Any]] = {
            "window": {"window": (length // 4, -1)},
            "mask": {"mask": (1, 1, length, length)},
            "key mask": {"mask": (batch, 1, 1, length)},
            "bias": {"bias": (1, 1, length, length)},
            "alibi": {"alibi": "H"},
            "softcap": {"softcap": 20.0},
            "sink": {"sink": True},
            "dropout": {"dropout_p": 0.1},
        }
        shape = (batch, length, length, heads, heads, self.head_dim, self.head_dim)
        return Case(*shape, self.dtype, device, causal=self.causal, **modifiers.get(self.modifier, {}))

    def flops(self, products: float) -> float:
        return 2 * products * TOKENS * self.length * HIDDEN * (0.5 if self.causal else 1.0)

    def described(self) -> dict[str, Any]:
        return {**self._asdict(), "dtype": str(self.dtype)}


def candidates(kernel: str, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Configurations worth trying: what exceeds shared memory or makes no sense is left out."""
    found: list[Any] = []
    narrow = dtype.itemsize == 2
    sizes = ((64, 128), (32, 64, 128)) if narrow else ((16, 32, 64, 128), (16, 32, 64))
    stage_counts = (2, 3, 4) if narrow and kernel == "forward" else (2, 3) if narrow and head_dim <= 128 else (1, 2)
    sums = 2 if kernel == "key" else 1
    for owned, streamed, warps, stages in product(*sizes, (4, 8), stage_counts):
        # The tile a program owns stays in shared memory, those that stream by have a copy per stage.
        kept, moving = 2 * owned, 2 * streamed
        if kernel == "forward":
            kept = owned
        elif kernel == "bias":
            kept, moving = 0, 2 * (owned + streamed)
        shared = head_dim * dtype.itemsize * (kept + stages * moving)
        few_rows = 4 if not narrow else 8 if sums * head_dim > 256 else 16
        if (
            shared <= 227 * 1024
            and few_rows <= owned // warps <= 32
            and owned * streamed * head_dim <= 128 * 128 * 128
            and owned * sums * head_dim <= warps * 32 * 192  # registers of the threads
        ):
            if kernel == "forward":
                found.append(TritonConfig(owned, streamed, warps, stages))
            else:
                by_keys = kernel in ("key", "dk", "dv")
                found.append(Tile(*((streamed, owned) if by_keys else (owned, streamed)), warps, stages))
    return found


def random_problem(case: Case) -> tuple[Problem, Inputs]:
    """The problem of a case on random inputs, and these."""
    x = draw(case)
    return stated(x, x.tensors, x.options | {"deterministic": False})


class Bench(NamedTuple):
    """One kernel on one problem: how it is launched with a configuration, and what it writes."""

    launch: Callable[[Any], Any]
    results: tuple[torch.Tensor, ...]


def bench(kernel: str, problem: Problem, inputs: Inputs) -> Bench:
    """Set a kernel up. For kernels of the backward this runs those before it."""
    from stream_attention.backends.triton.backward_bias import prepare_bias_gradient
    from stream_attention.backends.triton.backward_call import BackwardCall
    from stream_attention.backends.triton.backward_key import bind_key
    from stream_attention.backends.triton.backward_query import bind_query
    from stream_attention.backends.triton.forward import bind_forward
    from stream_attention.gpu.prepass import Prepass
    from stream_attention.gpu.rows import Rows

    before = Prepass.of(problem, inputs, needs_visible=True)
    computed = before.run(inputs)
    out = torch.empty_like(inputs.query)
    lse = out.new_zeros(problem.batch, problem.q_heads, problem.q_len, dtype=torch.float32)

    def forward(config: Any) -> None:
        bind_forward(problem, inputs, config, out, lse, before)(*inputs, *computed, out, lse)

    if kernel == "forward":
        return Bench(forward, (out,))
    forward(configure_forward(problem))
    problem = problem.replace(backward=True)
    dq, dk, dv = (torch.empty_like(t) for t in inputs[:3])
    grad_out = output_gradient(out)
    rows = Rows(*(out.new_empty(t.shape, dtype=t.dtype) for t in Rows.samples(problem, out)))
    call = BackwardCall(problem, inputs, before, Saved(out, lse, grad_out, None), rows)
    slopes = out.new_zeros(problem.batch * problem.q_heads * problem.q_len, dtype=torch.float32)
    d_slopes = slopes if problem.alibi else None

    def query(tile: Tile) -> None:
        written = dq, d_slopes, None
        launch = bind_query(call, tile, *written, problem.alibi)
        launch(*inputs, *computed, out, lse, grad_out, None, *rows, *written)

    def key(its_dk: torch.Tensor | None, its_dv: torch.Tensor | None, tile: Tile) -> None:
        launch = bind_key(call, tile, its_dk, its_dv)
        launch(*inputs, *computed, grad_out, *rows, its_dk, its_dv)

    query(configure_backward(problem).query._replace(num_splits=1))
    if kernel == "query":
        return Bench(query, (dq,))
    if kernel != "bias":
        its_dk, its_dv = None if kernel == "dv" else dk, None if kernel == "dk" else dv
        return Bench(partial(key, its_dk, its_dv), tuple(t for t in (its_dk, its_dv) if t is not None))
    assert inputs.bias is not None
    d_bias = torch.empty_like(inputs.bias)

    def bias(tile: Tile) -> None:
        gradient = prepare_bias_gradient(call, tile)
        d_bias.copy_(gradient(inputs, (*computed, grad_out, *rows)))

    return Bench(bias, (d_bias,))


def output_gradient(out: torch.Tensor) -> torch.Tensor:
    """The same random gradient for us and the peer."""
    generator = torch.Generator(out.device).manual_seed(0)
    return torch.randn(out.shape, generator=generator, device=out.device, dtype=out.dtype)


def _compile(job: tuple[Cell, str, Any, int]) -> None:
    """Fill Triton's cache, in a worker process."""
    from .offline import launching_for

    cell, kernel, config, arch = job
    problem, inputs = random_problem(cell._replace(length=1024).case("cpu", batch=2))
    problem = problem.replace(device=torch.device("cuda"), arch=arch, num_sms=132)
    with launching_for(arch, lambda form: form.compile()):
        bench(kernel, problem, inputs).launch(config)


def time_ms(function: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds by CUDA events, after a warm-up."""
    return Latency.of(interleaved({"": lambda n: function()}, "events", repeats, warmup=3)[""]).median


def sdpa(inputs: Inputs, causal: bool, backward: bool) -> tuple[Callable[[], Any], dict[str, tuple[torch.Tensor, ...]]]:
    """The peer, SDPA's flash kernel or its memory-efficient one for fp32: what to time, and what each kernel gives."""
    query, key, value = (t.detach().requires_grad_(backward) for t in inputs[:3])

    def forward() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    out = forward()
    if not backward:
        return forward, {"forward": (out,)}
    again = partial(torch.autograd.grad, out, (query, key, value), output_gradient(out), retain_graph=True)
    dq, dk, dv = again()
    return again, {"query": (dq,), "key": (dk, dv), "dk": (dk,), "dv": (dv,)}


def sweep(
    cells: list[Cell], kernels: list[str], repeats: int, configs: dict[tuple[str, int], list[Any]]
) -> list[dict[str, Any]]:
    """Time every configuration of every kernel and cell beside SDPA's flash kernel."""
    from .testing.offline import in_fresh_processes

    major, minor = torch.cuda.get_device_capability()
    unique = {
        (*cell.variant, kernel, config): (cell, kernel, config, major * 10 + minor)
        for cell, kernel in product(cells, kernels)
        for config in configs[kernel, cell.head_dim]
    }
    started = time.time()
    found = in_fresh_processes(_compile, unique.values(), min(16, os.cpu_count() or 1))
    errors = dict(zip(unique, found, strict=True))
    print(f"compiled {len(unique)} variants in {time.time() - started:.0f} s", flush=True)

    rows = []
    for cell in cells:
        problem, inputs = random_problem(cell.case("cuda"))
        again, truths = sdpa(inputs, cell.causal, backward=kernels != ["forward"])
        peer = time_ms(again, repeats)
        for kernel in kernels:
            set_up = bench(kernel, problem, inputs)
            expected = None if cell.modifier else truths[kernel]
            for config in configs[kernel, cell.head_dim]:
                variant = (*cell.variant, kernel, config)
                row = {**cell.described(), "kernel": kernel, "config": list(config), "error": errors[variant][:200]}
                rows.append(row)
                if row["error"]:
                    continue
                try:
                    for result in set_up.results:
                        result.fill_(float("nan"))
                    set_up.launch(config)
                    expected = expected or tuple(result.clone() for result in set_up.results)
                    distance = max(_distance(ours, truth) for ours, truth in zip(set_up.results, expected, strict=True))
                    if not distance < 0.02:
                        row["error"] = f"wrong by {distance}"
                        continue
                    ms = time_ms(partial(set_up.launch, config), repeats)
                    row.update(ms=ms, tflops=cell.flops(KERNELS[kernel]) / ms / 1e9, sdpa_ms=peer)
                except Exception as failure:
                    row["error"] = f"{type(failure).__name__}: {str(failure)[:120]}"
    return rows


def _distance(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return ((ours - truth).abs().max() / truth.abs().max()).item()


def propose(rows: list[dict[str, Any]], where: str) -> list[str]:
    """The best configurations per variant and kernel, by the geometric mean of speed over the lengths."""
    lines = []
    keys = ("head_dim", "causal", "modifier", "kernel")
    for variant in sorted({tuple(row[key] for key in keys) for row in rows}):
        found: dict[tuple[int, ...], dict[int, dict[str, Any]]] = {}
        for row in rows:
            if tuple(row[key] for key in keys) == variant and "ms" in row:
                found.setdefault(tuple(row["config"]), {})[row["length"]] = row
        lengths = sorted({length for by_length in found.values() for length in by_length})
        complete = {config: by_length for config, by_length in found.items() if len(by_length) == len(lengths)}
        fastest = {length: min(its[length]["ms"] for its in complete.values()) for length in lengths}
        shares = {config: [fastest[n] / its[n]["ms"] for n in lengths] for config, its in complete.items()}
        means = {config: geometric_mean(its) for config, its in shares.items()}
        head_dim, causal, modifier, kernel = variant
        for config in sorted(means, key=lambda config: -means[config])[:4]:
            its = [complete[config][n] for n in lengths]
            of_best = " ".join(f"{share:.2f}" for share in shares[config])
            speeds = " ".join(f"{one['tflops']:.0f}" for one in its)
            of_sdpa = " ".join(f"{one['ms'] / one['sdpa_ms']:.2f}" for one in its)
            lines.append(
                f"D={head_dim} {'causal' if causal else 'full'} {modifier or 'plain'} {kernel}: {config[:4]}  "
                f"# {means[config]:.2f} of the best ({of_best} at {lengths}), {speeds} TFLOP/s, "
                f"{of_sdpa} of the time of plain SDPA; {where}"
            )
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stream_attention_tools.tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--head-dims", type=int, nargs="+", default=[64, 128, 256], help="default: 64 128 256")
    add("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="default: 512 2048 8192")
    kernels = "query is dQ, key is dK and dV, dk and dv are its halves, bias is dBias; default: forward"
    add("--kernels", nargs="+", choices=list(KERNELS), default=["forward"], help=kernels)
    add("--repeats", type=int, default=10, help="of each configuration; default: 10")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    add("--causal", choices=["both", "yes", "no"], default="both", help="default: both")
    add("--modifiers", nargs="+", choices=MODIFIERS, default=[""], help='"" is none, the default')
    add("--out", default="sweep.json", help="every figure, as JSON; default: sweep.json")
    options = parser.parse_args(arguments)
    sizes = {"--repeats": [options.repeats], "--lengths": options.lengths, "--head-dims": options.head_dims}
    for name, given in sizes.items():
        if min(given) < 1:
            parser.error(f"{name}: expected positive numbers; got {min(given)}")
    if unfit := [dim for dim in options.head_dims if HIDDEN % dim or dim % 8 or dim > 256]:
        parser.error(f"--head-dims: expected multiples of 8 up to 256 that divide {HIDDEN}; got {unfit}")
    if any(TOKENS % length for length in options.lengths):
        parser.error(f"--lengths: expected divisors of {TOKENS}, the tokens of a batch; got {options.lengths}")
    if "forward" in options.kernels and len(options.kernels) > 1:
        parser.error("--kernels: sweep the forward by itself, its peer is another")
    if "bias" in options.kernels and options.modifiers != ["bias"]:
        parser.error("--kernels bias: expected --modifiers bias, the problem that has a gradient of it")
    if not torch.cuda.is_available():
        print("tuning needs a CUDA device; there is none here", file=sys.stderr)
        return 1
    dtype = getattr(torch, options.dtype)
    causal = {"both": (False, True), "yes": (True,), "no": (False,)}[options.causal]
    problems = product(options.head_dims, options.modifiers, causal, options.lengths)
    cells = [Cell(dim, length, is_causal, dtype, modifier) for dim, modifier, is_causal, length in problems]
    configs = {(name, dim): candidates(name, dim, dtype) for name in options.kernels for dim in options.head_dims}
    rows = sweep(cells, options.kernels, options.repeats, configs)
    found = conditions("cuda") | {"rows": rows}
    for row in [row for row in rows if row["error"]][:10]:
        print("failed", row)
    where = f"{found['machine']['name']}, {found['date'][:10]}, torch {found['versions']['torch']}"
    print("\n".join(propose(rows, f"{where}, Triton {found['versions']['triton']}")))
    save(found, Path(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
