"""The specification: dense, in fp64."""

from __future__ import annotations

from ..problem import Problem, Request
from .base import NO_DECODING, PLAIN, Backend, those_of
from .fp8 import fp8_reasons


class Reference(Backend):
    """Computed by the ops that are asked for it by name: torch differentiates it, any number of times."""

    name = "reference"

    def why_not(self, problem: Problem, request: Request = PLAIN) -> tuple[str, ...]:
        if problem.cached:
            return (NO_DECODING,)
        if problem.fp8:
            return those_of(fp8_reasons(problem))
        return ("does not support partial results",) if problem.partial else ()

    def why_named_only(self, problem: Problem) -> tuple[str, ...]:
        if problem.fp8:
            return ('computes densely in fp64, for tests; to use it, pass backend="reference"',)
        return ()

    def configure(self, problem: Problem, request: Request = PLAIN) -> str:
        return "dense, quantised values in fp64" if problem.fp8 else "dense, fp64"
