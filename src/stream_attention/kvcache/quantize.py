"""Quantisation of caches: `quantize_kv`, and what the compressors use of `kv_layouts.quantized_tensor`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from ..base.kv_layouts import ContiguousKV, PagedKV, QuantizedKV
from ..base.kv_layouts.checks import should_validate
from ..base.kv_layouts.quantized import FORMATS, check_blocks, quantized_lengths, window_slots
from ..base.kv_layouts.quantized_tensor import BITS, CHANNELS, SYMMETRIC, TOKENS, QuantizedTensor, quantize
from ..base.kv_layouts.write import places, take

__all__ = ["ALONG", "BITS", "CHANNELS", "TOKENS", "QuantizedTensor", "quantize", "quantize_kv", "quantized_nbytes"]

ALONG = {"channel": TOKENS, "token": CHANNELS}
"""The granularity of a scale, and the dim of its group."""


def quantized_nbytes(x: Tensor, format: str, dim: int, group: int) -> int:
    """Bytes of `quantize(x, ...)`."""
    groups = -(-x.shape[dim] // group)
    scales = x.nbytes // max(1, x.shape[dim]) * groups
    return x.numel() * BITS[format] // 8 + scales * (1 if format in SYMMETRIC else 2)


@torch.no_grad()
def quantize_kv(
    cache: ContiguousKV | PagedKV,
    format: str,
    *,
    group: int = 64,
    residual: int = 128,
    keys: str = "channel",
    values: str = "token",
    scale_dtype: torch.dtype | None = None,
    validate: bool | None = None,
) -> QuantizedKV:
    """A quantised copy of a cache, to decode from and to append to.

    Args:
        cache: what to copy. The copy of a paged cache is paged, and both read the same page table.
        format: "fp8" (e4m3), "int8" or "int4".
        group: elements that share a scale: tokens of a channel, or channels of a token. Also how many tokens are
            quantised together in either case. A divisor of the page size for scales per channel.
        residual: the latest tokens of a row, that stay in full precision; up to `group - 1` more do until their block
            is complete.
        keys, values: "channel", a scale for each channel of a block, or "token".
        scale_dtype: of scales and zeros: float16, bfloat16 or float32; None: float16 for a 16-bit cache, else float32.
            With float16, values beyond about 65000 are clamped. A GPU's kernel reads float16.
        validate: True: refuse a length out of range, and a missing page that the latest tokens need, which the copy
            reads as NaN otherwise. None: on a CPU; on a GPU that is a synchronisation.

    Does not synchronise by default. Values beyond a row's length are ignored.

    >>> cache = ContiguousKV(*torch.randn(2, 1, 1024, 8, 128).half())
    >>> small = quantize_kv(cache, "int4")
    >>> cache.nbytes, small.nbytes
    (4194304, 1818628)
    """
    if not isinstance(cache, (ContiguousKV, PagedKV)):
        refuse("cache", "a ContiguousKV or a PagedKV", type(cache).__name__, error=TypeError)
    if format not in FORMATS:
        refuse("format", f"one of {', '.join(FORMATS)}", repr(format))
    check_int("group", group, 1)
    check_int("residual", residual, 0)
    check_granularity(keys, values)
    if scale_dtype not in (None, torch.float16, torch.bfloat16, torch.float32):
        refuse("scale_dtype", "float16, bfloat16, float32 or None", scale_dtype)
    if scale_dtype is None:
        scale_dtype = torch.float16 if cache.dtype.itemsize == 2 else torch.float32
    if isinstance(cache, PagedKV):
        check_blocks(group, cache.page, "channel" in (keys, values))
        stores, table, lengths = (cache.key_pages, cache.value_pages), cache.page_table, cache.lengths.clone()
    else:
        stores, table = (cache.key, cache.value), None
        lengths = torch.full((cache.batch,), cache.capacity, dtype=torch.int32, device=cache.device)
        if cache.lengths is not None:
            lengths.copy_(cache.lengths)
    slots = window_slots(residual, group)
    start = quantized_lengths(lengths, residual, group)
    if cache.lengths is not None and should_validate(validate, cache.lengths):
        cache.validate(first=start)
    start = start.unsqueeze(1)
    positions = start + (torch.arange(slots, device=cache.device) - start) % slots  # of each slot
    whole = None if table is not None else max(0, cache.capacity - residual) // group * group
    (key, key_window), (value, value_window) = (
        (quantize(store[:, :whole], format, ALONG[per], group, scale_dtype=scale_dtype), _at(store, positions, table))
        for store, per in zip(stores, (keys, values), strict=True)
    )
    return QuantizedKV(key, value, key_window, value_window, lengths, residual, table)


def check_granularity(keys: str, values: str) -> None:
    for side, per in (("keys", keys), ("values", values)):
        if per not in ALONG:
            refuse(side, '"channel" or "token"', repr(per))


def _at(store: Tensor, positions: Tensor, page_table: Tensor | None) -> Tensor:
    """The tokens of each row at its positions `[B, n]`; undefined at positions that it does not have."""
    if store.shape[1] == 0:
        return store.new_zeros(*positions.shape, *store.shape[2:])
    return take(store, places(positions, store, page_table))
