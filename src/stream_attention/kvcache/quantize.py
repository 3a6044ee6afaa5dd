"""Numbers of few bits: what a quantised tensor is, and the way there and back.

A group of numbers that share a scale is stored as codes:

    int8, int4, int2:   x = zero + scale * code,    code from 0 to 2^bits - 1, scale = (max - min) / (2^bits - 1)
    fp8 (e4m3):         x = scale * code,           scale = max |x| / 448

Zero, which is the lowest number, and scale are stored in the tensor's own dtype and count among its bytes. No error
exceeds half a scale and what rounding to that dtype does to a number of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .request import refuse

BITS = {"int8": 8, "int4": 4, "int2": 2, "fp8": 8}
"""Formats, and how many bits one of their codes has."""

TOKENS, CHANNELS = 1, 3
"""The dim of `[B, T, H, D]` along which a group runs: over tokens, a scale per channel; over channels, per token."""


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor `[B, T, H, D]` in few bits. Its codes are packed along D, low bits first."""

    format: str
    codes: Tensor  # uint8 [B, T, H, D * bits / 8]; fp8: float8_e4m3fn [B, T, H, D]
    scale: Tensor  # [B, T, H, D] with `dim` divided by the group, rounded up
    zero: Tensor | None  # like scale; fp8 has none
    dim: int
    group: int

    @property
    def shape(self) -> torch.Size:
        *lead, last = self.codes.shape
        return torch.Size([*lead, last if self.format == "fp8" else last * 8 // BITS[self.format]])

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that this stands for."""
        return self.scale.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the scales and the zeros."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    def dequantize(self) -> Tensor:
        """The tensor again, in its dtype; what rounding took is gone."""
        size = self.shape[self.dim]
        wide = torch.promote_types(self.dtype, torch.float32)
        codes = self.codes.to(wide) if self.format == "fp8" else _unpack(self.codes, BITS[self.format]).to(wide)
        x = codes * _spread(self.scale.to(wide), self.dim, self.group, size)
        if self.zero is not None:
            x += _spread(self.zero.to(wide), self.dim, self.group, size)
        info = torch.finfo(self.dtype)
        return x.clamp(info.min, info.max).to(self.dtype)


@torch.no_grad()
def quantize(x: Tensor, format: str, dim: int, group: int, held: Tensor | None = None) -> QuantizedTensor:
    """Quantise x `[B, T, H, D]` in groups of `group` along `dim`; the last group may be shorter.

    `held` bool `[B, T, H]`: slots that hold something; what others hold has no part in a scale.
    """
    bits = BITS[format]
    if format == "fp8" and not hasattr(torch, "float8_e4m3fn"):
        refuse("format", "int8, int4 or int2, as this torch has no float8_e4m3fn", format)
    if x.shape[-1] * bits % 8:
        refuse("keys and values", f"a head dim that is a multiple of {8 // bits} for {format}", list(x.shape))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = _range(wide, dim, group, held)
    size, info = x.shape[dim], torch.finfo(x.dtype)
    least = info.smallest_normal * info.eps
    if format == "fp8":
        largest = torch.finfo(torch.float8_e4m3fn).max
        peak = torch.maximum(low.abs(), high.abs())
        scale = (peak / largest).clamp_min(least).to(x.dtype)
        codes = (wide / _spread(scale.to(wide.dtype), dim, group, size)).clamp(-largest, largest)
        return QuantizedTensor(format, codes.to(torch.float8_e4m3fn), scale, None, dim, group)
    steps = 2**bits - 1
    scale = ((high - low) / steps).clamp_min(least).to(x.dtype)
    codes = wide - _spread(low, dim, group, size)
    codes = (codes / _spread(scale.to(wide.dtype), dim, group, size)).round().clamp(0, steps)
    return QuantizedTensor(format, _pack(codes.to(torch.uint8), bits), scale, low.to(x.dtype), dim, group)


def quantized_nbytes(x: Tensor, format: str, dim: int, group: int) -> int:
    """How many bytes `quantize` would make of x."""
    groups = -(-x.shape[dim] // group)
    scales = x.nbytes // max(1, x.shape[dim]) * groups
    return x.numel() * BITS[format] // 8 + scales * (1 if format == "fp8" else 2)


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


def _spread(x: Tensor, dim: int, group: int, size: int) -> Tensor:
    """One number per group laid over the group's members."""
    return x.repeat_interleave(group, dim).narrow(dim, 0, size)


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    parts = codes.unflatten(-1, (-1, 8 // bits))
    packed = parts[..., 0].clone()
    for index in range(1, 8 // bits):
        packed |= parts[..., index] << (bits * index)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    parts = [packed >> (bits * index) & (2**bits - 1) for index in range(8 // bits)]
    return torch.stack(parts, -1).flatten(-2)
