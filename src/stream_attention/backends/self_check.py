"""The Hopper kernels beside the portable ones, on small problems: for a Triton release with which nobody ran them.

A check is of one kind of kernel: a direction, or decoding from a format, and the widths of its tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.kv_layouts import QuantizedKV
from ..base.kv_layouts.quantized import window_slots
from ..base.kv_layouts.quantized_tensor import CHANNELS, TOKENS, quantize
from ..base.problem import DecodeInputs, Inputs, Problem, Scores, Wanted, Window, decode_problem, state_problem
from ..gpu.prebuilt import compiling
from . import installed, probe
from .base import Backend
from .hopper.tuning import tile_widths

TOLERANCE = {torch.float32: 2.0**-10, torch.bfloat16: 2.0**-5}
"""By dtype of a result, of the largest element of its row. Both kernels round probabilities to bf16, 2^-9 of each."""

FP8_TOLERANCE = 2.0**-3
"""Probabilities are rounded to e4m3, 2^-4 of each, and relative to different row maxima."""


def why_not(problem: Problem, ours: Backend) -> installed.Lacking | None:
    """Why the installed Triton keeps the Hopper kernels from a problem that they support; None if it does not."""
    release, first, last = installed.triton_release(), installed.HOPPER_TRITON[0], installed.HOPPER_TRITON[-1]
    if release in installed.HOPPER_TRITON or installed.hopper_setting() == "on":
        return None
    found = answer(problem, ours)
    if found is not None:
        return None if found.yes else installed.Lacking(f"failed the self-check with Triton {release}: {found.words}")
    if installed.is_newer(release) and probe.is_here(problem):
        return installed.Lacking(
            f"not checked yet with Triton {release}: the first new call outside of a CUDA graph's capture is checked"
        )
    return installed.Lacking(f"enabled only for Triton {first}-{last}; found {release}{installed.SEE_INFO}")


def answer(problem: Problem, ours: Backend) -> probe.Answer | None:
    """What the check found, which runs where it can; None: nothing yet, or it is not needed."""
    is_newer = installed.HAS_TRITON and installed.is_newer(installed.triton_release())
    if not is_newer or installed.hopper_setting() != "auto":
        return None
    from .triton import Triton

    question = f"the Hopper kernels agree with the portable ones: {_kind(problem)}"
    return probe.ask(question, problem, partial(compare, problem, ours, Triton()))


def compare(problem: Problem, ours: Backend, portable: Backend) -> probe.Answer:
    """Whether two backends agree on small problems of a problem's kind, and how far they are apart."""
    apart = 0.0
    for one, inputs, saved, expected in _expected(problem, portable):
        with compiling():
            found = _compute(ours, one, inputs, saved)
        _wait(problem)
        for name, mine, theirs in zip(_names(problem), found, expected, strict=True):
            share = _share(mine, theirs, FP8_TOLERANCE if problem.fp8 else TOLERANCE[theirs.dtype])
            apart = max(apart, share)
            if not share <= 1:  # NaN too
                return probe.Answer(
                    False, f"{name} differs from the portable kernel's by {share:.3g} times the tolerance"
                )
    return probe.Answer(True, f"results differ from the portable kernel's by at most {apart:.2f} times the tolerance")


def _expected(problem: Problem, portable: Backend) -> list[tuple[Problem, Any, Any, Any]]:
    """Small problems with their inputs, what a backward reads, and the portable kernel's results."""
    found = []
    try:
        for one, inputs in _small(problem):
            saved = saved_for_backward(portable, one, inputs) if problem.backward else ()
            found.append((one, inputs, saved, _compute(portable, one, inputs, saved)))
        _wait(problem)
    except Exception as error:  # no C compiler, say, or an older error of the device: the call will say so
        raise probe.Unanswered from error
    return found


def _wait(problem: Problem) -> None:
    if problem.device.type == "cuda":
        probe.wait_for(torch.cuda.current_stream(problem.device))


def _kind(problem: Problem) -> str:
    dim, value_dim = tile_widths(problem)
    form = f" from {problem.coding.format}" if problem.coding else " in fp8" if problem.fp8 else ""
    return f"{problem.kind}{form}, D={dim}, Dv={value_dim}"


def _names(problem: Problem) -> tuple[str, ...]:
    return ("the gradient of query", "of key", "of value") if problem.backward else ("out", "lse")


def _share(ours: Tensor, theirs: Tensor, tolerance: float) -> float:
    """The largest difference, as a share of what is allowed: of its row's largest element and, as a gradient's row may
    be 0, of the mean one. Infinite where one is NaN or Inf and the other is not."""
    ours, theirs = ours.double(), theirs.double()
    is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    size = theirs.masked_fill(~theirs.isfinite(), 0.0).abs()
    allowed = tolerance * (size.amax(-1, keepdim=True) + size.mean())
    share = torch.where(is_same, 0.0, (ours - theirs).abs() / allowed)
    return float(share.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def _small(problem: Problem) -> Iterator[tuple[Problem, Any]]:
    """Two problems of its kind in bf16: causal with grouped heads and ragged edges, and a pack. Of a cache: one."""
    normal = normal_numbers(problem.device)
    dim, value_dim = tile_widths(problem)
    if problem.coding is not None:
        yield _on_a_cache(problem, normal)
        return
    dense = Inputs(normal(2, 300, 4, dim), normal(2, 500, 2, dim), normal(2, 500, 2, value_dim))
    ends = torch.tensor([[0, 130, 130, 387], [0, 100, 150, 450]], device=problem.device, dtype=torch.int32)
    rows = normal(387, 4, dim), normal(450, 2, dim), normal(450, 2, value_dim)
    packed = Inputs(*rows, cu_seqlens_q=ends[0].clone(), cu_seqlens_k=ends[1].clone())
    yield plain_problem(problem, dense), dense
    yield plain_problem(problem, packed, 257, 300, causal=False), packed


def plain_problem(like: Problem, inputs: Inputs, q_len: int = 0, k_len: int = 0, causal: bool = True) -> Problem:
    """That of some inputs, in the direction and precision of another problem."""
    scale = inputs.query.shape[-1] ** -0.5
    stated = state_problem(inputs, q_len, k_len, causal, (-1, -1), 0.0, scale, 0.0, deterministic=False)
    return stated.replace(backward=like.backward, fp8=like.fp8)


def _on_a_cache(problem: Problem, normal: Callable[..., Tensor]) -> tuple[Problem, DecodeInputs]:
    """One query for each row of a cache in the format of a problem's, a full row and a short one."""
    assert problem.coding is not None
    format, group, residual, tokens, heads = problem.coding.format, 64, 128, 512, 2
    sizes = tile_widths(problem)
    key, value = (
        quantize(normal(2, tokens, heads, size), format, dim, group, scale_dtype=torch.float16)
        for size, dim in zip(sizes, (TOKENS, CHANNELS), strict=True)
    )
    key_window, value_window = (normal(2, window_slots(residual, group), heads, size) for size in sizes)
    lengths = torch.tensor([tokens + residual, 200], device=problem.device, dtype=torch.int32)
    cache = QuantizedKV(key, value, key_window, value_window, lengths, residual)
    query = normal(2, 1, 4 * heads, sizes[0])
    stated = decode_problem(query, cache, window=Window(right=0), scores=Scores(sizes[0] ** -0.5))
    here = problem.hardware._asdict()
    return stated.replace(**here), DecodeInputs(query, cache, return_lse=True)


def normal_numbers(device: torch.device, seed: int = 0) -> Callable[..., Tensor]:
    """Normal numbers that leave torch's own generators alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)


def saved_for_backward(portable: Backend, problem: Problem, inputs: Inputs) -> tuple[Tensor | None, ...]:
    """What a backward reads beside the inputs: out, lse and the gradients of both."""
    forward = problem.replace(backward=False)
    out, lse = portable.forward(forward, inputs, portable.configure(forward))
    return out, lse, normal_numbers(out.device, seed=1)(*out.shape), None


def _compute(backend: Backend, problem: Problem, inputs: Any, saved: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    config = backend.configure(problem)
    if problem.cached:
        return tuple(backend.prepare_decode(problem, inputs, config)(inputs))
    if problem.fp8:
        out, lse = backend.prepare_fp8(problem, inputs, config, False)(inputs, True)
        return (out,) if lse is None else (out, lse)
    if problem.backward:
        grads = backend.backward(problem, inputs, config, *saved, wanted=Wanted())
        return tuple(grad for grad in grads[:3] if grad is not None)
    return backend.forward(problem, inputs, config)
