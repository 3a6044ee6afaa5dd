"""The two phases of star attention, as functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import ContiguousKV, attention
from stream_attention.backends.reference import attention as reference
from stream_attention.distributed import Recorder, VirtualRanks, ring_attention, shard_sequence
from stream_attention.distributed.star import shard_context, star_cache, star_context_attention, star_rows
from stream_attention.distributed.tree import tree_decode_attention

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def qkv(length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return normal(batch, length, 4, 8), normal(batch, length, 2, 8, seed=1), normal(batch, length, 2, 5, seed=2)


def visible(length: int, block: int, anchor: int) -> Tensor:
    """What each row sees: the past of its block, and the anchor."""
    at = torch.arange(length)
    same_block = at[:, None] // block == at // block
    return (at <= at[:, None]) & (same_block | (at < anchor))


def encode(size: int, length: int, block: int, anchor: int | None, **options: Any) -> tuple[list[Tensor], Any]:
    """Outputs of the ranks' own rows, and their caches."""
    sizes: dict[str, Any] = {"group": VirtualRanks(size), "block_size": block, "anchor_size": anchor}
    rows = [shard_context(t, **sizes) for t in qkv(length)]
    outs = star_context_attention(*rows, length=length, **sizes, **options)
    caches = star_cache(*rows[1:], length=length, **sizes)
    return [out[:, out.shape[1] - key.shape[1] :] for out, (key, _) in zip(outs, caches, strict=True)], caches


# Rows


def test_ranks_have_whole_blocks_and_all_but_the_first_a_copy_of_the_anchor() -> None:
    at = torch.arange(11)
    shards = shard_context(at, group=VirtualRanks(3), block_size=3, anchor_size=2, dim=0)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2, 3, 4, 5], [0, 1, 6, 7, 8], [0, 1, 9, 10]]


def test_fewer_blocks_than_ranks_leave_ranks_with_nothing() -> None:
    at = torch.arange(5)
    shards = shard_context(at, group=VirtualRanks(4), block_size=3, dim=0)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [0, 1, 2, 3, 4], [], []]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("length", "block", "anchor"), [(23, 5, 3), (24, 4, 4), (23, 5, 0), (7, 1, 1), (0, 3, 2)])
def test_every_row_belongs_to_one_rank(size: int, length: int, block: int, anchor: int) -> None:
    owned = []
    for rank in range(size):
        runs = star_rows(length, block, anchor, size, rank)
        positions = [at for run in runs for at in range(run.start, run.start + run.length)]
        own = positions[anchor:] if rank and positions else positions
        assert positions[: len(positions) - len(own)] == list(range(anchor))[: len(positions) - len(own)]
        owned += own
    assert owned == list(range(length))


# Phase 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("length", "block", "anchor"), [(23, 5, 3), (24, 4, None), (23, 5, 0), (5, 5, 5), (0, 3, 2)])
def test_a_block_sees_its_past_and_the_anchor_at_its_place(size: int, length: int, block: int, anchor: Any) -> None:
    """Slopes tell positions apart: the anchor keeps its own, and so there is a gap before the block."""
    slopes, sink = normal(4, seed=3).abs(), normal(4, seed=4)
    outs, caches = encode(size, length, block, anchor, alibi_slopes=slopes, sink=sink)
    query, key, value = qkv(length)
    mask = visible(length, block, block if anchor is None else anchor)
    expected = attention(query, key, value, mask=mask, alibi_slopes=slopes, sink=sink)
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    for held, whole in zip(zip(*caches, strict=True), (key, value), strict=True):
        assert torch.equal(torch.cat(held, 1), whole)  # no row twice: the copies of the anchor are gone


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_block_of_the_whole_context_is_causal_attention(size: int) -> None:
    outs, _ = encode(size, 23, 23, None)
    torch.testing.assert_close(torch.cat(outs, 1), attention(*qkv(23), causal=True))


@pytest.mark.parametrize("size", [1, 2])
def test_an_anchor_of_all_that_came_before_is_causal_attention(size: int) -> None:
    outs, _ = encode(size, 20, 10, 10)
    torch.testing.assert_close(torch.cat(outs, 1), attention(*qkv(20), causal=True))


def test_nothing_is_said_in_phase_1() -> None:
    group = VirtualRanks(4, recorder=(recorder := Recorder()))
    rows = [shard_context(t, group=group, block_size=4, anchor_size=2) for t in qkv(30)]
    star_context_attention(*rows, group=group, length=30, block_size=4, anchor_size=2)
    assert recorder.entries == {}


def test_the_lse_is_that_of_what_is_seen() -> None:
    sizes: dict[str, Any] = {"block_size": 5, "anchor_size": 3}
    _, lse = star_context_attention(*qkv(23), length=23, **sizes, return_lse=True)
    _, expected = reference.attention(*qkv(23), mask=visible(23, 5, 3))
    torch.testing.assert_close(lse, expected)


# Phase 2


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_phase_2_over_a_cache_that_a_ring_filled_is_dense_attention(size: int) -> None:
    """The context's output and the query's, as if one device had both; the last rank alone appends."""
    length, new = 21, 3
    query, key, value = qkv(length + new)
    group = VirtualRanks(size)
    context = [shard_sequence(t[:, :length], group=group) for t in (query, key, value)]
    outs = ring_attention(*context, group=group, causal=True)
    caches = [ContiguousKV(*pair) for pair in zip(*context[1:], strict=True)]
    grown = [torch.cat((held, t[:, length:]), 1) for held, t in ((caches[-1].key, key), (caches[-1].value, value))]
    caches[-1] = ContiguousKV(*grown)
    answers = tree_decode_attention(query[:, length:], caches, group=group)
    expected = attention(query, key, value, causal=True)
    for answer in answers:
        torch.testing.assert_close(torch.cat((*outs, answer), 1), expected)


# Refusals


def test_rows_that_are_not_a_ranks_are_refused() -> None:
    sizes: dict[str, Any] = {"length": 9, "block_size": 4}
    with pytest.raises(ValueError, match=r"key, value: expected the 9 rows of rank 0; got \[8, 9\]. shard_context"):
        star_cache(torch.ones(1, 8, 2, 4), torch.ones(1, 9, 2, 4), **sizes)
    with pytest.raises(ValueError, match="length: expected at least 0; got -9"):
        star_cache(torch.ones(1, 9, 2, 4), torch.ones(1, 9, 2, 4), **sizes | {"length": -9})
    with pytest.raises(ValueError, match=r"dim: expected a dim of a tensor of shape \[10\]; got 1"):
        shard_context(torch.arange(10), block_size=3)
    with pytest.raises(TypeError, match=r"sequence: expected a torch\.Tensor; got list"):
        shard_context([1, 2], block_size=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, "block_size: expected at least 1; got 0"),
        ({"block_size": 4, "anchor_size": 5}, "anchor_size: expected at most a block, 4; got 5"),
        ({"block_size": 4, "anchor_size": -1}, "anchor_size: expected at least 0; got -1"),
        ({"block_size": 4, "length": -1}, "length: expected at least 0; got -1"),
        (
            {"block_size": 4, "length": 20},
            r"query, key, value: expected the 20 rows of rank 0; got \[9, 9, 9\]. shard_",
        ),
        ({"block_size": 4, "scale": float("nan")}, "scale: expected a finite number"),
    ],
    ids=str,
)
def test_bad_calls_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        star_context_attention(*qkv(9), **{"length": 9, **options})
