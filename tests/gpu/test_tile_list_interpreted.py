"""The tiles of a pack, under Triton's interpreter: every one is listed once, those that see more before others."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from stream_attention.backends.installed import interpreting
from stream_attention.base.problem import UNBOUNDED

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these")

TILE = 4
PROGRAMS = 3
KINDS = ("queries", "keys", "blocks")
FAR = 1 << 30

Tile = tuple[int, ...]
"""(its number, sequence, first query, queries, first key, keys)."""


@cache
def kernel() -> Any:
    import work_kernels  # not before it is known that there is an interpreter

    return work_kernels.tiles_of_a_pack


def listed(
    of: str,
    q_lens: list[int],
    k_lens: list[int],
    window: tuple[int, int],
    ordered: bool = False,
    covered: int = 1000,
    ends: Any = None,
) -> list[Tile]:
    """What is listed, after a look at what is not."""
    from stream_attention.gpu.tile_list import HEADER, WORDS, most_tiles, words_of

    cu_q, cu_k = ends or [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lens, k_lens)]
    rows = sum(k_lens if of == "keys" else q_lens)
    most = most_tiles(rows, len(q_lens), TILE)
    tiles = torch.full((words_of(most) + WORDS,), -1, dtype=torch.int32)
    kernel().launch(
        PROGRAMS,
        {"num_warps": 4},
        list_ptr=tiles,
        cu_q_ptr=cu_q,
        cu_k_ptr=cu_k,
        sequences=len(q_lens),
        q_rows=sum(q_lens),
        k_rows=sum(k_lens),
        covered=covered,
        most_tiles=most,
        most_seen=most_seen(window),
        right=min(window[1], FAR),
        TILE=TILE,
        OF=of,
        ORDERED=ordered,
        HAS_RIGHT=window[1] != UNBOUNDED,
    )
    assert tiles[0] == 0, "the counter"
    count = int(tiles[1])
    found: list[list[int]] = tiles[HEADER:].view(-1, WORDS).tolist()
    assert all(word == -1 for one in found[count:] for word in one), "nothing is written behind the list"
    return [tuple(one[:6]) for one in found[:count]]


def most_seen(window: tuple[int, int]) -> int:
    return FAR if UNBOUNDED in window else sum(window) + TILE


def seen(of: str, one: Tile, window: tuple[int, int]) -> int:
    """Keys that some row of a tile of queries sees; queries that see some of a tile of keys; rows from the first of a
    block of queries on. Not beyond the width of a window."""
    tile, _, _, q_len, _, k_len = one
    right = window[1]
    offset = k_len - q_len
    if of == "queries":
        count = k_len if right == UNBOUNDED else min(k_len, tile * TILE + TILE + offset + right)
    elif of == "keys":
        count = q_len if right == UNBOUNDED else q_len - max(tile * TILE - offset - right, 0)
    else:
        count = q_len if right == UNBOUNDED else q_len - tile * TILE
    return max(min(count, most_seen(window)), 0)


WINDOWS = {
    "full": (UNBOUNDED, UNBOUNDED),
    "causal": (UNBOUNDED, 0),
    "right 5": (UNBOUNDED, 5),
    "window": (6, 0),
    "left": (3, UNBOUNDED),
}


@pytest.mark.parametrize("of", KINDS)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("same", [True, False], ids=["queries are keys", "other lengths of keys"])
def test_every_tile_is_listed_once_and_the_longest_come_first(of: str, window: tuple[int, int], same: bool) -> None:
    draw = random.Random(str((of, window, same)))
    for count in (1, 2, 7, 140):
        q_lens = [draw.choice((0, 1, 4, 5, draw.randrange(90))) for _ in range(count)]
        k_lens = q_lens if same else [draw.choice((0, 3, draw.randrange(90))) for _ in range(count)]
        tiles = listed(of, q_lens, k_lens, window)
        firsts = [sum(q_lens[:n]) for n in range(count)], [sum(k_lens[:n]) for n in range(count)]
        expected = [
            (tile, n, firsts[0][n], q_lens[n], firsts[1][n], k_lens[n])
            for n in range(count)
            for tile in range(-(-(k_lens if of == "keys" else q_lens)[n] // TILE))
        ]
        assert sorted(tiles) == sorted(expected)
        amounts = [seen(of, one, window) for one in tiles]
        assert amounts == sorted(amounts, reverse=True)


def test_in_one_order_tiles_of_a_sequence_come_from_the_last_to_the_first() -> None:
    """So a backward adds to dQ; who waits waits for what was listed before."""
    lengths = [9, 30, 0, 17]
    found = listed("keys", lengths, lengths, (UNBOUNDED, 0), ordered=True)
    for n, length in enumerate(lengths):
        assert [one[0] for one in found if one[1] == n] == [*range(-(-length // TILE))][::-1]


@pytest.mark.parametrize("of", KINDS)
def test_a_longer_sequence_than_was_said_has_no_more_tiles_than_that(of: str) -> None:
    found = listed(of, [9, 3], [9, 3], (UNBOUNDED, 0), covered=TILE)
    assert sorted(one[:2] for one in found) == [(0, 0), (0, 1)]


def test_offsets_that_contradict_each_other_write_nothing_behind_the_list() -> None:
    """They are refused on a CPU; on a GPU nobody looks."""
    wrong = torch.tensor([0, 40, 0, 40, 0, 40], dtype=torch.int32)
    tiles = listed("queries", [8] * 5, [8] * 5, (UNBOUNDED, UNBOUNDED), ends=(wrong, wrong.clone()))
    assert len(tiles) == 40 // TILE + 5 and len(set(tiles)) == len(tiles)
