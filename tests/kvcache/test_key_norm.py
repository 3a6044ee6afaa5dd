"""Key norm: small keys stay."""

from __future__ import annotations

import torch

from stream_attention.kvcache import KeyNormCompressor


def test_the_smallest_keys_of_each_head_stay() -> None:
    keys = torch.randn(2, 40, 3, 8, generator=torch.Generator().manual_seed(0))
    values = torch.randn(2, 40, 3, 4, generator=torch.Generator().manual_seed(1))
    stats = KeyNormCompressor().compress(keys, values, 5.0)[2]
    smallest = keys.norm(dim=-1).transpose(1, 2).topk(8, largest=False).indices
    assert torch.equal(stats.positions, smallest.sort(-1).values)


def test_half_precision_does_not_overflow() -> None:
    keys = torch.full((1, 4, 1, 8), 3e4, dtype=torch.float16)
    keys[:, 2] = 2e4
    assert KeyNormCompressor().compress(keys, keys, 4.0)[2].positions.tolist() == [[[2]]]
