"""Merging states in Triton: the rule of base/state.py.

    lse = log(sum_s exp(lse_s))        out = sum_s out_s * exp(lse_s - lse)

Both kernels' grid: one program per BLOCK_R rows. The first reads the contiguous fp32 states of split keys, with the
splits first, and writes the answer in its own dtype; a sink joins there, once. The second folds one fp32 state into
another where that lies, reading and writing each number once: rings fold a shard of the keys at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import cdiv
from .launch import Kernel, Launch, jit
from .tiles import LN2, LOG2E, initial_state, normalised, online_softmax_step


@jit
def _merge_kernel(
    outs_ptr, lses_ptr, sink_ptr, out_ptr, lse_ptr,
    rows: tl.int64, q_len: tl.int32, heads: tl.int32, num_splits: tl.int32,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Where am I: rows in the order of the LSE, [B, Hq, Tq]; outputs are [B, Tq, Hq, DV].
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_r = offs_r < rows
    offs_h = offs_r // q_len % heads
    out_rows = (offs_r // q_len // heads * q_len + offs_r % q_len) * heads + offs_h
    out_offs = out_rows[:, None] * DV + offs_dv[None, :]
    mask_out = mask_r[:, None] & (offs_dv[None, :] < DV)

    row_max, row_sum, acc = initial_state(BLOCK_R, BLOCK_DV)
    for split in range(num_splits):
        lse = tl.load(lses_ptr + split * rows + offs_r, mask=mask_r, other=float("-inf")) * LOG2E
        out = tl.load(outs_ptr + split * rows * DV + out_offs, mask=mask_out, other=0.0)
        weight, rescale, row_max, row_sum = online_softmax_step(lse[:, None], 1.0, row_max, row_sum, GUARD=True)
        acc = acc * rescale[:, None] + weight * out
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + offs_h, mask=mask_r, other=0.0).to(tl.float32) * LOG2E
        _, rescale, row_max, row_sum = online_softmax_step(sink[:, None], 1.0, row_max, row_sum, GUARD=True)
        acc = acc * rescale[:, None]

    out, lse = normalised(acc, row_max, row_sum)
    tl.store(out_ptr + out_offs, out.to(out_ptr.dtype.element_ty), mask=mask_out)
    tl.store(lse_ptr + offs_r, lse * LN2, mask=mask_r)


def bind_merge(
    device: torch.device, outs: Tensor, lses: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor
) -> Launch:
    """Merges `outs [S, B, Tq, Hq, Dv]` and `lses [S, B, Hq, Tq]` (packed: without B) into `out` and `lse`; a function
    of all of these tensors."""
    rows, value_dim = lse.numel(), out.shape[-1]
    block_dv = triton.next_power_of_2(value_dim)
    block_r = max(1, min(16, 1024 // block_dv))
    return _kernel.bind_addresses(
        cdiv(rows, block_r),
        {"num_warps": 4},
        device,
        outs_ptr=outs,
        lses_ptr=lses,
        sink_ptr=sink,
        out_ptr=out,
        lse_ptr=lse,
        rows=rows,
        q_len=lse.shape[-1],
        heads=lse.shape[-2],
        num_splits=outs.shape[0],
        DV=value_dim,
        BLOCK_DV=block_dv,
        BLOCK_R=block_r,
    )


@jit
def _fold_kernel(
    out_ptr, lse_ptr, more_out_ptr, more_lse_ptr,
    stride_ob: tl.int64, stride_lb: tl.int64, stride_lh: tl.int64,
    q_len: tl.int32, heads: tl.int32,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # Where am I: some rows of one batch entry, in the order of the outputs, [T, H].
    rows = q_len * heads
    blocks = tl.cdiv(rows, BLOCK_R)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    offs_r = tl.program_id(0) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_r = offs_r < rows
    mask_out = mask_r[:, None] & (offs_dv < DV)[None, :]
    h, t = offs_r % heads, offs_r // heads
    lse_ptrs = lse_ptr + b * stride_lb + h * stride_lh + t
    more_lse_ptrs = more_lse_ptr + b * rows + (h * q_len + t)
    offs_out = offs_r.to(tl.int64)[:, None] * DV + offs_dv[None, :]
    out_ptrs = out_ptr + b * (stride_ob * UNIT) + offs_out
    more_ptrs = more_out_ptr + b * rows * DV + offs_out

    lse = tl.load(lse_ptrs, mask=mask_r, other=float("-inf")) * LOG2E
    more_lse = tl.load(more_lse_ptrs, mask=mask_r, other=float("-inf")) * LOG2E
    peak = tl.maximum(lse, more_lse)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight, more_weight = tl.exp2(lse - peak), tl.exp2(more_lse - peak)
    total = weight + more_weight
    divisor = tl.where(total != 0, total, 1.0)
    share, more_share = weight / divisor, more_weight / divisor

    # What an empty state holds is not looked at.
    out = tl.load(out_ptrs, mask=mask_out & (lse != float("-inf"))[:, None], other=0.0)
    more_out = tl.load(more_ptrs, mask=mask_out & (more_lse != float("-inf"))[:, None], other=0.0)
    tl.store(out_ptrs, out * share[:, None] + more_out * more_share[:, None], mask=mask_out)
    seen_any = total != 0
    tl.store(lse_ptrs, tl.where(seen_any, (peak + tl.log2(total)) * LN2, float("-inf")), mask=mask_r)


def launch_fold(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge `more_out [B, T, H, Dv]`, `more_lse [B, H, T]`, contiguous, into `out` and `lse`, rows of larger ones."""
    batch, q_len, heads, value_dim = out.shape
    block_dv = triton.next_power_of_2(value_dim)
    block_r = max(1, min(16, 2048 // block_dv))
    unit = 4 if out.stride(0) % 4 == 0 else 1  # of 16 bytes
    _fold.launch(
        batch * cdiv(q_len * heads, block_r),
        {"num_warps": 4},
        out_ptr=out,
        lse_ptr=lse,
        more_out_ptr=more_out,
        more_lse_ptr=more_lse,
        stride_ob=out.stride(0) // unit,
        stride_lb=lse.stride(0),
        stride_lh=lse.stride(1),
        q_len=q_len,
        heads=heads,
        DV=value_dim,
        BLOCK_DV=block_dv,
        BLOCK_R=block_r,
        UNIT=unit,
    )


_kernel = Kernel(_merge_kernel)
_fold = Kernel(_fold_kernel)
