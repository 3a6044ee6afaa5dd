"""A quantised cache, with its latest tokens in full precision."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import check_int, refuse
from ..problem import aligned
from . import checks
from .base import Cache
from .quantized_tensor import BITS, SYMMETRIC, TOKENS, Coding, QuantizedTensor, quantize
from .write import Places, places, put

FORMATS = ("fp8", "int8", "int4")


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedKV(Cache):
    """A contiguous or paged cache in fp8, int8 or int4; `quantize_kv` makes one.

    Tokens are quantised once, in blocks of `group`, when a block is complete and `residual` tokens have followed it:
    of a row of length L the first `max(0, L - residual) // group * group` are quantised. The others, at most
    `residual + group - 1`, are in the window in full precision, position t in slot `t % slots`.

    Quantised values have the layout of a plain cache, `[B, T, Hkv, .]` or with a page table `[P, page, Hkv, .]`. So
    have scales and zeros: per token `[B, T, Hkv, ceil(D / group)]`, per channel and block
    `[B, T / group, Hkv, D]` (pages: `[P, page / group, Hkv, D]`, so a page is whole blocks). Without a page table T is
    whole blocks too, and the capacity of a row is T tokens and those of the window.
    """

    STORES = "key_window", "value_window"
    key: QuantizedTensor
    value: QuantizedTensor
    key_window: Tensor  # [B, slots, Hkv, D], slots = residual rounded up to blocks, and one block more
    value_window: Tensor  # [B, slots, Hkv, Dv]
    lengths: Tensor  # int32 [B]
    residual: int
    page_table: Tensor | None = None  # int32 [B, max_pages]

    def __post_init__(self) -> None:
        checks.stores(self.STORES, *self._plain(), "B, slots")
        checks.int32("lengths", self.lengths, (self.batch,), f"[B={self.batch}]", self.device)
        for name, side, dim in (("key", self.key, self.head_dim), ("value", self.value, self.value_dim)):
            _check_side(name, side, self.key_window, dim)
        for field in ("format", "group"):
            ours, theirs = getattr(self.key, field), getattr(self.value, field)
            if ours != theirs:
                refuse("value", f"the key's {field} {ours}", theirs)
        if self.value.scale.dtype is not self.key.scale.dtype:
            refuse("value.scale", f"the key's dtype {self.key.scale.dtype}", self.value.scale.dtype, error=TypeError)
        if self.value.codes.shape[:2] != self.key.codes.shape[:2]:
            lead = list(self.key.codes.shape[:2])
            refuse("value", f"codes of leading shape {lead} (key)", list(self.value.codes.shape))
        slots = window_slots(check_int("residual", self.residual, 0), self.group)
        if self.key_window.shape[1] != slots:
            refuse("key_window", f"{slots} slots for residual {self.residual}", self.key_window.shape[1])
        per_channel = TOKENS in (self.key.dim, self.value.dim)
        if self.page_table is not None:
            checks.int32("page_table", self.page_table, (self.batch, None), f"[B={self.batch}, max_pages]", self.device)
            checks.page_shape("key", self.key.codes, self.page_table)
            check_blocks(self.group, self.key.codes.shape[1], per_channel)
        elif self.key.codes.shape[0] != self.batch or self.key.codes.shape[1] % self.group:
            refuse("key", f"codes of shape [{self.batch}, n * {self.group}, ...]", list(self.key.codes.shape))

    @property
    def format(self) -> str:
        """fp8, int8 or int4."""
        return self.key.format

    @property
    def group(self) -> int:
        """How many elements share a scale, and how many tokens are quantised together."""
        return self.key.group

    @property
    def page_size(self) -> int:
        return 0 if self.page_table is None else self.key.codes.shape[1]

    @property
    def coding(self) -> Coding:
        per_channel = self.key.dim == TOKENS, self.value.dim == TOKENS
        in_order = all(side.in_order and side.in_pairs for side in (self.key, self.value))
        on_16_bytes = all(map(aligned, self._plain())) and self.key.aligned and self.value.aligned
        slots, dtype = self.key_window.shape[1], self.key.scale.dtype
        return Coding(self.format, self.group, *per_channel, dtype, slots, in_order, on_16_bytes)

    @property
    def batch(self) -> int:
        return self.key_window.shape[0]

    @property
    def capacity(self) -> int:
        if self.page_table is not None:
            return self.page_table.shape[1] * self.key.codes.shape[1]
        return self.key.codes.shape[1] + self.residual + self.group - 1

    @property
    def quantized_lengths(self) -> Tensor:
        """How many tokens of each row are quantised; those after them are in the window. int64 `[B]`."""
        return quantized_lengths(self.lengths.clamp(max=self.capacity), self.residual, self.group)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        key, value, windows = self.key, self.value, (self.key_window, self.value_window)
        sides = key.codes, key.scale, key.zero, value.codes, value.scale, value.zero
        return (*sides, *windows, self.page_table, self.lengths)

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        checks.span(start, stop, self.capacity)
        positions = torch.arange(start, stop, device=self.device)
        slots = positions % self.key_window.shape[1]
        quantized = (positions < self.quantized_lengths.unsqueeze(1))[..., None, None]
        first, last = start // self.group * self.group, -(-stop // self.group) * self.group
        blocks = torch.arange(first, last, device=self.device).expand(self.batch, -1)
        key, value = (
            torch.where(quantized, self._read(side, blocks)[:, start - first : stop - first], window[:, slots])
            for side, window in ((self.key, self.key_window), (self.value, self.value_window))
        )
        return key, value

    def _read(self, side: QuantizedTensor, blocks: Tensor) -> Tensor:
        """The dequantised tokens at `blocks` `[B, n]`, whole blocks."""
        if side.codes.numel() == 0 or blocks.numel() == 0:
            heads, dim = side.shape[2:]
            return self.key_window.new_empty(*blocks.shape, heads, dim)
        at, scale_at = self._places(side, blocks)
        codes = side.codes.view(torch.uint8)[at.i, at.j].view(side.codes.dtype)
        scale = side.scale[scale_at.i, scale_at.j]
        zero = None if side.zero is None else side.zero[scale_at.i, scale_at.j]
        tokens = replace(side, codes=codes, scale=scale, zero=zero).dequantize()
        return torch.where(at.real[:, :, None, None], tokens, torch.nan)

    def _places(self, side: QuantizedTensor, blocks: Tensor) -> tuple[Places, Places]:
        """The places of the quantised values and of the scales of `blocks` `[B, n]`, whole blocks."""
        at = places(blocks, side.codes, self.page_table)
        if side.dim != TOKENS:
            return at, at
        i, j, real = (x[:, :: self.group] for x in at)
        return at, Places(i, j // self.group, real)

    def _write(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """`group` tokens at a time, which complete at most one block."""
        for new in zip(*(x.split(self.group, 1) for x in (key, value, positions)), strict=True):
            self._write_block(*new)

    def _write_block(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        slots, n = self.key_window.shape[1], positions.shape[1]
        if n == 0:
            return
        length = positions[:, :1]  # [B, 1]: of each row, before these
        before, after = (quantized_lengths(x, self.residual, self.group) for x in (length, length + n))
        block = before + torch.arange(self.group, device=self.device)
        row = torch.arange(self.batch, device=self.device).unsqueeze(1)
        is_new = (block >= length)[..., None, None]
        due = after > before
        for side, window, new in ((self.key, self.key_window, key), (self.value, self.value_window, value)):
            tokens = torch.where(is_new, new[row, (block - length).clamp(0, n - 1)], window[row, block % slots])
            quantized = quantize(tokens, side.format, side.dim, self.group, scale_dtype=side.scale.dtype)
            at, scale_at = (where._replace(real=where.real & due) for where in self._places(side, block))
            put(side.codes, at, quantized.codes)
            put(side.scale, scale_at, quantized.scale)
            if side.zero is not None and quantized.zero is not None:
                put(side.zero, scale_at, quantized.zero)
            put(window, Places(row.expand_as(positions), positions % slots, positions < self.capacity), new)

    def _paged(self, lengths: Tensor, new: int) -> tuple[Tensor, Tensor, Tensor, int, int] | None:
        if self.page_table is None:
            return None
        pages, page = self.key.codes.shape[:2]
        before, after = (quantized_lengths(x, self.residual, self.group) for x in (lengths, lengths + new))
        return self.page_table, before, after, page, pages


def quantized_lengths(lengths: Tensor, residual: int, group: int) -> Tensor:
    """How many tokens are quantised in rows of these lengths, int64."""
    tokens = (lengths.long() - residual).clamp_min(0)
    return tokens - tokens % group


def window_slots(residual: int, group: int) -> int:
    """Slots of a window: all tokens that are not quantised fit, and a block does not wrap around."""
    return (-(-residual // group) + 1) * group


def check_blocks(group: int, page: int, per_channel: bool) -> None:
    """Refuse pages that end within a block with scales per channel."""
    if per_channel and page % group:
        hint = 'Pass a group that divides the page, or keys="token", values="token".'
        refuse("group", f"a divisor of the page size {page} for scales per channel", group, hint)


def _check_side(name: str, side: QuantizedTensor, window: Tensor, dim: int) -> None:
    if not isinstance(side, QuantizedTensor):
        refuse(name, "a QuantizedTensor", type(side).__name__, "To make a cache, call quantize_kv.", TypeError)
    if side.format not in FORMATS:
        refuse(name, f"one of the formats {', '.join(FORMATS)}", side.format)
    if side.dtype is not window.dtype:
        refuse(name, f"the window's dtype {window.dtype}", side.dtype, error=TypeError)
    code = torch.float8_e4m3fn if side.format == "fp8" else torch.uint8
    for part, given in (("codes", side.codes), ("scale", side.scale), ("zero", side.zero)):
        if part == "zero" and side.format in SYMMETRIC:
            if given is not None:
                refuse(f"{name}.zero", f"None for {side.format}", "a value")
            continue
        checks.tensor(f"{name}.{part}", given, window.device)
    if side.codes.dtype is not code:
        refuse(f"{name}.codes", f"dtype {code} for {side.format}", side.codes.dtype, error=TypeError)
    width, heads = dim * BITS[side.format] // 8, window.shape[2]
    if side.codes.dim() != 4 or side.codes.shape[2:] != (heads, width):
        refuse(f"{name}.codes", f"shape [., ., {heads}, {width}]", list(side.codes.shape))
    odd = any(step % 2 for step, size in zip(side.codes.stride()[:3], side.codes.shape[:3], strict=True) if size > 1)
    if side.codes.numel() and (side.codes.stride(3) != 1 or odd):
        refuse(f"{name}.codes", "a contiguous last dim and even strides", f"strides {side.codes.stride()}")
    shape = [*side.codes.shape[:3], dim]
    shape[side.dim] = -(-shape[side.dim] // side.group)
    for part, given in (("scale", side.scale), ("zero", side.zero)):
        if given is not None and (list(given.shape) != shape or given.dtype is not side.scale.dtype):
            refuse(f"{name}.{part}", f"shape {shape}, one dtype", f"{list(given.shape)}, {given.dtype}")
