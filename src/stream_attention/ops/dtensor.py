"""`attention` and `varlen_attention` of DTensors that are sharded by heads or by batch: a rank computes its own shard.

Nothing is sent between ranks but for gradients of what is replicated where the query is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..base.errors import refuse

_FROM_END = {
    "key": {"batch": 4, "heads": 2},
    "value": {"batch": 4, "heads": 2},
    "mask": {"batch": 4, "heads": 3},
    "bias": {"batch": 4, "heads": 3},
    "alibi_slopes": {"batch": 2, "heads": 1},
    "sink": {"heads": 1},
}
"""Which dim of another tensor is the query's, counted from the end. It is sharded as that is, unless it has size 1."""


def dtensor_attention(op: Callable[..., Any], tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """`op(**tensors, **options)` on this rank's shards; its results are DTensors, sharded as the query is.

    `tensors` are all tensors of the call, None included. Of mask, bias, slopes, sink and offsets those that are no
    DTensors are the same on all ranks.
    """
    query, value, return_lse = tensors["query"], tensors["value"], options["return_lse"]
    result = op(**local_shards(tensors, options), **options)

    def whole(local: Tensor, shape: tuple[int, ...], placements: Any) -> Tensor:
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        size = torch.Size(shape)
        return DTensor.from_local(
            local.contiguous(), query.device_mesh, placements, run_check=False, shape=size, stride=stride
        )

    *lead, rows, heads, _ = query.shape
    out = whole(result[0] if return_lse else result, (*lead, rows, heads, value.shape[-1]), query.placements)
    if not return_lse:
        return out
    before_rows = query.dim() - 3  # where the LSE has its heads
    placements = [Shard(min(p.dim, before_rows)) if p.is_shard() else p for p in query.placements]
    return out, whole(result[1], (*lead, heads, rows), placements)


def local_shards(tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of every tensor of a call, with their gradients' way back; refuses what ranks cannot compute
    apart."""
    query = tensors["query"]
    heads = query.dim() - 2
    dims = {0: "batch", heads: "heads"} if query.dim() == 4 else {heads: "heads"}
    _check(tensors, dims)
    if options.get("dropout_p"):
        hint = "Each rank would generate its own mask. Call it on the local shards: x.to_local()."
        refuse("dropout_p", "0.0 with DTensors", options["dropout_p"], hint)
    local = {"query": query.to_local()}
    local |= {name: _shard(name, tensors[name], query, dims) for name in _FROM_END if name in tensors}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in tensors:
            given = local[name] = tensors[name]
            if isinstance(given, DTensor):
                if any(placement != Replicate() for placement in given.placements):
                    refuse(name, "a replicated tensor, Replicate()", list(given.placements))
                local[name] = given.to_local()
    return local


def _check(tensors: dict[str, Any], dims: dict[int, str]) -> None:
    """Check how query, key and value are sharded."""
    query, key = tensors["query"], tensors["key"]
    legal = " or ".join([*(f"Shard({dim}) (by {what})" for dim, what in dims.items()), "Replicate()"])
    for name in ("query", "key", "value"):
        tensor = tensors[name]
        if not isinstance(tensor, DTensor):
            words = "To make one, call DTensor.from_local(x, mesh, placements)."
            refuse(name, "a DTensor like the query", type(tensor).__name__, words, TypeError)
        if tensor.dim() != query.dim():
            refuse(name, f"{query.dim()} dims like the query", list(tensor.shape))
        if tensor.device_mesh != query.device_mesh:
            refuse(name, f"the query's mesh {query.device_mesh}", tensor.device_mesh)
        for placement in tensor.placements:
            sharded = type(placement) is Shard and placement.dim in dims
            if type(placement) is not Replicate and not sharded:
                refuse(name, legal, repr(placement), _way_out(placement, query.dim()))
    ranks = 1
    for place, placement in enumerate(query.placements):
        if placement.is_shard() and dims[placement.dim] == "heads":
            ranks *= query.device_mesh.size(place)
    q_heads, kv_heads = query.shape[-2], key.shape[-2]
    if q_heads % ranks or (kv_heads > 1 and kv_heads % ranks):
        refuse("query", f"head counts divisible by {ranks} ranks", f"Hq={q_heads} and Hkv={kv_heads}")


def _way_out(placement: Any, dims: int) -> str:
    if placement.is_partial():
        return "Reduce it first: x.redistribute(placements=[Replicate()])."
    if placement.is_shard() and placement.dim == dims - 3:
        return (
            "For a sharded sequence, pass the local shards, x.to_local(), to "
            "stream_attention.distributed.ring_attention."
        )
    return "Use x.redistribute(placements=...)."


def _shard(name: str, tensor: Any, query: Any, dims: dict[int, str]) -> Any:
    """This rank's part of a tensor beside the query, which is sharded as that is or else replicated."""
    if tensor is None:
        return None
    mesh, replicated = query.device_mesh, Replicate()
    one: Placement
    gradient: Placement
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [replicated] * mesh.ndim, run_check=False)
    if tensor.device_mesh != mesh:
        refuse(name, f"the query's mesh {mesh}", tensor.device_mesh)
    wanted: list[Placement] = []
    gradients: list[Placement] = []
    for place, (of_query, given) in enumerate(zip(query.placements, tensor.placements, strict=True)):
        one = gradient = replicated
        if mesh.size(place) == 1:  # one rank has all of it, whatever its placement is called
            one = gradient = given
        elif of_query.is_shard():
            from_end = _FROM_END[name].get(dims[of_query.dim], tensor.dim() + 1)
            broadcast = tensor.dim() < from_end or (tensor.shape[-from_end] == 1 < query.shape[of_query.dim])
            one = replicated if broadcast else Shard(tensor.dim() - from_end)
            gradient = Partial() if broadcast else one  # each rank has that of its own shard
        if given not in (one, replicated):
            legal = repr(one) if one == replicated else f"{one!r} or {replicated!r}"
            refuse(
                name, f"{legal} with a query that is {of_query!r}", repr(given), "Use x.redistribute(placements=...)."
            )
        wanted.append(one)
        gradients.append(gradient)
    return tensor.redistribute(placements=wanted).to_local(grad_placements=gradients)
