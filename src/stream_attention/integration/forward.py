"""The attention function that transformers calls in every layer."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..base.errors import refuse
from ..ops.attention import attention
from ..ops.decode import decode_contiguous
from ..ops.varlen import varlen_attention
from .masks import Side, Unpadded, decoded, matrix
from .placeholder import cached_by, check_new, read

Tensors = tuple[Tensor, Tensor, Tensor]  # query, key and value, [B, T, H, D]


class Settings(NamedTuple):
    """The fields of a `StreamAttentionConfig` that apply to a model; each of its attention modules has them."""

    backend: str = "auto"
    max_sequence_length: int | None = None


ATTRIBUTE = "stream_attention"
"""The attribute of an attention module with its settings."""

DEFAULT = Settings()


def stream_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    head_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer: query `[B, Hq, Tq, D]`, key and value `[B, Hkv, Tk, .]` -> `[B, Tq, Hq, Dv]`, no weights.

    `attention_mask` is one of `masks`, or a bool padding mask `[B, Tk]`. A full mask `[B, H, Tq, Tk]` replaces
    `is_causal` and `sliding_window`. `s_aux` are sinks. `position_bias` is added to the scores, `head_mask` weights
    heads. Of the others `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` describe a packed batch;
    the rest does not concern attention.
    """
    compiling = torch.compiler.is_compiling()
    reason = None
    if others:
        if others.get("output_attentions"):
            _warn("output_attentions: weights are not materialised, so None is returned; use eager attention for them")
        if others.get("cache") is not None:
            reason = "it uses transformers' paged cache"
    if not compiling and type(query) is not Tensor and hasattr(query, "device_mesh"):
        reason = "its tensors are DTensors"
    if reason is not None:
        others |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        if softcap or s_aux is not None:
            expected = f"eager for a layer with softcap or sinks where {reason}"
            refuse("attn_implementation", expected, '"stream_attention"')
        return _by_sdpa(reason, module, (query, key, value), attention_mask, others)
    backend, most = module.__dict__.get(ATTRIBUTE, DEFAULT)
    if most is not None and key.shape[2] > most:
        refuse("key", f"at most max_sequence_length={most} tokens", key.shape[2])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scores = {"scale": scaling, "softcap": softcap or 0.0, "sink": s_aux}
    options = {**scores, "backend": backend, "dropout_p": dropout or 0.0}
    layer, cached = None if compiling else cached_by(key), key
    query, key, value = (
        x.transpose(1, 2) if x.stride(-1) == 1 else x.transpose(1, 2).contiguous() for x in (query, key, value)
    )
    if layer is not None and layer.kv is not None:
        windowed = sliding_window is not None and 0 < sliding_window < key.shape[1]
        if not causal or dropout or position_bias is not None or windowed or backend != "auto":
            plain = "a plain cache for cross-attention, dropout, biases, sliding windows and forced backends"
            refuse("past_key_values", plain, "one of ours")
        padding = _padding_alone(attention_mask)
        if padding is None and layer.padded:
            refuse("attention_mask", "the padding mask of the cache", "None", "Pass the model the same mask.")
        out = read(query, cached, padding, **scores)
        assert out is not None
    elif attention_mask is None and "cu_seq_lens_q" not in others:
        causal, window = causal and query.shape[1] > 1, _window(sliding_window, causal)
        out = attention(query, key, value, causal=causal, window=window, bias=position_bias, **options)
    else:
        if layer is not None and layer.new and attention_mask is not None and attention_mask.dtype is torch.uint8:
            padding = _padding_alone(attention_mask)
            if padding is not None:
                check_new(padding, layer.new)
        out = _masked((query, key, value), attention_mask, causal, sliding_window, position_bias, others, options)
    if layer is not None:
        layer.observer(query, scores)
    if head_mask is not None:
        if head_mask.dim() == 4 and head_mask.shape[2:] != (1, 1):
            refuse("head_mask", "a weight per head, [B or 1, Hq, 1, 1]", list(head_mask.shape))
        out = out * head_mask.view(-1, 1, query.shape[2], 1)
    return out, None


def _masked(
    qkv: Tensors,
    mask: Tensor | None,
    causal: bool,
    sliding_window: int | None,
    bias: Tensor | None,
    others: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Attention with a mask, or of a packed batch."""
    query, key, value = qkv
    window = _window(sliding_window, causal)
    if others.get("cu_seq_lens_q") is not None:
        if mask is not None and mask.dtype is torch.uint8 and mask.shape[0] == 0:
            window = _window(decoded(mask).window, causal)
        elif (mask is not None and mask.dtype is not torch.int64) or bias is not None:
            refuse("cu_seq_lens_q", "sequences without a padding mask or a bias beside them", "both")
        queries, keys = (Side(others[f"cu_seq_lens_{side}"], int(others[f"max_length_{side}"])) for side in "qk")
        return _by_sequence(qkv, queries, keys, causal, window, options)
    if mask is None:
        return attention(*qkv, causal=causal, window=window, bias=bias, **options)
    if mask.dim() == 4 and mask.dtype is torch.int64 and bias is None:
        cu_seqlens, longest, width = decoded(mask)
        key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
        both = Side(cu_seqlens, longest)
        return _by_sequence((query, key, value), both, both, True, _window(width, True), options)
    if mask.dtype is torch.int32 and (mask.dim() != 4 or mask.shape[2:] != (1, 1)):
        refuse("attention_mask", "a mask of bool or of floats", mask.dtype, error=TypeError)
    if mask.dim() == 4 and mask.dtype is torch.int32 and bias is None and _decodes(qkv, options):
        lengths, width = decoded(mask)
        scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        return decode_contiguous(query, key, value, lengths, options["sink"], width, options["softcap"], scale)
    if mask.dim() == 4 and mask.dtype in (torch.int32, torch.int64):
        mask = matrix(mask, query.shape[0], query.shape[1], key.shape[1])
    count = key.shape[1]
    read: Tensor | None = mask
    if mask.dim() == 2:
        read, count = mask.bool()[:, None, None], mask.shape[1]
    elif mask.dtype is torch.uint8:
        width, both_sides, count, slots, padding, unpadded = decoded(mask)
        read = None if padding is None else padding[:, None, None]
        if key.shape[1] < slots:
            refuse("attention_mask", f"a mask of the {key.shape[1]} keys", slots)
        if key.shape[1] > slots:
            hint = "Assisted decoding leaves such a cache of a sliding window: use a new cache."
            refuse("past_key_values", f"a layer with the {slots} keys that it reported", key.shape[1], hint)
        causal, window = not both_sides, (width, width) if both_sides else _window(width, True)
        if unpadded is not None and bias is None:
            return _without_padding((query, key[:, :count], value[:, :count]), unpadded, window, options)
    else:
        causal, window = False, None
        if mask.dim() == 3:
            read = mask.unsqueeze(1)
        if mask.dtype is not torch.bool:
            if not mask.is_floating_point():
                refuse("attention_mask", "a mask of bool or of floats", mask.dtype, error=TypeError)
            read, bias = None, read if bias is None else bias + mask
    key, value = key[:, :count], value[:, :count]
    read, bias = (x if x is None else x[..., : key.shape[1]] for x in (read, bias))
    return attention(query, key, value, causal=causal, window=window, mask=read, bias=bias, **options)


def _decodes(qkv: Tensors, options: dict[str, Any]) -> bool:
    """Whether `decode_attention` can compute a call: without gradients, dropout and forced backends."""
    tensors = qkv if options["sink"] is None else (*qkv, options["sink"])
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not graph and not options["dropout_p"] and options["backend"] == "auto"


def _without_padding(
    qkv: Tensors, unpadded: Unpadded, window: tuple[int, int] | None, options: dict[str, Any]
) -> Tensor:
    """Causal attention of a padded batch: of its tokens, then of padding on the right, which sees tokens."""
    shape = qkv[0].shape
    query, key, value = (x.reshape(1, -1, *x.shape[2:]) for x in qkv)
    out = _by_sequence((query, key, value), unpadded.queries, unpadded.keys, True, window, options)
    if (right := unpadded.right) is not None:
        rows = (query.index_select(1, right.rows), key, value)
        padded = _by_sequence(rows, right.queries, right.keys, False, right.window, options)
        if right.kept is not None:
            padded = padded.index_select(1, right.kept)
        fill = out.index_copy if out.requires_grad else out.index_copy_  # a backward reads the output
        out = fill(1, right.into, padded)
    return out.view(*shape[:3], -1)


def _by_sequence(
    qkv: Tensors, queries: Side, keys: Side, causal: bool, window: tuple[int, int] | None, options: dict[str, Any]
) -> Tensor:
    """`varlen_attention` over the flattened batch."""
    flat = (x.reshape(-1, *x.shape[2:]) for x in qkv)
    options = {"max_seqlen_q": queries.longest, "max_seqlen_k": keys.longest, **options}
    out = varlen_attention(
        *flat, cu_seqlens_q=queries.cu_seqlens, cu_seqlens_k=keys.cu_seqlens, causal=causal, window=window, **options
    )
    return out.view(*qkv[0].shape[:2], *out.shape[1:])


def _window(width: int | None, causal: bool) -> tuple[int, int] | None:
    """transformers' width includes the query's own key; None and non-positive widths: no window."""
    return (width - 1, 0 if causal else width - 1) if width and width > 0 else None


def _padding_alone(mask: Tensor | None) -> Tensor | None:
    """The padding mask for our caches: bool `[B, Tk]`, or None. They support no other mask."""
    if mask is None or mask.dtype is not torch.uint8:
        return mask
    keys = decoded(mask)
    if keys.window or keys.both_sides:
        refuse("past_key_values", "a plain cache for a layer with a sliding window", "one of ours")
    return keys.padding


def _by_sdpa(
    reason: str, module: nn.Module, qkv: Tensors, mask: Tensor | None, others: dict[str, Any]
) -> tuple[Tensor, None]:
    """transformers' "sdpa" attention, with a warning. Heads are before tokens."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _warn(f"{type(module).__name__} runs transformers' SDPA: {reason}")
    if mask is not None and mask.dim() == 4 and mask.dtype in (torch.uint8, torch.int32, torch.int64):
        mask = matrix(mask, qkv[0].shape[0], qkv[0].shape[2], qkv[1].shape[2])
    return sdpa_attention_forward(module, *qkv, mask, **others)


_warned: set[str] = set()


def _warn(message: str) -> None:
    if not torch.compiler.is_compiling() and message not in _warned:
        _warned.add(message)
        warnings.warn(f"stream_attention: {message}", stacklevel=3)
