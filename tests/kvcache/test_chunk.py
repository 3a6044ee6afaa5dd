"""Chunks: whole runs of tokens."""

from __future__ import annotations

import pytest
import torch

from stream_attention.kvcache import ChunkBasedCompressor

KEYS = torch.randn(2, 40, 2, 8, generator=torch.Generator().manual_seed(0))


def mass_at(*places: tuple[int, int, int], length: int = 40) -> torch.Tensor:
    """Attention on some (row, head, token), a little less on each."""
    mass = torch.zeros(2, 2, length)
    for rank, place in enumerate(places):
        mass[place] = 10.0 - rank
    return mass


def test_every_row_and_head_keeps_its_own_whole_chunks() -> None:
    mass = mass_at((0, 0, 9), (0, 0, 33), (0, 1, 0), (0, 1, 39), (1, 0, 17), (1, 0, 20), (1, 1, 25), (1, 1, 2))
    stats = ChunkBasedCompressor(4).compress(KEYS, KEYS, 5.0, mass=mass)[2]
    chunks = [[[8, 32], [0, 36]], [[16, 20], [0, 24]]]
    expected = [[[s + i for s in starts for i in range(4)] for starts in row] for row in chunks]
    assert stats.positions.tolist() == expected


def test_the_same_chunks_in_every_head() -> None:
    mass = mass_at((0, 0, 9), (0, 1, 33), (1, 1, 25), (1, 0, 2))
    stats = ChunkBasedCompressor(4, heads="same").compress(KEYS, KEYS, 5.0, mass=mass)[2]
    assert torch.equal(stats.positions[:, 0], stats.positions[:, 1])
    assert stats.positions[0, 0].tolist() == [8, 9, 10, 11, 32, 33, 34, 35]


def test_what_does_not_fit_whole_does_not_come_in() -> None:
    mass = mass_at((0, 0, 9), (0, 0, 33), (0, 1, 0), (1, 0, 17), (1, 1, 25))
    stats = ChunkBasedCompressor(4).compress(KEYS, KEYS, 40 / 7, mass=mass)[2]  # a budget of 7 holds one chunk
    assert stats.counts.tolist() == [[4, 4], [4, 4]]
    assert stats.positions[0, 0].tolist() == [8, 9, 10, 11]


def test_the_last_chunk_may_be_shorter_and_is_judged_by_its_mean() -> None:
    keys, mass = KEYS[:, :38], torch.zeros(2, 2, 38)
    mass[..., 36:] = 1.0  # 2 of 1.0 each, against a chunk of four of 0.6
    mass[..., 4:8] = 0.6
    stats = ChunkBasedCompressor(4).compress(keys, keys, 38 / 7, mass=mass)[2]
    assert stats.positions[0, 0].tolist() == [4, 5, 6, 7, 36, 37]


def test_a_budget_below_the_chunk_makes_chunks_of_its_own_size() -> None:
    mass = mass_at((0, 0, 9), (0, 1, 0), (1, 0, 17), (1, 1, 39))
    stats = ChunkBasedCompressor(64).compress(KEYS, KEYS, 8.0, mass=mass)[2]
    assert stats.positions.tolist() == [[[*range(5, 10)], [*range(5)]], [[*range(15, 20)], [*range(35, 40)]]]


def test_chunks_are_counted_in_real_tokens() -> None:
    real = torch.arange(40) >= torch.tensor([[0], [6]])  # padding on the left
    mass = mass_at((0, 0, 9), (0, 1, 9), (1, 0, 15), (1, 1, 6))
    stats = ChunkBasedCompressor(4).compress(KEYS, KEYS, 8.0, mass=mass, key_mask=real)[2]
    assert stats.positions[1].tolist() == [[14, 15, 16, 17], [6, 7, 8, 9]]


def test_without_a_query_keys_are_judged_by_their_norm() -> None:
    keys = KEYS.clone()
    keys[:, 20:24] *= 0.01
    stats = ChunkBasedCompressor(4).compress(keys, KEYS, 10.0)[2]
    assert stats.positions[1, 1].tolist() == [20, 21, 22, 23]
    assert stats.method == "chunks of 4 by importance (key_norm)"
    real = torch.arange(40) >= torch.tensor([[0], [20]])
    padded = ChunkBasedCompressor(4).compress(keys, KEYS, 5.0, key_mask=real)[2]
    assert padded.positions[1, 1].tolist() == [20, 21, 22, 23, -1, -1, -1, -1]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="chunk_size: expected at least 1; got 0"):
        ChunkBasedCompressor(0)
    with pytest.raises(TypeError, match=r"chunk_size: expected an int; got 2.5"):
        ChunkBasedCompressor(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='heads: expected "each" or "same"; got \'adaptive\''):
        ChunkBasedCompressor(heads="adaptive")
