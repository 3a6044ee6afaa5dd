"""Rows of a pack behind its last sequence: every kernel that writes results of a pack also clears these, in Triton.

They lie from `cu_seqlens[-1]` on, and there are none as a rule. To ask costs a program one read; to clear whole results
beforehand would cost a launch for each, and a write of all its memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)


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
