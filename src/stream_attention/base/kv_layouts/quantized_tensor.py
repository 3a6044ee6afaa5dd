"""Quantised tensors: their format, quantisation and dequantisation.

The elements of a group share a scale. They are stored as quantised values (`codes`):

    int4, int2:     x = zero + scale * (code - 2^(bits - 1)),   code from 0 to 2^bits - 1
                    scale = (max - min) / (2^bits - 1),         zero = min + 2^(bits - 1) scale
    int8:           x = scale * (code - 128),                   scale = max |x| / 127
    fp8 (e4m3):     x = scale * code,                           scale = max |x| / 448

Zero, which is about the middle of the group, and scale are stored in the tensor's own dtype by default, and count
among its bytes. Values are quantised with the stored, rounded ones, so no error exceeds half a scale plus the effect of
rounding zero and scale at the ends of the group.

A group with Inf or NaN has the scale NaN, and all of it reads as NaN.

Quantised values are packed in words of 16 bits, as decode kernels read them: with D channels and n values to a word,
word w has those of the channels w, w + D/n, w + 2 D/n and so on, low bits first. So the same bits of adjacent words are
adjacent channels. The memory order is heads, then tokens, so that the values of one head are contiguous: 8 heads of
int4 take 81 us, and took 99 us in the order of tokens. Scales have the same order; those per token are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import refuse
from ..problem import aligned

BITS = {"int8": 8, "int4": 4, "int2": 2, "fp8": 8}
"""Formats, and the bits of a quantised value."""

SYMMETRIC = {"int8": 127.0, "fp8": 448.0}
"""Formats without zeros, and their largest value at scale 1. Eight bits are precise enough to spend half of the range
on a sign that a group may not have."""

LARGEST_HALF = 127 * 512.0
"""With scales of float16, values are clamped here: dequantised values, with rounded scales and zeros, are then in the
range of float16, in which kernels compute."""

TOKENS, CHANNELS = 1, 3
"""The dim of `[B, T, H, D]` of a group: tokens (a scale per channel), or channels (a scale per token)."""


class Coding(NamedTuple):
    """How a cache is quantised."""

    format: str
    group: int
    keys_per_channel: bool  # scales; else per token
    values_per_channel: bool
    scale_dtype: torch.dtype
    window: int  # slots of the latest tokens
    in_order: bool  # scales and zeros have the layout of `quantize`
    aligned: bool  # values are ordered by heads; rows of values, of scales and of the window are 16-byte aligned


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantised tensor `[B, T, H, D]`."""

    format: str
    codes: Tensor  # uint8 [B, T, H, D * bits / 8]; fp8: float8_e4m3fn [B, T, H, D]
    scale: Tensor  # [B, T, H, D] with `dim` divided by the group, rounded up
    zero: Tensor | None  # like scale; int8 and fp8 have none
    dim: int
    group: int
    dtype: torch.dtype  # of the dequantised tensor

    @property
    def shape(self) -> torch.Size:
        *lead, last = self.codes.shape
        return torch.Size([*lead, last if self.format == "fp8" else last * 8 // BITS[self.format]])

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised values, the scales and the zeros."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @property
    def _inner(self) -> int:
        """The contiguous dim of scales and zeros."""
        return 3 if self.dim == TOKENS else 1

    @property
    def in_order(self) -> bool:
        """Scales and zeros have the same strides, and the contiguous dim of `quantize`."""
        if self.scale.numel() == 0:
            return True
        same = self.zero is None or self.zero.stride() == self.scale.stride()
        return same and (self.scale.shape[self._inner] == 1 or self.scale.stride(self._inner) == 1)

    @property
    def in_pairs(self) -> bool:
        """Rows of scales begin at even offsets, so that two can be read at a time."""
        outer = (dim for dim in range(4) if dim != self._inner and self.scale.shape[dim] > 1)
        return self.scale.numel() == 0 or all(self.scale.stride(dim) % 2 == 0 for dim in outer)

    @property
    def aligned(self) -> bool:
        """Values are ordered by heads, and their rows and those of scales are 16-byte aligned."""
        if self.codes.numel() and self.codes.shape[1] > 1 and self.codes.stride(1) != self.codes.shape[3]:
            return False
        scales = (self.scale,) if self.zero is None else (self.scale, self.zero)
        return aligned(self.codes) and all(aligned(t, self._inner) for t in scales)

    def dequantize(self) -> Tensor:
        """The tensor in its dtype, with the rounding error."""
        size = self.shape[self.dim]
        wide = torch.promote_types(torch.promote_types(self.dtype, self.scale.dtype), torch.float32)
        values = decode_quantized(self.codes.view(torch.uint8), self.format).to(wide)
        x = _grouped(values, self.dim, self.group, 0.0) * self.scale.to(wide).unsqueeze(self.dim + 1)
        if self.zero is not None:
            x += self.zero.to(wide).unsqueeze(self.dim + 1)
        info = torch.finfo(self.dtype)
        return _joined(x.clamp_(info.min, info.max).to(self.dtype), self.dim, size)


@torch.no_grad()
def quantize(
    x: Tensor, format: str, dim: int, group: int, valid: Tensor | None = None, scale_dtype: torch.dtype | None = None
) -> QuantizedTensor:
    """Quantise x `[B, T, H, D]` in groups of `group` along `dim`; the last group may be shorter.

    `valid` bool `[B, T, H]`: slots with a token; others do not affect a scale. `scale_dtype`: of scales and zeros;
    None: x's.
    """
    bits = BITS[format]
    if x.shape[-1] % (16 // bits):
        refuse("keys and values", f"a head dim that is a multiple of {16 // bits} for {format}", list(x.shape))
    stored = x.dtype if scale_dtype is None else scale_dtype
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = _range(wide, dim, group, valid)
    not_finite = ~(low.isfinite() & high.isfinite())
    if stored is torch.float16:
        wide, low, high = (t.clamp(-LARGEST_HALF, LARGEST_HALF) for t in (wide, low, high))
    info = torch.finfo(stored)
    least = info.smallest_normal * info.eps
    groups = _grouped(wide, dim, group, 0.0)
    steps, middle, zero = 2**bits - 1, 2 ** (bits - 1), None
    largest = SYMMETRIC.get(format, steps)
    span = torch.maximum(low.abs(), high.abs()) if format in SYMMETRIC else high - low
    scale = (span / largest).clamp(least, info.max).to(stored).masked_fill_(not_finite, torch.nan)
    divisor = scale.to(wide.dtype).unsqueeze(dim + 1)
    if format in SYMMETRIC:
        values = (groups / divisor).clamp_(-largest, largest)
        values = values.to(torch.float8_e4m3fn) if format == "fp8" else values.round_().add_(middle).to(torch.uint8)
    else:
        zero = (low + middle * scale.to(wide.dtype)).clamp(info.min, info.max).to(stored)
        values = (groups - zero.to(wide.dtype).unsqueeze(dim + 1)).div_(divisor)
        values = values.round_().add_(middle).clamp_(0, steps).to(torch.uint8)
        zero = _laid_out(zero, dim)
    packed = _by_heads(_pack(_joined(values, dim, x.shape[dim]).view(torch.uint8), bits)).view(values.dtype)
    return QuantizedTensor(format, packed, _laid_out(scale, dim), zero, dim, group, x.dtype)


def _range(x: Tensor, dim: int, group: int, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Lowest and highest of each group; of a group without valid elements, 0."""
    low = high = x
    if valid is not None:
        low, high = (x.masked_fill(~valid.unsqueeze(-1), end) for end in (torch.inf, -torch.inf))
    low, high = _grouped(low, dim, group, torch.inf).amin(dim + 1), _grouped(high, dim, group, -torch.inf).amax(dim + 1)
    empty = low > high
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


def _grouped(x: Tensor, dim: int, group: int, fill: float) -> Tensor:
    """`dim` split in two, groups first; the last group is padded."""
    missing = -x.shape[dim] % group
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing], value=fill)
    return x.unflatten(dim, (x.shape[dim] // group, group))


def _joined(x: Tensor, dim: int, size: int) -> Tensor:
    """The inverse of `_grouped`, without the padding."""
    return x.flatten(dim, dim + 1).narrow(dim, 0, size).contiguous()


def _by_heads(x: Tensor) -> Tensor:
    """`[B, T, H, .]`, in memory `[B, H, T, .]`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_out(scale: Tensor, dim: int) -> Tensor:
    """Scales by heads; those per token with contiguous tokens."""
    return _by_heads(scale) if dim == TOKENS else scale.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _pack(values: Tensor, bits: int) -> Tensor:
    """Quantised values, uint8 `[..., D]`, in words of 16 bits: uint8 `[..., D * bits / 8]`."""
    parts = values.unflatten(-1, (16 // bits, -1)).int().unbind(-2)
    words = torch.stack([part << (bits * index) for index, part in enumerate(parts)]).sum(0)
    return words.to(torch.int16).view(torch.uint8)  # 2^15 and more wrap around, as intended


def decode_quantized(packed: Tensor, format: str) -> Tensor:
    """Packed values, uint8, as values at scale 1 and zero 0: int32, or float8_e4m3fn."""
    bits = BITS[format]
    words = packed.contiguous().view(torch.int16).int()
    parts = [words >> (bits * index) & (2**bits - 1) for index in range(16 // bits)]
    values = torch.stack(parts, -2).flatten(-2)
    return values.to(torch.uint8).view(torch.float8_e4m3fn) if format == "fp8" else values - 2 ** (bits - 1)
