"""The streaming forward in Triton: one kernel for dense and packed calls, every modifier, whole rows or splits of keys.

For a tile of queries, with running max m, sum l and accumulator o (scores in log2 units):

    m' = max(m, max_j s_j)      l' = l 2^(m - m') + sum_j 2^(s_j - m')      o' = o 2^(m - m') + sum_j 2^(s_j - m') v_j

Grid: one program per (batch, head, split of the keys, tile of queries), in one dimension, so that no product of sizes
meets the grid's 65,535 limit. A tile holds the queries of one head, or (`HEADS` > 1) those of all heads that share a KV
head, which fills the tile when queries are few. Keys that no row of a tile may see are never read; tiles that every row
sees whole are not masked. What a mask or bias masks may be NaN in V, and 0 * NaN is NaN: where a tile's output is NaN,
its keys are streamed once more, and values that none of its rows sees are not read. Splits write fp32 states for
merge.py; a sink joins in the last step of a row, once.

Not here: paged and quantised caches.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...base.problem import UNBOUNDED, Forward, Inputs, Problem
from ...gpu.arguments import UNIT, WIDE, access, common_sizes, is_aligned, sample, scale_of
from ...gpu.bounds import HEADER, key_interval, query_interval, within
from ...gpu.launch import Kernel, Launch, Sizes, jit
from ...gpu.merge import bind_merge
from ...gpu.prepass import Prepass
from ...gpu.scratch import OUTPUT_STRIDES, Outputs
from ...gpu.tail import clear_uncomputed_output
from ...gpu.tiles import (
    LN2,
    LOG2E,
    dropout_keep,
    initial_state,
    load_rows,
    modify_scores,
    online_softmax_step,
    packed_rows,
    phases,
    store_rows,
    tile_of_program,
    visible_by_position,
    visible_span,
)
from .arguments import bind_tiles
from .tuning import TritonConfig

_HEADER = tl.constexpr(HEADER)


@jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, bias_ptr, slopes_ptr, sink_ptr,
    row_words_ptr, col_words_ptr, cu_q_ptr, cu_k_ptr, query_bounds_ptr, key_bounds_ptr, key_lists_ptr,
    out_ptr, lse_ptr, write_lse: tl.int32,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn: tl.int64,
    stride_bb: tl.int64, stride_bh: tl.int64, stride_bm: tl.int64, stride_bn: tl.int64,
    stride_ab: tl.int64, stride_rb: tl.int64, stride_rh: tl.int64, stride_cb: tl.int64, stride_ch: tl.int64,
    stride_os: tl.int64, stride_ob: tl.int64, stride_om: tl.int64, stride_oh: tl.int64,
    stride_ls: tl.int64, stride_lb: tl.int64, stride_lh: tl.int64,
    q_len: tl.int32, k_len: tl.int32, q_rows: tl.int32, k_rows: tl.int32,
    q_heads: tl.int32, num_splits: tl.int32, bounds_batch: tl.int32, bounds_head: tl.int32,
    left: tl.int32, right: tl.int32, q_start: tl.int32, q_stride: tl.int32, k_start: tl.int32, k_stride: tl.int32,
    dropout_threshold: tl.uint32, scale, softcap, dropout_scale,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_SPLIT: tl.constexpr,
    SCALE_LATE: tl.constexpr, PRECISION: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
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

    BOUNDS: tl.constexpr = query_bounds_ptr is not None

    # Where am I: the tiles that see most keys first.
    tiles_m = tl.cdiv(q_len * HEADS, BLOCK_M)
    tile_m, split, head, batch = tile_of_program(tiles_m, num_splits, q_heads // HEADS, HAS_RIGHT, IS_SPLIT)
    head *= HEADS
    kv_head = head // GROUP
    if IS_PACKED:  # rows of the pack before this sequence; its keys and queries end together
        longest = q_len
        q_row, q_len = packed_rows(cu_q_ptr + batch, q_rows)
        k_row, k_len = packed_rows(cu_k_ptr + batch, k_rows)
        q_start = k_len - q_len
        q_len = tl.minimum(q_len, longest)  # rows beyond the longest that the caller gave take no part
        sequences = tl.num_programs(0) // (tiles_m * (q_heads // HEADS))
        clear_uncomputed_output(out_ptr, lse_ptr, write_lse, cu_q_ptr, sequences, longest, q_rows, q_heads, DV)
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
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    mask_m = offs_m < q_len
    first_pos = q_start + (tile_m * BLOCK_M // HEADS) * q_stride
    last_pos = q_start + tl.minimum((tile_m * BLOCK_M + BLOCK_M - 1) // HEADS, q_len - 1) * q_stride
    q_pos = (q_start + offs_m * q_stride)[:, None]

    # Load Q.
    q_offs = offs_m * stride_qm + offs_h * stride_qh
    q = load_rows(q_ptr + batch * stride_qb + q_offs[:, None], offs_d[None, :], mask_m, D, BLOCK_D, MASKED=True)
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh
    slopes = 0.0
    if MASK:
        mask_offs = batch * stride_mb + offs_h * stride_mh + offs_m * stride_mm
    if BIAS:
        bias_offs = batch * stride_bb + offs_h * stride_bh + offs_m * stride_bm
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + batch * stride_ab + offs_h).to(tl.float32)[:, None]
    if HAS_DROPOUT:
        tl.static_assert(HEADS == 1, "the rows of a tile share their column words")
        row_words = tl.load(row_words_ptr + batch * stride_rb + head * stride_rh + offs_m, mask=mask_m, other=0)
        col_words_ptr += batch * stride_cb + head * stride_ch

    row_max, row_sum, acc = initial_state(BLOCK_M, BLOCK_DV)
    key_lo, key_hi, whole_lo, whole_hi = visible_span(
        first_pos, last_pos, left, right, k_start, k_stride, k_len, HAS_LEFT, HAS_RIGHT
    )
    edges = phases(key_lo, key_hi, whole_lo, whole_hi, split, num_splits, BLOCK_N, MASKS_END=True, IS_SPLIT=IS_SPLIT)
    if BOUNDS:
        tl.static_assert(HEADS == 1 and not IS_SPLIT and not IS_PACKED, "a list has all tiles of one head")
        tl.static_assert(not HAS_LEFT and not HAS_RIGHT, "windows are part of the intervals")
        entry = batch * bounds_batch + head * bounds_head
        start, end, label = query_interval(query_bounds_ptr + entry * 3 * q_len, offs_m, mask_m, q_len)
        start, end, label = start[:, None], end[:, None], label[:, None]
        if key_bounds_ptr is not None:
            key_bounds_ptr += entry * 2 * k_len
        key_lists_ptr += (entry * tiles_m + tile_m) * (_HEADER + tl.cdiv(k_len, BLOCK_N))
        partial, seen = tl.load(key_lists_ptr), tl.load(key_lists_ptr + 1)
        edges = 0, partial, seen, seen

    # Stream tiles. Phase 0: partially masked by the left edge; 1: wholly visible; 2: by the right edge or last key;
    # 3: all of them again if something is NaN, without values that are masked for every row. With a list phase 1 has
    # its tiles that all rows see, phase 2 the others.
    for phase in tl.static_range(0 if HAS_LEFT else 1, 4 if MASK or BIAS or BOUNDS else 3):
        if BOUNDS and phase == 2:
            tiles_begin, tiles_end = 0, partial
        elif phase < 3:
            tiles_begin, tiles_end = edges[phase], edges[phase + 1]
        else:
            tiles_begin, tiles_end = edges[0], edges[0]
            sums = tl.sum(acc, 1)
            if tl.max((sums != sums).to(tl.int32), 0) != 0:  # some are NaN
                tiles_end = edges[3]
                row_max, row_sum, acc = initial_state(BLOCK_M, BLOCK_DV)
        for tile_n in tl.range(tiles_begin, tiles_end, num_stages=1 if phase == 3 else None, disable_licm=phase == 3):
            if BOUNDS:
                tile_n = tl.load(key_lists_ptr + _HEADER + tile_n)
            offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = (offs_n >= key_lo) & (offs_n < key_hi)
            # Mask and bias come before the product: Triton then keeps the softmax in the product's layout.
            bias = 0.0
            inside = mask_m[:, None] if phase == 1 else mask_m[:, None] & mask_n[None, :]
            if BIAS:
                bias_ptrs = bias_ptr + bias_offs[:, None] + offs_n[None, :] * (1 if BIAS == WIDE else stride_bn)
                bias = tl.load(bias_ptrs, mask=inside, other=float("-inf"))
            if MASK:
                mask_ptrs = mask_ptr + mask_offs[:, None] + offs_n[None, :] * (1 if MASK == WIDE else stride_mn)
                attend = tl.load(mask_ptrs, mask=inside, other=0)
            if BOUNDS and phase != 1:
                allowed = within((k_start + offs_n * k_stride)[None, :], start, end)
                if key_bounds_ptr is not None:
                    first, last = key_interval(key_bounds_ptr, offs_n, mask_n, k_len)
                    allowed = allowed & within(label, first[None, :], last[None, :])
            load_n = mask_n
            if phase == 3:  # before the product too: its registers are free then
                k_pos = (k_start + offs_n * k_stride)[None, :]
                visible = visible_by_position(mask_n[None, :], q_pos, k_pos, left, right, HAS_LEFT, HAS_RIGHT)
                if BOUNDS:
                    visible = visible & allowed
                if MASK:
                    visible = visible & (attend != 0)
                if BIAS:
                    visible = visible & (bias != float("-inf"))
                load_n = tl.max(visible.to(tl.int32), 0) != 0
            k_offs = offs_n[:, None] * stride_kn + offs_d[None, :]
            k = load_rows(k_ptr, k_offs, mask_n, D, BLOCK_D, MASKED=phase != 1)
            scores, factor = tl.dot(q, k.T, input_precision=PRECISION), scale * LOG2E  # [BLOCK_M, BLOCK_N]
            k_pos = (k_start + offs_n * k_stride)[None, :]
            if not SCALE_LATE:
                factor = 1.0
                scores, _ = modify_scores(
                    scores, scale, softcap, slopes, q_pos, k_pos, bias, HAS_SOFTCAP, HAS_ALIBI, BIAS, TANH
                )
            if phase != 1:
                visible = visible_by_position(mask_n[None, :], q_pos, k_pos, left, right, HAS_LEFT, HAS_RIGHT)
                if BOUNDS:
                    visible = visible & allowed
                scores = tl.where(visible, scores, float("-inf"))
            if MASK:
                scores = tl.where(attend != 0, scores, float("-inf"))

            p, rescale, row_max, row_sum = online_softmax_step(
                scores, factor, row_max, row_sum, GUARD=phase != 1 or MASK or BIAS
            )
            if HAS_DROPOUT:
                col_words = tl.load(col_words_ptr + offs_n, mask=mask_n, other=0)
                p = tl.where(dropout_keep(row_words, col_words, dropout_threshold), p, 0.0)
            v_offs = offs_n[:, None] * stride_vn + offs_dv[None, :]
            v = load_rows(v_ptr, v_offs, load_n, DV, BLOCK_DV, MASKED=phase != 1)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

    # Finish: the sink is one more key without a value.
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + offs_h).to(tl.float32) * LOG2E
        _, rescale, row_max, row_sum = online_softmax_step(sink[:, None], 1.0, row_max, row_sum, GUARD=True)
        acc = acc * rescale[:, None]
    seen_any = row_sum != 0
    lse = tl.where(seen_any, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
    out = acc * (dropout_scale / tl.where(seen_any, row_sum, 1.0))[:, None]

    # Store.
    if IS_SPLIT:
        out_ptr += split.to(tl.int64) * stride_os
        lse_ptr += split.to(tl.int64) * stride_ls
    out_offs = batch * stride_ob + offs_m * stride_om + offs_h * stride_oh
    store_rows(out_ptr + out_offs[:, None], offs_dv[None, :], out, mask_m, DV, BLOCK_DV)
    mask_lse = mask_m & (write_lse != 0)
    tl.store(lse_ptr + batch * stride_lb + offs_h * stride_lh + offs_m, lse, mask=mask_lse)


def prepare(problem: Problem, inputs: Inputs, config: TritonConfig) -> Forward:
    """The forward of calls whose tensors lie as these `inputs` do, as a function of their inputs: `(out, lse)`."""
    outputs = Outputs.of(problem, inputs.query.shape[-3], clears_tail=True)  # packs are not split
    if 0 in (problem.batch, problem.q_len):
        return lambda inputs, with_lse: outputs.allocate(inputs.query)
    before = Prepass.of(problem, inputs, tiles=[(config.block_m, config.block_n)])
    out, lse = outputs.samples()
    if config.num_splits > 1:
        return _prepare_split(problem, inputs, config, outputs, before)
    return _Forward(outputs, before, bind_forward(problem, inputs, config, out, lse, before))


class _Forward:
    """One launch, whole rows."""

    def __init__(self, outputs: Outputs, before: Prepass, launch: Launch) -> None:
        self._outputs, self._before, self._launch = outputs, before, launch
        self.takes_any_rows = len(outputs.lse.shape) == 2 and not before.steps and not outputs.has_unwritten_rows
        self._without_lse: Launch | None = None

    def __call__(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        outputs, launch, query = self._outputs, self._launch, inputs.query
        is_compiled, sizes = launch.is_compiled, None
        with_lse = with_lse or not is_compiled
        if self.takes_any_rows:
            (rows, *_), (k_rows, *_) = query.shape, inputs.key.shape
            sizes = Sizes("q_rows k_rows stride_lh", (rows, k_rows, rows), {}, {})
            out, lse = outputs.allocate_pack(query, with_lse)
        else:
            out, lse = outputs.allocate(query, is_compiled, with_lse)
        if not with_lse:
            launch = self._without_lse = self._without_lse or launch.replaced("write_lse", 0)
        launch(*inputs, *self._before.run(inputs), out, 0 if lse is None else lse, sizes=sizes)
        return out, lse

    def resized(self, problem: Problem, inputs: Inputs, config: TritonConfig) -> Forward | None:
        """The same call on tensors of other lengths; None if a constexpr would differ, or something is computed before
        the kernel."""
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


def _most_registers(problem: Problem, inputs: Inputs, config: TritonConfig) -> int | None:
    """Those of a thread. Held to them is what they are enough for: a mask or a bias, no left edge, wide words alone."""
    query, key, value, mask, bias = inputs[:5]
    fewer, more = sorted((access(mask), access(bias)))
    fits = fewer == 0 and more >= WIDE.value and problem.left == UNBOUNDED and is_aligned(query, key, value)
    return config.max_registers if fits else None


def bind_forward(
    problem: Problem, inputs: Inputs, config: TritonConfig, out: Tensor, lse: Tensor, before: Prepass
) -> Launch:
    """The kernel as a function of inputs, of what is computed before, and of results, contiguous, with a leading dim of
    splits if there are several."""
    is_split = config.num_splits > 1
    results = Outputs(out[0], lse[0], False) if is_split else Outputs(out, lse, False)
    sizes = common_sizes(problem, inputs, is_aligned(*inputs[:3]), OUTPUT_STRIDES, results.strides(problem.packed))
    return bind_tiles(
        _kernel, _programs(problem, config), config, problem, inputs, before.samples, "out_ptr lse_ptr", (out, lse),
        sizes, _most_registers(problem, inputs, config),
        write_lse=1,
        stride_os=out.stride(0) // UNIT if is_split else 0,
        stride_ls=lse.stride(0) if is_split else 0,
        HEADS=problem.group if config.pack_heads else 1,
        MASK=min(access(inputs.mask), WIDE.value),
        BIAS=min(access(inputs.bias), WIDE.value),
        SCALE_LATE=scale_of(problem) > 0 and not (problem.softcap or problem.alibi or problem.bias),
    )  # fmt: skip


_kernel = Kernel(_forward_kernel)
