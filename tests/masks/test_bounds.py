"""Bounds of a mask with its band."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tests.masks.random_masks import random_mask, whole

from stream_attention.masks import Mask
from stream_attention.masks.bounds import keys_per_query, queries_per_key


@pytest.mark.parametrize("seed", range(40))
def test_bounds_are_what_the_mask_allows(seed: int) -> None:
    random = Random(seed)
    q_len, k_len = random.randint(0, 6), random.randint(0, 6)
    mask = random_mask(random, q_len, k_len, ("band", "keys"))
    start, end = keys_per_query(mask, q_len, k_len)
    j = torch.arange(k_len)
    found = (start[..., None] <= j) & (j < end[..., None])
    assert torch.equal(found.expand(2, 3, -1, -1), whole(mask, q_len, k_len))
    mask = random_mask(random, q_len, k_len, ("band", "queries"))
    start, end = queries_per_key(mask, q_len, k_len)
    i = torch.arange(q_len)[:, None]
    found = (start[..., None, :] <= i) & (i < end[..., None, :])
    assert torch.equal(found.expand(2, 3, -1, -1), whole(mask, q_len, k_len))


def test_bounds_lie_within_the_call() -> None:
    mask = Mask(left=2**40, right=-(2**40))
    for found, most in ((keys_per_query(mask, 3, 5), 5), (queries_per_key(mask, 3, 5), 3)):
        for bound in found:
            assert bound.dtype is torch.int32 and bound.min() >= 0 and bound.max() <= most


@pytest.mark.parametrize("seed", range(20))
def test_a_band_as_intervals_is_the_same_mask(seed: int) -> None:
    random = Random(seed)
    mask = random_mask(random, 6, 7)
    written = mask.as_intervals(6, 7)
    assert (written.left, written.right) == (None, None) and written.sizes[2:] == (6, 7)
    assert torch.equal(whole(written, 6, 7), whole(mask, 6, 7))
    assert (written.key_start is None) == (mask.left is None and mask.key_start is None)
