"""ring_attention() on processes says and computes what it does on virtual ranks, bit for bit."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.distributed import (
    Processes,
    Recorder,
    VirtualRanks,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)

pytestmark = pytest.mark.xdist_group("ranks")

GROUPS = {"world": (0, 1, 2, 3), "pair": (0, 1), "odd": (1, 3)}


def inputs(length: int, heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, length, 4, 8), (2, length, heads, 8), (2, length, heads, 12))
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]


def step(transport: Any, layout: Any, rotate: Any, options: dict[str, Any]) -> list[list[Tensor]]:
    """For each rank of this process, its output, the whole output, and the gradients of its shards."""
    shards = [shard_sequence(t, group=transport, layout=layout) for t in inputs(29)]
    shards = [one if isinstance(one, list) else [one] for one in shards]
    leaves = [[t.detach().requires_grad_() for t in one] for one in shards]
    given = leaves if isinstance(transport, VirtualRanks) else [one[0] for one in leaves]
    outs = ring_attention(*given, group=transport, layout=layout, rotate=rotate, **options)
    wholes = unshard_sequence(outs, group=transport, layout=layout)
    outs, wholes = ([x] if isinstance(x, Tensor) else x for x in (outs, wholes))
    torch.stack([whole.float().square().sum() for whole in wholes]).sum().backward()
    return [
        [out.detach(), whole.detach(), *(t.grad for t in mine)]
        for out, whole, *mine in zip(outs, wholes, *leaves, strict=True)
    ]


def on_a_process(
    rank: int, groups: Any, group: str, layout: str, rotate: str, collectives: bool, options: dict[str, Any]
) -> tuple[Any, Any]:
    transport = Processes(groups[group], recorder=Recorder())
    transport.collectives = collectives  # as on NCCL
    (found,) = step(transport, layout, rotate, options)
    assert transport.recorder is not None
    return found, transport.recorder.entries[transport.rank]


@pytest.mark.parametrize(
    ("group", "layout", "rotate", "collectives", "options"),
    [
        ("world", "zigzag", "p2p", False, {"causal": True}),
        ("world", "zigzag", "alltoall", True, {"causal": True}),
        ("world", "striped", "allgather", True, {"causal": True, "window": (9, 0)}),
        ("world", "contiguous", "p2p", False, {"window": (3, 3), "dropout_p": 0.2, "seed": 3}),
        ("world", "contiguous", "allgather", False, {"softcap": 3.0}),
        ("pair", "contiguous", "p2p", False, {"causal": True}),
        ("pair", "striped", "alltoall", False, {}),
        ("odd", "zigzag", "p2p", False, {"causal": True}),
        ("odd", "contiguous", "alltoall", True, {"window": (2, -1)}),
    ],
)
def test_processes_do_what_virtual_ranks_do(
    pool: Any, group: str, layout: str, rotate: str, collectives: bool, options: dict[str, Any]
) -> None:
    """Lengths that no number of ranks divides; in group "odd" a rank is another in the world."""
    members, recorder = GROUPS[group], Recorder()
    expected = step(VirtualRanks(len(members), recorder=recorder), layout, rotate, options)
    results = pool.results(
        on_a_process, members, group=group, layout=layout, rotate=rotate, collectives=collectives, options=options
    )
    for rank, (found, entries) in enumerate(results):
        assert all(torch.equal(one, two) for one, two in zip(found, expected[rank], strict=True))
        assert entries == recorder.entries[rank]


def with_a_mask_on_rank_1(rank: int, groups: Any) -> Tensor:
    """Ranks that branch differently still say the same."""
    mask = torch.ones(1, 1, 7, 28, dtype=torch.bool)
    mask[..., :20] = False
    shards = [shard_sequence(t) for t in inputs(28)]
    return ring_attention(*shards, mask=mask if rank == 1 else None)


def test_a_mask_may_be_given_on_some_ranks_only(pool: Any) -> None:
    outs = pool.results(with_a_mask_on_rank_1)
    query, key, value = inputs(28)
    plain = ring_attention(query, key, value)
    hidden = ring_attention(query[:, 7:14], key[:, 20:], value[:, 20:])
    expected = torch.cat((plain[:, :7], hidden, plain[:, 14:]), dim=1)
    torch.testing.assert_close(torch.cat(outs, dim=1).float(), expected.float(), rtol=0.01, atol=0.01)


def with_shards_of_any_lengths(rank: int, groups: Any, lengths: list[int]) -> Tensor:
    return ring_attention(*(t.split(lengths, dim=1)[rank] for t in inputs(sum(lengths))), causal=True)


def test_contiguous_shards_may_have_any_lengths(pool: Any) -> None:
    lengths = [9, 0, 2, 13]
    outs = pool.results(with_shards_of_any_lengths, lengths=lengths)
    virtual = [list(t.split(lengths, dim=1)) for t in inputs(sum(lengths))]
    for out, expected in zip(outs, ring_attention(*virtual, group=VirtualRanks(4), causal=True), strict=True):
        assert torch.equal(out, expected)


# Calls that differ from rank to rank


def differing(rank: int, groups: Any, what: str) -> None:
    query, key, value = (shard_sequence(t) for t in inputs(16, 4 if what == "heads" and rank == 2 else 2))
    options: dict[str, Any] = {"bias": torch.zeros(4, 16, dtype=query.dtype)}
    options |= {"alibi_slopes": torch.zeros(4), "sink": torch.zeros(4)}
    if what.startswith("gradients wanted") and rank == 2:
        (options | {"query": query})[what.split()[-1]].requires_grad_()
    here = rank == 2
    name, _, how = what.partition(": ")
    if how:
        options |= {"dropout_p": 0.1, "seed": 3}
    if how and here:
        zeros = torch.zeros(4)
        others = {"absent": None, "other shape": zeros.expand(2, 4), "other dtype": zeros.double()}
        options[name] = (others | {"a tensor": torch.tensor([3, 0])})[how]
    ring_attention(
        query, key, value, causal=what == "causal" and here, return_lse=what == "return_lse" and here, **options
    )


WANTED = [f"gradients wanted of {name}" for name in ("query", "bias", "alibi_slopes", "sink")]


TENSORS = [
    "alibi_slopes: absent",
    "alibi_slopes: other shape",
    "alibi_slopes: other dtype",
    "sink: absent",
    "sink: other dtype",
    "seed: a tensor",
]


@pytest.mark.parametrize("what", ["heads", "causal", "return_lse", *WANTED, *TENSORS])
def test_ranks_that_differ_are_told_at_once(pool: Any, what: str) -> None:
    for reply in pool.run(differing, what=what):
        assert f"ValueError: {what.split(' of ')[0].split(':')[0]}: expected the same on all 4 ranks" in reply.error
        assert reply.seconds < 5


def killed_before_its_backward(rank: int, groups: Any) -> None:
    shards = [shard_sequence(t).requires_grad_() for t in inputs(12)]
    out = ring_attention(*shards, group=Processes(timeout_s=3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out.float().sum().backward()


def test_a_rank_that_dies_between_forward_and_backward_is_an_error_on_the_others(pool: Any) -> None:
    ranks = type(pool)(3, timeout_s=1800.0)
    try:
        replies = ranks.run(killed_before_its_backward)
        assert replies[1].error == "died"
        for reply in (replies[0], replies[2]):
            assert reply.error.startswith("CommunicationError: Exchange"), reply
            assert "start the job again" in reply.error
            assert reply.seconds < 15
    finally:
        ranks.close()
