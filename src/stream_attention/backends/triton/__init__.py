"""The portable GPU kernels in Triton, sm_80 and newer."""

from __future__ import annotations

from typing import Any

import torch

from ...base.problem import Problem, Request
from ...gpu import decode_tuning, paged_tuning
from .. import installed, sdpa_time
from ..base import NO_DECODING, PLAIN, Backend, Reasons, cache_reasons, dims_of, far_positions, fp8_reasons
from . import fp8_tuning, tuning


class Triton(Backend):
    name = "triton"
    kernels = ".triton.kernels"
    decode_kernels = ".triton.decode"
    paged_kernels = ".triton.paged"
    fp8_kernels = ".triton.forward_fp8"
    compiles = True
    forceable = tuning.FORCEABLE
    dim_multiple = 8

    def reasons(self, problem: Problem, request: Request) -> Reasons:
        if problem.cached:
            return ((True, NO_DECODING),) if request.forced else _decode_reasons(problem)
        return _fp8_reasons(problem, request) if problem.fp8 else _reasons(problem)

    def why_named_only(self, problem: Problem) -> tuple[str, ...]:
        if problem.device.type == "cpu":
            return ('the Triton interpreter is for tests; to use it, pass backend="triton"',)
        return sdpa_time.why_leave(problem)

    def configure(self, problem: Problem, request: Request = PLAIN) -> Any:
        if problem.ragged:
            return paged_tuning.configure(problem, request.batch_invariant)
        if problem.cached:
            return decode_tuning.configure(problem, request.num_splits, request.batch_invariant)
        forced: dict[str, Any] = {} if problem.backward else dict(request.forced)
        if problem.fp8:
            return fp8_tuning.configure(problem)._replace(**forced)
        if forced:
            return tuning.configure_forward(problem)._replace(max_registers=None, **forced)
        return tuning.configure(problem)


def _on_device(problem: Problem) -> tuple[bool, str]:
    kind = problem.device.type
    hint = " (for tests, set TRITON_INTERPRET=1 before importing Triton)" if kind == "cpu" else ""
    return kind != "cuda" and not installed.interpreting(), f"requires a CUDA device; got {kind}{hint}"


def _on_arch(problem: Problem, least: int, what: str = "", known: bool = True) -> tuple[bool, str]:
    """Refuses older GPUs, and where `known` is False also those of other makers, whose `arch` is 0."""
    is_older = problem.device.type == "cuda" and int(known) <= problem.arch < least
    return is_older, f"{what}requires compute capability {least / 10} or newer; got {problem.arch / 10}"


def _gpu_reasons(problem: Problem) -> Reasons:
    """What no Triton kernel supports but those of FP8."""
    float64 = problem.dtype is torch.float64, "does not support float64"
    return _on_device(problem), _on_arch(problem, 80), float64


def _reasons(problem: Problem) -> Reasons:
    dims = (problem.head_dim, problem.value_dim)
    return (
        *_gpu_reasons(problem),
        far_positions(problem),
        (any(not 0 < dim <= 256 for dim in dims), f"supports head dims from 1 to 256; got {dims_of(problem)}"),
        (problem.q_heads == 0, "does not support inputs without heads"),
        (bool(problem.function), "does not support score functions"),
    )


def _fp8_reasons(problem: Problem, request: Request) -> Reasons:
    from ...base.fp8_layout import BLOCK

    largest = max((size for field, size in request.forced if field in ("block_m", "block_n")), default=0)
    return (
        _on_device(problem),
        _on_arch(problem, 89, "FP8 ", known=False),  # quantising uses PTX
        *fp8_reasons(problem),
        (largest > BLOCK, f"FP8 supports block_m and block_n up to {BLOCK}; got {largest}"),  # rows of a scale
    )


def _decode_reasons(problem: Problem) -> Reasons:
    dims = (problem.head_dim, problem.value_dim)
    return (
        *_gpu_reasons(problem),
        (max(dims) > 256, f"supports head dims up to 256; got {dims_of(problem)}"),
        *cache_reasons(problem),
        _on_arch(problem, 89 if problem.e4m3 else 0, "pages in e4m3 "),
        *_quantised_reasons(problem),
    )


def _quantised_reasons(problem: Problem) -> Reasons:
    """What the kernel for quantised caches does not support."""
    coding = problem.coding
    if coding is None:
        return ()
    planes = 4 if coding.format == "int4" else 2
    dims = (problem.value_dim,) if coding.keys_per_channel else (problem.head_dim, problem.value_dim)
    cut = sorted({dim // planes for dim in dims if dim > coding.group and coding.group % (dim // planes)})
    return (
        _on_arch(problem, 89 if coding.format == "fp8" else 0, "an fp8 cache "),
        (coding.values_per_channel, 'supports only values="token"; got values="channel"'),
        (coding.group not in (16, 32, 64, 128), f"supports only groups of 16, 32, 64 or 128; got {coding.group}"),
        (
            bool(cut),
            f"per-token scales of {coding.format} require a group that is a multiple of {', '.join(map(str, cut))}, "
            f"or at least the head dim; got {coding.group}",
        ),
        (not coding.in_order, "requires contiguous per-token scales, as quantize_kv returns them"),
    )
