"""Tiles: skip and full are never wrong, partial is rarely needless, and nothing waits for the device."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tests.masks.random_masks import BATCH, HEADS, PARTS, random_mask, whole
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stream_attention.masks import Mask, blocks, causal, documents, padding, prefix_tree, tiles, window


def states_of(dense: Tensor, rows: int, cols: int) -> Tensor:
    """0, 1, 2 for each tile of a dense mask, tile by tile."""
    lines = []
    for first in range(0, dense.shape[2], rows):
        line = []
        for left in range(0, dense.shape[3], cols):
            tile = dense[:, :, first : first + rows, left : left + cols].flatten(2)
            line.append(tile.any(-1).to(torch.int8) + tile.all(-1).to(torch.int8))
        lines.append(torch.stack(line, -1))
    return torch.stack(lines, -2)


# Semantics


def test_causal_with_ragged_ends() -> None:
    assert tiles(causal(), 5, 5, 2, 2)[0, 0].tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 2]]
    assert tiles(causal(), 3, 5, 2, 2)[0, 0].tolist() == [[2, 1, 0], [2, 2, 2]]


def test_dims_are_those_asked_for_or_those_of_the_mask() -> None:
    mask = padding([1, 4]) & causal()
    assert tiles(mask, 4, 4, 2, 2).shape == (2, 1, 2, 2) and tiles(mask, 4, 4, 2, 2).dtype is torch.int8
    assert tiles(mask, 4, 4, 2, 2, batch=2, heads=8).shape == (2, 8, 2, 2)


def test_no_rows_or_no_keys_are_no_tiles() -> None:
    assert tiles(window(1, 1), 0, 4, 2, 2).shape == (1, 1, 0, 2)
    assert tiles(padding([0, 0], [1, 1]), 4, 0, 2, 2).shape == (2, 1, 2, 0)


def test_rows_apart_do_not_make_the_tile_between_them_partial() -> None:
    """By the least start and the greatest end of the rows it would be."""
    ends, starts = ([[[5, 15]]], [[[0, 10]]])
    mask = Mask(key_start=torch.tensor(starts, dtype=torch.int32), key_end=torch.tensor(ends, dtype=torch.int32))
    assert tiles(mask, 2, 15, 2, 5)[0, 0].tolist() == [[1, 0, 1]]


# Against dense masks


@pytest.mark.parametrize("seed", range(60))
def test_skip_and_full_are_never_wrong(seed: int) -> None:
    random = Random(seed)
    for _ in range(4):
        q_len, k_len = random.randint(1, 12), random.randint(1, 12)
        rows, cols = random.randint(1, 6), random.randint(1, 6)
        mask = random_mask(random, q_len, k_len)
        found = tiles(mask, q_len, k_len, rows, cols, BATCH, HEADS)
        exact = states_of(whole(mask, q_len, k_len), rows, cols)
        assert found.shape == exact.shape and bool(((found == exact) | (found == 1)).all()), mask


EXACT = [("band",), ("keys",), ("queries",), ("keys", "band"), ("queries", "band"), ("dense",), ("blocks",)]


@pytest.mark.parametrize("parts", EXACT, ids="-".join)
@pytest.mark.parametrize("seed", range(12))
def test_partial_is_exact_for_one_kind_of_part(parts: tuple[str, ...], seed: int) -> None:
    random = Random(seed)
    for _ in range(4):
        q_len, k_len = random.randint(1, 12), random.randint(1, 12)
        rows, cols = random.randint(1, 6), random.randint(1, 6)
        mask = random_mask(random, q_len, k_len, parts)
        found = tiles(mask, q_len, k_len, rows, cols, BATCH, HEADS)
        assert torch.equal(found, states_of(whole(mask, q_len, k_len), rows, cols)), mask


def test_labels_are_rarely_partial_without_need() -> None:
    """Documents in order, compared by ids, never are; a tree is where a tile has the ends of two segments."""
    ids = documents(torch.arange(600) // 75, contiguous=False) & causal()
    tree = prefix_tree([-1, 0, 0, 1, 2, 1, 2], lengths=[200, 100, 100, 50, 50, 50, 50])
    assert ids.query_label is not None and tree.query_label is not None
    for mask, most in ((ids, 0.0), (tree, 0.02)):
        found, exact = tiles(mask, 600, 600, 8, 8), states_of(mask.as_dense(), 8, 8)
        assert bool(((found == exact) | (found == 1)).all())
        assert (found != exact).double().mean() <= most


def test_keys_that_no_query_sees_do_not_make_their_tile_partial() -> None:
    """Beside [7, 9) and [-5, -3), which no label is in, stand empty intervals: [0, 0) and [5, 5)."""
    bounds = [7, 0, -5, 5, 0, 1], [9, 0, -3, 5, 1, 2]
    start, end, label = (torch.tensor([[values]], dtype=torch.int32) for values in (*bounds, [0, 1]))
    mask = Mask(query_start=start, query_end=end, query_label=label)
    assert tiles(mask, 2, 6, 2, 2)[0, 0].tolist() == [[0, 0, 1]]


# No host synchronisation


@pytest.mark.parametrize("part", [*PARTS, "any"])
def test_nothing_is_read_back_from_the_device(part: str) -> None:
    """The tensors have no data: to ask one for a value is an error."""
    random = Random(5)
    mask = random_mask(random, 9, 11, PARTS if part == "any" else (part,))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fields = {name: mode.from_tensor(tensor) for name, tensor in mask.tensors()}
        if mask.blocks is not None:
            fields["blocks"] = mask.blocks._replace(table=fields["blocks"])
        numbers = {"left": mask.left, "right": mask.right, "key_start": None, "key_end": None}
        there = Mask(**{**numbers, **fields})
        found = tiles(there & causal(), 9, 11, 4, 4, BATCH, HEADS)
        assert found.shape == (BATCH, HEADS, 3, 3)


def test_making_and_joining_documents_reads_nothing_back_where_the_caller_vouches() -> None:
    with FakeTensorMode():
        ids, cu_seqlens = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
        both = documents(ids, contiguous=True) & documents(ids, contiguous=False) & documents(ids, contiguous=False)
        packed = documents(cu_seqlens=cu_seqlens, total=9)
        found = tiles(both & packed & padding(ids[:, 0], ids[:, 0]), 9, 9, 4, 4)
        assert found.shape == (2, 1, 3, 3) and both.by_id
        with pytest.raises(DataDependentOutputException):  # as it would here
            documents(ids)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((4, 4, 0, 2), ValueError, "rows: expected at least 1; got 0"),
        ((4, 4, 2, 2.0), TypeError, "cols: expected an int; got 2.0"),
        ((5, 4, 2, 2), ValueError, "blocks: expected 3 blocks of 2 for Tq=5; got 2"),
        ((4, 4, 2, 2, 3), ValueError, "blocks: expected B=3, as the call has; got 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: tuple[int, ...], error: type[Exception], said: str) -> None:
    mask = blocks(torch.ones(2, 1, 2, 2, dtype=torch.bool), 2)
    with pytest.raises(error) as caught:
        tiles(mask, *arguments)
    assert said in str(caught.value)
