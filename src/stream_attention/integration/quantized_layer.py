"""A quantised cache layer, which kernels read without dequantising it in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.kv_layouts import ContiguousKV, PagedKV, QuantizedKV
from ..base.kv_layouts.quantized import quantized_lengths
from ..base.kv_layouts.quantized_tensor import TOKENS, QuantizedTensor, quantize
from ..kvcache import quantize_kv
from .cache_layer import StreamLayer, rolled
from .placeholder import MAX_DECODE_QUERIES

STEP = 256
"""The least tokens by which a full cache grows."""
AT_A_TIME = 4096
"""The most tokens of a row that are quantised at a time, which bounds the temporary memory in full precision."""


class QuantizeOptions(NamedTuple):
    """Arguments of `quantize_kv`."""

    format: str
    group: int
    residual: int
    keys: str
    values: str


class QuantisedLayer(StreamLayer):
    """Stores every token, all but the latest quantised (see `QuantizedKV`).

    Attention over the first tokens is in full precision. More than `MAX_DECODE_QUERIES` later ones see themselves in
    full precision and earlier tokens dequantised; fewer read the cache, themselves included.

    A single new token is copied into the window: keys, values and the length, or by one kernel where rows of a batch
    have different lengths. Every `group`-th token completes a block, which torch operations quantise.
    """

    kv: QuantizedKV  # None before the first tokens

    def __init__(self, padding: Tensor | None, options: QuantizeOptions) -> None:
        self.options = options
        super().__init__(padding)

    @property
    def nbytes(self) -> int:
        return 0 if self.kv is None else self.kv.nbytes + self.ring.page_table.nbytes

    def _start(self, key: Tensor, value: Tensor) -> None:
        group, residual = self.options.group, self.options.residual
        first = ContiguousKV(*(x[:, :1].expand(-1, group + residual, -1, -1) for x in (key, value)))
        self._use(grown(quantize_kv(first, **self.options._asdict()), self._capacity_for(max(self.rows))))
        self.kv.lengths.copy_(torch.tensor(self.rows))
        self._store(key, value, 0, max(self.rows))

    def _extend(self, key: Tensor, value: Tensor) -> QuantizedKV | list[Tensor]:
        new, equal = key.shape[1], len({*self.rows}) == 1
        past = self._past() if new > MAX_DECODE_QUERIES else None
        if max(self.rows) + new > self.kv.capacity:
            self._use(grown(self.kv, self._capacity_for(max(self.rows) + new)))
        before, after = ([self._quantized(row + more) for row in self.rows] for more in (0, new))
        if past is not None and equal:
            length, first = self.rows[0], before[0]
            tail = self.kv.tile(first, length)
            self.kv.lengths.add_(new)
            keys, values = (torch.cat(parts, 1) for parts in zip(tail, (key, value), strict=True))
            self._store(keys, values, first, length + new)
        elif new == 1 and equal:
            slot = self.rows[0] % self.kv.key_window.shape[1]
            self.kv.key_window[:, slot : slot + 1].copy_(key)
            self.kv.value_window[:, slot : slot + 1].copy_(value)
            self.kv.lengths.add_(1)
            if after > before:
                self._quantize_block(before[0])
        elif new == 1 and after == before:
            self.ring.append(key, value, validate=False)  # validation would refuse its repeated pages
        else:
            self.kv.append(key, value)
        self.rows = [row + new for row in self.rows]
        if past is None:
            return self.kv
        return [torch.cat([old, x], 1).transpose(1, 2) for old, x in zip(past, (key, value), strict=True)]

    def _quantized(self, length: int) -> int:
        """How many tokens of a row of this length are quantised."""
        return max(0, length - self.options.residual) // self.options.group * self.options.group

    def _capacity_for(self, length: int) -> int:
        """Tokens to allocate quantised values for: whole blocks."""
        return self._quantized(length + STEP)

    def _use(self, kv: QuantizedKV) -> None:
        """Use a cache, and its window as a ring: a paged cache with repeated pages."""
        self.kv = kv
        batch, slots, *_ = kv.key_window.shape
        blocks = slots // kv.group
        turns = torch.arange(-(-kv.capacity // kv.group), device=kv.device) % blocks
        table = torch.arange(batch, device=kv.device).unsqueeze(1) * blocks + turns
        key, value = (x.view(-1, kv.group, *x.shape[2:]) for x in (kv.key_window, kv.value_window))
        self.ring = PagedKV(key, value, table.int(), kv.lengths)

    def _store(self, key: Tensor, value: Tensor, first: int, length: int) -> None:
        """Store tokens `[B, n, Hkv, .]` from position `first` on, a block's first; the longest row has `length`."""
        kv = self.kv
        whole, step = self._quantized(length) - first, max(1, AT_A_TIME // kv.group) * kv.group
        for side, x in ((kv.key, key), (kv.value, value)):
            for start in range(0, whole, step):
                store_quantized(side, x[:, start : min(whole, start + step)], first + start)
        refill(kv, key, value, first)

    def _quantize_block(self, first: int) -> None:
        """Quantise the block of the window that begins at a position."""
        kv = self.kv
        slot = first % kv.key_window.shape[1]
        for side, window in ((kv.key, kv.key_window), (kv.value, kv.value_window)):
            store_quantized(side, window[:, slot : slot + kv.group], first)

    def _past(self) -> list[Tensor]:
        """Dequantised keys and values `[B, total, Hkv, .]` of all earlier columns; padding is 0."""
        length, before = max(self.rows), self.rows[0] + self.pads[0]
        valid = torch.arange(length, device=self.kv.device) < self.kv.lengths.unsqueeze(1)
        tokens = (torch.where(valid[:, :, None, None], x, 0.0) for x in self.kv.tile(0, length))
        return [rolled(F.pad(x, (0, 0, 0, 0, 0, before - length)), [-pad for pad in self.pads]) for x in tokens]

    def _drop(self, count: int) -> None:
        """Tokens that the window does not have any more are dequantised."""
        kv = self.kv
        first = min(self._quantized(row - count) for row in self.rows)
        tail = kv.tile(first, max(self.rows))
        kv.lengths.sub_(count)
        refill(kv, *tail, first)

    def _select(self, index: Tensor) -> None:
        self._use(grown(self.kv, self.kv.key.codes.shape[1], index))


def store_quantized(side: QuantizedTensor, x: Tensor, first: int) -> None:
    """Quantise tokens `[B, n, Hkv, .]`, whole blocks, and write them to the positions from `first` on."""
    new = quantize(x, side.format, side.dim, side.group, scale_dtype=side.scale.dtype)
    scale_first = first // side.group if side.dim == TOKENS else first
    pairs = [(side.codes.view(torch.uint8), new.codes.view(torch.uint8), first), (side.scale, new.scale, scale_first)]
    if side.zero is not None and new.zero is not None:
        pairs.append((side.zero, new.zero, scale_first))
    for store, values, at in pairs:
        store[:, at : at + values.shape[1]] = values


def refill(kv: QuantizedKV, key: Tensor, value: Tensor, first: int) -> None:
    """Fill the window of a cache, by its lengths, from tokens `[B, n, Hkv, .]` that begin at position `first`."""
    slots = kv.key_window.shape[1]
    start = quantized_lengths(kv.lengths, kv.residual, kv.group).unsqueeze(1)
    positions = start + (torch.arange(slots, device=kv.device) - start) % slots  # of each slot
    at = (positions - first).clamp(0, key.shape[1] - 1)
    row = torch.arange(kv.batch, device=kv.device).unsqueeze(1)
    kv.key_window.copy_(key[row, at])
    kv.value_window.copy_(value[row, at])


def grown(kv: QuantizedKV, tokens: int, rows: Tensor | None = None) -> QuantizedKV:
    """A copy with capacity for `tokens` quantised ones, or as many as there are; of these rows, in this order."""
    key, value = (_longer(side, tokens, rows) for side in (kv.key, kv.value))
    windows_and_lengths = (kv.key_window, kv.value_window, kv.lengths)
    key_window, value_window, lengths = (x.clone() if rows is None else x[rows] for x in windows_and_lengths)
    return QuantizedKV(key, value, key_window, value_window, lengths, kv.residual)


def _longer(side: QuantizedTensor, tokens: int, rows: Tensor | None) -> QuantizedTensor:
    """In the layout of `quantize`: values by heads, scales per token contiguous."""
    batch = side.codes.shape[0] if rows is None else len(rows)
    tokens = max(tokens, side.codes.shape[1])

    def grow(old: Tensor, length: int, tokens_inner: bool) -> Tensor:
        heads, last = old.shape[2:]
        plain = old.view(torch.uint8) if old.dtype.itemsize == 1 else old
        if tokens_inner:
            new = plain.new_zeros(batch, heads, last, length).permute(0, 3, 1, 2)
        else:
            new = plain.new_zeros(batch, heads, length, last).transpose(1, 2)
        new[:, : old.shape[1]] = plain if rows is None else plain[rows]
        return new.view(old.dtype)

    per_channel = side.dim == TOKENS
    of_scales = tokens // side.group if per_channel else tokens
    return replace(
        side,
        codes=grow(side.codes, tokens, False),
        scale=grow(side.scale, of_scales, not per_channel),
        zero=None if side.zero is None else grow(side.zero, of_scales, not per_channel),
    )
