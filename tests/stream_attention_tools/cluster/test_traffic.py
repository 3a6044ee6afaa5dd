"""Bytes by formula: equal to what a Recorder counts, rank by rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stream_attention.distributed import (
    Recorder,
    VirtualRanks,
    query_sharded_attention,
    ring_attention,
    shard_sequence,
    ulysses_attention,
)
from stream_attention_tools.cluster.traffic import Scheme, Sent, Workload, head_shares, sent


def counted(scheme: Scheme, work: Workload, ranks: int) -> list[Sent]:
    """What the ranks send in a forward, and then in its backward."""
    recorder = Recorder()
    group = VirtualRanks(ranks, recorder=recorder)
    tensors = [
        torch.randn(work.batch, work.length, heads, work.dim, dtype=work.dtype).requires_grad_()
        for heads in (work.heads, work.kv_heads, work.kv_heads)
    ]
    options: dict[str, Any] = {"group": group, "causal": work.causal}
    if scheme.name == "query":
        outs = query_sharded_attention(*([t] * ranks for t in tensors), **options)
    else:
        shards = [shard_sequence(t, group=group, layout=scheme.layout) for t in tensors]
        options |= {"layout": scheme.layout, "length": work.length}
        if scheme.name == "ulysses":
            outs = ulysses_attention(*shards, ring_size=scheme.ring_size, **options)
        else:
            outs = ring_attention(*shards, rotate="allgather" if scheme.name == "allgather" else "p2p", **options)
    forward = [recorder.bytes_sent(rank) for rank in range(ranks)]
    recorder.entries.clear()
    torch.stack([out.float().sum() for out in outs]).sum().backward()
    return [Sent(there, recorder.bytes_sent(rank)) for rank, there in enumerate(forward)]


FLAT = [Scheme(name, layout) for name in ("ring", "allgather") for layout in ("contiguous", "zigzag", "striped")]  # type: ignore[arg-type]
SCHEMES = [*FLAT, Scheme("ulysses"), Scheme("query")]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_bytes_are_those_that_are_sent(scheme: Scheme, causal: bool) -> None:
    for ranks, length in ((1, 9), (2, 16), (3, 25), (4, 21)):
        for dtype in (torch.bfloat16, torch.float32):
            work = Workload(length, heads=8, kv_heads=2, dim=4, batch=2, causal=causal, dtype=dtype)
            assert sent(scheme, work, ranks) == counted(scheme, work, ranks), (ranks, length, dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (6, 3), (10, 5), (4, 1)])
def test_bytes_of_heads_that_ranks_divide_in_any_way(heads: int, kv_heads: int) -> None:
    for ranks, ring_size in ((3, 1), (4, 1), (4, 2), (6, 2), (6, 3)):
        scheme = Scheme("ulysses", "zigzag" if ring_size > 1 else "contiguous", ring_size)
        work = Workload(26, heads, kv_heads, dim=4, dtype=torch.float16)
        assert sent(scheme, work, ranks) == counted(scheme, work, ranks), (ranks, ring_size)


def test_one_rank_sends_nothing() -> None:
    for scheme in (*SCHEMES, Scheme("star")):
        assert sent(scheme, Workload(64, 4, 4, 8), ranks=1) == [Sent(0, 0)]


def test_star_sends_nothing() -> None:
    assert sent(Scheme("star"), Workload(64, 4, 4, 8), ranks=4) == [Sent()] * 4


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8), (64, 8)])
def test_ulysses_sends_less_than_a_ring_iff_ranks_exceed_one_and_the_group(heads: int, kv_heads: int) -> None:
    for ranks in (2, 4, 8):
        work = Workload(4096, heads, kv_heads, 64, causal=False)
        ulysses, ring = (sent(Scheme(name), work, ranks)[0].forward for name in ("ulysses", "ring"))  # type: ignore[arg-type]
        assert (ulysses < ring) == (ranks > 1 + heads // kv_heads)
        assert (ulysses == ring) == (ranks == 1 + heads // kv_heads)


def test_all_heads_are_shared_out() -> None:
    for heads, kv_heads, ranks in ((32, 8, 8), (32, 8, 16), (9, 3, 4), (10, 5, 3)):
        assert sum(one.queries for one in head_shares(heads, kv_heads, ranks)) == heads


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_heads": 3}, "kv_heads: expected a divisor of the 8 heads; got 3"),
        ({"length": 0}, "length: expected at least 1; got 0"),
        ({"dim": 8.0}, "dim: expected an int; got 8.0"),
        ({"dtype": torch.int8}, "dtype: expected a floating dtype"),
    ],
)
def test_a_workload_that_is_none_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(**{"length": 64, "heads": 8, "kv_heads": 8, "dim": 8} | given)
