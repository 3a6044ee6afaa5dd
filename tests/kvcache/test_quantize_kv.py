"""Caches in few bits: what rounding costs, against what theory allows, and what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.base.kv_layouts import ContiguousKV, PagedKV, QuantizedKV
from stream_attention.base.kv_layouts.quantized_tensor import BITS, CHANNELS, TOKENS
from stream_attention.kvcache import quantize_kv
from stream_attention.ops.decode import decode_attention

GENERATOR = torch.Generator().manual_seed(0)
KEY, VALUE = torch.randn(2, 2, 128, 2, 32, generator=GENERATOR)


def as_pages(key: Tensor, value: Tensor, page: int, lengths: Tensor) -> PagedKV:
    """In reverse order, row by row."""
    batch, length = key.shape[:2]
    stores = (x.reshape(-1, page, *x.shape[2:]).flip(0).contiguous() for x in (key, value))
    table = torch.arange(batch * length // page, dtype=torch.int32).flip(0).view(batch, -1)
    return PagedKV(*stores, table, lengths)


def over_groups(x: Tensor, dim: int, group: int, of: Callable[[Tensor], Tensor]) -> Tensor:
    """What `of` says of each group along its dim, in the exact arithmetic of fp64, laid over the group."""
    return torch.cat([of(part).expand_as(part) for part in x.double().split(group, dim)], dim)


def peak(x: Tensor, dim: int, group: int) -> Tensor:
    """The largest magnitude of each number's group."""
    return over_groups(x, dim, group, lambda part: part.abs().amax(dim, keepdim=True))


def step(x: Tensor, format: str, dim: int, group: int) -> Tensor:
    """What lies between two codes of each number's group."""
    if format == "int8":
        return peak(x, dim, group) / 127
    spread = over_groups(x, dim, group, lambda part: part.amax(dim, keepdim=True) - part.amin(dim, keepdim=True))
    return spread / (2 ** BITS[format] - 1)


# Semantics


def test_codes_of_a_block_that_is_counted_by_hand() -> None:
    rows = [[0.0, 100.0, -8.0, 30.0], [1.0, 115.0, 7.0, 0.0], [15.0, 103.0, 0.0, 2.0], [4.0, 101.0, -1.0, 16.0]]
    key = torch.tensor(rows).view(1, 4, 1, 4)
    cache = quantize_kv(ContiguousKV(key, key), "int4", group=4, residual=0)
    words = cache.key.codes.view(torch.int16).int() & 0xFFFF
    assert words.flatten().tolist() == [0xF000, 0x0FF1, 0x183F, 0x8714]  # the first channel in the lowest bits
    assert cache.key.scale.tolist() == [[[[1.0, 1.0, 1.0, 2.0]]]] and cache.key.zero is not None
    assert cache.key.zero.tolist() == [[[[8.0, 108.0, 0.0, 16.0]]]]  # what code 8 stands for
    assert cache.value.scale.shape == (1, 4, 1, 1)
    assert torch.equal(cache.tile(0, 4)[0], key)


def test_int8_codes_that_are_counted_by_hand() -> None:
    key = torch.tensor([[254.0, 0.0], [-254.0, -127.0], [2.0, 1.0], [-4.0, 63.0]]).view(1, 4, 1, 2)
    cache = quantize_kv(ContiguousKV(key, key), "int8", group=4, residual=0)
    assert cache.key.codes.flatten().tolist() == [255, 128, 1, 1, 129, 129, 126, 191]  # 128 stands for 0
    assert cache.key.scale.tolist() == [[[[2.0, 1.0]]]] and cache.key.zero is None and cache.value.zero is None
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


def test_lengths_and_pages_are_looked_at_on_a_cpu() -> None:
    plain = as_pages(KEY, VALUE, 32, torch.tensor([128, 77], dtype=torch.int32))
    plain.page_table[:, 0] = -1  # of codes: who reads them looks
    quantize_kv(plain, "int8", group=16, residual=20)
    plain.page_table[1, 2] = 99  # positions 64 to 76 of row 1, of which the last 13 stay as they are
    with pytest.raises(ValueError, match=r"page_table: expected pages from 0 to 7; got 99 at \[1, 2\]"):
        quantize_kv(plain, "int8", group=16, residual=20)
    small = quantize_kv(plain, "int8", group=16, residual=20, validate=False)
    assert small.tile(64, 77)[0][1].isnan().all() and small.tile(112, 128)[0][0].isfinite().all()
    for length in (-1, 129):
        lengths = torch.tensor([128, length], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"lengths: expected from 0 to the capacity, 128; got {length} in row 1"):
            quantize_kv(ContiguousKV(KEY, VALUE, lengths), "int8")


def test_a_cache_shorter_than_its_window_is_not_quantized() -> None:
    cache = quantize_kv(ContiguousKV(KEY, VALUE), "int4", group=64, residual=128)
    assert cache.quantized_lengths.tolist() == [0, 0] and cache.key.codes.numel() == 0
    assert torch.equal(cache.tile(0, 128)[0], KEY) and cache.capacity == 128 + 63


# Inf and NaN

BAD = [torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("per", ["channel", "token"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_a_group_that_holds_inf_or_nan_reads_as_nan_and_no_other_does(
    format: str, dtype: torch.dtype, per: str, bad: float
) -> None:
    """Made at once, and grown token by token. Token 21 is one of the block from 16 to 31."""
    x = KEY.to(dtype)
    with_bad = x.clone()
    with_bad[1, 21, 0, 5] = bad
    how: dict[str, Any] = {"group": 16, "residual": 8, "keys": per, "values": per}
    of_group = torch.zeros(x.shape, dtype=torch.bool)
    of_group[(1, slice(16, 32), 0, 5) if per == "channel" else (1, 21, 0, slice(16))] = True
    room = torch.zeros_like(x)
    grown = quantize_kv(ContiguousKV(room, room.clone(), torch.zeros(2, dtype=torch.int32)), format, **how)
    for token in with_bad.split(1, 1):
        grown.append(token, token)
    clean = quantize_kv(ContiguousKV(x, x), format, **how).tile(0, 128)
    for cache in (quantize_kv(ContiguousKV(with_bad, with_bad), format, **how), grown):
        for got, want in zip(cache.tile(0, 128), clean, strict=True):
            assert got[of_group].isnan().all() and torch.equal(got[~of_group], want[~of_group])


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_inf_that_is_seen_shows_in_the_attention(format: str, side: str, bad: float) -> None:
    """In the rows that see its group, unless a window hides all of that."""
    sides = {"key": KEY.clone(), "value": VALUE.clone()}
    sides[side][1, 21, 0, 5] = bad
    caches = [quantize_kv(ContiguousKV(*x), format, group=16, residual=8) for x in ((KEY, VALUE), sides.values())]
    query = torch.randn(2, 1, 4, 32, generator=torch.Generator().manual_seed(1))
    (clean, found), (clean_hidden, hidden) = (
        [decode_attention(query, cache, **how) for cache in caches] for how in ({}, {"window": (95, 0)})
    )
    heads, channels = (slice(2), slice(None)) if side == "key" else (slice(2), slice(16))
    assert not found[1, :, heads, channels].isfinite().any()
    found[1, :, heads, channels] = clean[1, :, heads, channels]
    assert torch.equal(found, clean) and torch.equal(hidden, clean_hidden)


# Error, against theory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("per", ["channel", "token"])
def test_no_number_is_off_by_more_than_half_a_step(dtype: torch.dtype, format: str, per: str) -> None:
    x = (KEY * torch.linspace(0.1, 20, 32)).to(dtype)
    cache = quantize_kv(ContiguousKV(x, x), format, group=16, residual=0, keys=per, values=per)
    dim = TOKENS if per == "channel" else CHANNELS
    half = step(x, format, dim, 16) / 2
    # Scale and zero are rounded, which moves the ends of a group, and so is the result.
    eps = torch.finfo(cache.key.scale.dtype).eps + torch.finfo(dtype).eps / 2
    bound = half * (1 + 1e-5) + eps * peak(x, dim, 16)
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


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_another_dtype(scale_dtype: torch.dtype) -> None:
    x = (KEY + torch.linspace(-20, 20, 32)).bfloat16()  # a zero that bfloat16 hardly holds
    cache = quantize_kv(ContiguousKV(x, x), "int4", group=16, residual=0, scale_dtype=scale_dtype)
    for side in (cache.key, cache.value):
        assert side.scale.dtype is scale_dtype and side.zero is not None and side.zero.dtype is scale_dtype
    assert cache.dtype is torch.bfloat16
    half, eps = step(x, "int4", TOKENS, 16) / 2, torch.finfo(scale_dtype).eps
    rounding = x.double().abs() * 2.0**-8 + half * 2.0**-7  # of the result to bfloat16
    bound = half + eps * peak(x, TOKENS, 16) + rounding
    assert ((cache.tile(0, 128)[0].double() - x.double()).abs() <= bound).all()
    cache.append(x[:, :15], x[:, :15])
    assert cache.key.scale.dtype is scale_dtype
    assert cache.capacity == 128 + 15 and cache.lengths.tolist() == [143, 143]


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_scales_are_float16_for_caches_of_16_bits_else_float32(format: str) -> None:
    half, single = torch.float16, torch.float32
    for dtype, scales in ((half, half), (torch.bfloat16, half), (single, single), (torch.float64, single)):
        cache = quantize_kv(ContiguousKV(KEY.to(dtype), VALUE.to(dtype)), format, residual=0)
        assert cache.key.scale.dtype is cache.value.scale.dtype is scales
        for zero in (cache.key.zero, cache.value.zero):
            assert (zero is None) == (format != "int4") and (zero is None or zero.dtype is scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_no_code_stands_for_more_than_float16_holds(format: str, dtype: torch.dtype) -> None:
    """Kernels make float16 numbers of codes, in which 65520 is infinite."""
    x = KEY.to(dtype)
    large = x.clone()
    largest = 65504 if dtype is torch.float16 else 1e6
    large[..., 3], large[:, ::2, :, 5], large[:, 1::2, :, 5] = largest, largest, -largest
    cut = quantize_kv(ContiguousKV(large, large), format, group=16, residual=0)
    for side in (cut.key, cut.value):
        numbers = dataclasses.replace(side, dtype=torch.float32).dequantize()
        assert (numbers[..., [3, 5]].abs() <= 65504).all() and (numbers[..., [3, 5]].abs() >= 64000).all()
        assert torch.equal(numbers[..., [3, 5]].sign(), large[..., [3, 5]].float().sign())
    others = [channel for channel in range(32) if channel not in (3, 5)]
    plain = quantize_kv(ContiguousKV(x, x), format, group=16, residual=0)
    assert torch.equal(cut.tile(0, 128)[0][..., others], plain.tile(0, 128)[0][..., others])


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


def errors(format: str, per: str, mean: float, spread: float, seed: int) -> tuple[float, float]:
    """Of keys with outliers, in themselves and in the attention."""
    query, key, value = outliers(mean, spread, seed)
    got, _ = quantize_kv(ContiguousKV(key, value), format, residual=0, keys=per).tile(0, 512)
    in_output = attended(query, got, value) - attended(query, key, value)
    return float((got - key).norm()), float(in_output.norm())


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 15.0), (15.0, 3.0)])
def test_a_scale_per_channel_is_twice_as_good_where_channels_are_outliers(
    format: str, mean: float, spread: float
) -> None:
    """In the output, where per token a large channel sets the step of all that share its scale. In the keys of int4
    only where the large channels are alike in all tokens: what is large both ways is rounded coarsely by channel."""
    for seed in range(3):
        by_channel, by_token = (errors(format, per, mean, spread, seed) for per in ("channel", "token"))
        assert by_token[1] >= 2 * by_channel[1]
        assert by_token[0] >= (2 if mean or format == "int8" else 1.5) * by_channel[0]


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 15.0), (15.0, 3.0)])
def test_fp8_is_better_per_token_where_channels_are_outliers(mean: float, spread: float) -> None:
    """Its precision is relative, so a large channel costs the others nothing, and the largest of a group is exact."""
    for seed in range(3):
        by_channel, by_token = (errors("fp8", per, mean, spread, seed) for per in ("channel", "token"))
        assert by_token[0] < 0.75 * by_channel[0] and by_token[1] < 0.75 * by_channel[1]


# Bytes


@pytest.mark.parametrize(("format", "bits"), [("fp8", 8.25), ("int8", 8.25), ("int4", 4.5)])
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
    for format, dim, multiple in (("int4", 6, 4), ("int8", 7, 2), ("fp8", 7, 2)):
        words = (
            rf"keys and values: expected a head dim that is a multiple of {multiple} for {format}; got \[2, .*, {dim}\]"
        )
        for key, value in ((KEY[..., :dim], VALUE), (KEY, VALUE[..., :dim])):
            with pytest.raises(ValueError, match=words):
                quantize_kv(ContiguousKV(key, value), format)
    pages = as_pages(KEY, VALUE, 16, torch.tensor([3, 128], dtype=torch.int32))
    with pytest.raises(
        ValueError, match="group: expected a divisor of the page size 16 for scales per channel; got 64"
    ):
        quantize_kv(pages, "int4")
    assert quantize_kv(pages, "int4", keys="token").group == 64


def test_a_page_that_is_missing_is_nobody_elses() -> None:
    """Of old the window held what the first page held."""
    pages = torch.ones(2, 16, 1, 8)
    table, lengths = torch.full((1, 2), -1, dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    cache = PagedKV(pages, pages.clone(), table, lengths)
    small = quantize_kv(cache, "int8", group=16, residual=16, validate=False)
    assert small.tile(0, 20)[0].isnan().any()
    assert decode_attention(torch.ones(1, 1, 1, 8), small, validate=False).isnan().all()
