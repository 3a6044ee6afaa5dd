"""The decode kernels in Triton's interpreter, on the CPU: what they compute, for every kind of cache."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

from decode_problems import (
    BF16,
    F16,
    F32,
    Codes,
    DecodeCase,
    check,
    compare,
    compare_plain,
    in_some_size,
    make,
    rows_of,
    same_bits,
    template_for,
)
from work_kernels import splits_by_length

from stream_attention import (
    ContiguousKV,
    PagedKV,
    decode_attention,
    decode_workspace,
    explain_decode,
    quantize_kv,
)
from stream_attention.base.errors import UnsupportedProblem
from stream_attention.base.kv_layouts import KVCache
from stream_attention.dispatch import launch_cache
from stream_attention.dispatch.plan import forget_plans
from stream_attention.gpu import decode_tuning
from stream_attention.gpu.decode_tuning import INVARIANT_KEYS

# An empty row takes log2(0) and infinities meet in products, on the way to a result that does not hold them.
pytestmark = pytest.mark.filterwarnings(
    "ignore:divide by zero encountered in log2:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:All-NaN slice encountered:RuntimeWarning",
)

NAN, INF = math.nan, math.inf


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decode(query: Tensor, cache: KVCache, **options: Any) -> Any:
    return decode_attention(query, cache, **options, backend="triton")


def workspace_of(query: Tensor, cache: KVCache, **options: Any) -> Tensor:
    return decode_workspace(query, cache, **options, backend="triton")


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What it means


def test_weights_are_the_odds_of_the_scores() -> None:
    query = torch.ones(1, 1, 1, 32)
    key = torch.tensor([0.0, math.log(3.0), NAN]).view(1, 3, 1, 1).repeat(1, 1, 1, 32)
    value = torch.tensor([0.0, 8.0, NAN]).view(1, 3, 1, 1).repeat(1, 1, 1, 32)
    out, lse = decode(query, ContiguousKV(key, value, int32(2)), scale=1 / 32, return_lse=True)
    torch.testing.assert_close(out.flatten(), torch.full((32,), 6.0))
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(4.0)]))


@pytest.mark.parametrize("num_splits", [None, 2])
def test_a_row_that_sees_nothing_is_zero_and_its_lse_is_its_sink_or_that_of_nothing(num_splits: int | None) -> None:
    case = DecodeCase(lengths=(0, 1, 9), capacity=40, Tq=3)
    query, cache, _ = make(case)
    for sink in (None, normal(case.Hq)):
        out, lse = decode(query, cache, sink=sink, num_splits=num_splits, return_lse=True)
        nothing = torch.full((case.Hq,), -INF) if sink is None else sink
        assert not out[0].any() and not out[1, :2].any()  # a row of one token has one query that stands in it
        assert torch.equal(lse[0], nothing[:, None].expand(-1, 3))
        assert torch.equal(lse[1, :, :2], nothing[:, None].expand(-1, 2))
        assert out[1, 2].any() and out[2].isfinite().all() and lse[2].isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_tree_that_is_a_chain_is_causal(num_splits: int) -> None:
    query, cache, _ = make(DecodeCase(lengths=(70, 3), Tq=3))
    chain = torch.ones(3, 3, dtype=torch.bool).tril().expand(2, 3, 3)
    by_tree, causal = (decode(query, cache, tree_mask=tree, num_splits=num_splits) for tree in (chain, None))
    assert same_bits(by_tree, causal)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("page", [None, 16], ids=["contiguous", "paged"])
def test_a_new_token_that_a_tree_shows_to_nobody_may_be_nan(page: int | None, num_splits: int) -> None:
    case = replace(DecodeCase(lengths=(40, 35)), Tq=3, page=page, num_splits=num_splits)
    query, cache, _ = make(case)
    tree = torch.ones(2, 3, 3, dtype=torch.bool)
    tree[:, :, 1] = False
    expected = decode(query, cache, tree_mask=tree, num_splits=num_splits)
    cache.lengths.sub_(2)  # type: ignore[union-attr]
    cache.append(*torch.full((2, 2, 1, 1, 32), NAN))
    cache.lengths.add_(1)  # type: ignore[union-attr]
    assert expected.isfinite().all() and same_bits(
        decode(query, cache, tree_mask=tree, num_splits=num_splits), expected
    )


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_nan_that_is_seen_shows(which: str, num_splits: int) -> None:
    query, key, value = normal(2, 1, 2, 32), normal(2, 50, 1, 32, seed=1), normal(2, 50, 1, 32, seed=2)
    {"query": query[0], "key": key[0, 3], "value": value[0, 3]}[which].fill_(NAN)
    out, lse = decode(query, ContiguousKV(key, value), num_splits=num_splits, return_lse=True)
    assert out[0].isnan().all() and out[1].isfinite().all()
    assert lse[0].isnan().all() == (which != "value") and lse[1].isfinite().all()


@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_inf_in_codes_that_are_seen_shows(format: str, side: str, bad: float) -> None:
    """All of its group is NaN; a window that hides the group hides that."""
    sides = {"key": normal(2, 80, 1, 32, seed=1, dtype=BF16), "value": normal(2, 80, 1, 32, seed=2, dtype=BF16)}
    query = normal(2, 1, 2, 32, dtype=BF16)
    clean, found, clean_hidden, hidden = [], [], [], []
    for outs, outs_hidden in ((clean, clean_hidden), (found, hidden)):
        cache = quantize_kv(ContiguousKV(**sides), format, group=32, residual=8)
        for num_splits in (None, 3):
            outs.append(decode(query, cache, num_splits=num_splits))
            outs_hidden.append(decode(query, cache, num_splits=num_splits, window=(47, 0)))
        sides[side][0, 21, 0, 5] = bad  # one of the block from 0 to 31
    for one, other in zip(found, clean, strict=True):
        assert one[0].isnan().all() and same_bits(one[1], other[1])
    assert all(map(same_bits, hidden, clean_hidden))


# Agreement with fp64, within what is earned

PLAIN = DecodeCase()
HEADS = replace(PLAIN, Hq=4, Hkv=2)
SPLIT = replace(PLAIN, num_splits=3)
FEW_KEYS = replace(PLAIN, Tq=7, causal=False, lengths=(2, 0, 9, 7, 1))
INT8 = replace(PLAIN, dtype=BF16, codes=Codes("int8", group=16, residual=8))
EVERYTHING: dict[str, Any] = {
    "Hq": 4,
    "Hkv": 2,
    "Tq": 2,
    "window": (45, 1),
    "alibi": "BH",
    "sink": True,
    "softcap": 1.5,
    "scale": 0.3,
    "num_splits": 2,
    "workspace": True,
}
CASES: dict[str, DecodeCase] = {
    "plain": PLAIN,
    "without lengths": replace(PLAIN, lengths=(33, 33), capacity=33, counted=False),
    "no batch": replace(PLAIN, lengths=()),
    "nothing but empty rows": replace(PLAIN, lengths=(0, 0), num_splits=2),
    "no slots": replace(PLAIN, lengths=(0, 0), capacity=0),
    "one token": replace(PLAIN, lengths=(1,), capacity=1, Hq=1, Hkv=1),
    "as many keys as a tile holds, and one more or less": replace(PLAIN, lengths=(64, 65, 63, 32, 33, 31)),
    "sixteen queries": replace(PLAIN, Tq=16, lengths=(37, 0, 5)),
    "sixteen queries of sixteen heads": replace(PLAIN, Tq=16, Hq=16, Hkv=1, lengths=(40,)),
    "sixteen heads share a key": replace(PLAIN, Hq=16, Hkv=1),
    "groups of three, five queries": replace(PLAIN, Hq=6, Hkv=2, Tq=5),
    "every head has its key": replace(PLAIN, Hq=3, Hkv=3),
    "not causal": replace(PLAIN, Tq=4, causal=False),
    "not causal, fewer keys than queries": FEW_KEYS,
    "not causal, fewer keys than queries, in pages": replace(FEW_KEYS, page=4, num_splits=2),
    "not causal, fewer keys than queries, window": replace(FEW_KEYS, window=(3, 2)),
    "not causal, fewer keys than queries, alibi and sink": replace(FEW_KEYS, alibi="BH", sink=True),
    "tree, fewer keys than queries": replace(FEW_KEYS, tree=True),
    "window": replace(PLAIN, Tq=2, window=(20, 0)),
    "window of itself": replace(PLAIN, Tq=2, window=(0, 0)),
    "window both ways": replace(PLAIN, Tq=4, causal=False, window=(4, 1)),
    "window to the right": replace(PLAIN, Tq=4, causal=False, window=(-1, 1)),
    "window of 2**40": replace(PLAIN, Tq=4, window=(2**40, 2**40)),
    "window, split": replace(SPLIT, Tq=2, window=(20, 0)),
    "window in pages, of which others are gone": replace(PLAIN, page=8, window=(20, 0)),
    "tree": replace(PLAIN, Tq=6, tree=True),
    "tree, split within the new tokens": replace(
        PLAIN, Tq=16, tree=True, lengths=(20, 34, 7), num_splits=2, workspace=True
    ),
    "tree and window": replace(PLAIN, Tq=6, tree=True, window=(9, 2)),
    "alibi": replace(PLAIN, Tq=3, alibi="H"),
    "alibi by row": replace(PLAIN, alibi="BH", causal=False, Tq=3),
    "alibi in bf16": replace(PLAIN, alibi="H", aux_dtype=BF16),
    "sink": replace(PLAIN, sink=True, Tq=3),
    "sink, split": replace(SPLIT, sink=True, Tq=3),
    "softcap": replace(PLAIN, softcap=2.0),
    "softcap and alibi": replace(PLAIN, softcap=2.0, alibi="H"),
    "scale of zero": replace(PLAIN, scale=0.0),
    "scale of zero and alibi": replace(PLAIN, scale=0.0, alibi="H"),
    "negative scale": replace(PLAIN, scale=-0.3, Tq=2, alibi="H"),
    "large scale": replace(PLAIN, scale=30.0),
    "splits": SPLIT,
    "more splits than keys": replace(PLAIN, lengths=(5, 0, 33), num_splits=7),
    "splits into a workspace": replace(SPLIT, workspace=True),
    "one split into a workspace": replace(PLAIN, workspace=True, num_splits=1),
    "batch invariant": replace(PLAIN, batch_invariant=True),
    "batch invariant into a workspace": replace(PLAIN, batch_invariant=True, workspace=True, Tq=2),
    "everything": replace(PLAIN, **EVERYTHING),
    "everything in pages": replace(PLAIN, **EVERYTHING, page=16),
    "values wider than keys": replace(PLAIN, D=40, Dv=96),
    "values narrower than keys": replace(PLAIN, D=192, Dv=128, lengths=(40, 3)),
    "heads of 256": replace(PLAIN, D=256, Dv=256, lengths=(40, 3)),
    **{f"pages of {page}": replace(HEADS, page=page) for page in (1, 16, 100, 256)},
    **{f"pages of {page}, split": replace(SPLIT, page=page) for page in (1, 48)},
    **{f"{layout}": replace(HEADS, layout=layout, Tq=2) for layout in ("heads_first", "qkv_packed", "strided")},
    "qkv_packed pages": replace(HEADS, layout="qkv_packed", page=16),
    "aligned to a number alone": replace(HEADS, layout="offset", dtype=BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_agreement(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["splits into a workspace", "everything in pages", "tree"])
def test_agreement_in_16_bits(name: str, dtype: torch.dtype) -> None:
    check(replace(CASES[name], dtype=dtype))


CODED: dict[str, DecodeCase] = {
    **{
        f"not causal, fewer keys than queries, {format}": replace(
            FEW_KEYS, Tq=40, lengths=(2, 0, 37, 40, 1), dtype=BF16, codes=Codes(format, 16, 0), page=page
        )
        for format, page in (("fp8", None), ("int8", 32), ("int4", None))
    },
    "fp8": replace(INT8, codes=Codes("fp8", 16, 8), Hq=4, Hkv=2),
    "int8": INT8,
    "int4": replace(INT8, codes=Codes("int4", 16, 8)),
    "groups of 128": replace(INT8, codes=Codes("int4", 128, 8), lengths=(0, 136, 300), capacity=300),
    "no residual": replace(INT8, codes=Codes("int8", 32, 0)),
    "nothing but the window": replace(INT8, codes=Codes("fp8", 32, 128)),
    "scales per token": replace(INT8, codes=Codes("int8", 16, 8, "token", "token")),
    "int4 scales per token": replace(INT8, codes=Codes("int4", 16, 8, "token", "token")),
    "head dims of no power of two": replace(
        INT8, codes=Codes("int4", 64, 0), D=40, Dv=40, lengths=(140, 64), capacity=140
    ),
    "pages": replace(INT8, page=32, codes=Codes("int4", 16, 8)),
    "pages of one group": replace(INT8, page=16),
    "scales per token in pages": replace(INT8, page=48, codes=Codes("fp8", 16, 8, "token", "token")),
    "split": replace(INT8, num_splits=3, workspace=True),
    "split within the window": replace(
        INT8, codes=Codes("int8", 16, 128), num_splits=4, lengths=(100, 150), capacity=150
    ),
    "window": replace(INT8, window=(20, 0), Tq=2),
    "window within the residual": replace(INT8, window=(5, 0), num_splits=2),
    "tree": replace(INT8, Tq=6, tree=True),
    "tree among codes": replace(INT8, Tq=6, tree=True, codes=Codes("fp8", 16, 0), lengths=(64, 17)),
    "batch invariant": replace(INT8, batch_invariant=True),
    "everything in pages": replace(INT8, **EVERYTHING, page=32, codes=Codes("int4", 32, 8)),
    "values wider than keys": replace(INT8, codes=Codes("int8", 64, 8), D=40, Dv=64, lengths=(140, 3), capacity=140),
    "without lengths": replace(INT8, lengths=(50, 50), capacity=50, counted=False),
    "nothing but empty rows": replace(INT8, lengths=(0, 0)),
    "too short for a code": replace(INT8, lengths=(9, 0), capacity=9, Hq=4, Hkv=2),
    "codes with heads first": replace(INT8, Hq=4, Hkv=2, layout="heads_first"),
}


@pytest.mark.parametrize("name", CODED)
def test_agreement_of_quantised_caches(name: str) -> None:
    check(CODED[name])


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_agreement_of_quantised_caches_in_fp16(name: str) -> None:
    check(replace(CODED[name], dtype=F16))


REFUSED: dict[str, tuple[DecodeCase, str]] = {
    "float32": (replace(INT8, dtype=F32), "supports only float16 and bfloat16 caches; got float32"),
    "scales of float32": (replace(INT8, codes=Codes("int8", 16, 8, scale_dtype=F32)), "supports only float16 scales"),
    "values per channel": (
        replace(INT8, codes=Codes("int8", 16, 8, "channel", "channel")),
        'supports only values="token"',
    ),
    "groups of 48": (replace(INT8, codes=Codes("int8", 48, 8)), "groups of 16, 32, 64 or 128; got 48"),
    "pages that cut groups": (
        replace(INT8, page=24, codes=Codes("int8", 16, 8, "token", "token")),
        "pages of a multiple of 16 tokens; got 24",
    ),
    "groups that cut planes": (replace(INT8, Dv=64), "require a group that is a multiple of 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_of_codes_does_not_take_it_names_and_plain_torch_does(name: str) -> None:
    case, reason = REFUSED[name]
    query, cache, _ = make(case)
    with pytest.raises(UnsupportedProblem, match=reason):
        decode(query, cache)
    check(case, "auto")


@pytest.mark.parametrize("seed", range(60))
def test_random_problems(seed: int) -> None:
    rng = Random(seed)
    template = template_for("triton", rng, dims=(32, 40, 64), max_rows=3)
    check(in_some_size(template, rng, 60, max_batch=2, max_heads=rng.choice((1, 1, 2)), splits=(None, None, 1, 2, 3)))


# Splits that rows of a batch share by their lengths


@pytest.fixture
def three_splits_a_row(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plan for a GPU: the interpreter has none to fill, so nothing would be split."""
    monkeypatch.setattr(decode_tuning, "_splits", lambda *_: 3)
    forget_plans()
    launch_cache.clear()
    yield
    forget_plans()
    launch_cache.clear()


RAGGED = replace(PLAIN, lengths=(700, 0, 33, 1, 260, 32), capacity=900)
BY_LENGTH = {
    "rows": RAGGED,
    "pages": replace(RAGGED, page=16, Hq=4, Hkv=2),
    "as long as they can be": replace(RAGGED, lengths=(320,) * 4, capacity=320),
    "nothing but empty rows": replace(RAGGED, lengths=(0, 0, 0)),
    "window and workspace": replace(RAGGED, Tq=3, window=(50, 0), workspace=True),
    "tree, sink and slopes": replace(RAGGED, Tq=4, tree=True, sink=True, alibi="BH", page=8),
    "more rows of queries than a tile": replace(RAGGED, Tq=40, Hq=4, Hkv=2),
    "more rows than are looked at together": replace(RAGGED, lengths=(40, 7, 0, 99) * 33, capacity=100),
}


@pytest.mark.parametrize("name", BY_LENGTH)
def test_agreement_where_splits_are_shared_by_length(name: str, three_splits_a_row: None) -> None:
    case = BY_LENGTH[name]
    query, cache, options = make(case)
    assert "3 splits a row, by length" in str(explain_decode(query, cache, **options, backend="triton"))
    check(case)


@pytest.mark.parametrize(
    ("at_a_time", "blocks"),
    [
        (10_000, 3),  # 54 blocks in 18 splits
        (20, 8),  # 54 blocks of 3 tiles in 20 programs would be 9 blocks each; 8 are 256 keys, the least
        (60, 3),  # likewise 3
    ],
)
def test_of_rows_that_may_differ_in_length_the_long_ones_have_more_splits(
    at_a_time: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as many as rows, of equal shares; one more for each that is not full."""
    import triton.language as tl

    from stream_attention.gpu import decode_tiles

    monkeypatch.setattr(decode_tiles, "_GRAIN", tl.constexpr(256))
    lengths, found = int32(1, 700, 1, 1, 0, 5000), torch.full((6 * 4 + 1, 3), -1, dtype=torch.int32)
    splits_by_length.launch(
        6 * 4,
        {"num_warps": 4},
        lengths_ptr=lengths,
        found_ptr=found,
        batch=6,
        capacity=900,
        num_splits=3,
        q_len=1,
        left=0,
        tiles=3,
        at_a_time=at_a_time,
        BLOCK_N=32,
        HAS_LEFT=False,
    )
    keys = 32 * blocks
    assert (found[:-1, 2] == keys).all()
    splits = {entry: found[found[:, 0] == entry, 1].tolist() for entry in range(6)}
    visible = [1, 700, 1, 1, 0, 900]
    assert splits == {entry: [*range(max(1, -(-count // keys)))] for entry, count in enumerate(visible)}
    assert (found[sum(map(len, splits.values())) : -1, 0] == 6).all() and (found[-1] == -1).all()


def test_what_is_wrong_is_found() -> None:
    """The check itself: a key too few, a value of another row, an LSE that is off by a part in a hundred."""
    case = replace(PLAIN, dtype=BF16, lengths=(37, 5, 70))
    query, cache, options = made = make(case)
    out, lse = decode(query, cache, return_lse=True)
    assert compare(case, made, out, lse) <= 1
    assert isinstance(cache, ContiguousKV)
    fewer = ContiguousKV(cache.key[:, 1:], cache.value[:, 1:], cache.lengths - 1)
    other = ContiguousKV(cache.key, cache.value[[0, 2, 2]].nan_to_num(), cache.lengths)
    for wrong in (fewer, other):
        with pytest.raises(AssertionError, match=r"of row .* allowed"):
            compare(case, made, *decode(query, wrong, **options, return_lse=True))
    with pytest.raises(AssertionError, match="lse of row"):
        compare(case, made, out, lse * 1.01)


# A row's result has the same bits whatever shares its batch


BATCH = DecodeCase(lengths=(70, 0, 100, 33), capacity=100, Hq=2, Hkv=1, dtype=BF16)
KINDS = {
    "contiguous": BATCH,
    "paged": replace(BATCH, page=16),
    "int8": replace(BATCH, codes=Codes("int8", 16, 8)),
    "int4 paged": replace(BATCH, page=32, codes=Codes("int4", 32, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_invariant_row_has_the_same_bits_in_every_batch(kind: str) -> None:
    query, cache, _ = make(KINDS[kind])
    how = {"batch_invariant": True, "num_splits": 2, "return_lse": True}
    together, lses = decode(query, cache, **how)
    for rows in ([0], [2, 3, 1, 0]):
        out, lse = decode(query[rows], rows_of(cache, rows), **how)
        assert same_bits(out, together[rows]) and same_bits(lse, lses[rows])


@pytest.mark.parametrize("page", [None, 256], ids=["contiguous", "paged"])
def test_a_batch_invariant_row_does_not_depend_on_the_room_that_others_need(page: int | None) -> None:
    """Alone it is one part; beside a row that needs more room, one part and an empty one."""
    length, room = 90, INVARIANT_KEYS + 1
    case = DecodeCase(lengths=(length, 0), capacity=room, Hq=2, Hkv=1, page=page, sink=True)
    query, cache, options = make(case)
    together, lses = decode(query, cache, **options, batch_invariant=True, return_lse=True)
    alone: KVCache
    if isinstance(cache, PagedKV):
        alone = PagedKV(cache.key_pages, cache.value_pages, cache.page_table[:1, :1], int32(length))
    else:
        assert isinstance(cache, ContiguousKV)
        alone = ContiguousKV(cache.key[:1, :length], cache.value[:1, :length])
    out, lse = decode(query[:1], alone, **options, batch_invariant=True, return_lse=True)
    assert same_bits(out, together[:1]) and same_bits(lse, lses[:1])


# Caches that grow, share pages, or lack them


@pytest.mark.parametrize("kind", ["contiguous", "paged", "int8"])
def test_a_cache_that_grows_gives_the_attention_of_all_its_tokens(kind: str) -> None:
    """With one workspace throughout."""
    shapes = ((2, 40, 1, 32), (2, 40, 1, 32), (2, 1, 2, 32))
    dtype = BF16 if kind == "int8" else F32
    key, value, query = (normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    lengths = int32(25, 3)
    cache: KVCache
    if kind == "paged":
        table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).int().view(2, 6)
        cache = PagedKV(torch.full((12, 8, 1, 32), NAN), torch.full((12, 8, 1, 32), NAN), table, int32(0, 0))
        cache.append(key[:, :3], value[:, :3])
    else:
        cache = ContiguousKV(key.clone(), value.clone(), lengths)
    if kind == "int8":
        cache = quantize_kv(cache, "int8", group=16, residual=4)
    workspace, out = workspace_of(query, cache, num_splits=2), torch.empty_like(query)
    for n in range(0, 12, 4):
        cache.append(key[:, n : n + 4], value[:, n : n + 4])
        _, lse = decode(query, cache, num_splits=2, out=out, workspace=workspace, return_lse=True)
        assert compare_plain(query, cache, out, lse) <= 1


def test_rows_may_share_pages() -> None:
    pages, values = normal(6, 8, 1, 32), normal(6, 8, 1, 32, seed=1)
    table, query = int32([4, 1, 0], [4, 1, 5], [4, 2, 2]), normal(3, 1, 2, 32, seed=2)
    cache = PagedKV(pages, values, table, int32(20, 23, 11))
    torch.testing.assert_close(decode(query, cache), decode_attention(query, cache, backend="eager"))


@pytest.mark.parametrize("entry", [-1, 5], ids=["before the first", "behind the last"])
@pytest.mark.parametrize("codes", [None, Codes("int8", 16, 0)], ids=["plain", "int8"])
def test_a_page_that_is_not_there_is_no_other_rows_page(codes: Codes | None, entry: int) -> None:
    """There is memory on either side of the pages, which a reader without care would take for one."""
    buffers = [normal(7, 16, 1, 32, seed=seed, dtype=BF16) for seed in (0, 1)]
    table = int32([0, 1], [2, 3])
    cache: KVCache = PagedKV(buffers[0][1:-1], buffers[1][1:-1], table, int32(32, 32))
    if codes is not None:
        cache = quantize_kv(cache, **codes._asdict())  # type: ignore[arg-type]
    query = normal(2, 1, 2, 32, seed=2, dtype=BF16)
    whole = decode(query, cache)
    table[1, 1] = entry
    out = decode(query, cache, validate=False)
    assert out[1].isnan().all() and same_bits(out[0], whole[0])


# Layouts


@pytest.mark.parametrize("strided", ["sink", "alibi_slopes", "expanded slopes", "tree_mask", "lengths", "page_table"])
def test_small_tensors_may_be_strided(strided: str) -> None:
    query, key, value = normal(2, 3, 4, 32), normal(12, 8, 2, 32, seed=1), normal(12, 8, 2, 32, seed=2)
    table = torch.randperm(12, generator=torch.Generator().manual_seed(0)).int().view(2, 6)
    lengths = int32(40, 17)
    if strided == "lengths":
        lengths = torch.stack([lengths, int32(1, 2)], 1)[:, 0]
    if strided == "page_table":
        table = table.mT.contiguous().mT
    options: dict[str, Any] = {
        "sink": {"sink": normal(4, 3)[:, 1]},
        "alibi_slopes": {"alibi_slopes": normal(4, 2).abs().t()},
        "expanded slopes": {"alibi_slopes": normal(4).abs().expand(2, 4)},
        "tree_mask": {"tree_mask": (normal(2, 3, 3) > 0).mT},
    }.get(strided, {})
    cache = PagedKV(key, value, table, lengths)
    torch.testing.assert_close(
        decode(query, cache, **options), decode_attention(query, cache, **options, backend="eager")
    )


def test_a_query_whose_head_dims_lie_apart() -> None:
    query, cache, _ = make(replace(HEADS, Tq=2))
    apart = query.mT.contiguous().mT
    assert apart.stride(-1) != 1 and same_bits(decode(apart, cache), decode(query, cache))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("place", ["heads first", "among others", "one number on"])
def test_it_writes_where_it_is_told_and_nowhere_else(place: str, num_splits: int) -> None:
    query, cache, _ = make(replace(HEADS, lengths=(40,), Tq=2))
    buffer = torch.full((2 * 4 * 64,), 7.0)
    out = {
        "heads first": buffer[:256].view(1, 4, 2, 32).transpose(1, 2),
        "among others": buffer.view(1, 2, 4, 64)[..., 16:48],
        "one number on": buffer[1:257].view(1, 2, 4, 32),
    }[place]
    expected = decode(query, cache, num_splits=num_splits)
    workspace = workspace_of(query, cache, num_splits=num_splits)
    for into in ({}, {"workspace": workspace}):
        buffer.fill_(7.0)
        assert decode(query, cache, num_splits=num_splits, out=out, **into) is out
        torch.testing.assert_close(out, expected)
        out.fill_(7.0)
        assert (buffer == 7.0).all()


# Workspaces


@pytest.mark.parametrize("kind", KINDS)
def test_a_workspace_serves_one_call_after_another(kind: str) -> None:
    query, cache, _ = make(replace(KINDS[kind], lengths=(90,)))
    workspace = workspace_of(query, cache, num_splits=2)
    assert workspace.dtype is F32
    first = decode(query, cache, num_splits=2, out=torch.empty_like(query), workspace=workspace)
    other = decode(-query, cache, num_splits=2, out=torch.empty_like(query), workspace=workspace)
    again = decode(query, cache, num_splits=2, out=torch.empty_like(query), workspace=workspace)
    assert same_bits(again, first) and not torch.equal(other, first)


@pytest.mark.parametrize(("format", "group"), [("int8", 64), ("int8", 128), ("int4", 128)])
def test_splits_of_codes_are_whole_groups_in_a_window_too(format: str, group: int) -> None:
    """Of old the last keys of a batch-invariant call with forced splits belonged to none."""
    lengths = torch.tensor([384], dtype=torch.int32)
    cache = quantize_kv(ContiguousKV(*torch.randn(2, 1, 1024, 1, 64).half(), lengths), format, group=group, residual=0)
    query = torch.randn(1, 1, 2, 64).half()
    for splits in (1, 3):
        how = {"window": (31, 0), "batch_invariant": True, "num_splits": splits}
        room = decode_workspace(query, cache, num_splits=splits, batch_invariant=True, backend="triton")
        found = decode_attention(query, cache, **how, workspace=room, backend="triton")
        right = decode_attention(query, cache, window=(31, 0), backend="eager")
        torch.testing.assert_close(found, right, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("which", ["query", "key", "sink"])
def test_a_tangent_is_refused_by_the_kernel_and_kept_by_plain_torch(which: str) -> None:
    given = {"query": normal(1, 1, 1, 16), "key": normal(1, 40, 1, 16, seed=1), "sink": normal(1)}
    with forward_ad.dual_level():
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        cache = ContiguousKV(given["key"], normal(1, 40, 1, 16, seed=2))
        with pytest.raises(ValueError, match=f"{which}: expected a tensor without a tangent.*eager"):
            decode(given["query"], cache, sink=given["sink"])
        out = decode_attention(given["query"], cache, sink=given["sink"], backend="eager")
        assert forward_ad.unpack_dual(out).tangent.any()


def test_a_negated_view_is_read_as_what_it_stands_for() -> None:
    cache = ContiguousKV(*torch.randn(2, 1, 40, 1, 16))
    query = torch.randn(1, 1, 1, 16)
    found = decode_attention(torch._neg_view(query), cache, backend="triton")
    torch.testing.assert_close(found, decode_attention(-query, cache, backend="eager"))
