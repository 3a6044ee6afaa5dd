"""The random words behind dropout in Triton: one per (batch, head, row) and per (batch, head, column).

Whether an element is kept is a mix of its row's and its column's word (kernels/reference.py has the rule), so the ten
rounds of Philox run once per row and column here, O(Tq + Tk), and not for every tile: inside the forward they would be
repeated in each thread's registers and double its run time.

Grid: one program per (batch, head, block of lines).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Inputs, Problem
from .launch import Kernel, jit
from .tiles import packed_rows

BLOCK = 1024


@jit
def _words_kernel(
    seed_ptr,
    words_ptr,
    cu_ptr,
    length: tl.int32,
    lines: tl.int32,
    heads: tl.int32,
    first: tl.int32,
    step: tl.int32,
    batch_start: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    BLOCK: tl.constexpr,
    IS_COLUMN: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
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


def dropout_words(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Words of the rows `[B, Hq, Tq]` and of the columns `[B, Hq, Tk]` as int32; packed: `[Hq, Nq]` and `[Hq, Nk]`."""
    rows = (
        problem.q_len,
        problem.q_start - problem.q_base,
        problem.q_stride,
        inputs.query.shape[-3],
        inputs.cu_seqlens_q,
    )
    cols = (problem.k_len, problem.k_start, problem.k_stride, inputs.key.shape[-3], inputs.cu_seqlens_k)
    if problem.packed:
        rows, cols = (rows[0], 0, 1, *rows[3:]), (cols[0], 0, 1, *cols[3:])
    return _launch(problem, inputs.seed, *rows, False), _launch(problem, inputs.seed, *cols, True)


def _launch(
    problem: Problem,
    seed: Tensor | None,
    length: int,
    first: int,
    step: int,
    lines: int,
    cu_seqlens: Tensor | None,
    is_column: bool,
) -> Tensor:
    assert seed is not None
    lead = () if problem.packed else (problem.batch,)
    words = torch.empty(*lead, problem.q_heads, lines, dtype=torch.int32, device=seed.device)
    _kernel.launch(
        grid=triton.cdiv(length, BLOCK) * problem.q_heads * problem.batch,
        pointers=(seed, words, cu_seqlens),
        scalars=(
            length,
            lines,
            problem.q_heads,
            first,
            step,
            problem.batch_start,
            0 if problem.packed else words.stride(0),
            words.stride(-2),
        ),
        constants=(BLOCK, is_column, problem.packed),
        num_warps=4,
    )
    return words


_kernel = Kernel(_words_kernel)
