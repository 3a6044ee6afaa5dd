"""Masks evaluated: dense forms in strips, and the share of visible scores."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tests.masks.random_masks import BATCH, HEADS, PARTS, random_mask, spelled_out, whole

from stream_attention.masks import Mask, causal, documents, evaluate, from_dense, padding, window


def test_a_dense_form_has_the_dims_that_the_mask_depends_on_or_those_asked_for() -> None:
    assert causal().as_dense(q_len=3, k_len=4).shape == (1, 1, 3, 4)
    assert padding([1, 2]).as_dense(q_len=3, k_len=4).shape == (2, 1, 3, 4)
    asked = padding([1, 2]).as_dense(batch=2, heads=8, q_len=3, k_len=4)
    assert asked.shape == (2, 8, 3, 4) and asked.stride(1) == 0  # not expanded in memory


@pytest.mark.parametrize("seed", range(20))
def test_strips_put_together_are_the_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    mask = random_mask(random, 7, 5)
    monkeypatch.setattr(evaluate, "STRIP", random.choice([1, 11, 60]))
    assert torch.equal(whole(mask, 7, 5), spelled_out(mask, 7, 5))


@pytest.mark.parametrize("part", [*PARTS, "any"])
@pytest.mark.parametrize("seed", range(20))
def test_the_density_is_the_share_of_the_dense_form(part: str, seed: int) -> None:
    random = Random(seed)
    q_len, k_len = random.randint(1, 7), random.randint(1, 7)
    mask = random_mask(random, q_len, k_len, None if part == "any" else (part, "band"))
    found = mask.density(batch=BATCH, heads=HEADS, q_len=q_len, k_len=k_len)
    assert found == pytest.approx(whole(mask, q_len, k_len).double().mean().item(), abs=1e-12)


def test_the_density_of_intervals_does_not_take_the_square_of_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(evaluate, "strips")
    length = 2**20
    ids = torch.arange(length) // 1024
    assert (documents(ids) & causal()).density() == pytest.approx(1025 / 2 / length)
    seen_once = torch.arange(1, length + 1, dtype=torch.int32)[None, None]
    assert Mask(right=0, query_end=seen_once).density(q_len=length) == pytest.approx(1 / length)


def test_nothing_of_no_scores_is_visible() -> None:
    assert causal().density(q_len=0, k_len=3) == 0.0
    assert from_dense(torch.ones(0, 3, dtype=torch.bool)).density() == 0.0
    assert window(1, 1).as_dense(q_len=0, k_len=3).shape == (1, 1, 0, 3)


def test_sizes_that_do_not_fit_are_refused() -> None:
    for call in (padding([1, 2]).as_dense, padding([1, 2]).density):
        with pytest.raises(ValueError, match="key_end: expected B=3, as the call has; got 2"):
            call(batch=3, q_len=4, k_len=4)
