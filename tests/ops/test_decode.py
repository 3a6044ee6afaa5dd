"""decode_attention against the fp64 specification, row by row of the batch."""

from __future__ import annotations

import gc
import inspect
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launch_cases import same_bits, uncached
from torch import Tensor

from cpu_time import least_cpu_time
from stream_attention import (
    ContiguousKV,
    PagedKV,
    UnsupportedProblem,
    decode_attention,
    decode_workspace,
    explain_decode,
    quantize_kv,
)
from stream_attention.backends.eager.tuning import DECODE_KEYS, widened_keys
from stream_attention.backends.reference import attention as reference
from stream_attention.base.kv_layouts import KVCache
from stream_attention.dispatch import launch_cache
from stream_attention.ops.decode import _layout_of, decode_contiguous
from stream_attention_tools.testing.memory import peak_bytes

LENGTHS = (37, 0, 5, 100)


@dataclass(frozen=True)
class Rows:
    """Keys and values of each row, and the queries that stand at their end."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(key) for key in self.keys], dtype=torch.int32)


def rows(
    lengths: tuple[int, ...] = LENGTHS,
    q_len: int = 3,
    heads: tuple[int, int] = (4, 2),
    dtype: Any = torch.float64,
    value_dim: int = 8,
) -> Rows:
    """With a value dim of 16, that of the keys, torch's CPU flash op computes what is contiguous and has no softcap."""
    generator = torch.Generator().manual_seed(sum(lengths) + q_len)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Rows(
        normal(len(lengths), q_len, heads[0], 16),
        [normal(n, heads[1], 16) for n in lengths],
        [normal(n, heads[1], value_dim) for n in lengths],
    )


def contiguous(x: Rows, capacity: int = 128) -> ContiguousKV:
    """What lies behind a row's last key is NaN."""

    def padded(tensors: list[Tensor]) -> Tensor:
        room = tensors[0].new_full((len(tensors), capacity, *tensors[0].shape[1:]), torch.nan)
        for row, tensor in zip(room, tensors, strict=True):
            row[: len(tensor)] = tensor
        return room

    return ContiguousKV(padded(x.keys), padded(x.values), x.lengths)


def paged(x: Rows, page: int) -> PagedKV:
    """Pages in a random order, NaN where nothing was written, and a page table that is -1 behind a row's pages."""
    needed = [-(-len(key) // page) for key in x.keys]
    order = list(range(sum(needed) + 3))
    Random(page).shuffle(order)
    pages = [t[0].new_full((len(order), page, *t[0].shape[1:]), torch.nan) for t in (x.keys, x.values)]
    table = torch.full((len(needed), max(1, *needed) + 1), -1, dtype=torch.int32)
    for b, count in enumerate(needed):
        for n in range(count):
            table[b, n] = order.pop()
            for room, tensors in zip(pages, (x.keys, x.values), strict=True):
                part = tensors[b][n * page : (n + 1) * page]
                room[table[b, n], : len(part)] = part
    return PagedKV(*pages, table, x.lengths)


def expected(x: Rows, tree: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    slopes = options.pop("alibi_slopes", None)
    for b, (key, value) in enumerate(zip(x.keys, x.values, strict=True)):
        q_len, n = x.query.shape[1], len(key)
        mask = None
        if tree is not None:
            mask = torch.ones(q_len, n, dtype=torch.bool)
            new = min(q_len, n)
            mask[:, n - new :] = tree[b][:, q_len - new :]
            mask[: q_len - new] = False  # a query before the first position
        out, lse = reference.attention(
            x.query[b : b + 1].double(),
            key[None].double(),
            value[None].double(),
            mask=mask,
            alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b],
            **options,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (10, 0)},
    "window both ways": {"causal": False, "window": (4, 1)},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": -0.3},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.0])},
    "alibi by row": {"alibi_slopes": torch.rand(4, 4, generator=torch.Generator().manual_seed(1))},
    "sink": {"sink": torch.tensor([0.5, -3.0, 4.0, 0.0])},
    "everything": {"window": (20, 0), "softcap": 3.0, "sink": torch.ones(4), "alibi_slopes": torch.full((4,), 0.2)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("page", [None, 1, 16, 64], ids=["contiguous", "pages of 1", "of 16", "of 64"])
def test_it_is_attention_over_the_keys_of_each_row(page: int | None, name: str) -> None:
    x = rows()
    cache = contiguous(x) if page is None else paged(x, page)
    out, lse = decode_attention(x.query, cache, **OPTIONS[name], return_lse=True)
    exact, exact_lse = expected(x, **{"causal": True} | OPTIONS[name])
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-9, atol=1e-9)


KINDS = ("contiguous", "paged", "fp8", "int8", "int4", "int4 paged")


def of_kind(x: Rows, kind: str) -> KVCache:
    """The rows in a cache of this kind; of those of codes, the first 8 tokens of a row may be codes."""
    plain = paged(x, 8) if "paged" in kind else contiguous(x)
    return plain if kind in ("contiguous", "paged") else quantize_kv(plain, kind.split()[0], group=8, residual=0)


def as_stored(x: Rows, cache: KVCache) -> Rows:
    """The rows as the cache has them."""
    sides = cache.tile(0, max(len(key) for key in x.keys))
    keys, values = ([row[: len(key)] for row, key in zip(side, x.keys, strict=True)] for side in sides)
    return Rows(x.query, keys, values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (2, 3)},
        {"window": (-1, 1)},
        {"window": (0, -1)},
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.0])},
        {"window": (9, 2), "sink": torch.ones(4), "alibi_slopes": torch.full((4,), 0.2), "softcap": 2.0},
    ],
    ids=["full", "window", "right side", "left side", "alibi", "several"],
)
def test_queries_before_the_first_key_see_what_they_see_in_attention(kind: str, options: dict[str, Any]) -> None:
    """Not causal, and fewer keys than queries: the first queries stand at negative positions."""
    x = rows((2, 0, 9, 17, 1), q_len=12, dtype=torch.float32)
    cache = of_kind(x, kind)
    out, lse = decode_attention(x.query, cache, causal=False, **options, return_lse=True)
    exact, exact_lse = expected(as_stored(x, cache), causal=False, **options)
    unbounded_right = options.get("window", (-1, -1))[1] < 0
    assert exact[0, 0].any() == unbounded_right  # the first of twelve queries, of two keys
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    causal = decode_attention(x.query, cache, **options)
    assert not causal[0, :10].any() and causal[0, 10:].any()


def test_no_queries_are_no_result() -> None:
    x = rows(q_len=0)
    assert decode_attention(x.query, contiguous(x), causal=False).shape == (4, 0, 4, 8)


def test_a_row_without_keys_is_zero_and_its_lse_that_of_nothing() -> None:
    x = rows()
    out, lse = decode_attention(x.query, contiguous(x), return_lse=True)
    assert torch.equal(out[1], torch.zeros_like(out[1])) and (lse[1] == -torch.inf).all()


def test_with_a_tree_a_query_before_the_first_key_sees_nothing() -> None:
    x = rows((2, 30), q_len=4)
    tree = torch.ones(2, 4, 4, dtype=torch.bool)
    out = decode_attention(x.query, contiguous(x), tree_mask=tree, causal=False)
    torch.testing.assert_close(out, expected(x, tree)[0], rtol=1e-9, atol=1e-9)
    assert not out[0, :2].any() and out[0, 2:].any()


@pytest.mark.parametrize("causal", [True, False])
def test_a_tree_says_which_new_tokens_see_each_other(causal: bool) -> None:
    x = rows((30, 7, 4, 50), q_len=4)
    tree = torch.rand(4, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    out = decode_attention(x.query, paged(x, 8), tree_mask=tree, causal=causal)
    torch.testing.assert_close(out, expected(x, tree)[0], rtol=1e-9, atol=1e-9)


def test_without_lengths_all_keys_are_there() -> None:
    x = rows((20, 20), q_len=1)
    cache = ContiguousKV(torch.stack(x.keys), torch.stack(x.values))
    torch.testing.assert_close(decode_attention(x.query, cache), expected(x, causal=True)[0], rtol=1e-9, atol=1e-9)


def test_more_keys_than_a_tile() -> None:
    x = rows((2 * DECODE_KEYS + 5, DECODE_KEYS, 3), q_len=2)
    out = decode_attention(x.query, contiguous(x, 2 * DECODE_KEYS + 64))
    torch.testing.assert_close(out, expected(x, causal=True)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value_dim", [8, 16])
@pytest.mark.parametrize("q_len", [1, 2])
def test_errors_are_at_most_twice_those_of_dense_arithmetic(q_len: int, value_dim: int, dtype: torch.dtype) -> None:
    x = rows((300, 1000), q_len=q_len, dtype=dtype, value_dim=value_dim)
    out = decode_attention(x.query, contiguous(x, 1000))
    exact = expected(x, causal=True)[0]
    dense = [
        reference.attention(x.query[b : b + 1], key[None], value[None], causal=True, compute_dtype=dtype)[0]
        for b, (key, value) in enumerate(zip(x.keys, x.values, strict=True))
    ]
    earned = float((torch.cat(dense).double() - exact).abs().max())
    assert out.dtype is dtype
    assert float((out.double() - exact).abs().max()) <= 2 * earned


def test_memory_is_that_of_a_tile() -> None:
    """Sixteen times the keys in pages take hardly more beside the cache."""

    def peak(n: int) -> int:
        x = rows((n,), q_len=1, dtype=torch.float32)
        cache = paged(x, 16)
        return peak_bytes(lambda: decode_attention(x.query, cache))

    assert peak(32 * DECODE_KEYS) < 1.5 * peak(2 * DECODE_KEYS)


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("page", [None, 64], ids=["contiguous", "paged"])
def test_quantised_caches_are_those_of_what_they_stand_for(format: str, page: int | None) -> None:
    x = rows((300, 0, 64, 411), q_len=2, heads=(4, 2), dtype=torch.float32)
    cache = quantize_kv(contiguous(x, 512) if page is None else paged(x, page), format, group=32, residual=40)
    out, lse = decode_attention(x.query, cache, return_lse=True)
    exact, exact_lse = expected(as_stored(x, cache), causal=True)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    plain = expected(x, causal=True)[0]
    assert float((out.double() - plain).norm() / plain.norm()) < {"fp8": 0.1, "int8": 0.02, "int4": 0.25}[format]


# torch's CPU flash op


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("lengths", [LENGTHS, (60, 60, 60, 60)], ids=["ragged", "equal"])
def test_torchs_op_gives_the_attention_of_each_row(lengths: tuple[int, ...], q_len: int, name: str) -> None:
    x, options = rows(lengths, q_len=q_len, value_dim=16), OPTIONS[name]
    out, lse = decode_attention(x.query, contiguous(x), return_lse=True, **options)
    exact, exact_lse = expected(x, **({"causal": True} | options))
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_torchs_op_reads_strided_queries(dtype: torch.dtype, q_len: int) -> None:
    x = rows((40, 40), q_len=q_len, value_dim=16, dtype=dtype)
    cache = ContiguousKV(torch.stack(x.keys), torch.stack(x.values))
    spread = x.query.repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(decode_attention(spread, cache), decode_attention(x.query, cache))


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"window": (9000, 0)}, {"sink": torch.ones(4)}], ids=["plain", "window", "sink"]
)
def test_half_precision_is_widened_tile_by_tile(q_len: int, options: dict[str, Any]) -> None:
    most = widened_keys(2 * 16)
    x = rows((2 * most + 3, most, 5), q_len=q_len, dtype=torch.bfloat16, value_dim=16)
    out, lse = decode_attention(x.query, contiguous(x, 2 * most + 3), return_lse=True, **options)
    exact, exact_lse = expected(x, causal=True, **options)
    assert out.dtype is torch.bfloat16 and out.is_contiguous()
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)  # rounded once
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


def test_widened_tiles_take_little_memory() -> None:
    key, value = torch.randn(2, 1, 40_000, 8, 64).bfloat16()
    query, cache = torch.randn(1, 1, 8, 64).bfloat16(), ContiguousKV(key, value)
    peak = peak_bytes(lambda: decode_attention(query, cache))
    assert peak < key.nbytes / 5, f"{peak} bytes; the keys have {key.nbytes}, widened twice that"


def test_a_key_that_no_query_sees_may_hold_anything() -> None:
    x = rows((20, 20), value_dim=16)
    tree = torch.eye(3, dtype=torch.bool).expand(2, -1, -1).clone()
    tree[:, :, 1] = False  # the second of the new tokens, which does not see itself either
    key, value = (torch.stack(tensors) for tensors in (x.keys, x.values))
    clean = decode_attention(x.query, ContiguousKV(key, value), tree_mask=tree)
    key[:, 18] = value[:, 18] = torch.nan
    found = decode_attention(x.query, ContiguousKV(key, value), tree_mask=tree)
    torch.testing.assert_close(found, clean)
    assert found.isfinite().all()


def test_explain_says_which_caches_torchs_op_reads(capsys: pytest.CaptureFixture[str]) -> None:
    for value_dim, words in ((16, "torch's CPU flash op over the keys of each row"), (8, "plain torch, tiles of")):
        x = rows(value_dim=value_dim)
        explain_decode(x.query, contiguous(x))
        assert f"backend   eager: {words}" in capsys.readouterr().out
    explain_decode(x.query, paged(rows(value_dim=16), 16))
    assert "backend   eager: plain torch, tiles of" in capsys.readouterr().out


def test_forward_mode_takes_the_tiles() -> None:
    x = rows((30,), q_len=1, value_dim=16)
    cache, tangent = contiguous(x), torch.randn_like(x.query)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.query, tangent)
        out = torch.autograd.forward_ad.unpack_dual(decode_attention(dual, cache, backend="eager"))
    step = 1e-6
    ahead, behind = (decode_attention(x.query + sign * step * tangent, cache) for sign in (1, -1))
    torch.testing.assert_close(out.tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_vmap_over_queries_takes_the_tiles() -> None:
    x = rows((30, 7), q_len=2, value_dim=16)
    cache, queries = contiguous(x), torch.randn(3, *x.query.shape, dtype=torch.float64)
    mapped = torch.vmap(lambda query: decode_attention(query, cache, validate=False))(queries)
    torch.testing.assert_close(mapped, torch.stack([decode_attention(query, cache) for query in queries]))


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (32, 8)], ids=str)
def test_a_contiguous_cache_costs_what_it_costs_in_sdpa(heads: tuple[int, int], dtype: torch.dtype) -> None:
    query = torch.randn(1, 1, heads[0], 64).to(dtype)
    key, value = torch.randn(2, 1, 4096, heads[1], 64).to(dtype)
    cache = ContiguousKV(key, value, torch.tensor([4096], dtype=torch.int32))
    heads_first = [t.transpose(1, 2) for t in (query, key, value)]
    ours, theirs = least_cpu_time(
        20,
        lambda: decode_attention(query, cache),
        lambda: F.scaled_dot_product_attention(*heads_first, enable_gqa=heads[0] != heads[1]),
    )
    assert ours < 1.7 * theirs, f"{ours * 1e3:.2f} ms, SDPA {theirs * 1e3:.2f} ms"


def test_a_cache_that_grows_gives_the_attention_of_all_its_tokens() -> None:
    x = rows((40, 17), q_len=1)
    start = Rows(x.query, [key[:-5] for key in x.keys], [value[:-5] for value in x.values])
    cache = contiguous(start, 64)
    for n in range(-5, 0):
        cache.append(torch.stack([key[n] for key in x.keys])[:, None], torch.stack([v[n] for v in x.values])[:, None])
    torch.testing.assert_close(decode_attention(x.query, cache), expected(x, causal=True)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nan_that_is_seen_shows(which: str) -> None:
    x = rows((20, 30), q_len=1)
    target = {"query": x.query[0], "key": x.keys[0][3], "value": x.values[0][3]}[which]
    target.fill_(torch.nan)
    out, lse = decode_attention(x.query, contiguous(x), return_lse=True)
    assert out[0].isnan().all() and out[1].isfinite().all()
    assert lse[0].isnan().all() == (which != "value") and lse[1].isfinite().all()


def test_a_page_that_is_not_there_is_no_other_rows_page() -> None:
    x = rows((9, 9), q_len=1)
    cache = paged(x, 4)
    cache.page_table[1, 1] = -1
    out = decode_attention(x.query, cache, validate=False)
    assert out[1].isnan().all()
    torch.testing.assert_close(out[:1], expected(x, causal=True)[0][:1], rtol=1e-9, atol=1e-9)


def test_autocast_does_not_round_the_scores() -> None:
    x = rows(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = decode_attention(x.query, contiguous(x))
    assert torch.equal(out, decode_attention(x.query, contiguous(x)))


def test_it_compiles_whole() -> None:
    x = rows((70, 5), q_len=2, dtype=torch.float32)
    cache = contiguous(x)
    compiled = torch.compile(decode_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x.query, cache), decode_attention(x.query, cache))


def test_it_writes_where_it_is_told() -> None:
    x = rows()
    room = torch.empty(4, 3, 4, 8, dtype=torch.float64)
    out = decode_attention(x.query, contiguous(x), out=room)
    assert out is room and torch.equal(room, decode_attention(x.query, contiguous(x)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache": "none"}, "cache: expected a ContiguousKV, PagedKV or QuantizedKV; got str. To make one"),
        ({"query": torch.zeros(4, 4, 16)}, r"query: expected shape \[B, Tq, Hq, D\]; got \[4, 4, 16\]"),
        (
            {"query": torch.zeros(3, 1, 4, 16, dtype=torch.float64)},
            r"query: expected \[B=4, Tq, Hq, D=16\] to match the cache",
        ),
        ({"query": torch.zeros(4, 1, 3, 16, dtype=torch.float64)}, "query: expected a multiple of the 2 KV heads"),
        ({"query": torch.zeros(4, 1, 4, 16)}, "query: expected the cache's dtype torch.float64; got torch.float32"),
        ({"tree_mask": torch.zeros(4, 3, 3)}, "tree_mask: expected dtype torch.bool"),
        ({"tree_mask": torch.zeros(4, 3, 2, dtype=torch.bool)}, r"tree_mask: expected shape \[B=4, Tq=3, Tq=3\]"),
        (
            {"out": torch.zeros(4, 3, 4, 16, dtype=torch.float64)},
            r"out: expected torch.float64 of shape \[4, 3, 4, 8\]",
        ),
        (
            {"out": torch.zeros(1, 1, 1, 8, dtype=torch.float64).expand(4, 3, 4, 8)},
            "out: expected no overlapping elements",
        ),
        ({"window": (-5, 0)}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"sink": torch.zeros(3)}, r"sink: expected shape \[Hq=4\]"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    x = rows()
    arguments = {"query": x.query, "cache": contiguous(x)} | changed
    with pytest.raises((TypeError, ValueError), match=message):
        decode_attention(arguments.pop("query"), arguments.pop("cache"), **arguments)


def test_explaining_checks_what_a_call_would(capsys: pytest.CaptureFixture[str]) -> None:
    query, cache = torch.randn(1, 1, 2, 8), ContiguousKV(*torch.randn(2, 1, 20, 1, 8))
    wrongs: list[dict[str, Any]] = [{"softcap": -1.0}, {"scale": "x"}, {"causal": "no"}, {"window": (-5, 3)}]
    for wrong in (*wrongs, {"return_lse": 3}, {"workspace": 5}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            explain_decode(query, cache, **wrong)
    assert explain_decode(query, cache, window=(3, 0)).backend == "eager"
    assert capsys.readouterr().out.startswith("decode    B=1 Tq=1 Hq=2 Hkv=1 D=8 Dv=8 float32 on cpu, contiguous")


def test_a_backend_that_reads_no_caches_is_refused() -> None:
    query, cache = torch.randn(1, 1, 2, 8), ContiguousKV(*torch.randn(2, 1, 20, 1, 8))
    with pytest.raises(UnsupportedProblem, match="backend 'reference' does not support decoding from a KV cache"):
        decode_attention(query, cache, backend="reference")
    with pytest.raises(UnsupportedProblem, match=r"backend 'gluon' cannot decode .*\n.*supports only quantised caches"):
        decode_attention(query, cache, backend="gluon")
    with pytest.raises(UnsupportedProblem, match=r"backend 'eager' cannot decode .*\n.*leave num_splits at None"):
        decode_attention(query, cache, backend="eager", num_splits=2)


def test_a_row_that_sees_nothing_and_a_sink_that_weighs_nothing_is_0() -> None:
    cache = ContiguousKV(*torch.randn(2, 1, 20, 1, 8), torch.zeros(1, dtype=torch.int32))
    out, lse = decode_attention(torch.randn(1, 1, 2, 8), cache, sink=torch.full((2,), -torch.inf), return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


def test_a_length_beyond_the_capacity_is_the_capacity() -> None:
    key, value = torch.randn(2, 1, 8, 1, 8)
    query = torch.randn(1, 2, 2, 8)
    full, beyond = (ContiguousKV(key, value, torch.tensor([n], dtype=torch.int32)) for n in (8, 12))
    for options in ({"window": (2, 0)}, {"alibi_slopes": torch.ones(2)}):
        out = decode_attention(query, beyond, **options, validate=False)
        assert torch.equal(decode_attention(query, full, **options), out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [-1, 10**6])
def test_a_length_out_of_range_is_refused_on_a_cpu(kind: str, length: int) -> None:
    x = rows((9, 30), q_len=1, dtype=torch.float32)
    cache = of_kind(x, kind)
    assert cache.lengths is not None
    cache.lengths[1] = length
    for asked in ({}, {"validate": True}):
        with pytest.raises(ValueError, match=f"lengths: expected from 0 to the capacity, .*; got {length} in row 1"):
            decode_attention(x.query, cache, **asked)
        with pytest.raises(ValueError, match=f"got {length} in row 1"):
            explain_decode(x.query, cache, **asked)
    assert decode_attention(x.query, cache, validate=False)[0].isfinite().all()
    with pytest.raises(TypeError, match="validate: expected True, False or None; got 'yes'"):
        decode_attention(x.query, cache, validate="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["paged", "int4 paged"])
@pytest.mark.parametrize("entry", [-1, 10**6])
def test_a_page_that_does_not_exist_is_refused_on_a_cpu_unless_a_window_hides_it(kind: str, entry: int) -> None:
    x = rows((40, 30), q_len=3, dtype=torch.float32)
    cache = of_kind(x, kind)
    assert not isinstance(cache, ContiguousKV) and cache.page_table is not None
    whole = decode_attention(x.query, cache, window=(11, 0))  # of row 1 from position 16 on
    cache.page_table[1, 1] = entry
    with pytest.raises(ValueError, match=rf"page_table: expected pages from 0 to .*; got {entry} at \[1, 1\]"):
        decode_attention(x.query, cache)
    with pytest.raises(ValueError, match=rf"got {entry} at \[1, 1\]"):
        decode_attention(x.query, cache, window=(12, 0))
    assert torch.equal(decode_attention(x.query, cache, window=(11, 0)), whole)
    assert decode_attention(x.query, cache, validate=False)[1].isnan().all()


WANTED = ("query", "key", "value", "sink", "alibi_slopes")


@pytest.mark.parametrize("which", WANTED)
def test_what_requires_a_gradient_is_refused(which: str) -> None:
    key, value, query = torch.randn(2, 20, 2, 16), torch.randn(2, 20, 2, 16), torch.randn(2, 1, 4, 16)
    given = {"query": query, "key": key, "value": value, "sink": torch.zeros(4), "alibi_slopes": torch.zeros(4)}
    given[which].requires_grad_()
    cache = ContiguousKV(given["key"], given["value"])
    options = {name: given[name] for name in ("sink", "alibi_slopes")}
    name = "cache" if which in ("key", "value") else which
    for call in (decode_attention, explain_decode):
        with pytest.raises(
            ValueError, match=rf"{name}: expected requires_grad=False.* torch.no_grad\(\), or use attention\(\)"
        ):
            call(query, cache, **options)
    for without in (torch.no_grad(), torch.inference_mode()):
        with without:
            assert not decode_attention(query, cache, **options).requires_grad
    assert given[which].requires_grad and decode_workspace(query, cache).numel() == 0


def test_a_gradient_of_codes_is_refused() -> None:
    cache = quantize_kv(ContiguousKV(*torch.randn(2, 1, 64, 1, 16)), "int4", group=16, residual=0)
    assert cache.key.zero is not None
    query = torch.randn(1, 1, 2, 16)
    for tensor in (cache.value_window, cache.key.scale, cache.key.zero):
        tensor.requires_grad_()
        with pytest.raises(ValueError, match="cache: expected requires_grad=False"):
            decode_attention(query, cache)
        tensor.requires_grad_(False)
    assert decode_attention(query, cache).isfinite().all()


def test_torch_func_is_refused_a_gradient() -> None:
    cache = ContiguousKV(*torch.randn(2, 1, 20, 1, 8))
    with pytest.raises(ValueError, match="query: expected requires_grad=False"):
        torch.func.grad(lambda query: decode_attention(query, cache).sum())(torch.randn(1, 1, 2, 8))


def test_an_invariant_row_has_its_bits_in_every_batch_on_a_cpu_too() -> None:
    key, value, query = torch.randn(5, 300, 2, 16), torch.randn(5, 300, 2, 16), torch.randn(5, 2, 4, 16)
    lengths = torch.tensor([300, 7, 0, 150, 33], dtype=torch.int32)
    together = decode_attention(query, ContiguousKV(key, value, lengths), batch_invariant=True)
    for row in range(5):
        one = slice(row, row + 1)
        alone = ContiguousKV(key[one], value[one], lengths[one])
        assert torch.equal(decode_attention(query[one], alone, batch_invariant=True), together[one])


def test_a_cache_is_pickled_without_the_layout_that_it_keeps() -> None:
    cache = ContiguousKV(*torch.randn(2, 1, 20, 1, 8))
    decode_attention(torch.randn(1, 1, 2, 8), cache)
    again = pickle.loads(pickle.dumps(cache))
    assert "_layout" in cache.__dict__ and torch.equal(again.key, cache.key) and "_layout" not in again.__dict__


def test_a_negated_view_is_no_cache() -> None:
    with pytest.raises(ValueError, match="key: expected a materialised tensor; got a negated view"):
        ContiguousKV(torch._neg_view(torch.randn(1, 20, 1, 8)), torch.randn(1, 20, 1, 8))


# Calls on caches that lie as one before.


def cache_of_rows() -> ContiguousKV:
    return ContiguousKV(*torch.randn(2, 3, 20, 2, 16).half(), torch.full((3,), 9, dtype=torch.int32))


def shifted(t: Tensor) -> Tensor:
    """The same numbers, one element off the alignment."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype)
    return room[1:].view(t.shape).copy_(t)


def of_both(change: Callable[[Tensor], Tensor]) -> Callable[[ContiguousKV], ContiguousKV]:
    return lambda cache: replace(cache, key=change(cache.key), value=change(cache.value))


LIES: dict[str, Callable[[ContiguousKV], ContiguousKV]] = {
    "batch": lambda cache: ContiguousKV(*(t[:2] for t in (cache.key, cache.value, cache.lengths))),
    "slots": of_both(lambda t: t[:, :10].contiguous()),
    "slots of as many": of_both(lambda t: t[:, :10]),
    "heads": of_both(lambda t: t[:, :, :1]),
    "dtype": of_both(lambda t: t.bfloat16()),
    "key's head dim": lambda cache: replace(cache, key=cache.key[..., :8]),
    "value's head dim": lambda cache: replace(cache, value=cache.value[..., :8]),
    "key's strides": lambda cache: replace(cache, key=cache.key.transpose(1, 2).contiguous().transpose(1, 2)),
    "value's strides": lambda cache: replace(cache, value=cache.value.transpose(1, 2).contiguous().transpose(1, 2)),
    "key's alignment": lambda cache: replace(cache, key=shifted(cache.key)),
    "value's alignment": lambda cache: replace(cache, value=shifted(cache.value)),
    "no lengths": lambda cache: replace(cache, lengths=None),
    "lengths' strides": lambda cache: replace(cache, lengths=cache.lengths[:1].expand(3)),
    "lengths' alignment": lambda cache: replace(cache, lengths=shifted(cache.lengths)),
    "another class": lambda cache: replace(cache, key=torch.nn.Parameter(cache.key)),
}


@pytest.fixture(autouse=True)
def _no_calls_are_cached() -> Iterator[None]:
    launch_cache.clear()
    yield
    launch_cache.clear()


def decode_rows(cache: ContiguousKV) -> Tensor:
    """Compute a call on a cache, and compare it with one without the launch cache."""
    query = torch.ones(cache.batch, 1, 4, cache.head_dim, dtype=cache.dtype)
    out = decode_attention(query, cache)
    with uncached():
        assert same_bits(out, decode_attention(query, cache))
    return out


def test_a_new_cache_that_lies_as_one_before_adds_no_entry() -> None:
    outs = [decode_rows(cache_of_rows()) for _ in range(3)]
    assert launch_cache.size() == 1 and not torch.equal(outs[0], outs[1])
    cache = cache_of_rows()
    given = cache.key, cache.value, cache.lengths, None, 0, 0.0, 0.25
    query = torch.randn(3, 1, 4, 16).half()
    assert same_bits(decode_contiguous(query, *given), decode_attention(query, cache, scale=0.25))
    assert launch_cache.size() == 2  # the other has no scale


@pytest.mark.parametrize("change", LIES)
def test_one_that_differs_in_anything_is_another_entry(change: str) -> None:
    first, other = cache_of_rows(), LIES[change](cache_of_rows())
    decode_rows(first)
    with torch.no_grad():
        decode_rows(other)
    assert launch_cache.size() == (1 if change == "another class" else 2)
    same, found = _layout_of(cache_of_rows())[1:], _layout_of(other)[1:]
    assert _layout_of(first)[1:] == same != found


def test_a_tensor_that_is_replaced_is_noticed() -> None:
    cache = cache_of_rows()
    first = decode_rows(cache)
    cache.key.data = LIES["key's strides"](cache_of_rows()).key
    second = decode_rows(cache)
    object.__setattr__(cache, "value", shifted(-cache.value))
    assert not torch.equal(first, second) and torch.equal(decode_rows(cache), -second)
    assert launch_cache.size() == 3


def test_cached_calls_keep_no_tensor_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "LIMIT", 3)
    cache, query = cache_of_rows(), torch.randn(3, 1, 4, 16).half()
    watched = [weakref.ref(one) for one in (cache, cache.key, cache.value, cache.lengths, query)]
    sizes = []
    for n in range(5):
        decode_attention(query, cache, window=(n, 0))
        sizes.append(launch_cache.size())
    assert sizes == [1, 2, 3, 3, 3]
    del cache, query
    gc.collect()
    assert [reference() for reference in watched] == [None] * 5


def test_values_are_looked_at_in_cached_calls_on_a_cpu() -> None:
    cache = cache_of_rows()
    decode_rows(cache)
    assert cache.lengths is not None
    cache.lengths[1] = 21
    query = torch.ones(3, 1, 4, 16).half()
    for asked in (None, True):
        with pytest.raises(ValueError, match="lengths: expected from 0 to the capacity"):
            decode_attention(query, cache, validate=asked)
    with pytest.raises(TypeError, match="validate: expected True, False or None"):
        decode_attention(query, cache, validate=0)  # type: ignore[call-overload]
    assert decode_attention(query, cache, validate=False).isfinite().all() and launch_cache.size() == 1


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("is_causal", r"decode_attention\(\): `is_causal` is called `causal` here \(aligned bottom-right\)"),
        ("window_size", r"decode_attention\(\): `window_size` is called `window` here"),
        ("attn_mask", r"decode_attention\(\) got an unexpected keyword argument 'attn_mask'"),  # no counterpart
    ],
)
def test_keywords_of_others_are_refused_with_their_name_here(keyword: str, words: str) -> None:
    cache, query = cache_of_rows(), torch.randn(3, 1, 4, 16).half()
    with pytest.raises(TypeError, match=words):
        decode_attention(query, cache, **{keyword: True})
    with pytest.raises(TypeError, match=r"takes 2 positional arguments, query, cache; got 3. .*as in causal=False"):
        decode_attention(query, cache, False)  # type: ignore[call-overload]
    assert "foreign" not in inspect.signature(decode_attention).parameters


def test_keys_before_every_window_are_neither_read_nor_computed() -> None:
    """On a CPU: 2**26 keys of one memory, of which a query sees four. All of them would take 12 s."""
    key = torch.randn(1, 1, 1, 16).expand(1, 1 << 26, 1, 16)
    query = torch.randn(1, 1, 2, 16)
    started = time.perf_counter()
    out = decode_attention(query, ContiguousKV(key, key), window=(3, 0))
    assert time.perf_counter() - started < 3.0
    torch.testing.assert_close(out, reference.attention(query, key[:, :4], key[:, :4])[0].float())


def test_explain_names_foreign_keywords_too() -> None:
    cache = ContiguousKV(*torch.randn(2, 1, 8, 2, 16))
    with pytest.raises(TypeError, match="`is_causal` is called `causal` here"):
        explain_decode(torch.randn(1, 1, 2, 16), cache, is_causal=True)
