"""What a backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.fp8_layout import HEAD_DIMS
from ..base.problem import (
    Backward,
    DecodeInputs,
    Forward,
    Gradients,
    Inputs,
    PagedInputs,
    Problem,
    Request,
    Wanted,
    distinct,
    dtype_name,
)
from ..base.state import Saved
from . import installed

PLAIN = Request()
NO_DECODING = "does not support decoding from a KV cache"

Reasons = tuple[tuple[bool, str], ...]
"""Sentences, each with whether it applies."""


class Backend(ABC):
    """One way to compute problems: why it cannot do one, how it would be configured, and where its kernels are.

    Asking needs no kernel module, so planning works on a machine that lacks what a backend needs.
    """

    name: ClassVar[str]
    kernels: ClassVar[str | None] = None  # module with prepare and prepare_backward
    decode_kernels: ClassVar[str | None] = None  # module with prepare_decode
    paged_kernels: ClassVar[str | None] = None  # module with prepare_paged
    fp8_kernels: ClassVar[str | None] = None  # module with prepare_fp8
    compiles: ClassVar[bool] = False  # launches kernels that it compiles; else it calls torch's ops
    forceable: ClassVar[Mapping[str, tuple[int, ...]]] = {}  # fields of a forward's tiles that a caller may set
    dim_multiple: ClassVar[int] = 1  # head dims are padded with zeros to a multiple of this before the kernel sees them

    def why_not(self, problem: Problem, request: Request = PLAIN) -> tuple[str, ...]:
        """Why it cannot compute a problem as requested, in sentences; empty if it can."""
        if self.compiles and not installed.HAS_TRITON:
            return (installed.NO_TRITON,)
        return tuple(reason for applies, reason in self.reasons(problem, request) if applies)

    @abstractmethod
    def reasons(self, problem: Problem, request: Request) -> Reasons:
        """What it does not support, each with whether it applies."""

    def why_named_only(self, problem: Problem) -> tuple[str, ...]:
        """Why "auto" leaves a problem that it can do."""
        return ()

    @abstractmethod
    def configure(self, problem: Problem, request: Request = PLAIN) -> Any:
        """The configuration for a problem that it can do: a value that can be printed."""

    def prepare(self, problem: Problem, inputs: Inputs, config: Any) -> Forward:
        """The forward of every call whose tensors lie as these `inputs` do. Keeps none of them."""
        return load(self.kernels).prepare(problem, Inputs._make(distinct(*inputs)), config)

    def prepare_backward(
        self, problem: Problem, inputs: Inputs, config: Any, *saved: Tensor | None, wanted: Wanted
    ) -> Backward:
        """The backward of such calls; `saved` are out, lse and the gradients of both. LSEs are contiguous."""
        apart = distinct(*inputs, *saved)
        count = len(inputs)
        inputs = Inputs._make(apart[:count])
        return load(self.kernels).prepare_backward(problem, inputs, config, Saved._make(apart[count:]), wanted)

    def prepare_into(self, *call: Any) -> Callable[[Inputs, Tensor, Tensor], None] | None:
        """The forward of a partial problem that writes its state `(out, lse)` where that lies, or merges it into the
        one that is there; None if its kernels cannot. `call` is problem, inputs, config, out, lse, and whether a state
        is there. Keeps no tensor."""
        return None

    def prepare_decode(self, problem: Problem, inputs: DecodeInputs, config: Any) -> Any:
        """The call on every cache whose tensors, like the others of the call, lie as these do: a function of its inputs
        and, where they are known, of the addresses of the cache's tensors. Keeps none of them."""
        return load(self.decode_kernels).prepare_decode(problem, inputs, config)

    def prepare_paged(self, problem: Problem, inputs: PagedInputs, config: Any) -> Any:
        """The call on every pool of pages that lies as this one does, a function of its inputs. Keeps none of them."""
        return load(self.paged_kernels).prepare_paged(
            problem, PagedInputs._make((*distinct(*inputs[:-1]), inputs[-1])), config
        )

    def prepare_fp8(self, *call: Any) -> Forward:
        """`prepare` in FP8, of inputs whose keys and values may be codes. `call`: problem, inputs, config, and whether
        queries and keys are rotated."""
        return load(self.fp8_kernels).prepare_fp8(*call)

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
def load(kernels: str | None) -> ModuleType:
    """A module of kernels, imported on first use."""
    assert kernels is not None, "why_not said that it has none"
    return import_module(kernels, __package__)


def dims_of(problem: Problem) -> str:
    return f"D={problem.head_dim}, Dv={problem.value_dim}"


def far_positions(problem: Problem) -> tuple[bool, str]:
    return problem.last_position >= 1 << 30, f"supports positions below 2**30; got {problem.last_position}"


def cache_reasons(problem: Problem) -> Reasons:
    """What no kernel supports of a cache."""
    large = problem.k_len >= 1 << 30, f"supports a capacity below 2**30 tokens; got {problem.k_len}"
    if problem.coding is None:
        return (large,)
    group, scale_dtype = problem.coding.group, problem.coding.scale_dtype
    return (
        large,
        (problem.dtype.itemsize != 2, f"supports only float16 and bfloat16 caches; got {dtype_name(problem.dtype)}"),
        (scale_dtype is not torch.float16, f"supports only float16 scales; got {dtype_name(scale_dtype)}"),
        (problem.page % group != 0, f"requires pages of a multiple of {group} tokens; got {problem.page}"),
    )


def fp8_reasons(problem: Problem) -> Reasons:
    """What no backend supports in FP8, each with whether it applies."""
    features = {
        "masks": problem.mask,
        "biases": problem.bias is not None,
        "ALiBi": problem.alibi,
        "sinks": problem.sink,
        "softcap": problem.softcap,
        "score functions": problem.function,
        "dropout": problem.dropout_p,
    }
    asked = [name for name, used in features.items() if used]
    dims = (problem.head_dim, problem.value_dim)
    return (
        (problem.backward, "FP8 supports inference only; it has no backward"),
        (problem.partial, "FP8 does not support partial results"),
        (
            problem.dtype not in (torch.float16, torch.bfloat16),
            f"FP8 supports only float16 and bfloat16 inputs; got {dtype_name(problem.dtype)}",
        ),
        (
            dims[0] != dims[1] or dims[0] not in HEAD_DIMS,
            f"FP8 supports only D = Dv of 64, 128 or 256; got {dims_of(problem)}",
        ),
        (bool(asked), f"FP8 does not support {', '.join(asked)}"),
        (problem.q_stride != 1 or problem.k_stride != 1, "FP8 supports only consecutive positions"),
        far_positions(problem),
    )
