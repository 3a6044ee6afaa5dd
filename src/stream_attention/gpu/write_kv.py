"""Writing tokens to the slots of a cache in Triton, as they are or as e4m3.

The rule is that of kv_layouts/write.py, bit for bit, but for what kind of NaN a NaN becomes.

Grid: a program for each slot and each block of BLOCK_H heads. It writes the key and the value of its token; where the
slot is negative or beyond the pages, it writes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..base.kv_layouts import checks
from . import interpreter
from .append import TILE, load_channels, store_channels
from .arguments import UNIT, cdiv, is_aligned, named
from .launch import Kernel, Launch, Sizes, jit
from .quantize_fp8 import code_of

ELEMENTS = 256
"""Of a tile for each warp, up to four: a wide word for each thread. A guess of what is fast."""


@triton.jit
def to_e4m3(x, scale, scale_ptr, scale_offs, mask_h, HARDWARE: tl.constexpr):
    """x / scale as e4m3, of the same scale for all lines or one for each, [BLOCK_H]."""
    x = x.to(tl.float32)
    if scale_ptr is None:
        x = tl.div_rn(x, tl.full(x.shape, scale, tl.float32))
    else:
        scales = tl.load(scale_ptr + scale_offs, mask=mask_h, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))
    return code_of(x, HARDWARE).to(tl.float8e4nv, bitcast=True)


@jit
def _write_kernel(
    key_ptr, value_ptr, key_pages_ptr, value_pages_ptr, slots_ptr, k_scale_ptr, v_scale_ptr,
    stride_kn: tl.int64, stride_kh: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_key_i: tl.int64, stride_key_j: tl.int64, stride_key_h: tl.int64,
    stride_value_i: tl.int64, stride_value_j: tl.int64, stride_value_h: tl.int64,
    stride_n: tl.int64, stride_ks: tl.int64, stride_vs: tl.int64, page: tl.int64, capacity: tl.int64, k_scale, v_scale,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, UNIT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    # Where am I.
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // blocks).to(tl.int64)
    offs_h = (tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    mask_h = offs_h < HEADS
    slot = tl.load(slots_ptr + token * stride_n).to(tl.int64)

    # The new token, which does not wait for its slot.
    key = load_channels(key_ptr, (token * stride_kn + offs_h * stride_kh) * UNIT, mask_h, 0, D, BLOCK_D)
    value = load_channels(value_ptr, (token * stride_vn + offs_h * stride_vh) * UNIT, mask_h, 0, DV, BLOCK_DV)
    if key_pages_ptr.dtype.element_ty == tl.float8e4nv:
        key = to_e4m3(key, k_scale, k_scale_ptr, offs_h * stride_ks, mask_h, HARDWARE)
        value = to_e4m3(value, v_scale, v_scale_ptr, offs_h * stride_vs, mask_h, HARDWARE)

    # Token `j` of page `i`.
    mask_h = mask_h & (slot >= 0) & (slot < capacity)
    i = slot // page
    j = slot - i * page
    key_offs = (i * stride_key_i + j * stride_key_j + offs_h * stride_key_h) * UNIT
    value_offs = (i * stride_value_i + j * stride_value_j + offs_h * stride_value_h) * UNIT
    store_channels(key_pages_ptr, key_offs, mask_h, key, 0, D, BLOCK_D)
    store_channels(value_pages_ptr, value_offs, mask_h, value, 0, DV, BLOCK_DV)


Tensors = tuple[Any, ...]
"""Key `[N', Hkv, D]`, value `[N', Hkv, Dv]`, the pages of both, `[P, page, ...]` or of one token each `[P, ...]`, slots
`[N]`, and two scales, each `[]`, `[1]`, `[Hkv]`, a number or None."""


class WriteKV:
    """The launch of a call whose tensors lie alike."""

    __slots__ = ("_kind", "_launch", "extents")

    def __init__(self, launch: Launch, tensors: Tensors) -> None:
        self._launch, self._kind, self.extents = launch, _kind(tensors), checks.extents(tensors)

    @classmethod
    def prepare(cls, tensors: Tensors) -> WriteKV:
        grid, sizes = _sizes(tensors)
        widest = max(sizes.constants["BLOCK_D"], sizes.constants["BLOCK_DV"])
        pointers = [None if isinstance(t, float) else t for t in tensors]
        launch = _write.bind_addresses(
            grid,
            {"num_warps": max(1, min(4, sizes.constants["BLOCK_H"] * widest // ELEMENTS))},
            **named(" ".join(_write.addresses), pointers),
            **sizes.arguments(),
            k_scale=1.0,
            v_scale=1.0,
            HARDWARE=not interpreter.active(),
        )
        return cls(launch, tensors)

    def resized(self, tensors: Tensors) -> WriteKV | None:
        """The same of other numbers of tokens, which may lie otherwise; None where another kernel does it, and where
        they were not checked: those of other shapes, and fewer tokens than slots."""
        if self._kind != _kind(tensors) or min(len(tensors[0]), len(tensors[1])) < len(tensors[4]):
            return None
        launch = self._launch.resized(*_sizes(tensors))
        return None if launch is None else WriteKV(launch, tensors)

    def __call__(self, tensors: Tensors) -> None:
        sizes, scales = None, tensors[5:]
        if float in map(type, scales):
            numbers = tuple([scale if isinstance(scale, float) else 1.0 for scale in scales])
            sizes = Sizes("k_scale v_scale", numbers, {}, {})
        self._launch(*tensors, sizes=sizes)
        torch.autograd.graph.increment_version(tensors[2:4])


def _kind(tensors: Tensors) -> list[Any]:
    """Of new tokens and slots, what is the same for any number of them."""
    key, value, _, _, slots, *_ = tensors
    new = (key, value, slots)
    return [(t.dtype, t.dim(), t.shape[1:], t.stride()[2:], t.device, t.data_ptr() % 16) for t in new]


_SIZES = (
    "stride_kn stride_kh stride_vn stride_vh stride_key_i stride_key_j stride_key_h stride_value_i stride_value_j "
    "stride_value_h stride_n stride_ks stride_vs page capacity"
)


def _sizes(tensors: Tensors) -> tuple[int, Sizes]:
    """The grid, and the arguments that depend on how tensors lie."""
    (key, value, *stores, slots), scales = tensors[:5], tensors[5:]
    (_, heads, dim), value_dim = key.shape, value.shape[2]
    unit = UNIT if is_aligned(key, value, *stores) else 1
    pages, page = stores[0].shape[0], stores[0].shape[1] if stores[0].dim() == 4 else 1
    strides = [stride // unit for t in (key, value) for stride in t.stride()[:2]]
    for store in stores:
        by_page, *by_slot, by_head, _ = store.stride()
        strides += [stride // unit for stride in (by_page, *(by_slot or (0,)), by_head)]
    per_head = [isinstance(scale, torch.Tensor) and scale.numel() > 1 for scale in scales]
    strides += [
        slots.stride(0),
        *[scale.stride(0) if many else 0 for scale, many in zip(scales, per_head, strict=True)],
    ]
    widths = [max(4, triton.next_power_of_2(width)) for width in (dim, value_dim)]  # codes are made by fours
    block_h = max(1, min(triton.next_power_of_2(heads), TILE // max(widths)))
    constants = {
        **named("HEADS D DV BLOCK_H BLOCK_D BLOCK_DV", (heads, dim, value_dim, block_h, *widths)),
        "UNIT": unit,
    }
    return slots.shape[0] * cdiv(heads, block_h), Sizes(_SIZES, (*strides, page, pages * page), constants, {})


_write = Kernel(_write_kernel)
