"""The tiles of a pack, longest first: what programs of a Hopper forward take one after the other.

Without a list, tiles are counted for the longest sequence, and of a pack of mixed lengths most are empty. Nothing here
waits for the device: a tile counts those before it. Tile m of a sequence sees no fewer keys than tile m - 1, so how
many tiles of a sequence see at least x keys is one division, and a tile's place is a sum of those over all sequences.

A list is `HEADER` words, a counter from which programs take the numbers of tiles and how many tiles there are, then
`WORDS` words for each: its number in the sequence, the sequence, and first row and length of its queries and its keys.

Grid of what calls `list_tiles`: any; programs share the sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import packed_rows

HEADER = WORDS = 8  # of 4 bytes: a tile begins at a multiple of 32
_HEADER, _WORDS = tl.constexpr(HEADER), tl.constexpr(WORDS)

_OTHERS = tl.constexpr(128)
"""Sequences that a program counts at once, for so many tiles of one sequence."""
_TILES = tl.constexpr(16)


def words_of(rows: int, sequences: int, tile: int) -> int:
    """The size of a list of tiles of so many rows."""
    return HEADER + WORDS * most_tiles(rows, sequences, tile)


def most_tiles(rows: int, sequences: int, tile: int) -> int:
    """How many tiles a pack may have: each sequence has one that is not full."""
    return rows // tile + sequences


@triton.jit
def _tiles_of(q_len, covered, TILE: tl.constexpr):
    return tl.cdiv(tl.minimum(q_len, covered), TILE)


@triton.jit
def _tiles_that_see(x, q_len, k_len, tiles, most_seen, right, TILE: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """How many tiles of a sequence see at least x keys."""
    first = 0 * tiles
    if HAS_RIGHT:  # tile m sees those up to m * TILE + TILE + offset + right
        first = tl.cdiv(tl.maximum(x - TILE - (k_len - q_len) - right, 0), TILE)
    found = tl.where(x > tl.minimum(k_len, most_seen), 0, tiles - tl.minimum(first, tiles))
    return tl.where(x > 0, found, tiles)


@triton.jit
def list_tiles(
    list_ptr, cu_q_ptr, cu_k_ptr, sequences, q_rows, k_rows, covered, most_tiles, most_seen, right,
    TILE: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Write the list of a pack, and set its counter to 0.

    Tiles have `TILE` rows and cover `covered` of each sequence. A row sees `most_seen` keys at most, and keys up to
    `right` behind its own position. There is room for `most_tiles`: offsets that contradict each other may make more.
    """
    others = tl.arange(0, _OTHERS)
    for sequence in tl.range(tl.program_id(0), sequences, tl.num_programs(0)):
        q_first, q_len = packed_rows(cu_q_ptr + sequence, q_rows)
        k_first, k_len = packed_rows(cu_k_ptr + sequence, k_rows)
        tiles = _tiles_of(q_len, covered, TILE)
        for start in tl.range(0, tiles, _TILES):
            m = start + tl.arange(0, _TILES)
            end = k_len
            if HAS_RIGHT:
                end = tl.minimum(k_len, m * TILE + TILE + (k_len - q_len) + right)
            seen = tl.maximum(tl.minimum(end, most_seen) + 0 * m, 0)
            place = tiles - 1 - m  # behind the later ones of its sequence
            for first in tl.range(0, sequences, _OTHERS):
                other = first + others
                at = tl.minimum(other, sequences - 1)
                _, its_q_len = packed_rows(cu_q_ptr + at, q_rows)
                _, its_k_len = packed_rows(cu_k_ptr + at, k_rows)
                its_tiles = tl.where((other < sequences) & (other != sequence), _tiles_of(its_q_len, covered, TILE), 0)
                # Of equally long ones those of earlier sequences come first.
                least = seen[:, None] + (other > sequence)[None, :]
                before = _tiles_that_see(
                    least, its_q_len[None, :], its_k_len[None, :], its_tiles[None, :], most_seen, right, TILE, HAS_RIGHT
                )
                place += tl.sum(before, 1)
            inside = (m < tiles) & (place < most_tiles)
            record = list_ptr + _HEADER + _WORDS * place
            tl.store(record, m, mask=inside)
            tl.store(record + 1, sequence, mask=inside)
            tl.store(record + 2, q_first.to(tl.int32), mask=inside)
            tl.store(record + 3, q_len, mask=inside)
            tl.store(record + 4, k_first.to(tl.int32), mask=inside)
            tl.store(record + 5, k_len, mask=inside)
    if tl.program_id(0) == 0:
        count = tl.zeros([_OTHERS], tl.int32)
        for first in tl.range(0, sequences, _OTHERS):
            at = tl.minimum(first + others, sequences - 1)
            _, q_len = packed_rows(cu_q_ptr + at, q_rows)
            count += tl.where(first + others < sequences, _tiles_of(q_len, covered, TILE), 0)
        tl.store(list_ptr, 0)
        tl.store(list_ptr + 1, tl.minimum(tl.sum(count, 0), most_tiles))
