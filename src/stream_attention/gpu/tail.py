"""Rows of a pack behind its last sequence, from `cu_seqlens[-1]` on: out is 0 there and the LSE -inf.

There are none as a rule, and to ask costs a program one read. To fill whole results beforehand would cost the host a
launch for each, and the device a write of all their memory. Triton's kernels clear these rows of what they write;
before a kernel in Gluon a small one does.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..base.problem import Problem
from .launch import Kernel, Launch, Sizes, jit

BLOCK = tl.constexpr(1024)
PROGRAMS = 128
"""Of the launch before a forward: enough to clear a large tail, which there seldom is."""


@triton.jit
def first_of_tail(cu_ptr, sequences, rows):
    """The first row behind the last sequence, within the pack whatever the offsets say."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + sequences).to(tl.int64), 0), rows)


@triton.jit
def clear_tail(ptr, first, rows, width, value):
    """Fill rows from `first` on of contiguous `[rows, width]` with a number; the programs of a launch take turns."""
    end = rows.to(tl.int64) * width
    for start in tl.range(first * width + tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(ptr + offs, tl.full([BLOCK], value, tl.float32).to(ptr.dtype.element_ty), mask=offs < end)


@triton.jit
def clear_output_tail(out_ptr, lse_ptr, write_lse, cu_ptr, sequences, rows, heads, DV):
    """Clear those rows of out `[rows, heads, DV]` and of lse `[heads, rows]`, both contiguous."""
    first = first_of_tail(cu_ptr, sequences, rows)
    if first < rows:
        clear_tail(out_ptr, first, rows, heads * DV, 0.0)
        if write_lse != 0:
            for head in range(heads):
                clear_tail(lse_ptr + rows.to(tl.int64) * head, first, rows, 1, float("-inf"))


@jit
def _start_pack_kernel(
    out_ptr, lse_ptr, cu_ptr, counter_ptr,
    write_lse: tl.int32, sequences: tl.int32, rows: tl.int32, heads: tl.int32,
    DV: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(counter_ptr, 0)
    clear_output_tail(out_ptr, lse_ptr, write_lse, cu_ptr, sequences, rows, heads, DV)


def bind_start(problem: Problem, cu_seqlens: Tensor | None, out: Any, lse: Any, counter: Any) -> Launch:
    """What runs before a forward of a pack: a function of cu_seqlens_q, out, lse and the counter of tiles, which it
    sets to 0."""
    return _start_pack.bind(
        PROGRAMS,
        (cu_seqlens, out, lse, counter),
        {"num_warps": 4},
        out_ptr=out,
        lse_ptr=lse,
        cu_ptr=cu_seqlens,
        counter_ptr=counter,
        write_lse=1,
        sequences=problem.batch,
        rows=out.shape[0],
        heads=problem.q_heads,
        DV=problem.value_dim,
    )


def resized_start(start: Launch, rows: int) -> Launch | None:
    """The same launch for another number of queries."""
    return start.resized(PROGRAMS, Sizes("rows", (rows,), {}, {}))


_start_pack = Kernel(_start_pack_kernel)
