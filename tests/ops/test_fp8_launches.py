"""Calls in FP8, and writes to caches, in the launch cache: what reaches the driver is what a fresh call sends it.

No GPU is needed: `pretend_gpu` takes the road of a Hopper GPU up to the driver, and keeps the parameters of launches.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no driver; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from pretend_gpu import Launched, pretend_gpu
from stream_attention import (
    ContiguousKV,
    PagedKV,
    Rotary,
    attention,
    attention_fp8,
    force_backend,
    quantize_fp8,
    varlen_attention,
    write_kv,
)
from stream_attention.base.fp8_layout import E4M3
from stream_attention.base.kv_layouts.base import Cache
from stream_attention.dispatch import launch_cache, validate, validate_paged
from stream_attention.gpu import driver, launch, scratch
from stream_attention.ops import varlen

BF16, F16 = torch.bfloat16, torch.float16
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 64


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """Offsets are not read, as on a GPU."""
    monkeypatch.setattr(varlen, "longest", lambda name, offsets, rows, told: min(told, rows))
    with pretend_gpu() as made:
        yield made


def rows(length: int, heads: int = HEADS, dtype: torch.dtype = BF16, batch: int = BATCH, dim: int = DIM) -> Tensor:
    return torch.zeros(batch, length, heads, dim, dtype=dtype)


def by_head(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def shifted(t: Tensor) -> Tensor:
    """One element behind an aligned address."""
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape)


def gapped(t: Tensor) -> Tensor:
    return t.new_zeros(*t.shape[:-1], t.shape[-1] + 8)[..., : t.shape[-1]]


Change = Callable[[Tensor], Tensor]
OFFSETS = torch.tensor([0, 100, 250], dtype=torch.int32)


def same(t: Tensor) -> Tensor:
    return t


def dense(change: Change = same, q_len: int = 200, k_len: int = 300, **options: Any) -> Any:
    kind = {name: options.pop(name) for name in ("dtype", "batch", "dim") if name in options}
    heads = options.pop("heads", HEADS)
    query, key, value = rows(q_len, heads, **kind), rows(k_len, KV_HEADS, **kind), rows(k_len, KV_HEADS, **kind)
    return attention(change(query), change(key), change(value), precision="fp8", **options)


def packed(change: Change = same, q_len: int = 200, k_len: int = 300, **options: Any) -> Any:
    offsets, dtype = options.pop("offsets", OFFSETS), options.pop("dtype", BF16)
    query, key, value = (change(rows(n, h, dtype)[0]) for n, h in ((q_len, 4), (k_len, 2), (k_len, 2)))
    ends = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": q_len, "max_seqlen_k": k_len}
    return varlen_attention(query, key, value, precision="fp8", **ends | options)


def quantised(change: Change = same, k_len: int = 300, **options: Any) -> Any:
    kind = {name: options.pop(name) for name in ("dtype", "batch", "dim", "heads") if name in options}
    return quantize_fp8(change(rows(k_len, **kind)), change(rows(k_len, **kind)), **options)


def quantised_pack(change: Change = same, k_len: int = 300, **options: Any) -> Any:
    given = {"cu_seqlens": OFFSETS, "max_seqlen": k_len} | options
    return quantize_fp8(change(rows(k_len)[0]), change(rows(k_len)[0]), **given)


def coded(change: Change = same, q_len: int = 200, k_len: int = 300, **options: Any) -> Any:
    kind = {name: options.pop(name) for name in ("dtype", "batch", "dim") if name in options}
    kv = quantize_fp8(rows(k_len, KV_HEADS, **kind), rows(k_len, KV_HEADS, **kind), rotate=options.pop("rotate", False))
    return attention_fp8(change(rows(q_len, options.pop("heads", HEADS), **kind)), kv, **options)


def coded_pack(change: Change = same, q_len: int = 200, k_len: int = 300, **options: Any) -> Any:
    kv = quantised_pack(k_len=k_len)
    given = {"cu_seqlens_q": OFFSETS, "max_seqlen_q": q_len} | options
    return attention_fp8(change(rows(q_len, 8)[0]), kv, **given)


def appended(change: Change = same, k_len: int = 1, capacity: int = 512, page: int = 0, **options: Any) -> Any:
    kind = {name: options.pop(name) for name in ("dtype", "batch", "dim", "heads") if name in options}
    batch, lengths = kind.get("batch", BATCH), torch.zeros(kind.get("batch", BATCH), dtype=torch.int32)
    if page:
        kind["batch"] = batch * capacity // page
        table = torch.zeros(batch, capacity // page, dtype=torch.int32)
        cache: Cache = PagedKV(rows(page, **kind), rows(page, **kind), table, lengths)
    else:
        cache = ContiguousKV(rows(capacity, **kind), rows(capacity, **kind), lengths)
    kind["batch"] = batch
    pairs, interleaved = options.pop("pairs", 16), options.pop("interleaved", False)
    angles = torch.ones(capacity, pairs, dtype=options.pop("angles", torch.float32))
    rotary = Rotary(angles, angles.clone(), interleaved) if pairs else None
    return cache.append(change(rows(k_len, **kind)), change(rows(k_len, **kind)), rotary=rotary, **options)  # type: ignore[attr-defined]


def written(
    change: Change = same,
    k_len: int = 5,
    capacity: int = 512,
    page: int = 8,
    in_pages: Change = same,
    beside: bool = False,
    rows_behind: int = 0,
    stored: torch.dtype | None = None,
    integers: torch.dtype = torch.int64,
    in_slots: Change = same,
    k_scale: Any = None,
    **kind: Any,
) -> Any:
    pages = [in_pages(rows(page, batch=capacity // page, **kind)).to(stored) for _ in range(2)]
    if beside:
        pages = [*torch.cat(pages, -1).chunk(2, -1)]
    if page == 1:
        pages = [t.flatten(0, 1) for t in pages]
    new = [change(rows(k_len + rows_behind, batch=1, **kind))[0] for _ in range(2)]
    return write_kv(*new, *pages, in_slots(torch.arange(k_len, dtype=integers)), k_scale=k_scale, v_scale=k_scale)


CALLS: dict[str, Callable[..., Any]] = {
    "dense": dense,
    "packed": packed,
    "quantize_fp8": quantised,
    "quantize_fp8, packed": quantised_pack,
    "attention_fp8": coded,
    "attention_fp8, packed": coded_pack,
    "append": appended,
    "write_kv": written,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "more queries": {"q_len": 201},
    "one query": {"q_len": 1},
    "more keys": {"k_len": 301},
    "many keys": {"k_len": 400},
    "another batch": {"batch": 3},
    "more heads": {"heads": 8},
    "wider heads": {"dim": 128},
    "fp16": {"dtype": F16},
    "off by one element": {"change": shifted},
    "rows apart": {"change": gapped},
    "heads before rows": {"change": by_head},
    "causal": {"causal": True},
    "a window": {"window": (60, 3)},
    "a wider window": {"window": (61, 3)},
    "scale": {"scale": 0.25},
    "a scale below 0": {"scale": -0.25},
    "rotated": {"rotate": True},
    "with the LSE": {"return_lse": True},
    "deterministic": {"deterministic": True},
    "Triton": {"backend": "triton"},
    "a forced tile": {"backend": "triton(block_n=32)"},
    "offsets in int64": {"offsets": OFFSETS.long()},
    "another pack": {"offsets": torch.tensor([0, 9], dtype=torch.int32)},
    "more room": {"capacity": 1024},
    "pages": {"page": 16},
    "larger pages": {"page": 64},
    "no rotation": {"pairs": 0},
    "fewer pairs": {"pairs": 8},
    "interleaved pairs": {"interleaved": True},
    "angles in bf16": {"angles": BF16},
    "pages of one token": {"page": 1},
    "pages off by one element": {"in_pages": shifted},
    "pages with rows apart": {"in_pages": gapped},
    "pages with heads before rows": {"in_pages": by_head},
    "keys beside values": {"beside": True},
    "rows behind the slots": {"rows_behind": 3},
    "slots in int32": {"integers": torch.int32},
    "slots off by one element": {"in_slots": shifted},
    "slots apart": {"in_slots": lambda t: torch.stack([t, t], 1)[:, 0]},
    "e4m3": {"stored": E4M3},
    "e4m3, keys beside values": {"stored": E4M3, "beside": True},
    "a number as scale": {"stored": E4M3, "k_scale": 0.5},
    "another number as scale": {"stored": E4M3, "k_scale": 0.25},
    "one scale": {"stored": E4M3, "k_scale": torch.ones(())},
    "a scale for each head": {"stored": E4M3, "k_scale": torch.ones(HEADS)},
    "scales apart": {"stored": E4M3, "k_scale": torch.ones(2 * HEADS)[::2]},
    "scales off by one element": {"stored": E4M3, "k_scale": shifted(torch.ones(HEADS))},
}
OF_ROWS = ("k_len", "batch", "heads", "dim", "dtype", "change")
OF_ATTENTION = ("q_len", "causal", "window", "scale", "return_lse", "backend")
TAKEN: dict[str, tuple[str, ...]] = {
    "dense": (*OF_ROWS, *OF_ATTENTION, "rotate", "deterministic"),
    "packed": ("k_len", "dtype", *OF_ATTENTION, "rotate", "offsets"),
    "quantize_fp8": (*OF_ROWS, "rotate"),
    "quantize_fp8, packed": ("k_len", "rotate"),
    "attention_fp8": (*OF_ROWS, *OF_ATTENTION, "rotate"),
    "attention_fp8, packed": ("k_len", *OF_ATTENTION),
    "append": (*OF_ROWS, "capacity", "page", "pairs", "interleaved", "angles"),
    "write_kv": (
        *("k_len", "heads", "dim", "dtype", "change", "capacity", "page", "k_scale"),
        *("in_pages", "beside", "rows_behind", "integers", "in_slots", "stored"),
    ),
}


def launched(launches: list[Launched], call: Callable[..., Any], **options: Any) -> list[Launched]:
    launches.clear()
    call(**options)
    assert launches
    return launches[:]


# No stale launch


@pytest.mark.parametrize("name", CALLS)
def test_no_stale_launch_after_any_change(name: str, launches: list[Launched]) -> None:
    """Each changed call comes after all others, twice, with the first call in between."""
    call = CALLS[name]
    base = launched(launches, call)
    assert launched(launches, call) == base and launch_cache.size() > 0
    made = {}
    for change, options in OPTIONS.items():
        if options.keys() <= {*TAKEN[name]}:
            made[change] = [launched(launches, call, **options) for _ in range(3)]
            assert launched(launches, call) == base, change
    for change, of_turns in made.items():
        launch_cache.clear()
        fresh = launched(launches, call, **OPTIONS[change])
        assert [fresh] * 3 == of_turns, change
    assert len(made) >= 2


@pytest.mark.parametrize("state", ["deterministic", "forced", "autocast", "inference"])
@pytest.mark.parametrize("name", ["dense", "attention_fp8"])
def test_no_stale_launch_after_a_change_of_state(name: str, state: str, launches: list[Launched]) -> None:
    call = CALLS[name]
    launched(launches, call)

    def around() -> Any:
        if state == "forced":
            return force_backend("triton")
        if state == "autocast":
            return torch.autocast("cpu", F16)
        return torch.inference_mode() if state == "inference" else nullcontext()

    def changed() -> list[Launched]:
        if state == "deterministic":
            torch.use_deterministic_algorithms(True)
        try:
            with around():
                return launched(launches, call)
        finally:
            torch.use_deterministic_algorithms(False)

    made = [changed(), changed()]
    launch_cache.clear()
    assert [changed()] * 2 == made


@pytest.mark.parametrize("name", CALLS)
def test_lengths_in_any_order_launch_what_fresh_calls_do(name: str, launches: list[Launched]) -> None:
    """Those of calls made from a template, which is where lengths are new."""
    call = CALLS[name]
    takes_queries = "q_len" in TAKEN[name]
    longest = 300 if name in ("append", "write_kv") else 1500
    drawn = torch.randint(1, longest, (12, 2), generator=torch.Generator().manual_seed(3)).tolist()
    drawn = [pair for pair in drawn for _ in range(2)]
    for options in ({}, {"causal": True}) if takes_queries else ({},):
        made = []
        for q_len, k_len in drawn:
            lengths = {"q_len": q_len, "k_len": k_len} if takes_queries else {"k_len": k_len}
            made.append(launched(launches, call, **lengths, **options))
        for (q_len, k_len), one in zip(drawn, made, strict=True):
            launch_cache.clear()
            lengths = {"q_len": q_len, "k_len": k_len} if takes_queries else {"k_len": k_len}
            assert launched(launches, call, **lengths, **options) == one, lengths


def test_new_lengths_are_made_from_templates(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    from stream_attention.ops import fp8

    calls = (dense, packed, quantised, quantised_pack, coded, coded_pack)
    for k_len in range(1000, 1300, 50):
        for call in calls:
            call(k_len=k_len)
    appended(k_len=64)
    written(k_len=64)
    monkeypatch.setattr(launch.Kernel, "bind", None)
    monkeypatch.setattr(fp8, "prepare", None)
    for k_len in range(1000, 1290, 7):
        for call in calls:
            call(k_len=k_len)
    appended(k_len=65)
    written(k_len=65)


# What is refused stays refused


def test_refusals_after_calls_that_are_cached(launches: list[Launched]) -> None:
    key, kv, query = rows(300), quantised(), rows(200)
    for _ in range(2):
        quantize_fp8(key, key)
        attention_fp8(query, kv)
        appended()
    cache = ContiguousKV(rows(512), rows(512), torch.zeros(BATCH, dtype=torch.int32))
    with pytest.raises(ValueError, match="value: expected"):
        quantize_fp8(key, key[:, :299])
    with pytest.raises(TypeError, match="value: expected"):
        quantize_fp8(key, key.half())
    with pytest.raises(ValueError, match="contiguous last dim"):
        quantize_fp8(*(rows(300, dim=128)[..., ::2] for _ in range(2)))
    with pytest.raises(TypeError, match="rotate"):
        quantize_fp8(key, key, rotate=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient"):
        attention_fp8(query.clone().requires_grad_(), kv)
    with pytest.raises(TypeError, match="causal"):
        attention_fp8(query, kv, causal=1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="query"):
        attention_fp8(rows(200, HEADS + 1), kv)
    with pytest.raises(ValueError, match="contiguous last dim"):
        attention_fp8(rows(200, dim=128)[..., ::2], kv)
    with pytest.raises(ValueError, match="as many tokens"):
        cache.append(rows(1), rows(2))
    with pytest.raises(ValueError, match="at most 512"):
        cache.append(rows(513), rows(513))
    with pytest.raises(TypeError, match="dtype"):
        cache.append(rows(1, dtype=F16), rows(1, dtype=F16))


# What a call costs


def test_a_repeated_call_checks_and_binds_nothing(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        for call in CALLS.values():
            call()
    entries = launch_cache.size()
    for name in ("fp8_keys", "fp8_query", "precision", "options"):
        monkeypatch.setattr(validate, name, None)
    monkeypatch.setattr(validate_paged, "writing", None)
    monkeypatch.setattr(Cache, "_check_append", None)
    monkeypatch.setattr(launch.Kernel, "bind", None)
    for call in CALLS.values():
        call()
    assert launch_cache.size() == entries


def test_a_call_allocates_its_result_and_one_scratch(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    fills: list[int] = []
    empty, fill = scratch.empty, driver.fill_words

    def counted(like: Tensor, shape: tuple[int, ...], *how: Any) -> Tensor:
        made.append(shape)
        return empty(like, shape, *how)

    def filled(*arguments: Any) -> None:
        fills.append(1)
        fill(*arguments)

    kv = quantised(heads=KV_HEADS)
    for call in (dense, lambda **options: attention_fp8(rows(200), kv, **options)):
        call()
        call(return_lse=True)
        with monkeypatch.context() as patch:
            patch.setattr(scratch, "empty", counted)
            patch.setattr(driver, "fill_words", filled)
            for options, tensors in (({}, 2), ({"return_lse": True}, 3)):
                made.clear(), fills.clear(), launches.clear()
                call(**options)
                assert (len(made), len(fills), len(launches)) == (tensors, 1, 2)


# Promises of the cache


def test_launches_are_queued_in_the_current_stream(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[int] = []
    for call in CALLS.values():
        call()
    queue, fill = driver.launch, driver.fill_words
    monkeypatch.setattr(driver, "launch", lambda *args: (streams.append(args[2]), queue(*args)))
    monkeypatch.setattr(driver, "fill_words", lambda *args: (streams.append(args[3]), fill(*args)))
    for stream in (7, 8):
        monkeypatch.setattr(launch, "_stream_of", lambda index, stream=stream: stream)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index, stream=stream: stream)
        streams.clear()
        for call in CALLS.values():
            call()
        assert {*streams} == {stream}


def test_the_cache_keeps_no_tensor_and_is_bounded(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[weakref.ref[Any]] = []
    for _ in range(2):
        kv, query = quantised(heads=KV_HEADS), rows(200)
        out = attention_fp8(query, kv)
        cache = ContiguousKV(rows(64), rows(64), torch.zeros(BATCH, dtype=torch.int32))
        cache.append(key := rows(1), key)
        for t in (query, out, key, *kv.codes[:3], cache.key, cache.value, cache.lengths):
            watched += [weakref.ref(t), weakref.ref(t.untyped_storage())]
    entries = launch_cache.size()
    del kv, query, out, cache, key, t
    gc.collect()
    assert entries > 0 and [one() for one in watched if one() is not None] == []
    monkeypatch.setattr(launch_cache, "LIMIT", 4)
    for k_len in range(100, 140):
        for call in CALLS.values():
            call(k_len=k_len)
            call(k_len=k_len)
        assert launch_cache.size() <= 4


def test_threads_that_mix_calls(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "LIMIT", 6)
    errors: list[BaseException] = []

    def work(own: int) -> None:
        try:
            for k_len in range(60, 100):
                for call in CALLS.values():
                    call(k_len=k_len + own % 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == [] and launch_cache.size() <= 6


def test_what_the_switches_say_holds(launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "ENABLED", False)
    without = {name: launched(launches, call) for name, call in CALLS.items()}
    assert launch_cache.size() == 0
    monkeypatch.undo()
    monkeypatch.setattr(varlen, "longest", lambda name, offsets, rows, told: min(told, rows))
    for name, call in CALLS.items():
        assert launched(launches, call) == launched(launches, call) == without[name]


@pytest.mark.parametrize("name", ["quantize_fp8", "append", "write_kv"])
def test_comparing_computes_both_ways(name: str, launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed here: memory that is not written is equal, what one of both writes is not."""
    call = CALLS[name]
    call()
    monkeypatch.setattr(launch_cache, "COMPARE", True)
    count = len(launched(launches, call))
    assert count == 2
    original = launch.Launch.__call__
    wrote: list[int] = []

    def write(self: launch.Launch, *tensors: Any, **sizes: Any) -> None:
        original(self, *tensors, **sizes)
        if not wrote:
            tensors[-4 if name == "quantize_fp8" else 2].view(torch.uint8).flatten()[:1].fill_(1)
        wrote.append(1)

    monkeypatch.setattr(launch.Launch, "__call__", write)
    with pytest.raises(RuntimeError, match="a cached call and one that was prepared anew differ"):
        call()


def test_a_profiler_sees_labels(launches: list[Launched]) -> None:
    for call in CALLS.values():
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for call in CALLS.values():
            call()
    labels = {event.key for event in profile.key_averages()}
    assert labels >= {f"stream_attention::{name}" for name in ("forward", "quantize_fp8", "append", "write_kv")}
