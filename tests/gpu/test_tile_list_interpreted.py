"""The tiles of a pack, under Triton's interpreter: every one is listed once, those that see more keys before others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stream_attention.backends.installed import interpreting
from stream_attention.base.problem import UNBOUNDED, Inputs, state_problem

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these")

TILE = 4


def listed(
    q_lens: list[int], k_lens: list[int], longest: int, window: tuple[int, int], ends: Any = None
) -> list[tuple[int, ...]]:
    """What the launch before a forward lists: (tile, sequence, first query, queries, first key, keys)."""
    from stream_attention.gpu.tail import bind_start
    from stream_attention.gpu.tile_list import HEADER, WORDS, words_of

    cu_q, cu_k = ends or [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lens, k_lens)]
    rows, k_rows = (max(sum(lengths), 1) for lengths in (q_lens, k_lens))
    query, key = torch.zeros(rows, 2, 8), torch.zeros(k_rows, 1, 8)
    inputs = Inputs(query, key, key.clone(), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    problem = state_problem(
        inputs, q_len=longest, k_len=max(k_lens), causal=False, window=window, softcap=0.0, scale=1.0, dropout_p=0.0,
        deterministic=False,
    )  # fmt: skip
    out, lse = torch.empty(rows, 2, 8), torch.empty(2, rows)
    tiles = torch.full((words_of(rows, len(q_lens), TILE) + WORDS,), -1, dtype=torch.int32)
    bind_start(problem, inputs, TILE, out, lse, tiles)(cu_q, cu_k, out, lse, tiles)
    assert tiles[0] == 0, "the counter"
    count = int(tiles[1])
    found: list[list[int]] = tiles[HEADER:].view(-1, WORDS).tolist()
    assert all(word == -1 for one in found[count:] for word in one), "nothing is written behind the list"
    return [tuple(one[:6]) for one in found[:count]]


def keys_seen(one: tuple[int, ...], window: tuple[int, int]) -> int:
    tile, _, _, q_len, _, k_len = one
    left, right = window
    offset = k_len - q_len
    last = min(k_len, tile * TILE + TILE + offset + right) if right != UNBOUNDED else k_len
    return max(min(last, left + right + TILE) if UNBOUNDED not in window else last, 0)


WINDOWS = {
    "full": (UNBOUNDED, UNBOUNDED),
    "causal": (UNBOUNDED, 0),
    "right 5": (UNBOUNDED, 5),
    "window": (6, 0),
    "left": (3, UNBOUNDED),
}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("same", [True, False], ids=["queries are keys", "other lengths of keys"])
def test_every_tile_is_listed_once_and_the_longest_come_first(window: tuple[int, int], same: bool) -> None:
    draw = random.Random(str((window, same)))
    for count in (1, 2, 7, 150):
        q_lens = [draw.choice((0, 1, 4, 5, draw.randrange(90))) for _ in range(count)]
        k_lens = q_lens if same else [draw.choice((0, 3, draw.randrange(90))) for _ in range(count)]
        tiles = listed(q_lens, k_lens, max(*q_lens, 1), window)
        firsts = [sum(q_lens[:n]) for n in range(count)], [sum(k_lens[:n]) for n in range(count)]
        expected = [
            (tile, n, firsts[0][n], q_lens[n], firsts[1][n], k_lens[n])
            for n in range(count)
            for tile in range(-(-q_lens[n] // TILE))
        ]
        assert sorted(tiles) == sorted(expected)
        seen = [keys_seen(one, window) for one in tiles]
        assert seen == sorted(seen, reverse=True)


def test_a_longer_sequence_than_was_said_has_no_more_tiles_than_that() -> None:
    assert [one[:2] for one in listed([9, 3], [9, 3], 4, (UNBOUNDED, 0))] == [(0, 0), (0, 1)]


def test_offsets_that_contradict_each_other_write_nothing_behind_the_list() -> None:
    """They are refused on a CPU; on a GPU nobody looks."""
    wrong = torch.tensor([0, 40, 0, 40, 0, 40], dtype=torch.int32)
    tiles = listed([8] * 5, [8] * 5, 40, (UNBOUNDED, UNBOUNDED), (wrong, wrong.clone()))
    assert len(tiles) == 40 // TILE + 5 and len(set(tiles)) == len(tiles)
