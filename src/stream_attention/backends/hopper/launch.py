"""Launching Gluon kernels: descriptors of tensors, and what is not specialised."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...base.problem import UNBOUNDED, Inputs, Problem
from ...gpu.arguments import FAR, line_strides, named, scale_of, score_params, slope_stride, tanh
from ...gpu.launch import Descriptor, Sizes
from ...gpu.prepass import Prepass
from ...gpu.scratch import OUTPUT_STRIDES
from .tuning import masks_beyond_first_block


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
    layout = shared_layout(128, 8 * dtype.itemsize, 4)
    return Descriptor(dtype, (size, length, heads, dim), strides, (1, rows, 1, width), layout)


def elements_descriptor(count: int, box: int) -> Descriptor:
    """How TMA reads `box` consecutive ones of `count` fp32 numbers."""
    return Descriptor(torch.float32, (count,), (1,), (box,), shared_layout(0, 32, 1))


def chunks_descriptor(count: int, size: int) -> Descriptor:
    """How TMA reads, or adds to, chunks of size x size fp32 numbers that lie one behind the other: `count` rows."""
    return Descriptor(torch.float32, (count, size), (size, 1), (size, size), shared_layout(128, 32, 2))


@cache
def shared_layout(swizzle: int, bits: int, rank: int) -> Any:
    """Gluon checks a layout when it is made, which takes 4 us: too long for each descriptor of a new length."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def forward_sizes(
    problem: Problem,
    config: Any,
    rows: tuple[int, int],
    cached: int,
    strides: tuple[int, ...],
    described: dict[str, Any],
    names: str = "",
    numbers: tuple[int, ...] = (),
    listed: bool = False,
) -> tuple[int, Sizes]:
    """The grid, and the arguments of a forward that depend on lengths: those of every forward, of so many `rows` of
    queries and keys in all, whose outputs have such `strides`, and what else `names` has. `listed`: the tiles of a pack
    are, those of one head.
    """
    (batch, q_len, q_heads, *_), (_, k_len, *_) = problem.shape, problem.kv
    (left, right), positions = problem.window, problem.positions
    batch_heads, tiles_m = batch * q_heads, -(-q_len // config.tile)
    tiles = batch_heads * tiles_m
    if problem.packed and listed:
        together = heads_together(problem, q_heads, cached)(rows[1])
    else:
        together = heads_together(problem, batch_heads, cached)(k_len)
    common = (
        *(batch_heads, tiles_m, together, tiles, q_len, k_len, positions.q_start - positions.k_start),
        *(min(left, FAR), min(right, FAR), *rows, *strides, *numbers),
    )
    constants = {
        "HAS_LEFT": left != UNBOUNDED,
        "HAS_RIGHT": right != UNBOUNDED,
        "MASKS_BEYOND_FIRST_BLOCK": masks_beyond_first_block(problem, config.block_n),
    }
    return min(problem.hardware.num_sms, tiles), Sizes(_FORWARD + names, common, constants, described)


def heads_together(problem: Problem, lines: int, cached: int) -> Callable[[int], int]:
    """How many heads (of all batch entries) are worked on together, of `lines` in all, given how many keys they have.
    Where tiles see different keys they have `cached` elements of keys and values, and stay in the L2 cache."""
    if problem.right == UNBOUNDED:
        return lambda k_len: 1
    width, group = problem.head_dim + problem.value_dim, problem.group
    return lambda k_len: even_group(lines, max(1, cached // max(1, k_len * width)) * group)


_FORWARD = "batch_heads tiles_m head_group tiles q_len k_len offset left right q_rows k_rows "
_FORWARD += f"{OUTPUT_STRIDES} "


def even_group(lines: int, fitting: int) -> int:
    """How many lines are worked on together where `fitting` may be: in groups of about the same size."""
    groups = -(-lines // min(fitting, lines))
    return -(-lines // groups)


def score_arguments(problem: Problem, inputs: Inputs, before: Prepass, stand_in: Any) -> dict[str, Any]:
    """What modifies scores, and where sequences of a pack begin, as forward and backward take it. Where there is no
    tensor, `stand_in` is, unread."""
    slopes, packed = inputs.alibi_slopes, problem.packed
    _, _, row_words, col_words, *_ = before.samples
    tensors = slopes, row_words, col_words, inputs.cu_seqlens_q, inputs.cu_seqlens_k
    names = "slopes_ptr row_words_ptr col_words_ptr cu_q_ptr cu_k_ptr"
    return {
        **named(names, [stand_in if tensor is None else tensor for tensor in tensors]),
        **score_params(problem),
        "group": problem.group,
        "stride_ab": slope_stride(slopes),
        **named("stride_rb stride_rh", line_strides(row_words, packed)),
        **named("stride_cb stride_ch", line_strides(col_words, packed)),
        "HAS_ALIBI": slopes is not None,
        "HAS_SOFTCAP": problem.softcap != 0.0,
        "HAS_DROPOUT": problem.dropout_p != 0.0,
        "IS_PACKED": packed,
        "SCALE_LATE": scales_late(problem),
        "TANH": tanh(problem),
    }


def scales_late(problem: Problem) -> bool:
    """Whether scores are products, or capped ones, times one positive number, with which the softmax multiplies."""
    return not problem.alibi and (problem.softcap > 0 or scale_of(problem) > 0)
