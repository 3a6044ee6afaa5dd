"""How a budget is shared out among heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stream_attention.kvcache import ImportanceBasedCompressor, KeyNormCompressor, SnapCompressor

KEYS = torch.randn(2, 40, 4, 8, generator=torch.Generator().manual_seed(0))
MASS = torch.rand(2, 4, 40, generator=torch.Generator().manual_seed(1))


def test_the_same_positions_in_every_head() -> None:
    stats = ImportanceBasedCompressor(heads="same").compress(KEYS, KEYS, 4.0, mass=MASS)[2]
    best = MASS.sum(1).topk(10).indices.sort(-1).values
    assert torch.equal(stats.positions, best.unsqueeze(1).expand(2, 4, 10))


def test_weights_divide_the_budget_in_their_proportion() -> None:
    keys, _, stats = ImportanceBasedCompressor(heads=(1, 2, 3, 4)).compress(KEYS, KEYS, 4.0, mass=MASS)
    assert stats.counts.tolist() == [[4, 8, 12, 16]] * 2  # of 4 heads x 10 tokens
    assert stats.tokens_retained == 16 and keys.shape == (2, 16, 4, 8)
    for head, count in enumerate((4, 8, 12, 16)):
        best = MASS[:, head].topk(count).indices.sort(-1).values
        assert torch.equal(stats.positions[:, head, :count], best)
        assert (stats.positions[:, head, count:] == -1).all() and (keys[:, count:, head] == 0).all()
        assert torch.equal(stats.mask()[:, head, 0], (torch.arange(16) < count).expand(2, 16))
    extreme = KeyNormCompressor(heads=[1e-9, 1, 1, 1]).compress(KEYS, KEYS, 1.5)[2]
    assert extreme.counts.tolist() == [[1, 34, 34, 34]] * 2
    assert KeyNormCompressor(heads=[1e-9, 1e-9, 1, 1]).compress(KEYS, KEYS, 1.5)[2].counts.max() == 40


def test_adaptive_spends_the_budget_where_the_attention_is() -> None:
    mass = MASS.clone()
    mass[:, 2] += 1.0  # every token of head 2 is worth more than any of the others
    stats = ImportanceBasedCompressor(heads="adaptive").compress(KEYS, KEYS, 4.0, mass=mass)[2]
    assert stats.counts.sum(1).tolist() == [40, 40]
    assert stats.counts[:, 2].tolist() == [34, 34]  # all that the safe 2 of each other head leave
    even = ImportanceBasedCompressor().compress(KEYS, KEYS, 4.0, mass=mass)[2]

    def received(positions: torch.Tensor) -> float:
        return float(torch.where(positions >= 0, mass.gather(-1, positions.clamp_min(0)), 0.0).sum())

    assert received(stats.positions) > received(even.positions)


def test_adaptive_keeps_to_the_budget_of_each_row() -> None:
    lengths = torch.tensor([40, 9])
    stats = SnapCompressor(window=2, heads="adaptive").compress(KEYS, KEYS, 3.0, mass=MASS, lengths=lengths)[2]
    assert stats.counts.sum(1).tolist() == [13 * 4, 3 * 4] and stats.counts.min() >= 1
    assert (stats.positions[1] < 9).all()


def test_scores_that_are_no_numbers_come_last_but_before_padding() -> None:
    mass = torch.tensor([torch.nan, 0.0, torch.inf, -torch.inf, 1.0, 5.0]).view(1, 1, 6)
    keys, lengths = torch.zeros(1, 6, 1, 4), torch.tensor([5])
    for ratio, kept in ((5.0, [2]), (2.5, [2, 4]), (1.5, [1, 2, 4]), (1.0, [0, 1, 2, 3, 4])):
        stats = ImportanceBasedCompressor().compress(keys, keys, ratio, mass=mass, lengths=lengths)[2]
        assert stats.positions.flatten().tolist() == kept


@pytest.mark.parametrize(
    ("heads", "error", "words"),
    [
        ("all", ValueError, 'heads: expected "each", "same", "adaptive" or one weight per KV head; got \'all\''),
        (3, ValueError, 'heads: expected "each"'),
        ([], ValueError, 'heads: expected "each"'),
        ([1, 0], ValueError, r"heads: expected weights above 0; got \[1, 0\]"),
        ([1, "2"], TypeError, "heads: expected a number"),
    ],
)
def test_bad_shares_are_refused(heads: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        KeyNormCompressor(heads=heads)


def test_as_many_weights_as_heads() -> None:
    with pytest.raises(ValueError, match=r"heads: expected one weight for each of the 4 KV heads; got \[1, 2\]"):
        KeyNormCompressor(heads=[1, 2]).compress(KEYS, KEYS)
