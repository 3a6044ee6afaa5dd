"""A kernel that reads a buffer once and does next to nothing with it. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEPS = 4096, 8


def _read_kernel(x_ptr: tl.tensor, sums_ptr: tl.tensor, BLOCK: tl.constexpr, STEPS: tl.constexpr) -> None:
    """Each program adds up STEPS blocks that lie behind each other; all their loads are on the way at once."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    acc = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        acc += tl.load(x_ptr + start + step * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(acc, 0))


read_kernel = triton.jit(_read_kernel)


def read(x: Tensor) -> Tensor:
    """Sums of the parts of x, whose size is a multiple of BLOCK * STEPS."""
    sums = torch.empty(x.numel() // (BLOCK * STEPS), device=x.device, dtype=torch.float32)
    read_kernel[(sums.numel(),)](x, sums, BLOCK=BLOCK, STEPS=STEPS, num_warps=8)
    return sums
