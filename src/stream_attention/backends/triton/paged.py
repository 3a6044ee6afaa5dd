"""Ragged queries on paged keys in Triton: prompts, parts of prompts and single tokens of many requests in one call.

Grid: one program per (KV head, item of the work list), heads first. Before it, gpu/work_list.py lists the items; behind
it, where keys of a tile are in splits, their states are merged. The main loop is that of decode.py: what differs is
where a tile's queries are and which keys it needs. Keys that no row of a tile sees are not read.

Pages may lie anywhere and in any order, with any strides but that of the last dim. A request's pages are a row of
`page_table`, or a run of `kv_indices`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...base.problem import PagedInputs, Problem
from ...gpu.decode_tiles import join_sink, keys_of_split, queries_of_rows
from ...gpu.launch import Kernel, jit
from ...gpu.paged_call import PreparedPaged
from ...gpu.paged_tuning import PagedConfig
from ...gpu.tail import clear_uncomputed
from ...gpu.tiles import LN2, initial_state, load_rows, normalised, online_softmax_step
from ...gpu.work_list import HEADER, WORDS, list_work
from .decode import stream_keys

_HEADER, _WORDS = tl.constexpr(HEADER), tl.constexpr(WORDS)
_NEVER = tl.constexpr(1 << 30)
"""A position behind every key."""


@jit
def _list_kernel(
    list_ptr, cu_q_ptr, lengths_ptr,
    requests: tl.int32, rows: tl.int32, most_keys: tl.int32, left: tl.int32, programs: tl.int32, most_items: tl.int32,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    list_work(
        list_ptr, cu_q_ptr, lengths_ptr, requests, rows, most_keys, left, programs, most_items,
        GROUP, BLOCK_R, BLOCK_N, HAS_LEFT,
    )  # fmt: skip


@triton.jit
def _store_answer(
    out, lse, row, head, mask_r, out_ptr, lse_ptr, sink_ptr, stride_om, stride_oh, rows,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    factor, lse = join_sink(lse, sink_ptr, head, mask_r)
    columns = tl.arange(0, BLOCK_DV)
    to = out_ptr + (row.to(tl.int64) * stride_om + head * stride_oh)[:, None] + columns[None, :]
    inside = mask_r[:, None] & (columns < DV)[None, :]
    tl.store(to, (out * factor[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + head.to(tl.int64) * rows + row, lse * LN2, mask=mask_r)


@jit
def _paged_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, indptr_ptr, list_ptr, slopes_ptr, sink_ptr,
    causal_ptr, tree_ptr, tree_offsets_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, states_ptr,
    stride_qm: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_tb: tl.int64, stride_ab: tl.int64, stride_om: tl.int64, stride_oh: tl.int64,
    stride_ksb: tl.int64, stride_ksh: tl.int64, stride_vsb: tl.int64, stride_vsh: tl.int64,
    rows: tl.int32, kv_heads: tl.int32, pages: tl.int32, entries: tl.int32, most_states: tl.int32,
    most_trees: tl.int64, left: tl.int32, right: tl.int32, scale, softcap, value_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """`right` is that of requests that are not causal, where `causal_ptr` or a tree says so of some."""
    if ALIGNED:
        stride_qm, stride_qh = stride_qm * 8, stride_qh * 8
        stride_kb, stride_kn, stride_kh = stride_kb * 8, stride_kn * 8, stride_kh * 8
        stride_vb, stride_vn, stride_vh = stride_vb * 8, stride_vn * 8, stride_vh * 8
    HAS_ALIBI: tl.constexpr = slopes_ptr is not None
    HAS_TREE: tl.constexpr = tree_ptr is not None

    # Where am I.
    kv_head, item = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    if item >= tl.load(list_ptr + 1):
        return
    record = list_ptr + _HEADER + _WORDS * item
    request, tile, split, splits = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    q_first, q_len, length = tl.load(record + 5), tl.load(record + 6), tl.load(record + 7)
    if indptr_ptr is not None:
        own = tl.minimum(tl.maximum(tl.load(indptr_ptr + request), 0), entries)
        there = tl.minimum(tl.load(indptr_ptr + request + 1), entries) - own
        length = tl.minimum(length, tl.maximum(tl.minimum(there, tl.cdiv(length, PAGE)), 0) * PAGE)
        table_ptr += tl.minimum(own, entries - 1)  # where one is read even if there is no key
    else:
        table_ptr += request.to(tl.int64) * stride_tb
    offs_r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r, head, t = queries_of_rows(offs_r, kv_head, q_len, GROUP)
    down = (length - q_len + t)[:, None]  # where the queries stand

    # What the request has of its own: a tree, the keys behind a query, scales.
    first_new, tree_rows, has_tree = length - q_len, down, False
    if HAS_TREE:
        tree = tl.load(tree_offsets_ptr + request).to(tl.int64)
        tree_end = tl.load(tree_offsets_ptr + request + 1).to(tl.int64)
        has_tree = (tree_end - tree == q_len.to(tl.int64) * q_len) & (tree >= 0) & (tree_end <= most_trees)
        tree_rows = (tree_ptr + tl.where(has_tree, tree, 0) + t.to(tl.int64) * q_len)[:, None]
        first_new = tl.where(has_tree, first_new, _NEVER)
    if IS_CAUSAL:
        is_causal = has_tree == 0
        if causal_ptr is not None:
            is_causal = is_causal & (tl.load(causal_ptr + request) != 0)
        right = tl.where(is_causal, 0, right)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + request * stride_ksb + kv_head * stride_ksh)

    # Which keys some row of the tile sees, and which of those are mine.
    last_row = tl.minimum(tile * BLOCK_R + BLOCK_R, GROUP * q_len) - 1
    one_head = tile * BLOCK_R // q_len == last_row // q_len
    first, end = 0, length
    if HAS_RIGHT:
        last_t = tl.where(one_head, last_row % q_len, q_len - 1)
        end = tl.minimum(length, tl.maximum(length - q_len + last_t + right + 1, 0))
    if HAS_LEFT:
        first_t = tl.where(one_head, tile * BLOCK_R % q_len, 0)
        first = tl.minimum(tl.maximum(length - q_len + first_t - left, 0), end)
    begin, end, step = keys_of_split(first, end, split, splits, 0, BLOCK_N, False)

    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    offs_d = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + (q_first + t).to(tl.int64) * stride_qm + head * stride_qh
    q = load_rows(q_rows[:, None], offs_d[None, :], mask_r, D, BLOCK_D, MASKED=True)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + request * stride_ab + head, mask=mask_r, other=0.0).to(tl.float32)[:, None]

    row_max, row_sum, acc = initial_state(BLOCK_R, BLOCK_DV)
    new = end
    TREE_N: tl.constexpr = 16  # keys of a block that has new ones; more of them spill, beside their lines of the tree
    if HAS_TREE:
        new = tl.minimum(begin + tl.maximum(first_new - begin, 0) // BLOCK_N * BLOCK_N, tl.maximum(end, begin))
    row_max, row_sum, acc = stream_keys(
        row_max, row_sum, acc, q, k_ptr, v_ptr, table_ptr, tree_rows, stride_kb, stride_kn, stride_vb, stride_vn,
        begin, new, step, pages, first_new, down, mask_r, slopes, left, right, scale, softcap,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_R, BLOCK_N, PAGE, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, False,
        PRECISION, TANH,
    )  # fmt: skip
    if HAS_TREE:
        row_max, row_sum, acc = stream_keys(
            row_max, row_sum, acc, q, k_ptr, v_ptr, table_ptr, tree_rows, stride_kb, stride_kn, stride_vb, stride_vn,
            new, end, TREE_N, pages, first_new, down, mask_r, slopes, left, right, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_R, TREE_N, PAGE, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, True,
            PRECISION, TANH, 1,
        )  # fmt: skip
    out, lse = normalised(acc, row_max, row_sum)
    if v_ptr.dtype.element_ty != q_ptr.dtype.element_ty:
        out *= value_scale
        if v_scale_ptr is not None:
            out *= tl.load(v_scale_ptr + request * stride_vsb + kv_head * stride_vsh)
    if splits == 1:
        _store_answer(
            out, lse, q_first + t, head, mask_r, out_ptr, lse_ptr, sink_ptr, stride_om, stride_oh, rows, DV, BLOCK_DV
        )
    else:
        state = (tl.load(record + 4) + split).to(tl.int64) * kv_heads + kv_head
        at = state * BLOCK_R + tl.arange(0, BLOCK_R)
        columns = tl.arange(0, BLOCK_DV)
        tl.store(states_ptr + at, lse)
        outs = states_ptr + most_states.to(tl.int64) * kv_heads * BLOCK_R
        tl.store(outs + at[:, None] * DV + columns[None, :], out, mask=(columns < DV)[None, :])


@jit
def _merge_splits_kernel(
    list_ptr, states_ptr, cu_q_ptr, sink_ptr, out_ptr, lse_ptr,
    stride_om: tl.int64, stride_oh: tl.int64,
    rows: tl.int32, requests: tl.int32, kv_heads: tl.int32, most_states: tl.int32,
    GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr, CLEARS: tl.constexpr,
):  # fmt: skip
    """Grid: as that of the kernel before; the first split of a tile merges all of them, in their order. Rows of no
    request are cleared, of out where the caller did not say where it is."""
    if CLEARS:
        clear_uncomputed(out_ptr, cu_q_ptr, requests, rows, rows, kv_heads * GROUP * DV, 0.0)
    if lse_ptr is not None:
        clear_uncomputed(lse_ptr, cu_q_ptr, requests, rows, rows, 1, float("-inf"), kv_heads * GROUP)
    kv_head, item = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    if item >= tl.load(list_ptr + 1):
        return
    record = list_ptr + _HEADER + _WORDS * item
    splits = tl.load(record + 3)
    if (splits > 1) & (tl.load(record + 2) == 0):
        q_first, q_len = tl.load(record + 5), tl.load(record + 6)
        offs_r = tl.load(record + 1) * BLOCK_R + tl.arange(0, BLOCK_R)
        mask_r, head, t = queries_of_rows(offs_r, kv_head, q_len, GROUP)
        columns = tl.arange(0, BLOCK_DV)
        outs = states_ptr + most_states.to(tl.int64) * kv_heads * BLOCK_R
        row_max, row_sum, acc = initial_state(BLOCK_R, BLOCK_DV)
        for split in range(splits):
            state = (tl.load(record + 4) + split).to(tl.int64) * kv_heads + kv_head
            at = state * BLOCK_R + tl.arange(0, BLOCK_R)
            lse = tl.load(states_ptr + at)
            out = tl.load(outs + at[:, None] * DV + columns[None, :], mask=(columns < DV)[None, :], other=0.0)
            p, rescale, row_max, row_sum = online_softmax_step(lse[:, None], 1.0, row_max, row_sum, GUARD=True)
            acc = acc * rescale[:, None] + out * p
        out, lse = normalised(acc, row_max, row_sum)
        _store_answer(
            out, lse, q_first + t, head, mask_r, out_ptr, lse_ptr, sink_ptr, stride_om, stride_oh, rows, DV, BLOCK_DV
        )


def prepare_paged(problem: Problem, inputs: PagedInputs, config: PagedConfig) -> Any:
    """The call on every pool of pages that lies as this one does, of any number of queries."""
    return PreparedPaged(problem, inputs, config, list_kernel, paged_kernel, merge_kernel)


list_kernel, paged_kernel, merge_kernel = Kernel(_list_kernel), Kernel(_paged_kernel), Kernel(_merge_splits_kernel)
