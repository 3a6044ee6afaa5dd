"""The Hopper kernels (sm_90) in Gluon, which users know as backend "gluon"."""

from __future__ import annotations

from typing import Any

import torch

from ...base.problem import AUTO, Problem, Request, dtype_name
from ...gpu import decode_tuning
from .. import installed, self_check
from ..base import PLAIN, Backend, Reasons, cache_reasons, dims_of, far_positions, fp8_reasons, load
from . import fp8_tuning, tuning


class Hopper(Backend):
    name = "gluon"
    kernels = ".hopper.kernels"
    decode_kernels = ".hopper.decode_quantized"
    fp8_kernels = ".hopper.forward_fp8_sm90"
    compiles = True
    dim_multiple = 8

    def why_not(self, problem: Problem, request: Request = PLAIN) -> tuple[str, ...]:
        reasons = super().why_not(problem, request)
        if reasons or installed.triton_release() in installed.HOPPER_TRITON:
            return reasons
        if request.backend == AUTO and (left := self.why_named_only(problem)):
            return left  # nothing needs to be checked for it
        reason = self_check.why_not(problem, self)
        return () if reason is None else (reason,)

    def reasons(self, problem: Problem, request: Request) -> Reasons:
        if problem.cached:
            return _decode_reasons(problem, request)
        if problem.fp8:
            not_positive = (problem.scale <= 0, f"FP8 requires a scale above 0; got {problem.scale:g}")
            return (*_gpu_reasons(problem), *fp8_reasons(problem), not_positive)
        return _reasons(problem)

    def why_named_only(self, problem: Problem) -> tuple[str, ...]:
        if problem.fp8 or problem.cached:
            return ()
        if decode_tuning.few_queries(problem):
            return ("calls with few queries and many keys use the split-KV kernel of Triton",)
        if tuning.short(problem):
            return ("the call is short: CPU overhead dominates, and the Triton kernel has less of it",)
        if problem.packed and not problem.backward and problem.q_len <= tuning.ROWS:
            return (f"tiles of sequences of up to {tuning.ROWS} tokens are half empty: the Triton forward is faster",)
        if problem.backward and (problem.softcap or problem.dropout_p) and tuning.tile_widths(problem)[0] <= 64:
            return ("with softcap or dropout at D <= 64 the Triton backward is faster",)
        return ()

    def configure(self, problem: Problem, request: Request = PLAIN) -> Any:
        if problem.cached:
            return decode_tuning.configure_gluon(problem, request.num_splits, request.batch_invariant)
        return fp8_tuning.configure(problem) if problem.fp8 else tuning.configure(problem)

    def prepare_into(self, *call: Any) -> Any:
        return load(self.kernels).prepare_into(*call)


def _gpu_reasons(problem: Problem) -> Reasons:
    """What no Gluon kernel supports."""
    is_cuda = problem.device.type == "cuda"
    is_hopper = is_cuda and problem.arch == 90
    return (
        (not is_cuda, f"requires a CUDA device; got {problem.device.type}"),
        (is_cuda and not is_hopper, f"requires Hopper (compute capability 9.0); got {problem.arch / 10}"),
        (is_hopper and installed.hopper_setting() == "off", "turned off by STREAM_ATTENTION_HOPPER=off"),
    )


def _reasons(problem: Problem) -> Reasons:
    dims, widths = (problem.head_dim, problem.value_dim), tuning.tile_widths(problem)
    return (
        *_gpu_reasons(problem),
        (
            problem.backward and problem.row_grad,
            "backward does not compute gradients of ALiBi slopes or sinks; the Triton backward does",
        ),
        (
            problem.backward and widths[0] != widths[1],
            f"backward requires equal tile widths for D and Dv (64, 128 or 256); got {dims_of(problem)}",
        ),
        (
            problem.backward and problem.deterministic and widths[0] > 128,
            f"deterministic backward supports D up to 128; got {problem.head_dim}",
        ),
        (
            problem.dtype not in (torch.float16, torch.bfloat16),
            f"supports only float16 and bfloat16; got {dtype_name(problem.dtype)}",
        ),
        far_positions(problem),
        (
            any(not 32 < dim <= 256 for dim in dims) or widths not in tuning.WIDTHS,
            "supports head dims from 33 to 256 with equal tile widths for D and Dv (64, 128 or 256), or D from 129 to "
            f"256 with Dv from 65 to 128; got {dims_of(problem)}",
        ),
        (problem.mask or problem.bias is not None, "does not support masks or biases"),
        (bool(problem.function), "does not support score functions"),
        (problem.q_stride != 1 or problem.k_stride != 1, "supports only consecutive positions"),
        (not problem.tma_compatible, "TMA requires 16-byte aligned rows and strides; pass contiguous copies"),
        (problem.empty, "does not support empty inputs"),
    )


def _decode_reasons(problem: Problem, request: Request) -> Reasons:
    coding, dims = problem.coding, (problem.head_dim, problem.value_dim)
    if problem.ragged:
        return ((True, "does not support ragged queries on pages"),)
    if coding is None:
        return ((True, "supports only quantised caches"),)
    planes = 4 if coding.format == "int4" else 2
    rows = decode_tuning.rows(problem)
    return (
        *_gpu_reasons(problem),
        (any(dim not in (64, 128) for dim in dims), f"supports only head dims of 64 and 128; got {dims_of(problem)}"),
        (request.num_splits == 1, "requires num_splits >= 2: the unquantised recent tokens have their own split"),
        (rows > 8, f"supports at most 8 queries per KV head (Tq * Hq / Hkv); got {rows}"),
        (not coding.keys_per_channel or coding.values_per_channel, 'supports only keys="channel" with values="token"'),
        (
            coding.group not in (32, 64, 128) or problem.value_dim // planes > coding.group,
            f"supports only groups of 32, 64 or 128, at least {problem.value_dim // planes}; got {coding.group}",
        ),
        (
            not coding.in_order or not coding.aligned,
            "requires quantised values and scales as quantize_kv returns them, in 16-byte aligned rows",
        ),
        *cache_reasons(problem),
    )
