"""The dropout rule in torch, tile by tile. `reference.py` is its specification; this form is built for speed.

Whether element (b, h, i, j) is kept is a function of its position alone, so any tiling, backend and sharding draws the
same mask: two Philox words per row and per column (cheap: O(Tq + Tk)), one multiply-xorshift mix per element.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def dropout_words(seed: Tensor, first_stream: int, streams: int, index: Tensor, columns: bool) -> Tensor:
    """Word 0 of Philox4x32-10 per (b, h) stream and global row (or column) index: int32 `[streams, len(index)]`."""
    stream = torch.arange(first_stream, first_stream + streams, device=seed.device)
    counters = [
        (index & _LOW).expand(streams, -1),
        (2 * stream + columns).view(-1, 1).expand(-1, index.shape[0]) & _LOW,
        seed[1] & _LOW,
        (seed[1] >> 32) & _LOW,
    ]
    return _as_int32(_philox(counters, seed[0] & _LOW, (seed[0] >> 32) & _LOW))


def keep(rows: Tensor, columns: Tensor, dropout_p: float) -> Tensor:
    """Which elements of a tile survive: rows `[..., m, 1]` and columns `[..., 1, n]` of words to bool `[..., m, n]`."""
    x = rows ^ columns
    x ^= (x >> 16) & 0xFFFF
    x *= _wrap(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _wrap(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    x ^= _wrap(1 << 31)  # unsigned order as signed order
    return x >= _wrap(int(dropout_p * 2**32) ^ (1 << 31))


def _philox(counters: list[Tensor], key_low: Tensor, key_high: Tensor) -> Tensor:
    c0, c1, c2, c3 = counters
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key_low, low1, high0 ^ c3 ^ key_high, low0
        key_low = (key_low + 0x9E3779B9) & _LOW
        key_high = (key_high + 0xBB67AE85) & _LOW
    return c0


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32 bit product, in int64 without overflow."""
    low_part = (a & 0xFFFF) * b
    high_part = (a >> 16) * b + (low_part >> 16)
    return high_part >> 16, ((high_part << 16) | (low_part & 0xFFFF)) & _LOW


def _as_int32(word: Tensor) -> Tensor:
    return torch.where(word > 0x7FFFFFFF, word - (1 << 32), word).to(torch.int32)


def _wrap(word: int) -> int:
    return word - (1 << 32) if word > 0x7FFFFFFF else word
