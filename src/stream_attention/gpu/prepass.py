"""What small kernels compute of the inputs before a forward or a backward: flags of visible rows, words of dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..base.problem import Inputs, Problem
from .dropout import prepare_words
from .visibility import prepare_visible

Step = tuple[Tensor, Callable[[Inputs], Tensor]]
"""A sample of a result, without memory, and what computes it."""


class Prepass(NamedTuple):
    """Results, each None where it is not needed: visible keys, visible queries, words of the rows and the columns."""

    samples: tuple[Tensor | None, ...]
    steps: tuple[Callable[[Inputs], Tensor] | None, ...]

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, needs_visible: bool = False) -> Prepass:
        made: list[Step | None] = [None] * 4
        if needs_visible and (inputs.mask is not None or inputs.bias is not None):
            made[:2] = prepare_visible(problem, inputs)
        if problem.dropout_p:
            made[2:] = prepare_words(problem, inputs)
        samples, steps = zip(*(step or (None, None) for step in made), strict=True)
        return cls(samples, steps if any(made) else ())

    def run(self, inputs: Inputs) -> tuple[Tensor | None, ...]:
        if not self.steps:
            return (None, None, None, None)
        return tuple(None if step is None else step(inputs) for step in self.steps)
