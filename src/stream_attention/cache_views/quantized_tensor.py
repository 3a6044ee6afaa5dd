"""Numbers of few bits: what a quantised tensor is, and the way there and back.

A group of numbers that share a scale is stored as codes:

    int4, int2:     x = zero + scale * (code - 2^(bits - 1)),   code from 0 to 2^bits - 1
                    scale = (max - min) / (2^bits - 1),         zero = min + 2^(bits - 1) scale
    int8:           x = scale * (code - 128),                   scale = max |x| / 127
    fp8 (e4m3):     x = scale * code,                           scale = max |x| / 448

Zero, which is about the middle of the group, and scale are stored in the tensor's own dtype, unless another is asked
for, and count among its bytes. Codes are made for the stored ones, so no error exceeds half a scale and what rounding
zero and scale does to the ends of the group.

A group that holds Inf or NaN has the scale NaN, and all of it reads as NaN: codes have no place for one such number.

Codes lie in words of 16 bits, as decode kernels read them: of D channels and n codes to a word, word w has those of the
channels w, w + D/n, w + 2 D/n and so on, low bits first. So what two words have in the same place is two neighbours.
Codes lie by heads, the tokens of a head one after another, so that whoever reads one head reads from one place: 8 heads
of int4 took 99 us where they lay by tokens, and take 81. So do scales; those per token lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import refuse

BITS = {"int8": 8, "int4": 4, "int2": 2, "fp8": 8}
"""Formats, and how many bits one of their codes has."""

SYMMETRIC = {"int8": 127.0, "fp8": 448.0}
"""Formats without zeros, and the largest number that one of their codes stands for at scale 1. Eight bits are enough to
spend half a range on numbers that a group may not have."""

LARGEST_HALF = 127 * 512.0
"""With scales of float16, numbers are cut here: what their codes stand for, rounded scales and zeros included, is then
within float16, in which kernels compute."""

TOKENS, CHANNELS = 1, 3
"""The dim of `[B, T, H, D]` along which a group runs: over tokens, a scale per channel; over channels, per token."""


class Coding(NamedTuple):
    """How the numbers of a cache are coded."""

    format: str
    group: int
    keys_per_channel: bool  # scales; else per token
    values_per_channel: bool
    scale_dtype: torch.dtype
    window: int  # slots of the latest tokens
    in_order: bool  # scales and zeros lie as `quantize` lays them
    aligned: bool  # codes lie by heads, and rows of codes, of scales and of the window start on 16 bytes


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor `[B, T, H, D]` in few bits."""

    format: str
    codes: Tensor  # uint8 [B, T, H, D * bits / 8]; fp8: float8_e4m3fn [B, T, H, D]
    scale: Tensor  # [B, T, H, D] with `dim` divided by the group, rounded up
    zero: Tensor | None  # like scale; int8 and fp8 have none
    dim: int
    group: int
    dtype: torch.dtype  # of the tensor that this stands for

    @property
    def shape(self) -> torch.Size:
        *lead, last = self.codes.shape
        return torch.Size([*lead, last if self.format == "fp8" else last * 8 // BITS[self.format]])

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the scales and the zeros."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @property
    def in_order(self) -> bool:
        """Scales and zeros lie alike, and the side by side that `quantize` lays side by side."""
        side_by_side = 3 if self.dim == TOKENS else 1
        if self.scale.numel() == 0:
            return True
        alike = self.zero is None or self.zero.stride() == self.scale.stride()
        return alike and (self.scale.shape[side_by_side] == 1 or self.scale.stride(side_by_side) == 1)

    @property
    def in_pairs(self) -> bool:
        """Rows of scales begin at even places, so that two can be read at a time."""
        beside = 3 if self.dim == TOKENS else 1
        if self.scale.numel() == 0:
            return True
        return all(self.scale.stride(dim) % 2 == 0 for dim in range(4) if dim != beside and self.scale.shape[dim] > 1)

    @property
    def aligned(self) -> bool:
        """Codes lie by heads, and their rows and those of scales start on 16 bytes."""
        if self.codes.numel() and self.codes.shape[1] > 1 and self.codes.stride(1) != self.codes.shape[3]:
            return False
        beside = 3 if self.dim == TOKENS else 1
        scales = (self.scale,) if self.zero is None else (self.scale, self.zero)
        return on_16_bytes(self.codes, 3) and all(on_16_bytes(t, beside) for t in scales)

    def dequantize(self) -> Tensor:
        """The tensor again, in its dtype; what rounding took is gone."""
        size = self.shape[self.dim]
        wide = torch.promote_types(torch.promote_types(self.dtype, self.scale.dtype), torch.float32)
        bits = BITS[self.format]
        codes = _unpack(self.codes.view(torch.uint8), bits)
        codes = codes.view(torch.float8_e4m3fn).to(wide) if self.format == "fp8" else codes.to(wide) - 2 ** (bits - 1)
        x = _grouped(codes, self.dim, self.group, 0.0) * self.scale.to(wide).unsqueeze(self.dim + 1)
        if self.zero is not None:
            x += self.zero.to(wide).unsqueeze(self.dim + 1)
        info = torch.finfo(self.dtype)
        return _joined(x.clamp_(info.min, info.max).to(self.dtype), self.dim, size)


def on_16_bytes(t: Tensor, beside: int) -> bool:
    """Whether what lies side by side in dim `beside` starts on 16 bytes everywhere."""
    if t.numel() == 0:
        return True
    steps = (stride for dim, stride in enumerate(t.stride()) if dim != beside and t.shape[dim] > 1)
    return t.data_ptr() % 16 == 0 and all(step * t.itemsize % 16 == 0 for step in steps)


@torch.no_grad()
def quantize(
    x: Tensor,
    format: str,
    dim: int,
    group: int,
    held: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Quantise x `[B, T, H, D]` in groups of `group` along `dim`; the last group may be shorter.

    `held` bool `[B, T, H]`: slots that hold something; what others hold has no part in a scale. `scale_dtype`: of
    scales and zeros; None: x's.
    """
    bits = BITS[format]
    if format == "fp8" and not hasattr(torch, "float8_e4m3fn"):
        refuse("format", "int8, int4 or int2: this torch has no float8_e4m3fn", format)
    if x.shape[-1] % (16 // bits):
        refuse("keys and values", f"a head dim that is a multiple of {16 // bits} for {format}", list(x.shape))
    stored = x.dtype if scale_dtype is None else scale_dtype
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = _range(wide, dim, group, held)
    not_finite = ~(low.isfinite() & high.isfinite())
    if stored is torch.float16:
        wide, low, high = (t.clamp(-LARGEST_HALF, LARGEST_HALF) for t in (wide, low, high))
    info = torch.finfo(stored)
    least = info.smallest_normal * info.eps
    groups = _grouped(wide, dim, group, 0.0)
    if format in SYMMETRIC:
        largest = SYMMETRIC[format]
        scale = (torch.maximum(low.abs(), high.abs()) / largest).clamp(least, info.max).to(stored)
        scale.masked_fill_(not_finite, torch.nan)
        codes = (groups / scale.to(wide.dtype).unsqueeze(dim + 1)).clamp_(-largest, largest)
        if format == "fp8":
            codes = _joined(codes.to(torch.float8_e4m3fn), dim, x.shape[dim]).view(torch.uint8)
            codes = _by_heads(_pack(codes, bits)).view(torch.float8_e4m3fn)
        else:
            codes = _by_heads(_pack(_joined(codes.round_().add_(128).to(torch.uint8), dim, x.shape[dim]), bits))
        return QuantizedTensor(format, codes, _laid_out(scale, dim), None, dim, group, x.dtype)
    steps = 2**bits - 1
    scale = ((high - low) / steps).clamp(least, info.max).to(stored).masked_fill_(not_finite, torch.nan)
    middle = 2 ** (bits - 1)
    zero = (low + middle * scale.to(wide.dtype)).clamp(info.min, info.max).to(stored)
    codes = groups - zero.to(wide.dtype).unsqueeze(dim + 1)
    codes = codes.div_(scale.to(wide.dtype).unsqueeze(dim + 1)).round_().add_(middle).clamp_(0, steps)
    codes = _by_heads(_pack(_joined(codes.to(torch.uint8), dim, x.shape[dim]), bits))
    return QuantizedTensor(format, codes, _laid_out(scale, dim), _laid_out(zero, dim), dim, group, x.dtype)


def _range(x: Tensor, dim: int, group: int, held: Tensor | None) -> tuple[Tensor, Tensor]:
    """Lowest and highest of each group; of a group that holds nothing, 0."""
    low = high = x
    if held is not None:
        low, high = (x.masked_fill(~held.unsqueeze(-1), end) for end in (torch.inf, -torch.inf))
    low, high = _grouped(low, dim, group, torch.inf).amin(dim + 1), _grouped(high, dim, group, -torch.inf).amax(dim + 1)
    empty = low > high
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


def _grouped(x: Tensor, dim: int, group: int, fill: float) -> Tensor:
    """`dim` split in two, groups first; the last group is filled up."""
    missing = -x.shape[dim] % group
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing], value=fill)
    return x.unflatten(dim, (x.shape[dim] // group, group))


def _joined(x: Tensor, dim: int, size: int) -> Tensor:
    """What `_grouped` split, without what filled up the last group."""
    return x.flatten(dim, dim + 1).narrow(dim, 0, size).contiguous()


def _by_heads(x: Tensor) -> Tensor:
    """`[B, T, H, .]`, in memory `[B, H, T, .]`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _laid_out(scale: Tensor, dim: int) -> Tensor:
    """Scales by heads; those per token with tokens side by side in memory."""
    return _by_heads(scale) if dim == TOKENS else scale.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes, uint8 `[..., D]`, in words of 16 bits: uint8 `[..., D * bits / 8]`."""
    parts = codes.unflatten(-1, (16 // bits, -1)).int().unbind(-2)
    words = torch.stack([part << (bits * index) for index, part in enumerate(parts)]).sum(0)
    return words.to(torch.int16).view(torch.uint8)  # 2^15 and more wrap around, which is what is meant


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """What `_pack` packed."""
    words = packed.contiguous().view(torch.int16).int()
    parts = [words >> (bits * index) & (2**bits - 1) for index in range(16 // bits)]
    return torch.stack(parts, -2).flatten(-2).to(torch.uint8)
