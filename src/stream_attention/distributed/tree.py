"""tree_decode_attention(): every rank attends to its part of the KV cache; only partial states are sent.

The newest tokens' queries are on every rank. Each rank computes their state over its part of the keys, one all-gather
brings everyone's states `(out, lse)` to everyone, and every rank merges them in the order of ranks, so that all have
the same bits. Bytes sent per rank: (P-1) * B * Tq * Hq * (Dv + 1) * 4, whatever the length of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.kv_layouts import ContiguousKV
from ..base.problem import CallOptions, DecodeInputs
from ..base.state import add_sink, merge, per_row
from ..dispatch import validate
from ..ops.decode import decode_attention
from .agreement import agree, described
from .graph_break import graph_break
from .processes import Group, transport_of
from .shard import Run, check_shards
from .shard_attention import Attention, Rows, State
from .transport import Strategy, all_gather, unwrap_ranks


@graph_break
def tree_decode_attention(
    query: Any,
    cache: Any,
    *,
    group: Group = None,
    causal: bool = True,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """`decode_attention` over a cache whose parts lie on the ranks of a group. No gradient flows through it.

    The new tokens were appended to the last rank's part and to no other, so that `causal` concerns that part alone. No
    lengths are exchanged. Ranks compare the shapes of their states on CPUs only: elsewhere that would synchronise.
    A window or ALiBi needs the positions of a part in the whole: use `ring_attention`.

    Args:
        query: `[B, Tq, Hq, D]`, the same on every rank.
        cache: this rank's part, any `KVCache`; it may be empty. Parts of `ContiguousKV` without lengths give fp32
            states; the others are rounded to the query's dtype once per rank. With `VirtualRanks` a list of one each.
        group: as in `ring_attention`.
        The rest: as in `decode_attention`.

    Returns:
        `[B, Tq, Hq, Dv]`, the same on every rank, or `(out, lse)`; with `VirtualRanks` lists.

    >>> from stream_attention import ContiguousKV
    >>> from stream_attention.distributed import VirtualRanks
    >>> parts = [ContiguousKV(*torch.randn(2, 1, n, 2, 16)) for n in (100, 0, 57)]
    >>> [out.shape for out in tree_decode_attention(torch.randn(1, 1, 4, 16), parts, group=VirtualRanks(3))][:1]
    [torch.Size([1, 1, 4, 16])]
    """
    transport = transport_of(group)
    listed = isinstance(cache, (list, tuple))
    caches = list(cache) if listed else [cache]
    if len(caches) != len(transport.ranks):
        hint = "A pair of tensors is ContiguousKV(key, value)." if any(isinstance(x, Tensor) for x in caches) else ""
        refuse("cache", f"one for each of the {len(transport.ranks)} ranks of this process", f"{len(caches)}", hint)
    queries = check_shards("query", [query] * len(caches) if isinstance(query, Tensor) else query, transport.ranks)
    options = CallOptions(causal, softcap=softcap, scale=scale, return_lse=return_lse, backend=backend)
    for its_query, its_cache in zip(queries, caches, strict=True):
        validate.decoding(DecodeInputs(its_query, its_cache, sink=sink))
        tensors = {"query": its_query, "cache": its_cache, "sink": sink}
        validate.without_gradient("tree_decode_attention", "ring_attention()", **tensors)
        validate.options(options, its_query)
    last = transport.size - 1
    if last in transport.ranks and causal and queries[-1].shape[1] > caches[-1].capacity:
        hint = "Append the new tokens to it before the call."
        expected = f"a capacity for the {queries[-1].shape[1]} new tokens on the last rank"
        refuse("cache", expected, caches[-1].capacity, hint)
    with torch.no_grad():
        parameters = {"causal": causal, "softcap": softcap, "scale": scale, "sink": described(sink)}
        strategies = []
        for rank, its_query, its_cache in zip(transport.ranks, queries, caches, strict=True):
            state = _state(its_query, its_cache, options._replace(causal=causal and rank == last))
            strategies.append(merge_ranks("tree_decode_attention", rank, transport.size, *state, parameters))
        merged = transport.run(strategies, queries[0].device)
        if sink is not None:
            merged = [add_sink(out, lse, sink) for out, lse in merged]
    dtype = queries[0].dtype
    results = [(out.to(dtype), lse) if return_lse else out.to(dtype) for out, lse in merged]
    return unwrap_ranks(results, listed, return_lse)


def merge_ranks(
    call: str, rank: int, size: int, out: Tensor, lse: Tensor, parameters: Mapping[str, object]
) -> Strategy[tuple[Tensor, Tensor]]:
    """The merge of all ranks' states out `[B, T, H, Dv]` and lse `[B, H, T]`, of one dtype, on every rank.

    On CPUs the ranks first compare these shapes and the `parameters` of the `call`.
    """
    message = torch.cat((out, per_row(lse)), dim=-1)
    if message.device.type == "cpu":
        state = {"[B, Tq, Hq, Dv] of query and cache": list(out.shape), "dtype of states": out.dtype}
        yield from agree(call, rank, size, message.device, (), {**state, **parameters})
    gathered = yield from all_gather(rank, message, [message.shape] * size)
    return merge([one[..., :-1] for one in gathered], [one[..., -1].transpose(1, 2) for one in gathered])


def _state(query: Tensor, cache: Any, options: CallOptions) -> tuple[Tensor, Tensor]:
    if not isinstance(cache, ContiguousKV) or cache.lengths is not None:
        same = {name: getattr(options, name) for name in ("causal", "softcap", "scale", "backend")}
        out, lse = decode_attention(query, cache, return_lse=True, **same)
        return out.to(lse.dtype), lse
    attention = Attention.of(query, options)
    state, keys, queries = State(query, cache.value_dim), cache.capacity, query.shape[1]
    if keys and queries:
        rows = Rows((Run(0, queries, keys - queries),), query)
        attention.forward(state, rows, cache.key, cache.value, (Run(0, keys, 0),))
    return state.sums()
