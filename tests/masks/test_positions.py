"""causal, window: masks by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stream_attention import attention
from stream_attention.backends.reference.attention import attention as specified
from stream_attention.masks import Mask, causal, window


@pytest.mark.parametrize(("q_len", "k_len"), [(5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("sides", [(2, 0), (-1, 3), (0, 0), (-1, -1), (9, 9)])
def test_they_mean_what_the_arguments_of_attention_mean(sides: tuple[int, int], q_len: int, k_len: int) -> None:
    query, key = torch.randn(1, q_len, 1, 4, dtype=torch.float64), torch.randn(1, k_len, 1, 4, dtype=torch.float64)
    for mask, options in ((window(*sides), {"window": sides}), (causal(), {"causal": True})):
        expected = specified(query, key, key, **options)
        found = specified(query, key, key, mask=mask.as_dense(q_len=q_len, k_len=k_len))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_dense_form_is_a_mask_of_attention() -> None:
    query = torch.randn(1, 5, 2, 8)
    found = attention(query, query, query, mask=causal().as_dense(q_len=5, k_len=5))
    torch.testing.assert_close(found, attention(query, query, query, causal=True))


def test_unbounded_sides() -> None:
    assert window() == window(-1, -1) == window(None, -1) == Mask()


@pytest.mark.parametrize(
    ("sides", "error", "said"),
    [
        (
            (-2, 0),
            ValueError,
            "left: expected at least -1 (-1 = unbounded); got -2. A side of -2 positions is Mask(left=-2)",
        ),
        ((0, -3), ValueError, "right: expected at least -1"),
        ((0.5, 0), TypeError, "left: expected an int; got 0.5 (float)"),
    ],
)
def test_sides_that_are_none_are_refused(sides: tuple[Any, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        window(*sides)
    assert said in str(caught.value)
