"""What the decode kernels share: which keys a program streams, which of them are visible, and how splits are merged.

Rows of a tile are the queries of all heads that share a KV head, head by head: row r is query `r % q_len` of head
`r // q_len`. A line is one KV head of one batch entry.

Parts of a line's keys that run side by side leave their states in a workspace, fp32:

    lses [lines, splits, rows], log2 units | outs [lines, splits, rows, DV]

the second from a multiple of four numbers on. A second kernel merges them, in their order, a fixed number at a time, so
that empty parts at the end change no bit. Where splits are shared `BY_LENGTH`, lines have as many as their keys need:
then a state belongs to an item, one split of one batch entry, and `[lines, splits]` is `[items, KV heads]`. (The last
program of a line could do it in the first launch: measured, that took 1 to 2 us longer on an H200, where the second
kernel has started before the first one ends.)

From Hopper on (`EARLY`), kernels of a stream are launched before those ahead of them end, and wait on the device:
everything that a kernel reads or writes it touches after that wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .launch import Kernel, jit
from .tiles import LN2, LOG2E, initial_state, normalised, online_softmax_step, visible_by_position


@triton.jit
def wait_for_kernels_ahead():
    """Let the kernel behind this one be launched, and wait for those before it."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def rows_of_program(kv_heads, num_splits, q_len, GROUP: tl.constexpr, BLOCK_R: tl.constexpr):
    """KV head, split, batch entry and rows of this program, KV heads fastest."""
    pid = tl.program_id(0)
    tiles_r = tl.cdiv(GROUP * q_len, BLOCK_R)
    split = pid // kv_heads % num_splits
    tile_r = pid // kv_heads // num_splits % tiles_r
    b = (pid // kv_heads // num_splits // tiles_r).to(tl.int64)
    return pid % kv_heads, split, b, tile_r * BLOCK_R + tl.arange(0, BLOCK_R)


@triton.jit
def _blocks_of_entries(
    b, lengths_ptr, batch, capacity, q_len, left, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr
):  # fmt: skip
    """Blocks of keys that some row of batch entries sees; 0 of one that does not exist."""
    length = tl.minimum(tl.load(lengths_ptr + tl.minimum(b, batch - 1)), capacity)
    seen = tl.maximum(length - first_visible(length, q_len, left, HAS_LEFT), 0)
    return tl.where(b < batch, tl.cdiv(seen, BLOCK_N), 0)


_ENTRIES = tl.constexpr(128)
"""Batch entries whose lengths are looked at together."""


_GRAIN = tl.constexpr(1024)
"""Keys of a split at least, where the GPU is full without shorter ones: to start a program takes as long as 256."""


@triton.jit
def _share_of_splits(
    lengths_ptr, batch, capacity, num_splits, q_len, left, tiles, at_a_time, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Blocks of a split where `num_splits` for each batch entry are shared by their lengths. Each has one more. A split
    is computed for so many `tiles`, and `at_a_time` of these run side by side."""
    total = 0
    for first in range(0, batch, _ENTRIES):
        b = first + tl.arange(0, _ENTRIES)
        total += tl.sum(_blocks_of_entries(b, lengths_ptr, batch, capacity, q_len, left, BLOCK_N, HAS_LEFT), 0)
    of_one_round = tl.cdiv(total * tiles, at_a_time)
    return tl.maximum(tl.cdiv(total, batch * num_splits), tl.maximum(tl.minimum(of_one_round, _GRAIN // BLOCK_N), 1))


@triton.jit
def split_of_item(
    item, lengths_ptr, batch, capacity, num_splits, q_len, left, tiles, at_a_time, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """(batch entry, split, keys of a split) of an item; entry `batch` if there are fewer items."""
    share = _share_of_splits(lengths_ptr, batch, capacity, num_splits, q_len, left, tiles, at_a_time, BLOCK_N, HAS_LEFT)
    entry, first_item, items = 0, 0, 0
    for first in range(0, batch, _ENTRIES):
        b = first + tl.arange(0, _ENTRIES)
        blocks = _blocks_of_entries(b, lengths_ptr, batch, capacity, q_len, left, BLOCK_N, HAS_LEFT)
        splits = tl.where(b < batch, tl.maximum(tl.cdiv(blocks, share), 1), 0)  # one without keys has an answer too
        ends = items + tl.cumsum(splits, 0)
        before = (ends <= item) & (b < batch)
        entry += tl.sum(before.to(tl.int32), 0)
        first_item = tl.maximum(first_item, tl.max(tl.where(before, ends, 0), 0))
        items += tl.sum(splits, 0)
    return entry, item - first_item, share * BLOCK_N


@triton.jit
def _items_of_entry(
    entry, lengths_ptr, batch, capacity, num_splits, q_len, left, tiles, at_a_time, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """(first item, how many) of a batch entry."""
    share = _share_of_splits(lengths_ptr, batch, capacity, num_splits, q_len, left, tiles, at_a_time, BLOCK_N, HAS_LEFT)
    first_item, count = 0, 0
    for first in range(0, entry + 1, _ENTRIES):
        b = first + tl.arange(0, _ENTRIES)
        blocks = _blocks_of_entries(b, lengths_ptr, batch, capacity, q_len, left, BLOCK_N, HAS_LEFT)
        splits = tl.maximum(tl.cdiv(blocks, share), 1)
        first_item += tl.sum(tl.where(b < entry, splits, 0), 0)
        count += tl.sum(tl.where(b == entry, splits, 0), 0)
    return first_item, count


@triton.jit
def queries_of_rows(offs_r, kv_head, q_len, GROUP: tl.constexpr):
    """Which rows of a tile exist, and the head and the query that each of them is."""
    head, t = kv_head * GROUP + offs_r // q_len, offs_r % q_len
    return offs_r < GROUP * q_len, head, t


@triton.jit
def keys_of_split(first, end, split, num_splits, split_keys, BLOCK_N: tl.constexpr, IN_TURN: tl.constexpr):
    """Where a split of the keys from `first` to `end` begins and ends, and how far its blocks lie apart.

    IN_TURN: splits take blocks in turn, so that what runs at a time reads from one place in memory; else each has its
    share in one run. Where `split_keys` is not 0, that is the share.
    """
    share = split_keys
    if share == 0:
        share = tl.cdiv(tl.cdiv(end - first, BLOCK_N), num_splits) * BLOCK_N
    begin, step = first + split * share, BLOCK_N
    last = tl.minimum(begin + share, end)
    if IN_TURN and split_keys == 0:
        begin, step, last = first + split * BLOCK_N, num_splits * BLOCK_N, end
    return begin, last, step


@triton.jit
def first_visible(length, q_len, left, HAS_LEFT: tl.constexpr):
    """The first key that some row sees."""
    first = 0
    if HAS_LEFT:
        first = tl.maximum(length - q_len - left, 0)
    return first


@triton.jit
def hide_scores(
    scores, inside, q_pos, k_pos, left, right, tree_ptr, first_new, mask_r,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_TREE: tl.constexpr,
):  # fmt: skip
    """-inf for what a row does not see. The tile lies either way up. `tree_ptr` points to each row's line of the tree,
    `first_new` is the position of its first column; with a tree, a query before position 0 sees nothing."""
    visible = visible_by_position(inside, q_pos, k_pos, left, right, HAS_LEFT, HAS_RIGHT)
    if HAS_TREE:
        new = k_pos - first_new
        named = tl.load(tree_ptr + new, mask=mask_r & inside & (new >= 0), other=1) != 0
        visible = visible & mask_r & (q_pos >= 0) & named
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def join_sink(lse, sink_ptr, head, mask_r):
    """The factor of the outputs, and the LSE, of rows that have met all their keys and meet a sink, a key without a
    value, if there are sinks. Log2 units."""
    factor = tl.full(lse.shape, 1.0, tl.float32)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=mask_r, other=0.0).to(tl.float32) * LOG2E
        peak = tl.maximum(lse, sink)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(lse - peak)
        total = weight + tl.exp2(sink - peak)
        factor = weight / tl.where(total != 0, total, 1.0)
        lse = peak + tl.log2(total)
    return factor, lse


@triton.jit
def _store_out(
    out, column, columns, out_ptr, stride_ob, stride_om, stride_oh, stride_od, b, t, head, mask_r, BLOCK: tl.constexpr
):
    """`columns` of the answer, from `column` on."""
    offs = tl.arange(0, BLOCK)
    to = out_ptr + b * stride_ob + (t * stride_om + head * stride_oh)[:, None] + ((column + offs) * stride_od)[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask_r[:, None] & (offs < columns)[None, :])


@triton.jit
def _store_lse(lse, lse_ptr, b, t, head, heads, q_len, mask_r):
    if lse_ptr is not None:
        tl.store(lse_ptr + (b * heads + head) * q_len + t, lse * LN2, mask=mask_r)


@triton.jit
def _outs(workspace_ptr, states, rows):
    """Where outputs begin in a workspace, behind the LSEs of so many states of a tile."""
    return workspace_ptr + tl.cdiv(states.to(tl.int64) * rows, 4) * 4


@triton.jit
def leave_state(
    out, lse, column: tl.constexpr, columns, out_ptr, lse_ptr, sink_ptr, workspace_ptr,
    stride_ob, stride_om, stride_oh, stride_od,
    kv_heads, q_len, state, states, b, kv_head, offs_r,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Leave `columns` of a program's outputs, from `column` on, as the answer or as a part of it, number `state` of
    `states`, and with the first of them its LSEs."""
    rows = GROUP * q_len
    mask_r, head, t = queries_of_rows(offs_r, kv_head, q_len, GROUP)
    if IS_SPLIT:
        at = state.to(tl.int64) * rows + offs_r
        offs = tl.arange(0, BLOCK)
        inside = mask_r[:, None] & (offs < columns)[None, :]
        to = _outs(workspace_ptr, states, rows) + at[:, None] * DV + (column + offs)[None, :]
        tl.store(to, out, mask=inside)
        if column == 0:
            tl.store(workspace_ptr + at, lse, mask=mask_r)
    else:
        factor, lse = join_sink(lse, sink_ptr, head, mask_r)
        _store_out(
            out * factor[:, None], column, columns, out_ptr, stride_ob, stride_om, stride_oh, stride_od,
            b, t, head, mask_r, BLOCK,
        )  # fmt: skip
        if column == 0:
            _store_lse(lse, lse_ptr, b, t, head, kv_heads * GROUP, q_len, mask_r)


@jit
def _merge_parts_kernel(
    workspace_ptr, lengths_ptr, sink_ptr, out_ptr, lse_ptr,
    stride_ob: tl.int64, stride_om: tl.int64, stride_oh: tl.int64, stride_od: tl.int64,
    batch: tl.int32, kv_heads: tl.int32, capacity: tl.int32, q_len: tl.int32, num_splits: tl.int32, left: tl.int32,
    at_a_time: tl.int32,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_LEFT: tl.constexpr, BY_LENGTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: one program per row."""
    if EARLY:
        wait_for_kernels_ahead()
    rows = GROUP * q_len
    line, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    first_state, step, parts, states = line * num_splits, 1, num_splits, batch * kv_heads * num_splits
    if BY_LENGTH:
        first_item, parts = _items_of_entry(
            line // kv_heads, lengths_ptr, batch, capacity, num_splits, q_len, left,
            kv_heads * tl.cdiv(rows, BLOCK_R), at_a_time, BLOCK_N, HAS_LEFT,
        )  # fmt: skip
        first_state, step, states = (
            first_item * kv_heads + line % kv_heads,
            kv_heads,
            batch * kv_heads * (num_splits + 1),
        )
    outs = _outs(workspace_ptr, states, rows)
    offs_dv = tl.arange(0, BLOCK_DV)
    row_max, row_sum, acc = initial_state(1, BLOCK_DV)
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = part < parts
        at = (first_state + part * step).to(tl.int64) * rows + row
        lse = tl.load(workspace_ptr + at, mask=there, other=float("-inf"))
        inside = there[:, None] & (offs_dv < DV)[None, :]
        out = tl.load(outs + at[:, None] * DV + offs_dv[None, :], mask=inside, other=0.0)
        p, rescale, row_max, row_sum = online_softmax_step(lse[None, :], 1.0, row_max, row_sum, GUARD=True)
        acc = acc * rescale[:, None] + tl.sum(out * p.reshape(AT_ONCE)[:, None], 0)[None, :]
    out, lse = normalised(acc, row_max, row_sum)
    b, kv_head = (line // kv_heads).to(tl.int64), line % kv_heads
    offs_r = row + tl.arange(0, 1)
    mask_r, head, t = queries_of_rows(offs_r, kv_head, q_len, GROUP)
    factor, lse = join_sink(lse, sink_ptr, head, mask_r)
    _store_out(
        out * factor[:, None], 0, DV, out_ptr, stride_ob, stride_om, stride_oh, stride_od,
        b, t, head, mask_r, BLOCK_DV,
    )  # fmt: skip
    _store_lse(lse, lse_ptr, b, t, head, kv_heads * GROUP, q_len, mask_r)


merge_kernel = Kernel(_merge_parts_kernel)
