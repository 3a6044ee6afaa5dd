"""The random words behind dropout in Triton: one per (batch, head, row) and per (batch, head, column).

Whether an element is kept is a mix of its row's and its column's word (reference/attention.py has the rule), so the ten
rounds of Philox run once per row and column here, O(Tq + Tk), and not for every tile: inside the forward they would be
repeated in each thread's registers and double its run time.

Grid: one program per (batch, head, block of lines).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from ..base.problem import Inputs, Problem
from .arguments import cdiv, sample
from .launch import Kernel, jit
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


def prepare_words(problem: Problem, inputs: Inputs) -> list[tuple[Tensor, Callable[[Inputs], Tensor]]]:
    """Samples of the words of the rows `[B, Hq, Tq]` and of the columns `[B, Hq, Tk]` as int32, packed: `[Hq, Nq]` and
    `[Hq, Nk]`, and what computes them."""
    rows = problem.q_len, problem.q_start - problem.q_base, problem.q_stride
    columns = problem.k_len, problem.k_start, problem.k_stride
    if problem.packed:
        rows, columns = (problem.q_len, 0, 1), (problem.k_len, 0, 1)
    return [
        _prepare(problem, inputs, "query", "cu_seqlens_q", *rows),
        _prepare(problem, inputs, "key", "cu_seqlens_k", *columns),
    ]


def _prepare(
    problem: Problem, inputs: Inputs, side: str, offsets: str, length: int, first: int, step: int
) -> tuple[Tensor, Callable[[Inputs], Tensor]]:
    seed, cu_seqlens, lines = inputs.seed, getattr(inputs, offsets), getattr(inputs, side).shape[-3]
    lead = () if problem.packed else (problem.batch,)
    words = sample((*lead, problem.q_heads, lines), torch.int32)
    shape = words.shape
    launch = _kernel.bind(
        cdiv(length, BLOCK) * problem.q_heads * problem.batch,
        (seed, words, cu_seqlens),
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
        stride_b=0 if problem.packed else words.stride(0),
        stride_h=words.stride(-2),
        BLOCK=BLOCK,
        IS_COLUMN=side == "key",
        IS_PACKED=problem.packed,
    )

    def run(inputs: Inputs) -> Tensor:
        words = inputs.query.new_empty(shape, dtype=torch.int32)
        launch(inputs.seed, words, getattr(inputs, offsets))
        return words

    return words, run


_kernel = Kernel(_words_kernel)
