"""`stream_attention.utils.memory`, the door: every documented name is behind it, and MemoryEfficientAttention."""

from __future__ import annotations

import pytest
import torch

from stream_attention import attention
from stream_attention.utils import memory
from stream_attention.utils.memory import MemoryEfficientAttention, MemoryProfiler

MIB = 1 << 20


def test_every_name_is_there() -> None:
    assert all(hasattr(memory, name) for name in memory.__all__)
    of_old = "CompressionStats KVCacheCompressor ImportanceBasedCompressor ChunkBasedCompressor QuantizedCompressor"
    of_old += " HybridCompressor create_kv_compressor MemoryEfficientAttention gradient_checkpoint_sequential"
    assert {*of_old.split(), "MemoryProfiler"} <= set(memory.__all__)


def test_the_example_of_old() -> None:
    keys, values = torch.randn(2, 1, 64, 2, 16)
    compressor = memory.create_kv_compressor("hybrid")
    assert isinstance(compressor, memory.KVCacheCompressor)
    _, _, stats = compressor.compress(keys, values, compression_ratio=8.0)
    assert isinstance(stats, memory.CompressionStats)


# MemoryEfficientAttention


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 7, 512])
def test_chunks_give_the_attention_of_the_whole(chunk_size: int, use_checkpoint: bool) -> None:
    query, key, value = (torch.randn(2, n, h, 8, dtype=torch.float64) for n, h in ((20, 4), (31, 2), (31, 2)))
    whole = [t.clone().requires_grad_() for t in (query, key, value)]
    parts = [t.clone().requires_grad_() for t in (query, key, value)]
    module = MemoryEfficientAttention(32, 4, chunk_size, use_checkpoint)
    wanted, out = attention(*whole), module.chunked_attention(*parts)
    torch.testing.assert_close(out, wanted)
    incoming = torch.randn_like(out)
    out.backward(incoming)
    wanted.backward(incoming)
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad, one.grad)


def test_masks_are_those_of_the_modules() -> None:
    query, key, value = torch.randn(3, 2, 9, 4, 8)
    module = MemoryEfficientAttention(32, 4, chunk_size=4)
    keep = torch.rand(2, 9, 9) > 0.3
    keep[0, 5] = False  # a row that sees nothing
    wanted = attention(query, key, value, mask=keep[:, None])
    torch.testing.assert_close(module(query, key, value, keep), wanted)
    assert (wanted[0, 5] == 0).all()
    added = torch.zeros(2, 1, 9, 9).masked_fill(~keep[:, None], -torch.inf)
    torch.testing.assert_close(module(query, key, value, attention_mask=added), wanted)
    padding = torch.arange(9) < torch.tensor([[9], [6]])
    by_length = attention(query[1:], key[1:, :6], value[1:, :6])
    torch.testing.assert_close(module(query, key, value, padding)[1:], by_length)


def test_a_checkpoint_keeps_no_second_output_and_no_lse() -> None:
    query, key, value = torch.randn(3, 1, 256, 4, 16)
    query.requires_grad_()
    retained = []
    with MemoryProfiler("cpu") as profiler:
        for use_checkpoint in (True, False):
            module = MemoryEfficientAttention(64, 4, 64, use_checkpoint)
            module(query, key, value).sum().backward()
            with profiler.region("forward"):
                out = module(query, key, value)
            retained.append(round(profiler.report()["regions"][-1]["retained_mb"] * MIB))
            del out
    assert retained == [query.nbytes, 2 * query.nbytes + 4 * 256 * 4]


def test_an_empty_query_is_an_empty_output() -> None:
    query, key = torch.randn(2, 0, 4, 8), torch.randn(2, 5, 4, 8)
    assert MemoryEfficientAttention(32, 4)(query, key, key).shape == (2, 0, 4, 8)


def test_bad_sizes_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of num_heads 3; got 32"):
        MemoryEfficientAttention(32, 3)
    with pytest.raises(ValueError, match="chunk_size: expected at least 1; got 0"):
        MemoryEfficientAttention(32, 4, 0)
    with pytest.raises(TypeError, match="use_checkpoint: expected a bool; got 'no'"):
        MemoryEfficientAttention(32, 4, 8, "no")  # type: ignore[arg-type]
    module, key = MemoryEfficientAttention(32, 4), torch.randn(1, 5, 4, 8)
    with pytest.raises(ValueError, match=r"query: expected four dims \[B, T, H, D\]; got \[1, 5, 32\]"):
        module(key.flatten(2), key, key)
    with pytest.raises(ValueError, match=r"key: expected four dims \[B, T, H, D\]; got \[1, 5, 32\]"):
        module(key, key.flatten(2), key)
    assert "chunk_size=512, use_checkpoint=True" in repr(module)
