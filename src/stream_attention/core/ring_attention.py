"""RingAttention: `ring_attention` as a module without parameters, with a cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..base.errors import refuse
from ..distributed.agreement import common_seed
from ..distributed.call_spec import CallSpec, prepare
from ..distributed.graph_break import graph_break
from ..distributed.processes import Group, transport_of
from ..distributed.ring import Rotation, check_rotation, run_ring
from ..distributed.shard import Layout, Run, check_layout
from ..distributed.transport import Transport, VirtualRanks, unwrap_ranks
from ..ops.attention import seed_tensor
from ._checks import appended, check_heads, check_length, checked_config
from ._masks import split_mask
from .config import StreamAttentionConfig


class RingCache(tuple[Tensor, Tensor]):
    """`(key, value)` of one rank, and the lengths of all ranks' calls, from which positions of rows follow."""

    lengths: tuple[tuple[int, ...], ...]  # of every call, of every rank

    def __new__(cls, key: Tensor, value: Tensor, lengths: tuple[tuple[int, ...], ...]) -> RingCache:
        cache = super().__new__(cls, (key, value))
        cache.lengths = lengths
        return cache

    def __reduce__(self) -> tuple[Any, ...]:
        return RingCache, (*self, self.lengths)


class RingAttention(nn.Module):
    """Exact attention over a sequence whose shards lie on the ranks of a process group, forward and backward.

    Read of the config: `num_heads`, `head_dim`, the tiles, `dropout`, `gradient_checkpointing`, `max_sequence_length`
    (of all ranks' keys together), `enable_ring_attention`, and `enable_distributed`: False computes on this process
    alone. There is no block size: whole shards are sent while the previous ones are computed.

    Args:
        config: copied.
        process_group: as `group` of `ring_attention`: a process group, a 1-D device mesh, None for the default group;
            with `VirtualRanks` calls take and return lists, one tensor per rank.
        layout: that of `shard_sequence`; "zigzag" balances causal work.
        rotate: "p2p", "alltoall" or "allgather", as in `ring_attention`.

    >>> from stream_attention import StreamAttentionConfig
    >>> from stream_attention.core.ring_attention import RingAttention
    >>> attend = RingAttention(StreamAttentionConfig(num_heads=4, head_dim=16))
    >>> attend(*torch.randn(3, 2, 10, 4, 16)).shape  # of one process: the shard is the sequence
    torch.Size([2, 10, 4, 16])
    """

    def __init__(
        self,
        config: StreamAttentionConfig,
        process_group: Group = None,
        *,
        layout: Layout = "contiguous",
        rotate: Rotation = "p2p",
    ) -> None:
        super().__init__()
        self.config = checked_config(config, "RingAttention", "enable_ring_attention")
        check_layout(layout)
        check_rotation(rotate)
        if process_group is not None and not config.enable_distributed:
            refuse("process_group", "None with enable_distributed=False", type(process_group).__name__)
        self.process_group, self.layout, self.rotate = process_group, layout, rotate

    @property
    def transport(self) -> Transport:
        return transport_of(self.process_group) if self.config.enable_distributed else VirtualRanks(1)

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.transport.size

    @property
    def rank(self) -> int:
        """Of this process in the group; the first one of virtual ranks."""
        return self.transport.ranks[0]

    @graph_break
    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any = None, causal: bool = True) -> Any:
        """Attend.

        Args:
            query, key, value: this rank's shards, `[B, Tq, num_heads, head_dim]` and `[B, Tk, Hkv, D]`.
            attention_mask: as in `FusedOnlineAttention`, for this rank's queries and the keys of all ranks.
            causal: by position in the whole sequence.

        Returns:
            This rank's `[B, Tq, num_heads, Dv]`.
        """
        compute = partial(self._compute, causal=causal, seed=self._seed(query))
        if self.config.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(compute, query, key, value, attention_mask, use_reentrant=False)
        return compute(query, key, value, attention_mask)

    @graph_break
    def forward_with_cache(
        self, query: Any, key: Any, value: Any, past_key_values: Any = None, use_cache: bool = True, causal: bool = True
    ) -> tuple[Any, Any]:
        """Attend to a cache and to the tokens of this call, whose positions follow all of the cache's.

        A rank keeps the rows that it was passed, which may be none: to generate, pass one rank the new token and the
        others shards of no rows; where all ranks have the new queries, `tree_decode_attention` sends less.

        Args:
            past_key_values: what an earlier call returned; or `(key, value)`, shards in the order of ranks, such as
                each rank's part after `KVCompressor.compress`.
            use_cache: False returns None in place of the cache.

        Returns:
            This rank's output, and its cache: `(key, value)` with those of this call behind the earlier ones.
        """
        if self.layout != "contiguous":
            refuse("layout", "'contiguous' with a cache", repr(self.layout), "A cache grows at its end, in order.")
        listed = isinstance(query, (list, tuple))
        queries, *new = self._columns(query, key, value)
        pasts = [past_key_values] if not listed else list(past_key_values or [None] * len(queries))
        for q, k in zip(queries, new[0], strict=True):
            if q.shape[1] != k.shape[1]:
                refuse("key", f"as many new rows as the query's {q.shape[1]}", k.shape[1])
        hint = "Pass compressor.decompress(keys, values), or decode from a QuantizedKV: tree_decode_attention."
        pairs = [
            rows if past is None else appended("past_key_values", past, rows, hint)
            for past, *rows in zip(pasts, *new, strict=True)
        ]
        keys, values = map(list, zip(*pairs, strict=True))
        spec = self._spec(queries, keys, values, None, None, causal, self._seed(query))
        cached = tuple(total - n for total, n in zip(spec.k_lengths, spec.q_lengths, strict=True))
        known = getattr(pasts[0], "lengths", ())
        rows = tuple(map(sum, zip(*known, strict=True)))
        if rows not in ((), cached):
            hint = "Positions follow from the rows of earlier calls: pass what the last call returned, unchanged."
            refuse("past_key_values", f"{rows} rows on the ranks, as the last call returned", cached, hint)
        calls = (*(known or (cached,)), spec.q_lengths)
        outs = [out for out, _ in run_ring(replace(spec, k_runs=_runs_of_calls(calls)), self.rotate)]
        caches = [RingCache(k, v, calls) for k, v in zip(keys, values, strict=True)]
        return unwrap_ranks(outs, listed), unwrap_ranks(caches, listed) if use_cache else None

    def _compute(self, query: Any, key: Any, value: Any, attention_mask: Any, causal: bool, seed: Any) -> Any:
        listed = isinstance(query, (list, tuple))
        queries, keys, values = self._columns(query, key, value)
        masks = [None] * len(queries) if attention_mask is None else attention_mask if listed else [attention_mask]
        pairs = []
        for q, k, mask in zip(queries, keys, masks, strict=True):
            # Without memory, in the shape of the keys of all ranks.
            width = mask.shape[-1] if isinstance(mask, Tensor) and mask.dim() else k.shape[1]
            pairs.append(split_mask(mask, q, k.new_empty(1, 1, *k.shape[2:]).expand(k.shape[0], width, -1, -1)))
        mask, bias = (None if all(t is None for t in side) else list(side) for side in zip(*pairs, strict=True))
        spec = self._spec(queries, keys, values, mask, bias, causal, seed)
        return unwrap_ranks([out for out, _ in run_ring(spec, self.rotate)], listed)

    def _columns(self, *tensors: Any) -> list[list[Any]]:
        """Query, key and value as lists, one tensor for each rank of this process, with checked heads."""
        columns = [list(x) if isinstance(tensors[0], (list, tuple)) else [x] for x in tensors]
        for query, key in zip(*columns[:2], strict=True):
            check_heads(self.config.num_heads, self.config.head_dim, query, key)
        return columns

    def _spec(self, query: Any, key: Any, value: Any, mask: Any, bias: Any, causal: bool, seed: Any) -> CallSpec:
        tensors = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
        where = {"group": self.transport, "layout": self.layout, "rotate": self.rotate, "backend": self.config.backend}
        how = {"causal": causal, "dropout_p": self._dropout, "seed": seed}
        spec = prepare("ring_attention", tensors | where | how)
        check_length(self.config, sum(spec.k_lengths))
        return spec

    @property
    def _dropout(self) -> float:
        return self.config.dropout if self.training else 0.0

    def _seed(self, query: Any) -> Tensor | None:
        """Drawn once for all ranks, and outside of what a checkpoint recomputes."""
        if not self._dropout:
            return None
        first = query[0] if isinstance(query, (list, tuple)) else query
        return common_seed(self.transport, seed_tensor(None, first))

    def extra_repr(self) -> str:
        return f"num_heads={self.config.num_heads}, head_dim={self.config.head_dim}, layout={self.layout!r}"


def _runs_of_calls(calls: tuple[tuple[int, ...], ...]) -> tuple[tuple[Run, ...], ...]:
    """Every rank's runs after calls with these lengths per rank, whose positions follow each other."""
    runs: list[list[Run]] = [[] for _ in calls[0]]
    firsts, base = [0] * len(calls[0]), 0
    for lengths in calls:
        for rank, (n, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
            runs[rank].append(Run(firsts[rank], n, base + end - n))
            firsts[rank] += n
        base += sum(lengths)
    return tuple(tuple(run for run in one if run.length) for one in runs)


def create_ring_attention(config: StreamAttentionConfig, process_group: Group = None) -> RingAttention:
    """A `RingAttention` from its config."""
    return RingAttention(config, process_group)
