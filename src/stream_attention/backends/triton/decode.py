"""Few queries against a cache of 16- or 32-bit elements in Triton, contiguous or paged, with the keys in splits.

Grid: one program per (KV head, split of the keys, tile of rows, batch entry), heads first: those of a token lie side by
side in memory. Where rows may have different lengths, splits of all of them are one number, an item: long rows have
more. The rows of a tile are the queries of all heads that share a KV head, so that keys and values are read once for
all of them. A program streams its keys with the online softmax of forward.py.

A row's length and its pages are read on the device, so nothing here waits for them. Blocks that reach beyond the last
key read that one again, and nothing that is masked for every row: it may be NaN.

Not here: quantised caches (decode_quantized.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...base.kv_layouts import KVCache, PagedKV, QuantizedKV
from ...base.problem import DecodeInputs, Problem
from ...gpu.arguments import tile_width
from ...gpu.decode_call import DecodeCall, side_by_side
from ...gpu.decode_launches import PreparedDecode, prepare_decode_by
from ...gpu.decode_tiles import (
    first_visible,
    hide_scores,
    keys_of_split,
    leave_state,
    queries_of_rows,
    rows_of_program,
    split_of_item,
    wait_for_kernels_ahead,
)
from ...gpu.decode_tuning import DecodeConfig
from ...gpu.launch import Kernel, jit
from ...gpu.tiles import initial_state, load_rows, modify_scores, normalised, online_softmax_step
from .decode_quantized import quantized_kernel, quantized_kernel_arguments


@triton.jit
def stream_keys(
    row_max, row_sum, acc, q, k_ptr, v_ptr, table_ptr, tree_rows, stride_kb, stride_kn, stride_vb, stride_vn,
    begin, end, step, pages, first_new, down, mask_r, slopes, left, right, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_TREE: tl.constexpr, PRECISION: tl.constexpr,
    TANH: tl.constexpr, STAGES: tl.constexpr = None,
):  # fmt: skip
    """Row max, row sum and accumulator of a tile of queries, which stand at positions `down`, after the blocks of keys
    from `begin` to before `end` of one row of a cache. `table_ptr` points to its pages, and `tree_rows` to each row's
    line of a tree, whose first column is the key at `first_new`."""
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    if PAGE != 0:  # a block's pages are looked up an iteration ahead
        page = tl.load(table_ptr + tl.maximum(tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1), 0) // PAGE)
    for start in tl.range(begin, end, step, num_stages=STAGES):
        k_pos = start + tl.arange(0, BLOCK_N)
        inside = k_pos < end
        token = tl.minimum(k_pos, end - 1)
        if PAGE == 0:
            k_rows, v_rows = token * stride_kn, token * stride_vn
        else:
            exists = (page >= 0) & (page < pages)
            place = tl.where(exists, page, 0).to(tl.int64)
            slot = token % PAGE
            k_rows = place * stride_kb + slot * stride_kn
            v_rows = place * stride_vb + slot * stride_vn
            page = tl.load(table_ptr + tl.minimum(k_pos + step, end - 1) // PAGE)
        k = load_rows(k_ptr + k_rows[:, None], offs_d[None, :], inside, D, BLOCK_D, MASKED=False).to(q.dtype)
        v = load_rows(v_ptr + v_rows[:, None], offs_dv[None, :], inside, DV, BLOCK_DV, MASKED=False).to(q.dtype)
        if PRECISION == "ieee" and BLOCK_D > 64:
            # Sums of 64 products, added up: 256 one after the other are off by more than torch's, which adds in a tree.
            parts: tl.constexpr = BLOCK_D // 64
            folded_q = q.reshape(BLOCK_R, parts, 64).permute(1, 0, 2)
            folded_k = k.reshape(BLOCK_N, parts, 64).permute(1, 2, 0)
            qk = tl.sum(tl.dot(folded_q, folded_k, input_precision=PRECISION), 0)
        else:
            qk = tl.dot(q, k.T, input_precision=PRECISION)
        across = k_pos[None, :]
        scores, _ = modify_scores(qk, scale, softcap, slopes, down, across, 0.0, HAS_SOFTCAP, HAS_ALIBI, 0, TANH)
        if PAGE != 0:
            scores = tl.where(exists[None, :], scores, float("nan"))
        scores = hide_scores(
            scores, inside[None, :], down, across, left, right, tree_rows, first_new, mask_r[:, None],
            HAS_LEFT, HAS_RIGHT, HAS_TREE,
        )  # fmt: skip
        if HAS_TREE:  # a new token that is masked for every row may be NaN
            v = tl.where((tl.max(scores, 0) != float("-inf"))[:, None], v, 0.0)
        p, rescale, row_max, row_sum = online_softmax_step(scores, 1.0, row_max, row_sum, GUARD=True)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

    return row_max, row_sum, acc


@jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, tree_ptr, slopes_ptr, sink_ptr, out_ptr, lse_ptr, workspace_ptr,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_tb: tl.int64, stride_rb: tl.int64, stride_rm: tl.int64, stride_ab: tl.int64,
    stride_ob: tl.int64, stride_om: tl.int64, stride_oh: tl.int64, stride_od: tl.int64,
    batch: tl.int32, kv_heads: tl.int32, capacity: tl.int32, pages: tl.int32, q_len: tl.int32,
    num_splits: tl.int32, split_keys: tl.int32, at_a_time: tl.int32,
    left: tl.int32, right: tl.int32, scale, softcap,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr, BY_LENGTH: tl.constexpr, EARLY: tl.constexpr, PRECISION: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    if ALIGNED:
        stride_qb, stride_qm, stride_qh = stride_qb * 8, stride_qm * 8, stride_qh * 8
        stride_kb, stride_kn, stride_kh = stride_kb * 8, stride_kn * 8, stride_kh * 8
        stride_vb, stride_vn, stride_vh = stride_vb * 8, stride_vn * 8, stride_vh * 8
    if EARLY:
        wait_for_kernels_ahead()
    HAS_TREE: tl.constexpr = tree_ptr is not None
    HAS_ALIBI: tl.constexpr = slopes_ptr is not None

    # Where am I.
    if BY_LENGTH:
        items = batch * (num_splits + 1)
        kv_head, item, b, offs_r = rows_of_program(kv_heads, items, q_len, GROUP, BLOCK_R)
        entry, split, split_keys = split_of_item(
            item, lengths_ptr, batch, capacity, num_splits, q_len, left,
            kv_heads * tl.cdiv(GROUP * q_len, BLOCK_R), at_a_time, BLOCK_N, HAS_LEFT,
        )  # fmt: skip
        if entry == batch:
            return
        b, state, states = entry.to(tl.int64), item * kv_heads + kv_head, items * kv_heads
    else:
        kv_head, split, b, offs_r = rows_of_program(kv_heads, num_splits, q_len, GROUP, BLOCK_R)
        state, states = (b * kv_heads + kv_head) * num_splits + split, batch * kv_heads * num_splits
    mask_r, head, t = queries_of_rows(offs_r, kv_head, q_len, GROUP)
    length = capacity
    if lengths_ptr is not None:
        length = tl.minimum(tl.load(lengths_ptr + b), capacity)
    down = (length - q_len + t)[:, None]  # where the queries stand
    offs_d = tl.arange(0, BLOCK_D)
    q_rows = q_ptr + b * stride_qb + t * stride_qm + head * stride_qh

    first = first_visible(length, q_len, left, HAS_LEFT)
    begin, end, step = keys_of_split(first, length, split, num_splits, split_keys, BLOCK_N, PAGE == 0)
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    if PAGE == 0:
        k_ptr += b * stride_kb
        v_ptr += b * stride_vb
    else:
        table_ptr += b * stride_tb
    q = load_rows(q_rows[:, None], offs_d[None, :], mask_r, D, BLOCK_D, MASKED=True)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + b * stride_ab + head, mask=mask_r, other=0.0).to(tl.float32)[:, None]
    tree_rows = q_rows
    if HAS_TREE:
        tree_rows = (tree_ptr + b * stride_rb + t * stride_rm)[:, None]

    row_max, row_sum, acc = initial_state(BLOCK_R, BLOCK_DV)
    row_max, row_sum, acc = stream_keys(
        row_max, row_sum, acc, q, k_ptr, v_ptr, table_ptr, tree_rows, stride_kb, stride_kn, stride_vb, stride_vn,
        begin, end, step, pages, length - q_len, down, mask_r, slopes, left, right, scale, softcap,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_R, BLOCK_N, PAGE, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_TREE,
        PRECISION, TANH,
    )  # fmt: skip
    out, lse = normalised(acc, row_max, row_sum)
    leave_state(
        out, lse, 0, DV, out_ptr, lse_ptr, sink_ptr, workspace_ptr, stride_ob, stride_om, stride_oh, stride_od,
        kv_heads, q_len, state, states, b, kv_head, offs_r, GROUP, DV, BLOCK_DV, IS_SPLIT,
    )  # fmt: skip


def prepare_decode(problem: Problem, inputs: DecodeInputs, config: DecodeConfig) -> PreparedDecode:
    """The call on every cache that lies as this one does."""
    return prepare_decode_by(_kernel_of, problem, inputs, config)


def _kernel_of(call: DecodeCall, cache: KVCache) -> tuple[Kernel, dict[str, Any]]:
    if isinstance(cache, QuantizedKV):
        return quantized_kernel, quantized_kernel_arguments(call, cache)
    if isinstance(cache, PagedKV):
        return rows_kernel, row_arguments(call, cache.key_pages, cache.value_pages, side_by_side(cache.page_table))
    return rows_kernel, row_arguments(call, cache.key, cache.value)


def row_arguments(call: DecodeCall, key: Tensor, value: Tensor, table: Tensor | None = None) -> dict[str, Any]:
    """Arguments of the kernel for keys and values `[B, T, Hkv, D]` or, with a table, `[pages, page, Hkv, D]`."""
    return {
        **call.arguments(table),
        "k_ptr": key,
        "v_ptr": value,
        **call.row_sizes(key, value).arguments(),
        "BLOCK_D": tile_width(call.problem.head_dim),
        "PRECISION": "ieee" if call.query.dtype is torch.float32 else "tf32",
    }


rows_kernel = Kernel(_decode_kernel)
