"""The gradient of the queries in Triton, and of what belongs to a query row: ALiBi slopes and sinks.

    delta_i = dO_i . O_i - dLSE_i        dq_i = scale * sum_j ds_ij k_j
    dslope = -sum_ij ds_ij |x_i - y_j|   dsink = -sum_i exp(sink - lse_i) delta_i

Delta is computed from an output that was rounded when it was returned, and from p that were rounded before they were
multiplied by V. For dQ, dK and dV that is as good as their own rounding. For sums over a row (of slopes, sinks, a bias)
it is not: the p of a row add up to 1, its ds to dLSE, and what is left is that error. They need `EXACT_DELTA`, which
the loop computes at the price of two more sums: delta_i = sum_j p_ij dp_ij - dLSE_i.

Grid: one program per (batch, head, split of the keys, tile of queries), in one dimension; the loop is the forward's,
over the keys that the tile sees. Runs first, as it writes what the other kernels read of each row. Gradients of slopes
and sinks leave as one number per program, to be summed in a fixed order: no atomics anywhere.
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
    LOG2E,
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
def _query_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, keys_seen_ptr, queries_seen_ptr, slopes_ptr, sink_ptr,
    row_words_ptr, col_words_ptr, cu_q_ptr, cu_k_ptr, query_bounds_ptr, key_bounds_ptr, key_lists_ptr,
    out_ptr, lse_ptr, grad_out_ptr, grad_lse_ptr, rows_lse_ptr, rows_delta_ptr,
    dq_ptr, d_slopes_ptr, d_sink_ptr,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_ob: tl.int64, stride_om: tl.int64, stride_oh: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn: tl.int64,
    stride_bb: tl.int64, stride_bh: tl.int64, stride_bm: tl.int64, stride_bn: tl.int64,
    stride_fb: tl.int64, stride_fh: tl.int64, stride_sb: tl.int64, stride_sh: tl.int64, stride_ab: tl.int64,
    batches: tl.int32, q_len: tl.int32, k_len: tl.int32, q_rows: tl.int32, k_rows: tl.int32,
    row_tiles: tl.int32, q_heads: tl.int32, num_splits: tl.int32, bounds_batch: tl.int32, bounds_head: tl.int32,
    left: tl.int32, right: tl.int32, q_start: tl.int32, k_start: tl.int32,
    dropout_threshold: tl.uint32, scale, softcap, dropout_scale,
    GROUP: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_SPLIT: tl.constexpr, EXACT_DELTA: tl.constexpr,
    PRECISION: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    # Strides of what is read in wide words arrive in units of those, so that the compiler knows.
    if ALIGNED:
        stride_qb, stride_qm, stride_qh = stride_qb * 8, stride_qm * 8, stride_qh * 8
        stride_kb, stride_kn, stride_kh = stride_kb * 8, stride_kn * 8, stride_kh * 8
        stride_vb, stride_vn, stride_vh = stride_vb * 8, stride_vn * 8, stride_vh * 8
        stride_ob, stride_om, stride_oh = stride_ob * 8, stride_om * 8, stride_oh * 8
        stride_gb, stride_gm, stride_gh = stride_gb * 8, stride_gm * 8, stride_gh * 8
    if MASK >= WIDE:
        stride_mb, stride_mh, stride_mm = stride_mb * 8, stride_mh * 8, stride_mm * 8
    if BIAS >= WIDE:
        stride_bb, stride_bh, stride_bm = stride_bb * 8, stride_bh * 8, stride_bm * 8

    BOUNDS: tl.constexpr = query_bounds_ptr is not None

    # Where am I: the tiles that see most keys first.
    tiles_m = tl.cdiv(q_len, BLOCK_M)
    tile_m, split, head, batch = tile_of_program(tiles_m, num_splits, q_heads, HAS_RIGHT, IS_SPLIT)
    kv_head = head // GROUP
    q_row, k_row = batch * q_rows, batch * 0  # of row 0 in contiguous tensors [B, Tq, Hq, D]
    if IS_PACKED:
        q_row, q_len = packed_rows(cu_q_ptr + batch, q_rows)
        k_row, k_len = packed_rows(cu_k_ptr + batch, k_rows)
        q_start = k_len - q_len
        if dq_ptr is not None:
            clear_uncomputed(dq_ptr, cu_q_ptr, batches, tiles_m * BLOCK_M, q_rows, q_heads * D, 0.0)
        if tile_m * BLOCK_M >= q_len:
            return
        q_ptr += q_row * stride_qm
        k_ptr += k_row * stride_kn
        v_ptr += k_row * stride_vn
        out_ptr += q_row * stride_om
        grad_out_ptr += q_row * stride_gm
    q_line = line_start(batch, head, q_heads, q_rows, q_row, IS_PACKED)
    row_line = padded_line_start(batch, head, q_heads, row_tiles, q_row, IS_PACKED)
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    mask_m = offs_m < q_len
    first_pos = q_start + tile_m * BLOCK_M * Q_STRIDE
    last_pos = q_start + tl.minimum(tile_m * BLOCK_M + BLOCK_M - 1, q_len - 1) * Q_STRIDE
    q_pos = q_start + offs_m * Q_STRIDE

    # A row that sees no key may be NaN, and is multiplied by p = 0 below: it is not read. Nor is a key that no query
    # sees.
    load_m = mask_m & (k_len > 0)
    if HAS_RIGHT:
        load_m = load_m & (q_pos + right >= k_start)
    if HAS_LEFT:
        load_m = load_m & (q_pos - left <= k_start + (k_len - 1) * K_STRIDE)
    if MASK or BIAS or BOUNDS:
        load_m = load_m & (tl.load(queries_seen_ptr + batch * stride_sb + head * stride_sh + offs_m, mask_m, 0) != 0)

    # Delta, from the output.
    out_ptr += batch * stride_ob + head * stride_oh
    grad_out_ptr += batch * stride_gb + head * stride_gh
    out = load_rows(out_ptr + offs_m[:, None] * stride_om, offs_dv[None, :], load_m, DV, BLOCK_DV, MASKED=True)
    grad = load_rows(grad_out_ptr + offs_m[:, None] * stride_gm, offs_dv[None, :], load_m, DV, BLOCK_DV, MASKED=True)
    grad_lse = tl.zeros([BLOCK_M], tl.float32)
    if grad_lse_ptr is not None:
        grad_lse = tl.load(grad_lse_ptr + q_line + offs_m, mask=mask_m, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1) - grad_lse
    lse = tl.load(lse_ptr + q_line + offs_m, mask=mask_m, other=float("-inf")) * LOG2E
    sees_nothing = lse == float("-inf")
    delta = tl.where(sees_nothing, 0.0, delta)
    lse = tl.where(sees_nothing, float("inf"), lse)
    if split == 0:
        tl.store(rows_lse_ptr + row_line + offs_m, lse)
        if not EXACT_DELTA:
            tl.store(rows_delta_ptr + row_line + offs_m, delta)

    if dq_ptr is not None or d_slopes_ptr is not None or EXACT_DELTA:
        q_ptr += batch * stride_qb + head * stride_qh
        q = load_rows(q_ptr + offs_m[:, None] * stride_qm, offs_d[None, :], load_m, D, BLOCK_D, MASKED=True)
        k_ptr += batch * stride_kb + kv_head * stride_kh
        v_ptr += batch * stride_vb + kv_head * stride_vh
        if MASK or BIAS or BOUNDS:
            keys_seen_ptr += batch * stride_fb + kv_head * stride_fh
        if MASK:
            mask_ptr += batch * stride_mb + head * stride_mh
        if BIAS:
            bias_ptr += batch * stride_bb + head * stride_bh
        slopes = 0.0
        if HAS_ALIBI:
            slopes = tl.load(slopes_ptr + batch * stride_ab + head).to(tl.float32)
        if HAS_DROPOUT:
            row_words = tl.load(row_words_ptr + q_line + offs_m, mask=mask_m, other=0)
            col_words_ptr += line_start(batch, head, q_heads, k_rows, k_row, IS_PACKED)
        grad = grad.to(q.dtype)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        d_slopes = tl.zeros([BLOCK_M], tl.float32)
        sum_p = tl.zeros([BLOCK_M], tl.float32)
        sum_d_scores = tl.zeros([BLOCK_M], tl.float32)
        sum_distance = tl.zeros([BLOCK_M], tl.float32)

        key_lo, key_hi, whole_lo, whole_hi = visible_span(
            first_pos, last_pos, left, right, k_start, K_STRIDE, k_len, HAS_LEFT, HAS_RIGHT
        )
        edges = phases(
            key_lo, key_hi, whole_lo, whole_hi, split, num_splits, BLOCK_N, MASKS_END=True, IS_SPLIT=IS_SPLIT
        )
        if BOUNDS:
            tl.static_assert(not IS_SPLIT and not IS_PACKED, "a list has all tiles")
            tl.static_assert(not HAS_LEFT and not HAS_RIGHT, "windows are part of the intervals")
            entry = batch * bounds_batch + head * bounds_head
            start, end, label = query_interval(query_bounds_ptr + entry * 3 * q_len, offs_m, mask_m, q_len)
            start, end, label = start[:, None], end[:, None], label[:, None]
            if key_bounds_ptr is not None:
                key_bounds_ptr += entry * 2 * k_len
            key_lists_ptr += (entry * tiles_m + tile_m) * (_HEADER + tl.cdiv(k_len, BLOCK_N))
            edges = 0, tl.load(key_lists_ptr), tl.load(key_lists_ptr + 1), 0

        # Stream tiles. Phase 0: partially masked by the left edge; 1: wholly visible; 2: by the right edge or last key.
        # With a list phase 0 has its tiles that some rows do not see, phase 1 the others.
        for phase in tl.static_range(0 if HAS_LEFT or BOUNDS else 1, 2 if BOUNDS else 3):
            for tile_n in tl.range(edges[phase], edges[phase + 1]):
                if BOUNDS:
                    tile_n = tl.load(key_lists_ptr + _HEADER + tile_n)
                offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                mask_n = (offs_n >= key_lo) & (offs_n < key_hi)
                k_pos = k_start + offs_n * K_STRIDE
                # Mask and bias come before the products: Triton then keeps the softmax in the products' layout.
                bias, attend, keep = 0.0, 0, 0
                tile_at = offs_m[:, None], offs_n[None, :], q_len, k_len
                if BIAS:
                    bias = load_broadcast(bias_ptr, *tile_at, stride_bm, stride_bn, float("-inf"), BIAS)
                if MASK:
                    attend = load_broadcast(mask_ptr, *tile_at, stride_mm, stride_mn, 0, MASK)
                inside = mask_n[None, :]
                if BOUNDS and phase != 1:
                    inside = inside & within(k_pos[None, :], start, end)
                    if key_bounds_ptr is not None:
                        first, last = key_interval(key_bounds_ptr, offs_n, mask_n, k_len)
                        inside = inside & within(label, first[None, :], last[None, :])
                load_n = mask_n
                if MASK or BIAS or BOUNDS:
                    load_n = tl.load(keys_seen_ptr + offs_n, mask=mask_n, other=0) != 0
                k_offs = offs_n[:, None] * stride_kn + offs_d[None, :]
                v_offs = offs_n[:, None] * stride_vn + offs_dv[None, :]
                k = load_rows(k_ptr, k_offs, load_n, D, BLOCK_D, MASKED=phase != 1 or MASK or BIAS or BOUNDS)
                v = load_rows(v_ptr, v_offs, load_n, DV, BLOCK_DV, MASKED=phase != 1 or MASK or BIAS or BOUNDS)
                if HAS_DROPOUT:
                    col_words = tl.load(col_words_ptr + offs_n, mask=mask_n, other=0)
                    keep = dropout_keep(row_words, col_words, dropout_threshold)
                qk = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
                dp = tl.dot(grad, v.T, input_precision=PRECISION)
                p, d_scores, d_qk = tile_gradients(
                    qk, dp, lse[:, None], delta[:, None], q_pos[:, None], k_pos[None, :], inside,
                    attend, bias, slopes, keep, scale, softcap, left, right, dropout_scale,
                    phase != 1, HAS_LEFT, HAS_RIGHT, MASK, BIAS, HAS_ALIBI, HAS_SOFTCAP, HAS_DROPOUT, TANH,
                )  # fmt: skip
                if d_slopes_ptr is not None:
                    distance = tl.abs(q_pos[:, None] - k_pos[None, :]).to(tl.float32)
                    d_slopes -= tl.sum(d_scores * distance, 1)
                    sum_distance += tl.sum(p * distance, 1)
                if EXACT_DELTA:
                    sum_p += tl.sum(p, 1)
                    sum_d_scores += tl.sum(d_scores, 1)
                dq = tl.dot(d_qk.to(k.dtype), k, dq, input_precision=PRECISION)

        if EXACT_DELTA:
            exact_delta = tl.where(sees_nothing, 0.0, sum_d_scores + delta * sum_p - grad_lse)
            d_slopes -= (delta - exact_delta) * sum_distance
            delta = exact_delta
            tl.store(rows_delta_ptr + row_line + offs_m, delta)
        if d_slopes_ptr is not None:
            tl.store(d_slopes_ptr + tl.program_id(0), tl.sum(tl.where(mask_m, d_slopes, 0.0), 0))
        if dq_ptr is not None:
            if IS_SPLIT:
                q_row = (batch + split * batches) * q_rows
            dq_rows = ((q_row + offs_m) * q_heads + head) * D
            store_rows(dq_ptr + dq_rows[:, None], offs_d[None, :], dq * scale, mask_m, D, BLOCK_D)

    if d_sink_ptr is not None:
        if split == 0:
            sink = tl.load(sink_ptr + head).to(tl.float32) * LOG2E
            tl.store(d_sink_ptr + tl.program_id(0), -tl.sum(tl.exp2(sink - lse) * delta, 0))


def bind_query(
    call: BackwardCall,
    tile: Tile,
    dq: Tensor | None,
    d_slopes: Tensor | None,
    d_sink: Tensor | None,
    exact_delta: bool,
) -> Launch:
    """Writes rows, and those of dq, d_slopes and d_sink that are not None; the last two by `programs`, fp32. A function
    of all tensors, in this order.

    With several splits dq is `[splits, B, Tq, Hq, D]`, a part of the sum each. `exact_delta` needs whole rows: no
    splits, and no shards.

    The LSE and its gradient, words and dq are contiguous.
    """
    names = "out_ptr lse_ptr grad_out_ptr grad_lse_ptr rows_lse_ptr rows_delta_ptr dq_ptr d_slopes_ptr d_sink_ptr"
    others = *call.saved, *call.rows, dq, d_slopes, d_sink
    return call.bind(_kernel, programs(call.problem, tile), tile, names, others, EXACT_DELTA=exact_delta)


def programs(problem: Problem, tile: Tile) -> int:
    """How many programs there are; by batch, head, split and tile."""
    return problem.batch * problem.q_heads * tile.num_splits * cdiv(problem.q_len, tile.block_m)


_kernel = Kernel(_query_kernel)
