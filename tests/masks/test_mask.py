"""Mask: the value. Its meaning, sizes, identity, devices, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from random import Random
from typing import Any

import pytest
import torch
from tests.masks.random_masks import random_mask, spelled_out, whole

from stream_attention import masks
from stream_attention.masks import Blocks, Mask, Sizes, blocks, causal, documents, from_dense, padding, window


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)[None, None]


def rows(mask: Mask, q_len: int, k_len: int) -> list[list[int]]:
    return mask.as_dense(q_len=q_len, k_len=k_len)[0, 0].int().tolist()


# Semantics


def test_a_mask_without_parts_sees_everything() -> None:
    assert rows(Mask(), 2, 3) == [[1, 1, 1], [1, 1, 1]]


def test_the_last_query_stands_at_the_last_key() -> None:
    assert rows(Mask(right=0), 2, 3) == [[1, 1, 0], [1, 1, 1]]
    assert rows(Mask(right=0), 3, 2) == [[0, 0], [1, 0], [1, 1]]


def test_sides_below_zero_are_meant_as_they_are() -> None:
    assert rows(Mask(right=-1), 3, 3) == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert rows(Mask(left=-1), 3, 3) == [[0, 1, 1], [0, 0, 1], [0, 0, 0]]


def test_keys_per_query() -> None:
    assert rows(Mask(key_start=ints(1, 0)), 2, 3) == [[0, 1, 1], [1, 1, 1]]
    assert rows(Mask(key_start=ints(1, 0), key_end=ints(2, -5)), 2, 3) == [[0, 1, 0], [0, 0, 0]]


def test_queries_per_key_count_from_0_wherever_queries_stand() -> None:
    assert rows(Mask(query_start=ints(0, 1, 5), query_end=ints(1, 2, 9)), 2, 3) == [[1, 0, 0], [0, 1, 0]]


def test_labels_take_the_place_of_the_index() -> None:
    mask = Mask(query_start=ints(7, 3), query_end=ints(8, 4), query_label=ints(3, 7, 3), by_id=True)
    assert rows(mask, 3, 2) == [[0, 1], [1, 0], [0, 1]]


def test_blocks_may_be_ragged_at_the_ends() -> None:
    assert rows(blocks(torch.tensor([[True, False], [False, True]]), (2, 3)), 3, 4) == [
        [1, 1, 1, 0],
        [1, 1, 1, 0],
        [0, 0, 0, 1],
    ]


@pytest.mark.parametrize("seed", range(60))
def test_random_masks_mean_what_their_fields_say(seed: int) -> None:
    random = Random(seed)
    q_len, k_len = random.randint(1, 7), random.randint(1, 7)
    mask = random_mask(random, q_len, k_len)
    assert torch.equal(whole(mask, q_len, k_len), spelled_out(mask, q_len, k_len)), mask


def test_visible_broadcasts_its_indices() -> None:
    mask = causal() & padding([2, 4])
    b, i, j = torch.arange(2)[:, None, None], torch.arange(3)[:, None], torch.arange(4)
    found = mask.visible(b, 0, i, j, 3, 4)
    assert found.shape == (2, 3, 4) and torch.equal(found, mask.as_dense(q_len=3, k_len=4)[:, 0])
    assert Mask().visible(b, 1, i, j, 3, 4).shape == (2, 3, 4)
    assert mask.visible(0, 0, 2, 3, 3, 4).item() is False and mask.visible(1, 0, 2, 3, 3, 4).item() is True


# Sizes


def test_sizes_are_known_from_tensors_and_free_elsewhere() -> None:
    assert causal().sizes == Sizes(None, None, None, None)
    assert padding([3, 4]).sizes == Sizes(2, None, None, None)
    assert Mask(dense=torch.ones(1, 8, 5, 1, dtype=torch.bool)).sizes == Sizes(None, 8, 5, None)
    assert documents(torch.zeros(2, 6, dtype=torch.int64)).sizes == Sizes(2, None, 6, 6)
    assert Mask(right=0, k_len=9).sizes == Sizes(None, None, None, 9)


def test_check_passes_what_fits() -> None:
    mask = documents(torch.zeros(2, 6, dtype=torch.int64)) & causal()
    mask.check(q_len=6, k_len=6, batch=2, heads=8)
    mask.check()
    blocks(torch.ones(2, 3, dtype=torch.bool), 4).check(q_len=5, k_len=12)


@pytest.mark.parametrize(
    ("mask", "sizes", "said"),
    [
        (Mask(key_end=ints(1, 2, 3)), {"q_len": 4}, "key_end: expected Tq=4, as the call has; got 3"),
        (Mask(query_end=ints(1, 2, 3)), {"k_len": 4}, "query_end: expected Tk=4, as the call has; got 3"),
        (padding([1, 2]), {"batch": 3}, "key_end: expected B=3, as the call has; got 2"),
        (from_dense(torch.ones(1, 4, 1, 1) > 0), {"heads": 8}, "dense: expected Hq=8, as the call has; got 4"),
        (Mask(q_len=1), {"q_len": 4}, "q_len: expected Tq=4, as the call has; got 1"),
        (blocks(torch.ones(2, 2) > 0, 4), {"q_len": 9}, "blocks: expected 3 blocks of 4 for Tq=9; got 2"),
        (blocks(torch.ones(2, 2) > 0, 4), {"k_len": 4}, "blocks: expected 1 blocks of 4 for Tk=4; got 2"),
        (blocks(torch.ones(3, 1, 2, 2) > 0, 4), {"batch": 2}, "blocks: expected B=2, as the call has; got 3"),
    ],
)
def test_check_names_what_does_not_fit(mask: Mask, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        mask.check(**sizes)
    assert said in str(caught.value)


def test_sizes_that_are_neither_given_nor_known_are_asked_for() -> None:
    with pytest.raises(ValueError, match="q_len: expected the number of queries; got None"):
        causal().as_dense(k_len=3)
    with pytest.raises(ValueError, match="k_len: expected the number of keys; got None"):
        Mask(key_end=ints(1, 2)).density()


# Identity


def test_masks_are_equal_by_numbers_and_by_the_identity_of_tensors() -> None:
    ends = ints(1, 2)
    assert Mask(key_end=ends, right=0) == Mask(key_end=ends, right=0)
    assert hash(Mask(key_end=ends)) == hash(Mask(key_end=ends))
    assert Mask(key_end=ends) != Mask(key_end=ends.clone()) and Mask(key_end=ends) != Mask(key_start=ends)
    assert causal() == window(-1, 0) != window(1, 0) and causal() != "causal"
    assert Mask(right=0, q_len=3) != Mask(right=0) != Mask(right=0, k_len=3)
    table = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    assert Mask(blocks=Blocks(table, 2, 2)) == Mask(blocks=Blocks(table, 2, 2)) != Mask(blocks=Blocks(table, 2, 3))
    assert len({causal(), causal(), window(3, 0)}) == 2


def test_what_repr_says_is_no_part_of_the_value() -> None:
    assert Mask(right=0, words="mine") == Mask(right=0) and repr(Mask(right=0, words="mine")) == "Mask(mine)"


def test_a_mask_is_pickled_and_copied_whole() -> None:
    mask = causal() & window(3, 0) & documents(torch.tensor([0, 1, 0])) & blocks(torch.ones(2, 2) > 0, 2)
    for other in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert other != mask and repr(other) == repr(mask)
        assert torch.equal(other.as_dense(), mask.as_dense())
    assert pickle.loads(pickle.dumps(causal())) == causal()


def test_a_mask_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        causal().right = 3
    with pytest.raises((AttributeError, TypeError)):
        causal().other = 3


def test_to_moves_every_tensor_and_keeps_the_mask_where_there_is_none_to_move() -> None:
    mask = padding([3, 4], [2, 2]) & blocks(torch.ones(2, 2) > 0, 2) & from_dense(torch.ones(4, 4) > 0)
    assert mask.to("cpu") is mask and mask.device == torch.device("cpu")
    moved = mask.to("meta")
    assert {tensor.device.type for _, tensor in moved.tensors()} == {"meta"} and moved.device == torch.device("meta")
    assert repr(moved) == repr(mask) and moved.sizes == mask.sizes
    assert causal().to("meta") == causal() and causal().device is None


# In words


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (Mask(), "everything visible"),
        (causal(), "causal"),
        (causal() & window(512, 0) & documents(torch.zeros(4, 8, dtype=torch.int64)), None),
        (window(3), "window(3, -1)"),
        (Mask(left=-1), "band(left=-1, right=None)"),
        (Mask(key_end=ints(1, 2, 3)), "keys per query of [1, 1, 3]"),
        (blocks(torch.ones(2, 3) > 0, (4, 8)), "blocks of [1, 1, 2, 3], 4 x 8 each"),
        (Mask(right=0, dense=torch.ones(1, 1, 2, 2) > 0), "causal & dense of [1, 1, 2, 2]"),
        (~causal(), "~causal"),
        (~padding([3]), "~(padding of [1])"),
        ((causal() | window(2, 2)) & padding([3]), "(causal | window(2, 2)) & padding of [1]"),
        (Mask() & causal() & Mask(), "causal"),
        (~Mask(), "nothing visible"),
    ],
)
def test_repr_says_what_the_mask_is(mask: Mask, said: str | None) -> None:
    assert repr(mask) == f"Mask({said or 'causal & window(512, 0) & documents of [4, 8]'})"


# Refusals


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"left": 1.5}, TypeError, "left: expected an int; got 1.5"),
        ({"right": True}, TypeError, "right: expected an int; got True"),
        ({"q_len": -1}, ValueError, "q_len: expected at least 0; got -1"),
        ({"key_end": [1, 2]}, TypeError, "key_end: expected a torch.Tensor; got list"),
        ({"key_end": torch.zeros(1, 1, 3)}, TypeError, "key_end: expected dtype torch.int32; got torch.float32"),
        ({"key_end": ints(1)[0]}, ValueError, "key_end: expected shape [B, Hq, Tq], where any dim may be 1"),
        ({"query_end": ints(1)[0]}, ValueError, "query_end: expected shape [B, Hq, Tk]"),
        ({"dense": ints(1)[None]}, TypeError, "dense: expected dtype torch.bool; got torch.int32"),
        ({"query_label": ints(1)}, ValueError, "query_label: expected query_start or query_end beside it"),
        ({"query_end": ints(1), "by_id": True}, ValueError, "by_id: expected query_start, query_end and query_label"),
        ({"key_start": ints(1, 2), "key_end": ints(1, 2, 3)}, ValueError, "key_end: expected Tq=2 or 1"),
        ({"key_start": ints(1, 2), "q_len": 3}, ValueError, "key_start: expected Tq=3 or 1, as other parts"),
        ({"blocks": Blocks(torch.ones(2, 2) > 0, 2, 2)}, ValueError, "blocks: expected shape [B, Hq, rows, cols"),
        ({"blocks": Blocks(torch.ones(1, 1, 2, 2) > 0, 0, 2)}, ValueError, "rows: expected at least 1; got 0"),
        (
            {"blocks": Blocks(torch.ones(1, 1, 2, 2) > 0, 2, 2), "key_end": ints(1, 2, 3, 4, 5)},
            ValueError,
            "blocks: expected 3 blocks of 2 for Tq=5; got 2",
        ),
        ({"key_start": ints(1), "key_end": ints(1).to("meta")}, ValueError, "tensors: expected one device; got key_st"),
    ],
)
def test_fields_that_are_no_mask_are_refused(fields: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        Mask(**fields)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: causal() and causal(), "mask: expected &, | or ~ between masks; got and, or, not or if"),
        (lambda: causal() & torch.ones(2, 2), "&: expected a Mask on both sides; got Tensor. A bool tensor becomes"),
        (lambda: 3 | causal(), "|: expected a Mask on both sides; got int"),
        (lambda: None & causal(), "&: expected a Mask on both sides; got NoneType"),
    ],
)
def test_slips_with_operators_are_refused(call: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert said in str(caught.value)


# The package


def test_the_package_is_found_as_an_attribute_too() -> None:
    import stream_attention

    assert stream_attention.masks is masks and masks.Mask is Mask
    assert all(hasattr(masks, name) for name in masks.__all__)
