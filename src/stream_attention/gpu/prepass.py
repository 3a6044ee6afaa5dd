"""What small kernels compute of the inputs before a forward or a backward: flags of visible rows, words of dropout, and
lists of tiles where a mask is given as intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from ..base.problem import Inputs, Problem
from .launch import Launch


class Step(NamedTuple):
    """The kernel that computes one result."""

    sample: Any  # of the result, without memory
    launch: Launch
    reads: tuple[str, ...]  # the inputs, and results of other steps, that a launch is given, before the result
    starts_at_0: bool = False  # the kernel writes some of its elements only

    def run(self, inputs: Inputs, computed: Mapping[str, Tensor | None] = MappingProxyType({})) -> Tensor:
        if self.starts_at_0:
            result: Tensor = self.sample.filled(inputs.query, 0.0, self.launch.is_compiled)
        else:
            result = self.sample.empty(inputs.query)
        read = [computed[name] if name in computed else getattr(inputs, name) for name in self.reads]
        self.launch(*read, result)
        return result


class Prepass(NamedTuple):
    """Results, each None where it is not needed: visible keys, visible queries, words of the rows and the columns, and
    lists of the tiles of keys that each tile of queries sees, and the other way round."""

    samples: tuple[Any, ...]
    steps: tuple[Step | None, ...]  # none where nothing is needed

    @classmethod
    def of(
        cls,
        problem: Problem,
        inputs: Inputs,
        needs_visible: bool = False,
        tiles: Sequence[tuple[int, int]] = (),
    ) -> Prepass:
        """`tiles` are the rows and columns of the tiles that main loops walk: of those that own queries, then of those
        that own keys."""
        steps: list[Step | None] = [None] * 6
        by_lists = problem.bounds and inputs.mask is None and inputs.bias is None and len(tiles) == 2
        if needs_visible and by_lists:
            from .bounds import seen_step

            steps[:2] = (
                seen_step(problem, inputs, *tile, of_keys)
                for tile, of_keys in zip(reversed(tiles), (True, False), strict=True)
            )
        elif needs_visible and (problem.mask or problem.bias is not None):
            from .visibility import visible_steps

            steps[:2] = visible_steps(problem, inputs)
        if problem.dropout_p:
            from .dropout import word_steps

            steps[2:4] = word_steps(problem, inputs)
        if problem.bounds:
            from .bounds import list_step

            lists = (list_step(problem, inputs, *tile, of_keys) for tile, of_keys in zip(tiles, (False, True)))  # noqa: B905
            steps[4 : 4 + len(tiles)] = lists
        return cls(tuple(step and step.sample for step in steps), tuple(steps) if any(steps) else ())

    def run(self, inputs: Inputs) -> tuple[Tensor | None, ...]:
        if not self.steps:
            return (None,) * 6
        *others, key_lists, query_lists = self.steps  # lists first: others read them
        lists = {
            "key_lists": key_lists and key_lists.run(inputs),
            "query_lists": query_lists and query_lists.run(inputs),
        }
        return *[step and step.run(inputs, lists) for step in others], *lists.values()
