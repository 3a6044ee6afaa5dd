"""How a provider runs a row, and whether what it computes is right.

Its logits are compared before it is timed. With `exact` those of the same model in fp32 over what its cache holds,

    max |its - exact|  <=  2 max |sdpa's - exact|        sdpa in bf16, over the same cache

and for training the gradient of the first projection, three times. So codes are held to what they stand for, and not to
what they were made of.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from stream_attention.integration.caches import StreamQuantizedCache

from .rows import Row

CHECKED = 2048
"""Tokens of the prompt that a check reads at most, and tokens that it decodes."""
CHECKED_NEW = 8
CHECKED_LAST = 64
"""Tokens at the end of a prompt whose logits are compared."""

NEEDS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Packages without which an implementation is not asked for: transformers would look for it on a hub."""

Pairs = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, `[B, Hkv, T, D]`."""


class Verdict(NamedTuple):
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return self.error <= self.allowed  # NaN is not


def why_not(provider: str) -> str | None:
    """Why a provider is not there."""
    package = NEEDS.get(provider.partition(" ")[0])
    return f"{package} is not installed" if package is not None and find_spec(package) is None else None


def choose(model: Any, provider: str) -> None:
    """Let the model attend by a provider."""
    model.set_attn_implementation(provider.partition(" ")[0])


# Prefill


@torch.no_grad()
def prefill(model: Any, ids: Tensor, keep: int = 1) -> tuple[Tensor, Any]:
    cache = DynamicCache(config=model.config)
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits, cache


def pairs_of(cache: Any) -> Pairs:
    """What a cache of plain tensors holds."""
    return [(layer.keys, layer.values) for layer in cache.layers]


# Decoding


def filled(model: Any, provider: str, pairs: Pairs, new: int) -> Any:
    """A provider's cache that holds what a prompt left, with room for more."""
    kind = provider.partition(" ")[2]
    length = pairs[0][0].shape[2]
    if kind == "":
        cache = DynamicCache(config=model.config)
    elif kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=length + new)
    else:
        choose(model, provider)
        cache = StreamQuantizedCache(model, kind)
    with torch.no_grad():
        at = torch.arange(length, device=pairs[0][0].device)
        for index, (key, value) in enumerate(pairs):
            cache.update(key, value, index, {"cache_position": at})
    return cache


def held(cache: Any, pairs: Pairs) -> Pairs:
    """What such a cache stands for, as plain tensors."""
    if not isinstance(cache, StreamQuantizedCache):
        return pairs
    tiles = [layer.kv.tile(0, layer.total) for layer in cache.layers]
    return [(key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()) for key, value in tiles]


@torch.no_grad()
def decode(model: Any, cache: Any, token: Tensor, new: int, forced: Tensor | None = None) -> list[Tensor]:
    """The logits of `new` steps, as a loop of a user makes them; tokens are the likeliest, or those that are given."""
    found = []
    for step in range(new):
        logits = model(token, past_key_values=cache, use_cache=True).logits
        token = logits[:, -1:].argmax(-1) if forced is None else forced[:, step : step + 1]
        found = [*found, logits] if forced is not None else [logits]
    return found


@torch.no_grad()
def step(model: Any, cache: Any, token: Tensor) -> Tensor:
    """The likeliest token after `token`."""
    return model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)


# Training


def train(model: Any, ids: Tensor) -> Tensor:
    """The loss of a step whose gradients are left in the weights."""
    model.zero_grad(set_to_none=True)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


# Checks


class Checks:
    """Verdicts on providers of one model; holds a copy of it in fp32 as long as it is asked."""

    def __init__(self, model: Any) -> None:
        self.model, self._exact = model, None
        self._known: dict[tuple[Any, ...], Verdict] = {}  # rows that differ in what a check does not read share one

    @property
    def exact(self) -> Any:
        if self._exact is None:
            self._exact = copy.deepcopy(self.model).float()
            choose(self._exact, "sdpa")
        return self._exact

    def verdict(self, row: Row, provider: str, ids: Tensor, pairs: Pairs | None) -> Verdict:
        key = row.direction, provider, row.batch, min(row.context, CHECKED)
        if key not in self._known:
            self._known[key] = self._verdict(row, provider, ids, pairs)
        return self._known[key]

    def _verdict(self, row: Row, provider: str, ids: Tensor, pairs: Pairs | None) -> Verdict:
        if row.direction == "prefill":
            return self._prefill(provider, ids[:, :CHECKED])
        if row.direction == "training":
            return self._training(provider, ids[:, :CHECKED])
        assert pairs is not None
        return self._decode(provider, ids, [(key[:, :, :CHECKED], value[:, :, :CHECKED]) for key, value in pairs])

    def _prefill(self, provider: str, ids: Tensor) -> Verdict:
        exact, _ = prefill(self.exact, ids, CHECKED_LAST)
        return compared(
            exact, *(self._by(one, lambda m: prefill(m, ids, CHECKED_LAST)[0]) for one in (provider, "sdpa"))
        )

    def _training(self, provider: str, ids: Tensor) -> Verdict:
        def gradient(model: Any) -> Tensor:
            train(model, ids)
            found = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
            model.zero_grad(set_to_none=True)
            return found

        exact = gradient(self.exact)
        return compared(exact, *(self._by(one, gradient) for one in (provider, "sdpa")), factor=3.0)

    def _decode(self, provider: str, ids: Tensor, pairs: Pairs) -> Verdict:
        batch = pairs[0][0].shape[0]
        tokens = ids[:1, : CHECKED_NEW + 1].expand(batch, -1)
        cache = filled(self.model, provider, pairs, CHECKED_NEW)
        plain = held(cache, pairs)

        def steps(model: Any, cache: Any) -> Tensor:
            return torch.cat(decode(model, cache, tokens[:, :1], CHECKED_NEW, tokens[:, 1:]), 1)

        mine = self._by(provider, lambda model: steps(model, cache))
        sdpa = self._by("sdpa", lambda model: steps(model, filled(model, "sdpa", plain, CHECKED_NEW)))
        wide = [(key.float(), value.float()) for key, value in plain]
        return compared(steps(self.exact, filled(self.exact, "sdpa", wide, CHECKED_NEW)), mine, sdpa)

    def _by(self, provider: str, compute: Callable[[Any], Tensor]) -> Tensor:
        choose(self.model, provider)
        return compute(self.model)

    def forget(self) -> None:
        self._exact = None
        gc.collect()


def compared(exact: Tensor, mine: Tensor, sdpa: Tensor, factor: float = 2.0) -> Verdict:
    error, eager = (float((x.float() - exact).abs().max()) for x in (mine, sdpa))
    return Verdict(error, factor * eager)
