"""The tiles of a pack in the order in which programs of a Hopper kernel take them: the longest first, as a rule.

Without a list, tiles are counted for the longest sequence, and of a pack of mixed lengths most are empty. Nothing here
waits for another program: a tile counts those before it. Tiles of queries see more keys the later they are, tiles of
keys are seen by more queries the earlier they are. So how many tiles of a sequence see at least x is one division, and
a tile's place is a sum of those over all sequences.

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
"""Sequences whose tiles a program counts at once, for `_TILES` tiles of one sequence."""
_TILES = tl.constexpr(16)


def most_tiles(rows: int, sequences: int, tile: int) -> int:
    """How many tiles a pack may have: each sequence has one that is not full."""
    return rows // tile + sequences


def words_of(tiles: int) -> int:
    """The size of a list of so many tiles."""
    return HEADER + WORDS * tiles


@triton.jit
def _tiles_of(q_len, k_len, covered, TILE: tl.constexpr, OF: tl.constexpr):
    rows = q_len
    if OF == "keys":
        rows = k_len
    return tl.cdiv(tl.minimum(rows, covered), TILE)


@triton.jit
def _seen_by(
    m, q_len, k_len, most_seen, right, TILE: tl.constexpr, OF: tl.constexpr, HAS_RIGHT: tl.constexpr
):  # fmt: skip
    """How much tile m of a sequence sees, or how soon it is due."""
    if OF == "queries":
        seen = k_len + 0 * m
        if HAS_RIGHT:
            seen = tl.minimum(k_len, m * TILE + TILE + (k_len - q_len) + right)
    else:
        seen = q_len + 0 * m
        if HAS_RIGHT:
            seen = q_len - tl.maximum(m * TILE - _shift(q_len, k_len, right, OF), 0)
    return tl.maximum(tl.minimum(seen, most_seen), 0)


@triton.jit
def _shift(q_len, k_len, right, OF: tl.constexpr):
    """Keys that query 0 sees behind its own position; a block of queries is due when its last tile of keys is done."""
    if OF == "keys":
        return k_len - q_len + right
    else:
        return 0 * q_len


@triton.jit
def _tiles_that_see(
    x, q_len, k_len, tiles, most_seen, right, TILE: tl.constexpr, OF: tl.constexpr, HAS_RIGHT: tl.constexpr
):  # fmt: skip
    """How many tiles of a sequence see at least x: by `_seen_by`, solved for m."""
    found = tiles
    most = q_len
    if OF == "queries":
        most = k_len
        if HAS_RIGHT:
            found = tiles - tl.minimum(tl.cdiv(tl.maximum(x - TILE - (k_len - q_len) - right, 0), TILE), tiles)
    else:
        if HAS_RIGHT:
            found = tl.minimum(tl.maximum(q_len - x + _shift(q_len, k_len, right, OF) + TILE, 0) // TILE, tiles)
    found = tl.where(x > tl.minimum(most, most_seen), 0, found)
    return tl.where(x > 0, found, tiles)


@triton.jit
def list_tiles(
    list_ptr, cu_q_ptr, cu_k_ptr, sequences, q_rows, k_rows, covered, most_tiles, most_seen, right,
    TILE: tl.constexpr, OF: tl.constexpr, ORDERED: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Write the list of a pack, and set its counter to 0.

    Tiles have `TILE` rows and cover `covered` of each sequence. A row sees `most_seen` at most, and keys up to `right`
    behind its own position. There is room for `most_tiles`: offsets that contradict each other may make more.

    OF: "queries", of a forward; "keys", of a backward; "blocks" of queries in the order in which a backward that takes
    those keys is done with them. ORDERED: tiles of a sequence come one after the other, those of keys from the last to
    the first.
    """
    LONGEST: tl.constexpr = HAS_RIGHT and not ORDERED
    LAST_FIRST: tl.constexpr = OF == "queries" or (OF == "keys" and ORDERED)
    others = tl.arange(0, _OTHERS)
    for sequence in tl.range(tl.program_id(0), sequences, tl.num_programs(0)):
        q_first, q_len = packed_rows(cu_q_ptr + sequence, q_rows)
        k_first, k_len = packed_rows(cu_k_ptr + sequence, k_rows)
        tiles = _tiles_of(q_len, k_len, covered, TILE, OF)
        for start in tl.range(0, tiles, _TILES):
            m = start + tl.arange(0, _TILES)
            seen = _seen_by(m, q_len, k_len, most_seen, right, TILE, OF, LONGEST)
            place = m
            if LAST_FIRST:
                place = tiles - 1 - m
            for first in tl.range(0, sequences, _OTHERS):
                other = first + others
                at = tl.minimum(other, sequences - 1)
                _, its_q_len = packed_rows(cu_q_ptr + at, q_rows)
                _, its_k_len = packed_rows(cu_k_ptr + at, k_rows)
                its_tiles = _tiles_of(its_q_len, its_k_len, covered, TILE, OF)
                its_tiles = tl.where((other < sequences) & (other != sequence), its_tiles, 0)
                least = seen[:, None] + (other > sequence)[None, :]  # of tiles that see as much, earlier sequences'
                before = _tiles_that_see(
                    least, its_q_len[None, :], its_k_len[None, :], its_tiles[None, :], most_seen, right,
                    TILE, OF, LONGEST,
                )  # fmt: skip
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
        q_sum, k_sum = tl.zeros([_OTHERS], tl.int64), tl.zeros([_OTHERS], tl.int64)
        for first in tl.range(0, sequences, _OTHERS):
            at = tl.minimum(first + others, sequences - 1)
            _, q_len = packed_rows(cu_q_ptr + at, q_rows)
            _, k_len = packed_rows(cu_k_ptr + at, k_rows)
            count += tl.where(first + others < sequences, _tiles_of(q_len, k_len, covered, TILE, OF), 0)
            q_sum += tl.where(first + others < sequences, q_len, 0)
            k_sum += tl.where(first + others < sequences, k_len, 0)
        tiles = tl.minimum(tl.sum(count, 0), most_tiles)
        if OF != "queries":
            # Who finishes a block waits for all its tiles of keys: where one list would be cut, both are empty.
            tiles = tl.where((tl.sum(q_sum, 0) <= q_rows) & (tl.sum(k_sum, 0) <= k_rows), tiles, 0)
        tl.store(list_ptr, 0)
        tl.store(list_ptr + 1, tiles)
