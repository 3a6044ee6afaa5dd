"""`flash_attn_with_kvcache` of FlashAttention-2 and -3: write new tokens into a cache, in place, and attend to it."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.kv_layouts import ContiguousKV, PagedKV, Rotary, checks
from ..base.kv_layouts.write import rotate
from ..ops.decode import decode_attention, decode_contiguous
from ..ops.paged import paged_attention
from ..ops.write_kv import write_kv
from .arguments import Window, sides
from .errors import as_runtime_error, refuse_missing

MOST_TOKENS = 256
"""Of a page of `PagedKV`. Larger ones are divided."""


class Cached(NamedTuple):
    """The tensors of a call, under the library's names."""

    q: Tensor  # [B, Tq, Hq, D], or with cu_seqlens_q [Nq, Hq, D]
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None  # [B, n, Hkv, D], or with cu_seqlens_k_new [N, Hkv, D]
    v: Tensor | None
    cache_seqlens: int | Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    rotary: Rotary | None
    rotary_seqlens: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    max_seqlen_q: int | None = None


def rotary_of(cos: Tensor | None, sin: Tensor | None, interleaved: bool, q: Tensor, k: Tensor | None) -> Rotary | None:
    """The tables of a rotary embedding, checked."""
    if cos is None:
        return None
    if k is None:
        refuse("k", "new tokens where rotary_cos is given", None, error=RuntimeError)
    if sin is None or sin.shape != cos.shape or cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= q.shape[-1]:
        got = f"{list(cos.shape)} and {None if sin is None else list(sin.shape)}"
        expected = f"shape [positions, R / 2] of both, R at most D={q.shape[-1]}"
        refuse("rotary_cos and rotary_sin", expected, got, error=RuntimeError)
    return Rotary(cos, sin, interleaved)


def attend(
    given: Cached,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Out, and the LSE if wanted: `[B, Hq, Tq]`, or of ragged queries `[Hq, Nq]`."""
    for name, store in (("k_cache", given.k_cache), ("v_cache", given.v_cache)):
        if store.stride(-1) != 1:
            refuse(name, "a contiguous last dim", f"strides {store.stride()}", error=AssertionError)
    if (given.k is None) != (given.v is None):
        refuse("v", "new values beside new keys", "one of k and v", error=RuntimeError)
    if given.k is not None and given.cache_seqlens is None:
        refuse("cache_seqlens", "an int or a tensor where k is given", None, error=RuntimeError)
    window = sides(window_size)
    left, bounded = (-1, causal) if window is None else (window[0], True)
    if not (_is_more(given) or alibi_slopes is not None or return_lse) and (causal or given.q.shape[1] == 1):
        return _plain(given, left, max(0.0, float(softcap)), softmax_scale), None
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "alibi_slopes": alibi_slopes,
        "softcap": max(0.0, float(softcap)),
        "scale": softmax_scale,
    }
    try:
        with torch.no_grad():
            query, cache = _written(given, bounded)
            if given.cu_seqlens_q is None:
                found: Any = decode_attention(query, cache, **options, return_lse=return_lse)
            else:
                found = _ragged(query, cache, given, options, return_lse)
    except (TypeError, ValueError) as error:
        raise as_runtime_error(error) from error
    return found if return_lse else (found, None)


def _is_more(given: Cached) -> bool:
    """Whether a call has more than a query, a cache of as many rows, and their lengths as a tensor."""
    q, k_cache, _, k, _, seqlens, *others = given
    return (
        k is not None
        or any(one is not None for one in others)
        or type(seqlens) is not Tensor
        or q.dim() != 4
        or k_cache.shape[:1] != q.shape[:1]
    )


def _plain(given: Cached, left: int, softcap: float, scale: float | None) -> Tensor:
    """Such a call of queries that see no key behind them; the host takes half the time."""
    q = given.q if given.q.stride(-1) == 1 else given.q.contiguous()
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    lengths: Any = given.cache_seqlens
    try:
        with torch.no_grad():
            return decode_contiguous(q, given.k_cache, given.v_cache, lengths, None, max(0, left + 1), softcap, scale)
    except (TypeError, ValueError) as error:
        raise as_runtime_error(error) from error


def _ragged(query: Tensor, cache: PagedKV, given: Cached, options: dict[str, Any], return_lse: bool) -> Any:
    """Queries of any number for each row, `[Nq, Hq, D]`."""
    if given.max_seqlen_q is None:
        refuse("max_seqlen_q", "an int where cu_seqlens_q is given", None)
    options |= {"page_table": cache.page_table, "max_seqlen_q": int(given.max_seqlen_q), "return_lse": return_lse}
    tensors: Any = query, cache.key_pages, cache.value_pages, given.cu_seqlens_q, cache.lengths
    return paged_attention(*tensors, **options)


def _written(given: Cached, bounded: bool) -> tuple[Tensor, Any]:
    """The query, rotated, and the cache with the new tokens, which its lengths count and the caller's do not."""
    query, key, value = given.q, given.k, given.v
    query = query if query.stride(-1) == 1 else query.contiguous()
    batch = query.shape[0] if given.cu_seqlens_q is None else given.cu_seqlens_q.shape[0] - 1
    lengths = _lengths(given, batch)
    if given.rotary is not None:
        assert key is not None
        first = lengths if given.rotary_seqlens is None else given.rotary_seqlens
        query = _rotated(query, first, given.cu_seqlens_q, given.rotary, counting=bounded)
        key = _rotated(key, first, given.cu_seqlens_k_new, given.rotary)
    cache = _cache(given, lengths, batch)
    if key is None or value is None:
        return query, cache
    if given.cu_seqlens_k_new is None:
        return query, cache.append(key, value)
    assert isinstance(cache, PagedKV)
    offsets = given.cu_seqlens_k_new
    row, at = _places(offsets, key.shape[0])
    position = cache.lengths[row] + at
    page = torch.div(position, cache.page, rounding_mode="floor").clamp(max=cache.page_table.shape[1] - 1)
    slots = cache.page_table[row, page] * cache.page + position % cache.page
    write_kv(key, value, cache.key_pages, cache.value_pages, slots.masked_fill(_behind(offsets, key.shape[0]), -1))
    cache.lengths.add_(offsets.diff())
    return query, cache


def _lengths(given: Cached, batch: int) -> Tensor:
    """Tokens of each row, which the cache made of them may advance."""
    seqlens, device = given.cache_seqlens, given.k_cache.device
    if isinstance(seqlens, Tensor):
        return seqlens.clone(memory_format=torch.contiguous_format) if given.k is not None else seqlens
    table = given.page_table
    whole = given.k_cache.shape[1] * (1 if table is None else table.shape[1])
    return torch.full((batch,), whole if seqlens is None else seqlens, dtype=torch.int32, device=device)


def _cache(given: Cached, lengths: Tensor, batch: int) -> ContiguousKV | PagedKV:
    """The rows of the call: as they lie, or by a page table where an index, a left padding or large pages need one."""
    key, value, table, first = given.k_cache, given.v_cache, given.page_table, given.cache_leftpad
    ragged = given.cu_seqlens_q is not None or given.cu_seqlens_k_new is not None
    if table is None:
        if given.cache_batch_idx is None and first is None and not ragged:
            if key.shape[0] != batch:
                key, value = key[:batch], value[:batch]
            return ContiguousKV(key, value, lengths)
        rows = given.cache_batch_idx
        table = (torch.arange(batch, dtype=torch.int32, device=key.device) if rows is None else rows).unsqueeze(1)
    elif given.cache_batch_idx is not None:
        table = table.index_select(0, given.cache_batch_idx)
    key, value, table = as_pages(key, value, table, first)
    return PagedKV(key, value, table, lengths if first is None else lengths - first)


def as_pages(key: Tensor, value: Tensor, table: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, or pages, `[P, n, H, D]` and the table of those of each row, int32 `[B, W]`, as pages of at most
    `MOST_TOKENS`; with `first`, int32 `[B]`, of one token each, and a table that begins at this token of the row."""
    size, device = key.shape[1], key.device
    parts = size if first is not None else size // gcd(size, MOST_TOKENS)
    if parts > 1:
        key, value = _divided("k_cache", key, size // parts), _divided("v_cache", value, size // parts)
        table = (table.unsqueeze(2) * parts + torch.arange(parts, dtype=torch.int32, device=device)).flatten(1)
    if first is not None:
        last = table.shape[1] - 1
        at = first.long().unsqueeze(1) + torch.arange(last + 1, device=device)
        table = table.gather(1, at.clamp_(max=last))
    return key, value, table


def _divided(name: str, store: Tensor, size: int) -> Tensor:
    """Rows, or pages, `[P, n, H, D]` as smaller pages of `size` tokens."""
    if store.shape[0] > 1 and store.stride(0) != store.shape[1] * store.stride(1):
        hint = "Allocate the cache without gaps, or pass pages of at most 256 tokens and a page table."
        refuse_missing(name, "rows that follow each other in memory", f"strides {store.stride()}", hint)
    return store.view(-1, size, *store.shape[2:])


def _rotated(x: Tensor, first: Tensor, offsets: Tensor | None, rotary: Rotary, counting: bool = True) -> Tensor:
    """`[B, n, H, D]`, or `[N, H, D]` with offsets, rotated by positions from `first[b]` on; or all by `first[b]`."""
    if offsets is None:
        if checks.should_validate(None, first):
            checks.capacity(first, x.shape[1] if counting else 1, rotary.cos.shape[0], "the rotary table's positions")
        count = torch.arange(x.shape[1], device=x.device) if counting else 0
        return rotate(x, (first.long().unsqueeze(1) + count).expand(-1, x.shape[1]), rotary)
    row, at = _places(offsets, x.shape[0])
    return rotate(x[None], (first.long()[row] + (at if counting else 0))[None], rotary)[0]


def _places(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The row of each token of a pack, and its number in it; of tokens behind the last row, those of that row."""
    token = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
    row = torch.searchsorted(offsets[1:].contiguous(), token, right=True).clamp_(max=offsets.shape[0] - 2)
    return row, token - offsets[row]


def _behind(offsets: Tensor, count: int) -> Tensor:
    """Which tokens of a pack are behind its last row."""
    return torch.arange(count, device=offsets.device) >= offsets[-1]
