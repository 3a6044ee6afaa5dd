"""The gradients of keys and values in Triton.

    dv_j = sum_i p_ij dO_i        dk_j = scale * sum_i ds_ij q_i

Grid: one program per (batch, KV head, split of the queries, tile of keys), in one dimension. K and V stay, and the
queries of every head that shares the KV head stream by: their sum is the program's own, so nothing is expanded for GQA
and nothing is added atomically. Tiles lie keys by queries, `p^T` and `ds^T`: the two last products then take them as
they come, from registers.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from ...base.problem import Problem
from ...gpu.arguments import WIDE, cdiv
from ...gpu.bounds import HEADER, key_interval, query_interval, within
from ...gpu.launch import Kernel, Launch, jit
from ...gpu.rows import line_start, padded_line_start
from ...gpu.tail import clear_uncomputed
from ...gpu.tiles import (
    dropout_keep,
    load_broadcast,
    load_rows,
    packed_rows,
    phases,
    store_rows,
    tile_gradients,
    tile_of_program,
    visible_span,
)
from .backward_call import BackwardCall
from .tuning import Tile

_HEADER = tl.constexpr(HEADER)


@jit
def _key_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, keys_seen_ptr, queries_seen_ptr, slopes_ptr,
    row_words_ptr, col_words_ptr, cu_q_ptr, cu_k_ptr, query_bounds_ptr, key_bounds_ptr, query_lists_ptr,
    grad_out_ptr, rows_lse_ptr, rows_delta_ptr,
    dk_ptr, dv_ptr,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn: tl.int64,
    stride_bb: tl.int64, stride_bh: tl.int64, stride_bm: tl.int64, stride_bn: tl.int64,
    stride_fb: tl.int64, stride_fh: tl.int64, stride_sb: tl.int64, stride_sh: tl.int64, stride_ab: tl.int64,
    batches: tl.int32, q_len: tl.int32, k_len: tl.int32, q_rows: tl.int32, k_rows: tl.int32,
    row_tiles: tl.int32, kv_heads: tl.int32, num_splits: tl.int32, bounds_batch: tl.int32, bounds_head: tl.int32,
    left: tl.int32, right: tl.int32, q_start: tl.int32, k_start: tl.int32,
    dropout_threshold: tl.uint32, scale, softcap, dropout_scale,
    GROUP: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    # Strides of what is read in wide words arrive in units of those, so that the compiler knows.
    if ALIGNED:
        stride_qb, stride_qm, stride_qh = stride_qb * 8, stride_qm * 8, stride_qh * 8
        stride_kb, stride_kn, stride_kh = stride_kb * 8, stride_kn * 8, stride_kh * 8
        stride_vb, stride_vn, stride_vh = stride_vb * 8, stride_vn * 8, stride_vh * 8
        stride_gb, stride_gm, stride_gh = stride_gb * 8, stride_gm * 8, stride_gh * 8
    if MASK >= WIDE:
        stride_mb, stride_mh, stride_mm = stride_mb * 8, stride_mh * 8, stride_mm * 8
    if BIAS >= WIDE:
        stride_bb, stride_bh, stride_bm = stride_bb * 8, stride_bh * 8, stride_bm * 8

    BOUNDS: tl.constexpr = query_bounds_ptr is not None

    # Where am I: the tiles of keys that most queries see come first.
    tiles_n = tl.cdiv(k_len, BLOCK_N)
    tile_n, split, kv_head, batch = tile_of_program(tiles_n, num_splits, kv_heads, False, IS_SPLIT)
    q_heads = kv_heads * GROUP
    q_row, k_row = batch * 0, batch * k_rows  # of row 0 in contiguous tensors [B, Tk, Hkv, D]
    if IS_PACKED:
        longest = q_len
        q_row, q_len = packed_rows(cu_q_ptr + batch, q_rows)
        k_row, k_len = packed_rows(cu_k_ptr + batch, k_rows)
        q_start = k_len - q_len
        q_len = tl.minimum(q_len, longest)  # rows beyond the longest that the caller gave have no LSE
        if dk_ptr is not None:
            clear_uncomputed(dk_ptr, cu_k_ptr, batches, tiles_n * BLOCK_N, k_rows, kv_heads * D, 0.0)
        if dv_ptr is not None:
            clear_uncomputed(dv_ptr, cu_k_ptr, batches, tiles_n * BLOCK_N, k_rows, kv_heads * DV, 0.0)
        if tile_n * BLOCK_N >= k_len:
            return
        q_ptr += q_row * stride_qm
        k_ptr += k_row * stride_kn
        v_ptr += k_row * stride_vn
        grad_out_ptr += q_row * stride_gm

    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_n = offs_n < k_len
    first_pos = k_start + tile_n * BLOCK_N * K_STRIDE
    last_pos = k_start + tl.minimum(tile_n * BLOCK_N + BLOCK_N - 1, k_len - 1) * K_STRIDE
    k_pos = k_start + offs_n * K_STRIDE

    # Load K and V. A key that no query sees may be NaN, and is multiplied by p = 0 below: it is not read. Nor is a
    # query that sees no key.
    load_n = mask_n
    if HAS_RIGHT:
        load_n = load_n & (k_pos <= q_start + (q_len - 1) * Q_STRIDE + right)
    if HAS_LEFT:
        load_n = load_n & (k_pos >= q_start - left)
    if MASK or BIAS or BOUNDS:
        keys_seen_ptr += batch * stride_fb + kv_head * stride_fh
        load_n = load_n & (tl.load(keys_seen_ptr + offs_n, mask=mask_n, other=0) != 0)
    k_ptrs = k_ptr + batch * stride_kb + kv_head * stride_kh + offs_n[:, None] * stride_kn
    k = load_rows(k_ptrs, offs_d[None, :], load_n, D, BLOCK_D, MASKED=True)
    v_ptrs = v_ptr + batch * stride_vb + kv_head * stride_vh + offs_n[:, None] * stride_vn
    v = load_rows(v_ptrs, offs_dv[None, :], load_n, DV, BLOCK_DV, MASKED=True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Rows behind the last query have p = 0 by their LSE, and need no masking.
    row_lo, row_hi, whole_lo, whole_hi = visible_span(
        first_pos, last_pos, right, left, q_start, Q_STRIDE, q_len, HAS_RIGHT, HAS_LEFT
    )
    edges = phases(
        row_lo, row_hi, whole_lo, whole_hi, split, num_splits, BLOCK_M, MASKS_END=HAS_LEFT, IS_SPLIT=IS_SPLIT
    )

    for member in tl.range(0, GROUP):
        head = kv_head * GROUP + member
        q_ptrs = q_ptr + batch * stride_qb + head * stride_qh
        grad_ptrs = grad_out_ptr + batch * stride_gb + head * stride_gh
        row_line = padded_line_start(batch, head, q_heads, row_tiles, q_row, IS_PACKED)
        slopes = 0.0
        if HAS_ALIBI:
            slopes = tl.load(slopes_ptr + batch * stride_ab + head).to(tl.float32)
        if HAS_DROPOUT:
            q_line = line_start(batch, head, q_heads, q_rows, q_row, IS_PACKED)
            k_line = line_start(batch, head, q_heads, k_rows, k_row, IS_PACKED)
            col_words = tl.load(col_words_ptr + k_line + offs_n, mask=mask_n, other=0)

        if BOUNDS:
            tl.static_assert(not IS_SPLIT and not IS_PACKED, "a list has all tiles")
            tl.static_assert(not HAS_LEFT and not HAS_RIGHT, "windows are part of the intervals")
            entry = batch * bounds_batch + head * bounds_head
            query_bounds = query_bounds_ptr + entry * 3 * q_len
            if key_bounds_ptr is not None:
                first, last = key_interval(key_bounds_ptr + entry * 2 * k_len, offs_n, mask_n, k_len)
            lists = query_lists_ptr + (entry * tiles_n + tile_n) * (_HEADER + tl.cdiv(q_len, BLOCK_M))
            edges = 0, tl.load(lists), tl.load(lists + 1), 0

        # Stream tiles. Phase 0: partially masked by the right edge; 1: wholly visible; 2: by the left edge. With a list
        # phase 0 has its tiles that do not see all of the keys, phase 1 the others.
        for phase in tl.static_range(0 if HAS_RIGHT or BOUNDS else 1, 3 if HAS_LEFT else 2):
            for tile_m in tl.range(edges[phase], edges[phase + 1]):
                if BOUNDS:
                    tile_m = tl.load(lists + _HEADER + tile_m)
                offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                mask_m = (offs_m >= row_lo) & (offs_m < row_hi)
                q_pos = q_start + offs_m * Q_STRIDE
                # Mask and bias come before the products: Triton then keeps the softmax in the products' layout.
                bias, attend, keep = 0.0, 0, 0
                tile_at = offs_m[None, :], offs_n[:, None], q_len, k_len
                if BIAS:
                    bias_ptrs = bias_ptr + batch * stride_bb + head * stride_bh
                    bias = load_broadcast(bias_ptrs, *tile_at, stride_bm, stride_bn, float("-inf"), BIAS)
                if MASK:
                    mask_ptrs = mask_ptr + batch * stride_mb + head * stride_mh
                    attend = load_broadcast(mask_ptrs, *tile_at, stride_mm, stride_mn, 0, MASK)
                inside = True
                if BOUNDS and phase != 1:
                    start, end, label = query_interval(query_bounds, offs_m, mask_m, q_len)
                    inside = within(k_pos[:, None], start[None, :], end[None, :])
                    if key_bounds_ptr is not None:
                        inside = inside & within(label[None, :], first[:, None], last[:, None])
                load_m = mask_m
                if MASK or BIAS or BOUNDS:
                    seen_ptrs = queries_seen_ptr + batch * stride_sb + head * stride_sh + offs_m
                    load_m = tl.load(seen_ptrs, mask=mask_m, other=0) != 0
                q_offs = offs_m[:, None] * stride_qm + offs_d[None, :]
                grad_offs = offs_m[:, None] * stride_gm + offs_dv[None, :]
                q = load_rows(q_ptrs, q_offs, load_m, D, BLOCK_D, MASKED=True)
                grad = load_rows(grad_ptrs, grad_offs, load_m, DV, BLOCK_DV, MASKED=True).to(v.dtype)
                lse = tl.load(rows_lse_ptr + row_line + offs_m)
                delta = tl.load(rows_delta_ptr + row_line + offs_m)
                if HAS_DROPOUT:
                    row_words = tl.load(row_words_ptr + q_line + offs_m, mask=mask_m, other=0)
                    keep = dropout_keep(col_words, row_words, dropout_threshold)
                qk = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
                dp = qk
                if dk_ptr is not None:
                    dp = tl.dot(v, grad.T, input_precision=PRECISION)
                p, _, d_qk = tile_gradients(
                    qk, dp, lse[None, :], delta[None, :], q_pos[None, :], k_pos[:, None], inside,
                    attend, bias, slopes, keep, scale, softcap, left, right, dropout_scale,
                    phase != 1, HAS_LEFT, HAS_RIGHT, MASK, BIAS, HAS_ALIBI, HAS_SOFTCAP, HAS_DROPOUT, TANH,
                )  # fmt: skip
                if dv_ptr is not None:
                    if HAS_DROPOUT:
                        p = tl.where(keep, p, 0.0)
                    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
                if dk_ptr is not None:
                    dk = tl.dot(d_qk.to(q.dtype), q, dk, input_precision=PRECISION)

    # Store.
    if IS_SPLIT:
        k_row = (batch + split * batches) * k_rows
    rows = (k_row + offs_n) * kv_heads + kv_head
    if dk_ptr is not None:
        store_rows(dk_ptr + rows[:, None] * D, offs_d[None, :], dk * scale, mask_n, D, BLOCK_D)
    if dv_ptr is not None:
        store_rows(dv_ptr + rows[:, None] * DV, offs_dv[None, :], dv * dropout_scale, mask_n, DV, BLOCK_DV)


def programs(problem: Problem, tile: Tile) -> int:
    """How many programs there are; by batch, KV head, split and tile."""
    return problem.batch * problem.kv_heads * tile.num_splits * cdiv(problem.k_len, tile.block_n)


def bind_key(call: BackwardCall, tile: Tile, dk: Tensor | None, dv: Tensor | None) -> Launch:
    """Writes dk and dv, unless None. They and the words are contiguous. A function of all tensors, in this order.

    With several splits they are `[splits, B, Tk, Hkv, D]`, a part of the sum each.
    """
    names, others = "grad_out_ptr rows_lse_ptr rows_delta_ptr dk_ptr dv_ptr", (*call.read, dk, dv)
    return call.bind(_kernel, programs(call.problem, tile), tile, names, others)


_kernel = Kernel(_key_kernel)
