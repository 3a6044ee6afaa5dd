"""The decode kernels on a GPU: random problems within what is earned, and what only a device can show."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache as remembered
from functools import partial
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from decode_problems import (
    BF16,
    F16,
    F32,
    Codes,
    DecodeCase,
    Made,
    arch_of_gpu,
    check,
    compare,
    compare_plain,
    compile_all,
    draw,
    make,
    more_of,
    rows_of,
    run_all,
    same_bits,
)
from gpu_tools import captured, give_memory_back, keep, normal, without_synchronising, workers

from stream_attention import (
    ContiguousKV,
    PagedKV,
    QuantizedKV,
    decode_attention,
    decode_workspace,
    explain_decode,
    quantize_kv,
)
from stream_attention.base.kv_layouts import KVCache
from stream_attention.dispatch import launch_cache
from stream_attention.ops.decode import decode_contiguous

__all__ = ["give_memory_back"]

pytestmark = pytest.mark.gpu


def by(kind: str) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """How calls and workspaces of a kind are made."""
    backend = "gluon" if kind.endswith("in Gluon") else "triton"
    return partial(decode_attention, backend=backend), partial(decode_workspace, backend=backend)


decode, _ = by("")


# What is compiled, once, in parallel and before anything runs

BATCH = DecodeCase(
    lengths=(9000, 3, 0, 20_000, 33, 64, 15_100), capacity=20_000, Hq=8, Hkv=2, D=128, Dv=128, dtype=BF16, device="cuda"
)
KINDS: dict[str, DecodeCase] = {
    "contiguous": BATCH,
    "without lengths": replace(BATCH, lengths=(20_000,) * 3, counted=False),
    "paged": replace(BATCH, page=16),
    "pages of 1": replace(BATCH, page=1, lengths=(900, 3, 0, 2000, 33, 64, 1510), capacity=2000),
    "fp8": replace(BATCH, codes=Codes("fp8")),
    "int8": replace(BATCH, codes=Codes("int8")),
    "int4": replace(BATCH, codes=Codes("int4")),
    "int4 paged": replace(BATCH, codes=Codes("int4"), page=64),
    "fp32": replace(BATCH, dtype=F32),
}
KINDS |= {f"{kind} in Gluon": KINDS[kind] for kind in ("fp8", "int8", "int4", "int4 paged")}
EVERYTHING = replace(
    BATCH, Tq=5, Dv=64, page=32, tree=True, window=(15_000, 2), alibi="BH", sink=True, softcap=20.0, scale=0.1
)
LONG = DecodeCase(lengths=(2**17,), capacity=2**17, Hq=32, Hkv=8, D=128, Dv=128, dtype=BF16, device="cuda")
LONG_CASES: dict[str, DecodeCase] = {
    "one row": LONG,
    "a row among short ones": replace(LONG, lengths=(5, 2**17, 0), Hq=16, Hkv=4),
    "pages of 16": replace(LONG, page=16),
    "fp8": replace(LONG, codes=Codes("fp8")),
    "int8 in pages": replace(LONG, codes=Codes("int8"), page=64),
    "int4": replace(LONG, codes=Codes("int4")),
    "sixteen queries": replace(LONG, Tq=16, Hq=16, Hkv=4),
    "batch invariant": replace(LONG, batch_invariant=True, workspace=True),
    "fp16": replace(LONG, dtype=F16, workspace=True),
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # a pool for each worker would fill the GPU's memory: they compile what they meet
    hows: list[dict[str, Any]] = [{}, {"workspace": True}, {"batch_invariant": True}]
    plain = [case for kind, case in KINDS.items() if not kind.endswith("in Gluon")]
    fixed = [replace(case, **how) for case in (*plain, EVERYTHING) for how in hows]
    # Fresh processes: a fork of one that has used CUDA may hang.
    in_gluon = [replace(KINDS[kind], **how) for kind in KINDS if kind.endswith("in Gluon") for how in hows]
    with ProcessPoolExecutor(workers(16), mp_context=get_context("spawn")) as pool:
        compile_all(pool, [*fixed, *LONG_CASES.values()], arch_of_gpu(), "triton")
        compile_all(pool, in_gluon, arch_of_gpu(), "gluon")


# Random problems


def test_random_problems_agree_within_what_is_earned() -> None:
    summary = run_all(draw(problems=600, templates=30, variants=100))
    keep(summary, "random problems", of="decode")
    assert not summary["failed"], "\n\n".join(summary["failures"])


def test_random_codes_in_gluon_agree_within_what_is_earned() -> None:
    summary = run_all(draw(problems=200, templates=20, variants=32, backend="gluon", dims=(64, 128)))
    keep(summary, "random codes in Gluon", of="decode")
    assert not summary["failed"], "\n\n".join(summary["failures"])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_keys_around_a_mean(format: str, dtype: torch.dtype) -> None:
    """Whose scores all have the error in common that a rounded product of query and scale has."""
    case = replace(BATCH, lengths=(900, 400), capacity=1000, dtype=dtype, codes=Codes(format), key_mean=3.0)
    check(case)
    check(case, "gluon")


@pytest.mark.parametrize("name", LONG_CASES)
def test_long_contexts(name: str, give_memory_back: None) -> None:
    case = LONG_CASES[name]
    check(case)
    if case.codes is not None:
        check(case, "gluon")


@remembered
def made(kind: str, seed: int = 0) -> Made:
    return make(replace(EVERYTHING if kind == "everything" else KINDS[kind], seed=seed))


@pytest.mark.parametrize("kind", [*KINDS, "everything"])
def test_auto_takes_the_kernels(kind: str) -> None:
    query, cache, options = made(kind)
    planned = explain_decode(query, cache, **options).backend
    assert planned != "eager"
    named = decode_attention(query, cache, **options, backend=planned)
    assert same_bits(decode_attention(query, cache, **options), named)


# The same bits


@pytest.mark.parametrize("with_workspace", [False, True], ids=["alone", "workspace"])
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_calls_are_bit_equal(kind: str, with_workspace: bool) -> None:
    decode, workspace_of = by(kind)
    query, cache, _ = made(kind)
    into = {"workspace": workspace_of(query, cache)} if with_workspace else {}
    first, first_lse = decode(query, cache, return_lse=True, **into)
    for _ in range(49):
        out, lse = decode(query, cache, return_lse=True, **into)
        assert same_bits(out, first) and same_bits(lse, first_lse)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "without lengths"])
def test_a_batch_invariant_row_has_the_same_bits_in_every_batch(kind: str) -> None:
    decode, workspace_of = by(kind)
    query, cache, _ = made(kind)
    together, lses = decode(query, cache, batch_invariant=True, return_lse=True)
    for rows in ([0], [3], [6, 2, 5], [5, 3, 1, 0, 6, 4, 2], [3] * 40):
        some, its_query = rows_of(cache, rows), query[rows]
        workspace = workspace_of(its_query, some, batch_invariant=True)
        for into in ({}, {"workspace": workspace}):
            out, lse = decode(its_query, some, batch_invariant=True, return_lse=True, **into)
            assert same_bits(out, together[rows]) and same_bits(lse, lses[rows])


def test_a_batch_invariant_row_does_not_depend_on_the_room_that_others_need() -> None:
    query, paged, _ = made("paged")
    assert isinstance(paged, PagedKV)
    together = decode(query, paged, batch_invariant=True)
    narrow = replace(paged, page_table=paged.page_table[:1, : -(-9000 // 16)], lengths=paged.lengths[:1])
    assert same_bits(decode(query[:1], narrow, batch_invariant=True), together[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_workspace_serves_a_hundred_calls(kind: str) -> None:
    """Between them other queries use it, and the output is another one every time."""
    decode, workspace_of = by(kind)
    query, cache, _ = made(kind)
    workspace = workspace_of(query, cache)
    first = decode(query, cache, workspace=workspace)
    for _ in range(50):
        other = decode(-query, cache, workspace=workspace)
        assert same_bits(decode(query, cache, workspace=workspace), first) and not torch.equal(other, first)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "fp8 in Gluon", "int8 in Gluon", "int4 in Gluon"])
def test_inf_in_codes_that_are_seen_shows(kind: str, side: str) -> None:
    """Its group is NaN, and no more than that; a window that hides the group hides it."""
    decode, _ = by(kind)
    sides = {"key": normal(2, 1024, 2, 128, seed=1), "value": normal(2, 1024, 2, 128, seed=2)}
    query = normal(2, 1, 8, 128)
    outs = []
    for bad in (0.0, torch.inf):
        sides[side][1, 70, 0, 5] = bad  # one of the block from 64 to 127
        cache = quantize_kv(ContiguousKV(**sides), kind.split()[0])
        outs.append((decode(query, cache), decode(query, cache, window=(895, 0))))
    (clean, clean_hidden), (found, hidden) = outs
    seen = found[1, :, :4]
    assert seen[..., :64].isnan().all() and seen[..., 64:].isnan().all() == (side == "key")
    assert side == "key" or seen[..., 64:].isfinite().all()
    assert same_bits(found[0], clean[0]) and same_bits(found[1, :, 4:], clean[1, :, 4:])
    assert same_bits(hidden, clean_hidden)


# Caches that are made anew for each call


@pytest.mark.parametrize("with_workspace", [False, True], ids=["alone", "workspace"])
@pytest.mark.parametrize("kind", ["contiguous", "without lengths", "fp32"])
def test_a_new_cache_that_lies_as_one_before_takes_its_launch(
    kind: str, with_workspace: bool, give_memory_back: None
) -> None:
    query, cache, _ = made(kind)
    assert isinstance(cache, ContiguousKV)
    into = {"workspace": decode_workspace(query, cache, backend="triton")} if with_workspace else {}
    store, lengths = torch.stack([cache.key, cache.value]), cache.lengths

    def call(key: Tensor, value: Tensor, lengths: Tensor | None, query: Tensor = query) -> tuple[Tensor, Tensor]:
        return decode(query, ContiguousKV(key, value, lengths), return_lse=True, **into)

    launch_cache.clear()
    first = call(*store, lengths)
    entries = launch_cache.size()
    assert entries == 1

    def is_first(found: tuple[Tensor, Tensor]) -> bool:
        return all(map(same_bits, found, first))

    assert is_first(call(*store, lengths))
    elsewhere, its_lengths = store.clone(), None if lengths is None else lengths.clone()
    assert is_first(call(*elsewhere, its_lengths))
    assert compare_plain(-query, cache, *call(*store, lengths, -query)) <= 1
    assert launch_cache.size() == entries

    # Memory that was given back, and comes again with other numbers and other lengths.
    del elsewhere
    torch.cuda.empty_cache()
    gone = store.clone()
    address = gone.data_ptr()
    assert is_first(call(*gone, lengths))
    del gone
    back = store.clone()
    assert back.data_ptr() == address
    back.neg_()
    fewer = None if lengths is None else (lengths - 7).clamp(min=0)
    assert compare_plain(query, ContiguousKV(*back, fewer), *call(*back, fewer)) <= 1
    assert launch_cache.size() == entries

    # Heads first, as transformers keeps them, and fewer slots: other launches, each its own, kept from its second use.
    heads_first = store.transpose(2, 3).contiguous().transpose(2, 3)
    for _ in range(2):
        assert is_first(call(*heads_first, lengths))
    assert launch_cache.size() == 2
    fewer = None if lengths is None else lengths.clamp(max=9000)
    short = ContiguousKV(*store[:, :, :9000], fewer)
    for _ in range(2):
        assert compare_plain(query, short, *call(short.key, short.value, fewer)) <= 1
    assert launch_cache.size() == 3 and is_first(call(*store, lengths))


def test_steps_of_a_static_cache_share_a_launch() -> None:
    """Layers lie apart, and the lengths elsewhere in each step."""
    layers = [normal(2, ROWS, KV_HEADS, 600, DIM, seed=n).transpose(2, 3) for n in range(3)]
    kept = []
    launch_cache.clear()
    for step in range(4):
        kept.append(torch.tensor([step + 1, 300, 600 - step], dtype=torch.int32, device="cuda"))
        for key, value in layers:
            query, cache = normal(ROWS, 1, HEADS, DIM, seed=step), ContiguousKV(key, value, kept[-1])
            out = decode_contiguous(query, key, value, kept[-1], None, 0, 0.0, DIM**-0.5)
            _, lse = decode_attention(query, cache, return_lse=True)
            assert compare_plain(query, cache, out, lse) <= 1
    assert launch_cache.size() == 2  # the other returns the LSE


def test_a_call_that_was_made_before_refuses_a_gradient_and_looks_if_asked() -> None:
    query, cache, _ = made("paged")
    assert isinstance(cache, PagedKV)
    first = decode(query, cache)
    assert same_bits(decode(query, cache), first)
    wanting = query.clone().requires_grad_()
    with pytest.raises(ValueError, match="query: expected requires_grad=False"):
        decode(wanting, cache)
    with torch.no_grad():
        assert same_bits(decode(wanting, cache), first)
    rows = made("contiguous")[1]
    assert isinstance(rows, ContiguousKV)
    its = ContiguousKV(rows.key.clone(), rows.value, rows.lengths)
    for _ in range(2):
        decode(query, its)
    its.key.requires_grad_()
    with pytest.raises(ValueError, match="cache: expected requires_grad=False"):
        decode(query, its)
    assert same_bits(decode(query, cache, validate=True), first)
    lengths = cache.lengths.clone()
    lengths[0] = cache.capacity + 1
    beyond = replace(cache, lengths=lengths)
    decode(query, beyond)
    with pytest.raises(ValueError, match="lengths: expected from 0 to the capacity"):
        decode(query, beyond, validate=True)


# CUDA graphs, over caches that grow

GROWING = ("contiguous", "paged", "fp8", "int8 paged", "fp8 in Gluon", "int8 paged in Gluon")
ROWS, HEADS, KV_HEADS, DIM = 3, 8, 2, 64


def growing(kind: str, start: int, room: int = 2048) -> KVCache:
    """A cache of three rows with room for more; row b holds `start + 100 b` tokens."""
    cache: KVCache
    if "paged" in kind:
        pages = ROWS * room // 64
        store = torch.full((2, pages, 64, KV_HEADS, DIM), torch.nan, dtype=BF16, device="cuda")
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().view(ROWS, -1).cuda()
        cache = PagedKV(store[0], store[1], table, torch.zeros(ROWS, dtype=torch.int32, device="cuda"))
    else:
        store = torch.full((2, ROWS, room, KV_HEADS, DIM), torch.nan, dtype=BF16, device="cuda")
        cache = ContiguousKV(store[0], store[1], torch.zeros(ROWS, dtype=torch.int32, device="cuda"))
    if kind.split()[0] in ("fp8", "int8"):
        cache = quantize_kv(cache, kind.split()[0], group=32, residual=8)
    cache.append(*new_tokens(start + 100 * (ROWS - 1), 0))
    assert cache.lengths is not None
    if isinstance(cache, QuantizedKV):
        return cache  # the window is that of the length: rows stay as long as each other
    cache.lengths.copy_(torch.tensor([start + 100 * b for b in range(ROWS)]))
    return cache


def new_tokens(n: int, seed: int) -> tuple[Tensor, Tensor]:
    key, value = normal(2, ROWS, n, KV_HEADS, DIM, seed=seed)
    return key, value


@pytest.mark.parametrize("with_workspace", [False, True], ids=["alone", "workspace"])
@pytest.mark.parametrize("kind", GROWING)
def test_a_graph_replays_after_tokens_were_appended(kind: str, with_workspace: bool) -> None:
    decode, workspace_of = by(kind)
    cache, query = growing(kind, 500), normal(ROWS, 2, HEADS, DIM, seed=1)
    into = {"workspace": workspace_of(query, cache), "out": torch.empty_like(query)} if with_workspace else {}
    graph, (out, lse) = captured(lambda: decode(query, cache, return_lse=True, **into))
    for n in range(20):
        cache.append(*new_tokens(7, 10 + n))
        query.copy_(normal(*query.shape, seed=50 + n))
        graph.replay()
        result, its_lse = out.clone(), lse.clone()
        fresh, fresh_lse = decode(query, cache, return_lse=True, **into)
        assert same_bits(result, fresh) and same_bits(its_lse, fresh_lse)
        if n % 5 == 0:
            assert compare_plain(query, cache, result, its_lse) <= 1


@pytest.mark.parametrize("kind", GROWING)
def test_a_graph_that_appends_decodes_what_it_appended(kind: str) -> None:
    decode, workspace_of = by(kind)
    cache, twin, query = growing(kind, 500), growing(kind, 500), normal(ROWS, 1, HEADS, DIM, seed=1)
    key, value = new_tokens(1, 2)
    workspace, room = workspace_of(query, cache), torch.empty_like(query)

    def step(its_cache: KVCache) -> Tensor:
        its_cache.append(key, value)
        return decode(query, its_cache, out=room, workspace=workspace)

    graph, out = captured(lambda: step(cache))
    for _ in range(2):  # as often as a capture runs it
        step(twin)
    for n in range(40):
        for tensor, fresh in zip((key, value), new_tokens(1, 10 + n), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        result = out.clone()
        assert same_bits(result, step(twin))
    assert cache.lengths is not None and twin.lengths is not None and torch.equal(cache.lengths, twin.lengths)


# Streams, the host, memory


@pytest.mark.parametrize("with_workspace", [False, True], ids=["alone", "workspace"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_streams_at_once(kind: str, with_workspace: bool) -> None:
    decode, workspace_of = by(kind)
    inputs = [made(kind, seed) for seed in (0, 1)]
    into = [{"workspace": workspace_of(x.query, x.cache)} if with_workspace else {} for x in inputs]
    expected = [decode(x.query, x.cache, **its) for x, its in zip(inputs, into, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found: list[list[Tensor]] = [[], []]
    for _ in range(30):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[n].append(decode(inputs[n].query, inputs[n].cache, **into[n]))
    torch.cuda.synchronize()
    for n in range(2):
        assert all(same_bits(out, expected[n]) for out in found[n])


def calls(kind: str) -> tuple[Callable[..., Any], Made]:
    its, (decode, _) = made(kind), by(kind)
    return lambda **more: decode(its.query, its.cache, **its.options, **more), its


@pytest.mark.parametrize(
    "how", [{}, {"batch_invariant": True}, {"num_splits": 5}], ids=["planned", "invariant", "told"]
)
@pytest.mark.parametrize("kind", [*KINDS, "everything"])
def test_no_host_synchronisation(kind: str, how: dict[str, Any]) -> None:
    _, workspace_of = by(kind)
    call, its = calls(kind)
    call(**how)  # compiles
    call(**how, workspace=workspace_of(its.query, its.cache, **how))
    with without_synchronising():
        out = call(**how)
        workspace = workspace_of(its.query, its.cache, **how)
        into = call(**how, workspace=workspace)
    torch.testing.assert_close(into, out)


@pytest.mark.parametrize(
    "how", [{}, {"batch_invariant": True}, {"num_splits": 5}], ids=["planned", "invariant", "told"]
)
@pytest.mark.parametrize("kind", [*KINDS, "everything"])
def test_nothing_is_allocated_with_an_out_and_a_workspace(kind: str, how: dict[str, Any]) -> None:
    _, workspace_of = by(kind)
    call, its = calls(kind)
    out = its.query.new_empty(*its.query.shape[:3], its.cache.value_dim)
    workspace = workspace_of(its.query, its.cache, **how)
    call(**how, out=out, workspace=workspace)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call(**how, out=out, workspace=workspace)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# Sizes beyond 32 bits

BEYOND = 2**31
FEW = DecodeCase(lengths=(700, 0, 130), capacity=700, Hq=16, Hkv=8, D=128, Dv=128, dtype=BF16, device="cuda", page=256)


@pytest.mark.parametrize(
    "codes", [None, Codes("fp8"), Codes("int8"), Codes("int4")], ids=["bf16", "fp8", "int8", "int4"]
)
def test_pages_of_more_elements_than_32_bits(codes: Codes | None, give_memory_back: None) -> None:
    """The pages that rows hold lie at the end of a store of more than 2**31 elements: 8.6 GB in bf16."""
    case = replace(FEW, codes=codes)
    query, cache, options = make(case)
    few = cache.key.codes if isinstance(cache, QuantizedKV) else cache.key_pages  # type: ignore[union-attr]
    first = BEYOND // few[0].numel() + 1

    def far(store: Tensor) -> Tensor:
        whole = more_of(store, first + store.shape[0])
        whole[first:].copy_(store)
        return whole

    assert cache.page_table is not None  # type: ignore[union-attr]
    table = cache.page_table  # type: ignore[union-attr]
    table = torch.where((table >= 0) & (table < few.shape[0]), table + first, -1)
    moved: KVCache
    if isinstance(cache, QuantizedKV):
        key, value = (
            replace(
                side, codes=far(side.codes), scale=far(side.scale), zero=None if side.zero is None else far(side.zero)
            )
            for side in (cache.key, cache.value)
        )
        moved = replace(cache, key=key, value=value, page_table=table)
    else:
        assert isinstance(cache, PagedKV)
        moved = PagedKV(far(cache.key_pages), far(cache.value_pages), table, cache.lengths)
    for backend in ("triton",) if codes is None else ("triton", "gluon"):
        out, lse = decode_attention(query, moved, return_lse=True, backend=backend)
        assert compare(case, Made(query, cache, options), out, lse) <= 1


def test_rows_of_more_elements_than_32_bits(give_memory_back: None) -> None:
    """The last of seventeen rows of 2**17 slots begins at element 2**31: 9.1 GB."""
    case = replace(FEW, page=None)
    query, cache, options = make(case)
    assert isinstance(cache, ContiguousKV) and cache.lengths is not None
    rows, batch = 17, len(case.lengths)
    stores = [torch.empty(rows, 2**17, *x.shape[2:], dtype=BF16, device="cuda") for x in (cache.key, cache.value)]
    assert stores[0].numel() > BEYOND
    lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
    lengths[-batch:] = cache.lengths.flip(0)  # the longest row is the last
    for store, x in zip(stores, (cache.key, cache.value), strict=True):
        store[-batch:, : x.shape[1]] = x.flip(0)
    queries = torch.zeros(rows, *query.shape[1:], dtype=BF16, device="cuda")
    queries[-batch:] = query.flip(0)
    out, lse = decode(queries, ContiguousKV(stores[0], stores[1], lengths), return_lse=True)
    made = Made(query, cache, options)
    assert compare(case, made, out[-batch:].flip(0), lse[-batch:].flip(0)) <= 1
    assert not out[:-batch].any()


def test_tokens_of_a_row_of_more_elements_than_32_bits(give_memory_back: None) -> None:
    """A window at the end of one row of 2**21 tokens and some, 8.6 GB, that are NaN before it."""
    case = replace(FEW, page=None, lengths=(700,), window=(600, 0))
    query, cache, options = make(case)
    assert isinstance(cache, ContiguousKV)
    tokens = 2**21 + 700
    stores = [torch.empty(1, tokens, *x.shape[2:], dtype=BF16, device="cuda") for x in (cache.key, cache.value)]
    for store, x in zip(stores, (cache.key, cache.value), strict=True):
        store[:, :-700].fill_(torch.nan)
        store[:, -700:] = x
    out, lse = decode(query, ContiguousKV(stores[0], stores[1]), **options, return_lse=True)
    assert compare(case, Made(query, cache, options), out, lse) <= 1
