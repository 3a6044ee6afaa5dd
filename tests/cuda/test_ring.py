"""cuda/src/ring.cpp, query_split.cpp, partition.cpp and the copy transport: shards, schedules, streams in any order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from tests.cuda.cuda_library import CudaLibrary, Strategy, _Problem, _Range, _RingStep
from tests.cuda.cuda_tools import BF16, F32, case, expect_within_bounds, inputs

from stream_attention_tools.testing import Case

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


def test_ranks_and_steps_that_are_not_there(emulated: Emulated, emulator: ctypes.CDLL) -> None:
    emulator.flash_attn_shard.restype, emulator.flash_attn_schedule.restype = _Range, _RingStep
    for total, ranks, rank in ((10, 0, 0), (10, -1, 0), (10, 3, 3), (10, 3, -1), (-1, 3, 0)):
        found = emulator.flash_attn_shard(total, ranks, rank)
        assert (found.start, found.length) == (0, 0)
    problem = ctypes.byref(_Problem(1, 1, 10, 10, 64, 0, 0.0, 0))
    for which, ranks, rank, step in ((problem, 3, 0, 9), (problem, 3, 0, -1), (problem, 3, 3, 0), (None, 3, 0, 0)):
        found = emulator.flash_attn_schedule(which, ranks, rank, step)
        assert (found.shard, found.keys.length, found.computes, found.first, found.last) == (-1, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="rank: expected 0 <= rank < ranks; got rank 0 of 0"):
        emulated().shard(10, 0, 0)
    with pytest.raises(ValueError, match="got rank 3 of 3"):
        emulated().schedule(10, 10, 3, 3)


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


@pytest.mark.parametrize("strategy", ["ring", "queries"])
def test_what_is_loaded_and_stored_on_the_gpu_is_there(
    emulated: Emulated, emulator: ctypes.CDLL, strategy: Strategy
) -> None:
    """CUDA does not wait for such copies, nor do the streams of the ranks."""
    tensors, options = inputs(case(40, 41, 32))
    alone = emulated().forward(*tensors, **options)[0]
    size = alone.nbytes
    there = ctypes.c_void_p(emulator.emulator_allocate(size))
    for seed in range(6):
        ctypes.memset(there, 0xFF, size)
        with emulated(seed).group(*tensors, ranks=3, strategy=strategy, **options) as group:
            group.forward()
            assert emulator.flash_attn_group_store(group._handle, there) == 0
            out = torch.frombuffer(bytearray(ctypes.string_at(there, size)), dtype=F32).view(alone.shape)
        torch.testing.assert_close(out, alone, rtol=0.0, atol=1e-6)
    emulator.emulator_free(there)


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
        ({"ranks": 2, "strategy": "star"}, "strategy: expected ring or queries; got 'star'"),
        ({"ranks": 2, "transport": "mpi"}, "transport: expected nccl or copy; got 'mpi'"),
    ],
)
def test_refused(emulated: Emulated, options: dict, words: str) -> None:
    x = torch.ones(1, 2, 1, 32)
    with pytest.raises(ValueError, match=words), emulated().group(x, x, x, **options):
        pass


def test_refused_in_c(emulator: ctypes.CDLL) -> None:
    problem, group = ctypes.byref(_Problem(1, 1, 2, 2, 32, 0, 0.0, 0)), ctypes.c_void_p()
    x = ctypes.c_void_p(torch.ones(1, 2, 1, 32).data_ptr())

    def refused(name: str, *arguments: object) -> str:
        assert getattr(emulator, name)(*arguments) == 1
        return emulator.flash_attn_last_error().decode()

    create = "flash_attn_group_create"
    assert refused(create, problem, 2, 7, 1, ctypes.byref(group)).startswith("strategy: expected FLASH_ATTN_RING or")
    assert refused(create, problem, 2, 0, 9, ctypes.byref(group)).startswith("transport: expected FLASH_ATTN_NCCL or")
    assert refused(create, None, 2, 0, 1, ctypes.byref(group)) == "problem: expected an address; got NULL."
    assert refused(create, problem, 2, 0, 1, None) == "group: expected an address; got NULL."
    assert group.value is None
    for name, arguments in (("load", (x, x, x)), ("forward", (None,)), ("store", (x,))):
        assert refused(f"flash_attn_group_{name}", None, *arguments) == "group: expected an address; got NULL."
    assert emulator.flash_attn_group_bytes_per_gpu(None) == 0
    emulator.flash_attn_group_destroy(None)

    assert emulator.flash_attn_group_create(problem, 2, 0, 1, ctypes.byref(group)) == 0
    assert refused("flash_attn_group_load", group, x, None, x) == "k: expected an address; got NULL."
    assert refused("flash_attn_group_store", group, None) == "out: expected an address; got NULL."
    assert emulator.flash_attn_group_load(group, x, x, x) == 0  # a refusal leaves it as it was
    emulator.flash_attn_group_destroy(group)


@pytest.mark.parametrize("copies", [0, 3, 5])
def test_a_group_that_failed_can_only_be_destroyed(emulated: Emulated, emulator: ctypes.CDLL, copies: int) -> None:
    tensors, options = inputs(case(20, 20, 32))
    with emulated().group(*tensors, ranks=4, **options) as group:
        expected = group.forward()[0]
        emulator.emulator_fail(copies)
        with pytest.raises(RuntimeError, match=r"flash_attn_group_forward: cudaMemcpyAsync\(receive"):
            group.forward()
        with pytest.raises(ValueError, match="group: expected one that has not failed; got one that has and can only"):
            group.forward()
        assert emulator.flash_attn_group_load(group._handle, *[ctypes.c_void_p(x.data_ptr()) for x in tensors]) == 1
    with emulated().group(*tensors, ranks=4, **options) as group:
        torch.testing.assert_close(group.forward()[0], expected, rtol=0.0, atol=1e-6)
