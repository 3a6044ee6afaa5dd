"""Exercise: scale the rows of a matrix in Triton. Fill the gap, then run

python learn/02_triton_basics/check.py
"""

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
    # Program ids 0 and 1 say which tile. Make offs_m and offs_n, a mask of two dimensions, load, multiply, store.


def scale_rows(x: Tensor, s: Tensor, out: Tensor) -> None:
    """x [m, n] times s [m], row by row, into out [m, n]. Rows of x and out are contiguous; strides may differ."""
    m, n = x.shape
    grid = (1, 1)  # enough programs to cover m rows and n columns
    scale_kernel[grid](x, s, out, m, n, x.stride(0), out.stride(0), BLOCK_M=4, BLOCK_N=8)
    raise NotImplementedError("Write the kernel, choose the grid, and take this line out.")
