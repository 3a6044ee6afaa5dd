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

from ..base.problem import Problem
from .arguments import sample

_PAD = 128
PAD = tl.constexpr(_PAD)
"""Rows of the largest tile."""


class Rows(NamedTuple):
    """Contiguous fp32 `[B, Hq, Tq rounded up]`; packed: `[Hq, N]`, in which every sequence begins a multiple of PAD."""

    lse: Tensor
    delta: Tensor

    @classmethod
    def samples(cls, problem: Problem, query: Tensor) -> Rows:
        """Both without memory, in the dims that `query` has."""
        lead = () if problem.packed else (problem.batch,)
        shape = *lead, problem.q_heads, padded_rows(problem, query)
        return cls(sample(shape, torch.float32), sample(shape, torch.float32))


def padded_rows(problem: Problem, query: Tensor) -> int:
    """How many rows of a head there are, with padding."""
    return padded_rows_of_pack(query.shape[-3], problem.batch if problem.packed else 1)


def padded_rows_of_pack(rows: int, sequences: int) -> int:
    rows += _PAD * sequences
    return rows - rows % _PAD


@triton.jit
def line_start(batch, head, heads, rows, row, IS_PACKED: tl.constexpr):
    """Where the rows of a head begin in contiguous `[B, heads, rows]`; packed: in `[heads, rows]`, from `row` on."""
    if IS_PACKED:
        return head.to(tl.int64) * rows + row
    else:
        return (batch * heads + head) * rows


@triton.jit
def padded_row(row, sequence):
    """Where the rows of a packed sequence begin, given where they do in the pack: no two share a tile."""
    return (row + sequence * PAD) // PAD * PAD


@triton.jit
def padded_line_start(batch, head, heads, row_tiles, row, IS_PACKED: tl.constexpr):
    """`line_start` among padded rows, `row_tiles * PAD` of a head."""
    if IS_PACKED:
        return head.to(tl.int64) * row_tiles * PAD + padded_row(row, batch)
    else:
        return (batch * heads + head) * row_tiles * PAD
