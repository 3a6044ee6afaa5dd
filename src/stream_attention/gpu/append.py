"""Appending to a cache in Triton: every new token goes to the slot of its position, its key turned on the way.

The rule is that of kv_layouts/write.py, bit for bit: products and sums of a rotation are rounded one by one as torch
does it, so the compiler may not fuse them.

Grid: `parts` programs for each row of the cache. A line is one head of one new token; of a row's lines, in blocks of
BLOCK_R, a program takes every `parts`-th block. A program that has its row to itself also advances its length, so that
a step of decoding is one launch. Where programs share a row, a second launch advances the lengths, after all have read
them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .arguments import UNIT, cdiv, is_aligned, named
from .launch import Kernel, Launch, Sizes, jit

TILE = 2048
"""Elements of a tile, 16 for each thread: no layout spills. A guess of what is fast."""

ALONE = 4
"""How many blocks of lines one program takes before a row is shared, which costs the second launch. A guess."""

ADVANCED = 256
"""Rows whose lengths one program advances."""


@triton.jit
def tile_of(ptr, line_offs, mask_r, FIRST: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to channels FIRST to STOP of lines, [BLOCK_R, BLOCK], and the mask of those that there are."""
    offs_d = FIRST + tl.arange(0, BLOCK)
    return ptr + line_offs[:, None] + offs_d[None, :], mask_r[:, None] & (offs_d < STOP)[None, :]


@triton.jit
def load_channels(ptr, line_offs, mask_r, FIRST: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr):
    ptrs, mask = tile_of(ptr, line_offs, mask_r, FIRST, STOP, BLOCK)
    return tl.load(ptrs, mask=mask)


@triton.jit
def store_channels(ptr, line_offs, mask_r, tile, FIRST: tl.constexpr, STOP: tl.constexpr, BLOCK: tl.constexpr):
    ptrs, mask = tile_of(ptr, line_offs, mask_r, FIRST, STOP, BLOCK)
    tl.store(ptrs, tile, mask=mask)


@triton.jit
def load_pairs(ptr, line_offs, mask_r, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """x and y of the pairs of lines, [BLOCK_R, BLOCK_P] each."""
    if INTERLEAVED:
        both = load_channels(ptr, line_offs, mask_r, 0, 2 * PAIRS, 2 * BLOCK_P)
        x, y = tl.split(tl.reshape(both, [both.shape[0], BLOCK_P, 2]))
    else:
        x = load_channels(ptr, line_offs, mask_r, 0, PAIRS, BLOCK_P)
        y = load_channels(ptr, line_offs, mask_r, PAIRS, 2 * PAIRS, BLOCK_P)
    return x, y


@triton.jit
def store_pairs(ptr, line_offs, mask_r, x, y, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = tl.reshape(tl.join(x, y), [x.shape[0], 2 * BLOCK_P])
        store_channels(ptr, line_offs, mask_r, both, 0, 2 * PAIRS, 2 * BLOCK_P)
    else:
        store_channels(ptr, line_offs, mask_r, x, 0, PAIRS, BLOCK_P)
        store_channels(ptr, line_offs, mask_r, y, PAIRS, 2 * PAIRS, BLOCK_P)


@triton.jit
def load_angles(ptr, positions, stride_t, stride_p, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, UNIT: tl.constexpr):
    """The rows of cos or sin, [BLOCK_R, BLOCK_P]. In an aligned layout their columns lie side by side."""
    offs_p = tl.arange(0, BLOCK_P)
    if UNIT == 1:
        ptrs = ptr + (positions * stride_t)[:, None] + (offs_p * stride_p)[None, :]
    else:
        ptrs = ptr + (positions * stride_t * UNIT)[:, None] + offs_p[None, :]
    return tl.load(ptrs, mask=(offs_p < PAIRS)[None, :], other=0.0).to(tl.float32)


@jit
def _append_kernel(
    key_ptr, value_ptr, key_store_ptr, value_store_ptr, cos_ptr, sin_ptr, page_table_ptr, lengths_ptr,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_key_i: tl.int64, stride_key_j: tl.int64, stride_key_h: tl.int64,
    stride_value_i: tl.int64, stride_value_j: tl.int64, stride_value_h: tl.int64,
    stride_ct: tl.int64, stride_cp: tl.int64, stride_st: tl.int64, stride_sp: tl.int64,
    last_position: tl.int64, n: tl.int32, parts: tl.int32,
    stride_pb: tl.int64, stride_pc: tl.int64, pages: tl.int64, stride_l: tl.int64, capacity: tl.int64,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAIRS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr,
    UNIT: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    # Where am I.
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    length_ptr = lengths_ptr + row * stride_l
    length = tl.load(length_ptr).to(tl.int64)
    lines = n * HEADS
    for first in range(part * BLOCK_R, lines, parts * BLOCK_R):
        # New tokens, which wait for nothing: not for the length, nor for what they are turned by.
        offs_r = first + tl.arange(0, BLOCK_R)
        offs_t, offs_h = (offs_r // HEADS).to(tl.int64), (offs_r % HEADS).to(tl.int64)
        mask_r = offs_r < lines
        key_offs = (row * stride_kb + offs_t * stride_kn + offs_h * stride_kh) * UNIT
        value_offs = (row * stride_vb + offs_t * stride_vn + offs_h * stride_vh) * UNIT
        if PAIRS:
            x, y = load_pairs(key_ptr, key_offs, mask_r, PAIRS, BLOCK_P, INTERLEAVED)
        if 2 * PAIRS < D:
            key = load_channels(key_ptr, key_offs, mask_r, 2 * PAIRS, D, BLOCK_D)
        value = load_channels(value_ptr, value_offs, mask_r, 0, DV, BLOCK_DV)

        # Turn the first channels of keys.
        position = length + offs_t
        if PAIRS:
            turned_by = tl.minimum(tl.maximum(position, 0), last_position)
            cos = load_angles(cos_ptr, turned_by, stride_ct, stride_cp, PAIRS, BLOCK_P, UNIT)
            sin = load_angles(sin_ptr, turned_by, stride_st, stride_sp, PAIRS, BLOCK_P, UNIT)
            x, y = x.to(tl.float32), y.to(tl.float32)
            x, y = x * cos - y * sin, y * cos + x * sin

        # Row or page `i` and slot `j` of the stores; what has neither is dropped.
        mask_r = mask_r & (position >= 0) & (position < capacity)
        if PAGE:
            column = position // PAGE
            entry = tl.load(page_table_ptr + row * stride_pb + column * stride_pc, mask=mask_r, other=-1)
            mask_r = mask_r & (entry >= 0) & (entry < pages)
            i, j = entry.to(tl.int64), position - column * PAGE
        else:
            i, j = row, position
        key_offs = (i * stride_key_i + j * stride_key_j + offs_h * stride_key_h) * UNIT
        value_offs = (i * stride_value_i + j * stride_value_j + offs_h * stride_value_h) * UNIT
        if PAIRS:
            dtype = key_store_ptr.dtype.element_ty
            store_pairs(key_store_ptr, key_offs, mask_r, x.to(dtype), y.to(dtype), PAIRS, BLOCK_P, INTERLEAVED)
        if 2 * PAIRS < D:
            store_channels(key_store_ptr, key_offs, mask_r, key, 2 * PAIRS, D, BLOCK_D)
        store_channels(value_store_ptr, value_offs, mask_r, value, 0, DV, BLOCK_DV)

    if parts == 1:
        tl.debug_barrier()  # until every thread has read the length
        tl.store(length_ptr, tl.minimum(length + n, capacity).to(tl.int32))


@jit
def _advance_kernel(
    lengths_ptr, stride_l: tl.int64, rows: tl.int32, n: tl.int32, capacity: tl.int64, BLOCK: tl.constexpr
):
    offs_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ptrs, mask = lengths_ptr + offs_b * stride_l, offs_b < rows
    length = tl.load(ptrs, mask=mask, other=0).to(tl.int64)
    tl.store(ptrs, tl.minimum(length + n, capacity).to(tl.int32), mask=mask)


Tensors = tuple[Any, ...]
"""Key `[B, n, Hkv, D]`, value `[B, n, Hkv, Dv]`, what they are written to, of rows `[B, T, ...]` or of pages
`[P, page, ...]`, cos and sin `[max_pos, R/2]` or None, the page table or None, and lengths."""


class Append:
    """The launches of an append whose tensors lie alike: writes tokens, and advances lengths."""

    __slots__ = ("_advance", "_append")

    def __init__(self, append: Launch, advance: Launch) -> None:
        self._append, self._advance = append, advance

    @classmethod
    def prepare(cls, tensors: Tensors, capacity: int, interleaved: bool) -> Append:
        (grid, sizes), (rows, row_sizes) = _sizes(tensors, capacity)
        *_, key_store, _, _, _, page_table, lengths = tensors
        append = _append.bind_addresses(
            grid,
            {"num_warps": 4, "enable_fp_fusion": False},
            **named(" ".join(_append.addresses), tensors),
            **sizes.arguments(),
            INTERLEAVED=interleaved,
            PAGE=0 if page_table is None else key_store.shape[1],
        )
        advance = {"lengths_ptr": lengths, **row_sizes.arguments(), "BLOCK": ADVANCED}
        return cls(append, _advance.bind_addresses(rows, {"num_warps": 4}, **advance))

    def resized(self, tensors: Tensors, capacity: int) -> Append | None:
        """The same of other lengths; None where other kernels do it."""
        (_, n, *_), (_, value_n, *_) = tensors[0].shape, tensors[1].shape
        if n != value_n or n > capacity or tensors[0].stride(3) != 1 or tensors[1].stride(3) != 1:
            return None  # to be refused
        of_append, of_advance = _sizes(tensors, capacity)
        append, advance = self._append.resized(*of_append), self._advance.resized(*of_advance)
        return None if append is None or advance is None else Append(append, advance)

    def __call__(self, tensors: Tensors) -> None:
        _, _, key_store, value_store, *_, lengths = tensors
        self._append(*tensors)
        self._advance(lengths)
        torch.autograd.graph.increment_version((key_store, value_store, lengths))


_SIZES = (
    "stride_kb stride_kn stride_kh stride_vb stride_vn stride_vh stride_key_i stride_key_j stride_key_h "
    "stride_value_i stride_value_j stride_value_h stride_ct stride_cp stride_st stride_sp stride_pb stride_pc stride_l "
    "last_position n parts pages capacity"
)


def _sizes(tensors: Tensors, capacity: int) -> tuple[tuple[int, Sizes], tuple[int, Sizes]]:
    """The grid of both launches, each with the arguments that depend on how tensors lie. None advances lengths where
    the programs that append do."""
    key, value, key_store, value_store, cos, sin, page_table, lengths = tensors
    batch, n, heads, dim = key.shape
    value_dim, stores = value.shape[3], (key, value, key_store, value_store)
    tables = () if cos is None or sin is None else (cos, sin)
    pairs, last_position = (0, 0) if cos is None else (cos.shape[1], cos.shape[0] - 1)
    unit = UNIT if is_aligned(*stores, *tables) and all(table.stride(1) == 1 for table in tables) else 1
    strides = [stride // unit for t in stores for stride in t.stride()[:3]]
    strides += [stride for table in tables for stride in (table.stride(0) // unit, table.stride(1))] or [0, 0, 0, 0]
    strides += (0, 0) if page_table is None else page_table.stride()
    pages = 0 if page_table is None else key_store.shape[0]

    widths = [triton.next_power_of_2(max(1, width)) for width in (dim - 2 * pairs, value_dim, pairs)]
    most = max(widths[0], widths[1], 2 * widths[2])
    block_r = max(1, min(triton.next_power_of_2(max(1, n * heads)), TILE // most))
    blocks = cdiv(n * heads, block_r)
    parts = blocks if blocks > ALONE else 1
    constants = {
        **named("HEADS D DV PAIRS BLOCK_R", (heads, dim, value_dim, pairs, block_r)),
        **named("BLOCK_D BLOCK_DV BLOCK_P", widths),
        "UNIT": unit,
    }
    stride_l = lengths.stride(0)
    numbers = (*strides, stride_l, last_position, n, parts, pages, capacity)
    of_advance = Sizes("stride_l rows n capacity", (stride_l, batch, n, capacity), {}, {})
    advance_grid = cdiv(batch, ADVANCED) if parts > 1 else 0
    return (batch * parts, Sizes(_SIZES, numbers, constants, {})), (advance_grid, of_advance)


_append, _advance = Kernel(_append_kernel), Kernel(_advance_kernel)
