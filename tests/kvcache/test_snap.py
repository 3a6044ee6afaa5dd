"""Snap: the last queries vote."""

from __future__ import annotations

import pytest
import torch

from stream_attention import attention_mass
from stream_attention.kvcache import SnapCompressor

GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(2, 40, 4, 8, generator=GENERATOR) * 2
KEYS, VALUES = torch.randn(2, 2, 40, 2, 8, generator=GENERATOR)


def test_the_window_stays_and_the_rest_is_what_it_looks_at() -> None:
    stats = SnapCompressor(window=6, pool=1).compress(KEYS, VALUES, 4.0, query=QUERY)[2]
    assert stats.tokens_retained == 10
    assert stats.positions[..., 4:].tolist() == [[[*range(34, 40)]] * 2] * 2
    votes = attention_mass(QUERY[:, -6:], KEYS, causal=True)[..., :34]
    assert torch.equal(stats.positions[..., :4], votes.topk(4).indices.sort(-1).values)


def test_earlier_queries_have_no_vote() -> None:
    other = QUERY.clone()
    other[:, :-6] = torch.nan
    compressor = SnapCompressor(window=6)
    kept = [compressor.compress(KEYS, VALUES, 4.0, query=query)[2].positions for query in (QUERY, other, QUERY[:, -6:])]
    assert torch.equal(kept[0], kept[1]) and torch.equal(kept[0], kept[2])


def test_the_window_is_the_last_real_tokens_of_a_row() -> None:
    stats = SnapCompressor(window=3, pool=3).compress(KEYS, VALUES, 4.0, query=QUERY, lengths=torch.tensor([40, 22]))[2]
    alone = SnapCompressor(window=3, pool=3).compress(KEYS[1:, :22], VALUES[1:, :22], 4.0, query=QUERY[1:, :22])[2]
    assert torch.equal(stats.positions[1:, :, :5], alone.positions) and alone.positions[0, 0, 2:].tolist() == [
        19,
        20,
        21,
    ]


def test_neighbours_of_a_vote_stay_with_it() -> None:
    mass = torch.zeros(2, 2, 40)
    mass[..., 10], mass[..., 20] = 5.0, 4.0
    kept = [
        SnapCompressor(window=2, pool=pool).compress(KEYS, VALUES, 8.0, mass=mass)[2].positions[0, 0].tolist()
        for pool in (1, 3)
    ]
    assert kept == [[0, 10, 20, 38, 39], [9, 10, 11, 38, 39]]


def test_a_neighbourhood_ends_at_the_window_and_at_the_first_token() -> None:
    """A token at an edge has fewer neighbours, not worse ones; the window lends no votes."""
    mass = torch.zeros(2, 2, 40)
    mass[..., 0] = mass[..., 37] = mass[..., 20] = 3.0
    mass[..., 38:] = 100.0
    stats = SnapCompressor(window=2, pool=3).compress(KEYS, VALUES, 10.0, mass=mass)[2]
    assert stats.positions[0, 0].tolist() == [0, 37, 38, 39]  # 3 / 2 at 0 and at 37, 3 / 3 around 20
    mass[..., 37] = 0.0
    stats = SnapCompressor(window=2, pool=3).compress(KEYS, VALUES, 10.0, mass=mass)[2]
    assert stats.positions[0, 0].tolist() == [0, 1, 38, 39]


def test_a_budget_below_the_window_keeps_the_latest() -> None:
    stats = SnapCompressor(window=32).compress(KEYS, VALUES, 8.0, query=QUERY)[2]
    assert stats.positions[1, 1].tolist() == [35, 36, 37, 38, 39]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="pool: expected an odd number of neighbours; got 4"):
        SnapCompressor(pool=4)
    with pytest.raises(ValueError, match="window: expected at least 1; got 0"):
        SnapCompressor(window=0)
    with pytest.raises(ValueError, match="query: expected query or mass; got None"):
        SnapCompressor().compress(KEYS, VALUES)
