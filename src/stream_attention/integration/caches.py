"""Caches for Hugging Face's `generate()`: in few bits, or of a bounded number of tokens.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="stream_attention")
    model.generate(**inputs, past_key_values=StreamQuantizedCache(model, "int4"))
    model.generate(**inputs, past_key_values=StreamBoundedCache(model, 4096))

A cache is for one batch: make one for each call, or call `reset()` in between. Both count the tokens that they have
seen, so positions are those of the whole sequence. A batch whose prompts have padding, which has to be in front of
them, needs the cache to be told: `attention_mask=inputs["attention_mask"]`. Padding is not stored.

Layers of the model with a sliding window keep transformers' own cache of that window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..cache_views import ContiguousKV
from ..errors import check_int, refuse
from ..kvcache import quantize_kv
from .cache_layer import StreamLayer
from .evicting_layer import Budget, EvictingLayer
from .hf import NAME
from .quantized_layer import Coding, QuantisedLayer

MOST_IN_GROUP = 256
HEAVY = ("attention", "key_norm", "value_norm", None)


class StreamCache(Cache):
    """What our caches have in common: one layer of ours for each layer of the model that attends to everything."""

    layers: list[CacheLayerMixin]

    def __init__(self, model: Any, attention_mask: Tensor | None) -> None:
        self._config = _config_of(model)
        padding = _padding(attention_mask)
        super().__init__(layers=[self._replaced(one, padding) for one in DynamicCache(config=self._config).layers])
        if not any(isinstance(one, StreamLayer) for one in self.layers):
            hint = "Its own cache is as small as the window already."
            refuse("model", "one with layers that attend to everything", "one with sliding windows alone", hint)

    def _replaced(self, layer: CacheLayerMixin, padding: Tensor | None) -> CacheLayerMixin:
        if type(layer) is DynamicLayer:
            return self._layer(padding)
        if type(layer) is DynamicSlidingWindowLayer:
            return layer
        refuse("model", "one whose layers attend to all tokens or to a sliding window", type(layer).__name__)

    def reset(self) -> None:
        """Forget all. Windows get new layers: transformers' would keep zeros in place of their keys."""
        for n, new in enumerate(DynamicCache(config=self._config).layers):
            layer = self.layers[n]
            if isinstance(layer, StreamLayer):
                layer.reset()
            else:
                self.layers[n] = new

    def _layer(self, padding: Tensor | None) -> StreamLayer:
        """A new layer, which knows the prompt's padding."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds now: codes, scales, windows, tokens, room for more."""
        return sum(_nbytes(layer) for layer in self.layers)

    @property
    def tokens(self) -> int:
        """The most that a row of a layer holds, of the tokens seen."""
        return max((max(one.rows, default=0) for one in self.layers if isinstance(one, StreamLayer)), default=0)


class StreamQuantizedCache(StreamCache):
    """Every token, all but the latest in fp8, int8 or int4, which attention reads as they are.

    The latest `residual` tokens of a row, and those behind them whose block of `group` is not complete, are in full
    precision. A prompt is attended to in full precision, and quantised behind that. So are more than 16 tokens that
    come at once later, but what came before them is read out of codes.

    Args:
        model: the model, or its config; its attention has to be "stream_attention".
        format: "fp8", "int8" or "int4".
        group, residual, keys, values: as in `quantize_kv`; a group is at most 256.
        attention_mask: `[B, T]` of the prompt, where that has padding in front.

    Raises:
        ValueError, TypeError: a bad argument; a model whose attention would not read such a cache.
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
        quantize_kv(  # which checks all of it
            ContiguousKV(*torch.zeros(2, 1, 1, 1, 16)), format, group=group, residual=residual, keys=keys, values=values
        )
        if group > MOST_IN_GROUP:
            refuse("group", f"at most {MOST_IN_GROUP}", group)
        self.coding = Coding(format, group, residual, keys, values)
        super().__init__(model, attention_mask)

    def _layer(self, padding: Tensor | None) -> QuantisedLayer:
        return QuantisedLayer(padding, self.coding)


class StreamBoundedCache(StreamCache):
    """At most `budget + every` tokens of a row, however long it gets: its first, its latest, and those that matter.

    Nothing is dropped, and attention is exact, until a row has more. A longer prompt is attended to whole, then all but
    `budget` of its tokens are dropped, layer by layer; from then on whenever `every` more have come. What is dropped is
    never seen again. Each KV head has its own choice.

    Args:
        model: the model, or its config; its attention has to be "stream_attention".
        budget: tokens that stay.
        sinks: of these the first of the row.
        recent: of these the latest; default: half of the budget, or all but the sinks where nothing else is kept.
        heavy: what the others are chosen by: "attention", what the latest queries, up to 32, looked at; "key_norm",
            keys of small norm; "value_norm", values of large norm; None: there are no others.
        every: tokens that come on top before tokens are dropped again.
        attention_mask: `[B, T]` of the prompt, where that has padding in front.

    Raises:
        ValueError, TypeError: a bad argument; a model whose attention would not read such a cache.
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
        check_int("budget", budget, 1)
        check_int("sinks", sinks, 0)
        check_int("every", every, 1)
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
    """The config of a model, or the config that was given; its attention is ours."""
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        refuse("model", "a transformers model or its config", type(model).__name__, error=TypeError)
    if getattr(config, "is_encoder_decoder", False):
        refuse("model", "a decoder", "an encoder and a decoder", "They need two caches, one for each attention.")
    found = getattr(config.get_text_config(), "_attn_implementation", None)
    if found != NAME:
        hint = f'Call stream_attention.integration.hf.register() and model.set_attn_implementation("{NAME}").'
        refuse("model", f'attn_implementation "{NAME}", which reads such a cache', repr(found), hint)
    return config


def _padding(mask: Tensor | None) -> Tensor | None:
    """The mask as bool, if its padding is in front."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.numel() == 0:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        refuse("attention_mask", "a tensor [B, T] of the prompt", shape)
    real = mask.bool()
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        hint = 'Generation wants it in front: tokenizer.padding_side = "left".'
        refuse("attention_mask", "padding in front of the tokens of a row", "padding behind some", hint)
    if not bool(real[:, -1].all()):
        refuse("attention_mask", "a token in every row", "a row of padding")
    return real


def _nbytes(layer: CacheLayerMixin) -> int:
    if isinstance(layer, StreamLayer):
        return layer.nbytes
    return sum(0 if held is None else held.nbytes for held in (layer.keys, layer.values))
