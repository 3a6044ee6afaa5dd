"""Strategies on virtual ranks: what is sent arrives when it is waited for, and ranks that do not match are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stream_attention.distributed import CommunicationError, Recorder, VirtualRanks
from stream_attention.distributed.agreement import agree
from stream_attention.distributed.transport import (
    AllToAll,
    Entry,
    Exchange,
    Start,
    Strategy,
    Wait,
    all_gather,
    all_to_all,
    reduce_scatter,
)

CPU = torch.device("cpu")


def run(size: int, strategy: Any, recorder: Recorder | None = None) -> list[Any]:
    return VirtualRanks(size, recorder=recorder).run([strategy(rank) for rank in range(size)], CPU)


def test_a_shift_brings_the_neighbours_tensor() -> None:
    def shift(rank: int) -> Strategy[float]:
        arrived = yield Exchange({(rank + 1) % 3: torch.tensor(float(rank))}, {(rank - 1) % 3: torch.empty(())})
        return arrived[(rank - 1) % 3].item()

    assert run(3, shift) == [2.0, 0.0, 1.0]


def test_what_was_started_arrives_when_it_is_waited_for_and_not_before() -> None:
    """So a strategy that reads early, or writes to what is under way, is wrong here as it is on a network."""

    def hasty(rank: int) -> Strategy[tuple[float, float]]:
        mine, buffer = torch.tensor(float(rank)), torch.tensor(-1.0)
        pending = yield Start(Exchange({1 - rank: mine}, {1 - rank: buffer}))
        early = buffer.item()
        mine.fill_(7.0)
        return early, (yield Wait(pending))[1 - rank].item()

    assert run(2, hasty) == [(-1.0, 7.0)] * 2


def test_only_the_pairs_that_are_named_talk() -> None:
    def one_way(rank: int) -> Strategy[list[int]]:
        sends = {2: torch.ones(1)} if rank == 0 else {}
        arrived = yield Exchange(sends, {0: torch.empty(1)} if rank == 2 else {})
        return list(arrived)

    assert run(3, one_way) == [[], [], [0]]


def test_gather_scatter_and_reduce_of_unequal_lengths() -> None:
    def collectives(rank: int) -> Strategy[tuple[Any, ...]]:
        gathered = yield from all_gather(rank, torch.full((rank,), rank), [(r,) for r in range(3)])
        parts = [torch.full((r,), 10 * rank + r) for r in range(3)]
        scattered = yield from all_to_all(rank, parts, [(rank,)] * 3)
        reduced = yield from reduce_scatter(rank, parts)
        return [t.tolist() for t in gathered], [t.tolist() for t in scattered], reduced.tolist()

    gathered = [[], [1], [2, 2]]
    assert run(3, collectives) == [
        (gathered, [[], [], []], []),
        (gathered, [[1], [11], [21]], [33]),
        (gathered, [[2, 2], [12, 12], [22, 22]], [36, 36]),
    ]


def test_a_group_of_one_never_communicates() -> None:
    recorder = Recorder()

    def alone(rank: int) -> Strategy[float]:
        (gathered,) = yield from all_gather(rank, torch.ones(2), [(2,)])
        (moved,) = yield from all_to_all(rank, [gathered], [(2,)])
        reduced = yield from reduce_scatter(rank, [moved])
        yield from agree("call", rank, 1, CPU, (2,), {"fact": 1})
        return reduced.sum().item()

    assert run(1, alone, recorder) == [2.0]
    assert recorder.entries == {}


def test_a_recorder_lists_kinds_and_bytes() -> None:
    recorder = Recorder()

    def talk(rank: int) -> Strategy[None]:
        other = 1 - rank
        pending = yield Start(Exchange({other: torch.ones(3)}, {other: torch.empty(3)}))
        yield Wait(pending)
        yield from all_gather(rank, torch.ones(2, dtype=torch.float64), [(2,)] * 2)

    run(2, talk, recorder)
    assert recorder.entries == {
        rank: [Entry("Exchange", {1 - rank: 12}, {1 - rank: 12}), Entry("AllGather", {1 - rank: 16}, {1 - rank: 16})]
        for rank in range(2)
    }
    assert recorder.kinds(0) == ["Exchange", "AllGather"] and recorder.bytes_sent(0) == 28


# Refusals: where real ranks would wait for each other


def test_ranks_that_ask_for_different_things_are_refused() -> None:
    def astray(rank: int) -> Strategy[None]:
        kind = Exchange if rank else AllToAll
        yield Start(kind({1 - rank: torch.ones(1)}, {1 - rank: torch.empty(1)}))

    with pytest.raises(
        CommunicationError, match=r"rank 0 asks for Start\(AllToAll\) where rank 1 asks for Start\(Exch"
    ):
        run(2, astray)


def test_a_rank_that_leaves_early_is_refused() -> None:
    def early(rank: int) -> Strategy[None]:
        if rank == 0:
            yield Exchange({}, {})

    with pytest.raises(CommunicationError, match="rank 0 asks for Exchange where rank 1 asks for nothing more"):
        run(2, early)


@pytest.mark.parametrize(
    ("buffers", "words"),
    [
        ({1: torch.empty(3)}, "rank 1 sends torch.float32 of shape .2. where rank 0 expects .* of shape .3."),
        ({1: torch.empty(2).double()}, "expects torch.float64"),
        ({}, "rank 0 expects nothing"),
    ],
)
def test_what_is_sent_must_be_expected(buffers: dict[int, torch.Tensor], words: str) -> None:
    def one_way(rank: int) -> Strategy[None]:
        yield Exchange({0: torch.ones(2)} if rank else {}, {} if rank else buffers)

    with pytest.raises(CommunicationError, match=words):
        run(2, one_way)


def test_what_is_expected_must_be_sent() -> None:
    def waits(rank: int) -> Strategy[None]:
        yield Exchange({}, {0: torch.empty(2)} if rank else {})

    with pytest.raises(CommunicationError, match="rank 0 sends nothing where rank 1 expects"):
        run(2, waits)


def test_ranks_must_agree_on_facts() -> None:
    def differing(rank: int) -> Strategy[Any]:
        return (yield from agree("call", rank, 3, CPU, (4,), {"causal": True, "heads": (8, 2) if rank < 2 else (8, 4)}))

    with pytest.raises(ValueError, match=r"heads: expected the same on all 3 ranks; got \(8, 2\) on rank 0, .* \[2\]"):
        run(3, differing)


def test_ranks_must_be_in_the_same_call() -> None:
    """Whatever they compare there: the messages of all calls have one size."""

    def differing(rank: int) -> Strategy[Any]:
        call, facts = ("ring_attention", {"causal": True}) if rank else ("unshard_sequence", {"layout": 1, "dtype": 2})
        return (yield from agree(call, rank, 3, CPU, (4,) * rank, facts))

    words = "rank 0 calls unshard_sequence, and rank 1 calls ring_attention, rank 2 calls ring_attention. Every rank"
    with pytest.raises(CommunicationError, match=words):
        run(3, differing)


def test_agreement_tells_every_ranks_lengths() -> None:
    def agreeing(rank: int) -> Strategy[Any]:
        return (yield from agree("call", rank, 3, CPU, (rank, 2 * rank), {"causal": True}))

    assert run(3, agreeing) == [[[0, 0], [1, 2], [2, 4]]] * 3


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_number_of_ranks_is_an_int_of_at_least_1(size: Any) -> None:
    with pytest.raises(ValueError, match=r"size: expected (at least 1; got|an int; got)"):
        VirtualRanks(size)
