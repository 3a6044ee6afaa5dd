"""query_sharded_attention(): everything is on every rank, and each rank computes some of the queries.

Ranks divide the time and not the memory: for tensors that every rank has anyway, as in the first StreamAttention. The
layout of rows is zigzag where the mask is causal, so that the work is balanced. The output is gathered. In the
backward the gradients of the rows are gathered and those of keys and values summed, so every rank has the gradients of
one device: the incoming gradient must be the same on all ranks, as it is where all compute the same loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.problem import UNBOUNDED, CallOptions, Inputs
from ..base.state import Saved
from ..dispatch import validate
from ..dispatch.plan import requested
from ..ops.attention import attention, in_autocast_dtype, seed_tensor
from .agreement import agreed, common_seed, described
from .autograd import Tensors, differentiable, in_dtypes_of
from .graph_break import graph_break
from .processes import Group, transport_of
from .shard import Layout, Run, check_shards, order_of, parts_of, runs_of
from .shard_attention import Attention, Rows, full_kv_backward, full_kv_forward, modifiers, wanted_by
from .transport import Strategy, all_gather, reduce_scatter, unwrap_ranks

TENSORS = ("query", "key", "value", "mask", "bias", "alibi_slopes", "sink")


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

    The ranks first compare their calls, which synchronises with an accelerator.

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
    arguments = locals()  # all of them, by name
    options, transport = CallOptions.of(arguments), transport_of(group)
    if requested(backend) == "reference" and transport.size > 1:
        refuse("backend", "one that computes partial states", "'reference'", "It computes whole calls.")
    columns = [check_shards(name, arguments.pop(name), transport.ranks, optional=True) for name in TENSORS]
    copies = [(*in_autocast_dtype(*one[:3]), *one[3:]) for one in zip(*columns, strict=True)]
    for one in copies:
        validate.attention_tensors(Inputs(*one))
    first = copies[0][0]
    validate.options(options, first)
    if transport.size == 1:
        del arguments["group"]
        alone = attention(**dict(zip(TENSORS, copies[0], strict=True)), **arguments)
        return unwrap_ranks([alone], not isinstance(query, Tensor), return_lse)
    names = ("causal", "window", "softcap", "scale", "dropout_p", "return_lse")
    compared = {name: arguments[name] for name in names}
    agreed("query_sharded_attention", transport, first.device, [((), _described(one) | compared) for one in copies])
    pair = common_seed(transport, seed_tensor(seed, first)) if dropout_p else None
    k_len, q_len = copies[0][1].shape[1], first.shape[1]
    shards = [(*one[:3], *modifiers(*one[3:]), pair) for one in copies]
    sharding = _QuerySharding(Attention.of(first, options, k_len - q_len), q_len, k_len, transport.size, return_lse)
    outputs = differentiable(transport, sharding.forward, sharding.backward, shards)
    results = [one[:2] if return_lse else one[0] for one in outputs]
    return unwrap_ranks(results, not isinstance(query, Tensor), return_lse)


class _QuerySharding:
    """The two strategies of one call."""

    def __init__(self, attention: Attention, q_len: int, k_len: int, size: int, return_lse: bool) -> None:
        self.attention, self.return_lse = attention, return_lse
        self.layout: Layout = "contiguous" if attention.sides[1] == UNBOUNDED else "zigzag"
        self.runs = [runs_of(self.layout, q_len, size, rank) for rank in range(size)]
        self.lengths = [sum(run.length for run in runs) for runs in self.runs]
        self.keys = (Run(0, k_len, 0),) if k_len else ()

    def forward(self, rank: int, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Strategy[Tensors]:
        out, lse = full_kv_forward(self.attention, self.rows(rank, query, *rest), key, value, self.keys)
        all_rows = yield from self.gathered(rank, out, 1)
        all_lse = (yield from self.gathered(rank, lse, 2)) if self.return_lse else None
        return all_rows, all_lse, out, lse

    def backward(self, rank: int, tensors: Tensors, outputs: Tensors, grads: Tensors) -> Strategy[Tensors]:
        query, key, value, *rest = tensors
        rows = self.rows(rank, query, *rest)
        grad_lse = self.own(rank, grads[1], 2) if self.return_lse and grads[1] is not None else None
        _, _, out, lse = outputs
        saved = Saved(out, lse, self.own(rank, grads[0], 1), grad_lse)
        dq, *found = full_kv_backward(self.attention, rows, key, value, self.keys, saved, wanted_by(*tensors))
        if dq is not None:
            dq = yield from self.gathered(rank, dq.to(query.dtype), 1)
        for i, (grad, t) in enumerate(zip(found, tensors[1:], strict=True)):
            if grad is not None:
                of_rows = t is rest[1] and t.shape[2] > 1  # a bias
                found[i] = yield from self.gathered(rank, grad, 2) if of_rows else self.summed(rank, grad)
        return in_dtypes_of(tensors, (dq, *found))

    def rows(self, rank: int, query: Tensor, mask: Any, bias: Any, slopes: Any, sink: Any, seed: Any) -> Rows:
        base = self.attention.q_base
        runs = tuple(run._replace(start=run.start + base) for run in self.runs[rank])
        mask, bias = (t if t is None or t.shape[2] == 1 else self.own(rank, t, 2) for t in (mask, bias))
        return Rows(runs, self.own(rank, query, 1), mask, bias, slopes, sink, seed)

    def own(self, rank: int, tensor: Tensor, dim: int) -> Tensor:
        """The rows of a rank: a view if they are adjacent, else a copy."""
        parts = parts_of(tensor, self.runs[rank], dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gathered(self, rank: int, own: Tensor, dim: int) -> Strategy[Tensor]:
        """The rows of all ranks, in the order of positions."""
        shapes = [(*own.shape[:dim], n, *own.shape[dim + 1 :]) for n in self.lengths]
        joined = torch.cat((yield from all_gather(rank, own.contiguous(), shapes)), dim)
        if self.layout == "contiguous":
            return joined
        return joined.index_select(dim, order_of(self.runs, own.device))

    def summed(self, rank: int, own: Tensor) -> Strategy[Tensor]:
        """The sum of all ranks' tensors, on every rank, with the same bits."""
        parts = own.flatten().tensor_split(len(self.runs))
        share = yield from reduce_scatter(rank, parts)
        shares = yield from all_gather(rank, share, [part.shape for part in parts])
        return torch.cat(shares).view_as(own)


def _described(tensors: Tensors) -> dict[str, object]:
    """What must be the same on all ranks of each tensor: which gradients are sent depends on which are wanted."""
    graph = torch.is_grad_enabled()
    return {
        name: (described(t), "gradient wanted" if t is not None and graph and t.requires_grad else "")
        for name, t in zip(TENSORS, tensors, strict=True)
    }
