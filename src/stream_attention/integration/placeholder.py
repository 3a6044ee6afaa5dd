"""What passes between a cache layer and the attention function: keys that say where the keys are.

A cache layer returns keys and values to the model, which hands them on to the attention function. Ours does not have
them as tensors, so it returns hollow ones: of the shape that the model counts on, all NaN and without memory of their
own, so that a reader who takes them for keys shows at once. The hollow keys carry the cache as an attribute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..cache_views import ContiguousKV, KVCache
from ..errors import refuse
from ..ops.attention import attention
from ..ops.decode import decode_attention

FEW = 16
"""Queries of a call at most that read a cache as it is; more are worth an attention over plain tensors."""

Observer = Callable[[Tensor, float | None, float, Tensor | None], None]
"""Is told the queries `[B, Tq, Hq, D]` of a call once its attention is computed, its scale, softcap and sink."""


def hollow(
    nan: Tensor, kv: KVCache, length: int, padding_known: bool, padded: bool, observer: Observer | None
) -> list[Tensor]:
    """Keys and values `[B, Hkv, length, .]` that stand for what `kv` holds; `nan` is a scalar of its dtype."""
    key, value = (nan.expand(kv.batch, kv.kv_heads, length, dim) for dim in (kv.head_dim, kv.value_dim))
    key.stream_kv = kv  # type: ignore[attr-defined]
    key.stream_padding_known = padding_known  # type: ignore[attr-defined]
    key.stream_padded = padded  # type: ignore[attr-defined]
    return [observed(key, observer), value]


def observed(key: Tensor, observer: Observer | None) -> Tensor:
    """The same keys, hollow or not, whose layer wants to be told the queries."""
    key.stream_observer = observer  # type: ignore[attr-defined]
    return key


def read(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor | None:
    """Attention of the newest queries over what hollow keys stand for; None where the keys are ordinary ones.

    Args:
        query: `[B, Tq, Hq, D]`.
        key: what the cache returned.
        attention_mask: what the model says of padding, bool `[B, tokens seen]`. The cache has to know of it already,
            as it holds no padding: else it is refused, and so is padding among the new tokens, at the cost of a
            synchronisation where these are more than one.
        scale, softcap, sink: as in `attention`.

    Returns:
        `[B, Tq, Hq, Dv]`.
    """
    kv = getattr(key, "stream_kv", None)
    if kv is None:
        return None
    if attention_mask is not None:
        _check_mask(attention_mask, query.shape[1], key)
    if query.shape[1] > FEW and isinstance(kv, ContiguousKV) and kv.lengths is None:
        return attention(query, kv.key, kv.value, causal=True, scale=scale, softcap=softcap, sink=sink)
    return decode_attention(query, kv, scale=scale, softcap=softcap, sink=sink)


def tell(
    query: Tensor, key: Tensor, scale: float | None = None, softcap: float = 0.0, sink: Tensor | None = None
) -> None:
    """Tell the layer that these keys come from, if it wants to know, what has just been computed with them."""
    observer = getattr(key, "stream_observer", None)
    if observer is not None:
        observer(query, scale, softcap, sink)


def _check_mask(mask: Tensor, new: int, key: Tensor) -> None:
    if not key.stream_padding_known:  # type: ignore[attr-defined]
        hint = 'Tell it: past_key_values=...(model, ..., attention_mask=inputs["attention_mask"]).'
        refuse("attention_mask", "None, or a cache that knows the prompt's padding", "a mask", hint)
    if mask.dim() != 2:
        hint = "A cache that holds codes, or only some tokens, has no place for a pattern over all of them."
        refuse("attention_mask", "shape [B, tokens seen]", list(mask.shape), hint)
    check_new(mask, new)


def check_new(mask: Tensor, new: int) -> None:
    """Refuse padding, bool `[B, tokens seen]`, among tokens that a cache was given behind its prompt. One at a time is
    not looked at: that would wait for the device in every layer. More are looked at once, if the mask is one of ours,
    which every layer of a step is given."""
    checked = getattr(mask, "stream_checked", None)
    if new <= 1 or checked == new:
        return
    if not bool(mask[:, -new:].all()):
        refuse("attention_mask", "padding in the first tokens that the cache is given alone", "padding behind them")
    if checked is not None:
        mask.stream_checked = new  # type: ignore[attr-defined]


def checked_once(mask: Tensor) -> Tensor:
    """The mask, of one step and written by nobody, of which `check_new` remembers what it found."""
    if not torch.compiler.is_compiling():
        mask.stream_checked = 0  # type: ignore[attr-defined]
    return mask
