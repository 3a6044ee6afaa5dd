"""Hybrid: half of the ratio by importance, the rest by int8."""

from __future__ import annotations

import torch

from stream_attention.kvcache import HybridCompressor, ImportanceBasedCompressor, QuantizedCompressor, QuantizedTensor

GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(2, 512, 4, 64, generator=GENERATOR)
KEYS, VALUES = torch.randn(2, 2, 512, 2, 64, generator=GENERATOR)


def test_it_is_importance_then_int8() -> None:
    keys, values, stats = HybridCompressor().compress(KEYS, VALUES, 8.0, query=QUERY)
    chosen = ImportanceBasedCompressor().compress(KEYS, VALUES, 4.0, query=QUERY)
    assert stats.tokens_retained == 128 and torch.equal(stats.positions, chosen[2].positions)
    packed = QuantizedCompressor(8).compress(*chosen[:2])
    for mine, its in zip((keys, values), packed[:2], strict=True):
        assert isinstance(mine, QuantizedTensor) and torch.equal(mine.dequantize(), its.dequantize())
    assert stats.method == "hybrid: importance (attention_sum), int8"


def test_the_ratio_is_that_of_the_bytes() -> None:
    """Of old the stats said 8 whatever the dtype; in fp32 it was 16."""
    narrow = HybridCompressor().compress(KEYS.half(), VALUES.half(), 8.0)[2]
    wide = HybridCompressor().compress(KEYS, VALUES, 8.0)[2]
    assert 7.5 < narrow.compression_ratio < 8.0 and 14.0 < wide.compression_ratio < 16.0
    assert HybridCompressor().compress(KEYS, VALUES, 1.0)[2].tokens_retained == 512
