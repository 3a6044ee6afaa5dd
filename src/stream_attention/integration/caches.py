"""Caches for Hugging Face's `generate()`: quantised, or with a bounded number of tokens.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="stream_attention")
    model.generate(**inputs, past_key_values=StreamQuantizedCache(model, "int4"))
    model.generate(**inputs, past_key_values=StreamBoundedCache(model, 4096))

A cache is for one batch: make one for each call, or call `reset()` in between. Both count all tokens so far, so
positions are those of the whole sequence. For a batch with padding, which must be on the left, pass
`attention_mask=inputs["attention_mask"]` to the cache. Padding is not stored.

Layers of the model with a sliding window keep transformers' own cache of that window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..base.errors import check_int, refuse
from ..base.kv_layouts import ContiguousKV
from ..kvcache import quantize_kv
from .cache_layer import StreamLayer
from .evicting_layer import Budget, EvictingLayer
from .hf import NAME
from .quantized_layer import QuantisedLayer, QuantizeOptions

MOST_IN_GROUP = 256
HEAVY = ("attention", "key_norm", "value_norm", None)


class StreamCache(Cache):
    """The base of our caches: a layer of ours for each layer of the model without a sliding window."""

    layers: list[CacheLayerMixin]

    def __init__(self, model: Any, attention_mask: Tensor | None) -> None:
        self._config = _config_of(model)
        padding = _padding(attention_mask)
        super().__init__(layers=[self._replaced(one, padding) for one in DynamicCache(config=self._config).layers])
        if not any(isinstance(one, StreamLayer) for one in self.layers):
            hint = "Its own cache is already as small as the window."
            refuse("model", "one with layers without a sliding window", "one with sliding windows alone", hint)

    def _replaced(self, layer: CacheLayerMixin, padding: Tensor | None) -> CacheLayerMixin:
        if type(layer) is DynamicLayer:
            return self._layer(padding)
        if type(layer) is DynamicSlidingWindowLayer:
            return layer
        refuse("model", "one with full or sliding window attention", type(layer).__name__)

    def reset(self) -> None:
        """Drop all tokens. Sliding windows get new layers: transformers' reset would keep zeros as keys."""
        for n, new in enumerate(DynamicCache(config=self._config).layers):
            layer = self.layers[n]
            if isinstance(layer, StreamLayer):
                layer.reset()
            else:
                self.layers[n] = new

    def _layer(self, padding: Tensor | None) -> StreamLayer:
        """A new layer for a prompt with this padding."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes allocated now: quantised values, scales, windows, tokens, spare capacity."""
        return sum(_nbytes(layer) for layer in self.layers)

    @property
    def tokens(self) -> int:
        """The most tokens that a row of a layer has."""
        return max((max(one.rows, default=0) for one in self.layers if isinstance(one, StreamLayer)), default=0)


class StreamQuantizedCache(StreamCache):
    """Every token, all but the latest in fp8, int8 or int4, which attention reads without dequantising in memory.

    The latest `residual` tokens of a row, and earlier ones whose block of `group` is not complete, are in full
    precision. Attention over a prompt is in full precision; the prompt is quantised after it. The same holds for more
    than 16 later tokens in one call, which read earlier tokens dequantised.

    Args:
        model: the model, or its config; its attention has to be "stream_attention".
        format: "fp8", "int8" or "int4".
        group, residual, keys, values: as in `quantize_kv`; a group is at most 256.
        attention_mask: `[B, T]` of the prompt, where that has padding on the left.

    Raises:
        ValueError, TypeError: a bad argument; a model whose attention does not read such a cache.
    """

    def __init__(
        self,
        model: Any,
        format: str = "int4",
        *,
        group: int = 64,
        residual: int = 128,
        keys: str = "channel",
        values: str = "token",
        attention_mask: Tensor | None = None,
    ) -> None:
        self.coding = QuantizeOptions(format, group, residual, keys, values)
        quantize_kv(ContiguousKV(*torch.zeros(2, 1, 1, 1, 16)), **self.coding._asdict())  # which checks all of them
        if group > MOST_IN_GROUP:
            refuse("group", f"at most {MOST_IN_GROUP}", group)
        super().__init__(model, attention_mask)

    def _layer(self, padding: Tensor | None) -> QuantisedLayer:
        return QuantisedLayer(padding, self.coding)


class StreamBoundedCache(StreamCache):
    """At most `budget + every` tokens of a row, whatever its length: the first, the latest, and the most important.

    No token is evicted, and attention is exact, until a row has more. Attention over a longer prompt is exact, then all
    but `budget` of its tokens are evicted, layer by layer; later again after every `every` new tokens. Evicted tokens
    cannot be attended to. Each KV head keeps its own tokens.

    Args:
        model: the model, or its config; its attention has to be "stream_attention".
        budget: tokens that are kept.
        sinks: of these the first of the row.
        recent: of these the latest; default: half of the budget, or all but the sinks where `heavy` is None.
        heavy: what the others are chosen by: "attention", that of the latest queries, up to 32; "key_norm", keys of
            small norm; "value_norm", values of large norm; None: there are no others.
        every: tokens appended between evictions.
        attention_mask: `[B, T]` of the prompt, where that has padding on the left.

    Raises:
        ValueError, TypeError: a bad argument; a model whose attention does not read such a cache.
    """

    def __init__(
        self,
        model: Any,
        budget: int,
        *,
        sinks: int = 4,
        recent: int | None = None,
        heavy: str | None = "attention",
        every: int = 64,
        attention_mask: Tensor | None = None,
    ) -> None:
        for name, given, least in (("budget", budget, 1), ("sinks", sinks, 0), ("every", every, 1)):
            check_int(name, given, least)
        if heavy not in HEAVY:
            refuse("heavy", '"attention", "key_norm", "value_norm" or None', repr(heavy))
        if recent is None:
            recent = budget // 2 if heavy is not None else budget - sinks
        check_int("recent", recent, 1)
        if sinks + recent > budget:
            refuse("budget", f"at least sinks + recent = {sinks + recent}", budget)
        if heavy is None and sinks + recent < budget:
            refuse("recent", f"budget - sinks = {budget - sinks} where heavy is None", recent)
        self.budget = Budget(budget, sinks, recent, heavy, every)
        super().__init__(model, attention_mask)

    def _layer(self, padding: Tensor | None) -> EvictingLayer:
        return EvictingLayer(padding, self.budget)


def _config_of(model: Any) -> Any:
    """The config of a model, or the config that was passed; its attention is ours."""
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        refuse("model", "a transformers model or its config", type(model).__name__, error=TypeError)
    if getattr(config, "is_encoder_decoder", False):
        refuse("model", "a decoder", "an encoder and a decoder", "It needs two caches, one for each attention.")
    found = getattr(config.get_text_config(), "_attn_implementation", None)
    if found != NAME:
        hint = f'Call stream_attention.integration.hf.register() and model.set_attn_implementation("{NAME}").'
        refuse("model", f'attn_implementation "{NAME}", which reads such a cache', repr(found), hint)
    return config


def _padding(mask: Tensor | None) -> Tensor | None:
    """The mask as bool, if its padding is on the left."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.numel() == 0:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        refuse("attention_mask", "a tensor [B, T] of the prompt", shape)
    real = mask.bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        hint = 'For generation set tokenizer.padding_side = "left".'
        refuse("attention_mask", "padding on the left of the tokens of a row", "padding after some", hint)
    if not bool(real[:, -1].all()):
        refuse("attention_mask", "a token in every row", "a row of padding")
    return real


def _nbytes(layer: CacheLayerMixin) -> int:
    if isinstance(layer, StreamLayer):
        return layer.nbytes
    return sum(0 if one is None else one.nbytes for one in (layer.keys, layer.values))
