"""StarAttention: two phases and a cache between them, on virtual ranks; tests/distributed has processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import StreamAttentionConfig, attention, create_kv_compressor
from stream_attention.core.star_attention import StarAttention, StarAttentionState, create_star_attention
from stream_attention.distributed import Recorder, VirtualRanks

F64 = torch.float64


def star_of(size: int = 1, block: int = 5, anchor: int = 3, recorder: Recorder | None = None, **fields: Any) -> Any:
    config = StreamAttentionConfig(
        num_heads=4,
        head_dim=8,
        star_attention_block_size=block,
        star_attention_anchor_size=anchor,
        star_attention_num_hosts=size,
        **fields,
    )
    return StarAttention(config, VirtualRanks(size, recorder=recorder))


def qkv(length: int, seed: int = 0, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, length, 4, 8), (batch, length, 2, 8), (batch, length, 2, 5))
    return [torch.randn(shape, generator=generator, dtype=F64) for shape in shapes]


def seen(length: int, block: int, anchor: int) -> Tensor:
    at = torch.arange(length)
    return (at <= at[:, None]) & ((at[:, None] // block == at // block) | (at < anchor))


def own(state: StarAttentionState) -> Tensor:
    return torch.cat(list(state.output.values()), 1)


# Phase 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_blocks_see_themselves_and_the_anchor_and_ranks_keep_their_own_rows(size: int) -> None:
    context = qkv(23)
    star = star_of(size, recorder=(recorder := Recorder()))
    state = star.encode_context(*context)
    torch.testing.assert_close(own(state), attention(*context, mask=seen(23, 5, 3)))
    for i, whole in enumerate(context[1:]):
        assert torch.equal(torch.cat([pair[i] for pair in state.kv_caches.values()], 1), whole)
    assert (state.context_length, state.current_phase, state.query_host_id) == (23, 1, size - 1)
    assert recorder.entries == {}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_block_of_the_whole_context_is_dense_attention(size: int) -> None:
    context = qkv(23)
    torch.testing.assert_close(own(star_of(size, block=23).encode_context(*context)), attention(*context, causal=True))


def test_a_context_alone_is_query_key_and_value() -> None:
    context = qkv(12)[0]
    state = star_of().encode_context(context)
    torch.testing.assert_close(own(state), attention(context, context, context, mask=seen(12, 5, 3)))


# Phase 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_queries_see_everything_and_the_last_rank_keeps_them(size: int) -> None:
    """Over the keys of phase 1, phase 2 is dense attention, token by token and in groups, on every rank."""
    context, query = qkv(23), qkv(6, seed=1)
    star = star_of(size)
    state = star.encode_context(*context)
    whole = [torch.cat(pair, 1) for pair in zip(context, query, strict=True)]
    expected = attention(*whole, causal=True)[:, 23:]
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        q, k, v = (t[:, begin:end] for t in query)
        outs = star.process_query(q, state, key=k, value=v)
        assert all(torch.equal(out, outs[0]) for out in outs)
        torch.testing.assert_close(outs[0], expected[:, begin:end])
    assert state.query_kv is not None and torch.equal(state.query_kv[0], query[1])
    assert (state.query_length, state.current_phase) == (6, 2)
    assert sum(pair[0].shape[1] for pair in state.kv_caches.values()) == 23
    outs = star.process_query(query[0])  # that leaves nothing behind
    torch.testing.assert_close(outs[-1], attention(query[0], *whole[1:]))
    assert state.query_length == 6


def test_only_states_travel() -> None:
    star = star_of(4, recorder=(recorder := Recorder()))
    state = star.encode_context(*(t.float() for t in qkv(40)))
    star.process_query(qkv(2, seed=1)[0].float(), state)
    for rank in range(4):
        assert recorder.kinds(rank) == ["Agreement", "AllGather"]
        assert recorder.bytes_sent(rank) == 3 * 2 * 2 * 4 * (5 + 1) * 4


def test_scores_hundreds_apart_between_hosts_do_not_overflow() -> None:
    context = [t.float() for t in qkv(20)]
    context[1][:, :5] *= 90
    context[1][:, 5:10] *= -300
    query = qkv(2, seed=1)[0].float()
    star = star_of(4)
    outs = star.process_query(query, star.encode_context(*context))
    exact, lse = attention(query.double(), *(t.double() for t in context[1:]), return_lse=True)
    assert lse.max() > 200
    torch.testing.assert_close(outs[0].double(), exact, rtol=1e-4, atol=1e-4)


def test_a_host_without_rows_adds_nothing() -> None:
    context, query = qkv(4), qkv(1, seed=1)[0]
    star = star_of(4)
    outs = star.process_query(query, star.encode_context(*context))
    torch.testing.assert_close(outs[2], attention(query, *context[1:]))


# The module


def test_forward_is_the_two_phases() -> None:
    context, query = qkv(12), qkv(3, seed=1)
    star = create_star_attention(
        StreamAttentionConfig(num_heads=4, head_dim=8, star_attention_block_size=5, star_attention_anchor_size=3)
    )
    torch.testing.assert_close(star(*context), attention(*context, mask=seen(12, 5, 3)))
    whole = [torch.cat(pair, 1) for pair in zip(context, query, strict=True)]
    torch.testing.assert_close(star(*query, is_context=False), attention(*whole, causal=True)[:, 12:])


def test_a_query_without_a_context_is_causal_attention() -> None:
    query, more = qkv(5), qkv(2, seed=1)
    star = star_of(2)
    torch.testing.assert_close(star(*query, is_context=False)[0], attention(*query, causal=True))
    whole = [torch.cat(pair, 1) for pair in zip(query, more, strict=True)]
    torch.testing.assert_close(star(*more, is_context=False)[1], attention(*whole, causal=True)[:, 5:])


def test_the_default_config_drops_no_token() -> None:
    """Where an earlier StarAttention kept one of four, with `enable_kv_compression` at its default."""
    star = StarAttention(StreamAttentionConfig(num_heads=4, head_dim=8))
    context, query = [t.float() for t in qkv(4100, batch=1)], qkv(2, seed=1, batch=1)[0].float()
    state = star.encode_context(*context)
    assert state.kv_caches[0][0].shape[1] == 4100 and state.compression == {}
    torch.testing.assert_close(star.process_query(query, state), attention(query, *context[1:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("method", ["streaming", "key_norm", "quantized", "snap", "importance", "chunk", "hybrid"])
def test_compression_on_request(size: int, method: str) -> None:
    """What a query sees is what the compressor kept, on each rank for itself, by its own queries where they count."""
    context, query = qkv(40), qkv(2, seed=1)[0]
    context[2] = context[1] + 1
    star = star_of(size, kv_compression_ratio=2.0)
    state = star.encode_context(*context, compression=method)
    torch.testing.assert_close(own(state), attention(*context, mask=seen(40, 5, 3)))  # phase 1 sees all
    kept, held = [], []
    pairs = list(star_of(size).encode_context(*context).kv_caches.values())
    queries = context[0].split([pair[0].shape[1] for pair in pairs], 1)
    for rank, (pair, votes) in enumerate(zip(pairs, queries, strict=True)):
        compressor = create_kv_compressor(method)
        keys, values, stats = compressor.compress(*pair, 2.0, query=votes if compressor.uses_query else None)
        assert state.compression[rank].method == stats.method
        kept.append(compressor.decompress(keys, values))
        held.append(stats.mask(4))
    key, value = (torch.cat(side, 1) for side in zip(*kept, strict=True))
    outs = star.process_query(query, state)
    torch.testing.assert_close(outs[0], attention(query, key, value, mask=torch.cat(held, 3)))
    assert sorted(state.compression) == list(range(size))


# Refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enable_star_attention": False}, "enable_star_attention: expected True for StarAttention; got False"),
        ({"anchor": 6}, "star_attention_anchor_size: expected at most a block, 5; got 6"),
        (
            {"size": 2, "enable_distributed": False},
            "star_attention_num_hosts: expected 1 with enable_distributed=False",
        ),
    ],
    ids=str,
)
def test_fields_that_cannot_act_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        star_of(**fields)


def test_hosts_are_the_ranks_of_the_group() -> None:
    config = StreamAttentionConfig(num_heads=4, head_dim=8, star_attention_num_hosts=3)
    with pytest.raises(ValueError, match="star_attention_num_hosts: expected the 2 ranks of the group; got 3"):
        StarAttention(config, VirtualRanks(2)).encode_context(qkv(6)[0])
    config = StreamAttentionConfig(num_heads=4, head_dim=8)
    with pytest.raises(ValueError, match="process_group: expected None with star_attention_num_hosts=1"):
        StarAttention(config, VirtualRanks(2))


def test_bad_calls_are_refused() -> None:
    context = qkv(6)
    star = star_of(max_sequence_length=8)
    with pytest.raises(ValueError, match=r"state: expected an encoded context; got None. Call encode_context first"):
        star.process_query(context[0])
    with pytest.raises(ValueError, match=r"key: expected at most max_sequence_length=8 keys.*; got 9"):
        star.encode_context(*qkv(9))
    state = star.encode_context(*context)
    with pytest.raises(ValueError, match=r"key: expected at most max_sequence_length=8 keys.*; got 12"):
        star.process_query(context[0], state, key=context[1], value=context[2])
    assert state.query_length == 0 and state.query_kv is None
    with pytest.raises(ValueError, match="key and value: expected both or neither"):
        star.encode_context(context[0], context[1])
    with pytest.raises(ValueError, match="attention_mask: expected None"):
        star(*context, attention_mask=torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"query: expected \[B, Tq, num_heads=4, head_dim=8\]"):
        star.process_query(torch.randn(2, 1, 3, 8), state)
    with pytest.raises(ValueError, match="key and value: expected the query's batch size B=1"):
        star.process_query(context[0][:1], state)
    with pytest.raises(
        ValueError, match=r"key and value: expected the context's heads and head dim, \[2, 5\]; got \[2, 4\]"
    ):
        star.process_query(context[0][:, :1], state, key=context[1][:, :1], value=context[2][:, :1, :, :4])
    with pytest.raises(ValueError, match="compression: expected None with enable_kv_compression=False"):
        star_of(enable_kv_compression=False).encode_context(*context, compression="hybrid")
    with pytest.raises(ValueError, match=r"dropout: expected 0 while training; got 0.1.*eval\(\)"):
        star_of(dropout=0.1).encode_context(*context)
    star_of(dropout=0.1).eval().encode_context(*context)
