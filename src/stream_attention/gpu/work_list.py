"""The work of a call of ragged queries on paged keys, listed on the device: tiles of rows, and splits of their keys.

Rows of a tile are queries of all heads that share a KV head, head by head, of one request. A tile with more keys than
its share of all work, as of few tokens with many keys, is split; else it is one item. Nothing waits for another
program, or for the host: a program finds the place of its request's items as a sum over those before it.

A list is `HEADER` words, of which the second counts the items, then `WORDS` words for each: request, tile, split, how
many splits, the first place of their states in a workspace, and first row and count of the request's queries, and its
keys. Grid of what calls `list_work`: any; programs share the requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import packed_rows

HEADER = WORDS = 8
_HEADER, _WORDS = tl.constexpr(HEADER), tl.constexpr(WORDS)
_AT_ONCE = tl.constexpr(128)
_ITEMS = tl.constexpr(32)
INVARIANT_KEYS, INVARIANT_SPLITS = 2048, 8
_INVARIANT_KEYS, _INVARIANT_SPLITS = tl.constexpr(INVARIANT_KEYS), tl.constexpr(INVARIANT_SPLITS)


def most_items(rows: int, requests: int, group: int, block_r: int, programs: int) -> int:
    """How many items there may be of so many queries, where `programs` for each KV head fill the GPU."""
    return rows * group // block_r + requests + (programs + 1 if programs else (INVARIANT_SPLITS - 1) * requests)


def most_states(requests: int, programs: int) -> int:
    """How many items may be splits: a tile that is split has fewer than twice its blocks over a share."""
    return 2 * programs + 2 if programs else INVARIANT_SPLITS * requests


@triton.jit
def _splits_of(tiles, blocks, share, BLOCK_N: tl.constexpr):
    """Splits of each tile of requests. `share` 0: as nothing but the request itself decides, and only of one tile."""
    of_its_own = tl.minimum(tl.cdiv(blocks, _INVARIANT_KEYS // BLOCK_N), _INVARIANT_SPLITS)
    splits = tl.where(share > 0, tl.cdiv(blocks, tl.maximum(share, 1)), tl.where(tiles > 1, 1, of_its_own))
    return tl.maximum(splits, 1)


@triton.jit
def _sizes(
    request, requests, cu_q_ptr, lengths_ptr, rows, most_keys, left, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """First row, queries, keys, tiles, and blocks of keys that some query sees; no tiles of what is not there."""
    at = tl.minimum(request, requests - 1)
    first, q_len = packed_rows(cu_q_ptr + at, rows)
    length = tl.maximum(tl.minimum(tl.load(lengths_ptr + at), most_keys), 0)
    seen = length
    if HAS_LEFT:
        seen = tl.minimum(length, q_len + left)
    tiles = tl.where(request < requests, tl.cdiv(q_len * GROUP, BLOCK_R), 0)
    return first, q_len, length, tiles, tl.cdiv(seen, BLOCK_N)


@triton.jit
def list_work(
    list_ptr, cu_q_ptr, lengths_ptr, requests, rows, most_keys, left, programs, most_items,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Write the list: equal shares of all work for so many `programs` for each KV head, and for each tile one more.
    Without `programs` no request changes how another is split."""
    total = tl.zeros([_AT_ONCE], tl.int64)
    for first in tl.range(0, requests, _AT_ONCE):
        request = first + tl.arange(0, _AT_ONCE)
        _, _, _, tiles, blocks = _sizes(
            request, requests, cu_q_ptr, lengths_ptr, rows, most_keys, left, GROUP, BLOCK_R, BLOCK_N, HAS_LEFT
        )
        total += tiles.to(tl.int64) * blocks
    share = tl.where(programs > 0, tl.maximum(tl.cdiv(tl.sum(total, 0), tl.maximum(programs, 1)), 1), 0).to(tl.int32)
    for own in tl.range(tl.program_id(0), requests, tl.num_programs(0)):
        items_before = tl.zeros([_AT_ONCE], tl.int32)
        states_before = tl.zeros([_AT_ONCE], tl.int32)
        for first in tl.range(0, own, _AT_ONCE):
            request = first + tl.arange(0, _AT_ONCE)
            _, _, _, tiles, blocks = _sizes(
                request, requests, cu_q_ptr, lengths_ptr, rows, most_keys, left, GROUP, BLOCK_R, BLOCK_N, HAS_LEFT
            )
            splits = _splits_of(tiles, blocks, share, BLOCK_N)
            items = tl.where(request < own, tiles * splits, 0)
            items_before += items
            states_before += tl.where(splits > 1, items, 0)
        item, state = tl.sum(items_before, 0), tl.sum(states_before, 0)
        q_first, q_len, length, tiles, blocks = _sizes(
            own, requests, cu_q_ptr, lengths_ptr, rows, most_keys, left, GROUP, BLOCK_R, BLOCK_N, HAS_LEFT
        )
        splits = _splits_of(tiles, blocks, share, BLOCK_N)
        count = tiles * splits
        for start in tl.range(0, count, _ITEMS):
            n = start + tl.arange(0, _ITEMS)
            inside = (n < count) & (item + n < most_items)  # which offsets that contradict each other exceed
            record = list_ptr + _HEADER + _WORDS * (item + n)
            tl.store(record, own, mask=inside)
            tl.store(record + 1, n // splits, mask=inside)
            tl.store(record + 2, n % splits, mask=inside)
            tl.store(record + 3, splits, mask=inside)
            tl.store(record + 4, state + n // splits * splits, mask=inside)
            tl.store(record + 5, q_first.to(tl.int32), mask=inside)
            tl.store(record + 6, q_len, mask=inside)
            tl.store(record + 7, length, mask=inside)
        if own == requests - 1:
            tl.store(list_ptr + 1, tl.minimum(item + count, most_items))
