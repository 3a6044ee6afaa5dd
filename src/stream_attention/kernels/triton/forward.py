"""The streaming forward in Triton: one kernel for dense and packed calls, every modifier, whole rows or splits of keys.

For a tile of queries, with running max m, sum l and accumulator o (scores in log2 units):

    m' = max(m, max_j s_j)      l' = l 2^(m - m') + sum_j 2^(s_j - m')      o' = o 2^(m - m') + sum_j 2^(s_j - m') v_j

Grid: one program per (batch, head, split of the keys, tile of queries), in one dimension, so that no product of sizes
meets the grid's 65,535 limit. A tile holds the queries of one head, or (`HEADS` > 1) those of all heads that share a KV
head, which fills the tile when queries are few. Keys that no row of a tile may see are never read; tiles that every row
sees whole pay for no mask. Splits write fp32 states for merge.py; a sink joins in the last step of whichever ends the row.

Not here: backward, paged and quantised caches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import UNBOUNDED, Inputs, Problem
from ...state import EMPTY
from ...tuning.triton import TritonConfig
from .merge import launch_merge
from .tiles import LN2, LOG2E, dropout_keep, dropout_words, online_softmax_step, softcap_scores

_STRIDES = "qb qm qh kb kn kh vb vn vh mb mh mm mn bb bh bm bn ab os ob om oh ls lb lh".split()
_INTEGERS = (
    "q_len k_len q_heads num_splits left right q_start q_stride k_start k_stride q_index batch_start dropout_threshold"
).split()


@triton.jit(do_not_specialize=[*(f"stride_{name}" for name in _STRIDES), *_INTEGERS])
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    bias_ptr,
    slopes_ptr,
    sink_ptr,
    seed_ptr,
    cu_q_ptr,
    cu_k_ptr,
    out_ptr,
    lse_ptr,
    stride_qb: tl.int64,
    stride_qm: tl.int64,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_kn: tl.int64,
    stride_kh: tl.int64,
    stride_vb: tl.int64,
    stride_vn: tl.int64,
    stride_vh: tl.int64,
    stride_mb: tl.int64,
    stride_mh: tl.int64,
    stride_mm: tl.int64,
    stride_mn: tl.int64,
    stride_bb: tl.int64,
    stride_bh: tl.int64,
    stride_bm: tl.int64,
    stride_bn: tl.int64,
    stride_ab: tl.int64,
    stride_os: tl.int64,
    stride_ob: tl.int64,
    stride_om: tl.int64,
    stride_oh: tl.int64,
    stride_ls: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    q_len,
    k_len,
    q_heads,
    num_splits,
    left,
    right,
    q_start,
    q_stride,
    k_start,
    k_stride,
    q_index,
    batch_start,
    dropout_threshold: tl.uint32,
    scale,
    softcap,
    dropout_scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SCALE_LATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if ALIGNED:  # rows start on 16 bytes: loads may be wide
        stride_qb, stride_qm, stride_qh = stride_qb * 8, stride_qm * 8, stride_qh * 8
        stride_kb, stride_kn, stride_kh = stride_kb * 8, stride_kn * 8, stride_kh * 8
        stride_vb, stride_vn, stride_vh = stride_vb * 8, stride_vn * 8, stride_vh * 8

    # Where am I: tile of queries fastest, the longest first where later queries see more keys.
    tiles_m = tl.cdiv(q_len * HEADS, BLOCK_M)
    pid = tl.program_id(0)
    tile_m = pid % tiles_m
    if HAS_RIGHT:
        tile_m = tiles_m - 1 - tile_m
    rest = pid // tiles_m
    if IS_SPLIT:
        split = (rest % num_splits).to(tl.int64)
        rest = rest // num_splits
    head = (rest % (q_heads // HEADS)) * HEADS
    batch = (rest // (q_heads // HEADS)).to(tl.int64)
    kv_head = head // GROUP
    if IS_PACKED:  # rows of the pack before this sequence; its keys and queries end together
        q_row = tl.load(cu_q_ptr + batch).to(tl.int64)
        k_row = tl.load(cu_k_ptr + batch).to(tl.int64)
        q_len = (tl.load(cu_q_ptr + batch + 1) - q_row).to(tl.int32)
        k_len = (tl.load(cu_k_ptr + batch + 1) - k_row).to(tl.int32)
        q_start = k_len - q_len
        if tile_m * BLOCK_M >= q_len * HEADS:
            return
        q_ptr += q_row * stride_qm
        k_ptr += k_row * stride_kn
        v_ptr += k_row * stride_vn
        out_ptr += q_row * stride_om
        lse_ptr += q_row

    offs_r = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m = offs_r // HEADS
    offs_h = head + offs_r % HEADS
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_m = offs_m < q_len
    first_pos = q_start + (tile_m * BLOCK_M // HEADS) * q_stride
    last_pos = q_start + tl.minimum((tile_m * BLOCK_M + BLOCK_M - 1) // HEADS, q_len - 1) * q_stride
    q_pos = q_start + offs_m * q_stride

    # Load Q.
    q_offs = offs_m * stride_qm + offs_h * stride_qh
    q = tl.load(
        q_ptr + batch * stride_qb + q_offs[:, None] + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d[None, :] < D),
        other=0.0,
    )
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    if HAS_MASK:
        mask_offs = batch * stride_mb + offs_h * stride_mh + offs_m * stride_mm
    if HAS_BIAS:
        bias_offs = batch * stride_bb + offs_h * stride_bh + offs_m * stride_bm
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + batch * stride_ab + offs_h).to(tl.float32)
    if HAS_DROPOUT:
        tl.static_assert(HEADS == 1, "rows of one tile share their column words")
        stream = (batch_start + batch.to(tl.int32)) * q_heads + head
        row_words = dropout_words(seed_ptr, q_index + offs_m * q_stride, stream, IS_COLUMN=False)

    # Initial state.
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # Keys [key_lo, key_hi) are seen by some row of the tile, those in [whole_lo, whole_hi) by every row.
    key_lo, key_hi, whole_lo, whole_hi = 0, k_len, 0, k_len
    if HAS_LEFT:
        key_lo = (tl.maximum(first_pos - left - k_start, 0) + k_stride - 1) // k_stride
        whole_lo = (tl.maximum(last_pos - left - k_start, 0) + k_stride - 1) // k_stride
    if HAS_RIGHT:
        key_hi = tl.minimum(k_len, (tl.maximum(last_pos + right - k_start, -k_stride) + k_stride) // k_stride)
        whole_hi = tl.minimum(k_len, (tl.maximum(first_pos + right - k_start, -k_stride) + k_stride) // k_stride)
    begin = key_lo // BLOCK_N * BLOCK_N
    end = key_hi
    if IS_SPLIT:
        per_split = tl.cdiv(tl.cdiv(tl.maximum(key_hi - begin, 0), BLOCK_N), num_splits) * BLOCK_N
        begin += split.to(tl.int32) * per_split
        end = tl.minimum(end, begin + per_split)
    whole_begin = tl.minimum(tl.maximum(tl.cdiv(whole_lo, BLOCK_N) * BLOCK_N, begin), tl.maximum(end, begin))
    whole_end = tl.maximum(tl.minimum(whole_hi, end) // BLOCK_N * BLOCK_N, whole_begin)

    # Stream tiles. Phase 0: those the left edge cuts; 1: those seen whole; 2: those the right edge or the last key cuts.
    for phase in tl.static_range(0 if HAS_LEFT else 1, 3):
        if phase == 0:
            tiles_begin, tiles_end = begin, whole_begin
        elif phase == 1:
            tiles_begin, tiles_end = whole_begin, whole_end
        else:
            tiles_begin, tiles_end = whole_end, end
        for start_n in tl.range(tiles_begin, tiles_end, BLOCK_N):
            offs_n = start_n + tl.arange(0, BLOCK_N)
            mask_n = (offs_n >= key_lo) & (offs_n < key_hi)
            k_offs = offs_n[:, None] * stride_kn + offs_d[None, :]
            if phase != 1:
                k = tl.load(k_ptr + k_offs, mask=mask_n[:, None] & (offs_d[None, :] < D), other=0.0)
            elif BLOCK_D != D:
                k = tl.load(k_ptr + k_offs, mask=offs_d[None, :] < D, other=0.0)
            else:
                k = tl.load(k_ptr + k_offs)
            scores = tl.dot(q, k.T, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            factor = scale * LOG2E
            if HAS_SOFTCAP:
                scores = softcap_scores(scores * scale, softcap, PRECISION == "ieee") * LOG2E
            elif not SCALE_LATE:
                scores = scores * factor
            k_pos = k_start + offs_n * k_stride
            if HAS_ALIBI:
                distance = tl.abs(q_pos[:, None] - k_pos[None, :]).to(tl.float32)
                scores -= (slopes * LOG2E)[:, None] * distance

            # visible: [BLOCK_M, BLOCK_N]
            if phase != 1:
                visible = mask_n[None, :]
                if HAS_RIGHT:
                    visible = visible & (k_pos[None, :] <= (q_pos + right)[:, None])
                if HAS_LEFT:
                    visible = visible & (k_pos[None, :] >= (q_pos - left)[:, None])
                scores = tl.where(visible, scores, float("-inf"))
            if HAS_BIAS:
                bias_ptrs = bias_ptr + bias_offs[:, None] + offs_n[None, :] * stride_bn
                bias = tl.load(bias_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=float("-inf")).to(tl.float32)
                scores = tl.where(bias == float("-inf"), float("-inf"), scores + bias * LOG2E)
            if HAS_MASK:
                mask_ptrs = mask_ptr + mask_offs[:, None] + offs_n[None, :] * stride_mn
                attend = tl.load(mask_ptrs, mask=mask_m[:, None] & mask_n[None, :], other=0)
                scores = tl.where(attend != 0, scores, float("-inf"))

            weights, shrink, row_max, row_sum = online_softmax_step(
                scores, factor if SCALE_LATE else 1.0, row_max, row_sum, GUARD=phase != 1 or HAS_MASK or HAS_BIAS
            )
            if HAS_DROPOUT:
                col_words = dropout_words(seed_ptr, k_pos, stream, IS_COLUMN=True)
                weights = tl.where(dropout_keep(row_words, col_words, dropout_threshold), weights, 0.0)
            v_offs = offs_n[:, None] * stride_vn + offs_dv[None, :]
            if phase != 1:
                v = tl.load(v_ptr + v_offs, mask=mask_n[:, None] & (offs_dv[None, :] < DV), other=0.0)
            elif BLOCK_DV != DV:
                v = tl.load(v_ptr + v_offs, mask=offs_dv[None, :] < DV, other=0.0)
            else:
                v = tl.load(v_ptr + v_offs)
            if HAS_MASK or HAS_BIAS:  # a value that nobody sees may be NaN, and 0 * NaN is NaN
                seen = tl.max((scores > float("-inf")).to(tl.int32), 0)
                v = tl.where(seen[:, None] > 0, v, 0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)

    # Finish: the sink is one more key without a value.
    if HAS_SINK:
        sink = tl.load(sink_ptr + offs_h).to(tl.float32) * LOG2E
        _, shrink, row_max, row_sum = online_softmax_step(sink[:, None], 1.0, row_max, row_sum, GUARD=True)
        acc = acc * shrink[:, None]
    seen_any = row_sum != 0
    lse = tl.where(seen_any, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
    out = acc * (dropout_scale / tl.where(seen_any, row_sum, 1.0))[:, None]

    # Store.
    if IS_SPLIT:
        out_ptr += split * stride_os
        lse_ptr += split * stride_ls
    out_offs = batch * stride_ob + offs_m * stride_om + offs_h * stride_oh
    tl.store(
        out_ptr + out_offs[:, None] + offs_dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_dv[None, :] < DV),
    )
    tl.store(lse_ptr + batch * stride_lb + offs_h * stride_lh + offs_m, lse, mask=mask_m)


def forward(problem: Problem, inputs: Inputs, config: TritonConfig) -> tuple[Tensor, Tensor]:
    """out `[B, Tq, Hq, Dv]` and lse `[B, Hq, Tq]`; packed: `[Nq, Hq, Dv]` and `[Hq, Nq]`."""
    query = inputs.query
    *lead, rows, heads = query.shape[:-1]
    if problem.packed or problem.empty:  # rows that no program writes
        out = query.new_zeros(*lead, rows, heads, problem.value_dim, dtype=problem.out_dtype)
        lse = query.new_full((*lead, heads, rows), EMPTY, dtype=torch.float32)
    else:
        out = query.new_empty(*lead, rows, heads, problem.value_dim, dtype=problem.out_dtype)
        lse = query.new_empty(*lead, heads, rows, dtype=torch.float32)
    if 0 in (problem.batch, problem.q_len):
        return out, lse
    if config.num_splits == 1:
        launch_forward(problem, inputs, config, out, lse)
        return out, lse
    outs = query.new_empty(config.num_splits, *out.shape, dtype=torch.float32)
    lses = query.new_empty(config.num_splits, *lse.shape, dtype=torch.float32)
    launch_forward(problem, inputs._replace(sink=None), config, outs, lses)
    launch_merge(outs, lses, inputs.sink, out, lse)
    return out, lse


def launch_forward(problem: Problem, inputs: Inputs, config: TritonConfig, out: Tensor, lse: Tensor) -> None:
    """Launch the kernel. `out` and `lse` have a leading dim of splits if there are several."""
    query, key, value, mask, bias, slopes, sink, seed, cu_q, cu_k = inputs
    heads_per_tile = problem.group if config.pack_heads else 1
    is_split = config.num_splits > 1
    aligned = all(_aligned(t) for t in (query, key, value))
    unit = 8 if aligned else 1
    tiles_m = triton.cdiv(problem.q_len * heads_per_tile, config.block_m)
    grid = (tiles_m * config.num_splits * (problem.q_heads // heads_per_tile) * problem.batch,)
    plain_scores = not (problem.softcap or problem.alibi or problem.bias)
    strides = (
        *(stride // unit for t in (query, key, value) for stride in _row_strides(t, problem.packed)),
        *_broadcast_strides(mask),
        *_broadcast_strides(bias),
        slopes.stride(0) if slopes is not None and slopes.shape[0] > 1 else 0,
        out.stride(0) if is_split else 0,
        *_row_strides(out[0] if is_split else out, problem.packed),
        lse.stride(0) if is_split else 0,
        0 if problem.packed else lse.stride(-3),
        lse.stride(-2),
    )
    with torch.cuda.device_of(query):
        _forward_kernel[grid](
            query,
            key,
            value,
            None if mask is None else mask.view(torch.uint8),
            bias,
            slopes,
            sink,
            seed,
            cu_q,
            cu_k,
            out,
            lse,
            *strides,
            q_len=problem.q_len,
            k_len=problem.k_len,
            q_heads=problem.q_heads,
            num_splits=config.num_splits,
            left=problem.left,
            right=problem.right,
            q_start=problem.q_start,
            q_stride=problem.q_stride,
            k_start=problem.k_start,
            k_stride=problem.k_stride,
            q_index=0 if problem.packed else problem.q_start - problem.q_base,
            batch_start=problem.batch_start,
            dropout_threshold=int(problem.dropout_p * 2**32),
            scale=problem.scale,
            softcap=problem.softcap,
            dropout_scale=1.0 / (1.0 - problem.dropout_p),
            GROUP=problem.group,
            HEADS=heads_per_tile,
            D=problem.head_dim,
            DV=problem.value_dim,
            BLOCK_D=_tile_width(problem.head_dim),
            BLOCK_DV=_tile_width(problem.value_dim),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            ALIGNED=aligned,
            HAS_LEFT=problem.left != UNBOUNDED,
            HAS_RIGHT=problem.right != UNBOUNDED,
            HAS_MASK=problem.mask,
            HAS_BIAS=problem.bias is not None,
            HAS_ALIBI=problem.alibi,
            HAS_SINK=sink is not None,
            HAS_SOFTCAP=problem.softcap != 0.0,
            HAS_DROPOUT=problem.dropout_p != 0.0,
            IS_PACKED=problem.packed,
            IS_SPLIT=is_split,
            SCALE_LATE=plain_scores and problem.scale > 0,
            PRECISION="tf32" if problem.tf32 else "ieee",
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def _tile_width(dim: int) -> int:
    """Columns of a tile that holds `dim`: a power of two, at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(dim))


def _row_strides(t: Tensor, packed: bool) -> tuple[int, int, int]:
    """Strides of (batch, row, head); 0 where there is one entry or none."""
    shape, strides = (t.shape, t.stride()) if not packed else ((1, *t.shape), (0, *t.stride()))
    batch, row, head = (stride if size > 1 else 0 for size, stride in zip(shape[:3], strides[:3], strict=True))
    return batch, row, head


def _broadcast_strides(t: Tensor | None) -> tuple[int, ...]:
    """Strides of a tensor broadcast to [B, Hq, Tq, Tk]: 0 in the dims in which it is."""
    return (0, 0, 0, 0) if t is None else tuple(s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True))


def _aligned(t: Tensor) -> bool:
    """Whether every row starts on 16 bytes and strides are whole multiples of 8 elements."""
    return t.data_ptr() % 16 == 0 and all(s % 8 == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
