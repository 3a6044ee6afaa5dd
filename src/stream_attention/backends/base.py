"""What a backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..problem import Backward, Forward, Gradients, Inputs, Problem, Request, Wanted, distinct

PLAIN = Request()
NO_DECODING = "does not support decoding from a KV cache"
NO_TRITON = "Triton is not installed"


class Backend(ABC):
    """One way to compute problems: why it cannot do one, how it would be configured, and where its kernels are.

    Asking needs no kernel module, so planning works on a machine that lacks what a backend needs.
    """

    name: ClassVar[str]
    kernels: ClassVar[str | None] = None  # module with prepare, prepare_backward and forward_into, which may be None
    decode_kernels: ClassVar[str | None] = None  # module with decode
    fp8_kernels: ClassVar[str | None] = None  # module with prepare_fp8 and forward_fp8
    compiles: ClassVar[bool] = False  # launches kernels that it compiles; else it calls torch's ops
    forceable: ClassVar[Mapping[str, tuple[int, ...]]] = {}  # fields of a forward's tiles that a caller may set
    dim_multiple: ClassVar[int] = 1  # head dims are padded with zeros to a multiple of this before the kernel sees them

    @abstractmethod
    def why_not(self, problem: Problem, request: Request = PLAIN) -> tuple[str, ...]:
        """Why it cannot compute a problem as requested, in sentences; empty if it can."""

    def why_named_only(self, problem: Problem) -> tuple[str, ...]:
        """Why "auto" leaves a problem that it can do."""
        return ()

    @abstractmethod
    def configure(self, problem: Problem, request: Request = PLAIN) -> Any:
        """The configuration for a problem that it can do: a value that can be printed."""

    def prepare(self, problem: Problem, inputs: Inputs, config: Any) -> Forward:
        """The forward of every call whose tensors lie as these `inputs` do. Keeps none of them."""
        return _load(self.kernels).prepare(problem, Inputs._make(distinct(*inputs)), config)

    def prepare_backward(
        self, problem: Problem, inputs: Inputs, config: Any, *saved: Tensor | None, wanted: Wanted
    ) -> Backward:
        """The backward of such calls; `saved` are out, lse and the gradients of both. LSEs are contiguous."""
        apart = distinct(*inputs, *saved)
        count = len(inputs)
        return _load(self.kernels).prepare_backward(
            problem, Inputs._make(apart[:count]), config, *apart[count:], wanted
        )

    def forward_into(
        self, problem: Problem, inputs: Inputs, config: Any, out: Tensor, lse: Tensor, resumes: bool
    ) -> bool:
        """Write the state of a partial problem, or merge it into the one that is there; False if its kernels cannot,
        and nothing was done."""
        into = _load(self.kernels).forward_into
        return into is not None and into(problem, inputs, config, out, lse, resumes)

    def decode(self, problem: Problem, config: Any, *call: Any) -> tuple[Tensor, Tensor | None, Any]:
        """Compute a call on a cache: `(out, lse, repeat)`, where `repeat` makes the call again, if that can be."""
        return _load(self.decode_kernels).decode(problem, config, *call)

    def prepare_fp8(self, *call: Any) -> Any:
        """The forward in FP8 of calls whose codes lie as these do."""
        return _load(self.fp8_kernels).prepare_fp8(*call)

    def forward_fp8(self, *call: Any) -> tuple[Tensor, Tensor]:
        """Compute a call in FP8 whose codes are there."""
        return _load(self.fp8_kernels).forward_fp8(*call)

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
def _load(kernels: str | None) -> ModuleType:
    """A module of kernels, imported on first use."""
    assert kernels is not None, "why_not said that it has none"
    return import_module(kernels, __package__)


Reasons = tuple[tuple[bool, str], ...]
"""Sentences, each with whether it applies."""


def those_of(reasons: Iterable[tuple[bool, str]]) -> tuple[str, ...]:
    """The sentences that apply."""
    return tuple(reason for applies, reason in reasons if applies)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dims_of(problem: Problem) -> str:
    return f"D={problem.head_dim}, Dv={problem.value_dim}"


def far_positions(problem: Problem) -> tuple[bool, str]:
    return problem.last_position >= 1 << 30, f"supports positions below 2**30; got {problem.last_position}"


def large_cache(problem: Problem) -> tuple[bool, str]:
    return problem.k_len >= 1 << 30, f"supports a capacity below 2**30 tokens; got {problem.k_len}"
