"""Padded batches as packs and back: tiny facts, and gradients."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from stream_attention.compat.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = torch.tensor([[False, True, True], [True, False, False], [False, False, False]])


def test_the_rows_of_a_mask_in_their_order() -> None:
    hidden = torch.arange(18.0).view(3, 3, 2)
    rows, indices, offsets, longest, used = unpad_input(hidden, MASK)
    assert torch.equal(rows, hidden[MASK]) and indices.tolist() == [1, 2, 3]
    assert offsets.tolist() == [0, 2, 3, 3] and offsets.dtype is torch.int32
    assert longest == 2 and type(longest) is int
    assert used.tolist() == [2, 1, 0] and used.dtype is torch.int32
    assert torch.equal(pad_input(rows, indices, 3, 3), hidden * MASK[..., None])
    as_integers = unpad_input(hidden, MASK.int())
    assert all(torch.equal(a, b) for a, b in zip(as_integers[:3], (rows, indices, offsets), strict=True))


def test_rows_that_are_allocated_but_unused() -> None:
    unused = torch.tensor([[True, False, False], [False, True, False], [False, False, False]])
    rows, indices, offsets, longest, used = unpad_input(torch.randn(3, 3, 4, 5), MASK, unused)
    assert rows.shape == (5, 4, 5) and indices.tolist() == [0, 1, 2, 3, 4]
    assert offsets.tolist() == [0, 3, 5, 5] and longest == 3 and used.tolist() == [2, 1, 0]


def test_rows_of_several_sequences() -> None:
    """The example of the library's documentation."""
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    hidden = torch.randn(3, 6, 2)
    rows, indices, offsets, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert offsets.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert torch.equal(rows, hidden.flatten(0, 1)[indices])


def test_indices_may_be_int32_as_transformers_passes_them() -> None:
    rows = torch.randn(2, 4)
    assert torch.equal(pad_input(rows, torch.arange(2, dtype=torch.int32), 2, 1), rows.unsqueeze(1))


def test_gradients_reach_the_rows_that_were_taken() -> None:
    hidden, indices = torch.randn(5, 2, requires_grad=True), torch.tensor([3, 0])
    weights = torch.tensor([[2.0], [3.0]])
    (index_first_axis(hidden, indices) * weights).sum().backward()
    assert hidden.grad is not None and hidden.grad[:, 0].tolist() == [3, 0, 0, 2, 0]
    values = torch.randn(2, 2, requires_grad=True)
    (index_put_first_axis(values, indices, 5) * torch.arange(5.0)[:, None]).sum().backward()
    assert values.grad is not None and values.grad[:, 0].tolist() == [3, 0]


def test_a_residual_adds_its_gradient() -> None:
    hidden, indices = torch.randn(5, 2, requires_grad=True), torch.tensor([3, 0])
    rows, residual = index_first_axis_residual(hidden, indices)
    assert_close(residual, hidden)
    (2 * rows.sum() + residual.sum()).backward()
    assert hidden.grad is not None and hidden.grad[:, 0].tolist() == [3, 1, 1, 3, 1]
