"""What a cache layer returns to the attention function: placeholder keys that carry the cache.

A cache layer returns keys and values to the model, which passes them to the attention function. Ours does not have them
as tensors, so it returns placeholders: of the shape that the model expects, all NaN and without memory of their own, so
that attention which reads them as keys gives NaN. The keys carry the cache as an attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.kv_layouts import ContiguousKV, KVCache
from ..ops.attention import attention
from ..ops.decode import decode_attention

MAX_DECODE_QUERIES = 16
"""The most queries of a call that `decode_attention` computes; more are faster by `attention` over plain tensors."""

Observer = Callable[[Tensor, dict[str, Any]], None]
"""Called after attention, with its queries `[B, Tq, Hq, D]`, and with its scale, softcap and sink by name."""


class Cached(NamedTuple):
    """What the keys that a cache layer returns carry, as their attribute `stream_cached`."""

    kv: KVCache | None  # what is read in place of placeholder keys; None: the keys are ordinary ones
    observer: Observer
    new: int = 0  # tokens after the prompt that this call appended
    padding_known: bool = False  # the cache was constructed with the padding of the prompt
    padded: bool = False  # and there is some


def cached_by(key: Tensor) -> Cached | None:
    """What keys carry; None if no layer of ours returned them."""
    return getattr(key, "stream_cached", None)


def placeholder_kv(nan: Tensor, kv: KVCache, length: int) -> list[Tensor]:
    """Keys and values `[B, Hkv, length, .]` in place of those of `kv`; `nan` is a scalar of its dtype."""
    return [nan.expand(kv.batch, kv.kv_heads, length, dim) for dim in (kv.head_dim, kv.value_dim)]


def read(query: Tensor, key: Tensor, attention_mask: Tensor | None, **options: Any) -> Tensor | None:
    """Attention of the newest queries over the cache of placeholder keys; None where the keys are ordinary ones.

    Args:
        query: `[B, Tq, Hq, D]`.
        key: what the cache returned.
        attention_mask: the model's padding mask, bool `[B, tokens so far]`. The cache must have been constructed with
            it, as it stores no padding: else it is refused, and so is padding among the new tokens, at the cost of a
            synchronisation where these are more than one.
        options: scale, softcap and sink, as in `attention`.

    Returns:
        `[B, Tq, Hq, Dv]`.
    """
    layer = cached_by(key)
    if layer is None or (kv := layer.kv) is None:
        return None
    if attention_mask is not None:
        _check_mask(attention_mask, query.shape[1], layer)
    if query.shape[1] > MAX_DECODE_QUERIES and isinstance(kv, ContiguousKV) and kv.lengths is None:
        return attention(query, kv.key, kv.value, causal=True, **options)
    return decode_attention(query, kv, **options)


def _check_mask(mask: Tensor, new: int, layer: Cached) -> None:
    if not layer.padding_known:
        hint = 'Pass it to the cache: past_key_values=...(model, ..., attention_mask=inputs["attention_mask"]).'
        refuse("attention_mask", "None, or a cache constructed with the prompt's padding", "a mask", hint)
    if mask.dim() != 2:
        hint = "A quantised or evicting cache supports padding masks only."
        refuse("attention_mask", "shape [B, tokens so far]", list(mask.shape), hint)
    check_new(mask, new)


def check_new(mask: Tensor, new: int) -> None:
    """Refuse padding, bool `[B, tokens so far]`, among tokens after the prompt. One token is not checked: that would
    synchronise in every layer. More are checked once per step, if the mask is one of ours, which all layers share."""
    checked = getattr(mask, "stream_checked", None)
    if new <= 1 or checked == new:
        return
    if not bool(mask[:, -new:].all()):
        refuse("attention_mask", "padding at the beginning of the prompt only", "padding after it")
    if checked is not None:
        mask.stream_checked = new  # type: ignore[attr-defined]


def checked_once(mask: Tensor) -> Tensor:
    """The mask, of one step and never written to, on which `check_new` records its result."""
    if not torch.compiler.is_compiling():
        mask.stream_checked = 0  # type: ignore[attr-defined]
    return mask
