"""A sample of a test's parametrisations in which pairs of values meet: deterministic, and as small as it is told."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

CANDIDATES = 5_000
"""Rows that a sample is chosen from: of a larger product, so many at random."""


class Axis(NamedTuple):
    """The values of one `parametrize`: a row of values, one for each name."""

    names: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class Sample(NamedTuple):
    rows: list[dict[str, Any]]
    of: int  # parametrisations there are
    dropped: dict[str, int]  # reason -> how many were not chosen from
    pairs: tuple[int, int]  # pairs of values that meet in the sample, of those that meet at all


def sample(axes: Sequence[Axis], why_not: Callable[[dict[str, Any]], str | None], most: int) -> Sample:
    """At most `most` rows of the product of the axes for which `why_not` has no reason; each row meets as many pairs of
    values that did not meet before as any candidate does."""
    rows: list[tuple[int, ...]] = []
    dropped: dict[str, int] = {}
    for row in itertools.product(*(range(len(axis.rows)) for axis in axes)):
        reason = why_not(_named(axes, row))
        if reason is None:
            rows.append(row)
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    of = len(rows) + sum(dropped.values())
    choice = random.Random(0)
    if len(rows) > CANDIDATES:
        rows = choice.sample(rows, CANDIDATES)
    chosen, pairs = _cover([_values(axes, row) for row in rows], most)
    return Sample([_named(axes, rows[i]) for i in chosen], of, dropped, pairs)


def _named(axes: Sequence[Axis], row: Iterable[int]) -> dict[str, Any]:
    chosen = ((axis.names, axis.rows[i]) for axis, i in zip(axes, row, strict=True))
    return {name: value for names, values in chosen for name, value in zip(names, values, strict=True)}


def _values(axes: Sequence[Axis], row: Sequence[int]) -> list[str]:
    """What may meet: a value of each axis; of one whose values are tuples of one length, each of their parts."""
    values = []
    for axis, i in zip(axes, row, strict=True):
        tuples = len(axis.names) == 1 and all(isinstance(value, tuple) for (value,) in axis.rows)
        divided = tuples and len({len(value) for (value,) in axis.rows}) == 1
        values += map(str, axis.rows[i][0]) if divided else [str(axis.rows[i])]
    return values


def _cover(rows: list[list[str]], most: int) -> tuple[list[int], tuple[int, int]]:
    if not rows:
        return [], (0, 0)
    columns = [{value: code for code, value in enumerate(sorted(set(column)))} for column in zip(*rows, strict=True)]
    codes = torch.tensor([[of[value] for of, value in zip(columns, row, strict=True)] for row in rows])
    met: list[torch.Tensor] = []
    start = 0
    for a, b in itertools.combinations(range(len(columns)), 2):
        met.append(start + codes[:, a] * len(columns[b]) + codes[:, b])
        start += len(columns[a]) * len(columns[b])
    pairs = torch.stack(met, 1) if met else codes + 0
    missing = torch.zeros(max(start, int(pairs.max()) + 1), dtype=torch.bool)
    missing[pairs.unique()] = True
    total, chosen = int(missing.sum()), []
    while len(chosen) < most and missing.any():
        best = int(missing[pairs].sum(1).argmax())
        chosen.append(best)
        missing[pairs[best]] = False
    return chosen, (total - int(missing.sum()), total)
