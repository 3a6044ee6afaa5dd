"""How a problem and its tensors are told to a kernel: strides, ways of reading, and the precision of its arithmetic.

A compiler that knows an address to be a multiple of 16 bytes reads and writes in wide words. Triton cannot be told so
of an integer argument, so strides of aligned tensors are passed in units of `UNIT` elements and multiplied in the
kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import UNBOUNDED, Inputs, Problem
from ...state import EMPTY
from ...tuning.decode import DecodeProblem
from ...tuning.triton import Tile

UNIT = 8
"""Elements in a wide word: 16 bytes of the narrowest dtype."""

WIDE = tl.constexpr(2)
"""A mask or bias whose rows can be read in wide words: contiguous along the keys, and aligned."""

WHOLE = tl.constexpr(3)
"""One of which moreover every row is a whole number of wide words, so that none is cut by the last key."""

FAR = 1 << 30
"""A window side beyond every position; larger ones would not fit 32 bits."""


def room_for_results(problem: Problem, query: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a forward, empty; holding those of no key where there are rows that no program writes."""
    *lead, rows, heads = query.shape[:-1]
    if problem.packed or problem.empty:
        out = query.new_zeros(*lead, rows, heads, problem.value_dim, dtype=problem.out_dtype)
        return out, query.new_full((*lead, heads, rows), EMPTY, dtype=torch.float32)
    out = query.new_empty(*lead, rows, heads, problem.value_dim, dtype=problem.out_dtype)
    return out, query.new_empty(*lead, heads, rows, dtype=torch.float32)


def scale_of(problem: Problem) -> float:
    """The scale of a problem, as kernels take it."""
    return in_fp32(problem.scale)


def in_fp32(scale: float) -> float:
    """The scale, 0 where fp32 holds hardly more."""
    return scale if abs(scale) > 1e-30 else 0.0


def meaning_of(problem: Problem) -> tuple[int | float, ...]:
    """What scores mean, as the kernels of the backward take it: window, starts, dropout's threshold, scale, softcap,
    and the factor of what dropout keeps."""
    window = min(problem.left, FAR), min(problem.right, FAR)
    threshold, kept = int(problem.dropout_p * 2**32), 1.0 / (1.0 - problem.dropout_p)
    return (*window, problem.q_start, problem.k_start, threshold, scale_of(problem), problem.softcap, kept)


def constants_of(problem: Problem, inputs: Inputs, tile: Tile, aligned: bool) -> tuple[Any, ...]:
    """The constexprs that the kernels of the backward share, in their order, from GROUP to HAS_DROPOUT."""
    return (
        problem.group,  # GROUP
        problem.q_stride,  # Q_STRIDE
        problem.k_stride,  # K_STRIDE
        problem.head_dim,  # D
        problem.value_dim,  # DV
        tile_width(problem.head_dim),  # BLOCK_D
        tile_width(problem.value_dim),  # BLOCK_DV
        tile.block_m,  # BLOCK_M
        tile.block_n,  # BLOCK_N
        aligned,  # ALIGNED
        problem.left != UNBOUNDED,  # HAS_LEFT
        problem.right != UNBOUNDED,  # HAS_RIGHT
        access(inputs.mask),  # MASK
        access(inputs.bias),  # BIAS
        problem.alibi,  # HAS_ALIBI
        problem.softcap != 0.0,  # HAS_SOFTCAP
        problem.dropout_p != 0.0,  # HAS_DROPOUT
    )


def slope_stride(slopes: Tensor | None) -> int:
    """Stride over the batch of ALiBi slopes `[B or 1, Hq]`."""
    return slopes.stride(0) if slopes is not None and slopes.shape[0] > 1 else 0


def precision(problem: Problem) -> str:
    """How fp32 is multiplied. Three TF32 products are as good as fp32 up to D = 128; the matrix unit truncates its
    sums, and over 256 terms that shows (measured on an H200: up to 2.8 times what the tolerance allows)."""
    if problem.dtype is not torch.float32 or problem.tf32:
        return "tf32"
    return "tf32x3" if max(problem.head_dim, problem.value_dim) <= 128 else "ieee"


def tanh(problem: Problem | DecodeProblem) -> str:
    """Which tanh of tiles.py the dtype deserves."""
    if problem.dtype is torch.float32:
        return "exact"
    return "unit" if problem.dtype is torch.bfloat16 and problem.device.type == "cuda" else "exp2"


def tile_width(dim: int) -> int:
    """Columns of a tile that holds `dim`: a power of two, at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(dim))


def row_strides(t: Tensor, packed: bool, unit: int) -> tuple[int, int, int]:
    """Strides of (batch, row, head) in units; 0 where there is one entry or none."""
    shape, strides = t.shape, t.stride()
    batch = 0 if packed or shape[0] == 1 else strides[0] // unit
    row = 0 if shape[-3] == 1 else strides[-3] // unit
    head = 0 if shape[-2] == 1 else strides[-2] // unit
    return batch, row, head


def line_strides(t: Tensor | None, packed: bool) -> tuple[int, int]:
    """Strides of (batch, head) of a tensor `[..., B, Hq, T]`; packed: `[..., Hq, N]`."""
    return (0, 0) if t is None else (0 if packed else t.stride(-3), t.stride(-2))


def broadcast_strides(t: Tensor | None, unit: int = 1) -> tuple[int, int, int, int]:
    """Strides of a tensor broadcast to [B, Hq, Tq, Tk], 0 in the dims in which it is; all but the last in units."""
    if t is None:
        return 0, 0, 0, 0
    batch, head, row, column = (0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return batch // unit, head // unit, row // unit, column


def flag_strides(flags: Tensor | None) -> tuple[int, int]:
    """Strides of (batch, head) of flags `[B or 1, H or 1, T]`."""
    if flags is None:
        return 0, 0
    return flags.stride(0) if flags.shape[0] > 1 else 0, flags.stride(1) if flags.shape[1] > 1 else 0


def access(t: Tensor | None) -> int:
    """How a mask or bias is read: not at all, element by element, or in wide words along its rows."""
    if t is None:
        return 0
    if t.stride(-1) != 1 or t.shape[-1] == 1 or not is_aligned(t):
        return 1
    return WHOLE.value if t.shape[-1] % UNIT == 0 else WIDE.value


def access_unit(t: Tensor | None) -> int:
    """The unit in which its strides are passed."""
    return UNIT if access(t) >= WIDE.value else 1


def is_aligned(*tensors: Tensor) -> bool:
    """Whether every row starts on 16 bytes and strides are whole multiples of `UNIT` elements."""
    return all(
        t.data_ptr() % 16 == 0
        and all(s % UNIT == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
        for t in tensors
    )
