"""How a sequence is divided: every position on one rank, and back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stream_attention.distributed import VirtualRanks, position_ids, shard_sequence, shift_labels, unshard_sequence
from stream_attention.distributed.shard import (
    LAYOUTS,
    Run,
    positions_of,
    runs_of,
    runs_of_all,
    shard_length,
    within_sequences,
)

layouts = st.sampled_from(LAYOUTS)
sizes = st.integers(1, 9)
lengths = st.integers(0, 70)


# Semantics


def test_zigzag_gives_a_rank_an_early_and_a_late_chunk() -> None:
    shards = shard_sequence(torch.arange(16), group=VirtualRanks(4), layout="zigzag", dim=0)
    assert [shard.tolist() for shard in shards] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


def test_the_last_rank_of_a_zigzag_has_one_run_for_its_chunks_meet() -> None:
    assert runs_of("zigzag", 16, 4, 3) == (Run(0, 4, 6),)


def test_striped_gives_every_nth_position() -> None:
    shards = shard_sequence(torch.arange(7), group=VirtualRanks(3), layout="striped", dim=0)
    assert [shard.tolist() for shard in shards] == [[0, 3, 6], [1, 4], [2, 5]]


def test_an_odd_length_loses_no_token() -> None:
    """Seven tokens on two ranks are not 7 // 2 * 2."""
    for layout in LAYOUTS:
        shards = shard_sequence(torch.arange(7), group=VirtualRanks(2), layout=layout, dim=0)
        assert sorted(torch.cat(shards).tolist()) == list(range(7))


def test_a_process_that_is_alone_has_the_whole() -> None:
    sequence = torch.randn(2, 5)
    for layout in LAYOUTS:
        assert torch.equal(shard_sequence(sequence, layout=layout), sequence)
        assert torch.equal(unshard_sequence(sequence, layout=layout), sequence)


# Properties


@given(layouts, lengths, sizes)
def test_every_position_is_on_one_rank_and_lengths_differ_little(layout: Any, length: int, size: int) -> None:
    shards = [positions_of(runs_of(layout, length, size, rank)) for rank in range(size)]
    assert sorted(torch.cat(shards).tolist()) == list(range(length))
    assert all(shard.tolist() == sorted(shard.tolist()) for shard in shards)
    counts = [len(shard) for shard in shards]
    assert counts == [shard_length(layout, length, size, rank) for rank in range(size)]
    assert max(counts) - min(counts) <= (2 if layout == "zigzag" else 1)


@given(layouts, lengths, sizes, st.integers(-3, 2))
def test_unshard_is_the_inverse_of_shard(layout: Any, length: int, size: int, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = length
    sequence, group = torch.randn(shape), VirtualRanks(size)
    wholes = unshard_sequence(
        shard_sequence(sequence, group=group, layout=layout, dim=dim), group=group, layout=layout, dim=dim
    )
    assert len(wholes) == size and all(torch.equal(whole, sequence) for whole in wholes)


@given(layouts, lengths, sizes)
def test_position_ids_say_where_the_rows_of_a_shard_stand(layout: Any, length: int, size: int) -> None:
    group, sequence = VirtualRanks(size), torch.randn(length, 2)
    ids = position_ids(length, group=group, layout=layout)
    for rows, places in zip(shard_sequence(sequence, group=group, layout=layout, dim=0), ids, strict=True):
        assert torch.equal(rows, sequence[places])


@given(layouts, sizes, st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_runs_within_packed_sequences_count_in_each(layout: Any, size: int, inner: list[int], tail: int) -> None:
    offsets = list(accumulate(inner, initial=0))
    length = offsets[-1] + tail
    owner = torch.full((length,), -1)
    place = torch.full((length,), -1)
    for sequence, (begin, end) in enumerate(pairwise(offsets)):
        owner[begin:end], place[begin:end] = sequence, torch.arange(end - begin)
    for rank in range(size):
        runs = runs_of(layout, length, size, rank)
        found_owner, found_place = torch.full((2, shard_length(layout, length, size, rank)), -1)
        for run in within_sequences(runs, offsets):
            found_owner[run.rows] = run.sequence
            found_place[run.rows] = torch.arange(run.length) * run.stride + run.start
        assert torch.equal(found_owner, owner[positions_of(runs)])
        assert torch.equal(found_place, place[positions_of(runs)])


@given(sizes, st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_contiguous_shards_may_have_any_lengths(size: int, counts: list[int]) -> None:
    runs = runs_of_all("contiguous", counts)
    assert torch.cat([positions_of(one) for one in runs]).tolist() == list(range(sum(counts)))
    assert [sum(run.length for run in one) for one in runs] == counts


# Labels and positions of packed sequences


def test_labels_are_shifted_in_the_whole_so_a_shard_ends_with_its_neighbours_first_token() -> None:
    tokens = torch.arange(8)
    labels = shard_sequence(shift_labels(tokens), group=VirtualRanks(2), layout="zigzag", dim=0)
    assert [shard.tolist() for shard in labels] == [[1, 2, 7, -100], [3, 4, 5, 6]]


def test_the_last_token_of_each_packed_sequence_predicts_nothing() -> None:
    labels = shift_labels(torch.arange(10).repeat(2, 1), cu_seqlens=torch.tensor([0, 4, 4, 7]), ignore_index=-1)
    assert labels.tolist() == [[1, 2, 3, -1, 5, 6, -1, 8, 9, -1]] * 2


def test_positions_of_packed_sequences_begin_anew() -> None:
    (ids,) = position_ids(9, group=VirtualRanks(1), cu_seqlens=[0, 3, 3, 7])
    assert ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]


# Gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_unshard_is_the_sum_of_all_ranks(layout: Any) -> None:
    group = VirtualRanks(3)
    shards = [shard.requires_grad_() for shard in shard_sequence(torch.randn(2, 7), group=group, layout=layout)]
    wholes = unshard_sequence(shards, group=group, layout=layout)
    weights = torch.randn(3, 2, 7)
    sum((whole * weight).sum() for whole, weight in zip(wholes, weights, strict=True)).backward()
    expected = shard_sequence(weights.sum(0), group=group, layout=layout)
    for shard, grad in zip(shards, expected, strict=True):
        torch.testing.assert_close(shard.grad, grad)


def test_gradients_may_be_in_a_graph_and_have_none_of_their_own() -> None:
    """What was sent is not in the graph: on processes a second derivative would be wrong."""
    group = VirtualRanks(2)
    shards = [shard.requires_grad_() for shard in shard_sequence(torch.randn(2, 6), group=group)]
    loss = unshard_sequence(shards, group=group)[0].pow(3).sum()
    grads = torch.autograd.grad(loss, shards, create_graph=True)
    torch.testing.assert_close(grads, tuple(3 * shard**2 for shard in shards))
    with pytest.raises(NotImplementedError, match=r'no second derivative: .*backend="reference"'):
        torch.autograd.grad(sum(grad.sum() for grad in grads), shards)


# Processes


def unsharded(rank: int, groups: Any, what: str) -> Tensor:
    here = rank == 2
    shape = (2, 3, 5 if what == "rest of the shape" and here else 4)
    shard = torch.zeros(shape, dtype=torch.float16 if what == "dtype" and here else torch.float32)
    shard.requires_grad_(what == "gradients wanted" and here)
    return unshard_sequence(shard, layout="striped" if what == "layout" and here else "contiguous")


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("what", ["rest of the shape", "dtype", "gradients wanted", "layout"])
def test_ranks_that_differ_are_told_at_once(pool: Any, what: str) -> None:
    for reply in pool.run(unsharded, what=what):
        assert f"ValueError: {what}: expected the same on all 4 ranks" in reply.error


# Refusals


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shard_sequence([1, 2, 3]), "sequence: expected a torch.Tensor; got list"),  # type: ignore[arg-type]
        (lambda: shift_labels([1, 2]), "labels: expected a torch.Tensor; got list"),  # type: ignore[arg-type]
        (lambda: position_ids(-1), "length: expected at least 0; got -1"),
        (lambda: position_ids(10, cu_seqlens=[0, 20]), "cu_seqlens: expected a last value of at most the 10 rows; got"),
        (
            lambda: shift_labels(torch.arange(4), cu_seqlens=[0, 9]),
            "cu_seqlens: expected a last value of at most the 4",
        ),
        (
            lambda: unshard_sequence([torch.ones(1, 2)] * 2),
            r"shard: expected one tensor for each of the 1 ranks.*; got 2. A list, .* needs group=VirtualRanks",
        ),
    ],
)
def test_a_bad_call_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout: expected 'contiguous' or 'zigzag' or 'striped'; got 'snake'"):
        shard_sequence(torch.ones(1, 4), layout="snake")  # type: ignore[arg-type]


def test_shards_that_are_not_those_of_the_layout_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shards: expected lengths \[2, 2\] .* got \[1, 3\].* layout=\"contiguous\""):
        unshard_sequence([torch.ones(1, 1), torch.ones(1, 3)], group=VirtualRanks(2), layout="zigzag")


@pytest.mark.parametrize("given_shards", [torch.ones(1, 2), [torch.ones(1, 2)] * 3])
def test_one_shard_for_each_virtual_rank(given_shards: Any) -> None:
    with pytest.raises(ValueError, match="shard: expected one tensor for each of the 2 ranks"):
        unshard_sequence(given_shards, group=VirtualRanks(2))


def test_a_dim_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dim: expected a dim of a tensor of shape \[4\]; got 1"):
        shard_sequence(torch.ones(4))


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 3, 2]])
def test_offsets_begin_at_0_and_do_not_fall(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens: expected 0 first"):
        position_ids(4, cu_seqlens=offsets)
