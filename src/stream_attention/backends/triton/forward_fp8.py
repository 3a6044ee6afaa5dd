"""The streaming forward from FP8 codes, in Triton: for GPUs with FP8 matrix units, sm_89 and newer.

What it computes is in backends/reference/fp8.py. For a tile of queries, with the running maximum M, an integer, so that
every rescaling is by a power of two and rounds nothing (scores x in log2 units):

    x = (q . k) qs ks scale / ln 2        M' = max(M, ceil(max_j x_j))        w_j = 2^(x_j - M' + 8)
    l' = l 2^(M - M') + sum_j w_j         o' = o 2^(M - M') + vs sum_j e4m3(w_j) v_j

Each block's product with values begins at zero and is added in fp32: matrix units of Ada and Hopper keep 13 bits of a
sum of FP8 products, which a long row would use up. Rows of K are read in the order in which V has its keys, so that
columns of scores are already columns of V.

Grid: one program per (batch, head, tile of queries), in one dimension, as in forward.py. Blocks that no row of a tile
sees are never read; blocks that every row sees whole are not masked. Codes are read without asking what exists: rows
behind a sequence's end have codes of 0, and so have values that no query of the call sees (fp8_layout.py).

Not here: splits of keys, and whatever is more than positions and a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...base.fp8_layout import BLOCK, QUERY_BLOCK, SHIFT
from ...base.problem import UNBOUNDED, distinct
from ...gpu.arguments import FAR, cdiv, named, scale_of
from ...gpu.fp8_call import Fp8Call, Fp8Kernel
from ...gpu.launch import Kernel, Launch, Sizes, jit
from ...gpu.tiles import (
    LN2,
    LOG2E,
    initial_state,
    normalised,
    online_softmax_step,
    packed_rows,
    phases,
    tile_of_program,
    visible_by_position,
)

ROWS = tl.constexpr(BLOCK)
QUERY_ROWS = tl.constexpr(QUERY_BLOCK)
RAISED = tl.constexpr(SHIFT)
TINY = tl.constexpr(1e-37)


@triton.jit
def place_of_key(column):
    """Which key of a block stands in a column of V: ORDER of fp8_layout.py, bit by bit."""
    return (column & ~14) | ((column >> 1) & 6) | ((column & 2) << 2)


@jit
def _forward_fp8_kernel(
    q_ptr, k_ptr, v_ptr, q_scales_ptr, k_scales_ptr, cu_q_ptr, cu_k_ptr, out_ptr, lse_ptr,
    q_blocks: tl.int32, k_blocks: tl.int32, q_len: tl.int32, k_len: tl.int32, q_rows: tl.int32, k_rows: tl.int32,
    q_heads: tl.int32, left: tl.int32, right: tl.int32, offset: tl.int32,
    scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IS_PACKED: tl.constexpr, SCALE_LATE: tl.constexpr,
):  # fmt: skip
    # Where am I: the tiles that see most keys first.
    tile_m, split, head, batch = tile_of_program(tl.cdiv(q_len, BLOCK_M), 1, q_heads, HAS_RIGHT, IS_SPLIT=False)
    head = head.to(tl.int64)
    kv_head = head // GROUP
    if IS_PACKED:  # rows of the pack before this sequence; its keys and queries end together
        q_row, q_len = packed_rows(cu_q_ptr + batch, q_rows)
        longest = k_len
        k_row, k_len = packed_rows(cu_k_ptr + batch, k_rows)
        q_block, k_block = q_row // ROWS + batch, k_row // ROWS + batch
        offset = k_len - q_len
        k_len = tl.minimum(k_len, longest)  # keys behind what the caller called the longest have no codes
        if tile_m * BLOCK_M >= q_len:
            return
        out_ptr += (q_row * q_heads + head) * D
        lse_ptr += head * q_rows + q_row
    else:
        q_block, k_block = batch * tl.cdiv(q_len, ROWS), batch * tl.cdiv(k_len, ROWS)
        out_ptr += (batch * q_len * q_heads + head) * D
        lse_ptr += (batch * q_heads + head) * q_len
    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q_pos = (offset + offs_m)[:, None]
    offs_d = tl.arange(0, D)
    offs_c = tl.arange(0, BLOCK_N)
    place = place_of_key(offs_c)

    # Load Q, and what its rows are multiplied with.
    q_first = (head * q_blocks + q_block) * ROWS
    q = tl.load(q_ptr + (q_first + offs_m)[:, None] * D + offs_d[None, :])
    row_factor = tl.load(q_scales_ptr + q_first // QUERY_ROWS + offs_m // QUERY_ROWS) * (scale * LOG2E)
    k_ptr += (kv_head * k_blocks + k_block) * (ROWS * D)
    k_offs = place[:, None] * D + offs_d[None, :]
    v_stride = k_blocks.to(tl.int64) * ROWS
    v_ptrs = v_ptr + k_block * ROWS + (kv_head * D + offs_d)[:, None] * v_stride + offs_c[None, :]
    k_scales_ptr += (kv_head * k_blocks + k_block) * 2
    block_rows = tl.full([], BLOCK_N, tl.int64)

    row_max, row_sum, acc = initial_state(BLOCK_M, D)
    first_pos = offset + tile_m * BLOCK_M
    last_pos = offset + tl.minimum(tile_m * BLOCK_M + BLOCK_M, q_len) - 1
    # The span of tiles.py, for keys at 0, 1, 2 ...: in its form two kernels of packs would spill 8 and 56 bytes more.
    key_lo, key_hi, whole_lo, whole_hi = 0, k_len, 0, k_len
    if HAS_LEFT:
        key_lo, whole_lo = tl.maximum(first_pos - left, 0), tl.maximum(last_pos - left, 0)
    if HAS_RIGHT:
        key_hi = tl.minimum(k_len, tl.maximum(last_pos + right + 1, 0))
        whole_hi = tl.minimum(k_len, tl.maximum(first_pos + right + 1, 0))
    edges = phases(key_lo, key_hi, whole_lo, whole_hi, split, 1, BLOCK_N, MASKS_END=True, IS_SPLIT=False)

    # Stream blocks. Phase 0: partially masked by the left edge; 1: wholly visible; 2: by the right edge or last key.
    for phase in tl.static_range(0 if HAS_LEFT else 1, 3):
        for block in tl.range(edges[phase], edges[phase + 1]):
            first = block * block_rows
            k = tl.load(k_ptr + first * D + k_offs)
            scales = k_scales_ptr + first // ROWS * 2
            scores = tl.dot(q, k.T)  # [BLOCK_M, BLOCK_N]
            factor = row_factor * tl.load(scales)
            if SCALE_LATE:
                factor = tl.maximum(factor, TINY)  # -inf times 0 would be NaN
            else:
                scores, factor = scores * factor[:, None], tl.full([BLOCK_M], 1.0, tl.float32)
            if phase != 1:
                k_pos = (block * BLOCK_N + place)[None, :]
                visible = visible_by_position(k_pos < k_len, q_pos, k_pos, left, right, HAS_LEFT, HAS_RIGHT)
                scores = tl.where(visible, scores, float("-inf"))
            p, rescale, row_max, row_sum = online_softmax_step(
                scores, factor, row_max, row_sum, GUARD=phase != 1, RAISED=RAISED
            )
            v = tl.load(v_ptrs + first)
            acc = acc * rescale[:, None] + tl.dot(p.to(tl.float8e4nv), v.T) * tl.load(scales + 1)

    # Finish.
    out, lse = normalised(acc, row_max - RAISED, row_sum)
    mask_m = offs_m < q_len
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * (q_heads * D) + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_m[:, None])
    tl.store(lse_ptr + offs_m, lse * LN2, mask=mask_m)


def bind_fp8(call: Fp8Call) -> Launch:
    """The kernel as a function of query, key and value codes, scales of queries and keys, cu_seqlens, out, lse and a
    counter, which it does not need."""
    problem, queries, keys, ends, config, (out, lse, _), counter, device = call
    (grid, sizes), scale, offsets = _sizes(call), scale_of(problem), distinct(*ends)
    codes = queries.query, keys.key, keys.value, queries.scales, keys.scales
    return _kernel.bind(
        grid,
        (*codes, *offsets, out, lse, counter),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        device,
        **named("q_ptr k_ptr v_ptr q_scales_ptr k_scales_ptr", codes),
        **named("cu_q_ptr cu_k_ptr", offsets),
        out_ptr=out,
        lse_ptr=lse,
        **sizes.arguments(),
        q_heads=problem.q_heads,
        scale=scale,
        GROUP=problem.group,
        D=problem.head_dim,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        IS_PACKED=problem.packed,
        SCALE_LATE=scale > 0,
    )


def _sizes(call: Fp8Call) -> tuple[int, Sizes]:
    """The grid and the arguments that depend on lengths."""
    problem, queries, keys, _, config, *_ = call
    numbers = (
        *(queries.query.shape[1] // BLOCK, keys.key.shape[1] // BLOCK, problem.q_len, problem.k_len),
        *(queries.rows, keys.rows, min(problem.left, FAR), min(problem.right, FAR), problem.q_start - problem.k_start),
    )
    constants = {"HAS_LEFT": problem.left != UNBOUNDED, "HAS_RIGHT": problem.right != UNBOUNDED}
    grid = cdiv(problem.q_len, config.block_m) * problem.q_heads * problem.batch
    return grid, Sizes("q_blocks k_blocks q_len k_len q_rows k_rows left right offset", numbers, constants, {})


_kernel = Kernel(_forward_fp8_kernel)
fp8_kernel = Fp8Kernel(bind_fp8, _sizes)
prepare_fp8 = fp8_kernel.prepare
