"""Merging the states of split keys in Triton: the rule of state.py.

    lse = log(sum_s exp(lse_s))        out = sum_s out_s * exp(lse_s - lse)

Grid: one program per BLOCK_R rows. Reads contiguous fp32 states with the splits first, writes the answer in its own
dtype. A sink joins here, once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import Kernel, jit
from .tiles import LN2, LOG2E, online_softmax_step


@jit
def _merge_kernel(
    outs_ptr,
    lses_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    rows: tl.int64,
    q_len: tl.int32,
    heads: tl.int32,
    num_splits: tl.int32,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    # Where am I: rows in the order of the LSE, [B, Hq, Tq]; outputs are [B, Tq, Hq, DV].
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_r = offs_r < rows
    offs_h = offs_r // q_len % heads
    out_rows = (offs_r // q_len // heads * q_len + offs_r % q_len) * heads + offs_h
    out_offs = out_rows[:, None] * DV + offs_dv[None, :]
    mask_out = mask_r[:, None] & (offs_dv[None, :] < DV)

    row_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for split in range(num_splits):
        lse = tl.load(lses_ptr + split * rows + offs_r, mask=mask_r, other=float("-inf")) * LOG2E
        out = tl.load(outs_ptr + split * rows * DV + out_offs, mask=mask_out, other=0.0)
        weight, shrink, row_max, row_sum = online_softmax_step(lse[:, None], 1.0, row_max, row_sum, GUARD=True)
        acc = acc * shrink[:, None] + weight * out
    if HAS_SINK:
        sink = tl.load(sink_ptr + offs_h, mask=mask_r, other=0.0).to(tl.float32) * LOG2E
        _, shrink, row_max, row_sum = online_softmax_step(sink[:, None], 1.0, row_max, row_sum, GUARD=True)
        acc = acc * shrink[:, None]

    seen_any = row_sum != 0
    merged = acc / tl.where(seen_any, row_sum, 1.0)[:, None]
    tl.store(out_ptr + out_offs, merged.to(out_ptr.dtype.element_ty), mask=mask_out)
    lse = tl.where(seen_any, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
    tl.store(lse_ptr + offs_r, lse, mask=mask_r)


def launch_merge(outs: Tensor, lses: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Merge `outs [S, B, Tq, Hq, Dv]` and `lses [S, B, Hq, Tq]` (packed: without B) into `out` and `lse`."""
    rows, value_dim = lse.numel(), out.shape[-1]
    block_dv = triton.next_power_of_2(value_dim)
    block_r = max(1, min(16, 1024 // block_dv))
    _kernel.launch(
        grid=triton.cdiv(rows, block_r),
        pointers=(outs, lses, sink, out, lse),
        scalars=(rows, lse.shape[-1], lse.shape[-2], outs.shape[0]),
        constants=(value_dim, block_dv, block_r, sink is not None),
        num_warps=4,
    )


_kernel = Kernel(_merge_kernel)
