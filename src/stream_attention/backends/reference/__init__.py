"""The specification: dense, in fp64."""

from __future__ import annotations

from ...base.problem import Problem, Request
from ..base import NO_DECODING, PLAIN, Backend, Reasons, fp8_reasons


class Reference(Backend):
    """Computed by the ops that are asked for it by name: torch differentiates it, any number of times."""

    name = "reference"
    fp8_kernels = ".reference.fp8"

    def reasons(self, problem: Problem, request: Request) -> Reasons:
        if problem.fp8:
            return fp8_reasons(problem)
        return (problem.cached, NO_DECODING), (problem.partial, "does not support partial results")

    def why_named_only(self, problem: Problem) -> tuple[str, ...]:
        if problem.fp8:
            return ('computes densely in fp64, for tests; to use it, pass backend="reference"',)
        return ()

    def configure(self, problem: Problem, request: Request = PLAIN) -> str:
        return "dense, quantised values in fp64" if problem.fp8 else "dense, fp64"
