"""Star attention: a long context is encoded in blocks that attend to an anchor and themselves, then queries attend to
all of it.

Phase 1, `star_context_attention`: the context is split into blocks, and a rank has consecutive whole blocks. A block
attends causally to itself and to the anchor, the first rows of the context, at their original positions; ranks other
than the first have a copy of the anchor's rows in front of their own, so nothing is sent. Keys and values of these
copies are dropped afterwards (`star_cache`).

Phase 2 is `tree_decode_attention`: queries are on all ranks, each reads its part of the cache, the last rank has the
new tokens too, and only partial states are sent.

Phase 1 is an approximation of attention, exact where a block is the whole context; phase 2 is exact over any cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from ..base.problem import CallOptions, Inputs
from ..dispatch import validate
from ..ops.attention import leading_ones
from .graph_break import graph_break
from .processes import Group, transport_of
from .shard import Run, check_shards, take_runs
from .shard_attention import Attention, Rows, State
from .transport import unwrap_ranks


def star_rows(length: int, block_size: int, anchor_size: int, size: int, rank: int) -> tuple[Run, ...]:
    """What a rank of `size` encodes of a context: a copy of the anchor unless it has block 0, then its blocks.

    >>> [(run.start, run.length) for run in star_rows(10, 3, 2, size=3, rank=1)]
    [(0, 2), (6, 3)]
    """
    count = -(-length // block_size)
    share, more = divmod(count, size)
    begin = rank * share + min(rank, more)
    blocks = [(b * block_size, min((b + 1) * block_size, length)) for b in range(begin, begin + share + (rank < more))]
    spans = [(0, min(anchor_size, length)), *blocks] if begin and blocks else blocks
    firsts = accumulate((stop - start for start, stop in spans), initial=0)
    runs = (Run(first, stop - start, start) for first, (start, stop) in zip(firsts, spans, strict=False))
    return tuple(run for run in runs if run.length)


def shard_context(
    sequence: Tensor, *, group: Group = None, block_size: int, anchor_size: int | None = None, dim: int = 1
) -> Any:
    """This rank's rows of a context that every rank has whole, for phase 1: tokens, position ids, hidden states.

    The rows of `star_rows`, one after another; with `VirtualRanks` a list.
    """
    sizes = block_size, _check_sizes(block_size, anchor_size)
    return take_runs(sequence, group, dim, lambda length, size, rank: star_rows(length, *sizes, size, rank))


def star_cache(
    key: Any, value: Any, *, group: Group = None, length: int, block_size: int, anchor_size: int | None = None
) -> Any:
    """What a rank keeps of its keys and values of phase 1: its own, without the copy of the anchor.

    Returns:
        `(key, value)`; with `VirtualRanks` a list of such pairs. `ContiguousKV(key, value)` is what the tree reads.
    """
    anchor_size = _check_sizes(block_size, anchor_size, length)
    transport = transport_of(group)
    sides = [check_shards(name, x, transport.ranks) for name, x in (("key", key), ("value", value))]
    kept = []
    for rank, *pair in zip(transport.ranks, *sides, strict=True):
        runs = star_rows(length, block_size, anchor_size, transport.size, rank)
        _check_rows("key, value", pair, rank, runs)
        copied = runs[0].length if rank and runs and runs[0].start == 0 else 0  # the first rank has the anchor itself
        kept.append(tuple(t[:, copied:] for t in pair))
    return unwrap_ranks(kept, not isinstance(key, Tensor))


@graph_break
def star_context_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    group: Group = None,
    length: int,
    block_size: int,
    anchor_size: int | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Phase 1: the attention of a rank's rows of a context, without communication. No gradient flows through it.

    Args:
        query, key, value: `[B, T, H, D]` of the rows that `shard_context` gives, the anchor's copy included, whose
            output is needed by the next layer. With `VirtualRanks` lists.
        group: as in `ring_attention`; it says how many ranks there are, and which one this is.
        length: of the whole context.
        block_size: rows of a block; the last one may be shorter. With `block_size >= length` this is causal attention.
        anchor_size: rows of the anchor, at most a block; None is a whole block; 0 is none.
        alibi_slopes, sink, softcap, scale, return_lse, backend: as in `attention`; positions are those of the context.

    Returns:
        This rank's `[B, T, Hq, Dv]`, or `(out, lse)`; with lists, lists.
    """
    anchor_size = _check_sizes(block_size, anchor_size, length)
    transport = transport_of(group)
    sides = [check_shards(name, x, transport.ranks) for name, x in (("query", query), ("key", key), ("value", value))]
    options = CallOptions(True, softcap=softcap, scale=scale, return_lse=return_lse, backend=backend)
    results = []
    for rank, its_query, its_key, its_value in zip(transport.ranks, *sides, strict=True):
        validate.attention_tensors(Inputs(its_query, its_key, its_value, alibi_slopes=alibi_slopes, sink=sink))
        validate.options(options, its_query)
        runs = star_rows(length, block_size, anchor_size, transport.size, rank)
        _check_rows("query, key, value", (its_query, its_key, its_value), rank, runs)
        attention = Attention.of(its_query, options)
        state = State(its_query, its_value.shape[-1])
        # The anchor's rows come first, whether they are a copy or the beginning of block 0.
        anchor = [run._replace(length=min(anchor_size, run.length)) for run in runs[:1] if anchor_size]
        with torch.no_grad():
            for run in runs:
                rows = Rows((run,), its_query, alibi_slopes=leading_ones(alibi_slopes, 2))
                attention.forward(state, rows, its_key, its_value, [*anchor, run] if run.start else [run])
            out, lse = state.finish(sink, its_query.dtype)
        results.append((out, lse) if return_lse else out)
    return unwrap_ranks(results, isinstance(query, (list, tuple)), return_lse)


def _check_rows(names: str, tensors: Sequence[Tensor], rank: int, runs: Sequence[Run]) -> None:
    rows = sum(run.length for run in runs)
    found = [t.shape[1] if t.dim() > 1 else 0 for t in tensors]
    if found != [rows] * len(found):
        refuse(names, f"the {rows} rows of rank {rank}", found, "shard_context gives them.")


def _check_sizes(block_size: Any, anchor_size: Any, length: Any = 0) -> int:
    """The anchor's size."""
    anchor_size = block_size if anchor_size is None else anchor_size
    for name, given, least in (("block_size", block_size, 1), ("anchor_size", anchor_size, 0), ("length", length, 0)):
        check_int(name, given, least, ValueError)
    if anchor_size > block_size:
        refuse("anchor_size", f"at most a block, {block_size}", anchor_size)
    return anchor_size
