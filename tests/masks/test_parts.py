"""intervals, blocks, from_dense: masks from tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stream_attention.masks import Mask, blocks, from_dense, intervals


def test_intervals_take_rows_and_integers_of_any_kind() -> None:
    mask = intervals(
        key_start=torch.tensor([0, 1]), query_end=torch.full((2, 3, 4), 2**40), query_start=torch.ones(4).byte()
    )
    assert mask.sizes == (2, 3, 2, 4)
    for _, tensor in mask.tensors():
        assert tensor.dtype is torch.int32 and tensor.dim() == 3
    assert mask.query_end is not None and mask.query_end.min() == 2**31 - 1  # no smaller than any length
    assert mask.as_dense()[0, 0].tolist() == [[False] * 4, [False, True, True, True]]


def test_intervals_of_one_number_are_those_of_every_row() -> None:
    last = intervals(key_start=torch.tensor([4]))
    assert last.sizes.q_len is None
    assert torch.equal(last.as_dense(q_len=3, k_len=5)[0, 0], (torch.arange(5) == 4).expand(3, 5))


def test_int32_tensors_are_kept_as_they_are() -> None:
    ends = torch.zeros(2, 1, 4, dtype=torch.int32)
    assert intervals(key_end=ends).key_end is ends
    dense = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    assert from_dense(dense) == from_dense(dense) and from_dense(dense).dense is not None


def test_labels_count_in_place_of_indices() -> None:
    label, start, end = torch.tensor([[2, 0, 1], [0, 1, 2], [3, 2, 3]], dtype=torch.int32)
    mask = intervals(query_start=start, query_end=end, query_label=label)
    assert mask.as_dense()[0, 0].int().tolist() == [[1, 0, 1], [1, 0, 0], [1, 1, 0]]


def test_dense_masks_broadcast_as_those_of_attention() -> None:
    assert from_dense(torch.ones(3, 2, 2) > 0).sizes == (None, 3, 2, 2)
    per_row = from_dense((torch.arange(4) != 1)[:, None])
    assert per_row.sizes == (None, None, 4, None) and per_row.as_dense(k_len=2)[0, 0].int().tolist() == [
        [1, 1],
        [0, 0],
        [1, 1],
        [1, 1],
    ]


def test_blocks_take_one_size_or_two() -> None:
    table = torch.tensor([[True, False]])
    assert blocks(table, 2).blocks is not None and blocks(table, 2).blocks[1:] == (2, 2)
    assert blocks(table, (4, 2)).as_dense(q_len=3, k_len=3)[0, 0].int().tolist() == [[1, 1, 0]] * 3


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: intervals(key_end=[1]), TypeError, "key_end: expected a torch.Tensor of integers; got list"),
        (
            lambda: intervals(key_end=torch.ones(2)),
            TypeError,
            "key_end: expected a dtype of integers; got torch.float32",
        ),
        (
            lambda: intervals(key_start=torch.ones(2, 2).int()),
            ValueError,
            "key_start: expected shape [B or 1, Hq or 1, T], or [T]; got [2, 2]. One row for each batch entry:",
        ),
        (
            lambda: intervals(query_label=torch.ones(2).int()),
            ValueError,
            "query_label: expected query_start or query_end",
        ),
        (
            lambda: blocks(torch.ones(2, 2), 2),
            TypeError,
            "table: expected dtype torch.bool (True = attend); got torch.f",
        ),
        (lambda: blocks(torch.ones(2) > 0, 2), ValueError, "table: expected 2 to 4 dims"),
        (lambda: blocks(torch.ones(2, 2) > 0, (2, 2, 2)), ValueError, "size: expected an int, or a tuple"),
        (lambda: blocks(torch.ones(2, 2) > 0, 0), ValueError, "size: expected at least 1; got 0"),
        (lambda: from_dense(torch.ones(2, 2)), TypeError, "mask: expected dtype torch.bool"),
        (lambda: from_dense([[True]]), TypeError, "mask: expected a torch.Tensor; got list"),
    ],
)
def test_what_is_no_part_is_refused(call: Callable[[], Mask], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)
