"""How a problem and its tensors are told to a kernel: strides, ways of reading, and the precision of its arithmetic.

A compiler that knows an address to be a multiple of 16 bytes reads and writes in wide words. Triton cannot be told so
of an integer argument, so strides of aligned tensors are passed in units of `UNIT` elements and multiplied in the
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.problem import UNBOUNDED, Inputs, Problem
from .launch import Sizes
from .launch import named as named
from .scratch import UNIT as UNIT
from .scratch import Sample

WIDE = tl.constexpr(2)
"""A mask or bias whose rows can be read in wide words: contiguous along the keys, and aligned."""

WHOLE = tl.constexpr(3)
"""One of which moreover every row is a whole number of wide words, so that none is cut by the last key."""

FAR = 1 << 30
"""A window side beyond every position; larger ones would not fit 32 bits."""


def sample(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """What stands for a contiguous tensor where launches are bound, which look at no memory."""
    return Sample(shape, dtype)


def cdiv(size: int, block: int) -> int:
    """Blocks that hold `size`. Triton's own is a function for kernels too, and takes 2 us."""
    return -(-size // block)


def scale_of(problem: Problem) -> float:
    """The scale of a problem, as kernels take it: 0 where fp32 holds hardly more."""
    return problem.scale if abs(problem.scale) > 1e-30 else 0.0


def score_params(problem: Problem) -> dict[str, Any]:
    """How scores are modified, as the kernels of the backward take it."""
    return {
        "dropout_threshold": int(problem.dropout_p * 2**32),
        "scale": scale_of(problem),
        "softcap": problem.softcap,
        "dropout_scale": 1.0 / (1.0 - problem.dropout_p),
    }


def slope_stride(slopes: Tensor | None) -> int:
    """Stride over the batch of ALiBi slopes `[B or 1, Hq]`."""
    return slopes.stride(0) if slopes is not None and slopes.shape[0] > 1 else 0


def precision(problem: Problem) -> str:
    """How fp32 is multiplied. Three TF32 products are as good as fp32 up to D = 128; the matrix unit truncates its
    sums, and over 256 terms that shows (measured on an H200: up to 2.8 times what the tolerance allows)."""
    if problem.dtype is not torch.float32 or problem.tf32:
        return "tf32"
    return "tf32x3" if max(problem.head_dim, problem.value_dim) <= 128 else "ieee"


def tanh(problem: Problem) -> str:
    """Which tanh of tiles.py the dtype deserves."""
    if problem.dtype is torch.float32:
        return "exact"
    return "unit" if problem.dtype is torch.bfloat16 and problem.device.type == "cuda" else "exp2"


def tile_width(dim: int) -> int:
    """Columns of a tile that holds `dim`: a power of two, at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(dim))


def row_strides(t: Tensor, packed: bool, unit: int) -> tuple[int, int, int]:
    """Strides of (batch, row, head) in units."""
    *batch, by_row, by_head, _ = t.stride()
    return 0 if packed else batch[0] // unit, by_row // unit, by_head // unit


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
    for t in tensors:
        if t.data_ptr() % 16:
            return False
        *strides, _ = t.stride()
        for size, stride in zip(t.shape, strides, strict=False):
            if stride % UNIT and size > 1:
                return False
    return True


QKV_STRIDES = "stride_qb stride_qm stride_qh stride_kb stride_kn stride_kh stride_vb stride_vn stride_vh"


def qkv_strides(inputs: Inputs, packed: bool, unit: int) -> tuple[int, ...]:
    """Strides of query, key and value, in units: `QKV_STRIDES`."""
    query, key, value = inputs[:3]
    return (*row_strides(query, packed, unit), *row_strides(key, packed, unit), *row_strides(value, packed, unit))


def common_sizes(problem: Problem, inputs: Inputs, aligned: bool, names: str = "", numbers: Any = ()) -> Sizes:
    """What depends on lengths of the arguments that Triton's forward and backward kernels take alike: strides, in units
    where tensors are `aligned`, lengths, positions, and the sides of the window; and what else `names` has."""
    (left, right), positions = problem.window, problem.positions
    common = (
        *qkv_strides(inputs, problem.packed, UNIT if aligned else 1),
        problem.shape.q_len,
        inputs.query.shape[-3],
        positions.q_start,
        problem.kv.k_len,
        inputs.key.shape[-3],
        positions.k_start,
        min(left, FAR),
        min(right, FAR),
        *numbers,
    )
    constants = {"HAS_LEFT": left != UNBOUNDED, "HAS_RIGHT": right != UNBOUNDED, "ALIGNED": aligned}
    return Sizes(_COMMON + names, common, constants, {})


_COMMON = f"{QKV_STRIDES} q_len q_rows q_start k_len k_rows k_start left right "
