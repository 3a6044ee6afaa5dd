"""Masks from their parts, given as tensors: intervals, tables of blocks, dense masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from .mask import Blocks, Mask


def intervals(
    *,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    query_start: Tensor | None = None,
    query_end: Tensor | None = None,
    query_label: Tensor | None = None,
) -> Mask:
    """Query i sees key j where `key_start[i] <= j < key_end[i]` and `query_start[j] <= x < query_end[j]`.

    x is `query_label[i]`, or i without labels, and a bound that is None is unbounded. Tensors are of integers,
    `[B or 1, Hq or 1, T]` or `[T]`, T their number of queries (key_start, key_end, query_label) or of keys.

    Raises:
        ValueError, TypeError: a dtype that is no integer, int64 beside labels, or shapes that do not fit each other.

    >>> mask = intervals(key_start=torch.tensor([0, 0, 2]), key_end=torch.tensor([1, 2, 3]))
    >>> mask.as_dense(k_len=3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    if query_label is not None:
        for name, labels in (("query_label", query_label), ("query_start", query_start), ("query_end", query_end)):
            if isinstance(labels, Tensor) and labels.dtype is torch.int64:
                hint = f"Call {name}.int() if it holds them; documents(ids) takes ids of any size."
                refuse(name, "labels of dtype torch.int32", labels.dtype, hint, TypeError)
    return Mask(
        key_start=_row_of_ints("key_start", key_start),
        key_end=_row_of_ints("key_end", key_end),
        query_start=_row_of_ints("query_start", query_start),
        query_end=_row_of_ints("query_end", query_end),
        query_label=_row_of_ints("query_label", query_label),
    )


def blocks(table: Tensor, size: int | tuple[int, int]) -> Mask:
    """Query i sees key j where `table[b, h, i // rows, j // cols]` holds: whole blocks, listed and never expanded.

    `table` is bool `[B or 1, Hq or 1, ceil(Tq / rows), ceil(Tk / cols)]`, or the last two dims of that. `size` is
    (rows, cols), or one int for both.

    Raises:
        ValueError, TypeError: a table of another dtype or shape, or a size below 1.

    >>> mask = blocks(torch.eye(2, dtype=torch.bool), 2)
    >>> mask.as_dense(q_len=3, k_len=4)[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]]
    """
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2:
        refuse("size", "an int, or a tuple (rows, cols)", size)
    rows, cols = (check_int("size", side, least=1) for side in sides)
    return Mask(blocks=Blocks(_of_four_dims("table", table), rows, cols))


def from_dense(mask: Tensor) -> Mask:
    """Query i sees key j where `mask[b, h, i, j]` holds, for what no other part can say.

    `mask` is bool, and broadcasts to `[B, Hq, Tq, Tk]` as that of `attention`. It is kept as it is, and read.

    Raises:
        ValueError, TypeError: another dtype, or more than four dims.

    >>> from_dense(torch.eye(3, dtype=torch.bool))
    Mask(dense of [1, 1, 3, 3])
    """
    return Mask(dense=_of_four_dims("mask", mask))


def _of_four_dims(name: str, tensor: Any) -> Tensor:
    """A bool tensor with dims of 1 before its own."""
    if not isinstance(tensor, Tensor):
        refuse(name, "a torch.Tensor", type(tensor).__name__, error=TypeError)
    if tensor.dtype is not torch.bool:
        refuse(name, "dtype torch.bool (True = attend)", tensor.dtype, error=TypeError)
    if not 2 <= tensor.dim() <= 4:
        refuse(name, "2 to 4 dims, the last of those of [B, Hq, ., .]", list(tensor.shape))
    return tensor if tensor.dim() == 4 else tensor[(None,) * (4 - tensor.dim())]


def _row_of_ints(name: str, tensor: Any) -> Tensor | None:
    """Integers as int32 `[B or 1, Hq or 1, T]`."""
    if tensor is None:
        return None
    is_integers(name, tensor)
    if tensor.dim() not in (1, 3):
        hint = f"One row for each batch entry: {name}[:, None]" if tensor.dim() == 2 else ""
        refuse(name, "shape [B or 1, Hq or 1, T], or [T]", list(tensor.shape), hint)
    return as_int32(tensor if tensor.dim() == 3 else tensor[None, None])


def is_integers(name: str, tensor: Any) -> None:
    """Refuse what is no tensor of integers."""
    if not isinstance(tensor, Tensor):
        refuse(name, "a torch.Tensor of integers", type(tensor).__name__, error=TypeError)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool:
        refuse(name, "a dtype of integers", tensor.dtype, error=TypeError)


def as_int32(tensor: Tensor) -> Tensor:
    """Bounds as int32. One that it does not hold is no smaller than every length, and is clamped."""
    if tensor.dtype is torch.int32:
        return tensor
    info = torch.iinfo(torch.int32)
    return (tensor.clamp(info.min, info.max) if tensor.dtype is torch.int64 else tensor).to(torch.int32)
