"""Masks of batches of sequences: padding, packed documents, prefix LM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from .algebra import ranks
from .mask import Mask
from .parts import as_int32, is_integers

Lengths = Tensor | Sequence[int]


def padding(lengths: Lengths, q_lengths: Lengths | None = None) -> Mask:
    """In batch entry b all queries see the first `lengths[b]` keys, and queries from `q_lengths[b]` on see nothing.

    `lengths` and `q_lengths` are integers `[B]`, for calls of any Tq and Tk. Queries count from 0.

    Raises:
        ValueError, TypeError: lengths that are no integers `[B]`.

    >>> padding([1, 3]).as_dense(q_len=1, k_len=4)[:, 0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0]]
    """
    ends = _per_entry("lengths", lengths)
    q_ends = None if q_lengths is None else _per_entry("q_lengths", q_lengths)
    return Mask(key_end=ends, query_end=q_ends, words=f"padding of [{ends.shape[0]}]")


def documents(
    ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    *,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
    total: int | None = None,
    contiguous: bool | None = None,
) -> Mask:
    """Packed documents: a query sees the keys of its own document. Give one of ids, lengths and cu_seqlens.

    Where the tokens of each document stand together the mask is an interval of keys per query, by which kernels skip
    most; elsewhere ids are compared.

    Args:
        ids: integers `[T]` or `[B, T]`: the document of each token. Equal ids see each other, whatever they are.
        key_ids: `[Tk]` or `[B, Tk]`, where keys are not the queries: ids is then that of the queries.
        lengths: `[N]`: documents of these lengths, one after the other.
        cu_seqlens: `[N + 1]`: where documents begin, and the end of the last, as for `varlen_attention`.
        total: with lengths or cu_seqlens, the number of tokens T; those before the first document and behind the last
            see nothing. None reads it from the tensor, which waits for the device.
        contiguous: with ids, True vouches that the keys of each document stand together, False does not ask. None
            looks, which waits for the device.

    Raises:
        ValueError, TypeError: none or several of ids, lengths and cu_seqlens, or tensors of a wrong dtype or shape.

    >>> mask = documents(lengths=[2, 1])
    >>> mask.as_dense()[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    >>> documents(torch.tensor([7, 3, 7])).as_dense()[0, 0].int().tolist()
    [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    """
    given = {"ids": ids, "lengths": lengths, "cu_seqlens": cu_seqlens}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        refuse("documents", "one of ids, lengths and cu_seqlens", " and ".join(names) or "none of them")
    if ids is None:
        for name, value in (("key_ids", key_ids), ("contiguous", contiguous)):
            if value is not None:
                refuse(name, f"None beside {names[0]}", "a value", "It is for ids")
        return _one_after_the_other(names[0], given[names[0]], total)
    if total is not None:
        refuse("total", "None beside ids", total)
    of_queries = _ids("ids", ids)
    of_keys = of_queries if key_ids is None else _ids("key_ids", key_ids)
    batch, key_batch = of_queries.shape[0], of_keys.shape[0]
    if 1 != batch != key_batch != 1:
        refuse("key_ids", f"B={batch}, as of ids", f"B={key_batch}")
    if of_queries.device != of_keys.device:
        refuse("key_ids", f"device {of_queries.device}, that of ids", of_keys.device)
    said = [list(one.shape[::2]) for one in (of_queries, of_keys)]
    words = f"documents of {said[0]}" + ("" if key_ids is None else f" on {said[1]}")
    sizes: dict[str, Any] = {"q_len": of_queries.shape[-1], "k_len": of_keys.shape[-1]}
    if contiguous is not False:
        start, end, count = _first_and_last(of_queries, of_keys)
        if contiguous or bool((end - start == count).all()):
            return Mask(key_start=start, key_end=end, **sizes, words=words)
    label, id_of_key = ranks(of_queries, of_keys)
    by_id: dict[str, Any] = {"query_label": label, "query_start": id_of_key, "query_end": id_of_key + 1, "by_id": True}
    return Mask(**by_id, **sizes, words=words)


def prefix_lm(lengths: Lengths | int, q_len: int, k_len: int | None = None) -> Mask:
    """All queries see the first `lengths[b]` keys of batch entry b, and query i also the keys j <= i + Tk - Tq.

    `lengths` is an int, or integers `[B]`. The mask is for calls of exactly `q_len` queries and `k_len` keys; None is
    `q_len` keys.

    Raises:
        ValueError, TypeError: lengths that are no integers `[B]`, or sizes that are no ints.

    >>> prefix_lm(2, 4).as_dense()[0, 0].int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    q_len = check_int("q_len", q_len, least=0)
    k_len = q_len if k_len is None else check_int("k_len", k_len, least=0)
    ends = _per_entry("lengths", [lengths] if isinstance(lengths, int) else lengths)
    after = torch.arange(1, q_len + 1, dtype=torch.int32, device=ends.device) + (k_len - q_len)
    said = f"prefix LM of [{ends.shape[0]}, {q_len}, {k_len}]"
    return Mask(key_end=torch.maximum(ends, after), q_len=q_len, k_len=k_len, words=said)


def _per_entry(name: str, given: Any) -> Tensor:
    """Integers `[B]` as int32 `[B, 1, 1]`."""
    return as_int32(_ints(name, given, "B"))[:, None, None]


def _ints(name: str, given: Any, letter: str) -> Tensor:
    tensor = given if isinstance(given, Tensor) else torch.as_tensor(given)
    is_integers(name, tensor)
    if tensor.dim() != 1:
        hint = "Documents that differ by batch entry go by ids [B, T]." if letter != "B" and tensor.dim() == 2 else ""
        refuse(name, f"shape [{letter}]", list(tensor.shape), hint)
    return tensor


def _ids(name: str, given: Any) -> Tensor:
    """Ids as int64 `[B or 1, 1, T]`."""
    if isinstance(given, (list, tuple)):
        refuse(
            name, "a torch.Tensor of integers", type(given).__name__, "Lengths go by name: lengths=[...].", TypeError
        )
    is_integers(name, given)
    if given.dim() not in (1, 2):
        refuse(name, "shape [T] or [B, T]", list(given.shape))
    ids: Tensor = given.to(torch.int64)
    return ids[None, None] if ids.dim() == 1 else ids[:, None]


def _first_and_last(of_queries: Tensor, of_keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each query the first key of its id, the end of the last, and how many there are: int32 `[B or 1, 1, Tq]`."""
    batch = max(of_queries.shape[0], of_keys.shape[0])
    wanted = of_queries.expand(batch, -1, -1).contiguous()
    in_order, order = of_keys.sort(dim=-1, stable=True)  # equal ids stay in the order of keys
    in_order, order = (one.expand(batch, -1, -1).contiguous() for one in (in_order, order))
    low = torch.searchsorted(in_order, wanted)
    high = torch.searchsorted(in_order, wanted, right=True)
    count = high - low
    if of_keys.shape[-1] == 0:
        start = end = torch.zeros_like(count)
    else:
        last = of_keys.shape[-1] - 1
        start = order.gather(-1, low.clamp(max=last))
        end = torch.where(count > 0, order.gather(-1, (high - 1).clamp(0, last)) + 1, start)
    return start.to(torch.int32), end.to(torch.int32), count.to(torch.int32)


def _one_after_the_other(name: str, given: Any, total: int | None) -> Mask:
    offsets = _ints(name, given, "N" if name == "lengths" else "N + 1").to(torch.int64)
    if name == "lengths":
        offsets = torch.cat([offsets.new_zeros(1), offsets.cumsum(0)])
    elif offsets.shape[0] == 0:
        refuse(name, "at least one offset", "none")
    tokens = None if total is None else check_int("total", total, least=0)
    plain = type(offsets) is Tensor and offsets.device.type == "cpu" and not torch.compiler.is_compiling()
    if tokens is None or plain:  # elsewhere a look would wait
        first, *_, last = offsets.tolist() * 2
        if first != 0 and tokens is None:
            refuse(name, "0 as the first offset", first, "Documents begin at 0: torch.cat([zero, ends]).")
        if bool((offsets.diff() < 0).any()):
            refuse(name, "no document of fewer than 0 tokens", offsets.diff().tolist())
        if tokens is not None and last > tokens:
            refuse("total", f"at least the {last} tokens of {name}", tokens)
        tokens = last if tokens is None else tokens
    index = torch.arange(tokens, device=offsets.device)
    document = torch.searchsorted(offsets, index, right=True)  # of which the end is offsets[document]
    padded = torch.cat([offsets, offsets[-1:]])
    start, end = padded[document - 1], padded[document]
    words = f"{offsets.shape[0] - 1} documents of [{tokens}]"
    start, end = (as_int32(bound)[None, None] for bound in (start, end))
    return Mask(key_start=start, key_end=end, q_len=tokens, k_len=tokens, words=words)
