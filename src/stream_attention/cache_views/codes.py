"""Numbers of few bits: what a quantised tensor is, and the way there and back.

A group of numbers that share a scale is stored as codes:

    int8, int4, int2:   x = zero + scale * code,    code from 0 to 2^bits - 1, scale = (max - min) / (2^bits - 1)
    fp8 (e4m3):         x = scale * code,           scale = max |x| / 448

Zero, which is the lowest number, and scale are stored in the tensor's own dtype, unless another is asked for, and count
among its bytes. Codes are made for the stored ones, so no error exceeds half a scale and what rounding zero and scale
does to the ends of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import refuse

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

    def dequantize(self) -> Tensor:
        """The tensor again, in its dtype; what rounding took is gone."""
        size = self.shape[self.dim]
        wide = torch.promote_types(torch.promote_types(self.dtype, self.scale.dtype), torch.float32)
        codes = self.codes.to(wide) if self.format == "fp8" else _unpack(self.codes, BITS[self.format]).to(wide)
        x = _grouped(codes, self.dim, self.group, 0.0) * self.scale.to(wide).unsqueeze(self.dim + 1)
        if self.zero is not None:
            x += self.zero.to(wide).unsqueeze(self.dim + 1)
        info = torch.finfo(self.dtype)
        return _joined(x.clamp_(info.min, info.max).to(self.dtype), self.dim, size)


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
        refuse("format", "int8, int4 or int2, as this torch has no float8_e4m3fn", format)
    if x.shape[-1] * bits % 8:
        refuse("keys and values", f"a head dim that is a multiple of {8 // bits} for {format}", list(x.shape))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = _range(wide, dim, group, held)
    stored = x.dtype if scale_dtype is None else scale_dtype
    info = torch.finfo(stored)
    least = info.smallest_normal * info.eps
    groups = _grouped(wide, dim, group, 0.0)
    if format == "fp8":
        largest = torch.finfo(torch.float8_e4m3fn).max
        peak = torch.maximum(low.abs(), high.abs())
        scale = (peak / largest).clamp(least, info.max).to(stored)
        codes = (groups / scale.to(wide.dtype).unsqueeze(dim + 1)).clamp_(-largest, largest)
        codes = _joined(codes.to(torch.float8_e4m3fn), dim, x.shape[dim])
        return QuantizedTensor(format, codes, scale, None, dim, group, x.dtype)
    steps = 2**bits - 1
    scale = ((high - low) / steps).clamp(least, info.max).to(stored)
    zero = low.clamp(info.min, info.max).to(stored)
    codes = groups - zero.to(wide.dtype).unsqueeze(dim + 1)
    codes = codes.div_(scale.to(wide.dtype).unsqueeze(dim + 1)).round_().clamp_(0, steps)
    codes = _pack(_joined(codes.to(torch.uint8), dim, x.shape[dim]), bits)
    return QuantizedTensor(format, codes, scale, zero, dim, group, x.dtype)


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
