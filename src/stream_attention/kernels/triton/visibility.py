"""Which keys any query sees under a mask or bias, in Triton.

A value that nobody sees may be NaN (padding), and 0 * NaN is NaN, so the forward must not read it. Asking inside the
forward costs a reduction over the rows of every tile and a detour of V through registers; asking here once costs one
read of the mask.

Grid: one program per (batch, KV head, block of keys, block of rows), over the dims that mask and bias really have.
Flags start at 0, and programs write 1s only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import UNBOUNDED, Inputs, Problem
from .launch import Kernel

BLOCK_M, BLOCK_N = 64, 128
_STRIDES = [f"stride_{name}" for name in "mb mh mm mn bb bh bm bn fb fh".split()]
_INTEGERS = "q_len k_len heads left right q_start q_stride k_start k_stride".split()


@triton.jit(do_not_specialize=_STRIDES + _INTEGERS)
def _seen_kernel(
    mask_ptr,
    bias_ptr,
    flags_ptr,
    stride_mb: tl.int64,
    stride_mh: tl.int64,
    stride_mm: tl.int64,
    stride_mn: tl.int64,
    stride_bb: tl.int64,
    stride_bh: tl.int64,
    stride_bm: tl.int64,
    stride_bn: tl.int64,
    stride_fb: tl.int64,
    stride_fh: tl.int64,
    q_len: tl.int32,
    k_len: tl.int32,
    heads: tl.int32,
    left: tl.int32,
    right: tl.int32,
    q_start: tl.int32,
    q_stride: tl.int32,
    k_start: tl.int32,
    k_stride: tl.int32,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(q_len, BLOCK_M), tl.cdiv(k_len, BLOCK_N)
    pid = tl.program_id(0)
    offs_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = pid // tiles_n % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    head = pid // tiles_n // tiles_m % heads
    batch = (pid // tiles_n // tiles_m // heads).to(tl.int64)
    inside = (offs_m < q_len)[:, None] & (offs_n < k_len)[None, :]
    distance = (k_start + offs_n * k_stride)[None, :] - (q_start + offs_m * q_stride)[:, None]
    if HAS_RIGHT:
        inside = inside & (distance <= right)
    if HAS_LEFT:
        inside = inside & (distance >= -left)
    any_row = tl.zeros([BLOCK_N], tl.int32)
    for member in tl.static_range(GROUP):
        visible = inside
        if HAS_MASK:
            offs = batch * stride_mb + (head * GROUP + member) * stride_mh + offs_m[:, None] * stride_mm
            visible = visible & (tl.load(mask_ptr + offs + offs_n[None, :] * stride_mn, mask=inside, other=0) != 0)
        if HAS_BIAS:
            offs = batch * stride_bb + (head * GROUP + member) * stride_bh + offs_m[:, None] * stride_bm
            bias = tl.load(bias_ptr + offs + offs_n[None, :] * stride_bn, mask=inside, other=float("-inf"))
            visible = visible & (bias.to(tl.float32) != float("-inf"))
        any_row = tl.maximum(any_row, tl.max(visible.to(tl.int32), 0))
    flags = flags_ptr + batch * stride_fb + head * stride_fh + offs_n
    tl.store(flags, any_row.to(tl.int8), mask=(offs_n < k_len) & (any_row > 0))


def keys_seen(problem: Problem, inputs: Inputs) -> Tensor:
    """int8 `[B or 1, Hkv or 1, Tk]`: 1 for keys that a query of that batch entry and KV head sees.

    Where neither mask nor bias has rows, positions are left out: a tile never reads what its positions hide.
    """
    given = [t for t in (inputs.mask, inputs.bias) if t is not None]
    by_batch, by_head, by_row = (any(t.shape[dim] > 1 for t in given) for dim in range(3))
    batch, heads = (problem.batch if by_batch else 1), (problem.kv_heads if by_head else 1)
    rows = problem.q_len if by_row else 1
    flags = torch.zeros(batch, heads, problem.k_len, dtype=torch.int8, device=given[0].device)
    _kernel.launch(
        grid=triton.cdiv(problem.k_len, BLOCK_N) * triton.cdiv(rows, BLOCK_M) * heads * batch,
        pointers=(inputs.mask, inputs.bias, flags),
        scalars=(
            *broadcast_strides(inputs.mask),
            *broadcast_strides(inputs.bias),
            flags.stride(0) if by_batch else 0,
            flags.stride(1) if by_head else 0,
            rows,
            problem.k_len,
            heads,
            problem.left,
            problem.right,
            problem.q_start,
            problem.q_stride,
            problem.k_start,
            problem.k_stride,
        ),
        constants=(
            problem.group if by_head else 1,  # GROUP
            BLOCK_M,
            BLOCK_N,
            inputs.mask is not None,  # HAS_MASK
            inputs.bias is not None,  # HAS_BIAS
            by_row and problem.left != UNBOUNDED,  # HAS_LEFT
            by_row and problem.right != UNBOUNDED,  # HAS_RIGHT
        ),
        num_warps=4,
    )
    return flags


def broadcast_strides(t: Tensor | None, unit: int = 1) -> tuple[int, int, int, int]:
    """Strides of a tensor broadcast to [B, Hq, Tq, Tk], 0 in the dims in which it is; all but the last in units."""
    if t is None:
        return 0, 0, 0, 0
    batch, head, row, column = (0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return batch // unit, head // unit, row // unit, column


_kernel = Kernel(_seen_kernel)
