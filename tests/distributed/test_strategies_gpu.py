"""Ulysses, tree decode, star and query sharding on a GPU: virtual ranks with the real kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import ContiguousKV, FusedOnlineAttention, StreamAttentionConfig, attention
from stream_attention.backends.reference import attention as reference
from stream_attention.core.star_attention import StarAttention
from stream_attention.distributed import VirtualRanks, shard_sequence, unshard_sequence
from stream_attention.distributed.query_shard import query_sharded_attention
from stream_attention.distributed.tree import tree_decode_attention
from stream_attention.distributed.ulysses import ulysses_attention

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def drawn(length: int, q_heads: int = 8, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (q_heads, kv_heads, kv_heads)
    return [torch.randn(2, length, n, 64, generator=generator).to("cuda", BF16) for n in heads]


def errors(results: list[Tensor], truths: list[Tensor]) -> list[float]:
    """Root mean squares."""
    return [(x.double() - truth).square().mean().sqrt().item() for x, truth in zip(results, truths, strict=True)]


def exact(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in tensors]
    out = reference.attention(*leaves, **options)[0]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "dropout_p": 0.2, "seed": 3}], ids=str)
@pytest.mark.parametrize(("size", "ring_size"), [(2, 1), (8, 1), (4, 2)])
def test_ulysses_is_as_exact_as_one_pass(size: int, ring_size: int, options: dict[str, Any]) -> None:
    tensors, group = drawn(515), VirtualRanks(size)
    leaves = [t.requires_grad_() for t in tensors]
    truths = exact(tensors, **options)
    alone = errors(with_gradients(attention(*leaves, **options), leaves), truths)
    shards = [shard_sequence(t, group=group, layout="zigzag") for t in leaves]
    outs = ulysses_attention(*shards, group=group, ring_size=ring_size, layout="zigzag", **options)
    whole = unshard_sequence(outs, group=group, layout="zigzag")[0]
    for mine, one in zip(errors(with_gradients(whole, leaves), truths), alone, strict=True):
        assert mine <= 1.1 * one


@pytest.mark.parametrize("size", [3, 8])
def test_query_sharding_is_as_exact_as_one_pass(size: int) -> None:
    tensors = drawn(515)
    leaves = [t.requires_grad_() for t in tensors]
    truths = exact(tensors, causal=True)
    alone = errors(with_gradients(attention(*leaves, causal=True), leaves), truths)
    copies = [[t.detach().clone().requires_grad_() for _ in range(size)] for t in tensors]
    outs = query_sharded_attention(*copies, group=VirtualRanks(size), causal=True)
    torch.stack([out.float().square().sum() for out in outs]).sum().backward()
    for rank in range(size):
        found = [outs[rank].detach(), *(t.grad for one in copies for t in one[rank : rank + 1])]
        for mine, one in zip(errors(found, truths), alone, strict=True):  # type: ignore[arg-type]
            assert mine <= 1.1 * one


def test_a_distributed_module_alone_computes_as_ever() -> None:
    tensors = drawn(100, kv_heads=8)
    attend = FusedOnlineAttention(num_heads=8, head_dim=64)
    expected = attend(*tensors)
    attend.set_distributed(True)
    assert torch.equal(attend(*tensors), expected)


@pytest.mark.parametrize("size", [1, 4])
def test_tree_and_star_decode_is_dense_attention(size: int) -> None:
    query, key, value = drawn(1000)
    expected = reference.attention(query[:, -1:], key, value)[0]
    (alone,) = errors([attention(query[:, -1:], key, value)], [expected])
    lengths = [1000 // size] * size
    pairs = zip(key.split(lengths, 1), value.split(lengths, 1), strict=True)
    outs = tree_decode_attention(query[:, -1:], [ContiguousKV(*pair) for pair in pairs], group=VirtualRanks(size))
    sizes = {"star_attention_block_size": 128, "star_attention_anchor_size": 64, "star_attention_num_hosts": size}
    star = StarAttention(StreamAttentionConfig(num_heads=8, head_dim=64, **sizes), VirtualRanks(size))
    state = star.encode_context(*(t[:, :-1] for t in (query, key, value)))
    answers = star.process_query(query[:, -1:], state, key=key[:, -1:], value=value[:, -1:])
    for out in (outs[0], answers[0]):
        assert errors([out], [expected])[0] <= 1.1 * alone
