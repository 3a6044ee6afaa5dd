"""Plain torch, on any device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..problem import Problem, Request
from ..tuning import decode as decode_tuning
from ..tuning import eager as tuning
from .base import PLAIN, Backend


class Eager(Backend):
    name = "eager"
    kernels = "..kernels.eager"
    decode_kernels = "..kernels.eager_decode"

    def why_not(self, problem: Problem, request: Request = PLAIN) -> tuple[str, ...]:
        if problem.fp8:
            return ("does not support FP8; FP8 requires Triton and a GPU with compute capability 8.9 or newer",)
        if problem.cached and request.num_splits is not None:
            return ("does not support num_splits: leave num_splits at None",)
        return ()

    def configure(self, problem: Problem, request: Request = PLAIN) -> Any:
        if problem.cached:
            return decode_tuning.configure_eager(problem, request.batch_invariant)
        return tuning.configure(problem)

    def decode(self, problem: Problem, config: Any, *call: Any) -> tuple[Tensor, Tensor | None, Any]:
        from ..kernels.eager_decode import decode  # a statement: torch.compile traces through it

        return decode(problem, config, *call)
