"""Caches in few bits: what rounding costs, against what theory allows, and what it saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.cache_views import ContiguousKV, PagedKV, QuantizedKV
from stream_attention.cache_views.codes import BITS, CHANNELS, TOKENS
from stream_attention.kvcache import quantize_kv

GENERATOR = torch.Generator().manual_seed(0)
KEY, VALUE = torch.randn(2, 2, 128, 2, 32, generator=GENERATOR)


def as_pages(key: Tensor, value: Tensor, page: int, lengths: Tensor) -> PagedKV:
    """In reverse order, row by row."""
    batch, length = key.shape[:2]
    stores = (x.reshape(-1, page, *x.shape[2:]).flip(0).contiguous() for x in (key, value))
    table = torch.arange(batch * length // page, dtype=torch.int32).flip(0).view(batch, -1)
    return PagedKV(*stores, table, lengths)


def step(x: Tensor, format: str, dim: int, group: int) -> Tensor:
    """The step of each number's group, in the exact arithmetic of fp64, laid over the group."""
    parts = x.double().split(group, dim)
    ranges = ((part.amax(dim, keepdim=True) - part.amin(dim, keepdim=True)).expand_as(part) for part in parts)
    return torch.cat(list(ranges), dim) / (2 ** BITS[format] - 1)


# Semantics


def test_codes_of_a_block_that_is_counted_by_hand() -> None:
    key = torch.tensor([[0.0, 100.0], [1.0, 115.0], [15.0, 103.0], [4.0, 101.0]]).view(1, 4, 1, 2)
    cache = quantize_kv(ContiguousKV(key, key), "int4", group=4, residual=0)
    assert cache.key.codes.flatten().tolist() == [0x00, 0xF1, 0x3F, 0x14]  # the second channel in the high bits
    assert cache.key.scale.tolist() == [[[[1.0, 1.0]]]] and cache.key.zero is not None
    assert cache.key.zero.tolist() == [[[[0.0, 100.0]]]]
    assert cache.value.scale.shape == (1, 4, 1, 1)
    assert torch.equal(cache.tile(0, 4)[0], key)


def test_a_scale_lies_where_its_token_or_block_does() -> None:
    lengths = torch.full((2,), 128, dtype=torch.int32)
    flat, pages = ContiguousKV(KEY, VALUE), as_pages(KEY, VALUE, 64, lengths)
    for cache, lead in ((flat, (2, 128)), (pages, (4, 64))):
        small = quantize_kv(cache, "int4", group=16, residual=0)
        assert small.key.codes.shape == (*lead, 2, 16) and small.value.codes.shape == (*lead, 2, 16)
        assert small.key.scale.shape == (lead[0], lead[1] // 16, 2, 32) and small.key.dim == TOKENS
        assert small.value.scale.shape == (*lead, 2, 2) and small.value.dim == CHANNELS
        small = quantize_kv(cache, "fp8", group=16, residual=0, keys="token", values="channel")
        assert small.key.scale.shape == (*lead, 2, 2) and small.value.scale.shape == (lead[0], lead[1] // 16, 2, 32)
        assert small.key.zero is None and small.key.codes.dtype is torch.float8_e4m3fn


def test_pages_and_rows_hold_the_same_numbers() -> None:
    lengths = torch.tensor([128, 77], dtype=torch.int32)
    for format in ("fp8", "int8", "int4"):
        flat = quantize_kv(ContiguousKV(KEY, VALUE, lengths), format, group=16, residual=20).tile(0, 128)
        pages = quantize_kv(as_pages(KEY, VALUE, 32, lengths), format, group=16, residual=20).tile(0, 128)
        for a, b in zip(flat, pages, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1, :77], b[1, :77])


def test_it_is_a_copy_with_lengths_of_its_own() -> None:
    plain = as_pages(KEY, VALUE, 64, torch.tensor([3, 128], dtype=torch.int32))
    cache = quantize_kv(plain, "int8", group=64)
    assert cache.page_table is plain.page_table and cache.lengths is not plain.lengths
    whole = ContiguousKV(KEY, VALUE)
    assert quantize_kv(whole, "int8").lengths.tolist() == [128, 128]


def test_what_stands_behind_a_length_has_no_part_in_a_number_that_counts() -> None:
    key, value = KEY.clone(), VALUE.clone()
    lengths = torch.tensor([50, 9], dtype=torch.int32)
    clean = quantize_kv(ContiguousKV(key, value, lengths), "int4", group=8, residual=5)
    key[0, 50:], value[1, 9:] = torch.nan, torch.inf
    dirty = quantize_kv(ContiguousKV(key, value, lengths), "int4", group=8, residual=5)
    for a, b in zip(clean.tile(0, 50), dirty.tile(0, 50), strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1, :9], b[1, :9])


def test_a_cache_shorter_than_its_window_is_not_quantized() -> None:
    cache = quantize_kv(ContiguousKV(KEY, VALUE), "int4", group=64, residual=128)
    assert cache.quantized_lengths.tolist() == [0, 0] and cache.key.codes.numel() == 0
    assert torch.equal(cache.tile(0, 128)[0], KEY) and cache.capacity == 128 + 63


# Error, against theory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("per", ["channel", "token"])
def test_no_number_is_off_by_more_than_half_a_step(dtype: torch.dtype, format: str, per: str) -> None:
    x = (KEY * torch.linspace(0.1, 20, 32)).to(dtype)
    cache = quantize_kv(ContiguousKV(x, x), format, group=16, residual=0, keys=per, values=per)
    half = step(x, format, TOKENS if per == "channel" else CHANNELS, 16) / 2
    eps = torch.finfo(dtype).eps
    # Scale and zero are rounded to dtype, which moves the ends of a group, and so is the result.
    bound = half * (1 + 1e-5) + eps * x.double().abs().amax((1, 3) if per == "token" else 1, keepdim=True)
    for got in cache.tile(0, 128):
        assert ((got.double() - x.double()).abs() <= bound).all()
    if dtype in (torch.float32, torch.float64):  # and the bound is reached: it is a step, not some number above it
        assert ((cache.tile(0, 128)[0].double() - x.double()).abs() / half).max() > 0.98


@pytest.mark.parametrize("per", ["channel", "token"])
def test_fp8_is_off_by_a_sixteenth_at_most(per: str) -> None:
    cache = quantize_kv(ContiguousKV(KEY, VALUE), "fp8", group=16, residual=0, keys=per, values=per)
    largest = KEY.abs().max() / 448
    error = (cache.tile(0, 128)[0] - KEY).abs()
    assert (error <= KEY.abs() / 16 * 1.001 + largest * 2.0**-10 * 1.01).all()
    assert (error / KEY.abs()).max() > 1 / 20


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
def test_scales_of_another_dtype(scale_dtype: torch.dtype) -> None:
    x = (KEY + torch.linspace(-20, 20, 32)).bfloat16()  # a zero that bfloat16 hardly holds
    cache = quantize_kv(ContiguousKV(x, x), "int8", group=16, residual=0, scale_dtype=scale_dtype)
    assert cache.key.scale.dtype is scale_dtype and cache.dtype is torch.bfloat16
    half, ends = step(x, "int8", TOKENS, 16) / 2, x.double().abs().amax(1, keepdim=True)
    eps = torch.finfo(scale_dtype).eps
    rounding = x.double().abs() * 2.0**-8 + half * 2.0**-7  # of the result to bfloat16
    assert ((cache.tile(0, 128)[0].double() - x.double()).abs() <= half + eps * ends + rounding).all()
    cache.append(x[:, :16], x[:, :16])
    assert cache.capacity == 128 + 15 and cache.lengths.tolist() == [143, 143]


def outliers(mean: float, spread: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys of which 4 in 128 channels have this mean, of either sign, and this spread, and values."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 1, 512, 2, 128, generator=generator).double()
    large = torch.randperm(128, generator=generator)[:4]
    key[..., large] = key[..., large] * spread + mean * torch.tensor([1.0, -1.0, 1.0, -1.0]).double()
    return query[:, :32], key, value


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * key.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 15.0), (15.0, 3.0)])
def test_a_scale_per_channel_is_twice_as_good_where_channels_are_outliers(
    format: str, mean: float, spread: float
) -> None:
    """In the output, where per token a large channel sets the step of all that share its scale. In the keys themselves
    only where the large channels are alike in all tokens: what is large both ways is rounded coarsely by channel."""
    for seed in range(3):
        query, key, value = outliers(mean, spread, seed)
        exact = attended(query, key, value)
        in_keys, in_output = [], []
        for per in ("channel", "token"):
            got, _ = quantize_kv(ContiguousKV(key, value), format, residual=0, keys=per).tile(0, 512)
            in_keys.append(float((got - key).norm()))
            in_output.append(float((attended(query, got, value) - exact).norm()))
        assert in_output[1] >= 2 * in_output[0]
        assert in_keys[1] >= (2 if mean else 1.5) * in_keys[0]


# Bytes


@pytest.mark.parametrize(("format", "bits"), [("fp8", 8.25), ("int8", 8.5), ("int4", 4.5)])
def test_the_bits_of_a_number_with_its_share_of_scale_and_zero(format: str, bits: float) -> None:
    x = torch.zeros(1, 1024, 2, 128, dtype=torch.bfloat16)
    cache = quantize_kv(ContiguousKV(x, x), format, residual=0)
    assert cache.key.nbytes * 8 == cache.value.nbytes * 8 == bits * x.numel()
    window = 64 * 2 * 128 * 2
    assert cache.nbytes == cache.key.nbytes + cache.value.nbytes + 2 * window + 4


# Refusals


@pytest.mark.parametrize(
    ("format", "options", "error", "words"),
    [
        ("int2", {}, ValueError, "format: expected one of fp8, int8, int4; got 'int2'"),
        ("int4", {"group": 0}, ValueError, "group: expected at least 1; got 0"),
        ("int4", {"group": 64.0}, TypeError, "group: expected an int"),
        ("int4", {"residual": -1}, ValueError, "residual: expected at least 0; got -1"),
        ("int4", {"keys": "head"}, ValueError, 'keys: expected "channel" or "token"; got \'head\''),
        ("int4", {"values": None}, ValueError, 'values: expected "channel" or "token"; got None'),
        ("int4", {"scale_dtype": torch.int8}, ValueError, "scale_dtype: expected float16, bfloat16, float32 or None"),
    ],
)
def test_what_cannot_be_asked_for(format: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        quantize_kv(ContiguousKV(KEY, VALUE), format, **options)


def test_what_cannot_be_quantized() -> None:
    small = quantize_kv(ContiguousKV(KEY, VALUE), "int8")
    assert isinstance(small, QuantizedKV)
    for wrong in (small, KEY, None):
        with pytest.raises(TypeError, match="cache: expected a ContiguousKV or a PagedKV"):
            quantize_kv(wrong, "int8")  # type: ignore[arg-type]
    odd = ContiguousKV(KEY[..., :7], VALUE)
    with pytest.raises(ValueError, match="a head dim that is a multiple of 2 for int4"):
        quantize_kv(odd, "int4")
    pages = as_pages(KEY, VALUE, 16, torch.tensor([3, 128], dtype=torch.int32))
    with pytest.raises(
        ValueError, match="group: expected a divisor of the page size 16 for scales per channel; got 64"
    ):
        quantize_kv(pages, "int4")
    assert quantize_kv(pages, "int4", keys="token").group == 64
