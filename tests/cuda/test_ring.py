"""cuda/src/ring.cpp, query_split.cpp, partition.cpp and the copy transport: shards, schedules, streams in any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.cuda.cuda_tools import BF16, F32, case, expect_within_bounds, inputs

from stream_attention.testing import Case
from stream_attention.testing.cuda_library import CudaLibrary, Strategy

Emulated = Callable[..., CudaLibrary]


# Shards and schedules


def test_shards_are_balanced_and_cover_everything(emulated: Emulated) -> None:
    library = emulated()
    for total in (0, 1, 3, 8, 1000):
        for ranks in (1, 2, 3, 7):
            shards = [library.shard(total, ranks, rank) for rank in range(ranks)]
            assert [i for shard in shards for i in shard] == list(range(total))
            assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_every_rank_meets_every_shard_once_and_neighbours_pass_them_on(emulated: Emulated) -> None:
    schedules = [emulated().schedule(10, 10, 4, rank) for rank in range(4)]
    for rank, steps in enumerate(schedules):
        assert [step.shard for step in steps] == [(rank - s) % 4 for s in range(4)]
        assert [step.first for step in steps] == [True, False, False, False]
        assert [step.last for step in steps] == [False, False, False, True]
        # What arrives is what the rank before had.
        assert [step.shard for step in steps[1:]] == [step.shard for step in schedules[rank - 1][:-1]]


@pytest.mark.parametrize(("seq_q", "seq_k"), [(10, 10), (3, 17), (17, 3), (2, 2)])
def test_a_schedule_computes_what_is_visible_and_no_more(emulated: Emulated, seq_q: int, seq_k: int) -> None:
    library = emulated()
    for ranks in (1, 2, 3, 5):
        for rank in range(ranks):
            queries = library.shard(seq_q, ranks, rank)
            steps = library.schedule(seq_q, seq_k, ranks, rank, causal=True)
            for step in steps:
                visible = {
                    (i, j)
                    for i, query in enumerate(queries)
                    for j, key in enumerate(step.keys)
                    if key <= query + seq_k - seq_q
                }
                by_offset = {(i, j) for i in range(len(queries)) for j in range(len(step.keys)) if j <= i + step.offset}
                assert by_offset == visible
                if visible:
                    assert step.computes
            computing = [step for step in steps if step.computes]
            assert bool(queries) == bool(computing)  # rows that see nothing are written too, once
            if computing:
                assert [step.first for step in computing] == [True] + [False] * (len(computing) - 1)
                assert [step.last for step in computing] == [False] * (len(computing) - 1) + [True]


# Agreement with the reference

CASES = {
    "two ranks": (case(70, 70, 32), 2),
    "lengths that do not divide, batch, heads": (case(71, 71, 64, B=2, H=2, causal=True), 3),
    "buffers in turn": (case(41, 43, 32), 5),
    "causal, more keys": (case(30, 101, 32, causal=True), 4),
    "causal, more queries: whole ranks see nothing": (case(101, 30, 32, causal=True), 4),
    "fewer rows than ranks": (case(3, 3, 32, causal=True), 5),
    "fewer keys than ranks": (case(40, 2, 32), 4),
    "one rank": (case(70, 70, 32), 1),
}


@pytest.mark.parametrize("strategy", ["ring", "queries"])
@pytest.mark.parametrize(("one", "ranks"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_agrees(emulated: Emulated, one: Case, ranks: int, strategy: Strategy, dtype: torch.dtype) -> None:
    one = case(one.Tq, one.Tk, one.D, dtype, B=one.B, H=one.Hq, causal=one.causal)
    (query, key, value), options = inputs(one)
    before = [x.clone() for x in (query, key, value)]
    with emulated(ranks).group(query, key, value, ranks=ranks, strategy=strategy, **options) as group:
        expect_within_bounds(one, group.forward()[0])
        again = group.forward()[0]
    expect_within_bounds(one, again)  # its shards are as they were
    assert all(map(torch.equal, (query, key, value), before))


def test_streams_may_run_in_any_order(emulated: Emulated) -> None:
    # Five ranks use both buffers twice. Each wait of ring.cpp and transport_copy.cpp was left out once: this failed.
    one = case(40, 41, 32)
    tensors, options = inputs(one)
    alone = emulated().forward(*tensors, **options)[0]
    for seed in range(12):
        with emulated(seed).group(*tensors, ranks=5, **options) as group:
            torch.testing.assert_close(group.forward()[0], alone, rtol=0.0, atol=1e-6)
            torch.testing.assert_close(group.forward()[0], alone, rtol=0.0, atol=1e-6)


# Memory


def test_memory_is_what_the_shards_take(emulated: Emulated) -> None:
    tensors, options = inputs(case(10, 10, 32, B=2, H=3))
    row = 2 * 3 * 32 * 4  # one position of both batches and all heads, in bytes
    states = 2 * 3 * 10 * (32 + 2) * 4
    with emulated().group(*tensors, ranks=4, **options) as group:
        # Q, out and own K, V of 10 rows in all; two buffers of the longest shard's K and V per rank; m, l and acc.
        assert group.bytes_per_gpu == (10 + 10 + 2 * 10) * row + 4 * 2 * 2 * 3 * row + states
    with emulated().group(*tensors, ranks=1, **options) as group:
        assert group.bytes_per_gpu == 4 * 10 * row
    with emulated().group(*tensors, ranks=2, strategy="queries", **options) as group:
        assert group.bytes_per_gpu == (10 + 10 + 10) * row + 2 * 2 * 10 * row


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks: expected 1 to 64; got 0"),
        ({"ranks": 65}, "ranks: expected 1 to 64; got 65"),
        ({"ranks": 2, "transport": "nccl"}, "expected at most one per GPU, of which there are 1; got 2"),
    ],
)
def test_refused(emulated: Emulated, options: dict, words: str) -> None:
    x = torch.ones(1, 2, 1, 32)
    with pytest.raises(ValueError, match=words), emulated().group(x, x, x, **options):
        pass
