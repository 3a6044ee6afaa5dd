"""The streaming forward in Triton: one kernel for dense and packed calls, every modifier, whole rows or splits of keys.

For a tile of queries, with running max m, sum l and accumulator o (scores in log2 units):

    m' = max(m, max_j s_j)      l' = l 2^(m - m') + sum_j 2^(s_j - m')      o' = o 2^(m - m') + sum_j 2^(s_j - m') v_j

Grid: one program per (batch, head, split of the keys, tile of queries), in one dimension, so that no product of sizes
meets the grid's 65,535 limit. A tile holds the queries of one head, or (`HEADS` > 1) those of all heads that share a KV
head, which fills the tile when queries are few. Keys that no row of a tile may see are never read; tiles that every row
sees whole pay for no mask. Splits write fp32 states for merge.py; a sink joins in the last step of a row, once.

Not here: paged and quantised caches.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...base.problem import Forward, Inputs, Problem
from ...gpu.arguments import (
    UNIT,
    WIDE,
    access,
    access_unit,
    broadcast_strides,
    common_sizes,
    flag_strides,
    is_aligned,
    line_strides,
    named,
    precision,
    row_strides,
    sample,
    scale_of,
    slope_stride,
    tanh,
    tile_width,
)
from ...gpu.launch import Kernel, Launch, jit
from ...gpu.merge import bind_merge
from ...gpu.prepass import Prepass
from ...gpu.scratch import OUTPUT_STRIDES, Outputs
from ...gpu.tail import clear_output_tail
from ...gpu.tiles import LN2, LOG2E, add_bias, dropout_keep, online_softmax_step, packed_rows, softcap_scores
from .tuning import TritonConfig


@jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    bias_ptr,
    seen_ptr,
    slopes_ptr,
    sink_ptr,
    row_words_ptr,
    col_words_ptr,
    cu_q_ptr,
    cu_k_ptr,
    out_ptr,
    lse_ptr,
    write_lse: tl.int32,
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
    stride_sb: tl.int64,
    stride_sh: tl.int64,
    stride_ab: tl.int64,
    stride_rb: tl.int64,
    stride_rh: tl.int64,
    stride_cb: tl.int64,
    stride_ch: tl.int64,
    stride_os: tl.int64,
    stride_ob: tl.int64,
    stride_om: tl.int64,
    stride_oh: tl.int64,
    stride_ls: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    q_len: tl.int32,
    k_len: tl.int32,
    q_rows: tl.int32,
    k_rows: tl.int32,
    sequences: tl.int32,
    q_heads: tl.int32,
    num_splits: tl.int32,
    left: tl.int32,
    right: tl.int32,
    q_start: tl.int32,
    q_stride: tl.int32,
    k_start: tl.int32,
    k_stride: tl.int32,
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
    MASK: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_PACKED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SCALE_LATE: tl.constexpr,
    PRECISION: tl.constexpr,
    TANH: tl.constexpr,
):
    # Strides of what is read and written in wide words arrive in units of those, so that the compiler knows.
    stride_os, stride_ob, stride_om, stride_oh = stride_os * 8, stride_ob * 8, stride_om * 8, stride_oh * 8
    if ALIGNED:
        stride_qb, stride_qm, stride_qh = stride_qb * 8, stride_qm * 8, stride_qh * 8
        stride_kb, stride_kn, stride_kh = stride_kb * 8, stride_kn * 8, stride_kh * 8
        stride_vb, stride_vn, stride_vh = stride_vb * 8, stride_vn * 8, stride_vh * 8
    if MASK == WIDE:
        stride_mb, stride_mh, stride_mm = stride_mb * 8, stride_mh * 8, stride_mm * 8
    if BIAS == WIDE:
        stride_bb, stride_bh, stride_bm = stride_bb * 8, stride_bh * 8, stride_bm * 8

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
        q_row, q_len = packed_rows(cu_q_ptr + batch, q_rows)
        k_row, k_len = packed_rows(cu_k_ptr + batch, k_rows)
        q_start = k_len - q_len
        clear_output_tail(out_ptr, lse_ptr, write_lse, cu_q_ptr, sequences, q_rows, q_heads, DV)
        if tile_m * BLOCK_M >= q_len * HEADS:
            return
        q_ptr += q_row * stride_qm
        k_ptr += k_row * stride_kn
        v_ptr += k_row * stride_vn
        out_ptr += q_row * stride_om
        lse_ptr += q_row
        if HAS_DROPOUT:
            row_words_ptr += q_row
            col_words_ptr += k_row

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
    if MASK or BIAS:
        seen_ptr += batch * stride_sb + kv_head * stride_sh
    if MASK:
        mask_offs = batch * stride_mb + offs_h * stride_mh + offs_m * stride_mm
    if BIAS:
        bias_offs = batch * stride_bb + offs_h * stride_bh + offs_m * stride_bm
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + batch * stride_ab + offs_h).to(tl.float32)
    if HAS_DROPOUT:
        tl.static_assert(HEADS == 1, "the rows of a tile share their column words")
        row_words = tl.load(row_words_ptr + batch * stride_rb + head * stride_rh + offs_m, mask=mask_m, other=0)
        col_words_ptr += batch * stride_cb + head * stride_ch

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
    begin, end = key_lo // BLOCK_N, tl.cdiv(key_hi, BLOCK_N)  # in tiles from here on
    if IS_SPLIT:
        per_split = tl.cdiv(tl.maximum(end - begin, 0), num_splits)
        begin += split.to(tl.int32) * per_split
        end = tl.minimum(end, begin + per_split)
    whole_begin = tl.minimum(tl.maximum(tl.cdiv(whole_lo, BLOCK_N), begin), tl.maximum(end, begin))
    whole_end = tl.maximum(tl.minimum(whole_hi // BLOCK_N, end), whole_begin)

    # Stream tiles. Phase 0: those the left edge cuts; 1: those seen whole; 2: those the right edge or last key cuts.
    for phase in tl.static_range(0 if HAS_LEFT else 1, 3):
        if phase == 0:
            tiles_begin, tiles_end = begin, whole_begin
        elif phase == 1:
            tiles_begin, tiles_end = whole_begin, whole_end
        else:
            tiles_begin, tiles_end = whole_end, end
        for tile_n in tl.range(tiles_begin, tiles_end):
            offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = (offs_n >= key_lo) & (offs_n < key_hi)
            # Mask and bias come before the product: Triton then keeps the softmax in the product's layout.
            if BIAS:
                bias_ptrs = bias_ptr + bias_offs[:, None] + offs_n[None, :] * (1 if BIAS == WIDE else stride_bn)
                bias_mask = mask_m[:, None] if phase == 1 else mask_m[:, None] & mask_n[None, :]
                bias = tl.load(bias_ptrs, mask=bias_mask, other=float("-inf"))
            if MASK:
                mask_ptrs = mask_ptr + mask_offs[:, None] + offs_n[None, :] * (1 if MASK == WIDE else stride_mn)
                mask_mask = mask_m[:, None] if phase == 1 else mask_m[:, None] & mask_n[None, :]
                attend = tl.load(mask_ptrs, mask=mask_mask, other=0)
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
                scores = softcap_scores(scores * scale, softcap, TANH) * LOG2E
            elif not SCALE_LATE:
                scores = scores * factor
            k_pos = k_start + offs_n * k_stride
            if HAS_ALIBI:
                distance = tl.abs(q_pos[:, None] - k_pos[None, :]).to(tl.float32)
                scores -= (slopes * LOG2E)[:, None] * distance
            if BIAS:
                scores = add_bias(scores, bias)
            if phase != 1:
                visible = mask_n[None, :]
                if HAS_RIGHT:
                    visible = visible & (k_pos[None, :] <= (q_pos + right)[:, None])
                if HAS_LEFT:
                    visible = visible & (k_pos[None, :] >= (q_pos - left)[:, None])
                scores = tl.where(visible, scores, float("-inf"))
            if MASK:
                scores = tl.where(attend != 0, scores, float("-inf"))

            p, rescale, row_max, row_sum = online_softmax_step(
                scores, factor if SCALE_LATE else 1.0, row_max, row_sum, GUARD=phase != 1 or MASK or BIAS
            )
            if HAS_DROPOUT:
                col_words = tl.load(col_words_ptr + offs_n, mask=mask_n, other=0)
                p = tl.where(dropout_keep(row_words, col_words, dropout_threshold), p, 0.0)
            v_offs = offs_n[:, None] * stride_vn + offs_dv[None, :]
            if MASK or BIAS:
                seen = tl.load(seen_ptr + offs_n, mask=mask_n, other=0)
                v = tl.load(v_ptr + v_offs, mask=(seen != 0)[:, None] & (offs_dv[None, :] < DV), other=0.0)
            elif phase != 1:
                v = tl.load(v_ptr + v_offs, mask=mask_n[:, None] & (offs_dv[None, :] < DV), other=0.0)
            elif BLOCK_DV != DV:
                v = tl.load(v_ptr + v_offs, mask=offs_dv[None, :] < DV, other=0.0)
            else:
                v = tl.load(v_ptr + v_offs)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

    # Finish: the sink is one more key without a value.
    if HAS_SINK:
        sink = tl.load(sink_ptr + offs_h).to(tl.float32) * LOG2E
        _, rescale, row_max, row_sum = online_softmax_step(sink[:, None], 1.0, row_max, row_sum, GUARD=True)
        acc = acc * rescale[:, None]
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
    mask_lse = mask_m & (write_lse != 0)
    tl.store(lse_ptr + batch * stride_lb + offs_h * stride_lh + offs_m, lse, mask=mask_lse)


def prepare(problem: Problem, inputs: Inputs, config: TritonConfig) -> Forward:
    """The forward of calls whose tensors lie as these `inputs` do, as a function of their inputs: `(out, lse)`."""
    outputs = Outputs.of(problem, inputs.query.shape[-3], clears_tail=True)  # packs are not split
    if 0 in (problem.batch, problem.q_len):
        return lambda inputs, with_lse: outputs.allocate(inputs.query)
    before, (out, lse) = Prepass.of(problem, inputs), outputs.samples()
    if config.num_splits > 1:
        return _prepare_split(problem, inputs, config, outputs, before)
    return _Forward(outputs, before, bind_forward(problem, inputs, config, out, lse, before))


class _Forward:
    """One launch, whole rows."""

    def __init__(self, outputs: Outputs, before: Prepass, launch: Launch) -> None:
        self._outputs, self._before, self._launch = outputs, before, launch
        self._without_lse: Launch | None = None

    def __call__(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        outputs, launch, query = self._outputs, self._launch, inputs.query
        computed = self._before.run(inputs)
        if with_lse or not launch.is_compiled:
            out, lse = outputs.allocate(query, launch.is_compiled)
            launch(*inputs, *computed, out, lse)
            return out, lse
        if self._without_lse is None:
            self._without_lse = launch.replaced(write_lse=0)
        out = outputs.allocate_out(query, by_driver=True)
        self._without_lse(*inputs, *computed, out, 0)
        return out, None

    def resized(self, problem: Problem, inputs: Inputs, config: TritonConfig) -> Forward | None:
        """The same call on tensors of other lengths; None where another kernel computes it."""
        if self._before.steps or problem.empty:
            return None
        outputs = self._outputs.resized(inputs.query.shape[-3])
        sizes = common_sizes(problem, inputs, True, OUTPUT_STRIDES, outputs.strides(problem.packed))
        launch = self._launch.resized(_programs(problem, config), sizes)
        return None if launch is None else _Forward(outputs, self._before, launch)


def _prepare_split(
    problem: Problem, inputs: Inputs, config: TritonConfig, outputs: Outputs, before: Prepass
) -> Forward:
    """Keys in splits that run side by side and are merged."""
    out, lse = outputs.samples()
    outs, lses = (sample((config.num_splits, *t.shape), torch.float32) for t in (out, lse))
    launch = bind_forward(problem, inputs._replace(sink=None), config, outs, lses, before)
    merge = bind_merge(inputs.query.device, outs, lses, inputs.sink, out, lse)

    def run(inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        out, lse = outputs.allocate(inputs.query)
        outs_now, lses_now = (lse.new_empty(t.shape) for t in (outs, lses))
        launch(*inputs, *before.run(inputs), outs_now, lses_now)
        merge(outs_now, lses_now, inputs.sink, out, lse)
        return out, lse

    return run


def _programs(problem: Problem, config: TritonConfig) -> int:
    heads_per_tile = problem.group if config.pack_heads else 1
    tiles_m = -(-problem.q_len * heads_per_tile // config.block_m)
    return tiles_m * config.num_splits * (problem.q_heads // heads_per_tile) * problem.batch


def bind_forward(
    problem: Problem, inputs: Inputs, config: TritonConfig, out: Tensor, lse: Tensor, before: Prepass
) -> Launch:
    """The kernel as a function of inputs, of what is computed before, and of results, with a leading dim of splits if
    there are several."""
    query, key, value, mask, bias, slopes, sink, _, cu_q, cu_k = inputs
    seen, _, row_words, col_words = before.samples
    packed, is_split = problem.packed, config.num_splits > 1
    return _kernel.bind(
        _programs(problem, config),
        (*inputs, *before.samples, out, lse),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        q_ptr=query,
        k_ptr=key,
        v_ptr=value,
        mask_ptr=mask,
        bias_ptr=bias,
        seen_ptr=seen,
        slopes_ptr=slopes,
        sink_ptr=sink,
        row_words_ptr=row_words,
        col_words_ptr=col_words,
        cu_q_ptr=cu_q,
        cu_k_ptr=cu_k,
        out_ptr=out,
        lse_ptr=lse,
        write_lse=1,
        **common_sizes(problem, inputs, is_aligned(query, key, value)).arguments(),
        **named("stride_mb stride_mh stride_mm stride_mn", broadcast_strides(mask, access_unit(mask))),
        **named("stride_bb stride_bh stride_bm stride_bn", broadcast_strides(bias, access_unit(bias))),
        **named("stride_sb stride_sh", flag_strides(seen)),
        stride_ab=slope_stride(slopes),
        **named("stride_rb stride_rh", line_strides(row_words, packed)),
        **named("stride_cb stride_ch", line_strides(col_words, packed)),
        stride_os=out.stride(0) // UNIT if is_split else 0,
        **named("stride_ob stride_om stride_oh", row_strides(out[0] if is_split else out, packed, UNIT)),
        stride_ls=lse.stride(0) if is_split else 0,
        **named("stride_lb stride_lh", line_strides(lse, packed)),
        sequences=problem.batch,
        q_heads=problem.q_heads,
        num_splits=config.num_splits,
        q_stride=problem.q_stride,
        k_stride=problem.k_stride,
        dropout_threshold=int(problem.dropout_p * 2**32),
        scale=scale_of(problem),
        softcap=problem.softcap,
        dropout_scale=1.0 / (1.0 - problem.dropout_p),
        GROUP=problem.group,
        HEADS=problem.group if config.pack_heads else 1,
        D=problem.head_dim,
        DV=problem.value_dim,
        BLOCK_D=tile_width(problem.head_dim),
        BLOCK_DV=tile_width(problem.value_dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        MASK=min(access(mask), WIDE.value),
        BIAS=min(access(bias), WIDE.value),
        HAS_ALIBI=slopes is not None,
        HAS_SINK=sink is not None,
        HAS_SOFTCAP=problem.softcap != 0.0,
        HAS_DROPOUT=problem.dropout_p != 0.0,
        IS_PACKED=packed,
        IS_SPLIT=is_split,
        SCALE_LATE=scale_of(problem) > 0 and not (problem.softcap or problem.alibi or problem.bias),
        PRECISION=precision(problem),
        TANH=tanh(problem),
    )


_kernel = Kernel(_forward_kernel)
