"""Masks evaluated: at indices, as a dense tensor, and by the share of what is visible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.errors import refuse
from .bounds import keys_per_query, queries_per_key

if TYPE_CHECKING:
    from .mask import Mask, Sizes

STRIP = 2**22
"""How many scores are evaluated at a time: a few MB."""

Index = int | Tensor


def visible(mask: Mask, b: Index, h: Index, i: Index, j: Index, q_len: int, k_len: int) -> Tensor:
    """Whether query i sees key j, bool of the shape to which the indices broadcast."""
    mask.check(q_len, k_len)
    places = [torch.as_tensor(index, device=_device(mask, b, h, i, j)) for index in (b, h, i, j)]
    shape = torch.broadcast_shapes(*(place.shape for place in places))
    b, h, i, j = places
    allowed: list[Tensor] = []
    ahead = j - i - (k_len - q_len)  # how far the key stands after the query
    if mask.left is not None:
        allowed.append(ahead >= -mask.left)
    if mask.right is not None:
        allowed.append(ahead <= mask.right)
    if mask.key_start is not None:
        allowed.append(j >= _at(mask.key_start, b, h, i))
    if mask.key_end is not None:
        allowed.append(j < _at(mask.key_end, b, h, i))
    label = i if mask.query_label is None else _at(mask.query_label, b, h, i)
    if mask.query_start is not None:
        allowed.append(label >= _at(mask.query_start, b, h, j))
    if mask.query_end is not None:
        allowed.append(label < _at(mask.query_end, b, h, j))
    if mask.dense is not None:
        allowed.append(_at(mask.dense, b, h, i, j))
    if mask.blocks is not None:
        table, rows, cols = mask.blocks
        allowed.append(_at(table, b, h, i // rows, j // cols))
    seen = torch.ones((), dtype=torch.bool, device=places[0].device)
    for condition in allowed:
        seen = seen & condition
    return seen.expand(shape)


def _device(mask: Mask, *indices: Index) -> torch.device | None:
    return next((index.device for index in indices if isinstance(index, Tensor)), mask.device)


def _at(tensor: Tensor, *indices: Tensor) -> Tensor:
    """The elements at these indices, 0 in dims of 1."""
    return tensor[tuple(0 if size == 1 else index for size, index in zip(tensor.shape, indices, strict=True))]


def lengths(mask: Mask, q_len: int | None, k_len: int | None) -> tuple[int, int]:
    """The sizes of the call: those given, or those that the tensors of the mask have."""
    q_len = mask.sizes.q_len if q_len is None else q_len
    k_len = mask.sizes.k_len if k_len is None else k_len
    if q_len is None:
        refuse("q_len", "the number of queries", None, f"The tensors of {mask!r} do not say it")
    if k_len is None:
        refuse("k_len", "the number of keys", None, f"The tensors of {mask!r} do not say it")
    mask.check(q_len, k_len)
    return q_len, k_len


def strips(mask: Mask, q_len: int, k_len: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, bool `[B or 1, H or 1, rows, Tk]`), so many rows at a time that memory stays small."""
    sizes: Sizes = mask.sizes
    device = mask.device
    batch, heads = sizes.batch, sizes.heads
    b = torch.arange(1 if batch is None else batch, device=device)[:, None, None, None]
    h = torch.arange(1 if heads is None else heads, device=device)[:, None, None]
    j = torch.arange(k_len, device=device)
    rows = max(1, STRIP // max(1, b.numel() * h.numel() * k_len))
    for first in range(0, q_len, rows):
        i = torch.arange(first, min(first + rows, q_len), device=device)[:, None]
        yield first, visible(mask, b, h, i, j, q_len, k_len)


def as_dense(mask: Mask, batch: int | None, heads: int | None, q_len: int | None, k_len: int | None) -> Tensor:
    """The mask as bool `[batch, heads, Tq, Tk]`; see `Mask.as_dense`."""
    q_len, k_len = lengths(mask, q_len, k_len)
    mask.check(q_len, k_len, batch, heads)
    known = [1 if size is None else size for size in mask.sizes[:2]]
    whole = torch.empty(*known, q_len, k_len, dtype=torch.bool, device=mask.device)
    for first, strip in strips(mask, q_len, k_len):
        whole[:, :, first : first + strip.shape[2]] = strip
    wanted = [size if asked is None else asked for size, asked in zip(known, (batch, heads), strict=True)]
    return whole.expand(*wanted, q_len, k_len)


def density(mask: Mask, batch: int | None, heads: int | None, q_len: int | None, k_len: int | None) -> float:
    """The share of scores that are visible; see `Mask.density`."""
    q_len, k_len = lengths(mask, q_len, k_len)
    mask.check(q_len, k_len, batch, heads)
    per_query = mask.key_start is not None or mask.key_end is not None
    per_key = mask.query_start is not None or mask.query_end is not None
    if mask.dense is not None or mask.blocks is not None or mask.query_label is not None or (per_query and per_key):
        seen = total = 0
        for _, strip in strips(mask, q_len, k_len):
            seen += int(strip.sum())
            total += strip.numel()
        return seen / total if total else 0.0
    start, end = (queries_per_key if per_key else keys_per_query)(mask, q_len, k_len)
    total = start.numel() * (q_len if per_key else k_len)
    return int((end - start).clamp_min(0).sum()) / total if total else 0.0
