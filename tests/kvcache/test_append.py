"""Caches that grow: each against a plain list of the tokens of every row."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.base.kv_layouts import ContiguousKV, KVCache, PagedKV, QuantizedKV, Rotary
from stream_attention.kvcache import quantize_kv

HEADS, DIM, VALUE_DIM = 2, 8, 4
Lists = list[tuple[Tensor, Tensor]]


def tokens(batch: int, n: int, draw: random.Random) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    key = torch.randn(batch, n, HEADS, DIM, generator=generator)
    return key, torch.randn(batch, n, HEADS, VALUE_DIM, generator=generator)


def contiguous(lengths: list[int], capacity: int) -> ContiguousKV:
    batch = len(lengths)
    stores = (torch.full((batch, capacity, HEADS, dim), torch.nan) for dim in (DIM, VALUE_DIM))
    return ContiguousKV(*stores, torch.tensor(lengths, dtype=torch.int32))


def paged(lengths: list[int], capacity: int, page: int, draw: random.Random) -> PagedKV:
    batch, columns = len(lengths), -(-capacity // page)
    order = draw.sample(range(batch * columns + 5), batch * columns)
    stores = (torch.full((batch * columns + 5, page, HEADS, dim), torch.nan) for dim in (DIM, VALUE_DIM))
    table = torch.tensor(order, dtype=torch.int32).view(batch, columns)
    return PagedKV(*stores, table, torch.tensor(lengths, dtype=torch.int32))


def fill(cache: ContiguousKV | PagedKV, lists: Lists) -> None:
    """Write the rows' tokens by plain indexing."""
    for row, sides in enumerate(lists):
        for t in range(len(sides[0])):
            for store, side in zip(_stores(cache), sides, strict=True):
                _slot(cache, store, row, t)[:] = side[t]


def _stores(cache: ContiguousKV | PagedKV) -> tuple[Tensor, Tensor]:
    return (cache.key, cache.value) if isinstance(cache, ContiguousKV) else (cache.key_pages, cache.value_pages)


def _slot(cache: ContiguousKV | PagedKV, store: Tensor, row: int, t: int) -> Tensor:
    if isinstance(cache, ContiguousKV):
        return store[row, t]
    return store[int(cache.page_table[row, t // cache.page]), t % cache.page]


def grown(lists: Lists, key: Tensor, value: Tensor) -> Lists:
    return [(torch.cat([k, key[b]]), torch.cat([v, value[b]])) for b, (k, v) in enumerate(lists)]


def assert_holds(cache: KVCache, lists: Lists) -> None:
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [len(key) for key, _ in lists]
    got = cache.tile(0, max(len(key) for key, _ in lists))
    for row, sides in enumerate(lists):
        for one, want in zip(got, sides, strict=True):
            assert torch.equal(one[row, : len(want)], want)


def start(draw: random.Random, batch: int, most: int) -> tuple[list[int], Lists]:
    lengths = [draw.choice((0, draw.randint(0, most))) for _ in range(batch)]
    return lengths, [(key[0], value[0]) for key, value in (tokens(1, n, draw) for n in lengths)]


# Semantics


def test_new_tokens_stand_behind_those_of_their_row() -> None:
    key = torch.zeros(2, 4, 1, 1)
    lengths = torch.tensor([0, 2], dtype=torch.int32)
    cache = ContiguousKV(key, torch.zeros(2, 4, 1, 1), lengths)
    new = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(2, 2, 1, 1)
    assert cache.append(new, -new) is cache
    assert key[..., 0, 0].tolist() == [[1, 2, 0, 0], [0, 0, 3, 4]] and torch.equal(cache.value, -key)
    assert cache.lengths is lengths and lengths.tolist() == [2, 4]


# Agreement with lists


@pytest.mark.parametrize("seed", range(12))
def test_plain_caches_hold_what_was_appended(seed: int) -> None:
    draw = random.Random(seed)
    lengths, lists = start(draw, draw.randint(1, 5), 20)
    capacity = 20 + 5 * 16
    page = draw.choice((1, 2, 5, 16, 64, 256))
    for cache in (contiguous(lengths, capacity), paged(lengths, capacity, page, draw)):
        fill(cache, lists)
        now = lists
        for _ in range(5):
            key, value = tokens(len(lengths), draw.choice((1, draw.randint(0, 16))), draw)
            cache.append(key, value, validate=draw.random() < 0.5)
            now = grown(now, key, value)
            assert_holds(cache, now)
        for store in _stores(cache):  # nothing was written elsewhere
            held = sum(len(side) for side, _ in now)
            assert store.isnan().sum() == (store.shape[0] * store.shape[1] - held) * HEADS * store.shape[3]


@pytest.mark.parametrize("seed", range(24))
def test_a_quantized_cache_that_grew_is_one_made_at_once(seed: int) -> None:
    """Bit for bit, whatever the steps it grew by: what is stored is not quantised again."""
    draw = random.Random(seed)
    lengths, lists = start(draw, draw.randint(1, 4), 30)
    group, residual = draw.choice((1, 4, 8)), draw.choice((0, 3, 8, 20))
    page = draw.choice((8, 16))
    options: dict[str, Any] = {"group": group, "residual": residual}
    if draw.random() < 0.4:
        options |= {"keys": draw.choice(("channel", "token")), "values": draw.choice(("channel", "token"))}
    format, many = draw.choice(("fp8", "int8", "int4")), draw.random() < 0.2
    capacity = 30 + 6 * (40 if many else 16)
    for plain in (contiguous(lengths, capacity), paged(lengths, capacity, page, draw)):
        fill(plain, lists)
        cache, now = quantize_kv(plain, format, **options), lists
        for _ in range(6):
            key, value = tokens(len(lengths), draw.choice((1, draw.randint(0, 40 if many else 16))), draw)
            cache.append(key, value, validate=draw.random() < 0.5)
            now = grown(now, key, value)
            fill(plain, now)
            plain.lengths.copy_(torch.tensor([len(side) for side, _ in now]))  # type: ignore[union-attr]
            assert_same_tokens(cache, quantize_kv(plain, format, **options))
            for row, sides in enumerate(now):
                behind = int(cache.quantized_lengths[row])
                for got, want in zip(cache.tile(0, len(sides[0])), sides, strict=True):
                    assert torch.equal(got[row, behind:], want[behind:])


def assert_same_tokens(cache: QuantizedKV, other: QuantizedKV) -> None:
    assert torch.equal(cache.lengths, other.lengths)
    longest = int(cache.lengths.max())
    for got, want in zip(cache.tile(0, longest), other.tile(0, longest), strict=True):
        for row, length in enumerate(cache.lengths.tolist()):
            assert torch.equal(got[row, :length], want[row, :length])


def test_pages_that_are_given_to_a_row_later() -> None:
    draw = random.Random(0)
    whole = paged([0, 0], 64, 8, draw)
    given, table = whole.page_table.clone(), whole.page_table.fill_(-1)
    cache = quantize_kv(whole, "int8", group=8, residual=4)
    now: Lists = [(key[0], value[0]) for key, value in (tokens(1, 0, draw) for _ in range(2))]
    for step in range(50):
        table[:, step // 8] = given[:, step // 8]
        key, value = tokens(2, 1, draw)
        whole.append(key, value, validate=True)
        cache.append(key, value, validate=True)
        now = grown(now, key, value)
    assert_holds(whole, now)
    assert_same_tokens(cache, quantize_kv(whole, "int8", group=8, residual=4))


def test_pages_that_the_table_names_behind_a_length_are_not_touched() -> None:
    draw = random.Random(2)
    plain = paged([24, 0, 9], 32, 8, draw)
    plain.page_table[1] = plain.page_table[0]  # left from a row before
    plain.page_table[2, 2:] = plain.page_table[0, 2:]
    fill(plain, [(key[0], value[0]) for key, value in (tokens(1, n, draw) for n in (24, 0, 9))])
    caches = [quantize_kv(plain, format, group=8, residual=0) for format in ("int4", "fp8")]
    for cache in caches:
        was = [one[0].clone() for one in cache.tile(0, 24)]
        cache.append(*tokens(3, 3, draw))
        for one, before in zip(cache.tile(0, 24), was, strict=True):
            assert torch.equal(one[0], before)


def test_a_row_that_starts_again() -> None:
    draw = random.Random(1)
    cache = quantize_kv(contiguous([0, 0], 60), "int4", group=4, residual=6)
    cache.append(*tokens(2, 40, draw))
    first = [one[0].clone() for one in cache.tile(0, 40)]
    cache.lengths[1] = 0
    key, value = tokens(2, 5, draw)
    cache.append(key, value)
    assert cache.lengths.tolist() == [45, 5]
    got = cache.tile(0, 45)
    assert torch.equal(got[0][1, :5], key[1]) and torch.equal(got[1][1, :5], value[1])
    for one, was in zip(got, first, strict=True):
        assert torch.equal(one[0, :32], was[:32]) and not torch.equal(one[0, :40], was)  # a block more is codes


# Rotary embedding


def turned(key: Tensor, positions: Tensor, inverse: Tensor, interleaved: bool) -> Tensor:
    """In fp64, pair by pair, as complex numbers."""
    out, pairs = key.double().clone(), len(inverse)
    angle = positions.double()[..., None] * inverse  # [B, n, pairs]
    for c in range(pairs):
        x, y = (2 * c, 2 * c + 1) if interleaved else (c, c + pairs)
        turn = torch.polar(torch.ones_like(angle[..., c]), angle[..., c])[..., None]
        z = torch.complex(key[..., x].double(), key[..., y].double()) * turn
        out[..., x], out[..., y] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 2, 1])
def test_new_keys_are_turned_by_the_position_they_are_written_to(pairs: int, interleaved: bool) -> None:
    draw = random.Random(pairs)
    lengths = [0, 7, 30]
    inverse = 100.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.arange(64, dtype=torch.float64)[:, None] * inverse
    rotary = Rotary(angles.cos().float(), angles.sin().float(), interleaved)
    plain = contiguous(lengths, 64)
    caches = (plain, paged(lengths, 64, 4, draw), quantize_kv(contiguous(lengths, 64), "int8", group=4, residual=16))
    key, value = tokens(3, 6, draw)
    want = turned(key, torch.tensor(lengths)[:, None] + torch.arange(6), inverse, interleaved)
    for cache in caches:
        cache.append(key, value, rotary=rotary, validate=True)
        got_keys, got_values = cache.tile(0, 40)
        for row, length in enumerate(lengths):
            got = got_keys[row, length : length + 6]
            torch.testing.assert_close(got.double(), want[row], rtol=0, atol=5e-6)
            assert torch.equal(got[..., 2 * pairs :], key[row, ..., 2 * pairs :])
            assert torch.equal(got_values[row, length : length + 6], value[row])


def test_rotated_keys_are_rounded_once() -> None:
    key, value = (x.bfloat16() for x in tokens(1, 16, random.Random(0)))
    angles = torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cache = ContiguousKV(torch.zeros_like(key), torch.zeros_like(value), torch.zeros(1, dtype=torch.int32))
    cache.append(key, value, rotary=Rotary(angles.cos(), angles.sin()))
    positions = torch.arange(16)[None]
    want = turned(key, positions, torch.tensor([1.0, 0.3, 0.1, 0.03]).double(), False)
    assert ((cache.key.double() - want).abs() <= want.abs() * 2.0**-8 * 1.01 + 1e-6).all()


# Rows without room


@pytest.mark.parametrize("kind", ["contiguous", "paged", "no page", "quantized", "quantized pages"])
@pytest.mark.parametrize("n", [1, 6])
def test_what_has_no_room_is_dropped_and_harms_no_other_row(kind: str, n: int) -> None:
    draw = random.Random(n)
    lengths, capacity = [16, 3, 14], 16
    lists = [(key[0], value[0]) for key, value in (tokens(1, length, draw) for length in lengths)]
    plain = contiguous(lengths, capacity) if kind in ("contiguous", "quantized") else paged(lengths, capacity, 4, draw)
    fill(plain, lists)
    if kind == "no page":
        assert isinstance(plain, PagedKV)
        plain.page_table[2, 3] = -1  # positions 12 to 15 of the last row
    cache: KVCache = plain
    if kind.startswith("quantized"):
        cache = quantize_kv(plain, "int8", group=4, residual=2)
        capacity = cache.capacity
        assert capacity >= 16
        while int(cache.lengths.max()) < capacity:
            new = tokens(3, 1, draw)
            lists = grown(lists, *new)
            cache.append(*new)
        lengths = cache.lengths.tolist()
    before = cache.tile(0, capacity)
    before = before[0].clone(), before[1].clone()
    kept = cache.quantized_lengths.tolist() if isinstance(cache, QuantizedKV) else lengths
    key, value = tokens(3, n, draw)
    for asked in ({"validate": True}, {}):  # on a CPU without being asked
        with pytest.raises(ValueError, match=r"in row|page_table"):
            cache.append(key, value, **asked)
    assert cache.lengths is not None and cache.lengths.tolist() == lengths
    for was, now in zip(before, cache.tile(0, capacity), strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num())
    cache.append(key, value, validate=False)
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [min(length + n, capacity) for length in lengths]
    after = cache.tile(0, capacity)
    coded = [0] * 3 if not isinstance(cache, QuantizedKV) else cache.quantized_lengths.tolist()
    for was, now, new, side in zip(before, after, (key, value), (0, 1), strict=True):
        for row in range(3):
            if kind == "no page" and row == 2:
                assert torch.equal(now[row, :12], lists[row][side][:12])
                continue
            want = torch.cat([lists[row][side], new[row]])[:capacity]
            assert torch.equal(now[row, coded[row] : len(want)], want[coded[row] :])
            assert torch.equal(now[row, : kept[row]], was[row, : kept[row]])


def test_a_full_batch_and_an_empty_call_write_nothing() -> None:
    draw = random.Random(0)
    cache = contiguous([4, 4], 4)
    fill(cache, [(key[0], value[0]) for key, value in (tokens(1, 4, draw) for _ in range(2))])
    was = cache.key.clone()
    cache.append(*tokens(2, 3, draw), validate=False)
    cache.append(*tokens(2, 0, draw))
    assert torch.equal(cache.key, was) and cache.lengths is not None and cache.lengths.tolist() == [4, 4]
    empty = contiguous([0, 0], 0).append(*tokens(2, 0, draw))
    assert empty.capacity == 0 and empty.lengths is not None and empty.lengths.tolist() == [0, 0]


def test_pages_that_are_read_no_more_may_be_gone() -> None:
    """As those before a window: an append looks at the pages that it writes to."""
    draw = random.Random(0)
    plain = paged([0, 0], 64, 8, draw)
    for cache in (plain, quantize_kv(plain, "int8", group=8, residual=0)):
        assert isinstance(cache, (PagedKV, QuantizedKV)) and cache.page_table is not None
        given = cache.page_table.clone()
        cache.append(*tokens(2, 20, draw))
        cache.page_table[:, 0] = -1
        cache.append(*tokens(2, 5, draw))
        assert cache.lengths is not None and cache.lengths.tolist() == [25, 25]
        cache.validate(first=torch.tensor([8, 12]))
        with pytest.raises(ValueError, match=r"page_table: expected pages from 0 to .* got -1 at \[1, 0\]"):
            cache.validate(first=torch.tensor([8, 7]))
        for wrong in (torch.tensor([8]), torch.tensor([8.0, 8.0])):
            with pytest.raises(ValueError, match=r"first: expected integers of shape \[B=2\]"):
                cache.validate(first=wrong)
        cache.page_table.copy_(given)


# Refusals


def of_every_kind(lengths: Tensor) -> list[KVCache]:
    """Caches of two rows of 16 slots that are 0, with these lengths."""
    stores = [torch.zeros(2, 16, HEADS, dim) for dim in (DIM, VALUE_DIM)]
    pages = [torch.zeros(8, 4, HEADS, dim) for dim in (DIM, VALUE_DIM)]
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    made: list[KVCache] = [ContiguousKV(*stores, lengths), PagedKV(*pages, table, lengths)]
    return made + [replace(quantize_kv(one, "int8", group=4, residual=4), lengths=lengths) for one in made]


@pytest.mark.parametrize("how", ["expanded", "inference"])
def test_lengths_that_cannot_be_advanced_are_refused_before_anything_is_written(how: str) -> None:
    with torch.inference_mode(how == "inference"):
        lengths = torch.zeros(2, dtype=torch.int32)
    if how == "expanded":
        lengths = lengths[:1].expand(2)
    words = {"expanded": "no overlapping elements; got an expanded", "inference": "writable tensor; got one made"}
    for cache in of_every_kind(lengths):
        key, value = tokens(2, 1, random.Random(0))
        with pytest.raises(ValueError, match=f"lengths: expected .*{words[how]}.* Pass a copy"):
            cache.append(key, value)
        assert not any(side.any() for side in cache.tile(0, 16)) and not lengths.any()
        replace(cache, lengths=lengths.clone(memory_format=torch.contiguous_format)).append(key, value)
        assert any(side.any() for side in cache.tile(0, 1)) or isinstance(cache, QuantizedKV)
    with torch.inference_mode():
        for cache in of_every_kind(torch.zeros(2, dtype=torch.int32)):
            cache.append(*tokens(2, 1, random.Random(0)))


def test_stores_of_rows_that_share_memory_are_refused() -> None:
    key, value = torch.zeros(2, 16, HEADS, DIM), torch.zeros(1, 16, HEADS, VALUE_DIM).expand(2, -1, -1, -1)
    lengths = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="value: expected no overlapping elements; got an expanded tensor"):
        ContiguousKV(key, value, lengths).append(*tokens(2, 1, random.Random(0)))
    assert not key.any() and not lengths.any()
    table = torch.zeros(1, 2, dtype=torch.int32)  # one row alone, and lengths of one element, expanded or not
    pages = (torch.zeros(1, 4, HEADS, dim) for dim in (DIM, VALUE_DIM))
    cache = PagedKV(*pages, table.expand(1, -1), lengths[:1].expand(1))
    assert cache.append(*tokens(1, 1, random.Random(0))).lengths.tolist() == [1]


@pytest.mark.parametrize("lengths", [[-1, 3], [3, 17]], ids=str)
def test_lengths_out_of_range_are_refused_on_a_cpu(lengths: list[int]) -> None:
    bad = next(n for n in lengths if n != 3)
    for cache in of_every_kind(torch.zeros(2, dtype=torch.int32)):
        assert cache.lengths is not None
        beyond = torch.tensor([n if n <= 3 else cache.capacity + 1 for n in lengths])
        cache.lengths.copy_(beyond)
        row = lengths.index(bad)
        with pytest.raises(ValueError, match=rf"lengths: expected from 0 to the capacity, .* got .* in row {row}"):
            cache.append(*tokens(2, 0, random.Random(0)))
    with pytest.raises(TypeError, match="validate: expected True, False or None; got 1"):
        cache.append(*tokens(2, 0, random.Random(0)), validate=1)  # type: ignore[arg-type]


def test_tokens_that_do_not_fit_the_cache() -> None:
    cache = contiguous([1, 2], 8)
    key, value = tokens(2, 1, random.Random(0))
    with pytest.raises(ValueError, match="lengths: expected an int32 tensor"):
        ContiguousKV(cache.key, cache.value).append(key, value)
    for new, error, words in (
        ((key[:1], value), ValueError, r"key: expected shape \[2, n, 2, 8\]; got \[1, 1, 2, 8\]"),
        ((key, key), ValueError, r"value: expected shape \[2, n, 2, 4\]"),
        ((key, value[:, :0]), ValueError, "value: expected as many tokens as key, 1; got 0"),
        ((key.half(), value), TypeError, "key: expected the cache's dtype torch.float32"),
        ((key, value.to("meta")), ValueError, "value: expected the cache's device cpu"),
    ):
        with pytest.raises(error, match=words):
            cache.append(*new)
    table = torch.zeros(8, 4)
    for rotary, error, words in (
        ((table, table), TypeError, r"rotary: expected a Rotary"),
        (
            Rotary(torch.zeros(8, 8), torch.zeros(8, 8)),
            ValueError,
            "at most D/2 = 4 columns; got 8. The table has one column",
        ),
        (Rotary(table, table[:4]), ValueError, "rotary.sin: expected shape"),
        (Rotary(table.int(), table), TypeError, "rotary.cos: expected a floating dtype"),
    ):
        with pytest.raises(error, match=words):
            cache.append(key, value, rotary=rotary)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the rotary table's positions, 2; got 2 in row 1, with 1 to append"):
        cache.append(key, value, rotary=Rotary(table[:2], table[:2]))
    with pytest.raises(ValueError, match="key: expected at most 8 tokens, the capacity of a row; got 9"):
        cache.append(*tokens(2, 9, random.Random(0)))
    with pytest.raises(ValueError, match="the capacity, 8; got 2 in row 1, with 7 to append"):
        cache.append(*tokens(2, 7, random.Random(0)), validate=True)
    assert cache.lengths is not None and cache.lengths.tolist() == [1, 2] and cache.key.isnan().all()


@pytest.mark.parametrize(
    ("table", "lengths", "n", "words"),
    [
        ([[0, 1], [0, 2]], [4, 4], 1, None),  # a page that is full is shared to read
        ([[0, 1], [0, 2]], [4, 4], 0, None),
        ([[0, 1], [2, 1]], [4, 4], 0, None),  # behind the lengths
        ([[0, 1], [2, 1]], [2, 4], 1, None),
        ([[0, 1], [0, 2]], [1, 1], 0, None),
        ([[0, 1], [0, 2]], [1, 1], 1, r"0 at \[0, 0\] and \[1, 0\]"),
        ([[0, 1], [0, 2]], [4, 3], 1, r"0 at \[0, 0\] and \[1, 0\]"),  # full for one, not for the other
        ([[0, 1], [2, 1]], [3, 4], 2, r"1 at \[0, 1\] and \[1, 1\]"),
        ([[0, 0], [1, 2]], [4, 0], 1, r"0 at \[0, 0\] and \[0, 1\]"),  # a row with itself
    ],
)
@pytest.mark.parametrize("coded", [False, True])
def test_two_rows_that_would_write_to_one_page(
    coded: bool, table: list[list[int]], lengths: list[int], n: int, words: str | None
) -> None:
    stores = (torch.zeros(3, 4, HEADS, dim) for dim in (DIM, VALUE_DIM))
    held = torch.tensor(lengths, dtype=torch.int32)
    cache: KVCache = PagedKV(*stores, torch.tensor(table, dtype=torch.int32), held)
    if coded:
        cache = quantize_kv(cache, "int8", group=1, residual=0)
    new = tokens(2, n, random.Random(0))
    cache.validate()
    if words is None:
        cache.append(*new, validate=True)
    else:
        with pytest.raises(ValueError, match=f"page_table: expected exclusive pages for .* got page {words}"):
            cache.append(*new, validate=True)
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [length + (0 if words else n) for length in lengths]


def test_the_window_of_a_quantized_row_is_its_own() -> None:
    """Tokens that stay in the window touch no page; the block that becomes due does."""
    stores = (torch.zeros(2, 8, HEADS, dim) for dim in (DIM, VALUE_DIM))
    table, lengths = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    cache = quantize_kv(PagedKV(*stores, table, lengths), "int8", group=4, residual=4)
    cache.append(*tokens(2, 7, random.Random(0)), validate=True)
    with pytest.raises(ValueError, match=r"got page 0 at \[0, 0\] and \[1, 0\]. Shared pages are read-only"):
        cache.append(*tokens(2, 1, random.Random(0)), validate=True)
