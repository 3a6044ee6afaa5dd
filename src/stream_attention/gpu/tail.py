"""Rows of a pack that no tile computes: out is 0 there and the LSE -inf.

They lie before the first sequence, behind the last, and in one that is longer than the caller said, behind what tiles
cover. There are none as a rule, and to ask costs a program a few reads. To fill whole results beforehand would cost the
host a launch for each, and the device a write of all their memory. Triton's kernels clear these rows of what they
write; before the Gluon forward the small one does that lists its tiles, and in its backward the one that prepares rows.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..base.problem import UNBOUNDED, Inputs, Problem
from .arguments import FAR, cdiv, named
from .launch import Kernel, Launch, Sizes, jit
from .tile_list import list_tiles, most_tiles
from .tiles import packed_rows

BLOCK = tl.constexpr(1024)
PROGRAMS = 128
"""Programs that clear rows: enough for a large tail, which there seldom is. Others of a launch do not."""
_PROGRAMS = tl.constexpr(PROGRAMS)


@triton.jit
def clear_uncomputed(ptr, cu_ptr, sequences, covered, rows, width, value, lines=1):
    """Set those rows of `lines` contiguous `[rows, width]`, one behind the other, to a number that belong to no
    sequence, and of each sequence those from its row `covered` on."""
    program = tl.program_id(0)
    if program < _PROGRAMS:
        programs = tl.minimum(tl.num_programs(0), _PROGRAMS)
        first, _ = packed_rows(cu_ptr, rows)
        _fill(ptr, 0, first, program, programs, rows, width, value, lines)
        first, length = packed_rows(cu_ptr + sequences - 1, rows)
        _fill(ptr, first + length, rows.to(tl.int64), program, programs, rows, width, value, lines)
        for sequence in tl.range(program, sequences, programs):
            first, length = packed_rows(cu_ptr + sequence, rows)
            if length > covered:
                _fill(ptr, first + covered, first + length, 0, 1, rows, width, value, lines)


@triton.jit
def _fill(ptr, first, last, program, programs, rows, width, value, lines):
    """Set rows `first` to `last` of every line; programs take turns. Row numbers are int64: elements may be more than
    32 bits count."""
    if first < last:
        for line in range(lines):
            begin = rows.to(tl.int64) * width * line + first * width + program * BLOCK
            end = rows.to(tl.int64) * width * line + last * width
            for start in tl.range(begin, end, programs * BLOCK):
                offs = start + tl.arange(0, BLOCK).to(tl.int64)
                number = tl.full([BLOCK], value, tl.float32).to(ptr.dtype.element_ty)
                tl.store(ptr + offs, number, mask=offs < end)


@triton.jit
def clear_uncomputed_output(out_ptr, lse_ptr, write_lse, cu_ptr, sequences, covered, rows, heads, DV):
    """Clear those rows of out `[rows, heads, DV]` and of lse `[heads, rows]`, both contiguous."""
    clear_uncomputed(out_ptr, cu_ptr, sequences, covered, rows, heads * DV, 0.0)
    if write_lse != 0:
        clear_uncomputed(lse_ptr, cu_ptr, sequences, covered, rows, 1, float("-inf"), heads)


@jit
def _start_pack_kernel(
    out_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, list_ptr,
    write_lse: tl.int32, sequences: tl.int32, covered: tl.int32, rows: tl.int32, k_rows: tl.int32, heads: tl.int32,
    most_tiles: tl.int32, most_seen: tl.int32, right: tl.int32,
    DV: tl.constexpr, TILE: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    list_tiles(
        list_ptr, cu_q_ptr, cu_k_ptr, sequences, rows, k_rows, covered, most_tiles, most_seen, right,
        TILE, "queries", False, HAS_RIGHT,
    )  # fmt: skip
    clear_uncomputed_output(out_ptr, lse_ptr, write_lse, cu_q_ptr, sequences, covered, rows, heads, DV)


def bind_start(problem: Problem, inputs: Inputs, tile: int, out: Any, lse: Any, tiles: Any) -> Launch:
    """What runs before a forward of a pack with tiles of so many rows: a function of cu_seqlens_q, cu_seqlens_k, out,
    lse and the list of tiles, which it writes."""
    tensors = inputs.cu_seqlens_q, inputs.cu_seqlens_k, out, lse, tiles
    grid, sizes = _start_sizes(problem, tile, out.shape[0], inputs.key.shape[0])
    return _start_pack.bind(
        grid,
        tensors,
        {"num_warps": 4},
        **named("cu_q_ptr cu_k_ptr out_ptr lse_ptr list_ptr", tensors),
        **sizes.arguments(),
        write_lse=1,
        sequences=problem.batch,
        heads=problem.q_heads,
        DV=problem.value_dim,
        TILE=tile,
    )


def resized_start(start: Launch, problem: Problem, tile: int, rows: int, k_rows: int) -> Launch | None:
    """The same launch for other lengths, and other numbers of queries and keys."""
    return start.resized(*_start_sizes(problem, tile, rows, k_rows))


def _start_sizes(problem: Problem, tile: int, rows: int, k_rows: int) -> tuple[int, Sizes]:
    right = problem.right
    pack = start_sizes_of_pack(rows, k_rows, most_tiles(rows, problem.batch, tile))
    names = "covered most_seen right " + pack.names
    numbers = cdiv(problem.q_len, tile) * tile, most_seen(problem, tile), min(right, FAR), *pack.numbers
    return min(max(PROGRAMS, problem.batch), _MOST_PROGRAMS), Sizes(
        names, numbers, {"HAS_RIGHT": right != UNBOUNDED}, {}
    )


def most_seen(problem: Problem, tile: int) -> int:
    """How many keys a tile of queries sees at most, or the other way round."""
    return FAR if UNBOUNDED in problem.window else min(sum(problem.window) + tile, FAR)


def start_sizes_of_pack(rows: int, k_rows: int, tiles: int) -> Sizes:
    """What depends on how many rows a pack has, and so on how many tiles at most."""
    return Sizes("rows k_rows most_tiles", (rows, k_rows, tiles), {}, {})


_MOST_PROGRAMS = 1024
"""That list tiles: about as many as run at a time."""

_start_pack = Kernel(_start_pack_kernel)
