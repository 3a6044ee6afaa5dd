"""What the backward keeps of each query row: its LSE, in log2 units, and delta = dO . O - dLSE.

Rows are padded to whole tiles, so that a kernel reads them without asking whether they exist: a row that does not, or
that sees nothing, has LSE +inf, which makes its weights 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem

PAD = tl.constexpr(128)
"""Rows of the largest tile."""


class Rows(NamedTuple):
    """Contiguous fp32 `[B, Hq, Tq rounded up]`; packed: `[Hq, N]`, in which every sequence begins a multiple of PAD."""

    lse: Tensor
    delta: Tensor


def empty_rows(problem: Problem, query: Tensor) -> Rows:
    """Room for the rows of a problem, in the dims that `query` has."""
    *lead, rows = query.shape[:-2]
    rows += PAD.value * (problem.batch if problem.packed else 1)
    rows -= rows % PAD.value
    return Rows(*(query.new_empty(*lead, problem.q_heads, rows, dtype=torch.float32) for _ in range(2)))


@triton.jit
def padded_row(row, sequence):
    """Where the rows of a packed sequence begin, given where they do in the pack: no two share a tile."""
    return (row + sequence * PAD) // PAD * PAD
