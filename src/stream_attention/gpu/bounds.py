"""Masks given as intervals, in Triton: what a tile sees, and lists of the tiles that see anything.

Query i sees the keys at positions from its `start` to before its `end`, and key j is seen by queries whose `label` lies
from its `first` to before its `last` (`Inputs.query_bounds`, `Inputs.key_bounds`). Least and greatest values over the
rows of a tile say whether it is masked for all of them, visible to all, or neither. Causal and window are part of the
intervals here, not of positions.

A list belongs to a tile of queries (of keys: `OF_KEYS`): how many tiles of keys it sees in part, how many it sees at
all, then their numbers, those that it sees in part first. Main loops walk lists, so what is masked is neither read nor
computed, and what is visible to all runs without masking. Grid: one program per list.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..base.problem import Inputs, Problem
from .arguments import FAR, cdiv, sample
from .launch import Kernel, jit
from .prepass import Step

HEADER = 2
_HEADER = tl.constexpr(HEADER)
_AT_ONCE = tl.constexpr(16)
"""Tiles that are looked at together."""

_FAR = tl.constexpr(FAR)


@jit
def _list_tiles_kernel(
    query_bounds_ptr, key_bounds_ptr, list_ptr,
    q_len: tl.int32, k_len: tl.int32, k_start: tl.int32, k_stride: tl.int32,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(q_len, BLOCK_M), tl.cdiv(k_len, BLOCK_N)
    owners, others = tiles_m, tiles_n
    if OF_KEYS:
        owners, others = tiles_n, tiles_m
    own = tl.program_id(0) % owners + tl.arange(0, 1)
    entry = (tl.program_id(0) // owners).to(tl.int64)
    list_ptr += tl.program_id(0).to(tl.int64) * (_HEADER + others)
    query_bounds_ptr += entry * 3 * q_len
    if key_bounds_ptr is not None:
        key_bounds_ptr += entry * 2 * k_len

    # Twice: how many are seen in part, and then where each stands.
    partial, seen = 0, 0
    for writes in tl.static_range(2):
        whole_from, partial_from = partial, 0
        for first in tl.range(0, others, _AT_ONCE):
            tile = first + tl.arange(0, _AT_ONCE)
            tile_m, tile_n = own, tile
            if OF_KEYS:
                tile_m, tile_n = tile, own
            some, whole = _states(
                query_bounds_ptr, key_bounds_ptr, tile_m, tile_n, q_len, k_len, k_start, k_stride, BLOCK_M, BLOCK_N
            )
            whole = (some & whole & (tile < others)).to(tl.int32)
            some = (some & (tile < others)).to(tl.int32)
            cut = some - whole
            if writes == 0:
                partial += tl.sum(cut, 0)
                seen += tl.sum(some, 0)
            else:
                place = tl.where(whole != 0, whole_from + tl.cumsum(whole, 0), partial_from + tl.cumsum(cut, 0)) - 1
                tl.store(list_ptr + _HEADER + place, tile, mask=some != 0)
                whole_from += tl.sum(whole, 0)
                partial_from += tl.sum(cut, 0)
    tl.store(list_ptr, partial)
    tl.store(list_ptr + 1, seen)


@jit
def _seen_in_lists_kernel(
    query_bounds_ptr, key_bounds_ptr, list_ptr, flags_ptr,
    q_len: tl.int32, k_len: tl.int32, k_start: tl.int32, k_stride: tl.int32,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Flags of the rows of a tile, or of its keys: whether lists of GROUP heads have a score of theirs. Grid: a program
    for each tile of each line of flags."""
    tiles_m, tiles_n = tl.cdiv(q_len, BLOCK_M), tl.cdiv(k_len, BLOCK_N)
    owners, others, length = tiles_m, tiles_n, q_len
    BLOCK: tl.constexpr = BLOCK_N if OF_KEYS else BLOCK_M
    if OF_KEYS:
        owners, others, length = tiles_n, tiles_m, k_len
    own, line = tl.program_id(0) % owners, (tl.program_id(0) // owners).to(tl.int64)
    mine = own * BLOCK + tl.arange(0, BLOCK)
    seen_any = (mine >= length).to(tl.int32)
    for member in tl.static_range(GROUP):
        entry = line * GROUP + member
        lists = list_ptr + (entry * owners + own) * (_HEADER + others)
        partial, seen = tl.load(lists), tl.load(lists + 1)
        seen_any = tl.maximum(seen_any, (seen > partial).to(tl.int32))
        at = 0
        while (at < partial) & (tl.min(seen_any, 0) == 0):
            tile = tl.load(lists + _HEADER + at)
            rows, columns = mine, tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if OF_KEYS:
                rows, columns = tile * BLOCK_M + tl.arange(0, BLOCK_M), mine
            start, end, label = query_interval(query_bounds_ptr + entry * 3 * q_len, rows, rows < q_len, q_len)
            visible = (columns < k_len)[None, :]
            visible = visible & within((k_start + columns * k_stride)[None, :], start[:, None], end[:, None])
            if key_bounds_ptr is not None:
                first, last = key_interval(key_bounds_ptr + entry * 2 * k_len, columns, columns < k_len, k_len)
                visible = visible & within(label[:, None], first[None, :], last[None, :])
            seen_any = tl.maximum(seen_any, tl.max(visible.to(tl.int32), 0 if OF_KEYS else 1))
            at += 1
    tl.store(flags_ptr + line * length + mine, seen_any.to(tl.int8), mask=mine < length)


@triton.jit
def _states(
    query_bounds_ptr, key_bounds_ptr, tile_m, tile_n, q_len, k_len, k_start, k_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whether some query of a tile sees some key, and whether all see all, of several tiles of queries with one of
    keys, or of one with several. The last of a side counts as cut where it is not full."""
    rows = tile_m[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    columns = tile_n[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_row, is_column = rows < q_len, columns < k_len
    start, end, label = query_interval(query_bounds_ptr, rows, is_row, q_len)
    is_empty = start >= end
    nearest = k_start + tile_n * BLOCK_N * k_stride
    farthest = k_start + tl.minimum(tile_n * BLOCK_N + BLOCK_N, k_len) * k_stride - k_stride
    some = (tl.min(tl.where(is_empty, _FAR, start), 1) <= farthest) & (tl.max(tl.where(is_empty, 0, end), 1) > nearest)
    whole = (tl.max(start, 1) <= nearest) & (tl.min(tl.where(is_row, end, _FAR), 1) > farthest)
    if key_bounds_ptr is not None:
        first, last = key_interval(key_bounds_ptr, columns, is_column, k_len)
        unseen = first >= last
        least, most = tl.min(tl.where(is_row, label, _FAR), 1), tl.max(tl.where(is_row, label, -_FAR), 1)
        some &= (tl.min(tl.where(unseen, _FAR, first), 1) <= most) & (tl.max(tl.where(unseen, -_FAR, last), 1) > least)
        whole &= tl.max(tl.where(is_column, first, -_FAR), 1) <= least
        whole &= tl.min(tl.where(is_column, last, _FAR), 1) > most
    return some, whole & (tile_m * BLOCK_M + BLOCK_M <= q_len) & (tile_n * BLOCK_N + BLOCK_N <= k_len)


@triton.jit
def query_interval(query_bounds_ptr, rows, is_row, q_len):
    """Start, end and label of queries; of one that does not exist an empty interval."""
    start = tl.load(query_bounds_ptr + rows, mask=is_row, other=0)
    end = tl.load(query_bounds_ptr + q_len + rows, mask=is_row, other=0)
    return start, end, tl.load(query_bounds_ptr + 2 * q_len + rows, mask=is_row, other=0)


@triton.jit
def key_interval(key_bounds_ptr, columns, is_column, k_len):
    """First and last label of the queries that see keys; of a key that does not exist none."""
    first = tl.load(key_bounds_ptr + columns, mask=is_column, other=0)
    return first, tl.load(key_bounds_ptr + k_len + columns, mask=is_column, other=0)


@triton.jit
def within(value, lo, hi):
    return (value >= lo) & (value < hi)


def entry_strides(problem: Problem, inputs: Inputs) -> tuple[int, int]:
    """How far apart the bounds, and the lists, of batch entries and heads are, 0 in dims in which they are shared."""
    if inputs.query_bounds is None:
        return 0, 0
    batch, heads = inputs.query_bounds.shape[:2]
    return heads if batch > 1 else 0, int(heads > 1)


def _lists_of(problem: Problem, inputs: Inputs, block_m: int, block_n: int, of_keys: bool) -> Any:
    """A sample of the lists of tiles of these sizes."""
    assert inputs.query_bounds is not None
    batch, heads = inputs.query_bounds.shape[:2]
    tiles = cdiv(problem.q_len, block_m), cdiv(problem.k_len, block_n)
    owners, others = reversed(tiles) if of_keys else tiles
    return sample((batch * heads, owners, HEADER + others), torch.int32)


def list_step(problem: Problem, inputs: Inputs, block_m: int, block_n: int, of_keys: bool) -> Step:
    """What lists tiles of these sizes, int32 `[entries, tiles, 2 + tiles of the other side]`."""
    query_bounds, key_bounds = inputs.query_bounds, inputs.key_bounds
    lists = _lists_of(problem, inputs, block_m, block_n, of_keys)
    entries, owners, _ = lists.shape
    launch = _list.bind_addresses(
        entries * owners,
        {"num_warps": 4},
        inputs.query.device,
        query_bounds_ptr=query_bounds,
        key_bounds_ptr=key_bounds,
        list_ptr=lists,
        q_len=problem.q_len,
        k_len=problem.k_len,
        k_start=problem.k_start,
        k_stride=problem.k_stride,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        OF_KEYS=of_keys,
    )
    return Step(lists, launch, ("query_bounds", "key_bounds"))


def seen_step(problem: Problem, inputs: Inputs, block_m: int, block_n: int, of_keys: bool) -> Step:
    """What computes flags of visible rows (gpu/visibility.py) from lists of such tiles."""
    assert inputs.query_bounds is not None
    batch, heads = inputs.query_bounds.shape[:2]
    group = problem.group if of_keys and heads > 1 else 1
    length, block = (problem.k_len, block_n) if of_keys else (problem.q_len, block_m)
    flags = sample((batch, heads // group, length), torch.int8)
    name = "query_lists" if of_keys else "key_lists"
    launch = _seen.bind_addresses(
        batch * heads // group * cdiv(length, block),
        {"num_warps": 4},
        inputs.query.device,
        query_bounds_ptr=inputs.query_bounds,
        key_bounds_ptr=inputs.key_bounds,
        list_ptr=_lists_of(problem, inputs, block_m, block_n, of_keys),
        flags_ptr=flags,
        q_len=problem.q_len,
        k_len=problem.k_len,
        k_start=problem.k_start,
        k_stride=problem.k_stride,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        OF_KEYS=of_keys,
    )
    return Step(flags, launch, ("query_bounds", "key_bounds", name))


_list, _seen = Kernel(_list_tiles_kernel), Kernel(_seen_in_lists_kernel)
