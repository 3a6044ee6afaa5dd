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
from .tuning.decode import DecodeProblem


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


def _gluon_reasons(problem: Problem | DecodeProblem) -> tuple[tuple[bool, str], ...]:
    """What no Gluon kernel can do, each with whether it is so."""
    return (
        (problem.device.type != "cuda", f"it runs on CUDA devices, not on {problem.device.type}"),
        (
            problem.device.type == "cuda" and problem.arch != 90,
            f"it is for Hopper, compute capability 9.0, not {problem.arch / 10}",
        ),
        (
            triton_release() not in HOPPER_TRITON,
            f"it is enabled for Triton {', '.join(HOPPER_TRITON)}; found {triton_release()}",
        ),
    )


FP8_HEAD_DIMS = tuple(fp8_tuning.TRITON)


def _fp8_reasons(problem: Problem) -> tuple[tuple[bool, str], ...]:
    """What nobody computes in FP8, each with whether it is so."""
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
        (problem.backward, "FP8 is for inference and has no backward"),
        (problem.partial, "in FP8 it computes whole calls, not partial states"),
        (problem.dtype not in (torch.float16, torch.bfloat16), "codes of FP8 are made of float16 and bfloat16"),
        (
            dims[0] != dims[1] or dims[0] not in FP8_HEAD_DIMS,
            f"in FP8 it takes equal head dims of 64, 128 and 256, not {dims}",
        ),
        (bool(asked), f"in FP8 it has no {', '.join(asked)}"),
        (problem.q_stride != 1 or problem.k_stride != 1, "in FP8 it takes positions one after another"),
        (problem.last_position >= 1 << 30, "it counts positions in 32 bits, up to 2**30"),
    )


def why_no_fp8_tile(forced: Mapping[str, int]) -> tuple[str, ...]:
    """Why a caller cannot force these fields of a configuration on a kernel of FP8."""
    from .kernels.fp8_layout import BLOCK

    too_large = max(forced.get(side, 0) for side in ("block_m", "block_n")) > BLOCK
    return (f"in FP8 a tile has at most the {BLOCK} rows of a scale",) if too_large else ()


def _gluon_fp8_why_not(problem: Problem) -> tuple[str, ...]:
    not_positive = (problem.scale <= 0, f"its softmax multiplies with a scale above 0, not {problem.scale:g}")
    reasons = (*_gluon_reasons(problem), *_fp8_reasons(problem), not_positive)
    return tuple(reason for applies, reason in reasons if applies)


def _triton_fp8_why_not(problem: Problem) -> tuple[str, ...]:
    on_gpu, hint = problem.device.type == "cuda", _interpreter_hint(problem)
    reasons = (
        (not on_gpu and not interpreting(), f"it runs on CUDA devices, not on {problem.device.type}{hint}"),
        (
            on_gpu and problem.arch < 89,
            f"products in FP8 need compute capability 8.9 or newer, not {problem.arch / 10}",
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
            "gradients of ALiBi slopes and sinks are sums over rows, for which Triton's backward has an exact delta; "
            "slopes and sinks that want none run here",
        ),
        (
            problem.backward and widths[0] != widths[1],
            f"its backward takes head dims whose tiles are equally wide, not {dims}",
        ),
        (
            problem.backward and problem.deterministic and widths[0] > 128,
            f"its backward adds to dQ in one order up to D 128, not at {problem.head_dim}",
        ),
        (problem.dtype not in (torch.float16, torch.bfloat16), "it multiplies float16 and bfloat16 only"),
        (problem.last_position >= 1 << 30, "it counts positions in 32 bits, up to 2**30"),
        (
            any(not 32 < dim <= 256 for dim in dims) or widths not in gluon_tuning.WIDTHS,
            "it takes head dims from 33 to 256 with equally wide tiles, or values of 65 to 128 beside 129 to 256, "
            f"not {dims}",
        ),
        (problem.mask or problem.bias is not None, "masks and biases are read by the Triton kernel"),
        (problem.q_stride != 1 or problem.k_stride != 1, "it takes positions one after another"),
        (not problem.addressable, "TMA reads rows that start on 16 bytes and lie a multiple of 16 bytes apart"),
        (problem.empty, "there is nothing to compute"),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _gluon_why_named_only(problem: Problem) -> tuple[str, ...]:
    if problem.fp8:
        return ()
    if triton_tuning.few_queries(problem):
        return ("few queries against many keys are split by the Triton kernel",)
    if gluon_tuning.short(problem):
        return ("the call is so short that the host decides, which has less to do for the Triton kernel",)
    if problem.backward and (problem.softcap or problem.dropout_p) and gluon_tuning.tile_widths(problem)[0] <= 64:
        return ("up to D 64 softcap and dropout fill its registers, and Triton's backward is the faster",)
    return ()


@cache
def triton_release() -> str:
    """The installed Triton's release, such as "3.6". Plans depend on it."""
    try:
        found = version("triton")
    except PackageNotFoundError:  # the module of another package: triton-windows, pytorch-triton-rocm
        found = str(import_module("triton").__version__)
    return ".".join(found.split(".")[:2])


def _triton_reasons(problem: Problem | DecodeProblem) -> tuple[tuple[bool, str], ...]:
    """What no Triton kernel can do, each with whether it is so."""
    on_gpu, hint = problem.device.type == "cuda", _interpreter_hint(problem)
    return (
        (not on_gpu and not interpreting(), f"it runs on CUDA devices, not on {problem.device.type}{hint}"),
        (on_gpu and 0 < problem.arch < 80, f"it needs compute capability 8.0 or newer, not {problem.arch / 10}"),
        (problem.dtype is torch.float64, "it computes in fp32 and takes no float64"),
    )


def _interpreter_hint(problem: Problem | DecodeProblem) -> str:
    return " (for tests: TRITON_INTERPRET=1, set before Triton is imported)" if problem.device.type == "cpu" else ""


def _triton_why_not(problem: Problem) -> tuple[str, ...]:
    if not HAS_TRITON:
        return ("Triton is not installed",)
    if problem.fp8:
        return _triton_fp8_why_not(problem)
    dims = (problem.head_dim, problem.value_dim)
    reasons = (
        *_triton_reasons(problem),
        (problem.last_position >= 1 << 30, "it counts positions in 32 bits, up to 2**30"),
        (
            any(not 0 < dim <= 256 for dim in dims),
            f"it takes head dims from 1 to 256, not {dims}",
        ),
        (problem.q_heads == 0, "there is no head to compute"),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _triton_why_named_only(problem: Problem | DecodeProblem) -> tuple[str, ...]:
    if problem.device.type == "cpu":
        return ("its interpreter is for tests; name it to use it",)
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
        return ("it computes in the dtypes it is given; FP8 needs Triton and a GPU of compute capability 8.9 or newer",)
    return ()


def _reference_why_not(problem: Problem) -> tuple[str, ...]:
    if problem.fp8:
        return tuple(reason for applies, reason in _fp8_reasons(problem) if applies)
    if problem.partial:
        return ("it computes whole calls, not partial states",)
    return ()


def _reference_why_named_only(problem: Problem) -> tuple[str, ...]:
    if problem.fp8:
        return ("it is dense, in fp64, for tests and trials; name it to use it",)
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
        lambda problem: "dense, codes as fp64" if problem.fp8 else "dense, fp64",
        _reference_why_named_only,
    ),
)
BY_NAME = {backend.name: backend for backend in BACKENDS}
AUTO = "auto"
COMPILED = ("gluon", "triton")
"""The backends that compile kernels."""


class Decoder(NamedTuple):
    """A backend that reads caches. The second argument is the number of splits that was asked for, if any."""

    why_not: Callable[[DecodeProblem, int | None], tuple[str, ...]]
    why_named_only: Callable[[DecodeProblem], tuple[str, ...]]
    configure: Callable[[DecodeProblem, int | None, bool], Any]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _codes_why_not(problem: DecodeProblem) -> tuple[tuple[bool, str], ...]:
    """What its kernel for codes cannot do, each with whether it is so."""
    coding = problem.coding
    if coding is None:
        return ()
    planes = 4 if coding.format == "int4" else 2
    dims = (problem.value_dim,) if coding.keys_per_channel else (problem.head_dim, problem.value_dim)
    cut = sorted({dim // planes for dim in dims if dim > coding.group and coding.group % (dim // planes)})
    return (
        (problem.dtype.itemsize != 2, "it multiplies codes as float16, too coarse for a cache of float32"),
        (
            coding.format == "fp8" and problem.device.type == "cuda" and 0 < problem.arch < 89,
            f"it converts fp8 from compute capability 8.9 on, not {problem.arch / 10}",
        ),
        (
            coding.scale_dtype is not torch.float16,
            f"it reads scales of float16, not {_name(coding.scale_dtype)}",
        ),
        (coding.values_per_channel, 'it reads values with scales per token, not "channel"'),
        (coding.group not in (16, 32, 64, 128), f"it reads groups of 16, 32, 64 or 128, not {coding.group}"),
        (problem.page % coding.group != 0, f"it reads pages of whole groups of {coding.group}, not {problem.page}"),
        (
            bool(cut),
            f"a scale per token of {coding.format} serves {', '.join(map(str, cut))} channels or a multiple of them, "
            f"or all, not {coding.group}",
        ),
        (not coding.in_order, "it reads scales per token that lie side by side in memory, as quantize_kv lays them"),
    )


def _gluon_decode_why_not(problem: DecodeProblem, num_splits: int | None) -> tuple[str, ...]:
    if not HAS_TRITON:
        return ("Triton is not installed",)
    coding, dims = problem.coding, (problem.head_dim, problem.value_dim)
    if coding is None:
        return ("it reads quantised caches",)
    planes = 4 if coding.format == "int4" else 2
    reasons = (
        *_gluon_reasons(problem),
        (problem.dtype.itemsize != 2, "it multiplies codes as float16, too coarse for a cache of float32"),
        (
            any(dim not in (64, 128) for dim in dims),
            f"it takes head dims of 64 and 128, not {dims}",
        ),
        (num_splits == 1, "it computes the latest tokens in a split of their own: num_splits is at least 2"),
        (problem.rows > 8, f"it takes up to 8 rows, queries of heads that share keys, not {problem.rows}"),
        (not coding.keys_per_channel or coding.values_per_channel, "it reads keys per channel and values per token"),
        (coding.scale_dtype is not torch.float16, f"it reads scales of float16, not {_name(coding.scale_dtype)}"),
        (
            coding.group not in (32, 64, 128) or problem.value_dim // planes > coding.group,
            f"it reads groups of 32, 64 or 128, and at least {problem.value_dim // planes}, not {coding.group}",
        ),
        (problem.page % coding.group != 0, f"it reads pages of whole groups of {coding.group}, not {problem.page}"),
        (
            not coding.in_order or not coding.aligned,
            "it reads codes and scales as quantize_kv lays them, in rows that start on 16 bytes",
        ),
        (problem.capacity >= 1 << 30, "it counts positions in 32 bits, up to 2**30"),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _triton_decode_why_not(problem: DecodeProblem, num_splits: int | None) -> tuple[str, ...]:
    if not HAS_TRITON:
        return ("Triton is not installed",)
    dims = (problem.head_dim, problem.value_dim)
    reasons = (
        *_triton_reasons(problem),
        (max(dims) > 256, f"it takes head dims up to 256, not {dims}"),
        (problem.capacity >= 1 << 30, "it counts positions in 32 bits, up to 2**30"),
        *_codes_why_not(problem),
    )
    return tuple(reason for applies, reason in reasons if applies)


def _eager_decode_why_not(problem: DecodeProblem, num_splits: int | None) -> tuple[str, ...]:
    if num_splits is not None:
        return ("it streams a row's keys in one pass: leave num_splits at None",)
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
