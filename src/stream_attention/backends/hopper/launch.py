"""Launching Gluon kernels: descriptors of tensors, and what is not specialised."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...base.problem import Problem
from ...gpu.arguments import scale_of
from ...gpu.launch import Descriptor


def jit(function: Any) -> Any:
    """`gluon.jit` without specialising on integers: those that are annotated with their type."""
    integers = (gl.int32, gl.int64, gl.uint32)
    assert not any(isinstance(kind, str) for kind in function.__annotations__.values()), "no annotations of the future"
    names = [name for name, kind in function.__annotations__.items() if any(kind is one for one in integers)]
    return gluon.jit(function, do_not_specialize=names)


def rows_descriptor(t: Any, rows: int, width: int) -> Descriptor:
    """How TMA reads or writes `rows` rows of one head of `[B, T, H, D]`, or of a pack `[N, H, D]`, `width` columns.

    Strides of dims of size 1 are never used, but must be legal.
    """
    *batch, length, heads, dim = t.shape
    *by_batch, by_row, by_head, _ = t.stride()
    size = batch[0] if batch else 1
    dtype = t.dtype
    is_legal = by_row > 0 and by_row * dtype.itemsize % 16 == 0
    strides = (
        width if size == 1 else by_batch[0],
        by_row if length > 1 or is_legal else width,
        width if heads == 1 else by_head,
        1,
    )
    return Descriptor(dtype, (size, length, heads, dim), strides, (1, rows, 1, width), _rows_layout(dtype), t.stride())


def elements_descriptor(count: int, box: int) -> Descriptor:
    """How TMA reads `box` consecutive ones of `count` fp32 numbers."""
    return Descriptor(torch.float32, (count,), (1,), (box,), _shared_layout(0, 32, 1))


def chunks_descriptor(count: int, size: int) -> Descriptor:
    """How TMA reads, or adds to, chunks of size x size fp32 numbers that lie one behind the other: `count` rows."""
    return Descriptor(torch.float32, (count, size), (size, 1), (size, size), _shared_layout(128, 32, 2))


@cache
def _rows_layout(dtype: torch.dtype) -> Any:
    return _shared_layout(128, 8 * dtype.itemsize, 4)


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
