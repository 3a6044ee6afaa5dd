"""RingAttention, the module around `ring_attention`, on virtual ranks; tests/distributed has processes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import StreamAttentionConfig, attention, create_kv_compressor
from stream_attention.core.ring_attention import RingAttention, create_ring_attention
from stream_attention.distributed import Recorder, VirtualRanks, ring_attention, shard_sequence, unshard_sequence

F64 = torch.float64


def config(**fields: Any) -> StreamAttentionConfig:
    return StreamAttentionConfig(num_heads=4, head_dim=8, **fields)


def qkv(length: int, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, length, 4, 8), (batch, length, 2, 8), (batch, length, 2, 5))
    return [torch.randn(shape, generator=generator, dtype=F64).requires_grad_() for shape in shapes]


def shards_of(group: VirtualRanks, layout: Any, tensors: list[Tensor]) -> list[list[Tensor]]:
    return [shard_sequence(t, group=group, layout=layout) for t in tensors]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_attention_over_the_whole_sequence(size: int, layout: Any, causal: bool) -> None:
    group, tensors = VirtualRanks(size), qkv(21)
    ring = RingAttention(config(), group, layout=layout)
    assert (ring.world_size, ring.rank) == (size, 0)
    outs = ring(*shards_of(group, layout, tensors), causal=causal)
    out = unshard_sequence(outs, group=group, layout=layout)[0]
    expected = attention(*tensors, causal=causal)
    torch.testing.assert_close(out, expected)
    found = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), tensors))


def test_one_process_needs_no_group() -> None:
    ring = create_ring_attention(config())
    torch.testing.assert_close(ring(*qkv(9)), attention(*qkv(9), causal=True))
    assert ring.world_size == 1 and "num_heads=4" in repr(ring)


@pytest.mark.parametrize("form", ["[B, Tk]", "[B, Tq, Tk]", "added"])
def test_masks_are_of_the_ranks_rows_and_all_keys(form: str) -> None:
    group, tensors = VirtualRanks(3), qkv(10)
    keep = torch.rand(2, 10, 10, generator=torch.Generator().manual_seed(1)) < 0.7
    keep = keep[:, :1].expand(-1, 10, -1) if form == "[B, Tk]" else keep
    masks = shard_sequence(keep, group=group)
    if form == "[B, Tk]":
        masks = [mask[:, 0] for mask in masks]
    if form == "added":
        masks = [torch.zeros(mask.shape, dtype=F64).masked_fill(~mask, -torch.inf) for mask in masks]
    outs = RingAttention(config(), group)(*shards_of(group, "contiguous", tensors), attention_mask=masks, causal=False)
    torch.testing.assert_close(torch.cat(outs, 1), attention(*tensors, mask=keep[:, None]))


# The cache


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_cache_that_grows_is_the_whole_sequence(size: int) -> None:
    """Chunks over all ranks, then tokens on the last alone: each call's rows stand behind all of the earlier ones'."""
    group, tensors = VirtualRanks(size), qkv(23)
    ring, caches, outs = RingAttention(config(), group), None, []
    expected = attention(*tensors, causal=True)
    for begin, end in ((0, 11), (11, 20), (20, 21), (21, 23)):
        chunks = [t[:, begin:end] for t in tensors]
        lengths = [0] * (size - 1) + [end - begin]
        new = [list(t.split(lengths, 1)) for t in chunks] if begin >= 20 else shards_of(group, "contiguous", chunks)
        out, caches = ring.forward_with_cache(*new, caches)
        outs.append(torch.cat(out, 1))
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    for held, whole in zip(zip(*caches, strict=True), tensors[1:], strict=True):
        assert sum(t.shape[1] for t in held) == whole.shape[1]
    found = torch.autograd.grad(torch.cat(outs, 1).square().sum(), tensors)
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), tensors))


def test_a_cache_made_by_hand_is_in_the_order_of_ranks() -> None:
    group, tensors = VirtualRanks(2), [t.detach() for t in qkv(9)]
    past = list(zip(*([list(t[:, :8].split(4, 1)) for t in tensors[1:]]), strict=True))
    new = [list(t[:, 8:].split([0, 1], 1)) for t in tensors]
    outs, caches = RingAttention(config(), group).forward_with_cache(*new, past, use_cache=False)
    torch.testing.assert_close(outs[1], attention(*tensors, causal=True)[:, 8:])
    assert caches is None


def test_on_one_process_a_cache_is_a_pair_of_tensors() -> None:
    tensors, ring = qkv(6), RingAttention(config())
    _, past = ring.forward_with_cache(*(t[:, :5] for t in tensors))
    out, (key, value) = ring.forward_with_cache(*(t[:, 5:] for t in tensors), past)
    torch.testing.assert_close(out, attention(*tensors, causal=True)[:, 5:])
    assert torch.equal(key, tensors[1]) and torch.equal(value, tensors[2])


# A cache that was compressed, each rank its own part


def compressed(method: str, parts: list[Any], queries: list[Tensor], **options: Any) -> list[Any]:
    """`(keys, values, stats)` of every part, plain."""
    compressor, found = create_kv_compressor(method, **options), []
    for (key, value), query in zip(parts, queries, strict=True):
        votes = {"query": query} if compressor.uses_query else {}
        ratio = () if method == "quantized" else (2.0,)
        keys, values, stats = compressor.compress(key.detach(), value.detach(), *ratio, **votes)
        found.append((*compressor.decompress(keys, values), stats))
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("method", ["streaming", "key_norm", "importance", "snap"])
def test_new_tokens_see_what_each_rank_kept_as_on_one_device(size: int, method: str) -> None:
    """One device compresses the same parts, and attends to what is left of them, one part behind the other."""
    group, tensors = VirtualRanks(size), [t.detach() for t in qkv(44)]
    ring = RingAttention(config(), group)
    shards = shards_of(group, "contiguous", [t[:, :42] for t in tensors])
    _, caches = ring.forward_with_cache(*shards)
    past = [(key, value) for key, value, _ in compressed(method, caches, shards[0])]
    lengths = [one.shape[1] for one in shards[0]]
    parts = list(zip(*(t[:, :42].split(lengths, 1) for t in tensors[1:]), strict=True))
    kept = compressed(method, parts, list(tensors[0][:, :42].split(lengths, 1)))
    assert sum(stats.tokens_retained for *_, stats in kept) == 21
    key, value = (torch.cat(side, 1) for side in list(zip(*kept, strict=True))[:2])
    for token, holder in ((42, size - 1), (43, 0)):
        query, new_key, new_value = (t[:, token : token + 1] for t in tensors)
        key, value = torch.cat((key, new_key), 1), torch.cat((value, new_value), 1)
        new = [[t if rank == holder else t[:, :0] for rank in range(size)] for t in (query, new_key, new_value)]
        outs, past = ring.forward_with_cache(*new, past)
        torch.testing.assert_close(outs[holder], attention(query, key, value, causal=True))


def test_parts_of_whole_groups_have_the_codes_of_one_cache() -> None:
    """Scales are of 8 tokens or channels, and no rank's part ends inside a group."""
    group, (query, key, _) = VirtualRanks(3), [t.detach() for t in qkv(48)]
    value = key + 1
    parts = list(zip(key.split(16, 1), value.split(16, 1), strict=True))
    past = [one[:2] for one in compressed("quantized", parts, [query] * 3, bits=4, group=8)]
    ((one_key, one_value, _),) = compressed("quantized", [(key, value)], [query], bits=4, group=8)
    assert torch.equal(torch.cat([key for key, _ in past], 1), one_key) and not torch.equal(one_key, key)
    new = [list(t[:, -1:].split([0, 0, 1], 1)) for t in (query, key, value)]
    outs, _ = RingAttention(config(), group).forward_with_cache(*new, past)
    keys, values = torch.cat((one_key, key[:, -1:]), 1), torch.cat((one_value, value[:, -1:]), 1)
    torch.testing.assert_close(outs[2], attention(query[:, -1:], keys, values))


def test_empty_slots_of_a_compressed_cache_are_masked() -> None:
    """Heads that keep different numbers of tokens: `ring_attention` is told by a mask over all ranks' slots."""
    group, (query, key, value) = VirtualRanks(2), [t.detach() for t in qkv(40)]
    parts = list(zip(key.split(20, 1), value.split(20, 1), strict=True))
    kept = compressed("importance", parts, list(query.split(20, 1)), heads="adaptive")
    assert any(not stats.mask().all() for *_, stats in kept)
    mask = torch.cat([stats.mask(q_heads=4) for *_, stats in kept], 3)
    sides = [[one[i] for one in kept] for i in range(2)]
    queries = [query[:, 38:39], query[:, 39:]]
    outs = ring_attention(queries, *sides, group=group, mask=[mask, mask])
    expected = attention(query[:, 38:], *(torch.cat(side, 1) for side in sides), mask=mask)
    torch.testing.assert_close(torch.cat(outs, 1), expected)


def test_codes_are_no_cache_of_a_ring() -> None:
    group, (query, key, value) = VirtualRanks(2), [t.detach() for t in qkv(9)]
    coded = create_kv_compressor("quantized", bits=8).compress(key, key)[:2]
    new = [[t[:, :0], t[:, :1]] for t in (query, key, value)]
    words = r"past_key_values: expected .*two tensors \[B, T, Hkv, D\].* got QuantizedTensor.*\.decompress.*tree_dec"
    with pytest.raises(TypeError, match=words):
        RingAttention(config(), group).forward_with_cache(*new, [coded, coded])
    with pytest.raises(ValueError, match=r"past_key_values \(.*\): expected \[2, T, 2, 8\] .*; got \[2, 9, 2, 5\]"):
        RingAttention(config(), group).forward_with_cache(*new, [(value, value)] * 2)


# Fields


def test_dropout_is_while_training_and_the_same_on_all_ranks() -> None:
    group, tensors = VirtualRanks(3), [t.detach() for t in qkv(12)]
    tensors[2] = torch.ones_like(tensors[2])
    ring = RingAttention(config(dropout=0.5), group)
    shards = shards_of(group, "contiguous", tensors)
    out = torch.cat(ring(*shards), 1)
    assert 0.7 < out.mean() < 1.3 and (out - 1).abs().max() > 0.1
    torch.manual_seed(3)
    first = torch.cat(ring(*shards), 1)
    torch.manual_seed(3)
    assert torch.equal(torch.cat(ring(*shards), 1), first)
    torch.testing.assert_close(torch.cat(ring.eval()(*shards), 1), tensors[2][..., :1].repeat(1, 1, 2, 5))


def test_gradient_checkpointing_repeats_the_ring_and_its_dropout() -> None:
    recorder, tensors = Recorder(), qkv(12)
    group = VirtualRanks(3, recorder=recorder)
    found, said = [], []
    for checkpointing in (False, True):
        ring = RingAttention(config(dropout=0.3, gradient_checkpointing=checkpointing), group)
        torch.manual_seed(3)
        out = torch.cat(ring(*shards_of(group, "contiguous", tensors)), 1)
        found.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
        said.append(len(recorder.kinds(0)))
        recorder.entries.clear()
    torch.testing.assert_close(*found)
    assert said[1] > said[0]


def test_without_leave_to_distribute_it_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    tensors = qkv(6)
    torch.testing.assert_close(
        RingAttention(config(enable_distributed=False))(*tensors), attention(*tensors, causal=True)
    )
    with pytest.raises(ValueError, match="group: expected a process group of the 2 processes"):
        RingAttention(config())(*tensors)


def test_a_cache_is_stored_and_copied_with_its_positions() -> None:
    group = VirtualRanks(2)
    ring, shards = RingAttention(config(), group), shards_of(group, "contiguous", [t.detach() for t in qkv(7)])
    _, caches = ring.forward_with_cache(*shards)
    expected, _ = ring.forward_with_cache(*shards, caches)
    for again in (pickle.loads(pickle.dumps(caches)), copy.deepcopy(caches)):
        assert [cache.lengths for cache in again] == [cache.lengths for cache in caches]
        torch.testing.assert_close(ring.forward_with_cache(*shards, again)[0], expected)


# Refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"enable_ring_attention": False}, "enable_ring_attention: expected True for RingAttention; got False"),
        ({"enable_flash_attention": False}, "enable_flash_attention: expected True for RingAttention"),
        ({"enable_distributed": False}, "process_group: expected None with enable_distributed=False; got VirtualRanks"),
    ],
    ids=str,
)
def test_fields_that_cannot_act_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RingAttention(config(**fields), VirtualRanks(2))


def test_bad_calls_are_refused() -> None:
    group = VirtualRanks(2)
    ring, shards = RingAttention(config(max_sequence_length=8), group), shards_of(group, "contiguous", qkv(9))
    with pytest.raises(ValueError, match=r"key: expected at most max_sequence_length=8 keys on all ranks.*; got 9"):
        ring(*shards)
    with pytest.raises(ValueError, match=r"query: expected \[B, Tq, num_heads=4, head_dim=8\]"):
        ring(shards[1], *shards[1:])
    with pytest.raises(ValueError, match=r"key: expected as many new rows as the query's 4; got 3"):
        ring.forward_with_cache(shards[0], [t[:, 1:] for t in shards[1]], [t[:, 1:] for t in shards[2]])
    with pytest.raises(ValueError, match="layout: expected 'contiguous' with a cache; got 'zigzag'"):
        RingAttention(config(), group, layout="zigzag").forward_with_cache(*shards)
    with pytest.raises(ValueError, match="rotate: expected 'p2p' or 'alltoall' or 'allgather'; got 'left'"):
        RingAttention(config(), group, rotate="left")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout: expected"):
        RingAttention(config(), group, layout="diagonal")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config: expected a StreamAttentionConfig; got dict"):
        RingAttention({})  # type: ignore[arg-type]
    _, caches = RingAttention(config(), group).forward_with_cache(*shards)
    cut = [type(cache)(cache[0][:, 1:], cache[1][:, 1:], cache.lengths) for cache in caches]
    with pytest.raises(
        ValueError, match=r"past_key_values: expected \(.*\) rows on the ranks, as the last call .*; got"
    ):
        RingAttention(config(), group).forward_with_cache(*shards, cut)
