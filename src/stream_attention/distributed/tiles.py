"""Which rows of one shard see which keys of another, as kernel calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Literal, NamedTuple

from ..base.problem import UNBOUNDED, Positions
from .shard import Run

Sides = tuple[int, int]
"""A key is visible from `left` positions before the query to `right` after it; -1 is unbounded."""

EVERYTHING: Sides = (UNBOUNDED, UNBOUNDED)


class Tile(NamedTuple):
    """One kernel call: rows of the query's shard, columns of the key's, and which keys are visible to which rows."""

    rows: slice
    columns: slice
    key_positions: slice  # of the columns in the whole sequence
    sequence: int
    positions: Positions
    window: Sides


def tiles(q_runs: Iterable[Run], k_runs: Iterable[Run], sides: Sides, q_base: int, by_position: bool) -> list[Tile]:
    """The calls that compute all that `q_runs` see of `k_runs`: pairs of runs, without those that see nothing.

    `by_position`: a score depends on the positions of its query and key, through ALiBi, dropout, a mask or a bias.
    Otherwise only visibility matters: then positions are made consecutive, whatever the runs' stride, and adjacent
    pairs in which every query sees every key are one call.
    """
    by_sequence: dict[int, list[Run]] = {}
    for k in k_runs:
        by_sequence.setdefault(k.sequence, []).append(k)
    found = [
        _tile(q, k, sides, q_base, by_position)
        for q in q_runs
        for k in by_sequence.get(q.sequence, ())
        if _visible(q, k, sides)
    ]
    if by_position:
        return found
    # Along the keys, then down the queries.
    return _joined(sorted(_joined(found, "columns"), key=lambda tile: tile.columns.start), "rows")


def sees(q_runs: Iterable[Run], k_runs: Sequence[Run], sides: Sides) -> bool:
    """Whether some query sees some key."""
    return any(q.sequence == k.sequence and _visible(q, k, sides) for q in q_runs for k in k_runs)


def _visible(q: Run, k: Run, sides: Sides) -> bool:
    """Whether some key of `k` is within the window of some query of `q`."""
    lowest, highest, left, right = _differences(q, k, sides)
    step = gcd(q.stride, k.stride)  # position of key - position of query is lowest + a multiple of it
    return lowest + -(min(0, lowest + left) // step) * step <= min(highest, right)


def _differences(q: Run, k: Run, sides: Sides) -> tuple[int, int, int, int]:
    """Smallest and largest (key position - query position), and the sides as bounds of them."""
    lowest, highest = k.start - q.last, k.last - q.start
    left, right = sides
    return lowest, highest, -lowest if left == UNBOUNDED else left, highest if right == UNBOUNDED else right


def _tile(q: Run, k: Run, sides: Sides, q_base: int, by_position: bool) -> Tile:
    lowest, highest, left, right = _differences(q, k, sides)
    window = (UNBOUNDED if lowest >= -left else left, UNBOUNDED if highest <= right else right)
    positions = Positions(q.start, q.stride, k.start, k.stride, q_base)
    if window == EVERYTHING and not by_position:
        positions = Positions(0, 1, 0, 1, 0)
    elif not by_position and q.stride == k.stride:
        # Row i sees column j iff first + i <= j <= last + i.
        ahead, stride = q.start - k.start, q.stride
        first, last = -((left - ahead) // stride), (ahead + right) // stride
        if window[1] != UNBOUNDED:
            window = (UNBOUNDED if window[0] == UNBOUNDED else last - first, 0)
            positions = Positions(last, 1, 0, 1, 0)
        else:
            window = (0, UNBOUNDED)
            positions = Positions(first, 1, 0, 1, 0)
    return Tile(q.rows, k.rows, slice(k.start, k.last + 1, k.stride), q.sequence, positions, window)


def _joined(found: Sequence[Tile], axis: Literal["rows", "columns"]) -> list[Tile]:
    """Adjacent tiles along `axis`, in which every query sees every key, as one."""
    other = "rows" if axis == "columns" else "columns"
    joined: list[Tile] = []
    for tile in found:
        before = joined[-1] if joined else tile
        first, second = getattr(before, axis), getattr(tile, axis)
        full = before.window == tile.window == EVERYTHING
        if full and getattr(before, other) == getattr(tile, other) and first.stop == second.start:
            together = slice(first.start, second.stop)
            joined[-1] = before._replace(rows=together) if axis == "rows" else before._replace(columns=together)
        else:
            joined.append(tile)
    return joined
