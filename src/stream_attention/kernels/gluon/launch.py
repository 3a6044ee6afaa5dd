"""Launching Gluon kernels: descriptors of tensors, and what is not specialised."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...gpu.launch import Descriptor
from ...problem import Problem
from ..triton.arguments import scale_of


def jit(function: Any) -> Any:
    """`gluon.jit` without specialising on integers: those that are annotated with their type."""
    integers = (gl.int32, gl.int64, gl.uint32)
    assert not any(isinstance(kind, str) for kind in function.__annotations__.values()), "no annotations of the future"
    names = [name for name, kind in function.__annotations__.items() if any(kind is one for one in integers)]
    return gluon.jit(function, do_not_specialize=names)


def rows_descriptor(t: Tensor, rows: int, width: int) -> Descriptor:
    """How TMA reads or writes `rows` rows of one head of `[B, T, H, D]`, or of a pack `[N, H, D]`, `width` columns.

    Strides of dims of size 1 are never used, but must be legal.
    """
    shape, strides = [*t.shape], [*t.stride()]
    if len(shape) == 3:
        shape, strides = [1, *shape], [0, *strides]
    if 1 in shape:
        strides = [width if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    strides[3] = 1
    return Descriptor(t, t.dtype, shape, strides, [1, rows, 1, width], _shared_layout(128, 8 * t.itemsize, 4))


def numbers_descriptor(t: Tensor, count: int) -> Descriptor:
    """How TMA reads `count` consecutive fp32 numbers."""
    return Descriptor(t, t.dtype, [t.numel()], [1], [count], _shared_layout(0, 32, 1))


def chunks_descriptor(t: Tensor, size: int) -> Descriptor:
    """How TMA reads, or adds to, chunks of size x size fp32 numbers that lie one behind the other."""
    return Descriptor(t, t.dtype, [t.numel() // size, size], [size, 1], [size, size], _shared_layout(128, 32, 2))


@cache
def _shared_layout(swizzle: int, bits: int, rank: int) -> Any:
    """Gluon checks a layout when it is made, which takes 4 us: too long for each descriptor of a new length."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def even_group(lines: int, fitting: int) -> int:
    """How many lines are worked on together where `fitting` may be: in groups of about the same size."""
    groups = -(-lines // min(fitting, lines))
    return -(-lines // groups)


def scales_late(problem: Problem) -> bool:
    """Whether scores are products, or capped ones, times one positive number, with which the softmax multiplies."""
    return not problem.alibi and (problem.softcap > 0 or scale_of(problem) > 0)
