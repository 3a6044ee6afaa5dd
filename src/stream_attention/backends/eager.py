"""Plain torch, on any device."""

from __future__ import annotations

from typing import Any

from ..problem import DecodeInputs, Problem, Request
from ..tuning import decode as decode_tuning
from ..tuning import eager as tuning
from .base import PLAIN, Backend, Reasons


class Eager(Backend):
    name = "eager"
    kernels = "..kernels.eager"
    decode_kernels = "..kernels.eager_decode"

    def reasons(self, problem: Problem, request: Request) -> Reasons:
        splits = problem.cached and request.num_splits is not None
        return (
            (problem.fp8, "does not support FP8; FP8 requires Triton and a GPU with compute capability 8.9 or newer"),
            (splits, "does not support num_splits: leave num_splits at None"),
        )

    def configure(self, problem: Problem, request: Request = PLAIN) -> Any:
        if problem.cached:
            return decode_tuning.configure_eager(problem, request.batch_invariant)
        return tuning.configure(problem)

    def prepare_decode(self, problem: Problem, inputs: DecodeInputs, config: Any) -> Any:
        from ..kernels.eager_decode import decode  # a statement: torch.compile traces through it

        return lambda inputs: decode(problem, inputs, config)
