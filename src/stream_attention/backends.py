"""The backends, in order of preference.

Dispatch is data: each row says why it cannot do a problem (nothing: it can), how it would be configured, and where its
kernels are. Asking needs no kernel module, so planning works on a machine that lacks what a backend needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device import arch
from .problem import Backward, Forward, Gradients, Inputs, Problem, Wanted, distinct
from .tuning import decode as decode_tuning
from .tuning import eager as eager_tuning
from .tuning import fp8 as fp8_tuning
from .tuning import gluon as gluon_tuning
from .tuning import triton as triton_tuning


class Backend(NamedTuple):
    name: str
    module: str  # has prepare(problem, inputs, config) and, unless why_not says otherwise, prepare_backward
    why_not: Callable[[Problem], tuple[str, ...]]  # sentences; empty if it can
    configure: Callable[[Problem], Any]
    why_named_only: Callable[[Problem], tuple[str, ...]] = lambda problem: ()  # why "auto" leaves it although it can
    forceable: Mapping[str, tuple[int, ...]] = {}  # fields of a forward's tiles that a caller may set, with the values
    tiles: Callable[[Problem], Any] = lambda problem: None  # the configuration of a forward that has those fields
    dim_multiple: int = 1  # head dims are padded with zeros to a multiple of this before the kernel sees them
    fp8_module: str = ""  # has prepare_fp8(problem, queries, keys, cu_seqlens_q, cu_seqlens_k, config)

    def load(self) -> ModuleType:
        """The kernel module, imported on first use."""
        return _import(self.module)

    def load_fp8(self) -> ModuleType:
        """That of FP8."""
        return _import(self.fp8_module)

    def prepare(self, problem: Problem, inputs: Inputs, config: Any) -> Forward:
        """The forward of every call whose tensors lie as these `inputs` do. Keeps none of them."""
        return self.load().prepare(problem, Inputs._make(distinct(*inputs)), config)

    def prepare_backward(
        self, problem: Problem, inputs: Inputs, config: Any, *saved: Tensor | None, wanted: Wanted
    ) -> Backward:
        """The backward of such calls; `saved` are out, lse and the gradients of both. LSEs are contiguous."""
        apart = distinct(*inputs, *saved)
        count = len(inputs)
        return self.load().prepare_backward(problem, Inputs._make(apart[:count]), config, *apart[count:], wanted)

    def forward(self, problem: Problem, inputs: Inputs, config: Any) -> tuple[Tensor, Tensor]:
        """Prepare and compute `(out, lse)`."""
        out, lse = self.prepare(problem, inputs, config)(inputs, True)
        assert lse is not None
        return out, lse

    def backward(
        self, problem: Problem, inputs: Inputs, config: Any, *saved: Tensor | None, wanted: Wanted
    ) -> Gradients:
        """Prepare and compute the gradients that are wanted."""
        return self.prepare_backward(problem, inputs, config, *saved, wanted=wanted)(inputs, *saved)


@cache
def _import(module: str) -> ModuleType:
    return import_module(module, __package__)


HAS_TRITON = find_spec("triton") is not None
"""Looked up once: torch.compile of torch 2.11 cannot trace the search."""

HOPPER_TRITON = ("3.6", "3.7", "3.8", "3.9")
"""The Triton releases with which the Gluon kernels ran on a GPU. Gluon is experimental: others may differ."""

SEE_INFO = "; run `stream-attention info`"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(problem: Problem) -> str:
    return f"D={problem.head_dim}, Dv={problem.value_dim}"


def _gluon_reasons(problem: Problem) -> tuple[tuple[bool, str], ...]:
    """What no Gluon kernel supports, each with whether it applies."""
    return (
        (problem.device.type != "cuda", f"requires a CUDA device; got {problem.device.type}"),
        (
            problem.device.type == "cuda" and problem.arch != 90,
            f"requires Hopper (compute capability 9.0); got {problem.arch / 10}",
        ),
        (
            triton_release() not in HOPPER_TRITON,
            f"enabled only for Triton {HOPPER_TRITON[0]}-{HOPPER_TRITON[-1]}; found {triton_release()}{SEE_INFO}",
        ),
    )


FP8_HEAD_DIMS = tuple(fp8_tuning.TRITON)


def _fp8_reasons(problem: Problem) -> tuple[tuple[bool, str], ...]:
    """What no backend supports in FP8, each with whether it applies."""
    features = {
        "masks": problem.mask,
        "biases": problem.bias is not None,
        "ALiBi": problem.alibi,
        "sinks": problem.sink,
        "softcap": problem.softcap,
        "dropout": problem.dropout_p,
    }
    asked = [name for name, used in features.items() if used]
    dims = (problem.head_dim, problem.value_dim)
    return (
        (problem.backward, "FP8 supports inference only; it has no backward"),
        (problem.partial, "FP8 does not support partial results"),
        (
            problem.dtype not in (torch.float16, torch.bfloat16),
            f"FP8 supports only float16 and bfloat16 inputs; got {_name(problem.dtype)}",
        ),
        (
            dims[0] != dims[1] or dims[0] not in FP8_HEAD_DIMS,
            f"FP8 supports only D = Dv of 64, 128 or 256; got {_dims(problem)}",
        ),
        (bool(asked), f"FP8 does not support {', '.join(asked)}"),
        (problem.q_stride != 1 or problem.k_stride != 1, "FP8 supports only consecutive positions"),
        (problem.last_position >= 1 << 30, f"supports positions below 2**30; got {problem.last_position}"),
    )


def why_no_fp8_tile(forced: Mapping[str, int]) -> tuple[str, ...]:
    """Why a caller cannot force these fields of a configuration on a kernel of FP8."""
    from .kernels.fp8_layout import BLOCK

    largest = max(forced.get(side, 0) for side in ("block_m", "block_n"))
    return (f"FP8 supports block_m and block_n up to {BLOCK}; got {largest}",) if largest > BLOCK else ()


def _gluon_fp8_why_not(problem: Problem) -> tuple[str, ...]:
    not_positive = (problem.scale <= 0, f"FP8 requires a scale above 0; got {problem.scale:g}")
    reasons = (*_gluon_reasons(problem), *_fp8_reasons(problem), not_positive)
    return tuple(reason for applies, reason in reasons if applies)


def _triton_fp8_why_not(problem: Problem) -> tuple[str, ...]:
    on_gpu, hint = problem.device.type == "cuda", _interpreter_hint(problem)
    reasons = (
        (not on_gpu and not interpreting(), f"requires a CUDA device; got {problem.device.type}{hint}"),
        (
            on_gpu and problem.arch < 89,
            f"FP8 requires compute capability 8.9 or newer; got {problem.arch / 10}",
        ),
        *_fp8_reasons(problem),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _gluon_why_not(problem: Problem) -> tuple[str, ...]:
    if not HAS_TRITON:
        return ("Triton is not installed",)
    if problem.fp8:
        return _gluon_fp8_why_not(problem)
    dims = (problem.head_dim, problem.value_dim)
    widths = gluon_tuning.tile_widths(problem)
    reasons = (
        *_gluon_reasons(problem),
        (
            problem.backward and problem.row_grad,
            "backward does not compute gradients of ALiBi slopes or sinks; the Triton backward does",
        ),
        (
            problem.backward and widths[0] != widths[1],
            f"backward requires equal tile widths for D and Dv (64, 128 or 256); got {_dims(problem)}",
        ),
        (
            problem.backward and problem.deterministic and widths[0] > 128,
            f"deterministic backward supports D up to 128; got {problem.head_dim}",
        ),
        (
            problem.dtype not in (torch.float16, torch.bfloat16),
            f"supports only float16 and bfloat16; got {_name(problem.dtype)}",
        ),
        (problem.last_position >= 1 << 30, f"supports positions below 2**30; got {problem.last_position}"),
        (
            any(not 32 < dim <= 256 for dim in dims) or widths not in gluon_tuning.WIDTHS,
            "supports head dims from 33 to 256 with equal tile widths for D and Dv (64, 128 or 256), or D from 129 to "
            f"256 with Dv from 65 to 128; got {_dims(problem)}",
        ),
        (problem.mask or problem.bias is not None, "does not support masks or biases"),
        (problem.q_stride != 1 or problem.k_stride != 1, "supports only consecutive positions"),
        (not problem.addressable, "TMA requires 16-byte aligned rows and strides; pass contiguous copies"),
        (problem.empty, "does not support empty inputs"),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _gluon_why_named_only(problem: Problem) -> tuple[str, ...]:
    if problem.fp8:
        return ()
    if triton_tuning.few_queries(problem):
        return ("calls with few queries and many keys use the split-KV kernel of Triton",)
    if gluon_tuning.short(problem):
        return ("the call is short: CPU overhead dominates, and the Triton kernel has less of it",)
    if problem.backward and (problem.softcap or problem.dropout_p) and gluon_tuning.tile_widths(problem)[0] <= 64:
        return ("with softcap or dropout at D <= 64 the Triton backward is faster",)
    return ()


@cache
def triton_release() -> str:
    """The installed Triton's release, such as "3.6". Plans depend on it."""
    try:
        found = version("triton")
    except PackageNotFoundError:  # the module of another package: triton-windows, pytorch-triton-rocm
        found = str(import_module("triton").__version__)
    return ".".join(found.split(".")[:2])


def _triton_reasons(problem: Problem) -> tuple[tuple[bool, str], ...]:
    """What no Triton kernel supports, each with whether it applies."""
    on_gpu, hint = problem.device.type == "cuda", _interpreter_hint(problem)
    return (
        (not on_gpu and not interpreting(), f"requires a CUDA device; got {problem.device.type}{hint}"),
        (on_gpu and 0 < problem.arch < 80, f"requires compute capability 8.0 or newer; got {problem.arch / 10}"),
        (problem.dtype is torch.float64, "does not support float64"),
    )


def _interpreter_hint(problem: Problem) -> str:
    return " (for tests, set TRITON_INTERPRET=1 before importing Triton)" if problem.device.type == "cpu" else ""


def _triton_why_not(problem: Problem) -> tuple[str, ...]:
    if not HAS_TRITON:
        return ("Triton is not installed",)
    if problem.fp8:
        return _triton_fp8_why_not(problem)
    dims = (problem.head_dim, problem.value_dim)
    reasons = (
        *_triton_reasons(problem),
        (problem.last_position >= 1 << 30, f"supports positions below 2**30; got {problem.last_position}"),
        (
            any(not 0 < dim <= 256 for dim in dims),
            f"supports head dims from 1 to 256; got {_dims(problem)}",
        ),
        (problem.q_heads == 0, "does not support inputs without heads"),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _triton_why_named_only(problem: Problem) -> tuple[str, ...]:
    if problem.device.type == "cpu":
        return ('the Triton interpreter is for tests; to use it, pass backend="triton"',)
    return ()


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: a GPU that they are for, or a CPU under the interpreter."""
    if not HAS_TRITON:
        return False
    if device.type == "cuda":
        return not 0 < arch(device) < 80
    return device.type == "cpu" and interpreting()


def makes_fp8_codes(device: torch.device) -> bool:
    """Whether a kernel makes codes of FP8 on a device; elsewhere torch does."""
    return device.type == "cuda" and arch(device) >= 89 and HAS_TRITON


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")  # as Triton reads it


def _eager_why_not(problem: Problem) -> tuple[str, ...]:
    if problem.fp8:
        return ("does not support FP8; FP8 requires Triton and a GPU with compute capability 8.9 or newer",)
    return ()


def _reference_why_not(problem: Problem) -> tuple[str, ...]:
    if problem.fp8:
        return tuple(reason for applies, reason in _fp8_reasons(problem) if applies)
    if problem.partial:
        return ("does not support partial results",)
    return ()


def _reference_why_named_only(problem: Problem) -> tuple[str, ...]:
    if problem.fp8:
        return ('computes densely in fp64, for tests; to use it, pass backend="reference"',)
    return ()


def _or_in_fp8(
    configure: Callable[[Problem], Any], configure_fp8: Callable[[Problem], Any]
) -> Callable[[Problem], Any]:
    return lambda problem: (configure_fp8 if problem.fp8 else configure)(problem)


BACKENDS: tuple[Backend, ...] = (
    Backend(
        "gluon",
        ".kernels.gluon",
        _gluon_why_not,
        _or_in_fp8(gluon_tuning.configure, fp8_tuning.configure_gluon),
        _gluon_why_named_only,
        dim_multiple=8,
        fp8_module=".kernels.gluon.forward_fp8_sm90",
    ),
    Backend(
        "triton",
        ".kernels.triton",
        _triton_why_not,
        _or_in_fp8(triton_tuning.configure, fp8_tuning.configure_triton),
        _triton_why_named_only,
        triton_tuning.FORCEABLE,
        _or_in_fp8(triton_tuning.configure_forward, fp8_tuning.configure_triton),
        dim_multiple=8,
        fp8_module=".kernels.triton.forward_fp8",
    ),
    Backend("eager", ".kernels.eager", _eager_why_not, eager_tuning.configure),
    Backend(
        "reference",
        ".kernels.reference",
        _reference_why_not,
        lambda problem: "dense, quantised values in fp64" if problem.fp8 else "dense, fp64",
        _reference_why_named_only,
    ),
)
BY_NAME = {backend.name: backend for backend in BACKENDS}
AUTO = "auto"
COMPILED = ("gluon", "triton")
"""The backends that compile kernels."""


class Decoder(NamedTuple):
    """A backend that reads caches. The second argument is the number of splits that was asked for, if any."""

    why_not: Callable[[Problem, int | None], tuple[str, ...]]
    why_named_only: Callable[[Problem], tuple[str, ...]]
    configure: Callable[[Problem, int | None, bool], Any]


def _quantized_why_not(problem: Problem) -> tuple[tuple[bool, str], ...]:
    """What Triton's kernel for quantised caches does not support, each with whether it applies."""
    coding = problem.coding
    if coding is None:
        return ()
    planes = 4 if coding.format == "int4" else 2
    dims = (problem.value_dim,) if coding.keys_per_channel else (problem.head_dim, problem.value_dim)
    cut = sorted({dim // planes for dim in dims if dim > coding.group and coding.group % (dim // planes)})
    return (
        (problem.dtype.itemsize != 2, f"supports only float16 and bfloat16 caches; got {_name(problem.dtype)}"),
        (
            coding.format == "fp8" and problem.device.type == "cuda" and 0 < problem.arch < 89,
            f"an fp8 cache requires compute capability 8.9 or newer; got {problem.arch / 10}",
        ),
        (
            coding.scale_dtype is not torch.float16,
            f"supports only float16 scales; got {_name(coding.scale_dtype)}",
        ),
        (coding.values_per_channel, 'supports only values="token"; got values="channel"'),
        (coding.group not in (16, 32, 64, 128), f"supports only groups of 16, 32, 64 or 128; got {coding.group}"),
        (
            problem.page % coding.group != 0,
            f"requires pages of a multiple of {coding.group} tokens; got {problem.page}",
        ),
        (
            bool(cut),
            f"per-token scales of {coding.format} require a group that is a multiple of {', '.join(map(str, cut))}, "
            f"or at least the head dim; got {coding.group}",
        ),
        (not coding.in_order, "requires contiguous per-token scales, as quantize_kv returns them"),
    )


def _gluon_decode_why_not(problem: Problem, num_splits: int | None) -> tuple[str, ...]:
    if not HAS_TRITON:
        return ("Triton is not installed",)
    coding, dims = problem.coding, (problem.head_dim, problem.value_dim)
    if coding is None:
        return ("supports only quantised caches",)
    planes = 4 if coding.format == "int4" else 2
    reasons = (
        *_gluon_reasons(problem),
        (problem.dtype.itemsize != 2, f"supports only float16 and bfloat16 caches; got {_name(problem.dtype)}"),
        (
            any(dim not in (64, 128) for dim in dims),
            f"supports only head dims of 64 and 128; got {_dims(problem)}",
        ),
        (num_splits == 1, "requires num_splits >= 2: the unquantised recent tokens have their own split"),
        (
            decode_tuning.rows(problem) > 8,
            f"supports at most 8 queries per KV head (Tq * Hq / Hkv); got {decode_tuning.rows(problem)}",
        ),
        (not coding.keys_per_channel or coding.values_per_channel, 'supports only keys="channel" with values="token"'),
        (coding.scale_dtype is not torch.float16, f"supports only float16 scales; got {_name(coding.scale_dtype)}"),
        (
            coding.group not in (32, 64, 128) or problem.value_dim // planes > coding.group,
            f"supports only groups of 32, 64 or 128, at least {problem.value_dim // planes}; got {coding.group}",
        ),
        (
            problem.page % coding.group != 0,
            f"requires pages of a multiple of {coding.group} tokens; got {problem.page}",
        ),
        (
            not coding.in_order or not coding.aligned,
            "requires quantised values and scales as quantize_kv returns them, in 16-byte aligned rows",
        ),
        (problem.k_len >= 1 << 30, f"supports a capacity below 2**30 tokens; got {problem.k_len}"),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _triton_decode_why_not(problem: Problem, num_splits: int | None) -> tuple[str, ...]:
    if not HAS_TRITON:
        return ("Triton is not installed",)
    dims = (problem.head_dim, problem.value_dim)
    reasons = (
        *_triton_reasons(problem),
        (max(dims) > 256, f"supports head dims up to 256; got {_dims(problem)}"),
        (problem.k_len >= 1 << 30, f"supports a capacity below 2**30 tokens; got {problem.k_len}"),
        *_quantized_why_not(problem),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _eager_decode_why_not(problem: Problem, num_splits: int | None) -> tuple[str, ...]:
    if num_splits is not None:
        return ("does not support num_splits: leave num_splits at None",)
    return ()


DECODERS = {
    "gluon": Decoder(_gluon_decode_why_not, lambda problem: (), decode_tuning.configure_gluon),
    "triton": Decoder(
        _triton_decode_why_not,
        _triton_why_named_only,
        decode_tuning.configure,
    ),
    "eager": Decoder(_eager_decode_why_not, lambda problem: (), decode_tuning.configure_eager),
}
"""In order of preference."""
