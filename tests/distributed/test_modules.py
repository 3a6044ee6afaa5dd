"""RingAttention and StarAttention on processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import StreamAttentionConfig, attention
from stream_attention.core.ring_attention import RingAttention
from stream_attention.core.star_attention import StarAttention
from stream_attention.distributed import shard_sequence

pytestmark = pytest.mark.xdist_group("ranks")


def qkv(length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, length, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3)]


def ring(rank: int, groups: Any, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """A prefill, a chunk, and one more token on the last rank, with the gradient of rank 0's keys."""
    attend = RingAttention(StreamAttentionConfig(num_heads=4, head_dim=8), groups[group])
    tensors = [t.requires_grad_() for t in qkv(15)]
    cache, outs = None, []
    for begin, end in ((0, 9), (9, 14)):
        shards = [shard_sequence(t[:, begin:end], group=groups[group]) for t in tensors]
        out, cache = attend.forward_with_cache(*shards, cache)
        outs.append(out)
    last = attend.rank == attend.world_size - 1
    out, cache = attend.forward_with_cache(*(t[:, 14:] if last else t[:, :0] for t in tensors), cache)
    torch.cat((*outs, out), 1).square().sum().backward()
    return *(t.detach() for t in (*outs, out)), tensors[1].grad  # type: ignore[return-value]


@pytest.mark.parametrize(("group", "members"), [("world", None), ("odd", (1, 3))])
def test_a_ring_with_a_cache(pool: Any, group: str, members: Any) -> None:
    tensors = [t.requires_grad_() for t in qkv(15)]
    expected = attention(*tensors, causal=True)
    expected.square().sum().backward()
    first, second, third, grads = zip(*pool.results(ring, members, group=group), strict=True)
    torch.testing.assert_close(torch.cat((*first, *second, *third), 1), expected.detach())
    torch.testing.assert_close(torch.stack(grads).sum(0), tensors[1].grad)


def star(rank: int, groups: Any) -> tuple[Tensor, list[Tensor], int]:
    sizes = {"star_attention_block_size": 5, "star_attention_anchor_size": 3, "star_attention_num_hosts": 4}
    attend = StarAttention(StreamAttentionConfig(num_heads=4, head_dim=8, **sizes))
    state = attend.encode_context(*qkv(23))
    answers = []
    for t in range(3):
        query, key, value = (x[:, t : t + 1] for x in qkv(3, seed=1))
        answers.append(attend.process_query(query, state, key=key, value=value))
    kept = 0 if state.query_kv is None else state.query_kv[0].shape[1]
    return state.output[rank], answers, kept


def test_a_star_of_four_hosts(pool: Any) -> None:
    context, query = qkv(23), qkv(3, seed=1)
    at = torch.arange(23)
    seen = (at <= at[:, None]) & ((at[:, None] // 5 == at // 5) | (at < 3))
    outs, answers, kept = zip(*pool.results(star), strict=True)
    torch.testing.assert_close(torch.cat(outs, 1), attention(*context, mask=seen))
    whole = [torch.cat(pair, 1) for pair in zip(context, query, strict=True)]
    for mine in answers:
        torch.testing.assert_close(torch.cat(mine, 1), attention(*whole, causal=True)[:, 23:])
    assert kept == (0, 0, 0, 3)
