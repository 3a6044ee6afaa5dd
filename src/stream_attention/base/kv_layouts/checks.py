"""Checks of the tensors of a cache and of those appended to it; only `capacity` and `pages` read their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import check_int, refuse
from .quantized_tensor import QuantizedTensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HINT_TO_COPY = "Pass a copy: .clone(memory_format=torch.contiguous_format)."


def tensor(name: str, given: Any, device: torch.device | None = None) -> None:
    if not isinstance(given, Tensor):
        refuse(name, "a torch.Tensor", type(given).__name__, error=TypeError)
    if device is not None and given.device != device:
        refuse(name, f"the cache's device {device}", given.device)
    if not torch.compiler.is_compiling() and given.is_neg():
        refuse(name, "a materialised tensor", "a negated view", "Call .resolve_neg() on it first.")


def floating(
    name: str,
    given: Any,
    shape: str,
    device: torch.device | None = None,
    more: tuple[torch.dtype, ...] = (),
) -> None:
    """A tensor of four dims, at least one head and one head dim, in a dtype of attention, or in one `more`."""
    if isinstance(given, QuantizedTensor):
        hint = "Call compressor.decompress(), or make a quantised cache: quantize_kv(ContiguousKV(key, value), format)."
        refuse(name, "a torch.Tensor", "QuantizedTensor", hint, TypeError)
    tensor(name, given, device)
    if given.dtype not in DTYPES + more:
        names = [str(dtype).removeprefix("torch.") for dtype in DTYPES + more]
        hint = f"To read e4m3, pass {name}.view(torch.float8_e4m3fn)." if more and given.dtype is torch.uint8 else ""
        refuse(name, f"dtype {', '.join(names[:-1])} or {names[-1]}", given.dtype, hint, TypeError)
    if given.dim() != 4 or min(given.shape[2:]) < 1:
        refuse(name, f"shape {shape}, at least one head and one head dim", list(given.shape))
    if given.stride(-1) != 1 and given.shape[-1] > 1 and given.numel() > 0:
        refuse(name, "a contiguous last dim", f"strides {given.stride()}", "Call .contiguous() on it first.")


def stores(
    names: tuple[str, str],
    key: Tensor,
    value: Tensor,
    rows: str,
    more: tuple[torch.dtype, ...] = (),
) -> None:
    """Keys and values of a cache, `[{rows}, Hkv, D]` and Dv: one dtype, that of attention or one `more`, and all dims
    but the last the same."""
    of_keys, name = names
    floating(of_keys, key, f"[{rows}, Hkv, D]", more=more)
    floating(name, value, f"[{rows}, Hkv, Dv]", key.device, more)
    if value.dtype is not key.dtype:
        refuse(name, f"the dtype of {of_keys}, {key.dtype}", value.dtype, error=TypeError)
    if value.shape[:3] != key.shape[:3]:
        refuse(name, f"shape {list(key.shape[:3])} + [Dv], as {of_keys}", list(value.shape))


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
        check_int(name, given)
    if not 0 <= start <= stop <= capacity:
        refuse("start and stop", f"0 <= start <= stop <= the capacity {capacity}", f"{start} and {stop}")


def page_shape(name: str, given: Tensor, page_table: Tensor) -> None:
    """At least one page, of a supported size, and a table with at least one column."""
    if page_table.shape[1] < 1:
        refuse("page_table", "at least one page for each row", list(page_table.shape), "The layout is [B, max_pages].")
    if given.shape[0] < 1 or not 1 <= given.shape[1] <= 256:
        refuse(name, "at least one page, of 1 to 256 tokens", list(given.shape), "The layout is [P, page, Hkv, D].")


def capacity(lengths: Tensor, new: int, most: int, what: str = "the capacity") -> None:
    """Synchronises. Refuse lengths below 0, or that exceed `most` with `new` more tokens."""
    for row, length in enumerate(lengths.tolist()):
        if length < 0 or length + new > most:
            more = f", with {new} to append" if new else ""
            refuse("lengths", f"from 0 to {what}, {most}", f"{length} in row {row}{more}")


def should_validate(validate: Any, lengths: Tensor) -> bool:
    """Whether to read the values of lengths and pages: `validate`; None: on a CPU, where that does not synchronise."""
    if validate is None:
        return type(lengths) is Tensor and lengths.is_cpu and not torch.compiler.is_compiling()
    if not isinstance(validate, bool):
        refuse("validate", "True, False or None", f"{validate!r} ({type(validate).__name__})", error=TypeError)
    return validate


def writable(name: str, given: Tensor) -> None:
    """A tensor that can be written to in place, without overlapping elements."""
    if 0 in given.stride() and has_shared_places(given):
        refuse(name, "no overlapping elements", f"an expanded tensor, strides {given.stride()}", HINT_TO_COPY)
    if not torch.compiler.is_compiling() and given.is_inference() and not torch.is_inference_mode_enabled():
        refuse(name, "a writable tensor", "one made under torch.inference_mode()", HINT_TO_COPY)


def has_shared_places(given: Tensor) -> bool:
    """Whether it is expanded, so that elements overlap in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(given.stride(), given.shape, strict=True))


def extents(tensors: tuple[Any, ...]) -> tuple[int, ...]:
    """In bytes, of the tensors of `write_kv`: from the first element to behind the last, of key, value, and the pages
    of both; and a line of each page's."""
    key, value, *stores, slots, _, _ = tensors
    shapes = *[(slots.shape[0], *t.shape[1:]) for t in (key, value)], *[t.shape for t in stores]
    found = []
    for t, shape in zip((key, value, *stores), shapes, strict=True):
        last = sum([(size - 1) * stride for size, stride in zip(shape, t.stride(), strict=True)])
        found.append(t.element_size() * (1 + last))
    return *found, *[t.element_size() * t.shape[-1] for t in stores]


def overlap(tensors: tuple[Any, ...], extents: tuple[int, ...]) -> tuple[str, str] | None:
    """Which two of the tensors of `write_kv`, if any, share memory. Lines of keys and of values may lie in turns: of
    their pages only the first lines are compared."""
    key, value, keys, values = [t.data_ptr() for t in tensors[:4]]
    of_key, of_value, of_keys, of_values, key_line, value_line = extents
    if keys < key + of_key and key < keys + of_keys:
        return "key", "key_pages"
    if values < key + of_key and key < values + of_values:
        return "key", "value_pages"
    if keys < value + of_value and value < keys + of_keys:
        return "value", "key_pages"
    if values < value + of_value and value < values + of_values:
        return "value", "value_pages"
    if keys < values + value_line and values < keys + key_line:
        return "value_pages", "key_pages"
    return None


def pages(page_table: Tensor, before: Tensor, after: Tensor, page: int, count: int, first: Tensor | None) -> None:
    """Synchronises. Refuse an entry that is not a page but is needed by positions of a row from `first[b]` (None: 0),
    or from `before[b]` if that is less, to `after[b]`; and a page to which positions from `before[b]` on will be
    written and which is elsewhere in the table too."""
    column = torch.arange(page_table.shape[1], device=page_table.device)
    in_use = column < ((after + page - 1) // page).unsqueeze(1)

    def from_on(position: Tensor) -> Tensor:
        """Entries of the positions from here to `after`."""
        return in_use & (column >= (position // page).unsqueeze(1)) & (position < after).unsqueeze(1)

    exists = (page_table >= 0) & (page_table < count)
    missing = (in_use if first is None else from_on(torch.minimum(first, before))) & ~exists
    if missing.any():
        row, index = missing.nonzero()[0].tolist()
        refuse("page_table", f"pages from 0 to {count - 1}", f"{int(page_table[row, index])} at [{row}, {index}]")
    written = from_on(before)
    if not written.any():
        return
    uses = torch.bincount(page_table[in_use & exists], minlength=count)
    shared = written & (uses[page_table.clamp(0, count - 1).long()] > 1)
    if shared.any():
        here = shared.nonzero()[0].tolist()
        entry = int(page_table[here[0], here[1]])
        places = (in_use & (page_table == entry)).nonzero().tolist()
        there, here = sorted((here, next(place for place in places if place != here)))
        hint = "Shared pages are read-only."
        expected = "exclusive pages for the tokens to append"
        refuse("page_table", expected, f"page {entry} at {there} and {here}", hint)
