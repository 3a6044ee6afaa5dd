"""query_sharded_attention(): everything is on every rank, and each rank computes some of the queries.

Time is divided by the ranks and memory is not: for tensors that every rank has anyway, as the first StreamAttention
did it. Rows are dealt out in balance, in zigzag where they see no key behind them. The output is gathered. In the
backward the gradients of the rows are gathered and those of keys and values summed, so every rank has what one device
would have: the gradient that arrives must be the same on all ranks, as it is where all compute the same loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import validate
from ..errors import refuse
from ..ops.attention import attention, in_autocast_dtype, leading_ones, seed_tensor
from ..plan import requested
from ..problem import UNBOUNDED
from .agreement import agree, common_seed, described
from .autograd import Tensors, differentiable
from .full_kv import whole_backward, whole_forward
from .graph_break import graph_break
from .processes import Group, transport_of
from .shard import Layout, Run, check_shards, positions_of, runs_of
from .shard_attention import Attention, Rows, Saved
from .tiles import sides_of
from .transport import Strategy, Transport, all_gather, reduce_scatter


@graph_break
def query_sharded_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    group: Group = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """`attention` by all ranks of a group together: each has all tensors, the same ones, and gets the whole result.

    The ranks first compare their calls, for which an accelerator is waited for.

    Args:
        group: as in `ring_attention`. With `VirtualRanks` every tensor is a list, a copy for each rank.
        seed: rank 0's is everyone's; None draws one there.
        The rest: as in `attention`. The mask of dropout is that of one device.

    Returns:
        `[B, Tq, Hq, Dv]` on every rank, or `(out, lse)`; with lists, lists.

    >>> from stream_attention.distributed import VirtualRanks
    >>> query, key, value = torch.randn(3, 1, 7, 2, 16)
    >>> outs = query_sharded_attention([query] * 3, [key] * 3, [value] * 3, group=VirtualRanks(3), causal=True)
    >>> [out.shape[1] for out in outs]
    [7, 7, 7]
    """
    transport = transport_of(group)
    backend = requested(backend)
    if backend == "reference" and transport.size > 1:
        refuse("backend", "one that computes partial states", "'reference'", "It computes whole calls.")
    named = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
    named |= {"alibi_slopes": alibi_slopes, "sink": sink}
    columns = [_each(name, x, transport) for name, x in named.items()]
    copies = [(*in_autocast_dtype(*one[:3]), *one[3:]) for one in zip(*columns, strict=True)]
    for one in copies:
        validate.attention_tensors(*one)
    first = copies[0][0]
    validate.options(causal, window, softcap, scale, dropout_p, seed, deterministic, return_lse, first)
    if transport.size == 1:
        alone = attention(
            *copies[0][:3],
            causal=causal,
            window=window,
            mask=copies[0][3],
            bias=copies[0][4],
            alibi_slopes=copies[0][5],
            sink=copies[0][6],
            softcap=softcap,
            scale=scale,
            dropout_p=dropout_p,
            seed=seed,
            deterministic=deterministic,
            return_lse=return_lse,
            backend=backend,
        )
        return _given_back([alone], query, return_lse)
    told = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "dropout_p": dropout_p}
    told["return_lse"] = return_lse
    transport.run(
        [
            agree("query_sharded_attention", rank, transport.size, first.device, (), {**_described(named, one), **told})
            for rank, one in zip(transport.ranks, copies, strict=True)
        ],
        first.device,
    )
    pair = common_seed(transport, seed_tensor(seed, first)) if dropout_p else None
    options = Attention(
        sides=sides_of(causal, window),
        softcap=float(softcap),
        scale=first.shape[-1] ** -0.5 if scale is None else float(scale),
        dropout_p=float(dropout_p),
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        backend=backend,
        q_base=copies[0][1].shape[1] - first.shape[1],
    )
    shards = [
        (*one[:3], leading_ones(one[3], 4), leading_ones(one[4], 4), _slopes(one[5]), _contiguous(one[6]), pair)
        for one in copies
    ]
    sharding = _QuerySharding(options, first.shape[1], copies[0][1].shape[1], transport.size, return_lse)
    outputs = differentiable(transport, sharding.forward, sharding.backward, shards)
    return _given_back([one[:2] if return_lse else one[0] for one in outputs], query, return_lse)


class _QuerySharding:
    """The two strategies of one call."""

    def __init__(self, attention: Attention, q_len: int, k_len: int, size: int, return_lse: bool) -> None:
        self.attention, self.return_lse = attention, return_lse
        self.layout: Layout = "contiguous" if attention.sides[1] == UNBOUNDED else "zigzag"
        self.runs = [runs_of(self.layout, q_len, size, rank) for rank in range(size)]
        self.lengths = [sum(run.length for run in runs) for runs in self.runs]
        self.keys = (Run(0, k_len, 0),) if k_len else ()

    def forward(self, rank: int, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Strategy[Tensors]:
        out, lse = whole_forward(self.attention, self.rows(rank, query, *rest), key, value, self.keys)
        whole = yield from self.gathered(rank, out, 1)
        whole_lse = (yield from self.gathered(rank, lse, 2)) if self.return_lse else None
        return whole, whole_lse, out, lse

    def backward(self, rank: int, tensors: Tensors, outputs: Tensors, grads: Tensors) -> Strategy[Tensors]:
        query, key, value, *rest = tensors
        rows = self.rows(rank, query, *rest)
        grad_lse = self.mine(rank, grads[1], 2) if self.return_lse and grads[1] is not None else None
        _, _, out, lse = outputs
        saved = Saved(out, lse, self.mine(rank, grads[0], 1), grad_lse)
        dq, *found = whole_backward(self.attention, rows, key, value, self.keys, saved, tensors)
        if dq is not None:
            dq = yield from self.gathered(rank, dq.to(query.dtype), 1)
        for i, (grad, t) in enumerate(zip(found, tensors[1:], strict=True)):
            if grad is not None:
                of_rows = t is rest[1] and t.shape[2] > 1  # a bias
                found[i] = yield from self.gathered(rank, grad, 2) if of_rows else self.summed(rank, grad)
        home = (dq, *found)
        return tuple(None if grad is None else grad.to(t.dtype) for grad, t in zip(home, tensors, strict=True))

    def rows(self, rank: int, query: Tensor, mask: Any, bias: Any, slopes: Any, sink: Any, seed: Any) -> Rows:
        base = self.attention.q_base
        runs = tuple(run._replace(start=run.start + base) for run in self.runs[rank])
        mask, bias = (t if t is None or t.shape[2] == 1 else self.mine(rank, t, 2) for t in (mask, bias))
        return Rows(runs, self.mine(rank, query, 1), mask, bias, slopes, sink, seed)

    def mine(self, rank: int, whole: Tensor, dim: int) -> Tensor:
        """The rows of a rank, where they lie if they lie together."""
        parts = [whole.narrow(dim, run.start, run.length) for run in self.runs[rank]] or [whole.narrow(dim, 0, 0)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gathered(self, rank: int, mine: Tensor, dim: int) -> Strategy[Tensor]:
        """The rows of all ranks, in their order."""
        shapes = [(*mine.shape[:dim], n, *mine.shape[dim + 1 :]) for n in self.lengths]
        everyones = yield from all_gather(rank, mine.contiguous(), shapes)
        whole = torch.cat(everyones, dim)
        if self.layout == "contiguous":
            return whole
        order = torch.argsort(torch.cat([positions_of(runs, mine.device) for runs in self.runs]))
        return whole.index_select(dim, order)

    def summed(self, rank: int, mine: Tensor) -> Strategy[Tensor]:
        """The sum of all ranks' tensors, on every rank, with the same bits."""
        parts = mine.flatten().tensor_split(len(self.runs))
        share = yield from reduce_scatter(rank, parts)
        shares = yield from all_gather(rank, share, [part.shape for part in parts])
        return torch.cat(shares).view_as(mine)


def _given_back(results: Sequence[Any], query: Any, return_lse: bool) -> Any:
    """Results of ranks, as the caller gave tensors or lists."""
    if isinstance(query, Tensor):
        return results[0]
    return tuple(map(list, zip(*results, strict=True))) if return_lse else list(results)


def _each(name: str, given: Any, transport: Transport) -> Sequence[Any]:
    return [None] * len(transport.ranks) if given is None else check_shards(name, given, transport.ranks)


def _described(names: Iterable[str], tensors: Tensors) -> dict[str, object]:
    """What must be the same on all ranks of each tensor: which gradients are sent depends on which are wanted."""
    graph = torch.is_grad_enabled()
    return {
        name: (described(t), "gradient wanted" if t is not None and graph and t.requires_grad else "")
        for name, t in zip(names, tensors, strict=True)
    }


def _slopes(slopes: Tensor | None) -> Tensor | None:
    return _contiguous(leading_ones(slopes, 2))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
