"""Memory tools on a GPU: what CUDA's allocator says, what estimates say of it, and checkpoints that keep attention."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from gpu_tools import captured, normal

from stream_attention import ContiguousKV, PagedKV, attention, quantize_kv
from stream_attention.utils.memory import (
    MemoryProfiler,
    estimate_attention_memory,
    estimate_kv_cache_bytes,
    stream_checkpoint_policy,
)

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LENGTH, HEADS, KV_HEADS, DIM = 4096, 16, 4, 128


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    """Blocks kept for reuse may be larger than what is asked for."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def mebibytes(number: int) -> Tensor:
    return torch.empty(number * MIB, dtype=torch.uint8, device="cuda")


# The profiler


def test_readings_are_those_of_the_allocator() -> None:
    with MemoryProfiler() as profiler:
        assert profiler.device.type == "cuda"
        before = profiler.snapshot("before")
        kept = mebibytes(64)
        temporary = mebibytes(128)
        del temporary
        after = profiler.snapshot("after")
        assert after["allocated_mb"] * MIB == torch.cuda.memory_allocated()
        assert after["reserved_mb"] * MIB == torch.cuda.memory_reserved()
        del kept
    report = profiler.report()
    change = profiler.diff("before", "after")
    assert change["allocated_delta_mb"] == 64.0 and change["peak_allocated_mb"] == before["allocated_mb"] + 192.0
    assert after["reserved_mb"] >= after["allocated_mb"] + 128.0  # the allocator keeps what was freed
    assert change["device_delta_mb"] >= 192.0 and after["device_mb"] > after["reserved_mb"] >= after["allocated_mb"]
    assert report["peak_allocated_mb"] == before["allocated_mb"] + 192.0 and after["process_mb"] > 0


def test_regions_in_regions_have_true_peaks() -> None:
    with MemoryProfiler("cuda") as profiler:
        with profiler.region("beside"):
            mebibytes(256)
        with profiler.region("outer"):
            kept = mebibytes(16)
            with profiler.region("inner"):
                mebibytes(64)
                profiler.snapshot("within")
            mebibytes(32)
    beside, outer, inner = profiler.report()["regions"]
    assert [one["peak_beyond_mb"] for one in (beside, outer, inner)] == [256.0, 80.0, 64.0]
    assert [one["retained_mb"] for one in (beside, outer, inner)] == [0.0, 16.0, 0.0]
    del kept


def test_a_snapshot_does_not_wait_for_the_device() -> None:
    with MemoryProfiler("cuda") as profiler:
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)  # about a second
        done.record()
        with profiler.region("meanwhile"):
            profiler.snapshot("meanwhile")
        assert not done.query()
        torch.cuda.synchronize()


def test_the_cpu_has_books_of_its_own() -> None:
    with MemoryProfiler("cpu") as profiler:
        kept = mebibytes(8), torch.empty(2 * MIB, dtype=torch.uint8)
        assert profiler.snapshot("both")["allocated_mb"] == 2.0
    del kept


def test_a_graph_counts_when_it_is_captured_and_not_when_it_is_replayed() -> None:
    x = torch.ones(4 * MIB, device="cuda")  # 16 MiB
    with MemoryProfiler("cuda") as profiler:
        with profiler.region("capture"):
            graph, result = captured(lambda: x + 1)
        with profiler.region("replay"):
            graph.replay()
        torch.cuda.synchronize()
    capture, replay = profiler.report()["regions"]
    assert capture["retained_mb"] >= 16.0 and replay["peak_beyond_mb"] == 0.0
    del graph, result


# Estimates


def held(make: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and how many bytes it keeps allocated."""
    before = torch.cuda.memory_allocated()
    made = make()
    return made, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("format", [None, "int8", "int4", "fp8"])
def test_a_cache_takes_what_was_estimated(format: str | None, page: int | None) -> None:
    batch, tokens = 4, 8192
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}

    def plain() -> ContiguousKV | PagedKV:
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        if page is None:
            key, value = (torch.zeros(batch, tokens, KV_HEADS, DIM, **sizes) for _ in range(2))
            return ContiguousKV(key, value, lengths)
        pages = batch * tokens // page
        table = torch.arange(pages, dtype=torch.int32, device="cuda").view(batch, -1)
        key, value = (torch.zeros(pages, page, KV_HEADS, DIM, **sizes) for _ in range(2))
        return PagedKV(key, value, table, lengths)

    estimate = estimate_kv_cache_bytes(batch, tokens, KV_HEADS, DIM, page=page, format=format)
    cache, taken = held(plain)
    if format is not None:
        source = cache
        cache, taken = held(lambda: quantize_kv(source, format))
        if page is not None:
            estimate -= cache.page_table.nbytes  # both read the same
    # A block is whole units of 512 bytes, and one that is reused may be 1 MiB too large: of at most nine tensors.
    assert 0 <= taken - estimate <= 9 * MIB
    assert estimate > 16 * MIB


def tensors(requires_grad: bool) -> tuple[Tensor, ...]:
    shapes = [(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(normal(*shape, seed=n).requires_grad_(requires_grad) for n, shape in enumerate(shapes))


@pytest.mark.parametrize("name", ["gluon", "triton"])
def test_a_call_takes_what_was_estimated(name: str) -> None:
    if name == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernels are for Hopper")
    estimate = estimate_attention_memory(1, LENGTH, HEADS, DIM, kv_heads=KV_HEADS, causal=True, backend=name)
    query, key, value = tensors(requires_grad=True)

    def forward() -> Tensor:
        return attention(query, key, value, causal=True, backend=name)

    incoming = torch.ones_like(query)
    torch.autograd.grad(forward(), (query, key, value), incoming)  # what is made once
    del incoming
    gc.collect()
    torch.cuda.empty_cache()
    with MemoryProfiler("cuda") as profiler, profiler.region("step"):
        with profiler.region("forward"):
            out = forward()
        grads = torch.autograd.grad(out, (query, key, value), torch.empty_like(out))
    step, first = profiler.report()["regions"]
    assert estimate.backend == name and estimate.backward is not None
    few = 8 * MIB  # blocks that are reused
    assert 0 <= first["peak_beyond_mb"] * MIB - estimate.forward <= few
    assert 0 <= step["peak_beyond_mb"] * MIB - estimate.backward <= few
    assert estimate.inputs == sum(t.nbytes for t in (query, key, value))
    del grads


def test_few_queries_take_room_for_the_parts_of_their_keys() -> None:
    estimate = estimate_attention_memory(1, 1, HEADS, DIM, k_len=65536, kv_heads=KV_HEADS, backward=False)
    query, key, value = normal(1, 1, HEADS, DIM), *(normal(1, 65536, KV_HEADS, DIM, seed=n) for n in (1, 2))
    attention(query, key, value)
    with MemoryProfiler("cuda") as profiler, profiler.region("call"):
        attention(query, key, value, return_lse=True)
    (call,) = profiler.report()["regions"]
    assert estimate.saved < estimate.forward < 4 * MIB
    assert abs(call["peak_beyond_mb"] * MIB - estimate.forward) <= 4096


# Checkpoints


def test_a_checkpoint_keeps_attention_and_gives_the_same_bits() -> None:
    weight = normal(HEADS * DIM, HEADS * DIM, seed=3).div_(HEADS * DIM).requires_grad_()
    query, key, value = tensors(requires_grad=True)
    calls = 0

    def block(query: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        projected = (query.flatten(2) @ weight).view_as(query)
        out = attention(projected, key, value, causal=True, backend="triton")  # whose backward is the same every time
        return torch.nn.functional.gelu(out)

    retained, results = {}, {}
    for name, call in {
        "plain": block,
        "whole": partial(checkpoint, block, use_reentrant=False),
        "ours": partial(checkpoint, block, **stream_checkpoint_policy()),
    }.items():
        with MemoryProfiler("cuda") as profiler, profiler.region("forward"):
            out = call(query)
        retained[name] = profiler.report()["regions"][0]["retained_mb"] * MIB
        results[name] = out.detach(), *torch.autograd.grad(out.float().sum(), (query, key, value, weight))
        del out
        gc.collect()
        torch.cuda.empty_cache()
    assert calls == 1 + 2 + 2
    for name in ("whole", "ours"):
        assert all(torch.equal(a, b) for a, b in zip(results[name], results["plain"], strict=True))
    kept = LENGTH * HEADS * (DIM * 2 + 4)  # the output and the LSE
    assert abs(retained["ours"] - retained["whole"] - kept) <= 2 * MIB
    assert retained["whole"] < retained["ours"] < retained["plain"]


class Forwards(TorchDispatchMode):
    """How often attention ran. What a checkpoint hands back from what it kept does not run."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.stream_attention.forward.default
        return op(*args, **(kwargs or {}))


def test_attention_runs_once_under_the_policy() -> None:
    query, key, value = tensors(requires_grad=True)

    def block(query: Tensor) -> Tensor:
        return attention(query.tanh(), key, value, causal=True, backend="triton")

    for options, runs in (({"use_reentrant": False}, 2), (stream_checkpoint_policy(), 1)):
        with Forwards() as forwards:
            checkpoint(block, query, **options).sum().backward()
        assert forwards.count == runs
