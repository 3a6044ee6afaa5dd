"""A call on shards, checked, in the form strategies read: what every strategy over the sequence shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from ..base.problem import CallOptions, Inputs
from ..dispatch import validate
from ..dispatch.plan import requested
from ..ops.attention import in_autocast_dtype, seed_tensor
from .agreement import agreed, described
from .autograd import Tensors
from .processes import transport_of
from .shard import Layout, Run, check_layout, check_shards, offsets_of, runs_of_all, shard_length, within_sequences
from .shard_attention import Attention, modifiers
from .transport import Transport, unwrap_ranks

ARGUMENTS = "query key value group layout length cu_seqlens mask bias alibi_slopes sink".split()
"""Of every strategy over the sequence, beside its options."""

Runs = tuple[tuple[Run, ...], ...]  # of all ranks


@dataclass(frozen=True)
class CallSpec:
    """One call. `shards` has, for each rank of this process, its query, key, value `[B, T, H, D]`, mask, bias,
    alibi_slopes, sink and seed."""

    transport: Transport
    shards: list[Tensors]
    attention: Attention
    q_runs: Runs
    k_runs: Runs
    q_lengths: tuple[int, ...]  # of all ranks
    k_lengths: tuple[int, ...]
    offsets: tuple[int, ...] | None  # of packed sequences
    listed: bool  # shards came as a list, one for each virtual rank, and results leave so

    def results(self, outputs: Sequence[Tensors], return_lse: bool) -> Any:
        """Pairs (out, lse) as the caller wants them."""
        pairs = [(out, lse) if self.offsets is None else (out[0], lse[0]) for out, lse in outputs]
        return unwrap_ranks([pair if return_lse else pair[0] for pair in pairs], self.listed, return_lse)


def prepare(call: str, arguments: Mapping[str, Any]) -> CallSpec:
    """Check a call of the public function `call` on every rank, and what the ranks must agree on between them.

    `arguments` are the function's, by name; those that not every strategy has are compared as they are.
    """
    options = CallOptions.of(arguments)
    common: Any = map(arguments.get, ARGUMENTS)
    query, key, value, group, layout, length, cu_seqlens, mask, bias, alibi_slopes, sink = common
    own = {name: value for name, value in arguments.items() if name not in (*ARGUMENTS, *CallOptions._fields)}
    check_layout(layout)
    transport = transport_of(group)
    if requested(options.backend) == "reference":
        refuse("backend", "one that computes partial states", "'reference'", "It computes whole calls.")
    given = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
    *qkv, masks, biases = (
        check_shards(name, x, transport.ranks, optional=name in ("mask", "bias")) for name, x in given.items()
    )
    tensors = [in_autocast_dtype(*one) for one in zip(*qkv, strict=True)]
    first, offsets = tensors[0][0], None if cu_seqlens is None else tuple(offsets_of(cu_seqlens))
    if offsets is not None and (mask is not None or bias is not None):
        refuse("mask and bias", "None for packed sequences", "a value", "Use padded sequences, without cu_seqlens.")
    for q, k, v in tensors:
        if offsets is None:
            validate.attention_tensors(Inputs(q, k, v, alibi_slopes=alibi_slopes, sink=sink))
            continue
        ends = torch.tensor(offsets, device=first.device)
        validate.varlen_tensors(Inputs(q, k, v, None, None, alibi_slopes, sink, None, ends, ends))
        if q.shape[0] != k.shape[0]:
            refuse("key", f"as many rows as the query, {q.shape[0]}, of packed sequences", k.shape[0])
    validate.options(options, first)
    if options.dropout_p and options.seed is None:
        refuse("seed", "the same on every rank, when there is dropout", "None", "Draw one and pass it to all.")

    if offsets is not None:
        tensors = [tuple(t[None] for t in one) for one in tensors]
    differentiated = [t for one in (*tensors, biases, (alibi_slopes, sink)) for t in one]
    compared = {
        "gradients wanted": torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiated),
        **{
            name: getattr(options, name) for name in ("return_lse", "causal", "window", "softcap", "scale", "dropout_p")
        },
        "seed": described(options.seed) if isinstance(options.seed, Tensor) else options.seed,
        "alibi_slopes": described(alibi_slopes),
        "sink": described(sink),
        "layout": layout,
        "cu_seqlens": offsets,
        **own,
    }
    q_lengths, k_lengths = _lengths(call, transport, tensors, layout, length, compared)
    q_base, keys = sum(k_lengths) - sum(q_lengths), sum(k_lengths)
    if offsets is not None and offsets[-1] > keys:
        refuse("cu_seqlens", f"a last value of at most the {keys} rows of all ranks", offsets[-1])
    pair = seed_tensor(options.seed, first) if options.dropout_p else None
    shards = []
    for (q, k, v), its_mask, its_bias in zip(tensors, masks, biases, strict=True):
        # Without memory, in the shape of the keys of all ranks.
        all_k, all_v = (t.new_empty(1, 1, 1, t.shape[3]).expand(t.shape[0], keys, *t.shape[2:]) for t in (k, v))
        validate.attention_tensors(Inputs(q, all_k, all_v, its_mask, its_bias))
        shards.append((q, k, v, *modifiers(its_mask, its_bias, alibi_slopes, sink), pair))
    attention, listed = Attention.of(first, options, q_base), isinstance(query, (list, tuple))
    q_runs, k_runs = (
        runs_between(layout, lengths, offsets, base) for lengths, base in ((q_lengths, q_base), (k_lengths, 0))
    )
    return CallSpec(transport, shards, attention, q_runs, k_runs, q_lengths, k_lengths, offsets, listed)


def _lengths(
    call: str,
    transport: Transport,
    tensors: Sequence[Tensors],
    layout: Layout,
    length: int | None,
    compared: dict[str, object],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lengths of all ranks' queries and keys: those of the layout if `length` is known, else exchanged."""
    size, device = transport.size, tensors[0][0].device
    local = [(one[0].shape[1], one[1].shape[1]) for one in tensors]
    if length is not None:
        check_int("length", length, 0, ValueError)
        expected = tuple(shard_length(layout, length, size, rank) for rank in range(size))
        for rank, own in zip(transport.ranks, local, strict=True):
            if own != (expected[rank],) * 2:
                wanted = f"that of shards of {expected[rank]} rows on rank {rank}"
                refuse("length", wanted, f"{length} beside shards of {own}", "None asks the other ranks.")
        return expected, expected
    ranks = [(own, _described(*one) | compared) for own, one in zip(local, tensors, strict=True)]
    q_lengths, k_lengths = zip(*agreed(call, transport, device, ranks), strict=True)
    return q_lengths, k_lengths


def _described(query: Tensor, key: Tensor, value: Tensor) -> dict[str, object]:
    heads, dims = (query.shape[2], key.shape[2]), (key.shape[3], value.shape[3])
    return {"batch size": query.shape[0], "heads": heads, "head dims": dims, "dtype": query.dtype}


@lru_cache(maxsize=256)
def runs_between(layout: Layout, lengths: tuple[int, ...], offsets: tuple[int, ...] | None, base: int) -> Runs:
    """Every rank's runs, from position `base`."""
    shifted = [tuple(run._replace(start=run.start + base) for run in runs) for runs in runs_of_all(layout, lengths)]
    return tuple(runs if offsets is None else within_sequences(runs, offsets) for runs in shifted)
