"""Streaming: sinks and recent tokens."""

from __future__ import annotations

import pytest
import torch

from stream_attention.kvcache import StreamingCompressor

KEYS = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("sinks", "ratio", "kept"),
    [
        (4, 4.0, [0, 1, 2, 3, 34, 35, 36, 37, 38, 39]),
        (0, 10.0, [36, 37, 38, 39]),
        (4, 10.0, [0, 1, 2, 39]),  # the latest always stays
        (4, 40.0, [39]),
    ],
)
def test_the_first_and_the_last_stay(sinks: int, ratio: float, kept: list[int]) -> None:
    assert StreamingCompressor(sinks).compress(KEYS, KEYS, ratio)[2].positions.tolist() == [[kept, kept]]


def test_sinks_are_real_tokens() -> None:
    real = torch.arange(40) >= 10
    real[20:] = False
    stats = StreamingCompressor(2).compress(KEYS, KEYS, 2.0, key_mask=real[None])[2]
    assert stats.positions[0, 0].tolist() == [10, 11, 17, 18, 19]
