"""The launch cache: no stale launch, bounded, safe in threads and after fork, and invisible to whoever watches.

Here on a CPU, by the eager backend. test_launch_cache_interpreted.py runs the cases on Triton's interpreter, and
test_launch_cache_gpu.py on a GPU. launch_cases.py has the calls and what is changed between them.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from launch_cases import (
    CALLS,
    DECODE,
    DENSE,
    GROUPS,
    PACKED,
    Outcome,
    Sizes,
    Source,
    difference,
    expected,
    hugging_face,
    run,
    same_bits,
    stale,
    uncached,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from stream_attention import ContiguousKV, PagedKV, attention, decode_attention, varlen_attention
from stream_attention.dispatch import launch_cache

SIZES = Sizes()
FORWARD, BACKWARD = torch.ops.stream_attention.forward.default, torch.ops.stream_attention.backward.default
TWICE = ("plain", "plain, no gradients", "mask", "softcap", "packed", "packed, no gradients", "decode", "decode, paged")
"""Calls that are varied twice each, with the base call in between; the others once."""


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    launch_cache.clear()
    yield
    launch_cache.clear()


def qkv(seed: int = 0, wanted: bool = True, **sizes: Any) -> list[Tensor]:
    tensors = Source(Sizes(**sizes), seed).qkv().values()
    return [t.requires_grad_(wanted) for t in tensors]


def warm(call: Callable[[], Any], times: int = 2) -> Any:
    """A call that is in the cache, with its backward where it has one."""
    for _ in range(times):
        result = call()
        first = result[0] if isinstance(result, tuple) else result
        if first.requires_grad:
            first.sum().backward()
    return result


def out_and_grads(compute: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    out = compute(*tensors)
    grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def assert_same(actual: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(actual) == len(wanted)
    for n, (a, b) in enumerate(zip(actual, wanted, strict=True)):
        assert a.shape == b.shape and a.dtype is b.dtype and same_bits(a.detach(), b.detach()), f"tensor {n} differs"


# No stale launch


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", CALLS)
def test_no_stale_launch_after_a_change_of(name: str, group: str) -> None:
    assert stale(name, group, SIZES, quick=name not in TWICE) == []


@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("group", [group for group in GROUPS if group != "refusals"])  # it takes more than we do
def test_no_stale_launch_in_the_function_that_transformers_calls(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(CALLS, "hugging face", hugging_face)
    assert stale("hugging face", group, SIZES, quick=True) == []


NOT_CACHED_HERE = {
    *("fp8", "fp8, codes", "quantize_fp8", "append", "append, three tokens in pages", "merge_states"),
    *("packed, lengths read", "write_kv", "write_kv in e4m3", *DECODE),
}
"""On a CPU FP8 is computed by the reference, and tokens are appended and states merged in plain torch. The longest of
lengths that are read is part of the key. Caches keep their own launches."""


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_CACHED_HERE])
def test_a_repeated_call_is_in_the_cache_and_adds_nothing(name: str) -> None:
    build = CALLS[name]
    assert not run(build(SIZES, 0)).error
    entries = launch_cache.size()
    assert entries > 0
    for seed in (1, 2, 3):
        assert difference(run(build(SIZES, seed)), expected(build(SIZES, seed))) == ""
        assert launch_cache.size() == entries


@pytest.mark.xdist_group("transformers")
def test_integrations_share_the_entries_of_the_functions_they_call() -> None:
    pytest.importorskip("transformers")
    assert not run(hugging_face(SIZES, 0)).error
    entries = launch_cache.size()
    assert entries > 0
    assert difference(run(hugging_face(SIZES, 1)), expected(hugging_face(SIZES, 1))) == ""
    assert launch_cache.size() == entries


def test_results_are_fresh_memory_each_time() -> None:
    query, key, value = qkv()
    results = [attention(query, key, value, causal=True, return_lse=True) for _ in range(4)]
    assert len({t.untyped_storage().data_ptr() for pair in results for t in pair}) == 8
    grads = [torch.autograd.grad(out.sum(), (query, key, value)) for out, _ in results]
    assert len({t.untyped_storage().data_ptr() for three in grads for t in three}) == 12


def test_values_are_read_in_every_call() -> None:
    """Tensors that stay where they are, changed in place between calls."""
    query, key, value = qkv(wanted=False)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 5, "max_seqlen_k": 5}
    for step in range(4):
        query.mul_(-0.5)
        mask[step % 2, :, :, step] = False
        ends[1] = step + 1
        calls = (
            lambda: attention(query, key, value, mask=mask),
            lambda: varlen_attention(query[0], key[0], value[0], **packed, causal=True),
        )
        for call in calls:
            actual = call()
            with uncached():
                assert same_bits(actual, call())


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_cache_that_grows_is_read_as_it_is(paged: bool) -> None:
    source = Source(SIZES, 0)
    shape = (8, 8) if paged else (2, 32)
    key, value = (torch.full((*shape, 2, 8), torch.nan) for _ in range(2))
    lengths = torch.zeros(2, dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    cache = PagedKV(key, value, table, lengths) if paged else ContiguousKV(key, value, lengths)
    for new in (5, 1, 1, 9, 1, 1):
        cache.append(source.normal(2, new, 2, 8), source.normal(2, new, 2, 8))
        query = source.normal(2, 1, 4, 8)
        out, lse = decode_attention(query, cache, return_lse=True)
        assert not out.isnan().any()
        with uncached():
            assert_same([out, lse], list(decode_attention(query, cache, return_lse=True)))
    if paged:
        table.copy_(table.flip(0))  # the same tensor says other pages
        with uncached():
            wanted = decode_attention(query, cache)
        assert same_bits(decode_attention(query, cache), wanted) and not torch.equal(wanted, out)


def test_the_same_dropout_is_drawn_whether_or_not_a_call_is_in_the_cache() -> None:
    query, key, value = qkv()
    drop = partial(attention, query, key, value, dropout_p=0.5)
    warm(drop)
    torch.manual_seed(0)
    actual = [drop() for _ in range(3)]
    torch.manual_seed(0)
    with uncached():
        wanted = [drop() for _ in range(3)]
    assert_same(actual, wanted)
    assert not torch.equal(actual[0], actual[1])


def test_calls_without_dropout_draw_no_random_numbers() -> None:
    before = torch.get_rng_state()
    warm(lambda: attention(*qkv(), seed=3))
    assert torch.equal(torch.get_rng_state(), before)


# Bounded


def plain_of_length(length: int) -> Tensor:
    return attention(*qkv(Tq=length, wanted=False))


def test_the_bound_drops_the_oldest_entries_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_of_length(1)
    entries = launch_cache.size()  # of one call
    assert entries > 0
    launch_cache.clear()
    assert launch_cache.size() == 0
    monkeypatch.setattr(launch_cache, "LIMIT", 8 * entries)
    sizes = []
    for length in range(1, 21):
        plain_of_length(length)
        sizes.append(launch_cache.size())
    assert sizes == [min(n, 8) * entries for n in range(1, 21)]
    monkeypatch.setattr(launch_cache, "LIMIT", 1000)  # a call that is no longer there would add to the size from now on
    for length in range(15, 21):
        plain_of_length(length)
    assert launch_cache.size() == 8 * entries
    plain_of_length(1)
    assert launch_cache.size() == 9 * entries


def test_a_full_cache_still_computes_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "LIMIT", 2)
    for turn in range(2):
        for name in (*DENSE, *PACKED, *DECODE):
            assert difference(run(CALLS[name](SIZES, turn)), expected(CALLS[name](SIZES, turn))) == "", name
            assert launch_cache.size() <= 2


def test_a_graph_outlives_its_entries() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors, causal=True, softcap=2.0))
    out = attention(*tensors, causal=True, softcap=2.0)
    launch_cache.clear()
    actual = torch.autograd.grad(out.sum(), tensors)
    with uncached():
        wanted = torch.autograd.grad(attention(*tensors, causal=True, softcap=2.0).sum(), tensors)
    assert_same(list(actual), list(wanted))


# Nothing kept alive


@pytest.mark.parametrize("name", CALLS)
def test_the_cache_keeps_no_tensor_and_no_memory(name: str) -> None:
    watched: list[tuple[str, weakref.ref[Any]]] = []

    def watch(what: str, tensors: Any) -> None:
        for n, t in enumerate(tensors):
            if isinstance(t, Tensor):
                watched.extend(
                    ((f"{what} {n}", weakref.ref(t)), (f"memory of {what} {n}", weakref.ref(t.untyped_storage())))
                )

    def once(seed: int) -> None:
        call = CALLS[name](SIZES, seed)
        outcome = run(call)
        assert not outcome.error
        watch("argument", call.tensors.values())
        watch("result", outcome.tensors)
        if isinstance(call.op, nn.Module):
            watch("parameter", call.op.parameters())

    once(0)
    once(1)
    gc.collect()
    assert [what for what, reference in watched if reference() is not None] == []


def test_a_graph_holds_the_inputs_no_longer_than_it_lives() -> None:
    warm(lambda: attention(*qkv()))
    tensors = qkv()
    out = attention(*tensors)
    watched = [weakref.ref(t) for t in tensors]
    del tensors
    gc.collect()
    assert all(reference() is not None for reference in watched)
    del out
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3


# Threads and processes


def test_threads_that_mix_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("plain", "mask", "all modifiers", "packed", "decode, paged", "window")
    monkeypatch.setattr(launch_cache, "LIMIT", 6)  # so that entries are dropped all the time
    sizes = [Sizes(Tq=length) for length in (3, 4, 5, 6)]
    wanted = {(name, s): expected(CALLS[name](s, 1)) for name in names for s in sizes}
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(own: int) -> None:
        start.wait()
        cases = list(wanted)
        for turn in range(2):
            for n in range(len(cases)):
                name, s = cases[(n * (2 * own + 1) + turn) % len(cases)]
                found = difference(run(CALLS[name](s, 1)), wanted[name, s])
                if found:
                    failures.append(f"thread {own}, {name}, {s.Tq} queries: {found}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    assert launch_cache.size() <= 6


def test_switches_of_one_thread_are_not_those_of_another() -> None:
    """Autocast, grad mode and inference mode belong to a thread."""
    tensors = qkv()
    warm(lambda: attention(*tensors))
    inside, done = threading.Event(), threading.Event()
    results: dict[str, Tensor] = {}

    def other() -> None:
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            results["first"] = attention(*tensors)
            inside.set()
            done.wait(60)
            results["second"] = attention(*tensors)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    here = attention(*tensors)
    done.set()
    thread.join(60)
    assert here.dtype is torch.float32 and here.requires_grad
    for result in results.values():
        assert result.dtype is torch.bfloat16 and not result.requires_grad


def test_a_backward_in_another_thread() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors, causal=True))
    out = attention(*tensors, causal=True)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(out.sum(), tensors)))
    thread.start()
    thread.join(60)
    with uncached():
        wanted = torch.autograd.grad(attention(*tensors, causal=True).sum(), tensors)
    assert_same(found, list(wanted))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_from_a_warm_one() -> None:
    names = ("plain", "all modifiers", "packed", "decode, paged", "StreamMultiheadAttention")
    other = Sizes(Tq=6)
    wanted = {(name, s): expected(CALLS[name](s, 2)) for name in names for s in (SIZES, other)}
    for name in names:
        assert not run(CALLS[name](SIZES, 0)).error

    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        status = 1
        try:
            signal.alarm(60)  # a child that waits for ever is ended
            failures = [key for key, outcome in wanted.items() if difference(run(CALLS[key[0]](key[1], 2)), outcome)]
            status = 2 if failures else 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for (name, s), outcome in wanted.items():  # and the parent is as it was
        assert difference(run(CALLS[name](s, 2)), outcome) == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_while_another_thread_keeps_calls() -> None:
    """The child has no such thread, which would let go of the lock."""
    stop = threading.Event()

    def keep() -> None:
        number = 0
        while not stop.is_set():
            launch_cache.keep(("a family", number := number + 1), None)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        for _ in range(40):
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                launch_cache.keep(("a family", 0), None)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()


def test_a_device_that_torch_numbers_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of MPS: there is no current GPU to ask for."""
    if hasattr(torch._C, "_cuda_getDevice"):
        monkeypatch.delattr(torch._C, "_cuda_getDevice")
    monkeypatch.setattr(Tensor, "get_device", lambda t: 0)
    for name in ("plain", "packed", "decode"):
        for seed in (0, 1):
            assert not run(CALLS[name](SIZES, seed)).error
    assert launch_cache.size() == 3


# Whoever watches sees what is to be seen


class Seen(TorchDispatchMode):
    """The ops of ours that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (FORWARD, BACKWARD):
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


WATCHED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "plain": lambda t: attention(*t),
    "all modifiers": lambda t: attention(*t, causal=True, softcap=2.0, bias=torch.ones(5, 7), sink=torch.ones(4)),
    "packed": lambda t: varlen_attention(
        *(x.flatten(0, 1) for x in t),
        cu_seqlens_q=torch.tensor([0, 4, 10]),
        cu_seqlens_k=torch.tensor([0, 5, 14]),
        max_seqlen_q=6,
        max_seqlen_k=9,
    ),
}
watched_calls = pytest.mark.parametrize("call", WATCHED.values(), ids=WATCHED)


@watched_calls
@pytest.mark.parametrize("wanted", [True, False], ids=["gradients", "no gradients"])
def test_a_dispatch_mode_sees_the_ops_of_a_warm_call(call: Callable[[list[Tensor]], Tensor], wanted: bool) -> None:
    tensors = qkv(wanted=wanted)
    warm(lambda: call(tensors))
    with Seen() as seen:
        out = call(tensors)
        if wanted:
            out.sum().backward()
    assert seen.ops == [FORWARD, BACKWARD][: 2 if wanted else 1]
    with uncached():
        assert same_bits(out.detach(), call(tensors).detach())


def test_a_dispatch_mode_around_the_backward_alone_sees_it() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors))
    out = attention(*tensors)
    with Seen() as seen:
        actual = torch.autograd.grad(out.sum(), tensors)
    assert seen.ops == [BACKWARD]
    with uncached():
        assert_same(list(actual), list(torch.autograd.grad(attention(*tensors).sum(), tensors)))


def test_a_function_mode_sees_the_op_of_a_warm_call() -> None:
    class Functions(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.functions: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.functions.append(func)
            return func(*args, **(kwargs or {}))

    for wanted in (False, True):
        tensors = qkv(wanted=wanted)
        warm(lambda tensors=tensors: attention(*tensors))
        with Functions() as seen:
            attention(*tensors)
        assert FORWARD in seen.functions


@watched_calls
def test_flops_of_a_warm_call_are_counted(call: Callable[[list[Tensor]], Tensor]) -> None:
    def counted(tensors: list[Tensor]) -> list[int]:
        totals = []
        for run_one in (lambda: call(tensors), lambda: call(tensors).sum().backward(), partial(alone, tensors)):
            with FlopCounterMode(display=False) as counter:
                run_one()
            totals.append(counter.get_total_flops())
        return totals

    def alone(tensors: list[Tensor]) -> None:
        with torch.no_grad():
            call(tensors)

    tensors = qkv()
    with uncached():
        wanted = counted(tensors)
    assert all(wanted)
    warm(lambda: call(tensors))
    with torch.no_grad():
        warm(lambda: call(tensors))
    assert counted(tensors) == wanted


@pytest.mark.parametrize("inner", ["a dispatch subclass", "a function subclass"])
def test_a_subclass_sees_a_warm_call(inner: str) -> None:
    seen: list[Any] = []

    class Dispatching(Tensor):
        @staticmethod
        def __new__(cls, of: Tensor) -> Any:
            wrapper = Tensor._make_wrapper_subclass(cls, of.shape, dtype=of.dtype, device=of.device)
            wrapper.of = of
            return wrapper

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*(a.of if isinstance(a, Dispatching) else a for a in args), **(kwargs or {}))

    class Functioning(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensors = qkv(wanted=False)
    plain = warm(lambda: attention(*tensors))
    wrap = Dispatching if inner == "a dispatch subclass" else lambda t: t.as_subclass(Functioning)
    for place in range(3):
        seen.clear()
        out = attention(*(wrap(t) if n == place else t for n, t in enumerate(tensors)))
        assert FORWARD in seen
        assert same_bits(out.as_subclass(Tensor), plain)


@watched_calls
def test_a_profiler_sees_a_warm_call_by_name(call: Callable[[list[Tensor]], Tensor]) -> None:
    tensors = qkv()
    warm(lambda: call(tensors))
    with torch.no_grad():
        warm(lambda: call(tensors))
    with uncached():
        wanted = out_and_grads(lambda *t: call(list(t)), tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        actual = out_and_grads(lambda *t: call(list(t)), tensors)
    names = [event.key for event in profiler.key_averages()]
    assert [name for name in names if "stream_attention" in name and "forward" in name], names
    assert [name for name in names if "stream_attention" in name and "backward" in name], names
    assert_same(actual, wanted)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call(tensors)
    assert [event.key for event in profiler.key_averages() if "stream_attention" in event.key]


def test_func_transforms_of_a_warm_call() -> None:
    tensors = qkv()

    def loss(*tensors: Tensor) -> Tensor:
        return attention(*tensors, causal=True).square().sum()

    plain = [t.detach() for t in tensors]
    warm(lambda: attention(*tensors, causal=True))
    with torch.no_grad():
        warm(lambda: attention(*plain, causal=True))
    with uncached():
        wanted = torch.autograd.grad(loss(*tensors), tensors)
        rows = torch.stack([attention(q, *plain[1:], causal=True) for q in torch.stack([plain[0], 2 * plain[0]])])
    assert_same(list(torch.func.grad(loss, argnums=(0, 1, 2))(*plain)), list(wanted))
    total, pull = torch.func.vjp(loss, *plain)
    assert_same(list(pull(torch.ones_like(total))), list(wanted))
    mapped = torch.vmap(lambda q: attention(q, *plain[1:], causal=True))(torch.stack([plain[0], 2 * plain[0]]))
    torch.testing.assert_close(mapped, rows)
    per_row = torch.vmap(torch.func.grad(loss), in_dims=(0, None, None))(torch.stack([plain[0], plain[0]]), *plain[1:])
    torch.testing.assert_close(per_row, torch.stack([wanted[0], wanted[0]]))
    again = torch.autograd.grad(loss(*tensors), tensors)  # and the plain call is as it was
    assert_same(list(again), list(wanted))


def test_batched_gradients_of_a_warm_call() -> None:
    """The backward gets a gradient that is many: `is_grads_batched`, and Jacobians by rows."""
    tensors = qkv()
    warm(lambda: attention(*tensors))
    out = attention(*tensors)
    grads = torch.stack([torch.ones_like(out), torch.linspace(-1, 1, out.numel()).view(out.shape)])
    alone = [torch.autograd.grad(out, tensors, grad, retain_graph=True) for grad in grads]
    batched = torch.autograd.grad(out, tensors, grads, is_grads_batched=True, retain_graph=True)
    for n, found in enumerate(batched):
        torch.testing.assert_close(found, torch.stack([one[n] for one in alone]))
    small = qkv(B=1, Tq=1, Tk=2, Hq=1, Hkv=1, D=2, Dv=2)
    call = partial(attention, key=small[1], value=small[2])
    warm(lambda: call(small[0]))
    loop, mapped = (torch.autograd.functional.jacobian(call, small[0], vectorize=v) for v in (False, True))
    torch.testing.assert_close(mapped, loop)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_whole_after_a_warm_call(compiler: str) -> None:
    tensors = qkv()
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    block = partial(attention, causal=True, softcap=2.0)
    with uncached():
        wanted = out_and_grads(block, tensors)
    warm(lambda: block(*tensors))
    entries = launch_cache.size()
    compiled = torch.compile(block, fullgraph=True, backend=record)
    for _ in range(2):
        assert_same(out_and_grads(compiled, tensors), wanted)
    assert len(graphs) == 1
    assert [node for node in graphs[0].graph.nodes if "stream_attention" in str(node.target)]
    assert_same(out_and_grads(block, tensors), wanted)
    assert launch_cache.size() >= entries
    launch_cache.clear()
    assert_same(out_and_grads(compiled, tensors), wanted)  # a graph does not depend on what is in the cache


@pytest.mark.usefixtures("fresh_compiler")
def test_a_graph_compiled_without_the_cache_is_right_with_it() -> None:
    tensors = qkv()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with uncached():
        wanted = out_and_grads(compiled, tensors)
    assert_same(out_and_grads(compiled, tensors), wanted)
    assert_same(out_and_grads(attention, tensors), wanted)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_traces_of_a_warm_call_have_the_op() -> None:
    tensors = qkv(wanted=False)
    wanted = warm(lambda: attention(*tensors, causal=True))
    others = qkv(seed=1, wanted=False)
    with uncached():
        of_others = attention(*others, causal=True)
    for mode in ("real", "fake"):
        graph = make_fx(partial(attention, causal=True), tracing_mode=mode)(*tensors)
        assert [node for node in graph.graph.nodes if "stream_attention" in str(node.target)], graph.graph
        assert same_bits(graph(*others), of_others)
    traced = torch.jit.trace(partial_causal, tuple(tensors), check_trace=False)
    assert "stream_attention" in str(traced.graph)
    assert same_bits(traced(*tensors), wanted) and same_bits(traced(*others), of_others)
    exported = torch.export.export(Causal(), tuple(tensors))
    assert [node for node in exported.graph.nodes if node.target is FORWARD]
    assert same_bits(exported.module()(*others), of_others)


def partial_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, causal=True)


class Causal(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return partial_causal(query, key, value)


def test_fake_tensors_after_a_warm_call() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        out = attention(*fakes)
        out.sum().backward()
        made = attention(*(torch.empty(t.shape, requires_grad=True) for t in tensors))
    assert out.fake_mode is mode and made.fake_mode is mode and out.shape == made.shape == (2, 5, 4, 8)
    assert [t.grad.shape for t in fakes] == [t.shape for t in tensors]
    entries = launch_cache.size()
    fake = attention(*(t.detach() for t in fakes))  # outside of the mode, a fake tensor is one still
    assert fake.shape == out.shape and launch_cache.size() == entries
    on_meta = attention(*(t.detach().to("meta") for t in tensors))
    assert on_meta.device.type == "meta" and on_meta.shape == out.shape


# Autograd is that of an op


def test_forward_mode_is_refused_after_a_warm_call() -> None:
    query, key, value = (t.detach() for t in qkv())
    plain = warm(lambda: attention(query, key, value))
    words = r'no forward-mode derivative .* Pass backend="reference"'
    with forward_ad.dual_level():
        for place, t in enumerate((query, key, value)):
            mixed = [query, key, value]
            mixed[place] = forward_ad.make_dual(t, torch.ones_like(t))
            with pytest.raises(NotImplementedError, match=words):
                attention(*mixed)
            with torch.no_grad(), pytest.raises(NotImplementedError, match=words):
                attention(*mixed)
        assert same_bits(attention(query, key, value), plain)
    with pytest.raises(NotImplementedError, match=words):
        torch.func.jvp(lambda q: attention(q, key, value), (query,), (torch.ones_like(query),))


@watched_calls
def test_a_second_derivative_is_refused_after_a_warm_call(call: Callable[[list[Tensor]], Tensor]) -> None:
    tensors = qkv()
    warm(lambda: call(tensors))
    (first,) = torch.autograd.grad(call(tensors).square().sum(), tensors[0], create_graph=True)
    assert first.requires_grad
    with pytest.raises(NotImplementedError, match=r'no second derivative .* Pass backend="reference"'):
        first.sum().backward()
    (plain,) = torch.autograd.grad(call(tensors).square().sum(), tensors[0])
    assert same_bits(first.detach(), plain)


def test_create_graph_and_no_create_graph_do_not_share_a_backward() -> None:
    tensors = qkv()
    for create in (False, True, False, True):
        (grad,) = torch.autograd.grad(attention(*tensors).square().sum(), tensors[0], create_graph=create)
        assert grad.requires_grad is create


CHANGED_IN_PLACE = r"one of the variables needed for gradient computation has been modified by an inplace operation"


@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "causal": True}], ids=["torch's CPU op", "blocked"])
@pytest.mark.parametrize("what", ["query", "key", "value", "out", "lse"])
def test_a_change_in_place_before_the_backward_is_an_error(what: str, options: dict[str, Any]) -> None:
    tensors = [t.detach().requires_grad_() for t in qkv(Tk=5, Hkv=4)]
    warm(lambda: attention(*tensors, **options))
    inputs = [t * 1.0 for t in tensors]
    out, lse = attention(*inputs, **options, return_lse=True)
    {"query": inputs[0], "key": inputs[1], "value": inputs[2], "out": out, "lse": lse}[what].mul_(2.0)
    with pytest.raises(RuntimeError, match=CHANGED_IN_PLACE):
        (lse if what == "lse" else out).sum().backward()


def test_a_seed_and_offsets_changed_before_the_backward_are_an_error() -> None:
    tensors = qkv()
    seed = torch.tensor([3, 4])
    warm(lambda: attention(*tensors, dropout_p=0.3, seed=seed))
    out = attention(*tensors, dropout_p=0.3, seed=seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match=CHANGED_IN_PLACE):
        out.sum().backward()


def test_a_copy_of_the_output_may_be_changed() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors))
    out = attention(*tensors) * 1.0
    out.mul_(2.0)
    actual = torch.autograd.grad(out.sum(), tensors)
    with uncached():
        wanted = torch.autograd.grad((attention(*tensors) * 2.0).sum(), tensors)
    assert_same(list(actual), list(wanted))


def test_hooks_and_retained_gradients_of_a_warm_call() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors))
    for t in tensors:
        t.grad = None
    seen: list[Tensor] = []
    accumulated: list[int] = []
    out = attention(*tensors)
    out.register_hook(lambda grad: seen.append(grad) or grad * 2)
    out.retain_grad()
    assert out.grad_fn is not None
    out.grad_fn.register_hook(lambda inputs, outputs: accumulated.append(len(inputs)))
    handles = [t.register_post_accumulate_grad_hook(lambda t: accumulated.append(-1)) for t in tensors]
    arriving = torch.linspace(-1, 1, out.numel()).view(out.shape)
    out.backward(arriving, retain_graph=True)
    for handle in handles:
        handle.remove()
    assert same_bits(seen[0], arriving) and same_bits(out.grad, 2 * arriving)
    assert accumulated.count(-1) == 3 and len(accumulated) == 4
    with uncached():
        wanted = torch.autograd.grad(attention(*tensors), tensors, 2 * arriving)
    assert_same([t.grad for t in tensors], list(wanted))


def test_a_graph_that_is_retained_gives_the_same_twice() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors, causal=True, softcap=2.0))
    out = attention(*tensors, causal=True, softcap=2.0)
    first, second = (torch.autograd.grad(out.sum(), tensors, retain_graph=True) for _ in range(2))
    assert_same(list(first), list(second))
    torch.autograd.grad(out.sum(), tensors)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), tensors)


def test_part_of_the_gradients_of_a_graph_that_wants_all() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors))
    out = attention(*tensors)
    every = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    for place, t in enumerate(tensors):
        (alone,) = torch.autograd.grad(out.sum(), t, retain_graph=True)
        assert same_bits(alone, every[place])


def test_two_graphs_of_one_entry_do_not_disturb_each_other() -> None:
    first, second = qkv(seed=1), qkv(seed=2)
    warm(lambda: attention(*first))
    outs = [attention(*tensors) for tensors in (first, second)]
    actual = [torch.autograd.grad(out.sum(), tensors) for out, tensors in zip(outs, (first, second), strict=True)]
    with uncached():
        for tensors, found in zip((first, second), actual, strict=True):
            assert_same(list(found), list(torch.autograd.grad(attention(*tensors).sum(), tensors)))


def test_saved_tensor_hooks_see_what_a_warm_call_saves() -> None:
    tensors = qkv()

    def saved() -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def pack(t: Tensor) -> Tensor:
            shapes.append(tuple(t.shape))
            return t.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = attention(*tensors, causal=True, sink=torch.ones(4))
        grads.append(torch.autograd.grad(out.sum(), tensors))
        return sorted(shapes)

    grads: list[Any] = []
    with uncached():
        wanted = saved()
    assert (2, 5, 4, 8) in wanted
    warm(lambda: attention(*tensors, causal=True, sink=torch.ones(4)))
    assert saved() == wanted
    assert_same(list(grads[1]), list(grads[0]))
    with torch.autograd.graph.save_on_cpu():
        out = attention(*tensors, causal=True, sink=torch.ones(4))
    assert_same(list(torch.autograd.grad(out.sum(), tensors)), list(grads[0]))


@pytest.mark.parametrize("how", ["selective", "ordinary", "reentrant"])
def test_checkpoints_of_a_warm_call(how: str) -> None:
    def policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    def block(*tensors: Tensor) -> Tensor:
        return attention(*(t.sin() for t in tensors), causal=True, dropout_p=0.3).cos()

    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    tensors = qkv()
    torch.manual_seed(0)
    with uncached():
        wanted = out_and_grads(block, tensors)
    warm(lambda: block(*tensors))
    torch.manual_seed(0)
    grads = [t.detach().requires_grad_() for t in tensors]
    out = checkpoint(block, *grads, **options)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    assert_same([out.detach(), *(t.grad for t in grads)], wanted)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_anomalies_are_found_in_a_warm_call() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors))
    with torch.autograd.detect_anomaly():
        out = attention(*tensors)
        with pytest.raises(RuntimeError, match="returned nan values"):
            out.backward(torch.full_like(out, torch.nan))


def test_results_know_where_they_come_from() -> None:
    tensors = qkv()
    warm(lambda: attention(*tensors))
    with uncached():
        wanted = attention(*tensors)
    out, lse = attention(*tensors, return_lse=True)
    assert out.requires_grad and lse.requires_grad and not out.is_leaf and out.grad_fn is lse.grad_fn
    assert out._version == wanted._version and out._is_view() == wanted._is_view()
    with torch.no_grad():
        assert not attention(*tensors).requires_grad
    with torch.inference_mode():
        assert attention(*tensors).is_inference()
    assert not attention(*(t.detach() for t in tensors)).requires_grad


# Switches


def test_turned_off_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "ENABLED", False)
    for name in CALLS:
        assert not run(CALLS[name](SIZES, 0)).error
        assert launch_cache.size() == 0


def test_turned_off_entries_are_not_used_and_on_again_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(DENSE["plain"](SIZES, 1))
    for enabled in (True, False, True):
        monkeypatch.setattr(launch_cache, "ENABLED", enabled)
        assert difference(run(DENSE["plain"](SIZES, 1)), wanted) == ""


def outcomes(name: str, seeds: tuple[int, ...]) -> list[Outcome]:
    return [run(CALLS[name](SIZES, seed)) for seed in seeds]


@pytest.mark.parametrize("name", CALLS)
def test_comparing_changes_no_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [expected(CALLS[name](SIZES, seed)) for seed in (0, 1, 2)]
    monkeypatch.setattr(launch_cache, "COMPARE", True)
    for actual, one in zip(outcomes(name, (0, 1, 2)), wanted, strict=True):
        assert difference(actual, one) == ""


def test_comparing_computes_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of a warm call are done twice: once by its launch, once in the ordinary way."""
    tensors = qkv(wanted=False)

    def products() -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            attention(*tensors, softcap=2.0)
        return sum(event.count for event in profiler.key_averages() if event.key in ("aten::bmm", "aten::baddbmm"))

    warm(lambda: attention(*tensors, softcap=2.0))
    once = products()
    assert once > 0
    monkeypatch.setattr(launch_cache, "COMPARE", True)
    assert products() == 2 * once


def test_comparing_knows_that_dropout_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv()
    monkeypatch.setattr(launch_cache, "COMPARE", True)
    torch.manual_seed(0)
    outs = [warm(lambda: attention(*tensors, dropout_p=0.5), times=1).detach() for _ in range(3)]
    assert not torch.equal(outs[1], outs[2])
    torch.manual_seed(0)
    with uncached():
        assert_same(outs, [attention(*tensors, dropout_p=0.5).detach() for _ in range(3)])


@pytest.mark.parametrize(("value", "enabled", "compare"), [("0", False, False), ("compare", True, True)])
def test_the_environment_sets_the_switches(value: str, enabled: bool, compare: bool) -> None:
    program = (
        "import torch; from stream_attention import attention; from stream_attention.dispatch import launch_cache\n"
        "tensors = torch.randn(3, 1, 4, 2, 8)\n"
        "first = attention(*tensors); second = attention(*tensors)\n"
        "assert torch.equal(first, second)\n"
        "print(launch_cache.ENABLED, launch_cache.COMPARE, launch_cache.size() > 0)"
    )
    environment = os.environ | {"STREAM_ATTENTION_LAUNCH_CACHE": value}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(enabled), str(compare), str(enabled)], done.stderr


def test_a_misspelt_switch_is_refused() -> None:
    environment = os.environ | {"STREAM_ATTENTION_LAUNCH_CACHE": "copmare"}
    command = [sys.executable, "-c", "import stream_attention"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode and "STREAM_ATTENTION_LAUNCH_CACHE: expected 1, 0 or compare; got 'copmare'" in done.stderr


# Saved tensors that come back otherwise


@pytest.mark.parametrize("copied_first", [False, True])
def test_saved_tensors_that_hooks_lay_out_anew(copied_first: bool) -> None:
    """save_on_cpu and activation offloading return contiguous copies of what was saved."""

    def grads(copied: bool) -> list[Tensor]:
        packed = torch.randn(2, 9, 3, 4, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        query, key, value = (t.requires_grad_() for t in packed.unbind(2))
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous() if copied else t, lambda t: t)
        with hooks:
            out = attention(query, key, value, causal=True)
        return list(torch.autograd.grad(out, (query, key, value), torch.ones_like(out)))

    first, second = grads(copied_first), grads(not copied_first)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)
