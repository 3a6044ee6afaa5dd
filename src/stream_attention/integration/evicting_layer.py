"""A cache layer with a bounded number of tokens per row: the first, the latest, and the most important ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.kv_layouts import ContiguousKV
from ..kvcache.key_norm import norms
from ..kvcache.select import comparable, gather, in_order
from ..ops.mass import attention_mass
from .cache_layer import StreamLayer, rolled
from .placeholder import MAX_DECODE_QUERIES

VOTERS = 32
"""The most of the latest queries whose attention is a token's importance; no more than the latest tokens, which are
kept anyway."""


class Budget(NamedTuple):
    """Which tokens of a row are kept."""

    tokens: int  # in all
    sinks: int  # of them the first
    recent: int  # the latest
    heavy: str | None  # what the others are chosen by: "attention", "key_norm" or "value_norm"
    every: int  # tokens appended between evictions

    @property
    def capacity(self) -> int:
        return self.tokens + self.every

    @property
    def voters(self) -> int:
        return min(VOTERS, self.recent) if self.heavy == "attention" else 0


class EvictingLayer(StreamLayer):
    """Keeps between `budget.tokens` and `budget.capacity` tokens of a row, each KV head its own.

    Attention over a prompt is exact; tokens above the budget are evicted after it. Later, whenever the capacity is
    reached, all but `budget.tokens` are evicted.
    """

    kv: ContiguousKV  # None before the first tokens

    def __init__(self, padding: Tensor | None, budget: Budget) -> None:
        self.budget = budget
        super().__init__(padding)

    def _forget(self) -> None:
        super()._forget()
        self.fresh: int | None = None  # tokens since the last eviction; None: there was none
        self.voters: Tensor | None = None  # [B, n, Hq, D]: the latest queries
        self.score_options: dict[str, Any] | None = None  # their scale, softcap and sink

    @property
    def nbytes(self) -> int:
        return sum(0 if one is None else one.nbytes for one in (self.kv, self.voters))

    @property
    def _overfull(self) -> bool:
        return max(self.rows) > self.budget.capacity

    def _start(self, key: Tensor, value: Tensor) -> None:
        if self._overfull:  # until after the attention
            self.kv = ContiguousKV(key, value, self._lengths(key.device))
        else:
            self._allocate(key, value, self.budget.capacity)

    def _extend(self, key: Tensor, value: Tensor) -> ContiguousKV:
        new = key.shape[1]
        cropped = self.voters is None and self.score_options is not None  # the voters come with this call
        if not cropped and max(self.rows) > self.budget.tokens and max(self.rows) + new > self.budget.capacity:
            self._evict()
        if max(self.rows) + new > self.kv.capacity:  # more at a time than the capacity: until after the attention
            self._allocate(self.kv.key, self.kv.value, max(self.rows) + new)
        self.kv.append(key, value)
        self.rows = [row + new for row in self.rows]
        if self.fresh is not None:
            self.fresh += new
        if new > MAX_DECODE_QUERIES and len({*self.rows}) == 1:
            valid = slice(self.rows[0])
            return ContiguousKV(self.kv.key[:, valid], self.kv.value[:, valid])
        return self.kv

    def _observe(self, query: Tensor, options: dict[str, Any]) -> None:
        """The tokens of these queries may now be evicted."""
        if most := self.budget.voters:
            earlier = most - query.shape[1]
            if self.voters is None or earlier <= 0:
                self.voters = query[:, -most:].clone()
            else:
                self.voters = torch.cat([self.voters[:, -earlier:], query], 1)
            self.score_options = options
        if self._overfull:
            self._evict()

    @torch.no_grad()
    def _evict(self) -> None:
        length, device, budget = max(self.rows), self.kv.device, self.budget
        missing = [length - row for row in self.rows]
        shifts = [-gap for gap in missing]  # rows are aligned at their ends, as the queries are
        key, value = (rolled(x[:, :length], shifts) for x in (self.kv.key, self.kv.value))
        place = torch.arange(length, device=device) - torch.tensor(missing, device=device).unsqueeze(1)  # [B, length]
        rows = torch.tensor(self.rows, device=device).unsqueeze(1)
        stays = (place < budget.sinks) | (place >= rows - budget.recent)
        scores = self._scores(key, value, place >= 0).masked_fill(stays.unsqueeze(1), torch.inf)
        order = comparable(scores, place >= 0).argsort(dim=-1, descending=True, stable=True)
        counts = rows.clamp(max=budget.tokens).expand(-1, key.shape[2])
        positions = in_order(order, counts, min(length, budget.tokens))
        self.rows, self.fresh = [min(row, budget.tokens) for row in self.rows], 0
        self._allocate(gather(key, positions), gather(value, positions), budget.capacity)

    def _scores(self, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        """The importance of each token, `[B, Hkv, T]`; `real` bool `[B, T]`."""
        if self.budget.heavy == "key_norm":
            return -norms(key)
        if self.budget.heavy == "value_norm":
            return norms(value)
        if self.budget.heavy is None:
            return norms(key).zero_()
        if self.voters is None or self.score_options is None:
            refuse("attn_implementation", '"stream_attention", which passes the cache its queries', "another")
        padded = bool(self.pads) and max(self.pads) > 0  # some queries may be padding
        mask = real[:, None, None] if padded else None
        weights = real[:, -self.voters.shape[1] :].float() if padded else None
        return attention_mass(self.voters, key, causal=True, mask=mask, row_weights=weights, **self.score_options)

    def _allocate(self, key: Tensor, value: Tensor, capacity: int) -> None:
        """Store a copy of the tokens `[B, n, Hkv, .]` with this capacity; those beyond `rows[b]` are undefined."""
        count = min(key.shape[1], capacity)
        keys, values = (x.new_empty(x.shape[0], capacity, *x.shape[2:]) for x in (key, value))
        keys[:, :count], values[:, :count] = key[:, :count], value[:, :count]
        self.kv = ContiguousKV(keys, values, self._lengths(key.device))

    def _lengths(self, device: torch.device) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.int32, device=device)

    def _drop(self, count: int) -> None:
        assert self.kv.lengths is not None
        if self.fresh is not None and count > self.fresh:
            hint = "Evicted tokens cannot be restored."
            refuse("crop", f"at most the {self.fresh} tokens since the last eviction", count, hint)
        self.kv.lengths.sub_(count)
        if self.fresh is not None:
            self.fresh -= count
        if self.voters is not None:
            self.voters = self.voters[:, :-count] if count < self.voters.shape[1] else None

    def _select(self, index: Tensor) -> None:
        self.kv = ContiguousKV(self.kv.key[index], self.kv.value[index], self._lengths(index.device))
        self.voters = None if self.voters is None else self.voters[index]
