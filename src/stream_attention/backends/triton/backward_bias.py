"""The gradient of a bias in Triton.

    dbias = sum of ds_ij over what the bias is broadcast over

Grid: one program per tile of the result, in one dimension. It walks the batch entries and heads that its tile is
broadcast over and recomputes ds there: two more products per tile than the other kernels, and in return sums in
registers, in one order, with nothing of size Tq x Tk but the result. A bias without rows (or columns) would leave too
few programs, so there a program walks the rows (columns) of one batch entry and head, and torch adds their sums up.

Dense problems only: packed sequences take no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton.language as tl
from torch import Tensor

from ...base.problem import Inputs
from ...gpu.arguments import WIDE, cdiv, sample
from ...gpu.bounds import key_interval, query_interval, within
from ...gpu.launch import Kernel, jit
from ...gpu.rows import PAD
from ...gpu.tiles import dropout_keep, load_broadcast, load_rows, tile_gradients
from .backward_call import BackwardCall
from .tuning import Tile


@jit
def _bias_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slopes_ptr, row_words_ptr, col_words_ptr, query_bounds_ptr, key_bounds_ptr,
    grad_out_ptr, rows_lse_ptr, rows_delta_ptr, d_bias_ptr,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn: tl.int64,
    stride_bb: tl.int64, stride_bh: tl.int64, stride_bm: tl.int64, stride_bn: tl.int64, stride_ab: tl.int64,
    q_len: tl.int32, k_len: tl.int32, row_tiles: tl.int32, q_heads: tl.int32, out_heads: tl.int32,
    out_tiles_m: tl.int32, out_tiles_n: tl.int32, heads_walked: tl.int32, steps: tl.int32, left: tl.int32,
    right: tl.int32, q_start: tl.int32, k_start: tl.int32, bounds_batch: tl.int32, bounds_head: tl.int32,
    dropout_threshold: tl.uint32,
    scale, softcap, dropout_scale,
    GROUP: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr, PRECISION: tl.constexpr, TANH: tl.constexpr,
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

    # Where am I in the result.
    pid = tl.program_id(0)
    tile_n = pid % out_tiles_n
    tile_m = pid // out_tiles_n % out_tiles_m
    out_head = pid // out_tiles_n // out_tiles_m % out_heads
    out_batch = (pid // out_tiles_n // out_tiles_m // out_heads).to(tl.int64)
    out_line = out_batch * out_heads + out_head
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)

    # The bias is the same wherever it is broadcast.
    bias_ptr += out_batch * stride_bb + out_head * stride_bh
    tile_at = offs_m[:, None], offs_n[None, :], q_len, k_len
    bias = load_broadcast(bias_ptr, *tile_at, stride_bm, stride_bn, float("-inf"), BIAS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    # A tile that positions mask is masked in every batch entry and head: nothing to walk.
    if not (SUM_ROWS or SUM_COLUMNS):
        first_row, last_row = tile_m * BLOCK_M, tl.minimum(tile_m * BLOCK_M + BLOCK_M, q_len) - 1
        first_key, last_key = tile_n * BLOCK_N, tl.minimum(tile_n * BLOCK_N + BLOCK_N, k_len) - 1
        if HAS_RIGHT:
            if k_start + first_key * K_STRIDE > q_start + last_row * Q_STRIDE + right:
                steps = 0
        if HAS_LEFT:
            if k_start + last_key * K_STRIDE < q_start + first_row * Q_STRIDE - left:
                steps = 0

    for step in tl.range(0, steps):
        batch, head = out_batch, out_head
        if SUM_ROWS:
            offs_m = step * BLOCK_M + tl.arange(0, BLOCK_M)
        elif SUM_COLUMNS:
            offs_n = step * BLOCK_N + tl.arange(0, BLOCK_N)
        else:
            head = out_head + step % heads_walked
            batch = out_batch + step // heads_walked
        kv_head = head // GROUP
        line = batch * q_heads + head
        mask_m, mask_n = offs_m < q_len, offs_n < k_len
        attend, slopes, keep = 0, 0.0, 0
        if MASK:
            mask_ptrs = mask_ptr + batch * stride_mb + head * stride_mh
            tile_at = offs_m[:, None], offs_n[None, :], q_len, k_len
            attend = load_broadcast(mask_ptrs, *tile_at, stride_mm, stride_mn, 0, MASK)
        if HAS_ALIBI:
            slopes = tl.load(slopes_ptr + batch * stride_ab + head).to(tl.float32)
        if HAS_DROPOUT:
            row_words = tl.load(row_words_ptr + line * q_len + offs_m, mask=mask_m, other=0)
            col_words = tl.load(col_words_ptr + line * k_len + offs_n, mask=mask_n, other=0)
            keep = dropout_keep(row_words, col_words, dropout_threshold)
        q_ptrs = q_ptr + batch * stride_qb + head * stride_qh
        k_ptrs = k_ptr + batch * stride_kb + kv_head * stride_kh
        v_ptrs = v_ptr + batch * stride_vb + kv_head * stride_vh
        grad_ptrs = grad_out_ptr + batch * stride_gb + head * stride_gh
        q = load_rows(q_ptrs + offs_m[:, None] * stride_qm, offs_d[None, :], mask_m, D, BLOCK_D, MASKED=True)
        k = load_rows(k_ptrs + offs_n[:, None] * stride_kn, offs_d[None, :], mask_n, D, BLOCK_D, MASKED=True)
        grad = load_rows(grad_ptrs + offs_m[:, None] * stride_gm, offs_dv[None, :], mask_m, DV, BLOCK_DV, MASKED=True)
        v = load_rows(v_ptrs + offs_n[:, None] * stride_vn, offs_dv[None, :], mask_n, DV, BLOCK_DV, MASKED=True)
        lse = tl.load(rows_lse_ptr + line * row_tiles * PAD + offs_m)
        delta = tl.load(rows_delta_ptr + line * row_tiles * PAD + offs_m)
        qk = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        dp = tl.dot(grad.to(v.dtype), v.T, input_precision=PRECISION)
        q_pos, k_pos = (q_start + offs_m * Q_STRIDE)[:, None], (k_start + offs_n * K_STRIDE)[None, :]
        inside = mask_n[None, :]
        if query_bounds_ptr is not None:
            entry = batch * bounds_batch + head * bounds_head
            start, end, label = query_interval(query_bounds_ptr + entry * 3 * q_len, offs_m, mask_m, q_len)
            inside = inside & within(k_pos, start[:, None], end[:, None])
            if key_bounds_ptr is not None:
                first, last = key_interval(key_bounds_ptr + entry * 2 * k_len, offs_n, mask_n, k_len)
                inside = inside & within(label[:, None], first[None, :], last[None, :])
        p, d_scores, _ = tile_gradients(
            qk, dp, lse[:, None], delta[:, None], q_pos, k_pos, inside,
            attend, bias, slopes, keep, scale, softcap, left, right, dropout_scale,
            True, HAS_LEFT, HAS_RIGHT, MASK, True, HAS_ALIBI, HAS_SOFTCAP, HAS_DROPOUT, TANH,
        )  # fmt: skip
        acc += tl.where(p == 0.0, 0.0, d_scores)  # where p is 0, ds may be NaN

    # Store.
    if SUM_ROWS:
        tl.store(d_bias_ptr + out_line * k_len + offs_n, tl.sum(acc, 0), mask=offs_n < k_len)
    elif SUM_COLUMNS:
        tl.store(d_bias_ptr + out_line * q_len + offs_m, tl.sum(acc, 1), mask=offs_m < q_len)
    else:
        rows = (out_line * q_len + offs_m) * k_len
        tl.store(
            d_bias_ptr + rows[:, None] + offs_n[None, :],
            acc.to(d_bias_ptr.dtype.element_ty),
            mask=(offs_m < q_len)[:, None] & (offs_n < k_len)[None, :],
        )


def prepare_bias_gradient(call: BackwardCall, tile: Tile) -> Callable[[Inputs, Sequence[Any]], Tensor]:
    """The gradient of the bias, in its shape and dtype; in fp32 where the problem is one of several shards. A function
    of the inputs, and of (the results of the prepass, grad_out, rows)."""
    problem, bias = call.problem, call.inputs.bias
    assert bias is not None
    shape, sums_dtype = bias.shape, problem.state_dtype
    dtype: Any = problem.state_dtype if problem.partial else bias.dtype
    if problem.empty:
        return lambda inputs, others: inputs.query.new_zeros(shape, dtype=dtype)
    batch, heads, rows, columns = shape
    sum_rows, sum_columns = rows == 1, rows > 1 and columns == 1
    tiles_m, tiles_n = cdiv(problem.q_len, tile.block_m), cdiv(problem.k_len, tile.block_n)
    if sum_rows:
        batch, heads, columns, steps, tiles_m = problem.batch, problem.q_heads, problem.k_len, tiles_m, 1
    elif sum_columns:
        batch, heads, rows, steps, tiles_n = problem.batch, problem.q_heads, problem.q_len, tiles_n, 1
    else:
        steps, sums_dtype = problem.q_heads // heads * (problem.batch // batch), dtype
    sums = sample((batch, heads, rows, columns), sums_dtype)
    launch = call.bind(
        _kernel, batch * heads * tiles_m * tiles_n, tile, "grad_out_ptr rows_lse_ptr rows_delta_ptr d_bias_ptr",
        (*call.read, sums),
        out_heads=heads,
        out_tiles_m=tiles_m,
        out_tiles_n=tiles_n,
        heads_walked=problem.q_heads // heads,
        steps=steps,
        SUM_ROWS=sum_rows,
        SUM_COLUMNS=sum_columns,
    )  # fmt: skip

    def run(inputs: Inputs, others: Sequence[Any]) -> Tensor:
        made = sums.empty(inputs.query)
        launch(*inputs, *others, made)
        return made.sum_to_size(shape).to(dtype)

    return run


_kernel = Kernel(_bias_kernel)
