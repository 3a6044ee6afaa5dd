"""What masks allow together, either of them, or not: `&`, `|` and `~`, where the result is a Mask again.

Bands, keys per query and queries per key are half-open intervals [start, end): a band one of ints, of the distance from
query to key; the others of int32 tensors, an element for each query or key. None is an end that is not bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import refuse

if TYPE_CHECKING:
    from .mask import Mask

_FAR = 2**31 - 1
"""The end of an interval of tensors that is not bounded, where a number is needed."""


class Interval(NamedTuple):
    start: Any  # an int, an int32 Tensor, or None
    end: Any


KINDS = {
    "band": ("left", "right"),
    "keys per query": ("key_start", "key_end"),
    "queries per key": ("query_start", "query_end", "query_label", "by_id"),
    "dense": ("dense",),
    "blocks": ("blocks",),
}
"""The parts of a mask, and their fields."""


def both(a: Mask, b: Mask) -> Mask:
    """What both masks allow."""
    _check_sizes("&", a, b)
    words = " & ".join(_inside(mask, "|") for mask in (a, b) if _kinds(mask))
    a, b = _rows_as_keys(a, b), _rows_as_keys(b, a)
    band = _band_fields(_met(_band(a), _band(b)))
    keys = _met(_keys(a), _keys(b))
    fields: dict[str, Any] = {**band, "key_start": keys.start, "key_end": keys.end, **_queries_of_both(a, b)}
    fields["dense"] = _bound(torch.logical_and, a.dense, b.dense)
    return replace(a, **fields, **_lengths_of_both(a, b), blocks=_blocks_of_both(a, b), words=words)


def either(a: Mask, b: Mask) -> Mask:
    """What either mask allows."""
    _check_sizes("|", a, b)
    differ = [kind for kind in KINDS if not _same(a, b, kind)]
    for mask, other in ((a, b), (b, a)):
        if all(_allows_more(mask, other, kind) for kind in differ):
            return replace(mask, **_lengths_of_both(a, b))
    words = f"{a} | {b}"
    if len(differ) == 1:
        joined = _JOINS[differ[0]](a, b)
        if joined is not None:
            return replace(a, **joined, **_lengths_of_both(a, b), words=words)
    sizes = _joint_sizes(a, b)
    if (a.dense is not None or b.dense is not None) and None not in (sizes["q_len"], sizes["k_len"]):
        return _only(a, dense=a.as_dense(**sizes) | b.as_dense(**sizes), words=words)
    hint = "Take from_dense(a.as_dense(...) | b.as_dense(...)), or from_function"
    if differ == ["band", "keys per query"]:
        hint = "Turn bands into keys per query first, by as_intervals(q_len, k_len)"
    refuse("|", "masks that differ in one part, whose union is one interval or table", f"{a!r} and {b!r}", hint)


def negated(mask: Mask) -> Mask:
    """What the mask does not allow."""
    kinds = _kinds(mask)
    words = f"~{mask}" if kinds and " " not in str(mask) else f"~({mask})"
    if not kinds:
        return replace(mask, **_band_fields(Interval(0, 0)), words="nothing visible")
    if mask.dense is not None and len(kinds) == 1:
        return _only(mask, dense=~mask.dense, words=words)
    if mask.dense is not None and None not in mask.sizes[2:]:
        return _only(mask, dense=~mask.as_dense(), words=words)
    if mask.blocks is not None and len(kinds) == 1:
        return _only(mask, blocks=mask.blocks._replace(table=~mask.blocks.table), words=words)
    if kinds == ["band"]:
        band = _band(mask)
        if band.start is not None and band.end is not None and band.start >= band.end:
            return _only(mask)
        rest = _rest(band)
        if rest is not None:
            return _only(mask, **_band_fields(rest), words=words)
    if kinds == ["keys per query"]:
        rest = _rest(_keys(mask))
        if rest is not None:
            return _only(mask, key_start=rest.start, key_end=rest.end, words=words)
    if kinds == ["queries per key"]:
        rest = _rest(_queries(mask))
        if rest is not None:
            return _only(mask, query_start=rest.start, query_end=rest.end, query_label=mask.query_label, words=words)
    expected = "a mask of one part, bounded on one side, dense or of blocks: the rest of others is several intervals"
    refuse("~", expected, repr(mask), "Take from_dense(~mask.as_dense(...)), or from_function")


# Parts of masks


def _band(mask: Mask) -> Interval:
    return Interval(None if mask.left is None else -mask.left, None if mask.right is None else mask.right + 1)


def _band_fields(band: Interval) -> dict[str, Any]:
    return {"left": None if band.start is None else -band.start, "right": None if band.end is None else band.end - 1}


def _keys(mask: Mask) -> Interval:
    return Interval(mask.key_start, mask.key_end)


def _queries(mask: Mask) -> Interval:
    return Interval(mask.query_start, mask.query_end)


def _fields_of(mask: Mask, kind: str) -> tuple[Any, ...]:
    """The fields of one part, tensors by identity."""
    given = [getattr(mask, name) for name in KINDS[kind]]
    return tuple(id(one) if isinstance(one, Tensor) else one for one in given)


def _same(a: Mask, b: Mask, kind: str) -> bool:
    if kind == "blocks" and a.blocks is not None and b.blocks is not None:
        return a.blocks.table is b.blocks.table and a.blocks[1:] == b.blocks[1:]
    return _fields_of(a, kind) == _fields_of(b, kind)


def _kinds(mask: Mask) -> list[str]:
    """The parts that mask anything."""
    return [kind for kind, fields in KINDS.items() if any(getattr(mask, name) is not None for name in fields[:2])]


def _only(mask: Mask, **fields: Any) -> Mask:
    """A mask of these fields and no other part of `mask`."""
    nothing: dict[str, Any] = dict.fromkeys(name for names in KINDS.values() for name in names)
    return replace(mask, **{**nothing, "by_id": False, "words": "", **fields})


def _inside(mask: Mask, operator: str) -> str:
    return f"({mask})" if f" {operator} " in str(mask) else str(mask)


def _check_sizes(operator: str, a: Mask, b: Mask) -> None:
    for name, one, other in zip(a.sizes._fields, a.sizes, b.sizes, strict=True):
        if one is not None and other is not None and one != other:
            refuse(operator, f"masks of one {name}", f"{one} in {a!r} and {other} in {b!r}")
    if a.device is not None and b.device is not None and a.device != b.device:
        refuse(operator, "masks on one device", f"{a.device} and {b.device}", "Move one: mask.to(device)")


def _lengths_of_both(a: Mask, b: Mask) -> dict[str, Any]:
    return {"q_len": b.q_len if a.q_len is None else a.q_len, "k_len": b.k_len if a.k_len is None else a.k_len}


def _joint_sizes(a: Mask, b: Mask) -> dict[str, int | None]:
    return {
        name: other if one is None else one for name, one, other in zip(a.sizes._fields, a.sizes, b.sizes, strict=True)
    }


# Intervals


def _met(a: Interval, b: Interval) -> Interval:
    """[start, end) of what is in both."""
    return Interval(_bound(_greater, a.start, b.start), _bound(_less, a.end, b.end))


def _bound(choose: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    if one is None or one is other:
        return other
    return one if other is None else choose(one, other)


def _greater(one: Any, other: Any) -> Any:
    return max(one, other) if isinstance(one, int) else torch.maximum(one, other)


def _less(one: Any, other: Any) -> Any:
    return min(one, other) if isinstance(one, int) else torch.minimum(one, other)


def _rest(interval: Interval) -> Interval | None:
    """What is outside of an interval that is bounded on one side."""
    start, end = interval
    if start is not None and end is not None:
        return None
    return Interval(end, start)


def _joined(a: Interval, b: Interval, least: int) -> Interval | None:
    """[start, end) of what is in either, where that is one interval; what is below `least` does not exist.

    Intervals that share an end need no look at their values. Others do, which waits for the device.
    """
    start = None if a.start is None or b.start is None else _bound(_less, a.start, b.start)
    end = None if a.end is None or b.end is None else _bound(_greater, a.end, b.end)
    if _alike(a.start, b.start) or _alike(a.end, b.end):
        return Interval(start, end)
    if isinstance(a.start if a.start is not None else a.end, int):
        return _joined_numbers(a, b, Interval(start, end))
    first, second = (_filled(one, least) for one in (a, b))
    is_empty, other_is_empty = first.start >= first.end, second.start >= second.end
    touch = (first.start <= second.end) & (second.start <= first.end)
    if not bool((touch | is_empty | other_is_empty).all()):
        return None
    low = torch.where(
        is_empty, second.start, torch.where(other_is_empty, first.start, _less(first.start, second.start))
    )
    high = torch.where(is_empty, second.end, torch.where(other_is_empty, first.end, _greater(first.end, second.end)))
    return Interval(low, high)  # where an unbounded interval is empty, the bounds are those of the other


def _joined_numbers(a: Interval, b: Interval, span: Interval) -> Interval | None:
    for one, other in ((a, b), (b, a)):
        if one.start is not None and one.end is not None and one.start >= one.end:
            return other
    for one, other in ((a, b), (b, a)):
        if one.end is not None and other.start is not None and other.start > one.end:
            return None
    return span


def _alike(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def _filled(interval: Interval, least: int) -> Interval:
    start, end = interval
    if start is None:
        start = torch.full_like(end, least)
    return Interval(start, torch.full_like(start, _FAR) if end is None else end)


# Parts of two masks


def _allows_more(a: Mask, b: Mask, kind: str) -> bool:
    """Whether this part of `a` surely allows what that of `b` allows, as far as is seen without a look at tensors."""
    if kind not in _kinds(a):
        return True
    if kind != "band" or kind not in _kinds(b):
        return False
    met = _met(_band(a), _band(b))
    return met == _band(b)


def _join_bands(a: Mask, b: Mask) -> dict[str, Any] | None:
    joined = _joined(_band(a), _band(b), 0)
    return None if joined is None else _band_fields(joined)


def _join_keys(a: Mask, b: Mask) -> dict[str, Any] | None:
    joined = _joined(_keys(a), _keys(b), 0)
    return None if joined is None else {"key_start": joined.start, "key_end": joined.end}


def _join_queries(a: Mask, b: Mask) -> dict[str, Any] | None:
    if a.query_label is not b.query_label:
        return None
    least = 0 if a.query_label is None else -_FAR - 1
    joined = _joined(_queries(a), _queries(b), least)
    return None if joined is None else {"query_start": joined.start, "query_end": joined.end, "by_id": False}


def _join_dense(a: Mask, b: Mask) -> dict[str, Any] | None:
    if a.dense is None or b.dense is None:
        return None
    return {"dense": a.dense | b.dense}


def _join_blocks(a: Mask, b: Mask) -> dict[str, Any] | None:
    if a.blocks is None or b.blocks is None or a.blocks[1:] != b.blocks[1:]:
        return None
    return {"blocks": a.blocks._replace(table=a.blocks.table | b.blocks.table)}


_JOINS: dict[str, Callable[[Mask, Mask], dict[str, Any] | None]] = {
    "band": _join_bands,
    "keys per query": _join_keys,
    "queries per key": _join_queries,
    "dense": _join_dense,
    "blocks": _join_blocks,
}


def _blocks_of_both(a: Mask, b: Mask) -> Any:
    if a.blocks is None or b.blocks is None:
        return a.blocks if b.blocks is None else b.blocks
    if a.blocks[1:] != b.blocks[1:]:
        sizes = " and ".join(f"{rows} x {cols}" for _, rows, cols in (a.blocks, b.blocks))
        refuse("&", "tables of one block size", sizes, "Turn one into a dense mask: from_dense(mask.as_dense(...))")
    if a.blocks.table is b.blocks.table:
        return a.blocks
    return a.blocks._replace(table=a.blocks.table & b.blocks.table)


def _queries_of_both(a: Mask, b: Mask) -> dict[str, Any]:
    """The queries per key that both allow: intervals of one label, or two ids as one id of pairs."""
    for one, other in ((a, b), (b, a)):
        if "queries per key" not in _kinds(other):
            return {name: getattr(one, name) for name in KINDS["queries per key"]}
    if _same(a, b, "queries per key"):
        return {}
    if a.query_label is b.query_label:
        met = _met(_queries(a), _queries(b))
        return {"query_start": met.start, "query_end": met.end, "by_id": False}
    if a.by_id and b.by_id:
        assert a.query_label is not None and b.query_label is not None
        assert a.query_start is not None and b.query_start is not None
        labels = torch.broadcast_tensors(a.query_label, b.query_label)
        starts = torch.broadcast_tensors(a.query_start, b.query_start)
        of_queries, of_keys = ranks(_paired(*labels), _paired(*starts))
        return {"query_label": of_queries, "query_start": of_keys, "query_end": of_keys + 1, "by_id": True}
    hint = "Turn one into a dense mask: from_dense(mask.as_dense(...))"
    refuse("&", "queries per key of one label tensor, of none, or ids in both", f"{a!r} and {b!r}", hint)


def _paired(high: Tensor, low: Tensor) -> Tensor:
    """One int64 for each pair of int32."""
    return high.to(torch.int64) * 2**32 + low


def ranks(of_queries: Tensor, of_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Integer ids `[B or 1, H or 1, T]` as int32 numbers from 0 without gaps, equal where the ids are.

    Nothing waits for the device, unlike `torch.unique`, whose result has a size that depends on values.
    """
    shape = torch.broadcast_shapes(of_queries.shape[:-1], of_keys.shape[:-1])
    q_len = of_queries.shape[-1]
    ids = torch.cat([of_queries.expand(*shape, q_len), of_keys.expand(*shape, of_keys.shape[-1])], dim=-1)
    in_order, order = ids.sort(dim=-1)
    is_new = torch.zeros_like(ids, dtype=torch.int32)
    is_new[..., 1:] = in_order[..., 1:] != in_order[..., :-1]
    found = torch.empty_like(is_new).scatter_(-1, order, is_new.cumsum(-1, dtype=torch.int32))
    return found[..., :q_len].contiguous(), found[..., q_len:].contiguous()


def _rows_as_keys(mask: Mask, beside: Mask) -> Mask:
    """Before `mask` meets a mask with labels: if its queries per key are those of every key, as keys per query.

    So they say which queries see anything at all, like those of `padding`, and that needs no second label.
    """
    given = [bound for bound in _queries(mask) if bound is not None]
    if not given or mask.query_label is not None or beside.query_label is None:
        return mask
    q_len = _joint_sizes(mask, beside)["q_len"]
    if q_len is None or any(bound.shape[-1] != 1 for bound in given):
        return mask
    index = torch.arange(q_len, dtype=torch.int32, device=mask.device)
    sees = torch.ones_like(index, dtype=torch.bool)
    if mask.query_start is not None:
        sees = sees & (index >= mask.query_start)
    if mask.query_end is not None:
        sees = sees & (index < mask.query_end)
    keys = _met(_keys(mask), Interval(None, torch.where(sees, _FAR, 0).to(torch.int32)))
    return replace(mask, query_start=None, query_end=None, key_end=keys.end)
