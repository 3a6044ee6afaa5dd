"""What small kernels compute of the inputs before a forward or a backward: flags of visible rows, words of dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..base.problem import Inputs, Problem
from .launch import Launch


class Step(NamedTuple):
    """The kernel that computes one result."""

    sample: Any  # of the result, without memory
    launch: Launch
    reads: tuple[str, ...]  # the inputs that a launch is given, before the result
    starts_at_0: bool = False  # the kernel writes some of its elements only

    def run(self, inputs: Inputs) -> Tensor:
        if self.starts_at_0:
            result: Tensor = self.sample.filled(inputs.query, 0.0, self.launch.is_compiled)
        else:
            result = self.sample.empty(inputs.query)
        self.launch(*[getattr(inputs, name) for name in self.reads], result)
        return result


class Prepass(NamedTuple):
    """Results, each None where it is not needed: visible keys, visible queries, words of the rows and the columns."""

    samples: tuple[Any, ...]
    steps: tuple[Step | None, ...]  # none where nothing is needed

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, needs_visible: bool = False) -> Prepass:
        steps: list[Step | None] = [None] * 4
        if needs_visible and (inputs.mask is not None or inputs.bias is not None):
            from .visibility import visible_steps

            steps[:2] = visible_steps(problem, inputs)
        if problem.dropout_p:
            from .dropout import word_steps

            steps[2:] = word_steps(problem, inputs)
        return cls(tuple(step and step.sample for step in steps), tuple(steps) if any(steps) else ())

    def run(self, inputs: Inputs) -> tuple[Tensor | None, ...]:
        if not self.steps:
            return (None, None, None, None)
        return tuple(step and step.run(inputs) for step in self.steps)
