"""How tokens are written to a cache: the slot of a position, rotary embedding, and masked writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import refuse
from ..fp8_layout import E4M3, LARGEST
from .checks import floating, tensor


class Rotary(NamedTuple):
    """Rotary embedding of new keys: tables by position, one column per pair of channels.

    With R = 2 * columns, pair c of a key at position p is rotated by the angle with cosine `cos[p, c]` and sine
    `sin[p, c]`: `(x, y) -> (x cos - y sin, y cos + x sin)`. A pair is channels `(c, c + R/2)`, or `(2c, 2c + 1)` where
    `interleaved`. Channels from R on are not rotated. The arithmetic is in fp32 at least, rounded once.
    """

    cos: Tensor  # [max_pos, R/2]
    sin: Tensor
    interleaved: bool = False


class Places(NamedTuple):
    """Indices of tokens in a store `[I, J, ...]`: always valid, but those of tokens that are not `real` are masked."""

    i: Tensor  # int64 [B, n]: the row, or the page
    j: Tensor  # int64 [B, n]: the slot in it
    real: Tensor  # bool [B, n]


def places(positions: Tensor, store: Tensor, page_table: Tensor | None) -> Places:
    """The places of `positions` int64 `[B, n]` in a store of rows `[B, T, ...]`, or of pages `[P, page, ...]`."""
    count, slots = store.shape[:2]
    if page_table is None:
        i = torch.arange(count, device=store.device).unsqueeze(1).expand_as(positions)
        real = (positions >= 0) & (positions < slots)
        return Places(i, positions.clamp(0, max(0, slots - 1)), real)
    columns = page_table.shape[1]
    column = torch.div(positions, slots, rounding_mode="floor")
    entry = page_table.gather(1, column.clamp(0, columns - 1)).long()
    real = (column >= 0) & (column < columns) & (entry >= 0) & (entry < count)
    return Places(entry.clamp(0, count - 1), positions.remainder(slots), real)


def slot_places(slots: Tensor, store: Tensor) -> Places:
    """The places of `slots` int `[N]`, as one row, in pages `[P, page, ...]`: slot s is token `s % page` of page
    `s // page`."""
    count, page = store.shape[:2]
    slots = slots.long().unsqueeze(0)
    real = (slots >= 0) & (slots < count * page)
    slots = slots.masked_fill(~real, 0)
    return Places(torch.div(slots, page, rounding_mode="floor"), slots.remainder(page), real)


def take(store: Tensor, where: Places) -> Tensor:
    """The values at places, `[B, n, ...]`; NaN where they are not real, never values of another row."""
    return torch.where(where.real[:, :, None, None], store[where.i, where.j], torch.nan)


def put(store: Tensor, where: Places, new: Tensor) -> None:
    """`store[i, j] = new` at real places; `new` is `[B, n, ...]`.

    A write cannot be omitted without a synchronisation, so one that is not real repeats one that is; where none is, it
    writes back the old value. Writes to the same place have the same value.
    """
    if store.numel() == 0 or new.numel() == 0:
        return
    if store.dtype.itemsize == 1:  # fp8 knows neither where nor index_put_
        store, new = store.view(torch.uint8), new.view(torch.uint8)
    i, j, real = (x.flatten() for x in where)
    new = new.flatten(0, 1)
    first = real.int().argmax(keepdim=True)
    i, j = (torch.where(real, x, x.index_select(0, first)) for x in (i, j))
    spare = torch.where(
        real.index_select(0, first)[:, None, None],
        new.index_select(0, first),
        store[i.index_select(0, first), j.index_select(0, first)],
    )
    store.index_put_((i, j), torch.where(real[:, None, None], new, spare))


def as_e4m3(new: Tensor, scale: Tensor | float) -> Tensor:
    """`new` `[N, Hkv, D]` / scale, fp32 `[]` or `[Hkv]`, rounded to e4m3 and saturated."""
    if not isinstance(scale, Tensor):  # by which a GPU would divide by multiplying with its inverse
        scale = new.new_full((), scale, dtype=torch.float32)
    return (new.float() / scale.reshape(-1, 1)).clamp(-LARGEST, LARGEST).to(E4M3)


def rotate(key: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """key `[B, n, Hkv, D]` rotated by `positions` `[B, n]`; a position beyond the table uses its last row."""
    longest, pairs = rotary.cos.shape
    at = positions.clamp(0, longest - 1)
    wide = torch.promote_types(key.dtype, torch.float32)
    cos, sin = (table[at].to(wide).unsqueeze(2) for table in rotary[:2])  # [B, n, 1, pairs]
    head, rest = key[..., : 2 * pairs].to(wide), key[..., 2 * pairs :]
    x, y = head.unflatten(-1, (pairs, 2)).unbind(-1) if rotary.interleaved else head.chunk(2, -1)
    rotated = (x * cos - y * sin, y * cos + x * sin)
    head = torch.stack(rotated, -1).flatten(-2) if rotary.interleaved else torch.cat(rotated, -1)
    return torch.cat([head.to(key.dtype), rest], -1)


def check_new(
    key: Tensor, value: Tensor, rotary: Rotary | None, store: Tensor, shape: tuple[int, int, int, int]
) -> None:
    """Check tokens for a cache of the dtype and device of `store` and of shape (B, Hkv, D, Dv)."""
    batch, heads, head_dim, value_dim = shape
    for name, given, dim in (("key", key, head_dim), ("value", value, value_dim)):
        floating(name, given, "[B, n, Hkv, D]", store.device)
        if given.dtype is not store.dtype:
            refuse(name, f"the cache's dtype {store.dtype}", given.dtype, error=TypeError)
        if (given.shape[0], *given.shape[2:]) != (batch, heads, dim):
            refuse(name, f"shape [{batch}, n, {heads}, {dim}]", list(given.shape))
    if key.shape[1] != value.shape[1]:
        refuse("value", f"as many tokens as key, {key.shape[1]}", value.shape[1])
    if rotary is None:
        return
    if not isinstance(rotary, Rotary):
        refuse("rotary", "a Rotary(cos, sin, interleaved) or None", type(rotary).__name__, error=TypeError)
    for name, table in (("rotary.cos", rotary.cos), ("rotary.sin", rotary.sin)):
        tensor(name, table, store.device)
        if not table.dtype.is_floating_point:
            refuse(name, "a floating dtype", table.dtype, error=TypeError)
        if table.dim() != 2 or table.shape != rotary.cos.shape or min(table.shape) < 1:
            refuse(name, "shape [max_pos, R/2], the same for cos and sin", list(table.shape))
    if 2 * rotary.cos.shape[1] > head_dim:
        hint = "The table has one column per pair of channels: if its columns repeat, pass the first half."
        refuse("rotary.cos", f"at most D/2 = {head_dim // 2} columns", rotary.cos.shape[1], hint)
