"""Quantised caches: the way there and back, its error and its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import attention
from stream_attention.kvcache import QuantizedCompressor, QuantizedTensor
from stream_attention.kvcache.quantize import BITS, CHANNELS, TOKENS, quantize, quantized_nbytes

GENERATOR = torch.Generator().manual_seed(0)
KEYS, VALUES = torch.randn(2, 2, 100, 2, 32, generator=GENERATOR)


def packed(x: Any) -> QuantizedTensor:
    assert isinstance(x, QuantizedTensor)
    return x


# Semantics


def test_codes_count_from_the_lowest_of_a_group_and_zero_is_the_middle_one() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 10.0, 10.0, 40.0]).view(1, 1, 1, 8)
    two_bits = quantize(x, "int2", CHANNELS, 4)
    assert two_bits.codes.flatten().tolist() == [0b11100100, 0b11000000]
    torch.testing.assert_close(two_bits.scale.flatten(), torch.tensor([1.0, 10.0]))
    assert two_bits.zero is not None and two_bits.zero.flatten().tolist() == [2.0, 30.0]  # of code 2
    torch.testing.assert_close(two_bits.dequantize(), x, rtol=1e-6, atol=1e-6)


def test_a_scale_per_channel_or_per_token() -> None:
    by_channel, by_token = quantize(KEYS, "int8", TOKENS, 64), quantize(KEYS, "int8", CHANNELS, 16)
    assert by_channel.scale.shape == (2, 2, 2, 32) and by_token.scale.shape == (2, 100, 2, 2)
    keys, values, _ = QuantizedCompressor(8).compress(KEYS, VALUES)
    assert packed(keys).dim == TOKENS and packed(values).dim == CHANNELS
    keys, values, _ = QuantizedCompressor(8, keys="token", values="channel").compress(KEYS, VALUES)
    assert packed(keys).dim == CHANNELS and packed(values).dim == TOKENS


@pytest.mark.parametrize("format", BITS)
@pytest.mark.parametrize("dim", [TOKENS, CHANNELS])
def test_a_group_that_holds_inf_reads_as_nan_unless_nothing_is_held_there(format: str, dim: int) -> None:
    x = KEYS.clone()
    x[0, 30, 1, 20], x[0, 31, 1, 20] = torch.inf, -torch.inf
    held = torch.ones(x.shape[:3], dtype=torch.bool)
    held[0, 30:32, 1] = False
    there = quantize(x, format, dim, 16).dequantize()
    of_group = torch.zeros(x.shape, dtype=torch.bool)
    of_group[(0, slice(16, 32), 1, 20) if dim == TOKENS else (0, slice(30, 32), 1, slice(16, 32))] = True
    assert there[of_group].isnan().all() and there[~of_group].isfinite().all()
    assert quantize(x, format, dim, 16, held).dequantize()[held].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("format", ["int8", "int4", "int2"])
@pytest.mark.parametrize("dim", [TOKENS, CHANNELS])
def test_no_number_is_off_by_more_than_half_a_step(dtype: torch.dtype, format: str, dim: int) -> None:
    offset = torch.linspace(-20, 20, 32)  # channels whose mean is large beside their spread
    x = (KEYS + offset).to(dtype)
    there = quantize(x, format, dim, 24)
    error = (there.dequantize().double() - x.double()).abs()
    eps, steps = torch.finfo(dtype).eps, 2 ** BITS[format] - 1
    for start in range(0, x.shape[dim], 24):
        part = x.narrow(dim, start, min(24, x.shape[dim] - start)).double()
        low, high = part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)
        peak = torch.maximum(low.abs(), high.abs())
        step = peak / 127 if format == "int8" else (high - low) / steps
        bound = step / 2 * (1 + 1e-5) + eps * peak
        assert (error.narrow(dim, start, part.shape[dim]) <= bound).all()


def test_fp8_keeps_relative_precision() -> None:
    x = KEYS * torch.logspace(-3, 3, 100).view(1, 100, 1, 1)
    there = quantize(x, "fp8", CHANNELS, 32)
    assert there.codes.dtype is torch.float8_e4m3fn and there.zero is None
    error = (there.dequantize() - x).abs()
    smallest = 2.0**-10 * there.scale  # half of the spacing of its subnormals
    assert (error <= x.abs() / 16 + smallest * 1.01).all()
    assert error.max() > 0


@pytest.mark.parametrize("bits", [8, 4, 2, "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extremes_do_not_overflow(bits: int | str, dtype: torch.dtype) -> None:
    largest = min(torch.finfo(dtype).max, 1.5e38)  # a range of fp32 at most
    x = torch.full((1, 4, 1, 8), largest, dtype=dtype)
    x[..., ::2] = -largest
    x[:, 1] = 0.0
    compressor = QuantizedCompressor(bits)
    for back in compressor.decompress(*compressor.compress(x, x)[:2]):
        assert back.isfinite().all()
        if bits in (8, "fp8"):
            torch.testing.assert_close(back[:, 0], x[:, 0], rtol=0.02, atol=0)


def test_a_group_of_equals_comes_back() -> None:
    for constant in (0.0, 3.0, -7.5, 1e-6):
        x = torch.full((1, 8, 1, 8), constant)
        for format in BITS:
            there = quantize(x, format, TOKENS, 4)
            assert (there.scale > 0).all()
            torch.testing.assert_close(there.dequantize(), x, rtol=1e-6, atol=1e-12)


def test_bytes_are_known_before() -> None:
    for format in BITS:
        for dim, group in ((TOKENS, 64), (TOKENS, 7), (CHANNELS, 32), (CHANNELS, 5)):
            for x in (KEYS, KEYS.half(), KEYS[:, :0]):
                assert quantize(x, format, dim, group).nbytes == quantized_nbytes(x, format, dim, group)


def test_none_takes_the_widest_that_reaches_the_ratio() -> None:
    keys, values = torch.randn(2, 1, 512, 2, 64, generator=torch.Generator().manual_seed(2)).half()
    chosen = {}
    for ratio in (1.5, 1.93, 1.95, 3.5, 4.0, 6.0):
        _, _, stats = QuantizedCompressor(None).compress(keys, values, ratio)
        chosen[ratio] = stats.method
        assert stats.compression_ratio >= ratio
    assert list(chosen.values()) == [f"quantized (int{bits})" for bits in (8, 8, 4, 4, 2, 2)]
    with pytest.raises(ValueError, match=r'compression_ratio: expected at most 6.40 .int2.*got 7.0. .*"hybrid"'):
        QuantizedCompressor(None).compress(keys, values, 7.0)


# Accuracy where it counts


def outlier_errors(bits: int | str) -> list[float]:
    """Relative error of the attention's output with keys of a few large channels, by channel and by token."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 64, 2, 128, generator=generator)
    keys, values = torch.randn(2, 1, 512, 2, 128, generator=generator)
    keys[..., [3, 40, 77, 100]] *= 15.0
    exact = attention(query, keys, values)
    errors = []
    for per in ("channel", "token"):
        compressor = QuantizedCompressor(bits, group=32, keys=per)
        out = attention(query, *compressor.decompress(*compressor.compress(keys, values)[:2]))
        errors.append(float((out - exact).norm() / exact.norm()))
    return errors


@pytest.mark.parametrize("bits", [8, 4])
def test_keys_by_channel_are_twice_as_good_where_channels_are_outliers(bits: int) -> None:
    by_channel, by_token = outlier_errors(bits)
    assert by_channel < 0.5 * by_token, (by_channel, by_token)


# Refusals


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bits": 3}, ValueError, "bits: expected 8, 4, 2, None or one of int8, int4, int2, fp8; got 3"),
        ({"bits": True}, ValueError, "bits: expected 8.*; got True"),
        ({"bits": "int5"}, ValueError, "bits: expected 8.*; got 'int5'"),
        ({"group": 0}, ValueError, "group: expected at least 1; got 0"),
        ({"keys": "head"}, ValueError, 'keys: expected "channel" or "token"; got \'head\''),
        ({"values": "head"}, ValueError, 'values: expected "channel" or "token"; got \'head\''),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        QuantizedCompressor(**options)


def test_what_the_bits_cannot_do_is_refused() -> None:
    """Of old the ratio was ignored."""
    with pytest.raises(ValueError, match=r"compression_ratio: expected at most 3.32 .int4 in groups of 64"):
        QuantizedCompressor(4).compress(KEYS.half(), VALUES.half(), 8.0)
    assert QuantizedCompressor(4).compress(KEYS.half(), VALUES.half(), 3.0)[2].compression_ratio > 3.0
    for bits, dim, multiple in ((8, 7, 2), (4, 6, 4), (2, 12, 8)):
        words = f"keys and values: expected a head dim that is a multiple of {multiple} for int{bits}"
        with pytest.raises(ValueError, match=words):
            QuantizedCompressor(bits).compress(KEYS[..., :dim], VALUES)


# Regressions: what the system of old did


def test_decompress_inverts() -> None:
    """Of old, int8 of normal numbers came back with an error of 139."""
    for bits, bound in ((8, 0.02), (4, 0.3), (2, 1.2)):
        compressor = QuantizedCompressor(bits)
        stored_keys, stored_values, _ = compressor.compress(KEYS, VALUES)
        for back, x in zip(compressor.decompress(stored_keys, stored_values), (KEYS, VALUES), strict=True):
            assert (back - x).abs().max() < bound


def test_few_bits_are_few_bytes() -> None:
    """Of old "int4" took a byte for each number, and "2 bit" was a sign."""
    for bits in (8, 4, 2):
        keys = packed(QuantizedCompressor(bits).compress(KEYS, VALUES)[0])
        assert keys.codes.nbytes == KEYS.numel() * bits // 8
        levels = keys.dequantize()[0, :64, 0, 0].unique()
        assert len(levels) <= 2**bits and len(levels) > 2 ** (bits - 1) - (bits == 8) * 100


def test_keys_and_values_have_scales_of_their_own() -> None:
    """Of old one scale served all of K and V."""
    compressor = QuantizedCompressor(4)
    _, small = compressor.decompress(*compressor.compress(KEYS * 1000, VALUES)[:2])
    _, same = compressor.decompress(*compressor.compress(KEYS, VALUES)[:2])
    assert torch.equal(small, same)


def test_two_layers_share_a_compressor() -> None:
    """Of old the scales lay in the compressor, and the second cache overwrote those of the first."""
    compressor = QuantizedCompressor(8)
    first = compressor.compress(KEYS, VALUES)[:2]
    compressor.compress(100 * KEYS, 100 * VALUES)
    assert (_first(compressor.decompress(*first)) - KEYS).abs().max() < 0.02


def _first(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0]
