"""A solution of the exercise."""

from __future__ import annotations

import os

import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def padded_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr,
    stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh,
    q_len, k_len, heads, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh
    out_ptr += batch * stride_ob + head * stride_oh
    mask_m = offs_m < q_len
    length = tl.load(lengths_ptr + batch)  # in place of k_len from here on

    q = tl.load(q_ptr + offs_m[:, None] * stride_qt + offs_d[None, :], mask=mask_m[:, None], other=0.0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    for start_n in range(0, length, BLOCK_N):
        rows = start_n + offs_n
        mask_n = rows < length
        k = tl.load(k_ptr + rows[:, None] * stride_kt + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
        scores = tl.where(mask_n[None, :], scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max

        v = tl.load(v_ptr + rows[:, None] * stride_vt + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")

    out = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    tl.store(out_ptr + offs_m[:, None] * stride_ot + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask_m[:, None])


def padded_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    B, Tq, H, D = q.shape
    out = torch.empty_like(q)
    padded_kernel[triton.cdiv(Tq, 16), B * H](
        q, k, v, lengths, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        Tq, k.shape[1], H, D**-0.5 * LOG2E,
        D=D, BLOCK_M=16, BLOCK_N=16,
    )  # fmt: skip
    return out
