"""Ranks that are processes: gloo on CPUs, from one pool."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stream_attention import ContiguousKV
from stream_attention.distributed import (
    CommunicationError,
    Processes,
    Recorder,
    VirtualRanks,
    initialize,
    ring_attention,
    shard_sequence,
    tree_decode_attention,
    ulysses_attention,
    unshard_sequence,
)
from stream_attention.distributed.processes import transport_of
from stream_attention.distributed.transport import (
    AllToAll,
    Exchange,
    Start,
    Strategy,
    Wait,
    all_gather,
    all_to_all,
    reduce_scatter,
)

pytestmark = pytest.mark.xdist_group("ranks")

CPU = torch.device("cpu")


def everything(rank: int, size: int) -> Strategy[dict[str, Any]]:
    """One of each communication, of lengths that differ from rank to rank, two of them under way at once."""
    mine = torch.full((2, rank + 1), float(rank), dtype=torch.bfloat16).mT  # not contiguous
    after, before = (rank + 1) % size, (rank - 1) % size
    kind = Exchange if size > 2 else AllToAll
    first = yield Start(kind({after: mine}, {before: torch.empty(before + 1, 2, dtype=torch.bfloat16)}))
    second = yield Start(
        Exchange({after: torch.tensor([rank])}, {before: torch.empty(1, dtype=torch.int64)})
    )  # another size and dtype between the same two
    some = yield Start(
        Exchange({1: mine.clone()} if rank == 0 else {}, {0: torch.empty_like(mine)[:1]} if rank == 1 else {})
    )
    found: dict[str, Any] = {"second": (yield Wait(second))[before].tolist()}
    found["first"] = (yield Wait(first))[before].tolist()
    found["some"] = {other: t.tolist() for other, t in (yield Wait(some)).items()}
    gathered = yield from all_gather(rank, mine.contiguous(), [(r + 1, 2) for r in range(size)])
    found["gathered"] = [t.tolist() for t in gathered]
    equal = yield from all_gather(rank, torch.tensor([rank, -rank]), [(2,)] * size)
    found["equal"] = [t.tolist() for t in equal]
    parts = [torch.full((r,), 10.0 * rank + r) for r in range(size)]
    found["all_to_all"] = [t.tolist() for t in (yield from all_to_all(rank, parts, [(rank,)] * size))]
    found["reduced"] = (yield from reduce_scatter(rank, parts)).tolist()
    return found


def run_everything(rank: int, groups: Any, group: str, collectives: bool) -> tuple[Any, Any]:
    transport = Processes(groups[group], recorder=Recorder())
    transport.collectives = collectives
    (found,) = transport.run([everything(transport.rank, transport.size)], CPU)
    assert transport.recorder is not None
    return found, transport.recorder.entries


@pytest.mark.parametrize("collectives", [False, True])  # as on gloo, and as on NCCL
@pytest.mark.parametrize(("group", "members"), [("world", (0, 1, 2, 3)), ("pair", (0, 1)), ("odd", (1, 3))])
def test_processes_hear_what_virtual_ranks_hear(
    pool: Any, group: str, members: tuple[int, ...], collectives: bool
) -> None:
    """With group "odd" a rank of the group is another of the world."""
    recorder = Recorder()
    size = len(members)
    expected = VirtualRanks(size, recorder=recorder).run([everything(rank, size) for rank in range(size)], CPU)
    results = pool.results(run_everything, members, group=group, collectives=collectives)
    assert [found for found, _ in results] == expected
    assert {rank: entries for _, noted in results for rank, entries in noted.items()} == recorder.entries


# Refusals


def on_a_foreign_group(rank: int, groups: Any) -> None:
    Processes(groups["pair"])


def on_what_is_no_group(rank: int, groups: Any) -> None:
    transport_of([0, 1])


def on_a_mesh_of_two_dims(rank: int, groups: Any, dims: int) -> int:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return transport_of(mesh if dims == 2 else mesh["b"]).size


def test_a_process_outside_the_group_is_told_so(pool: Any) -> None:
    (reply,) = pool.run(on_a_foreign_group, (3,))
    assert "ValueError: group: expected a group that this process is a member of; got rank 3" in reply.error


def test_what_is_no_group_is_refused(pool: Any) -> None:
    (reply,) = pool.run(on_what_is_no_group, (0,))
    assert reply.error.startswith("TypeError: group: expected a ProcessGroup, a DeviceMesh")


def test_a_mesh_of_one_dim_is_a_group_and_of_two_is_not(pool: Any) -> None:
    assert pool.results(on_a_mesh_of_two_dims, dims=1) == [2] * 4
    for reply in pool.run(on_a_mesh_of_two_dims, dims=2):
        assert "expected a device mesh of one dim; got 2 dims. Pick one: mesh['name']; ulysses_attention" in reply.error


def test_what_is_no_group_is_refused_before_there_is_one() -> None:
    with pytest.raises(TypeError, match=r"group: expected a ProcessGroup, .* got 4 \(int\)"):
        transport_of(4)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named_with_what_sets_it(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=rf"environment: expected .* got no {missing}\. .*torchrun --nproc-per-node"):
        initialize()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "x", "RANK: expected a whole number of at least 0 in the environment; got 'x'. Start"),
        ("RANK", "-1", "RANK: expected a whole number of at least 0 in the environment; got '-1'"),
        ("RANK", "2", "RANK: expected below WORLD_SIZE=2; got 2"),
        ("WORLD_SIZE", "x", "WORLD_SIZE: expected a whole number of at least 1 in the environment; got 'x'"),
        ("WORLD_SIZE", "0", "WORLD_SIZE: expected a whole number of at least 1 in the environment; got '0'"),
        ("LOCAL_RANK", "x", "LOCAL_RANK: expected a whole number of at least 0 in the environment; got 'x'"),
        ("LOCAL_WORLD_SIZE", "", "LOCAL_WORLD_SIZE: expected a whole number of at least 1 in the environment; got ''"),
        ("MASTER_PORT", "abc", "MASTER_PORT: expected a whole number from 0 to 65535 in the environment; got 'abc'"),
        (
            "MASTER_PORT",
            "99999",
            "MASTER_PORT: expected a whole number from 0 to 65535 in the environment; got '99999'",
        ),
        ("MASTER_PORT", "", "environment: expected .* got no MASTER_PORT"),
        ("MASTER_ADDR", "", "environment: expected .* got no MASTER_ADDR"),
    ],
)
def test_a_bad_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str) -> None:
    for one, number in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(one, number)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{words}"):
        initialize()


def test_a_bad_number_of_processes_is_refused_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "x")
    with pytest.raises(
        ValueError, match="WORLD_SIZE: expected a whole number of at least 1 in the environment; got 'x'"
    ):
        transport_of(None)


def test_processes_that_never_come_are_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for one, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(one, value)
    started = time.monotonic()
    with pytest.raises(CommunicationError, match=r"did not connect at 127\.0\.0\.1:9 within 2 s") as raised:
        initialize("gloo", timeout_s=2)
    assert "\n" not in str(raised.value)  # no frames of C++
    assert time.monotonic() - started < 20


def test_launched_but_not_initialised_is_refused_and_alone_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    assert transport_of(None).size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"group: expected a process group .* Call stream_attention\.distributed\.init"
    ):
        transport_of(None)


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), "5", True])
def test_a_timeout_is_a_positive_number_of_seconds(monkeypatch: pytest.MonkeyPatch, timeout_s: Any) -> None:
    for one, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(one, value)
    with pytest.raises(ValueError, match="timeout_s: expected a positive number"):
        initialize(timeout_s=timeout_s)


# A rank that does not come


def limits(rank: int, groups: Any) -> list[float]:
    return [one.timeout_s for one in (Processes(), Processes(groups["pair"]), Processes(timeout_s=3))]


def test_ranks_wait_as_long_as_initialize_was_told(pool: Any) -> None:
    assert pool.results(limits, (0, 1)) == [[20.0, 20.0, 3]] * 2


def silent(rank: int, kind: str, how: str) -> Strategy[None]:
    """Every rank passes something on, three times over; before the second, rank 1 is killed or does something else."""
    move = {"Exchange": Exchange, "AllToAll": AllToAll}[kind]
    for turn in range(3):
        if turn == 1 and rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        yield move({(rank + 1) % 3: torch.ones(4)}, {(rank - 1) % 3: torch.empty(4)})


def with_a_silent_rank(rank: int, groups: Any, kind: str, how: str) -> None:
    Processes(groups["world"], timeout_s=2).run([silent(rank, kind, how)], CPU)


@pytest.mark.parametrize(("kind", "how"), [("Exchange", "killed"), ("AllToAll", "elsewhere")])
def test_ranks_that_wait_for_a_silent_one_raise_in_time_and_can_end(pool: Any, kind: str, how: str) -> None:
    ranks = type(pool)(3, timeout_s=1800.0)  # as of a process group that was made elsewhere; ours is the bound
    try:
        ranks.send(with_a_silent_rank, (0, 1, 2), kind=kind, how=how)
        for reply in ranks.replies((0, 2)):
            assert reply.error.startswith(f"CommunicationError: {kind} 2 of rank {reply.rank} with rank "), reply
            assert "failed within 2 s" in reply.error
            assert "look at its output first" in reply.error and "start the job again" in reply.error
            assert reply.seconds < 10
        assert [ranks.end(rank) for rank in (0, 2)] == [0, 0]
    finally:
        ranks.close()


# Ranks that make different calls: an error on every one of them, and processes that can end


def shards_of(group: Any, heads: int = 4) -> list[torch.Tensor]:
    return [shard_sequence(t, group=group).requires_grad_() for t in torch.zeros(3, 1, 12, heads, 8)]


def ring_beside_ulysses(group: Any, here: bool) -> None:
    (ulysses_attention if here else ring_attention)(*shards_of(group), group=group)


def ring_beside_tree(group: Any, here: bool) -> None:
    query, key, value = shards_of(group)
    if here:
        with torch.no_grad():
            tree_decode_attention(query, ContiguousKV(key, value), group=group)
    else:
        ring_attention(query, key, value, group=group)


def skipped_backward(group: Any, here: bool, length: int | None = None) -> None:
    for _ in range(2):
        out = ring_attention(*shards_of(group), group=group, length=length)
        if not here:
            out.sum().backward()


def skipped_backward_of_calls_that_ask_nothing(group: Any, here: bool) -> None:
    skipped_backward(group, here, length=12)


def one_call_twice(group: Any, here: bool) -> None:
    for _ in range(2 if here else 1):
        out = ring_attention(*shards_of(group), group=group)
    unshard_sequence(out, group=group)


def length_on_one_rank(group: Any, here: bool) -> None:
    ring_attention(*shards_of(group), group=group, length=12 if here else None)


def other_heads_where_nothing_is_asked(group: Any, here: bool) -> None:
    ring_attention(*shards_of(group, heads=6 if here else 4), group=group, length=12)


def gather_beside_exchange(group: Any, here: bool) -> None:
    """Strategies of one's own: the same tensors, as another communication."""

    def strategy(rank: int, kind: type[Exchange]) -> Strategy[None]:
        others = [r for r in range(group.size) if r != rank]
        yield kind(dict.fromkeys(others, torch.ones(2)), {r: torch.empty(2) for r in others})

    group.run([strategy(group.rank, AllToAll if here else Exchange)], CPU)


DIFFERING = {
    function.__name__: function
    for function in (
        ring_beside_ulysses,
        ring_beside_tree,
        skipped_backward,
        skipped_backward_of_calls_that_ask_nothing,
        one_call_twice,
        length_on_one_rank,
        other_heads_where_nothing_is_asked,
        gather_beside_exchange,
    )
}


WORDS = {
    "ring_beside_ulysses": "rank 1 calls ulysses_attention",
    "ring_beside_tree": "rank 1 calls tree_decode_attention",
    "one_call_twice": "rank 1 calls ring_attention",
}
"""What is said where ranks meet in an agreement, which needs no waiting."""


def differing(rank: int, groups: Any, name: str, size: int) -> None:
    DIFFERING[name](Processes(groups[f"{name} {size}"], timeout_s=1.5), rank == 1)


@pytest.fixture(scope="module")
def mistaken(pool: Any) -> Iterator[Any]:
    """A group for each mistake, which leaves it unusable."""
    ranks = type(pool)(3, {f"{name} {size}": tuple(range(size)) for name in DIFFERING for size in (2, 3)})
    yield ranks
    ranks.close()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DIFFERING)
def test_ranks_that_make_different_calls_all_raise(mistaken: Any, name: str, size: int) -> None:
    for reply in mistaken.run(differing, range(size), name=name, size=size):
        assert reply.error.startswith("CommunicationError: "), reply
        assert re.search(WORDS.get(name, "failed within 1.5 s"), reply.error), reply
        assert reply.seconds < 15


def test_processes_end_after_their_groups_failed(mistaken: Any) -> None:
    assert [mistaken.end(rank) for rank in range(3)] == [0, 0, 0]
