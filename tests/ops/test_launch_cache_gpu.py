"""The launch cache on a GPU: no stale launch of the Triton and Gluon kernels, in streams, graphs, threads and devices.

The cases are those of test_launch_cache.py, fewer of them: many a change makes Triton compile another kernel. Gradients
are compared bit for bit, so every call here is deterministic.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gpu_tools import captured, without_synchronising
from launch_cases import (
    CALLS,
    GROUPS,
    Sizes,
    Source,
    difference,
    expected,
    off_by_one,
    run,
    same_bits,
    stale,
    uncached,
)

from stream_attention import ContiguousKV, PagedKV, attention, decode_attention, varlen_attention
from stream_attention.dispatch import launch_cache

pytestmark = pytest.mark.gpu

SIZES = Sizes(
    Tq=130,
    Tk=200,
    D=64,
    Dv=64,
    dtype=torch.bfloat16,
    device="cuda",
    deterministic=True,
    capacity=512,
    group=64,
    fp8_backend="auto",
)
BACKENDS = ("auto", "triton", "gluon")
CHEAP = ("layouts", "gradients", "refusals")
"""Groups whose changes ask for few kernels."""

CHANGES = (
    *("another batch", "more queries", "more keys", "lengths exchanged", "more query heads", "no keys", "float16"),
    *("causal", "a window", "softcap", "scale", "return_lse", "no lse", "dropout", "a mask of keys", "a bias of keys"),
    *("shorter lengths", "other pages", "other offsets", "max_seqlen not given", "a key is the value"),
    *("no_grad", "inference mode", "autocast to float16", "autocast in the backward alone", "forced reference"),
    *("autocast of another device", "torch.use_deterministic_algorithms", "default device"),
)
"""Of the groups sizes, options and states."""

NOT_LOOKED_AT = (
    *("a length beyond the capacity", "a negative length", "a page that does not exist"),
    *("offsets that decrease", "offsets not from 0", "offsets beyond the rows"),
)
"""Values that would have to be read from the device to be refused."""


def is_run(group: str, change: str) -> bool:
    return change not in NOT_LOOKED_AT if group in CHEAP else change in CHANGES


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    launch_cache.clear()
    yield
    launch_cache.clear()


def on(backend: str) -> Sizes:
    if backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernels are for Hopper, compute capability 9.0")
    return replace(SIZES, backend=backend)


def qkv(seed: int = 0, wanted: bool = False, **sizes: Any) -> list[Tensor]:
    return [t.requires_grad_(wanted) for t in Source(replace(SIZES, **sizes), seed).qkv().values()]


deterministic = partial(attention, deterministic=True)


def grads_of(call: Callable[..., Tensor], tensors: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    out = call(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.full_like(out, scale))]


def assert_same(actual: list[Tensor], wanted: list[Tensor]) -> None:
    for n, (a, b) in enumerate(zip(actual, wanted, strict=True)):
        assert same_bits(a.detach(), b.detach()), f"tensor {n} differs"


# No stale launch


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["plain, no gradients", "causal", "packed"])
@pytest.mark.parametrize("kernels", BACKENDS)
def test_no_stale_launch_after_a_change_of(kernels: str, name: str, group: str) -> None:
    assert stale(name, group, on(kernels), partial(is_run, group)) == []


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["decode", "decode, paged", "decode, quantised", "decode, out given"])
def test_no_stale_launch_of_a_cache_after_a_change_of(name: str, group: str) -> None:
    assert stale(name, group, SIZES, partial(is_run, group)) == []


@pytest.mark.parametrize("name", ["mask", "bias", "alibi", "sink", "all modifiers", "fp8", "fp8, codes", "append"])
def test_no_stale_launch_after_a_change_of_how_tensors_lie(name: str) -> None:
    assert stale(name, "layouts", SIZES) == []


@pytest.mark.parametrize("allowed", [True, False], ids=["TF32 first", "TF32 last"])
def test_the_switch_for_tf32_is_followed(allowed: bool) -> None:
    tensors = qkv(dtype=torch.float32)
    before = torch.backends.cuda.matmul.allow_tf32
    results = {}
    try:
        for switch in (allowed, not allowed, allowed):
            torch.backends.cuda.matmul.allow_tf32 = switch
            out = deterministic(*tensors)
            with uncached():
                assert same_bits(out, deterministic(*tensors))
            results[switch] = out
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert not torch.equal(results[True], results[False])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_rows_off_16_bytes_are_read_right(place: int) -> None:
    """TMA cannot read them: another kernel must."""
    aligned = qkv(D=128, Dv=128)
    shifted = [off_by_one(t) if n == place else t for n, t in enumerate(aligned)]
    assert shifted[place].data_ptr() % 16
    both = [[t.detach().requires_grad_() for t in tensors] for tensors in (aligned, shifted)]
    with uncached():
        wanted = [grads_of(deterministic, tensors) for tensors in both]
    for _ in range(2):
        for tensors, right in zip(both, wanted, strict=True):
            assert_same(grads_of(deterministic, tensors), right)
            with torch.no_grad():
                assert_same([deterministic(*tensors)], right[:1])


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("name", ["plain", "plain, no gradients", "window", "dropout", "packed"])
def test_a_repeated_call_is_in_the_cache_and_adds_nothing(name: str, kernels: str) -> None:
    sizes = on(kernels)
    assert not run(CALLS[name](sizes, 0)).error
    entries = launch_cache.size()
    assert entries > 0
    for seed in (1, 2):
        assert difference(run(CALLS[name](sizes, seed)), expected(CALLS[name](sizes, seed))) == ""
    assert launch_cache.size() == entries


@pytest.mark.parametrize(
    "name",
    [
        *("mask", "bias", "alibi", "sink", "all modifiers", "packed, no gradients"),
        *("decode", "decode, three queries", "decode, modifiers", "decode, paged", "decode, quantised"),
        *("decode, out given", "fp8", "fp8, codes", "quantize_fp8", "append", "append, three tokens in pages"),
        *("StreamMultiheadAttention", "StreamAttention", "FusedOnlineAttention"),
    ],
)
def test_every_public_call_is_in_the_cache(name: str) -> None:
    test_a_repeated_call_is_in_the_cache_and_adds_nothing(name, "auto")


# Streams, graphs and the host


def test_it_runs_in_the_current_stream_and_so_does_its_backward() -> None:
    tensors = qkv(wanted=True)
    for _ in range(2):
        grads_of(deterministic, tensors)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = [(t * 2.0).detach().requires_grad_() for t in tensors]
        actual = grads_of(deterministic, late)  # queued behind the sleep, or it would read what is not there yet
    side.synchronize()
    with uncached():
        assert_same(actual, grads_of(deterministic, [(t * 2.0).detach().requires_grad_() for t in tensors]))


def test_two_streams_at_once_share_no_scratch() -> None:
    """One query against many keys is computed in splits, which lie in scratch until they are merged."""
    queries = [qkv(seed, Tq=1)[0] for seed in (1, 2)]
    _, key, value = qkv(Tk=9000)
    with uncached():
        wanted = [deterministic(query, key, value) for query in queries]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for query, stream in zip(queries, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(deterministic(query, key, value))
        torch.cuda.synchronize()
        assert_same(outs, wanted)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_a_cached_call_is_captured_in_a_graph(kernels: str) -> None:
    tensors = qkv()
    call = partial(attention, causal=True, backend=on(kernels).backend)
    call(*tensors)
    graph, out = captured(lambda: call(*tensors))
    for seed in (1, 2):
        for t, new in zip(tensors, qkv(seed), strict=True):
            t.copy_(new)
        graph.replay()
        with uncached():
            assert same_bits(out, call(*tensors))


def test_a_cached_forward_and_backward_are_captured_in_a_graph() -> None:
    tensors = qkv(wanted=True)
    graph, results = captured(lambda: grads_of(deterministic, tensors))
    with torch.no_grad():
        for t, new in zip(tensors, qkv(1), strict=True):
            t.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    with uncached():
        assert_same(results, grads_of(deterministic, tensors))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_graph_of_a_cached_decode_serves_a_cache_that_grows(paged: bool) -> None:
    source = Source(SIZES, 0)
    shape = (16, 64) if paged else (2, 512)
    key, value = (source.normal(*shape, SIZES.Hkv, SIZES.D) for _ in range(2))
    lengths = torch.tensor([100, 7], dtype=torch.int32, device="cuda")
    table = torch.arange(16, dtype=torch.int32, device="cuda").view(2, 8)
    cache = PagedKV(key, value, table, lengths) if paged else ContiguousKV(key, value, lengths)
    query = source.normal(2, 1, SIZES.Hq, SIZES.D)
    decode_attention(query, cache)
    graph, out = captured(lambda: decode_attention(query, cache))
    for _ in range(3):
        lengths.add_(50)
        query.mul_(-0.7)
        graph.replay()
        with uncached():
            assert same_bits(out, decode_attention(query, cache))


def test_a_warm_call_does_not_synchronise() -> None:
    tensors = qkv(wanted=True)
    mask = torch.ones(SIZES.Tk, dtype=torch.bool, device="cuda")
    ends = torch.tensor([0, 50, 130], dtype=torch.int32, device="cuda")
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 80, "max_seqlen_k": 80}
    cache = ContiguousKV(tensors[1].detach(), tensors[2].detach(), torch.tensor([9, 99], device="cuda").int())

    def calls() -> None:
        deterministic(*tensors, causal=True).sum().backward()
        deterministic(*tensors, mask=mask).sum().backward()
        deterministic(*tensors, dropout_p=0.1).sum().backward()
        varlen_attention(*(t[0] for t in tensors), **packed).sum().backward()
        with torch.autocast("cuda", torch.float16):
            deterministic(*tensors).sum().backward()
        with torch.no_grad():
            decode_attention(tensors[0][:, :1], cache)

    calls()
    calls()
    with without_synchronising():
        calls()


def test_hooks_of_triton_see_a_cached_launch() -> None:
    import triton

    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    tensors = qkv(wanted=True)
    call = partial(deterministic, backend="triton")
    for _ in range(2):
        grads_of(call, tensors)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        with uncached():
            grads_of(call, tensors)
        wanted = list(seen)
        seen.clear()
        grads_of(call, tensors)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert wanted and seen == wanted


# Memory, threads, devices


@pytest.mark.parametrize("name", ["plain", "mask", "packed", "decode, paged", "fp8", "fp8, codes", "append"])
def test_entries_hold_no_memory(name: str) -> None:
    for seed in (0, 1):
        assert not run(CALLS[name](SIZES, seed)).error  # whatever a first call keeps for ever, such as compiled kernels
    longer = replace(SIZES, Tq=SIZES.Tq + 7)
    gc.collect()
    torch.cuda.synchronize()
    before, entries = torch.cuda.memory_allocated(), launch_cache.size()
    for seed in (0, 1):
        assert not run(CALLS[name](longer, seed)).error
    gc.collect()
    torch.cuda.synchronize()
    assert launch_cache.size() >= entries > 0
    assert torch.cuda.memory_allocated() == before


def test_two_threads_with_streams_of_their_own() -> None:
    """Forwards run in two threads, and the backwards of both in the one thread of the device."""
    lengths = (64, 100, 130, 200)
    wanted = {}
    with uncached():
        for length in lengths:
            wanted[length] = grads_of(deterministic, qkv(wanted=True, Tq=length))
    torch.cuda.synchronize()
    failures: list[str] = []
    start = threading.Barrier(2)

    def work(own: int) -> None:
        stream = torch.cuda.Stream()
        start.wait()
        with torch.cuda.stream(stream):
            for turn in range(10):
                length = lengths[(turn * (own + 1)) % len(lengths)]
                actual = grads_of(deterministic, qkv(wanted=True, Tq=length))
                stream.synchronize()
                if not all(same_bits(a, b) for a, b in zip(actual, wanted[length], strict=True)):
                    failures.append(f"thread {own}, turn {turn}, {length} queries")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_the_backward_of_the_device_thread_is_not_under_the_callers_switches() -> None:
    """Autocast belongs to the thread of the caller; the cast of the forward counts."""
    tensors = qkv(wanted=True, dtype=torch.float32)
    for _ in range(2):
        grads_of(deterministic, tensors)
    with torch.autocast("cuda", torch.bfloat16):
        cast = deterministic(*tensors)
    plain = deterministic(*tensors)
    with torch.autocast("cuda", torch.bfloat16):
        actual = [torch.autograd.grad(out, tensors, torch.ones_like(out)) for out in (cast, plain)]
    with uncached():
        with torch.autocast("cuda", torch.bfloat16):
            cast = deterministic(*tensors)
        plain = deterministic(*tensors)
        wanted = [torch.autograd.grad(out, tensors, torch.ones_like(out)) for out in (cast, plain)]
    for found, right in zip(actual, wanted, strict=True):
        assert_same(list(found), list(right))


def test_the_device_of_the_tensors_is_launched_on() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first = qkv(wanted=True)
    second = [t.detach().to("cuda:1").requires_grad_() for t in first]
    with uncached():
        wanted = grads_of(deterministic, first)
    for current in (0, 1):
        with torch.cuda.device(current):
            for tensors in (first, second, first, second):
                actual = grads_of(deterministic, tensors)
                assert {t.device for t in actual} == {tensors[0].device}
                assert_same([t.to("cuda:0") for t in actual], wanted)


def test_a_call_on_a_cpu_after_one_on_a_gpu() -> None:
    tensors = qkv(wanted=True)
    for _ in range(2):
        grads_of(attention, tensors)
    on_cpu = [t.detach().cpu().requires_grad_() for t in tensors]
    actual = grads_of(attention, on_cpu)
    with uncached():
        assert_same(actual, grads_of(attention, on_cpu))
    assert {t.device.type for t in actual} == {"cpu"}


@pytest.mark.parametrize("name", ["plain", "packed", "decode, paged", "fp8", "fp8, codes", "quantize_fp8", "append"])
def test_comparing_changes_no_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [expected(CALLS[name](SIZES, seed)) for seed in (0, 1)]
    monkeypatch.setattr(launch_cache, "COMPARE", True)
    for seed, one in enumerate(wanted):
        assert difference(run(CALLS[name](SIZES, seed)), one) == ""


@pytest.mark.parametrize("kernels", ["triton", "gluon"])
def test_packs_of_other_rows_are_right(kernels: str) -> None:
    """Also where a gradient's only row lies off 16 bytes from what would be the next, which is copied elsewhere."""
    longest = 2700
    for rows in (1, 2, 1, 77, 300, 299, 4000):
        ends = torch.tensor([0, rows // 3, rows], device="cuda", dtype=torch.int32)
        said = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        tensors = [torch.randn(rows, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        gradient = torch.randn(rows * 260, device="cuda", dtype=torch.bfloat16).as_strided((rows, 4, 64), (260, 64, 1))

        def compute(tensors: Any = tensors, said: Any = said, gradient: Tensor = gradient) -> list[Tensor]:
            out = varlen_attention(*tensors, **said, causal=True, deterministic=True, backend=kernels)
            return [out, *torch.autograd.grad(out, tensors, gradient)]

        found = compute()
        with uncached():
            assert all(map(torch.equal, found, compute()))
