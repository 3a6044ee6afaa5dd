"""StarAttention: long-context inference in two phases, as a module without parameters that keeps the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import refuse
from ..base.problem import CallOptions, Inputs
from ..dispatch.validate import attention_tensors
from ..distributed.graph_break import graph_break
from ..distributed.processes import Group, transport_of
from ..distributed.shard import Run
from ..distributed.shard_attention import Attention, Rows, State
from ..distributed.star import shard_context, star_cache, star_context_attention
from ..distributed.transport import Transport, VirtualRanks, unwrap_ranks
from ..distributed.tree import merge_ranks
from ..kvcache import CompressionStats, KVCompressor, create_kv_compressor
from ..kvcache.compressor import Stored, decompress
from ._checks import check_heads, check_length, checked_config
from .config import StreamAttentionConfig


@dataclass
class StarAttentionState:
    """An encoded context, and the queries after it. Dictionaries are by rank, of this process."""

    context_length: int
    query_host_id: int  # the rank that keeps the keys of queries: the last
    is_query_host: bool  # whether that is a rank of this process
    output: dict[int, Tensor]  # of the rank's own rows of the context
    kv_caches: dict[int, tuple[Stored, Stored]]  # of the rank's own rows, without copies of the anchor
    compression: dict[int, CompressionStats] = field(default_factory=dict)  # where caches are compressed
    query_kv: tuple[Tensor, Tensor] | None = None  # keys and values of queries, on the query host
    query_length: int = 0  # how many there are, on every rank
    current_phase: int = 1


class StarAttention(nn.Module):
    """Star attention: `encode_context` once, without communication, then `process_query` for each query.

    Read of the config: `num_heads`, `head_dim`, the tiles, `max_sequence_length`, `enable_star_attention`,
    `star_attention_block_size`, `star_attention_anchor_size`; `star_attention_num_hosts`, the ranks that the context is
    spread over: 1 is this process alone, any other number is that of the group, and needs `enable_distributed`;
    `kv_compression_ratio`, where `compression` is passed, which `enable_kv_compression` allows. It is not
    differentiable; `dropout` while training is refused.

    Args:
        config: copied.
        process_group: as `group` of `ring_attention`, for more than one host. With `VirtualRanks` results are lists.

    >>> from stream_attention import StreamAttentionConfig
    >>> from stream_attention.core.star_attention import StarAttention
    >>> sizes = {"star_attention_block_size": 32, "star_attention_anchor_size": 8}
    >>> star = StarAttention(StreamAttentionConfig(num_heads=4, head_dim=16, **sizes))
    >>> state = star.encode_context(torch.randn(2, 100, 4, 16))
    >>> star.process_query(torch.randn(2, 3, 4, 16), state).shape
    torch.Size([2, 3, 4, 16])
    """

    def __init__(self, config: StreamAttentionConfig, process_group: Group = None) -> None:
        super().__init__()
        self.config = checked_config(config, "StarAttention", "enable_star_attention")
        self.block_size, self.anchor_block_size = config.star_attention_block_size, config.star_attention_anchor_size
        self.num_hosts, self.process_group = config.star_attention_num_hosts, process_group
        if self.anchor_block_size > self.block_size:
            refuse("star_attention_anchor_size", f"at most a block, {self.block_size}", self.anchor_block_size)
        if self.num_hosts > 1 and not config.enable_distributed:
            refuse("star_attention_num_hosts", "1 with enable_distributed=False", self.num_hosts)
        if self.num_hosts == 1 and process_group is not None and transport_of(process_group).size > 1:
            hint = "Set star_attention_num_hosts to the size of the group."
            refuse("process_group", "None with star_attention_num_hosts=1", type(process_group).__name__, hint)
        self._state: StarAttentionState | None = None

    @property
    def transport(self) -> Transport:
        """The ranks that the context is spread over."""
        if self.num_hosts == 1:
            return VirtualRanks(1)
        transport = transport_of(self.process_group)
        if transport.size != self.num_hosts:
            hint = "It counts the ranks of the group; torchrun starts them."
            refuse("star_attention_num_hosts", f"the {transport.size} ranks of the group", self.num_hosts, hint)
        return transport

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None = None, is_context: bool = True
    ) -> Any:
        """Phase 1 of a context, whose state the module keeps, or phase 2 of a query behind the context it keeps.

        Args:
            query, key, value: `[B, T, H, D]`, the same on every rank: the whole context, or a query's tokens.
            attention_mask: refused: blocks see themselves and the anchor.
            is_context: False is `process_query(query, key=key, value=value)`: causal attention if there is no context.

        Returns:
            Of a context, the output of this rank's own rows: all of them on one rank. Of a query, the whole output.
        """
        if attention_mask is not None:
            refuse("attention_mask", "None", "a value", "Blocks see themselves and the anchor, queries everything.")
        if is_context:
            return self._listed(self.encode_context(query, key, value).output)
        if self._state is None:
            self._state = self.encode_context(*(t[:, :0] for t in (query, key, value)))
        return self.process_query(query, key=key, value=value)

    @graph_break
    @torch.no_grad()
    def encode_context(
        self,
        context: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        compression: str | KVCompressor | None = None,
    ) -> StarAttentionState:
        """Phase 1. Every rank is passed the whole context and encodes its own blocks of it.

        Args:
            context: the queries `[B, T, num_heads, head_dim]`, which are also keys and values if those are None.
            key, value: `[B, T, Hkv, head_dim]` and `[B, T, Hkv, Dv]`, positions already in them.
            compression: of each rank's cache: a method of `create_kv_compressor`, or a compressor; None keeps all. A
                method that uses attention uses that of the rank's own rows of the context among themselves.
        """
        key, value = _both(key, value) or (context, context)
        check_heads(self.config.num_heads, self.config.head_dim, context, key)
        attention_tensors(Inputs(context, key, value))
        if context.shape[1] != key.shape[1]:
            refuse("key", f"the context's {context.shape[1]} rows", key.shape[1])
        self._check_mode()
        length = context.shape[1]
        check_length(self.config, length)
        compressor = self._compressor(compression)

        transport = self.transport
        blocks: dict[str, Any] = {"block_size": self.block_size, "anchor_size": self.anchor_block_size}
        sizes = blocks | {"group": transport}
        rows = [_as_list(shard_context(t, **sizes)) for t in (context, key, value)]
        outs = star_context_attention(*rows, length=length, backend=self.config.backend, **sizes)
        kept = star_cache(*rows[1:], length=length, **sizes)
        last = transport.size - 1
        state = StarAttentionState(length, last, last in transport.ranks, {}, {})
        for rank, query, out, pair in zip(transport.ranks, rows[0], outs, kept, strict=True):
            own = slice(out.shape[1] - pair[0].shape[1], None)  # after the copy of the anchor
            state.output[rank] = out[:, own]
            state.kv_caches[rank] = pair
            if compressor is not None and pair[0].shape[1]:
                ratio, votes = self.config.kv_compression_ratio, query[:, own] if compressor.uses_query else None
                keys, values, stats = compressor.compress(pair[0], pair[1], ratio, query=votes)
                state.kv_caches[rank], state.compression[rank] = (keys, values), stats
        self._state = state
        return state

    @graph_break
    @torch.no_grad()
    def process_query(
        self,
        query: Tensor,
        state: StarAttentionState | None = None,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Any:
        """Phase 2: the attention of a query, the same on every rank, to all of the context and the queries before it.

        Args:
            query: `[B, Tq, num_heads, head_dim]`.
            state: of `encode_context`; None is the last one's.
            key, value: of these tokens, the same on every rank; appended to the state, on the last rank alone. Each
                token sees those up to itself. None: the tokens see the state as it is, which does not change.

        Returns:
            `[B, Tq, num_heads, Dv]` on every rank.
        """
        state = self._state if state is None else state
        if state is None:
            refuse("state", "an encoded context", "None", "Call encode_context first.")
        new = _both(key, value)
        self._check_mode()
        transport = self.transport
        caches = {rank: decompress(*state.kv_caches[rank]) for rank in transport.ranks}
        for keys, values in caches.values():
            check_heads(self.config.num_heads, self.config.head_dim, query, keys)
            attention_tensors(Inputs(query, keys, values))
        if new is not None:
            key, value = new
            attention_tensors(Inputs(query, key, value))
            if (key.shape[2], value.shape[3]) != (keys.shape[2], values.shape[3]):
                expected = f"the context's heads and head dim, {list(values.shape[2:])}"
                refuse("key and value", expected, [key.shape[2], value.shape[3]])
            if key.shape[1] != query.shape[1]:
                refuse("key", f"a key for each of the query's {query.shape[1]} rows", key.shape[1])
            check_length(self.config, state.context_length + state.query_length + key.shape[1])
            if state.is_query_host:
                old = state.query_kv
                state.query_kv = new if old is None else (torch.cat((old[0], key), 1), torch.cat((old[1], value), 1))
            state.query_length += key.shape[1]
        state.current_phase = 2
        states = []
        parameters = {"tokens of the context, of queries": (state.context_length, state.query_length)}
        for rank, (keys, values) in caches.items():
            partial = State(query, values.shape[-1])
            self._fold(partial, query, keys, values, state.compression.get(rank), causal=False)
            if rank == state.query_host_id and state.query_kv is not None:
                self._fold(partial, query, *state.query_kv, None, causal=key is not None)
            states.append(merge_ranks("StarAttention", rank, transport.size, *partial.sums(), parameters))
        outs = [out.to(query.dtype) for out, _ in transport.run(states, query.device)]
        return self._listed(dict(zip(transport.ranks, outs, strict=True)))

    def _fold(
        self, state: State, query: Tensor, key: Tensor, value: Tensor, stats: CompressionStats | None, causal: bool
    ) -> None:
        """Merge keys into the state of a query whose last row sees the last of them."""
        q_len, k_len = query.shape[1], key.shape[1]
        if not q_len or not k_len:
            return
        attention = Attention.of(query, CallOptions(causal, backend=self.config.backend))
        mask = None if stats is None else stats.mask(query.shape[2])
        attention.forward(state, Rows((Run(0, q_len, k_len - q_len),), query, mask), key, value, (Run(0, k_len, 0),))

    def _compressor(self, compression: str | KVCompressor | None) -> KVCompressor | None:
        if compression is None:
            return None
        if not self.config.enable_kv_compression:
            refuse("compression", "None with enable_kv_compression=False", repr(compression))
        return create_kv_compressor(compression) if isinstance(compression, str) else compression

    def _check_mode(self) -> None:
        if self.training and self.config.dropout:
            refuse("dropout", "0 while training", self.config.dropout, "Star attention is inference: call .eval()")

    def _listed(self, by_rank: dict[int, Tensor]) -> Any:
        return unwrap_ranks([*by_rank.values()], isinstance(self.process_group, VirtualRanks))

    def extra_repr(self) -> str:
        sizes = f"block_size={self.block_size}, anchor_block_size={self.anchor_block_size}, num_hosts={self.num_hosts}"
        return f"num_heads={self.config.num_heads}, head_dim={self.config.head_dim}, {sizes}"


def _both(key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if key is None or value is None:
        return None if key is value else refuse("key and value", "both or neither", "one")
    return key, value


def _as_list(shards: Any) -> list[Tensor]:
    return [shards] if isinstance(shards, Tensor) else shards


def create_star_attention(config: StreamAttentionConfig) -> StarAttention:
    """A `StarAttention` from its config."""
    return StarAttention(config)
