"""Checks of what a cache is made of and is given; none but the last two reads a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import refuse
from .codes import QuantizedTensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensor(name: str, given: Any, device: torch.device | None = None) -> None:
    if not isinstance(given, Tensor):
        refuse(name, "a torch.Tensor", type(given).__name__, error=TypeError)
    if device is not None and given.device != device:
        refuse(name, f"the cache's device {device}", given.device)
    if given.is_neg():
        refuse(name, "a tensor of its own numbers", "a negated view", "Call .resolve_neg() on it first.")


def floating(name: str, given: Any, shape: str, device: torch.device | None = None) -> None:
    """A tensor of four dims, at least one head and one head dim, in a dtype of attention."""
    if isinstance(given, QuantizedTensor):
        hint = (
            "compressor.decompress() makes them; to decode from codes, quantize_kv(ContiguousKV(key, value), format)."
        )
        refuse(name, "a torch.Tensor", "QuantizedTensor", hint, TypeError)
    tensor(name, given, device)
    if given.dtype not in DTYPES:
        refuse(name, "dtype float16, bfloat16, float32 or float64", given.dtype, error=TypeError)
    if given.dim() != 4 or min(given.shape[2:]) < 1:
        refuse(name, f"shape {shape}, at least one head and one head dim", list(given.shape))
    if given.stride(-1) != 1 and given.shape[-1] > 1 and given.numel() > 0:
        refuse(name, "a contiguous last dim", f"strides {given.stride()}", "Call .contiguous() on it first.")


def beside(name: str, given: Tensor, like: Tensor, other: str) -> None:
    """Values beside keys: one dtype, and all dims but the last the same."""
    if given.dtype is not like.dtype:
        refuse(name, f"the dtype of {other}, {like.dtype}", given.dtype, error=TypeError)
    if given.shape[:3] != like.shape[:3]:
        refuse(name, f"shape {list(like.shape[:3])} + [Dv], as {other}", list(given.shape))


def int32(name: str, given: Any, shape: tuple[int | None, ...], legend: str, device: torch.device) -> None:
    """An int32 tensor of this shape; None is any size."""
    tensor(name, given, device)
    if given.dtype is not torch.int32:
        refuse(name, "dtype torch.int32", given.dtype, f"Call {name}.int().", TypeError)
    same = given.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, given.shape, strict=True))
    if not same:
        refuse(name, f"shape {legend}", list(given.shape))


def span(start: Any, stop: Any, capacity: int) -> None:
    for name, given in (("start", start), ("stop", stop)):
        if isinstance(given, bool) or not isinstance(given, int):
            refuse(name, "an int", f"{given!r} ({type(given).__name__})", error=TypeError)
    if not 0 <= start <= stop <= capacity:
        refuse("start and stop", f"0 <= start <= stop <= the capacity {capacity}", f"{start} and {stop}")


def count(name: str, given: Any, least: int) -> int:
    """An int of at least `least`."""
    if isinstance(given, bool) or not isinstance(given, int):
        refuse(name, "an int", f"{given!r} ({type(given).__name__})", error=TypeError)
    if given < least:
        refuse(name, f"at least {least}", given)
    return given


def page_shape(name: str, given: Tensor, page_table: Tensor) -> None:
    """Pages that there are, of a size that there is, and a table that names some."""
    if page_table.shape[1] < 1:
        refuse("page_table", "at least one page for each row", list(page_table.shape), "The layout is [B, max_pages].")
    if given.shape[0] < 1 or not 1 <= given.shape[1] <= 256:
        refuse(name, "at least one page, of 1 to 256 tokens", list(given.shape), "The layout is [P, page, Hkv, D].")


def room(lengths: Tensor, new: int, capacity: int, what: str = "the capacity") -> None:
    """Synchronises. Refuse lengths below 0, or that leave no room for `new` tokens more."""
    for row, length in enumerate(lengths.tolist()):
        if length < 0 or length + new > capacity:
            more = f", no room for {new} more" if new else ""
            refuse("lengths", f"from 0 to {what}, {capacity}", f"{length} in row {row}{more}")


def pages(page_table: Tensor, before: Tensor, after: Tensor, page: int, count: int) -> None:
    """Synchronises. Refuse an entry that the first `after[b]` positions of a row need and that is no page, or that the
    positions from `before[b]` on will be written to and that another place of the table has too."""
    seen: dict[int, tuple[str, bool]] = {}
    for row, (entries, first, needed) in enumerate(
        zip(page_table.tolist(), before.tolist(), after.tolist(), strict=True)
    ):
        for index, entry in enumerate(entries[: -(-needed // page)]):
            here, written = f"[{row}, {index}]", first < needed and index >= first // page
            if not 0 <= entry < count:
                refuse("page_table", f"pages from 0 to {count - 1}", f"{entry} at {here}")
            there, also_written = seen.setdefault(entry, (here, written))
            if there != here and (written or also_written):
                hint = "Pages may be shared to read, never to append."
                expected = "a page of its own wherever tokens are appended"
                refuse("page_table", expected, f"{entry} at {there} and {here}", hint)
