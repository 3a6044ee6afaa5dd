"""Plain torch, on any device."""

from __future__ import annotations

from typing import Any

from ...base.problem import DecodeInputs, PagedInputs, Problem, Request
from ..base import PLAIN, Backend, Reasons
from . import tuning


class Eager(Backend):
    name = "eager"
    kernels = ".eager.blocked"
    decode_kernels = ".eager.decode"

    def reasons(self, problem: Problem, request: Request) -> Reasons:
        splits = problem.cached and request.num_splits is not None
        return (
            (problem.fp8, "does not support FP8; FP8 requires Triton and a GPU with compute capability 8.9 or newer"),
            (splits, "does not support num_splits: leave num_splits at None"),
        )

    def configure(self, problem: Problem, request: Request = PLAIN) -> Any:
        if problem.cached:
            return tuning.configure_decode(problem, request.batch_invariant)
        return tuning.configure(problem)

    def prepare_decode(self, problem: Problem, inputs: DecodeInputs, config: Any) -> Any:
        from .decode import decode  # a statement: torch.compile traces through it

        return lambda inputs: decode(problem, inputs, config)

    def prepare_paged(self, problem: Problem, inputs: PagedInputs, config: Any) -> Any:
        from .paged import PreparedPaged

        return PreparedPaged(problem, config)
