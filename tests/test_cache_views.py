"""Caches to decode from: what they hold, the tiles they are read by, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.base.kv_layouts import ContiguousKV, KVCache, PagedKV, QuantizedKV
from stream_attention.base.kv_layouts.quantized_tensor import CHANNELS, TOKENS, Coding, quantize
from stream_attention.kvcache import quantize_kv

HEADS, DIM, VALUE_DIM = 2, 8, 4


def tokens(*lead: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(*lead, HEADS, DIM, generator=generator)
    return key.to(dtype), torch.randn(*lead, HEADS, VALUE_DIM, generator=generator).to(dtype)


def int32(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def paged(key: Tensor, value: Tensor, lengths: Tensor, page: int, seed: int = 0) -> PagedKV:
    """The cache in shuffled pages, some of which nobody has; the table says -1 and worse behind a row's length."""
    batch, length = key.shape[:2]
    columns = -(-length // page) + 1
    order = torch.randperm(batch * columns + 3, generator=torch.Generator().manual_seed(seed))
    pages = [torch.full((len(order), page, *x.shape[2:]), torch.nan, dtype=x.dtype) for x in (key, value)]
    table = torch.empty(batch, columns, dtype=torch.int32)
    for row in range(batch):
        for column in range(columns):
            used = column * page < int(lengths[row])
            index = int(order[row * columns + column])
            table[row, column] = index if used else (-1, 10**6)[column % 2]
            for store, x in zip(pages, (key, value), strict=True):
                run = x[row, column * page : (column + 1) * page]
                store[index, : len(run)] = run
    return PagedKV(*pages, table, lengths)


# Semantics


def test_a_contiguous_cache_is_its_tensors() -> None:
    key, value = tokens(3, 10)
    cache = ContiguousKV(key, value, int32(0, 4, 10))
    assert (cache.batch, cache.capacity, cache.kv_heads, cache.head_dim, cache.value_dim) == (3, 10, 2, 8, 4)
    assert cache.dtype is torch.float32 and cache.device == key.device
    assert cache.nbytes == 3 * 10 * 2 * (8 + 4) * 4 + 3 * 4
    assert torch.equal(cache.tile(2, 7)[0], key[:, 2:7]) and torch.equal(cache.tile(2, 7)[1], value[:, 2:7])
    assert cache.tile(2, 7)[0].data_ptr() == key[:, 2:].data_ptr()


def test_a_page_table_says_where_positions_lie() -> None:
    key_pages = torch.arange(6.0).view(3, 2, 1, 1)
    cache = PagedKV(key_pages, -key_pages, int32([2, 0], [1, -1]), int32(4, 2))
    assert (cache.batch, cache.capacity, cache.page) == (2, 4, 2)
    key, value = cache.tile(0, 4)
    assert key[0].flatten().tolist() == [4, 5, 0, 1] and key[1, :2].flatten().tolist() == [2, 3]
    assert torch.equal(value[0], -key[0]) and torch.equal(value[1, :2], -key[1, :2])
    assert key[1, 2:].isnan().all()  # its page is not there
    assert cache.nbytes == 2 * 6 * 4 + 4 * 4 + 2 * 4


@pytest.mark.parametrize("page", [1, 3, 16, 256])
def test_tiles_of_pages_are_those_of_the_tokens(page: int) -> None:
    key, value = tokens(4, 50)
    lengths = int32(0, 1, 31, 50)
    cache = paged(key, value, lengths, page)
    for start, stop in ((0, 50), (0, 0), (7, 8), (13, 41), (48, 50)):
        for got, want in zip(cache.tile(start, stop), (key, value), strict=True):
            for row, length in enumerate(lengths.tolist()):
                assert torch.equal(got[row, : max(0, length - start)], want[row, start : min(stop, length)])


def test_the_first_tokens_are_codes_and_the_latest_are_not() -> None:
    key, value = tokens(3, 40)
    cache = quantize_kv(ContiguousKV(key, value, int32(3, 21, 40)), "int4", group=8, residual=10)
    assert cache.quantized_lengths.tolist() == [0, 8, 24]
    got = cache.tile(0, 40)[0]
    for row, (coded, length) in enumerate(((0, 3), (8, 21), (24, 40))):
        assert torch.equal(got[row, coded:length], key[row, coded:length])
        assert coded == 0 or not torch.equal(got[row, :coded], key[row, :coded])


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_tiles_of_codes_do_not_depend_on_where_they_are_cut(format: str, page: int | None) -> None:
    key, value = tokens(3, 70, dtype=torch.float16)
    lengths = int32(5, 70, 39)
    plain = ContiguousKV(key, value, lengths) if page is None else paged(key, value, lengths, page)
    cache = quantize_kv(plain, format, group=8, residual=11)
    whole = cache.tile(0, 70)
    parts = [cache.tile(start, stop) for start, stop in ((0, 1), (1, 24), (24, 24), (24, 51), (51, 70))]
    for side in (0, 1):
        joined = torch.cat([part[side] for part in parts], 1)
        for row, length in enumerate(lengths.tolist()):
            assert torch.equal(joined[row, :length], whole[side][row, :length])
            assert joined[row, :length].isfinite().all()


def test_the_bytes_of_a_quantized_cache_are_all_it_holds() -> None:
    key, value = (x.half() for x in tokens(2, 72))
    cache = quantize_kv(ContiguousKV(key, value), "int4", group=8, residual=16)
    codes = 2 * 56 * HEADS * (DIM + VALUE_DIM) // 2
    per_channel, per_token = 2 * 7 * HEADS * DIM * 2 * 2, 2 * 56 * HEADS * 1 * 2 * 2
    window = 2 * 24 * HEADS * (DIM + VALUE_DIM) * 2
    assert cache.nbytes == codes + per_channel + per_token + window + 2 * 4
    assert cache.capacity == 56 + 16 + 7


# Codes: where they and their scales lie


@pytest.mark.parametrize(
    ("format", "numbers", "words"),
    [
        ("int8", [127.0, -127.0, 0.0, 5.0], [0x80FF, 0x8501]),
        ("fp8", [448.0, -448.0, 1.0, 0.5], [0x387E, 0x30FE]),
        ("int4", [0.0, 15.0, 1.0, 14.0, 2.0, 13.0, 3.0, 12.0], [0x3210, 0xCDEF]),
        ("int2", [0.0, 3.0] * 4 + [1.0, 2.0] * 4, [0x5500, 0xAAFF]),
    ],
)
def test_codes_lie_in_words_plane_by_plane(format: str, numbers: list[float], words: list[int]) -> None:
    """Of two words the first has the even channels and the second the odd ones, the lowest in the lowest bits."""
    x = torch.tensor(numbers).view(1, 1, 1, -1)
    made = quantize(x, format, CHANNELS, len(numbers))
    assert made.scale.item() == 1.0
    assert (made.codes.view(torch.int16).int() & 0xFFFF).flatten().tolist() == words
    assert made.shape == x.shape and torch.equal(made.dequantize(), x)


def test_words_of_a_wide_token() -> None:
    """Word w of 16 has channels w, w + 16, w + 32 and w + 48."""
    codes = torch.randint(0, 16, (1, 3, 2, 64), generator=torch.Generator().manual_seed(0))
    codes[..., :2] = torch.tensor([0, 15])
    made = quantize(codes.float(), "int4", CHANNELS, 64)
    words = made.codes.view(torch.int16).int()
    for plane in range(4):
        assert torch.equal(words >> 4 * plane & 15, codes[..., 16 * plane : 16 * (plane + 1)].int())


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_what_one_head_has_lies_in_one_place(format: str, page: int | None) -> None:
    key, value = (torch.randn(2, 64, 3, 32, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    lengths = int32(64, 64)
    plain = ContiguousKV(key, value, lengths) if page is None else paged(key, value, lengths, page)
    lengths.copy_(int32(46, 40))
    cache = quantize_kv(plain, format, group=8, residual=0)
    for _ in range(2):
        tokens_of_a_row = cache.value.codes.shape[1]
        for scale in (cache.value.scale, cache.value.zero):
            if scale is not None:
                assert scale.stride() == (12 * tokens_of_a_row, 1, 4 * tokens_of_a_row, tokens_of_a_row)
        for scale in (cache.key.scale, cache.key.zero):
            assert scale is None or scale.transpose(1, 2).is_contiguous()
        assert all(side.codes.transpose(1, 2).is_contiguous() for side in (cache.key, cache.value))
        assert cache.coding == Coding(format, 8, True, False, torch.float32, 8, True, True)
        cache.append(key[:, :9], value[:, :9])  # a block is quantised, and lies as the others do


@pytest.mark.parametrize("dim", [TOKENS, CHANNELS])
def test_what_is_quantized_is_in_order_whatever_its_shape_and_layout(dim: int) -> None:
    for shape in itertools.product((1, 2), (0, 1, 5), (1, 3), (8, 24)):
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)):
            stored = torch.randn([shape[at] for at in order], generator=torch.Generator().manual_seed(0))
            x = stored.permute([order.index(at) for at in range(4)])
            assert x.shape == shape
            for format in ("int8", "int4"):
                made = quantize(x, format, dim, 8, scale_dtype=torch.float16)
                assert made.in_order
                assert torch.equal(
                    made.dequantize(), quantize(x.contiguous(), format, dim, 8, None, torch.float16).dequantize()
                )


@pytest.mark.parametrize(("dim", "side_by_side"), [(TOKENS, 3), (CHANNELS, 1)])
def test_scales_that_lie_otherwise_are_read_but_not_in_order(dim: int, side_by_side: int) -> None:
    made = quantize(torch.randn(2, 16, 3, 32, generator=torch.Generator().manual_seed(0)), "int4", dim, 8)
    assert made.zero is not None
    scale, zero = (
        x.transpose(side_by_side, 2).contiguous().transpose(side_by_side, 2) for x in (made.scale, made.zero)
    )
    assert scale.stride(side_by_side) != 1
    for change in ({"scale": scale}, {"zero": zero}, {"scale": scale, "zero": zero}):
        other = dataclasses.replace(made, **change)
        assert made.in_order and not other.in_order
        assert torch.equal(other.dequantize(), made.dequantize())


def test_a_cache_is_in_order_if_both_sides_are() -> None:
    cache = quantize_kv(ContiguousKV(*tokens(2, 16)), "int8", group=4, residual=0, keys="token")
    assert cache.coding == Coding("int8", 4, False, False, torch.float32, 4, True, cache.coding.aligned)
    for side in ("key", "value"):
        its = getattr(cache, side)
        other = dataclasses.replace(cache, **{side: dataclasses.replace(its, scale=its.scale.contiguous())})
        assert not other.coding.in_order and torch.equal(other.tile(0, 16)[0], cache.tile(0, 16)[0])


# No synchronisation: a fake tensor has no values to read


def test_reading_and_growing_read_no_values() -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode():
        key, value = torch.empty(2, 40, 2, 8), torch.empty(2, 40, 2, 8)
        lengths = torch.empty(2, dtype=torch.int32)
        pages = torch.empty(9, 16, 2, 8), torch.empty(9, 16, 2, 8), torch.empty(2, 3, dtype=torch.int32), lengths
        for plain in (ContiguousKV(key, value, lengths), PagedKV(*pages)):
            for cache in (plain, quantize_kv(plain, "int4", group=8, residual=8)):
                assert cache.append(key[:, :3], value[:, :3]).tile(0, 20)[0].shape == (2, 20, 2, 8)
                with pytest.raises(DataDependentOutputException):
                    cache.validate()


# Refusals

KEY, VALUE = tokens(2, 16)
LENGTHS = int32(3, 16)
PAGED: dict[str, Any] = {
    "key_pages": KEY,
    "value_pages": VALUE,
    "page_table": int32([0], [1]),
    "lengths": LENGTHS,
}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"key": [1.0]}, TypeError, "key: expected a torch.Tensor; got list"),
        ({"key": quantize(KEY, "int8", TOKENS, 8)}, TypeError, r"got QuantizedTensor. Call compressor.decompress\(\)"),
        ({"value": quantize(VALUE, "int4", TOKENS, 8)}, TypeError, "or make a quantised cache: quantize_kv"),
        ({"key": KEY[0]}, ValueError, r"key: expected shape \[B, T, Hkv, D\]"),
        ({"key": KEY.int()}, TypeError, "key: expected dtype float16"),
        ({"value": VALUE.half()}, TypeError, "value: expected the dtype of key, torch.float32; got torch.float16"),
        ({"value": VALUE[:, :9]}, ValueError, "value: expected shape"),
        ({"key": KEY.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError, "a contiguous last dim"),
        ({"lengths": LENGTHS.long()}, TypeError, "lengths: expected dtype torch.int32; got torch.int64"),
        ({"lengths": LENGTHS[:1]}, ValueError, r"lengths: expected shape \[B=2\]; got \[1\]"),
        ({"lengths": LENGTHS.to("meta")}, ValueError, "lengths: expected the cache's device cpu; got meta"),
    ],
)
def test_what_is_no_contiguous_cache(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ContiguousKV(**{"key": KEY, "value": VALUE, "lengths": LENGTHS, **change})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"key_pages": torch.zeros(2, 257, 2, 8), "value_pages": torch.zeros(2, 257, 2, 8)}, ValueError, "1 to 256"),
        ({"key_pages": KEY[:0], "value_pages": VALUE[:0]}, ValueError, "at least one page"),
        ({"page_table": int32(0, 1)}, ValueError, r"page_table: expected shape \[B, max_pages\]"),
        ({"page_table": int32([], [])}, ValueError, "page_table: expected at least one page for each row"),
        ({"page_table": torch.zeros(2, 1)}, TypeError, "page_table: expected dtype torch.int32"),
        ({"lengths": None}, TypeError, "lengths: expected a torch.Tensor; got NoneType"),
        ({"lengths": int32(1, 2, 3)}, ValueError, r"lengths: expected shape \[B=2\]"),
    ],
)
def test_what_is_no_paged_cache(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PagedKV(**{**PAGED, **change})


def test_what_is_no_quantized_cache() -> None:
    plain = ContiguousKV(KEY, VALUE, LENGTHS)
    cache = quantize_kv(plain, "int8", group=4, residual=4)
    other = quantize_kv(plain, "int8", group=2, residual=4)
    four = quantize_kv(plain, "int4", group=4, residual=4)
    halves = quantize_kv(ContiguousKV(KEY.half(), VALUE.half(), LENGTHS), "int8", group=4, residual=4)

    def side(**change: Any) -> dict[str, Any]:
        return {"key": dataclasses.replace(cache.key, **change)}

    scale = cache.key.scale
    for change, error, words in (
        ({"key": KEY}, TypeError, "key: expected a QuantizedTensor; got Tensor"),
        (side(scale=scale[:, :1]), ValueError, r"key.scale: expected shape \[2, 3, 2, 8\]"),
        ({"key": dataclasses.replace(four.key, zero=None)}, TypeError, "key.zero: expected a torch.Tensor; got None"),
        (side(zero=scale), ValueError, "key.zero: expected None for int8; got a value"),
        (side(codes=cache.key.codes.int()), TypeError, "key.codes: expected dtype torch.uint8"),
        (side(format="int4", zero=scale), ValueError, r"key.codes: expected shape \[., ., 2, 4\]"),
        (side(format="fp8"), TypeError, "key.codes: expected dtype torch.float8_e4m3fn for fp8; got torch.uint8"),
        (side(format="fp8", zero=scale), ValueError, "key.zero: expected None for fp8; got a value"),
        (side(format="int2"), ValueError, "key: expected one of the formats fp8, int8, int4"),
        (side(dim=CHANNELS), ValueError, "key.scale: expected shape"),
        ({"value": other.value}, ValueError, "value: expected the key's group 4; got 2"),
        ({"key": halves.key}, TypeError, "key: expected the window's dtype torch.float32"),
        (
            {"value": dataclasses.replace(cache.value, scale=cache.value.scale.half())},
            TypeError,
            "value.scale: expected the key's dtype torch.float32; got torch.float16",
        ),
        ({"residual": 5}, ValueError, "key_window: expected 12 slots for residual 5; got 8"),
        ({"residual": True}, TypeError, "residual: expected an int"),
    ):
        with pytest.raises(error, match=words):
            dataclasses.replace(cache, **change)
    assert isinstance(dataclasses.replace(cache), QuantizedKV)


def test_tiles_that_there_are_not() -> None:
    caches = (ContiguousKV(KEY, VALUE), PagedKV(**PAGED), quantize_kv(ContiguousKV(KEY, VALUE), "int8", group=8))
    for cache in caches:
        for start, stop in ((-1, 3), (4, 3), (0, cache.capacity + 1)):
            with pytest.raises(ValueError, match="start and stop: expected 0 <= start <= stop <= the capacity"):
                cache.tile(start, stop)
        with pytest.raises(TypeError, match="stop: expected an int"):
            cache.tile(0, torch.tensor(3))  # type: ignore[arg-type]


def test_validate_reads_lengths_and_tables() -> None:
    ContiguousKV(KEY, VALUE).validate()
    for lengths, words in (
        (int32(3, 17), "from 0 to the capacity, 16; got 17 in row 1"),
        (int32(-1, 0), "-1 in row 0"),
    ):
        with pytest.raises(ValueError, match=words):
            ContiguousKV(KEY, VALUE, lengths).validate()
    table = int32([0, 5], [1, -1])
    PagedKV(**{**PAGED, "page_table": table}).validate()
    for lengths, words in ((int32(17, 0), r"got 5 at \[0, 1\]"), (int32(0, 32), r"got -1 at \[1, 1\]")):
        with pytest.raises(ValueError, match=f"page_table: expected pages from 0 to 1; {words}"):
            PagedKV(**{**PAGED, "page_table": table, "lengths": lengths}).validate()


def test_a_cache_says_in_a_line_what_it_is() -> None:
    plain = ContiguousKV(KEY, VALUE, LENGTHS)
    assert repr(plain).startswith("<ContiguousKV: 2 rows of up to ") and repr(plain).endswith("float32 on cpu>")
    assert "rows in int4, " in repr(quantize_kv(plain, "int4", group=4, residual=4))


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_an_append_compiles_whole(paged: bool) -> None:
    def cache() -> KVCache:
        store, lengths = torch.zeros(2, 2, 8, 2, 4), torch.tensor([0, 3], dtype=torch.int32)
        table = torch.tensor([[0], [1]], dtype=torch.int32)
        return PagedKV(*store, table, lengths) if paged else ContiguousKV(*store, lengths)

    compiled, plain, new = cache(), cache(), torch.randn(2, 2, 2, 4)
    torch.compile(lambda kv, x: kv.append(x, -x), fullgraph=True, backend="aot_eager")(compiled, new)
    plain.append(new, -new)
    assert all(torch.equal(*pair) for pair in zip(compiled.tensors, plain.tensors, strict=True) if pair[0] is not None)
