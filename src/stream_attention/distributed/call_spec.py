"""A call on shards, checked and in the form strategies read: what every strategy over the sequence shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import validate
from ..errors import refuse
from ..ops.attention import in_autocast_dtype, leading_ones, seed_tensor
from ..plan import requested
from .agreement import agree, described
from .autograd import Tensors
from .processes import Group, transport_of
from .shard import Layout, Run, check_layout, check_shards, offsets_of, runs_of_all, shard_length, within_sequences
from .shard_attention import Attention
from .tiles import Sides, sides_of
from .transport import Transport

_NAMES = ("query", "key", "value")
Runs = tuple[tuple[Run, ...], ...]  # of all ranks


@dataclass(frozen=True)
class Request:
    """One call. `shards` has, for each rank of this process, its query, key, value `[B, T, H, D]`, mask, bias,
    alibi_slopes, sink and seed."""

    transport: Transport
    shards: list[Tensors]
    attention: Attention
    q_runs: Runs
    k_runs: Runs
    k_lengths: tuple[int, ...]
    packed: bool
    listed: bool  # shards came as a list, one for each virtual rank, and results leave so

    def results(self, outputs: Sequence[Tensors], return_lse: bool) -> Any:
        """Pairs (out, lse) as the caller wants them."""
        pairs = [(out[0], lse[0]) if self.packed else (out, lse) for out, lse in outputs]
        results = [pair if return_lse else pair[0] for pair in pairs]
        if not self.listed:
            return results[0]
        return tuple(map(list, zip(*results, strict=True))) if return_lse else results


def prepare(
    call: str,
    query: Any,
    key: Any,
    value: Any,
    *,
    group: Group,
    layout: Layout,
    length: int | None,
    cu_seqlens: Tensor | Sequence[int] | None,
    causal: bool,
    window: Sides | None,
    mask: Any,
    bias: Any,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    softcap: float,
    scale: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    deterministic: bool | None,
    return_lse: bool,
    backend: str,
    facts: Mapping[str, object],
) -> Request:
    """Check a call on every rank, and what the ranks must agree on between them.

    `call` is the name of the public function, `facts` are its own.
    """
    check_layout(layout)
    transport = transport_of(group)
    backend = requested(backend)
    if backend == "reference":
        refuse("backend", "one that computes partial states", "'reference'", "It computes whole calls.")
    listed = isinstance(query, (list, tuple))
    sides = (check_shards(name, x, transport.ranks) for name, x in zip(_NAMES, (query, key, value), strict=True))
    tensors = [in_autocast_dtype(*one) for one in zip(*sides, strict=True)]
    masks, biases = (
        [None] * len(tensors) if x is None else check_shards(name, x, transport.ranks)
        for name, x in (("mask", mask), ("bias", bias))
    )
    first, packed = tensors[0][0], cu_seqlens is not None
    offsets = tuple(offsets_of(cu_seqlens)) if cu_seqlens is not None else None
    if packed and (mask is not None or bias is not None):
        refuse("mask and bias", "None for packed sequences", "a value", "Use padded sequences, without cu_seqlens.")
    for q, k, v in tensors:
        if offsets is None:
            validate.attention_tensors(q, k, v, None, None, alibi_slopes, sink)
        else:
            ends = torch.tensor(offsets, device=first.device)
            validate.varlen_tensors(q, k, v, ends, ends, None, None, None, None, alibi_slopes, sink)
            if q.shape[0] != k.shape[0]:
                refuse("key", f"as many rows as the query, {q.shape[0]}, of packed sequences", k.shape[0])
    validate.options(causal, window, softcap, scale, dropout_p, seed, deterministic, return_lse, first)
    if dropout_p and seed is None:
        refuse("seed", "the same on every rank, when there is dropout", "None", "Draw one and pass it to all.")

    if packed:
        tensors = [tuple(t[None] for t in one) for one in tensors]
    differentiated = [t for one in (*tensors, biases, (alibi_slopes, sink)) for t in one]
    told = {
        "gradients wanted": torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiated),
        "return_lse": return_lse,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "dropout_p": dropout_p,
        "seed": described(seed) if isinstance(seed, Tensor) else seed,
        "alibi_slopes": described(alibi_slopes),
        "sink": described(sink),
        "layout": layout,
        "cu_seqlens": offsets,
        **facts,
    }
    q_lengths, k_lengths = _lengths(call, transport, tensors, layout, length, told)
    q_base = sum(k_lengths) - sum(q_lengths)
    if offsets is not None and offsets[-1] > sum(k_lengths):
        refuse("cu_seqlens", f"a last value of at most the {sum(k_lengths)} rows of all ranks", offsets[-1])
    for (q, k, v), its_mask, its_bias in zip(tensors, masks, biases, strict=True):
        # The keys of all ranks, as far as a check of shapes can tell.
        keys, values = (
            t.new_empty(1, 1, 1, t.shape[3]).expand(t.shape[0], sum(k_lengths), *t.shape[2:]) for t in (k, v)
        )
        validate.attention_tensors(q, keys, values, its_mask, its_bias, None, None)

    pair = seed_tensor(seed, first) if dropout_p else None
    small = (*(_contiguous(t) for t in (leading_ones(alibi_slopes, 2), sink)), pair)
    attention = Attention(
        sides=sides_of(causal, window),
        softcap=float(softcap),
        scale=first.shape[-1] ** -0.5 if scale is None else float(scale),
        dropout_p=float(dropout_p),
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        backend=backend,
        q_base=q_base,
    )
    return Request(
        transport,
        [
            (*one, leading_ones(its_mask, 4), leading_ones(its_bias, 4), *small)
            for one, its_mask, its_bias in zip(tensors, masks, biases, strict=True)
        ],
        attention,
        runs_between(layout, q_lengths, offsets, q_base),
        runs_between(layout, k_lengths, offsets, 0),
        k_lengths,
        packed,
        listed,
    )


def _lengths(
    call: str,
    transport: Transport,
    tensors: Sequence[Tensors],
    layout: Layout,
    length: int | None,
    told: Mapping[str, object],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lengths of all ranks' queries and keys: those of the layout if `length` is known, else asked for."""
    size, device = transport.size, tensors[0][0].device
    local = [(one[0].shape[1], one[1].shape[1]) for one in tensors]
    if length is not None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            refuse("length", "an int of at least 0, or None", repr(length))
        expected = tuple(shard_length(layout, length, size, rank) for rank in range(size))
        for rank, mine in zip(transport.ranks, local, strict=True):
            if mine != (expected[rank],) * 2:
                wanted = f"that of shards of {expected[rank]} rows on rank {rank}"
                refuse("length", wanted, f"{length} beside shards of {mine}", "None asks the other ranks.")
        return expected, expected
    strategies = [
        agree(call, rank, size, device, mine, {**_facts(*one), **told})
        for rank, mine, one in zip(transport.ranks, local, tensors, strict=True)
    ]
    table = transport.run(strategies, device)[0]
    return tuple(q for q, _ in table), tuple(k for _, k in table)


def _facts(query: Tensor, key: Tensor, value: Tensor) -> dict[str, object]:
    heads, dims = (query.shape[2], key.shape[2]), (key.shape[3], value.shape[3])
    return {"batch size": query.shape[0], "heads": heads, "head dims": dims, "dtype": query.dtype}


@lru_cache(maxsize=256)
def runs_between(layout: Layout, lengths: tuple[int, ...], offsets: tuple[int, ...] | None, base: int) -> Runs:
    """Every rank's runs, from position `base`."""
    whole = [tuple(run._replace(start=run.start + base) for run in runs) for runs in runs_of_all(layout, lengths)]
    return tuple(runs if offsets is None else within_sequences(runs, offsets) for runs in whole)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
