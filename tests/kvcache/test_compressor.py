"""What holds for every method: order, rows, padding, determinism, bytes, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import stream_attention
from stream_attention import attention
from stream_attention.kvcache import (
    CompressionStats,
    KVCompressor,
    QuantizedTensor,
    StreamingCompressor,
    create_kv_compressor,
)
from stream_attention.kvcache.compressor import METHODS, Stored

NAN = math.nan
OPTIONS: dict[str, dict[str, Any]] = {
    "importance": {},
    "chunk": {"chunk_size": 4},
    "quantized": {"group": 8},
    "hybrid": {"group": 8},
    "streaming": {"sinks": 2},
    "snap": {"window": 4, "pool": 3},
    "key_norm": {},
}
CHOOSING = [name for name in METHODS if name != "quantized"]


def tensors(batch: int = 3, length: int = 48, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """query, keys and values of a prompt, two query heads to a KV head."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, length, 4, 16, generator=generator)
    keys, values = torch.randn(2, batch, length, 2, 16, generator=generator)
    return query, keys, values


def run(
    name: str, query: Tensor, keys: Tensor, values: Tensor, ratio: float = 4.0, **said: Any
) -> tuple[Stored, Stored, CompressionStats]:
    compressor = create_kv_compressor(name, **OPTIONS[name])
    if compressor.uses_query:
        said["query"] = query
    if name != "quantized":
        said["compression_ratio"] = ratio
    return compressor.compress(keys, values, **said)


def plain(stored: Stored) -> Tensor:
    return stored.dequantize() if isinstance(stored, QuantizedTensor) else stored


# Semantics


@pytest.mark.parametrize("name", METHODS)
def test_what_is_kept_stands_in_position_order_and_says_where_it_was(name: str) -> None:
    query, keys, values = tensors()
    new_keys, new_values, stats = run(name, query, keys, values)
    kept = stats.tokens_retained
    assert stats.positions.shape == (3, 2, kept) and stats.positions.dtype is torch.int64
    assert new_keys.shape == (3, kept, 2, 16) and new_values.shape == (3, kept, 2, 16)
    for b in range(3):
        for h in range(2):
            where = stats.positions[b, h][: int(stats.counts[b, h])]
            assert where.tolist() == sorted(set(where.tolist())) and int(where[0]) >= 0 and int(where[-1]) < 48
            exact = name not in ("quantized", "hybrid")
            for new, old in ((plain(new_keys), keys), (plain(new_values), values)):
                error = (new[b, : len(where), h] - old[b, where, h]).abs().max()
                assert error == 0 if exact else error < 0.3


@pytest.mark.parametrize("name", CHOOSING)
def test_a_row_keeps_its_share_of_its_real_tokens(name: str) -> None:
    query, keys, values = tensors()
    lengths = torch.tensor([48, 29, 2])
    for ratio in (1.0, 2.5, 4.0, 1000.0):
        stats = run(name, query, keys, values, ratio, lengths=lengths)[2]
        tokens = max(1.0, ratio / 2) if name == "hybrid" else ratio
        budgets = [max(1, int(n / tokens)) for n in (48, 29, 2)]
        assert stats.tokens_retained == int(stats.counts.max())
        for counts, budget in zip(stats.counts.tolist(), budgets, strict=True):
            least = max(1, budget - 3) if name == "chunk" else budget  # whole chunks of 4, or what is left
            assert all(least <= count <= budget for count in counts), (ratio, counts, budget)


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_a_batch_do_not_know_of_each_other(name: str) -> None:
    query, keys, values = tensors()
    lengths = torch.tensor([48, 29, 13])
    together = run(name, query, keys, values, lengths=lengths)
    for b in range(3):
        row = slice(b, b + 1)
        alone = run(name, query[row], keys[row], values[row], lengths=lengths[row])
        kept = alone[2].tokens_retained
        assert torch.equal(together[2].positions[row, :, :kept], alone[2].positions)
        assert (together[2].positions[row, :, kept:] == -1).all()
        held = alone[2].positions.transpose(1, 2) >= 0
        for mine, its in zip(together[:2], alone[:2], strict=True):
            assert torch.equal(plain(mine)[row, :kept][held], plain(its)[held])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_kept_and_may_hold_anything(name: str, side: str) -> None:
    """A padded row gives what it gives without its padding, wherever the padding stands."""
    query, keys, values = tensors(batch=1, length=40)
    alone = run(name, query, keys, values)
    pad = (0, 0, 0, 0, 9, 0) if side == "left" else (0, 0, 0, 0, 0, 9)
    padded = [torch.nn.functional.pad(x, pad, value=NAN) for x in (query, keys, values)]
    real = torch.nn.functional.pad(torch.ones(1, 40, dtype=torch.bool), pad[4:])
    new = run(name, *padded, key_mask=real)
    assert torch.equal(new[2].positions, alone[2].positions + (9 if side == "left" else 0))
    for mine, its in zip(new[:2], alone[:2], strict=True):
        torch.testing.assert_close(plain(mine), plain(its), rtol=0, atol=0)


@pytest.mark.parametrize("name", METHODS)
def test_equal_calls_give_equal_results_and_leave_their_inputs(name: str) -> None:
    query, keys, values = tensors()
    before = [x.clone() for x in (query, keys, values)]
    results = []
    for seed in (1, 2):  # nothing is drawn
        torch.manual_seed(seed)
        results.append(run(name, query, keys, values))
    assert torch.equal(results[0][2].positions, results[1][2].positions)
    assert all(torch.equal(plain(a), plain(b)) for a, b in zip(results[0][:2], results[1][:2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (query, keys, values), strict=True))


@pytest.mark.parametrize("name", CHOOSING)
def test_of_equals_the_earlier_stays(name: str) -> None:
    query, keys, values = (torch.ones_like(x) for x in tensors(batch=1, length=32))
    stats = run(name, query, keys, values, lengths=None)[2]
    kept = stats.tokens_retained
    first = list(range(kept))
    if name == "streaming":  # its first two and the last
        first = [0, 1, *range(34 - kept, 32)]
    if name == "snap":  # its window, and all of the others got the same
        first = [*range(kept - 4), *range(28, 32)]
    assert stats.positions.tolist() == [[first, first]]


def test_a_ratio_of_1_keeps_everything_as_it_was() -> None:
    query, keys, values = tensors()
    for name in CHOOSING:
        new_keys, new_values, stats = run(name, query, keys, values, 1.0)
        assert stats.tokens_retained == 48
        if name != "hybrid":
            assert torch.equal(plain(new_keys), keys) and torch.equal(plain(new_values), values)
            assert stats.compression_ratio == 1.0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 1)], ids=["no rows", "no tokens", "one token"])
def test_nothing_and_next_to_nothing(name: str, shape: tuple[int, int]) -> None:
    query, keys, values = tensors(*shape)
    new_keys, new_values, stats = run(name, query, keys, values)
    assert new_keys.shape[0] == shape[0] and new_keys.shape[1] == stats.tokens_retained <= shape[1]
    assert plain(new_values).shape == new_values.shape
    _, _, of_an_empty_row = run(name, *tensors(2, 6), lengths=torch.tensor([0, 6]))
    assert of_an_empty_row.counts[0].tolist() == [0, 0] and of_an_empty_row.counts[1].min() >= 1


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_comes_back_as_it_came(name: str, dtype: torch.dtype) -> None:
    query, keys, values = (x.to(dtype) for x in tensors())
    new_keys, new_values, _ = run(name, query, keys, values)
    assert new_keys.dtype is new_values.dtype is plain(new_keys).dtype is dtype


def test_values_may_be_wider_than_keys() -> None:
    query, keys, _ = tensors()
    values = torch.randn(3, 48, 2, 24, generator=torch.Generator().manual_seed(3))
    for name in METHODS:
        assert run(name, query, keys, values)[1].shape[-1] == 24


# Stats


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bytes_are_those_of_the_tensors(name: str, dtype: torch.dtype) -> None:
    query, keys, values = (x.to(dtype) for x in tensors())
    new_keys, new_values, stats = run(name, query, keys, values)
    held = 0
    for stored in (new_keys, new_values):
        parts = [stored] if isinstance(stored, Tensor) else [stored.codes, stored.scale, stored.zero]
        held += sum(part.untyped_storage().nbytes() for part in parts if part is not None)
    assert stats.original_size == 2 * keys.numel() * dtype.itemsize
    assert stats.compressed_size == held
    assert stats.compression_ratio == stats.original_size / held
    assert stats.memory_saved_mb == (stats.original_size - held) / 2**20
    assert stats.tokens == 48 and stats.compression_time > 0


def test_stats_print_in_a_line() -> None:
    query, keys, values = tensors()
    line = str(run("streaming", query, keys, values)[2])
    assert line.startswith("streaming: 12 of 48 tokens, 9216 of 36864 bytes (4.00x) in ") and "\n" not in line
    assert "positions" not in repr(run("streaming", query, keys, values)[2])


def test_the_mask_makes_attention_skip_what_is_empty() -> None:
    query, keys, values = tensors()
    lengths = torch.tensor([48, 29, 2])
    new_keys, new_values, stats = run("importance", query, keys, values, lengths=lengths)
    new_query = query[:, -1:]
    out = attention(new_query, plain(new_keys), plain(new_values), mask=stats.mask(q_heads=4))
    for b in range(3):
        for h in range(4):
            where = stats.positions[b, h // 2][: int(stats.counts[b, h // 2])]
            alone = attention(
                new_query[b : b + 1, :, h : h + 1],
                keys[b : b + 1, where, h // 2 : h // 2 + 1],
                values[b : b + 1, where, h // 2 : h // 2 + 1],
            )
            torch.testing.assert_close(out[b, :, h], alone[0, :, 0])
    assert stats.mask().shape == (3, 2, 1, 12)
    with pytest.raises(ValueError, match="q_heads: expected a multiple of the 2 KV heads; got 3"):
        stats.mask(3)


def test_decompress_is_plain_tensors_of_what_was_kept() -> None:
    query, keys, values = tensors()
    for name in METHODS:
        new = run(name, query, keys, values)[:2]
        back = create_kv_compressor(name).decompress(*new)
        assert all(torch.equal(mine, plain(its)) for mine, its in zip(back, new, strict=True))
    with pytest.raises(TypeError, match="values: expected a tensor or QuantizedTensor"):
        create_kv_compressor("chunk").decompress(keys, None)  # type: ignore[arg-type]


# The factory


def test_the_factory_makes_every_method_and_passes_options_on() -> None:
    for name, class_name in METHODS.items():
        compressor = create_kv_compressor(name, **OPTIONS[name])
        assert type(compressor) is getattr(stream_attention.kvcache, class_name)
        assert isinstance(compressor, KVCompressor)
    assert type(create_kv_compressor()).__name__ == "HybridCompressor"
    assert type(create_kv_compressor(method="chunk")).__name__ == "ChunkBasedCompressor"
    assert stream_attention.create_kv_compressor is create_kv_compressor


def test_what_the_factory_cannot_make_is_refused() -> None:
    with pytest.raises(ValueError, match=r"method: expected one of importance, chunk, .*; got 'random'"):
        create_kv_compressor("random")
    with pytest.raises(TypeError, match="sinks"):
        create_kv_compressor("chunk", sinks=3)


# Refusals

GOOD: dict[str, Any] = {"keys": torch.zeros(2, 8, 2, 4), "values": torch.zeros(2, 8, 2, 4)}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"compression_ratio": 0.5}, ValueError, "compression_ratio: expected at least 1; got 0.5"),
        ({"compression_ratio": NAN}, ValueError, "compression_ratio: expected a finite number; got nan"),
        ({"compression_ratio": "8"}, TypeError, r"compression_ratio: expected a number; got '8' \(str\)"),
        ({"keys": [1.0]}, TypeError, "keys: expected a torch.Tensor; got list"),
        ({"keys": torch.zeros(2, 8, 4)}, ValueError, r"keys: expected shape \[B, T, Hkv, D\]; got \[2, 8, 4\]"),
        ({"keys": torch.zeros(2, 8, 2, 4).int()}, TypeError, "keys: expected dtype float16, .*; got torch.int32"),
        ({"values": torch.zeros(2, 7, 2, 4)}, ValueError, r"values: expected the keys' batch.*\[2, 8, 2\] \+ \[Dv\]"),
        ({"values": torch.zeros(2, 8, 2, 4, device="meta")}, ValueError, "values: expected the key's device cpu"),
        ({"lengths": torch.tensor([8, 9])}, ValueError, r"lengths: expected from 0 to the 8 slots.*\[8, 9\]"),
        ({"lengths": torch.tensor([8.0, 3.0])}, TypeError, "lengths: expected dtype torch.int32"),
        ({"lengths": torch.tensor([8])}, ValueError, r"lengths: expected shape \[B=2\]; got \[1\]"),
        ({"key_mask": torch.ones(2, 8)}, TypeError, "key_mask: expected dtype torch.bool"),
        ({"key_mask": torch.ones(8, dtype=torch.bool)}, ValueError, r"key_mask: expected shape \[B, T\] = \[2, 8\]"),
        (
            {"key_mask": torch.ones(2, 8, dtype=torch.bool), "lengths": torch.tensor([8, 8])},
            ValueError,
            "key_mask: expected None when lengths is given",
        ),
    ],
)
def test_a_bad_argument_is_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    for name in METHODS:
        with pytest.raises(error, match=words):
            create_kv_compressor(name).compress(**(GOOD | change))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": torch.zeros(2, 8, 4)}, ValueError, r"query: expected shape \[B=2, Tq, Hq, D\]; got \[2, 8, 4\]"),
        ({"query": torch.zeros(2, 8, 3, 4)}, ValueError, "query: expected a multiple of the 2 KV heads"),
        ({"query": torch.zeros(2, 8, 2, 4).half()}, TypeError, "key: expected the query's dtype"),
        ({"mass": torch.zeros(2, 8, 2)}, ValueError, r"mass: expected shape \[B, Hkv, T\] = \[2, 2, 8\]"),
        ({"mass": torch.zeros(2, 2, 8).int()}, TypeError, "mass: expected a floating dtype; got torch.int32"),
        (
            {"mass": torch.zeros(2, 2, 8), "query": torch.zeros(2, 8, 2, 4)},
            ValueError,
            "mass: expected None when query is given",
        ),
        ({"scale": 2.0}, ValueError, "scale and causal: expected the defaults without a query"),
        ({"causal": False}, ValueError, "scale and causal: expected the defaults without a query"),
        (
            {"query": torch.zeros(2, 2, 2, 4), "lengths": torch.tensor([8, 5])},
            ValueError,
            "query: expected a query on a token that is not padding in every row; got none in row 1",
        ),
    ],
)
def test_a_bad_vote_is_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    for name in ("importance", "chunk", "hybrid", "snap"):
        with pytest.raises(error, match=words):
            create_kv_compressor(name).compress(**(GOOD | change))


@pytest.mark.parametrize("name", ["quantized", "streaming", "key_norm"])
def test_attention_is_refused_where_nobody_looks_at_it(name: str) -> None:
    assert not create_kv_compressor(name).uses_query
    for said in ({"query": torch.zeros(2, 8, 2, 4)}, {"mass": torch.zeros(2, 2, 8)}):
        with pytest.raises(ValueError, match=r"expected None; got a value. This method does not use attention"):
            create_kv_compressor(name).compress(**GOOD, **said)


def test_the_base_class_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        KVCompressor()  # type: ignore[abstract]
    with pytest.raises(ValueError, match="sinks: expected at least 0; got -1"):
        StreamingCompressor(-1)


# Regressions: what the system of old did


def test_the_example_of_old_runs_as_written() -> None:
    _, keys, values = tensors()
    comp = create_kv_compressor("hybrid")
    _, _, stats = comp.compress(keys, values, compression_ratio=8.0)
    names = "original_size compressed_size compression_ratio tokens_retained memory_saved_mb compression_time"
    assert all(isinstance(getattr(stats, name), int | float) for name in names.split())


def test_without_history_nothing_is_random() -> None:
    """Of old, importance without attention scores drew tokens at random."""
    _, keys, values = tensors()
    kept = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        kept.append(create_kv_compressor("importance").compress(keys, values)[2])
    assert torch.equal(kept[0].positions, kept[1].positions)
    assert kept[0].method == "importance (key_norm)"


def test_the_factory_sets_the_importance() -> None:
    """Of old its own `method` hid that of the class."""
    _, keys, values = tensors()
    compressor = create_kv_compressor("importance", importance="value_norm")
    assert compressor.compress(keys, values)[2].method == "importance (value_norm)"
