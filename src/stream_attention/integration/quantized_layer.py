"""A cache layer in few bits, read as it is: nothing is turned back into numbers but in the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache_views import ContiguousKV, PagedKV, QuantizedKV
from ..cache_views.quantized import quantized_lengths
from ..cache_views.quantized_tensor import TOKENS, QuantizedTensor, quantize
from ..kvcache import quantize_kv
from .cache_layer import StreamLayer, rolled
from .placeholder import FEW

STEP = 256
"""Tokens by which a cache grows at least that is full."""
AT_A_TIME = 4096
"""Tokens of a row that are quantised together at most: what that takes in full precision is soon free again."""


class Coding(NamedTuple):
    """How numbers are coded, as `quantize_kv` takes it."""

    format: str
    group: int
    residual: int
    keys: str
    values: str


class QuantisedLayer(StreamLayer):
    """Holds every token, all but the latest in few bits (see `QuantizedKV`).

    The first tokens are attended to in full precision; more than `FEW` later ones see themselves in full precision and
    what was held before them out of codes; fewer see what is held, themselves included.

    A token that comes alone is copied into the window: keys, values and the length, or by one kernel where rows of a
    batch have different lengths. One in `group` completes a block, which is quantised by torch operations.
    """

    kv: QuantizedKV | None

    def __init__(self, padding: Tensor | None, coding: Coding) -> None:
        self.how = coding
        super().__init__(padding)

    @property
    def nbytes(self) -> int:
        return 0 if self.kv is None else self.kv.nbytes + self.ring.page_table.nbytes

    def _start(self, key: Tensor, value: Tensor) -> None:
        group, residual = self.how.group, self.how.residual
        first = ContiguousKV(*(x[:, :1].expand(-1, group + residual, -1, -1) for x in (key, value)))
        self._use(grown(quantize_kv(first, **self.how._asdict()), self._room_for(max(self.rows))))
        assert self.kv is not None
        self.kv.lengths.copy_(torch.tensor(self.rows))
        self._code(key, value, 0, max(self.rows))

    def _extend(self, key: Tensor, value: Tensor) -> list[Tensor]:
        new, equal = key.shape[1], len({*self.rows}) == 1
        assert self.kv is not None
        past = self._past() if new > FEW else None
        if max(self.rows) + new > self.kv.capacity:
            self._use(grown(self.kv, self._room_for(max(self.rows) + new)))
        before, after = ([self._coded(row + more) for row in self.rows] for more in (0, new))
        if past is not None and equal:
            length, first = self.rows[0], before[0]
            tail = self.kv.tile(first, length)
            self.kv.lengths.add_(new)
            keys, values = (torch.cat(parts, 1) for parts in zip(tail, (key, value), strict=True))
            self._code(keys, values, first, length + new)
        elif new == 1 and equal:
            slot = self.rows[0] % self.kv.key_window.shape[1]
            self.kv.key_window[:, slot : slot + 1].copy_(key)
            self.kv.value_window[:, slot : slot + 1].copy_(value)
            self.kv.lengths.add_(1)
            if after > before:
                self._code_block(before[0])
        elif new == 1 and after == before:
            self.ring.append(key, value, validate=False)  # it would refuse pages that come again
        else:
            self.kv.append(key, value)
        self.rows = [row + new for row in self.rows]
        if past is None:
            return self._hollow(self.kv)
        return [torch.cat([old, x], 1).transpose(1, 2) for old, x in zip(past, (key, value), strict=True)]

    def _coded(self, length: int) -> int:
        """How many of so many tokens are codes."""
        return max(0, length - self.how.residual) // self.how.group * self.how.group

    def _room_for(self, length: int) -> int:
        """Tokens to have codes for: whole blocks."""
        return self._coded(length + STEP)

    def _use(self, kv: QuantizedKV) -> None:
        """Take a cache, and its window for a cache in pages that is gone through again and again."""
        self.kv = kv
        batch, slots, *_ = kv.key_window.shape
        blocks = slots // kv.group
        turns = torch.arange(-(-kv.capacity // kv.group), device=kv.device) % blocks
        table = torch.arange(batch, device=kv.device).unsqueeze(1) * blocks + turns
        key, value = (x.view(-1, kv.group, *x.shape[2:]) for x in (kv.key_window, kv.value_window))
        self.ring = PagedKV(key, value, table.int(), kv.lengths)

    def _code(self, key: Tensor, value: Tensor, first: int, length: int) -> None:
        """Hold tokens `[B, n, Hkv, .]` from position `first` on, a block's first; the longest row ends at `length`."""
        kv = self.kv
        assert kv is not None
        whole, step = self._coded(length) - first, max(1, AT_A_TIME // kv.group) * kv.group
        for side, x in ((kv.key, key), (kv.value, value)):
            for start in range(0, whole, step):
                code(side, x[:, start : min(whole, start + step)], first + start)
        refill(kv, key, value, first)

    def _code_block(self, first: int) -> None:
        """Code the block of the window that begins at a position."""
        kv = self.kv
        assert kv is not None
        slot = first % kv.key_window.shape[1]
        for side, window in ((kv.key, kv.key_window), (kv.value, kv.value_window)):
            code(side, window[:, slot : slot + kv.group], first)

    def _past(self) -> list[Tensor]:
        """Keys and values `[B, seen, Hkv, .]` of all columns that were seen before; what stands at padding is 0."""
        assert self.kv is not None
        length, before = max(self.rows), self.rows[0] + self.pads[0]
        held = torch.arange(length, device=self.kv.device) < self.kv.lengths.unsqueeze(1)
        tokens = (torch.where(held[:, :, None, None], x, 0.0) for x in self.kv.tile(0, length))
        return [rolled(F.pad(x, (0, 0, 0, 0, 0, before - length)), [-pad for pad in self.pads]) for x in tokens]

    def _drop(self, count: int) -> None:
        """What the window does not have any more comes back out of codes."""
        kv = self.kv
        assert kv is not None
        first = min(self._coded(row - count) for row in self.rows)
        tail = kv.tile(first, max(self.rows))
        kv.lengths.sub_(count)
        refill(kv, *tail, first)

    def _select(self, index: Tensor) -> None:
        assert self.kv is not None
        self._use(grown(self.kv, self.kv.key.codes.shape[1], index))


def code(side: QuantizedTensor, x: Tensor, first: int) -> None:
    """Put tokens `[B, n, Hkv, .]`, whole blocks, as codes to the positions from `first` on."""
    made = quantize(x, side.format, side.dim, side.group, scale_dtype=side.scale.dtype)
    scale_first = first // side.group if side.dim == TOKENS else first
    for held, new, at in (
        (side.codes.view(torch.uint8), made.codes.view(torch.uint8), first),
        (side.scale, made.scale, scale_first),
        (side.zero, made.zero, scale_first),
    ):
        if held is not None and new is not None:
            held[:, at : at + new.shape[1]] = new


def refill(kv: QuantizedKV, key: Tensor, value: Tensor, first: int) -> None:
    """Fill the window of a cache, by its lengths, from tokens `[B, n, Hkv, .]` that begin at position `first`."""
    slots = kv.key_window.shape[1]
    start = quantized_lengths(kv.lengths, kv.residual, kv.group).unsqueeze(1)
    positions = start + (torch.arange(slots, device=kv.device) - start) % slots  # of what each slot holds
    at = (positions - first).clamp(0, key.shape[1] - 1)
    row = torch.arange(kv.batch, device=kv.device).unsqueeze(1)
    kv.key_window.copy_(key[row, at])
    kv.value_window.copy_(value[row, at])


def grown(kv: QuantizedKV, tokens: int, rows: Tensor | None = None) -> QuantizedKV:
    """A copy with codes for so many tokens, or as many as there are; of these rows, in this order."""
    key, value = (_longer(side, tokens, rows) for side in (kv.key, kv.value))
    windows_and_lengths = (kv.key_window, kv.value_window, kv.lengths)
    key_window, value_window, lengths = (x.clone() if rows is None else x[rows] for x in windows_and_lengths)
    return QuantizedKV(key, value, key_window, value_window, lengths, kv.residual)


def _longer(side: QuantizedTensor, tokens: int, rows: Tensor | None) -> QuantizedTensor:
    """Laid out as `quantize` lays out: codes by heads, scales per token side by side."""
    batch = side.codes.shape[0] if rows is None else len(rows)
    tokens = max(tokens, side.codes.shape[1])

    def made(old: Tensor, length: int, beside: bool) -> Tensor:
        heads, last = old.shape[2:]
        plain = old.view(torch.uint8) if old.dtype.itemsize == 1 else old
        if beside:
            new = plain.new_zeros(batch, heads, last, length).permute(0, 3, 1, 2)
        else:
            new = plain.new_zeros(batch, heads, length, last).transpose(1, 2)
        new[:, : old.shape[1]] = plain if rows is None else plain[rows]
        return new.view(old.dtype)

    per_channel = side.dim == TOKENS
    of_scales = tokens // side.group if per_channel else tokens
    return replace(
        side,
        codes=made(side.codes, tokens, False),
        scale=made(side.scale, of_scales, not per_channel),
        zero=None if side.zero is None else made(side.zero, of_scales, not per_channel),
    )
