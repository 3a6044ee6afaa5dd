"""A cache layer that keeps so many tokens of a row: the first ones, the latest ones, and those that matter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache_views import ContiguousKV
from ..errors import refuse
from ..kvcache.key_norm import norms
from ..kvcache.select import comparable, gather, in_order
from ..ops.mass import attention_mass
from .cache_layer import StreamLayer, rolled
from .placeholder import FEW, Observer

VOTERS = 32
"""Latest queries whose attention says what matters, at most; no more than the latest tokens, which nobody votes on."""


class Budget(NamedTuple):
    """What stays of a row that has too many tokens."""

    tokens: int  # in all
    sinks: int  # of them the first
    recent: int  # the latest
    heavy: str | None  # what the others are chosen by: "attention", "key_norm" or "value_norm"
    every: int  # tokens that may come on top before it is chosen anew

    @property
    def capacity(self) -> int:
        return self.tokens + self.every

    @property
    def voters(self) -> int:
        return min(VOTERS, self.recent) if self.heavy == "attention" else 0


class EvictingLayer(StreamLayer):
    """Keeps between `budget.tokens` and `budget.capacity` tokens of a row, each KV head its own.

    A prompt is attended to whole, and what is too much of it is dropped when its attention is done. Later, whenever
    there is no room for a token, all but `budget.tokens` are dropped. What is dropped is gone.
    """

    kv: ContiguousKV | None

    def __init__(self, padding: Tensor | None, budget: Budget) -> None:
        self.budget = budget
        super().__init__(padding)

    def _forget(self) -> None:
        super()._forget()
        self.fresh: int | None = None  # tokens since some were dropped; None: none ever was
        self.voters: Tensor | None = None  # [B, n, Hq, D]: the latest queries
        self.asked: tuple[float | None, float, Tensor | None] | None = None  # their scale, softcap and sink

    @property
    def nbytes(self) -> int:
        return sum(0 if held is None else held.nbytes for held in (self.kv, self.voters))

    @property
    def _observer(self) -> Observer:
        return self._observe

    @property
    def _overfull(self) -> bool:
        return max(self.rows) > self.budget.capacity

    def _start(self, key: Tensor, value: Tensor) -> None:
        if self._overfull:  # until the attention is done
            self.kv = ContiguousKV(key, value, self._lengths(key.device))
        else:
            self._hold(key, value, self.budget.capacity)

    def _extend(self, key: Tensor, value: Tensor) -> list[Tensor]:
        new = key.shape[1]
        cropped = self.voters is None and self.asked is not None  # who would choose; others come with this call
        if not cropped and max(self.rows) > self.budget.tokens and max(self.rows) + new > self.budget.capacity:
            self._evict()
        assert self.kv is not None
        if (
            max(self.rows) + new > self.kv.capacity
        ):  # more at a time than there is room for: until the attention is done
            self._hold(self.kv.key, self.kv.value, max(self.rows) + new)
        self.kv.append(key, value)
        self.rows = [row + new for row in self.rows]
        if self.fresh is not None:
            self.fresh += new
        if new > FEW and len({*self.rows}) == 1:
            held = slice(self.rows[0])
            return self._hollow(ContiguousKV(self.kv.key[:, held], self.kv.value[:, held]))
        return self._hollow(self.kv)

    def _observe(self, query: Tensor, scale: float | None, softcap: float, sink: Tensor | None) -> None:
        """The attention of these queries is done: what it was for may go."""
        if most := self.budget.voters:
            earlier = most - query.shape[1]
            if self.voters is None or earlier <= 0:
                self.voters = query[:, -most:].clone()
            else:
                self.voters = torch.cat([self.voters[:, -earlier:], query], 1)
            self.asked = scale, softcap, sink
        if self._overfull:
            self._evict()

    @torch.no_grad()
    def _evict(self) -> None:
        assert self.kv is not None
        length, device, budget = max(self.rows), self.kv.device, self.budget
        missing = [length - row for row in self.rows]
        behind = [-gap for gap in missing]  # rows end together, as the queries stand at their ends
        key, value = (rolled(x[:, :length], behind) for x in (self.kv.key, self.kv.value))
        place = torch.arange(length, device=device) - torch.tensor(missing, device=device).unsqueeze(1)  # [B, length]
        rows = torch.tensor(self.rows, device=device).unsqueeze(1)
        stays = (place < budget.sinks) | (place >= rows - budget.recent)
        scores = self._scores(key, value, place >= 0).masked_fill(stays.unsqueeze(1), torch.inf)
        order = comparable(scores, place >= 0).argsort(dim=-1, descending=True, stable=True)
        counts = rows.clamp(max=budget.tokens).expand(-1, key.shape[2])
        positions = in_order(order, counts, min(length, budget.tokens))
        self.rows, self.fresh = [min(row, budget.tokens) for row in self.rows], 0
        self._hold(gather(key, positions), gather(value, positions), budget.capacity)

    def _scores(self, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        """How much each token matters, `[B, Hkv, T]`; `real` bool `[B, T]`."""
        if self.budget.heavy == "key_norm":
            return -norms(key)
        if self.budget.heavy == "value_norm":
            return norms(value)
        if self.budget.heavy is None:
            return norms(key).zero_()
        if self.voters is None or self.asked is None:
            refuse("attn_implementation", '"stream_attention", which shows the cache its queries', "another")
        scale, softcap, sink = self.asked
        of_tokens = bool(self.pads) and max(self.pads) > 0  # whether some queries may be those of padding
        return attention_mass(
            self.voters,
            key,
            causal=True,
            mask=real[:, None, None] if of_tokens else None,
            row_weights=real[:, -self.voters.shape[1] :].float() if of_tokens else None,
            scale=scale,
            softcap=softcap,
            sink=sink,
        )

    def _hold(self, key: Tensor, value: Tensor, capacity: int) -> None:
        """Hold a copy of the tokens `[B, n, Hkv, .]` with room for more; those behind `rows[b]` may be anything."""
        held = min(key.shape[1], capacity)
        keys, values = (x.new_empty(x.shape[0], capacity, *x.shape[2:]) for x in (key, value))
        keys[:, :held], values[:, :held] = key[:, :held], value[:, :held]
        self.kv = ContiguousKV(keys, values, self._lengths(key.device))

    def _lengths(self, device: torch.device) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int32, device=device)

    def _drop(self, count: int) -> None:
        assert self.kv is not None and self.kv.lengths is not None
        if self.fresh is not None and count > self.fresh:
            hint = "What made room for them is gone."
            refuse("crop", f"at most the {self.fresh} tokens that came since some were dropped", count, hint)
        self.kv.lengths.sub_(count)
        if self.fresh is not None:
            self.fresh -= count
        if self.voters is not None:
            self.voters = self.voters[:, :-count] if count < self.voters.shape[1] else None

    def _select(self, index: Tensor) -> None:
        assert self.kv is not None
        self.kv = ContiguousKV(self.kv.key[index], self.kv.value[index], self._lengths(index.device))
        self.voters = None if self.voters is None else self.voters[index]
