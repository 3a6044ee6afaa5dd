"""Which calls of a kernel compute what one shard sees of another."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stream_attention.base.problem import UNBOUNDED, sides_of
from stream_attention.distributed.ring import visits
from stream_attention.distributed.shard import (
    LAYOUTS,
    Run,
    by_position,
    positions_of,
    runs_of,
    runs_of_all,
    within_sequences,
)
from stream_attention.distributed.tiles import EVERYTHING, Sides, Tile, sees, tiles

CAUSAL: Sides = (UNBOUNDED, 0)


def within(q: Tensor, k: Tensor, sides: Sides) -> Tensor:
    """Who sees whom, from positions, by definition."""
    ahead = k[None, :] - q[:, None]
    left, right = sides
    seen = torch.ones_like(ahead, dtype=torch.bool)
    return (seen if left == UNBOUNDED else ahead >= -left) & (seen if right == UNBOUNDED else ahead <= right)


def computed(found: list[Tile], q_len: int, k_len: int) -> Tensor:
    """How often the tiles compute each pair."""
    count = torch.zeros(q_len, k_len, dtype=torch.int64)
    for tile in found:
        q_start, q_stride, k_start, k_stride, _ = tile.positions
        q = torch.arange(tile.rows.stop - tile.rows.start) * q_stride + q_start
        k = torch.arange(tile.columns.stop - tile.columns.start) * k_stride + k_start
        count[tile.rows, tile.columns] += within(q, k, tile.window)
    return count


# Semantics


def test_a_zigzag_step_is_one_call() -> None:
    """An earlier shard: all queries see its first chunk. A later one: the late queries see all of it."""
    runs = [runs_of("zigzag", 16, 4, rank) for rank in range(4)]
    earlier = tiles(runs[1], runs[0], CAUSAL, 0, by_position=False)
    assert [(tile.rows, tile.columns, tile.window) for tile in earlier] == [(slice(0, 4), slice(0, 2), EVERYTHING)]
    later = tiles(runs[1], runs[2], CAUSAL, 0, by_position=False)
    assert [(tile.rows, tile.columns, tile.window) for tile in later] == [(slice(2, 4), slice(0, 4), EVERYTHING)]


def test_what_depends_on_positions_keeps_them() -> None:
    (q,), (k,) = runs_of("striped", 20, 4, 1), runs_of("striped", 20, 4, 3)
    (tile,) = tiles([q], [k], CAUSAL, 7, by_position=True)
    assert tile.positions == (1, 4, 3, 4, 7) and tile.key_positions == slice(3, 20, 4)
    (tile,) = tiles([q], [k], CAUSAL, 7, by_position=False)
    assert tile.positions == (-1, 1, 0, 1, 0)  # row i sees columns j <= i - 1


# Properties


@settings(max_examples=200)
@given(
    layout=st.sampled_from(LAYOUTS),
    q_len=st.integers(0, 40),
    k_len=st.integers(0, 40),
    size=st.integers(1, 5),
    causal=st.booleans(),
    left=st.integers(-1, 20),
    right=st.integers(-1, 20),
    by_position=st.booleans(),
)
def test_tiles_compute_each_visible_pair_once_and_nothing_else(
    layout: Any, q_len: int, k_len: int, size: int, causal: bool, left: int, right: int, by_position: bool
) -> None:
    sides, base = sides_of(causal, (left, right)), k_len - q_len
    for q_rank in range(size):
        q_runs = [run._replace(start=run.start + base) for run in runs_of(layout, q_len, size, q_rank)]
        for k_rank in range(size):
            k_runs = runs_of(layout, k_len, size, k_rank)
            q, k = positions_of(q_runs), positions_of(k_runs)
            found = tiles(q_runs, k_runs, sides, base, by_position)
            expected = within(q, k, sides)
            assert torch.equal(computed(found, len(q), len(k)), expected.long())
            assert sees(q_runs, k_runs, sides) == bool(expected.any()) == bool(found)
            for tile in found if by_position else []:
                assert k[tile.columns].tolist() == list(range(k_len))[tile.key_positions]


@given(
    layout=st.sampled_from(LAYOUTS),
    inner=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    size=st.integers(1, 4),
    causal=st.booleans(),
)
def test_packed_sequences_do_not_see_each_other(layout: Any, inner: list[int], size: int, causal: bool) -> None:
    offsets = list(accumulate(inner, initial=0))
    sides = sides_of(causal, None)
    document = torch.repeat_interleave(torch.arange(len(inner)), torch.tensor(inner))
    runs = runs_of_all(layout, [len(positions_of(runs_of(layout, offsets[-1], size, r))) for r in range(size)])
    for q_whole in runs:
        for k_whole in runs:
            q, k = positions_of(q_whole), positions_of(k_whole)
            found = tiles(within_sequences(q_whole, offsets), within_sequences(k_whole, offsets), sides, 0, False)
            expected = within(q, k, sides) & (document[q][:, None] == document[k][None, :])
            assert torch.equal(computed(found, len(q), len(k)), expected.long())


# The schedule of a ring


def critical_path(layout: Any, length: int, size: int) -> int:
    """Pairs that the slowest rank of each step computes, summed over the steps, of causal attention."""
    runs = tuple(runs_of(layout, length, size, rank) for rank in range(size))
    lengths = [sum(run.length for run in one) for one in runs]

    def work(rank: int, owner: int) -> int:
        found = tiles(runs[rank], runs[owner], CAUSAL, 0, by_position=False)
        return int(computed(found, lengths[rank], lengths[owner]).sum())

    steps = sorted(set().union(*visits(runs, runs, CAUSAL)))
    return sum(max(work(rank, (rank - step) % size) for rank in range(size)) for step in steps)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_reaches_the_ideal_critical_path(size: int) -> None:
    """Every rank does the same at every step, up to the half-full tiles of the diagonal, which all meet at once."""
    length = 16 * size
    total = length * (length + 1) // 2
    assert critical_path("zigzag", length, size) * size == total
    # Contiguous: the last rank's queries see everything, at every step.
    assert critical_path("contiguous", length, size) == 16 * 17 // 2 + (size - 1) * 16**2
    assert critical_path("striped", length, size) * size <= total + size * length  # up to a diagonal per step


def test_one_run_of_one_row_is_seen_or_not_by_the_stride_between() -> None:
    """A window narrower than the stride can fall between two keys."""
    assert not sees([Run(0, 3, 1, 4)], [Run(0, 3, 3, 4)], (1, 1))
    assert sees([Run(0, 3, 1, 4)], [Run(0, 3, 3, 4)], (2, 1))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("rank", range(8))
def test_what_a_rank_sees_of_gathered_shards_is_a_call_for_each_of_its_runs(layout: Any, rank: int) -> None:
    shards = {one: runs_of(layout, 160, 8, one) for one in range(8)}
    mine = shards.pop(rank)
    laid_out = [laid for *_, laid in by_position(shards)]
    found = tiles(mine, laid_out, CAUSAL, 0, False)
    assert len(found) <= len(mine)
    counted = computed(found, 20, 140).sum(1)
    assert counted.tolist() == [sum(k.length for k in laid_out if k.last < p) for run in mine for p in positions(run)]


def positions(run: Run) -> range:
    return range(run.start, run.last + 1, run.stride)
