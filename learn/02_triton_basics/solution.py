"""A solution of the exercise."""

from __future__ import annotations

import os

import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, s_ptr, out_ptr, m, n, stride_x, stride_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[i, j] = x[i, j] * s[i], a tile of BLOCK_M x BLOCK_N a program. Row i of x begins at x_ptr + i * stride_x."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < m)[:, None] & (offs_n < n)[None, :]  # [BLOCK_M, BLOCK_N]
    x = tl.load(x_ptr + offs_m[:, None] * stride_x + offs_n[None, :], mask=mask)
    s = tl.load(s_ptr + offs_m, mask=offs_m < m)
    tl.store(out_ptr + offs_m[:, None] * stride_out + offs_n[None, :], x * s[:, None], mask=mask)


def scale_rows(x: Tensor, s: Tensor, out: Tensor) -> None:
    m, n = x.shape
    grid = (triton.cdiv(m, 4), triton.cdiv(n, 8))
    scale_kernel[grid](x, s, out, m, n, x.stride(0), out.stride(0), BLOCK_M=4, BLOCK_N=8)
