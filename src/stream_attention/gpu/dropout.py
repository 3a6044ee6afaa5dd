"""The random words behind dropout in Triton: one per (batch, head, row) and per (batch, head, column).

Whether an element is kept is a mix of its row's and its column's word (reference/attention.py has the rule), so the ten
rounds of Philox run once per row and column here, O(Tq + Tk), and not for every tile: inside the forward they would be
repeated in each thread's registers and double its run time.

Grid: one program per (batch, head, block of lines).
"""

from __future__ import annotations

import torch
import triton.language as tl

from ..base.problem import Inputs, Problem
from .arguments import cdiv, line_strides, named, sample
from .launch import Kernel, jit
from .prepass import Step
from .tiles import packed_rows

BLOCK = 1024


@jit
def _words_kernel(
    seed_ptr, words_ptr, cu_ptr,
    length: tl.int32, lines: tl.int32, heads: tl.int32, first: tl.int32, step: tl.int32, batch_start: tl.int32,
    stride_b: tl.int64, stride_h: tl.int64,
    BLOCK: tl.constexpr,
    IS_COLUMN: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """Word 0 of Philox4x32-10: key = seed, counter = (index, 2 * (b * Hq + h) + IS_COLUMN, offset low, offset high)."""
    blocks = tl.cdiv(length, BLOCK)
    pid = tl.program_id(0)
    head = pid // blocks % heads
    batch = pid // blocks // heads
    offs = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    if IS_PACKED:
        start, length = packed_rows(cu_ptr + batch, lines)
        words_ptr += start
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    words, _, _, _ = tl.philox(
        seed,
        first + offs * step,
        2 * ((batch_start + batch) * heads + head) + IS_COLUMN,
        (offset & 0xFFFFFFFF).to(tl.uint32),
        ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    tl.store(
        words_ptr + batch * stride_b + head * stride_h + offs, words.to(tl.int32, bitcast=True), mask=offs < length
    )


def word_steps(problem: Problem, inputs: Inputs) -> list[Step]:
    """What computes the words of the rows `[B, Hq, Tq]` and of the columns `[B, Hq, Tk]` as int32, packed: `[Hq, Nq]`
    and `[Hq, Nk]`."""
    q_positions = problem.q_start - problem.q_base, problem.q_stride
    k_positions = problem.k_start, problem.k_stride
    if problem.packed:
        q_positions = k_positions = 0, 1
    return [
        _step(problem, inputs, "query", "cu_seqlens_q", problem.q_len, *q_positions),
        _step(problem, inputs, "key", "cu_seqlens_k", problem.k_len, *k_positions),
    ]


def _step(problem: Problem, inputs: Inputs, side: str, offsets: str, length: int, first: int, step: int) -> Step:
    seed, cu_seqlens, lines = inputs.seed, getattr(inputs, offsets), getattr(inputs, side).shape[-3]
    lead = () if problem.packed else (problem.batch,)
    words = sample((*lead, problem.q_heads, lines), torch.int32)
    launch = _kernel.bind(
        cdiv(length, BLOCK) * problem.q_heads * problem.batch,
        (seed, cu_seqlens, words),
        {"num_warps": 4},
        seed_ptr=seed,
        words_ptr=words,
        cu_ptr=cu_seqlens,
        length=length,
        lines=lines,
        heads=problem.q_heads,
        first=first,
        step=step,
        batch_start=problem.batch_start,
        **named("stride_b stride_h", line_strides(words, problem.packed)),
        BLOCK=BLOCK,
        IS_COLUMN=side == "key",
        IS_PACKED=problem.packed,
    )
    return Step(words, launch, ("seed", offsets))


_kernel = Kernel(_words_kernel)
