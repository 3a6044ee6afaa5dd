"""Random sequences of public calls: each launches what it launches with an empty launch cache.

A call is a dict of plain values. The next one changes some of them, or is an earlier one again, so that keys come back
after lengths, layouts, options and the state of torch around them have changed. Each is computed with the cache as it
is and with an empty one, under `pretend_gpu`. Kernels, grids, parameters, what each address points to, memory that is
filled, how results lie, errors and warnings are equal; so they are of backwards, some of them much later.

RANDOM_LAUNCHES=600 in the environment runs for so many seconds, over new seeds.
"""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no driver; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from random_calls import KINDS, STATE, Call, changed, drawn, laid_out, prepared
from torch.utils._python_dispatch import TorchDispatchMode

import stream_attention as sa
from pretend_gpu import Launched, pretend_gpu
from stream_attention.dispatch import launch_cache
from stream_attention.gpu import driver, scratch
from stream_attention.ops import varlen

SECONDS = float(os.environ.get("RANDOM_LAUNCHES", "0"))

# The state of torch


class _Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def state_of(call: Call) -> Iterator[None]:
    with ExitStack() as stack:
        if call["grad_mode"] == "off":
            stack.enter_context(torch.no_grad())
        elif call["grad_mode"] != "on":
            stack.enter_context(torch.inference_mode())
        if call["autocast"]:
            stack.enter_context(torch.autocast("cpu", call["autocast"]))
        if call["forced"] != "auto":
            stack.enter_context(sa.force_backend(call["forced"]))
        if call["mode"]:
            stack.enter_context(_Watching())
        if call["profiled"]:
            stack.enter_context(torch.autograd.profiler.profile(use_kineto=False))
        torch.backends.cuda.matmul.allow_tf32 = call["tf32"]
        torch.use_deterministic_algorithms(call["algorithms"])
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.use_deterministic_algorithms(False)


def relaid(t: Tensor) -> Tensor:
    """What hooks unpack: the same numbers, which may lie elsewhere."""
    return laid_out("shifted", *t.shape, dtype=t.dtype).copy_(t) if t.dim() > 2 and t.is_floating_point() else t


def by_columns(t: Tensor) -> Tensor:
    return t.transpose(-2, -3).contiguous().transpose(-2, -3) if t.dim() > 2 else t


HOOKS: tuple[Any, ...] = (*[None] * 8, (lambda t: t, lambda t: t), (lambda t: t, relaid), (by_columns, lambda t: t))


def arriving(rng: random.Random, out: Tensor) -> Tensor:
    """A gradient, as it may lie."""
    kind = rng.choice(("as out", "as out", "expanded", "by head", "shifted", "gapped", "channels apart", "negative"))
    if kind == "expanded" or out.dim() < 3:
        return torch.ones((), dtype=out.dtype).expand(out.shape)
    return laid_out(kind, *out.shape, dtype=out.dtype)


# What is compared


class Outcome(NamedTuple):
    launches: list[Any]
    results: Any  # how they lie, or the error
    warned: list[str]


class Recorder:
    """Runs functions, and records what each launches and allocates."""

    def __init__(self, launches: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
        self._launches = launches
        self._made: list[Tensor] = []
        self._made_before: list[int] = []  # of each launch; later ones may lie where a copy that it read has lain
        empty, launch = scratch.empty, driver.launch

        def recorded(*arguments: Any) -> Tensor:
            self._made.append(empty(*arguments))
            return self._made[-1]

        def launched(*arguments: Any) -> None:
            launch(*arguments)
            self._made_before.append(len(self._made))

        def filled(address: int, value: int, count: int, stream: int) -> None:
            launches.append(Launched("fill", value, str(count).encode(), (address,)))
            self._made_before.append(len(self._made))

        monkeypatch.setattr(driver, "launch", launched)
        monkeypatch.setattr(scratch, "empty", recorded)
        monkeypatch.setattr(driver, "fill_words", filled)

    def __call__(self, function: Callable[[], Any], tensors: list[Tensor]) -> tuple[Outcome, list[Tensor]]:
        self._launches.clear()
        self._made.clear()
        self._made_before.clear()
        sys.modules["stream_attention.ops.attention"]._warned_of_layout = False
        results: list[Tensor] = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = function()
                results = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
                described: Any = [lies(t) for t in results]
            except Exception as error:
                described = type(error), str(error)
        storages = [t.untyped_storage() for t in (*tensors, *self._made)]
        pieces = [range(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]

        def place(address: int, made: int) -> Any:
            there = enumerate(pieces[: len(tensors) + made])
            return next(((i, address - piece.start) for i, piece in there if address in piece), bool(address))

        pairs = zip(self._launches, self._made_before, strict=True)
        launches = [(one, [place(at, made) for at in one.addresses]) for one, made in pairs]
        return Outcome(launches, described, [str(one.message) for one in warned]), results


def lies(t: Tensor) -> Any:
    node = t.grad_fn and type(t.grad_fn).__name__
    return t.shape, t.stride(), t.dtype, t.requires_grad, node, t.is_inference(), t._is_view()


@contextmanager
def empty_store() -> Iterator[None]:
    """The launch cache without what it keeps, until the end of the block."""
    kept = launch_cache._families, launch_cache._order
    launch_cache._families, launch_cache._order = {}, deque()
    try:
        yield
    finally:
        launch_cache._families, launch_cache._order = kept


class Graph(NamedTuple):
    """Results of a call with gradients: computed with the cache as it was, and with an empty one."""

    call: Call
    tensors: list[Tensor]
    cached: list[Tensor]
    fresh: list[Tensor]


class Sequence:
    """A random sequence of calls."""

    def __init__(self, seed: int, record: Recorder) -> None:
        self.seed, self.rng, self.record = seed, random.Random(seed), record
        self.seen: deque[Call] = deque(maxlen=30)
        self.graphs: deque[Graph] = deque(maxlen=4)
        self.caches: dict[Any, Any] = {}
        self.kinds = self.rng.sample(list(KINDS), self.rng.choice((1, 2, 3)))
        self.computed = self.refused = self.repeated = self.backwards = 0

    def next_call(self) -> Call:
        at_random = self.rng.random()
        if at_random < 0.1 or not self.seen:
            return drawn(self.rng, self.rng.choice(self.kinds))
        earlier = self.rng.choice(self.seen)
        return earlier if at_random < 0.3 else changed(self.rng, earlier)

    def step(self) -> None:
        if self.graphs and self.rng.random() < 0.4:
            return self.backward(self.rng.choice(self.graphs))
        call, hooks = self.next_call(), self.rng.choice(HOOKS)
        compute, tensors = prepared(call, self.caches)

        def computed() -> Any:
            with ExitStack() as stack:
                if hooks is not None:
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
                stack.enter_context(state_of(call))
                return compute()

        size = launch_cache.size()
        cached, results = self.record(computed, tensors)
        with empty_store():
            fresh, others = self.record(computed, tensors)
        self.check(call, cached, fresh)
        if isinstance(cached.results, tuple):
            self.refused += 1
            return
        self.computed += 1
        self.repeated += launch_cache.size() == size
        self.seen.append(call)
        if any(t.requires_grad for t in results):
            self.graphs.append(Graph(call, tensors, results, others))
            for _ in range(self.rng.choice((0, 1, 2))):
                self.backward(self.graphs[-1])

    def backward(self, graph: Graph) -> None:
        """Of one of its results, or of all, with gradients that lie somehow."""
        wanted = [t for t in dict.fromkeys(graph.tensors) if t.requires_grad and t.is_leaf]
        places = [place for place, t in enumerate(graph.cached) if t.requires_grad]
        places = places if self.rng.random() < 0.3 else places[: self.rng.choice((1, 1, -1)) or 1]
        grads = [arriving(self.rng, graph.cached[place]) for place in places]
        state = {name: self.rng.choice(values) for name, values in STATE.items()} | {"grad_mode": "on"}
        again = self.rng.random() < 0.03

        def gradients(results: list[Tensor]) -> Callable[[], Any]:
            def computed() -> Any:
                with state_of(state):
                    outputs = [results[place] for place in places]
                    return torch.autograd.grad(
                        outputs, wanted, grads, retain_graph=True, allow_unused=True, create_graph=again
                    )

            return computed

        cached, _ = self.record(gradients(graph.cached), [*graph.tensors, *graph.cached, *grads])
        with empty_store():
            fresh, _ = self.record(gradients(graph.fresh), [*graph.tensors, *graph.fresh, *grads])
        self.backwards += 1
        self.check(graph.call | {"backward": state, "grads": [(g.shape, g.stride()) for g in grads]}, cached, fresh)

    def check(self, call: Call, cached: Outcome, fresh: Outcome) -> None:
        assert cached == fresh, f"seed {self.seed}, {call}\n{difference(cached, fresh)}"


def difference(cached: Outcome, fresh: Outcome) -> str:
    lines = [f"{name}: {one}\n   not {other}" for name, one, other in zip(Outcome._fields, cached, fresh, strict=True)
             if one != other and name != "launches"]  # fmt: skip
    for one, other in zip(cached.launches, fresh.launches, strict=False):
        if one != other:
            (made, places), (expected, others) = one, other
            differ = [at for at, pair in enumerate(zip(made.parameters, expected.parameters, strict=False))
                      if pair[0] != pair[1]]  # fmt: skip
            lines.append(
                f"{made.kernel} {made.grid} {places}\n not {expected.kernel} {expected.grid} {others} {differ}"
            )
    return "\n".join([*lines, f"{len(cached.launches)} launches, not {len(fresh.launches)}"])


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Offsets are not read where lengths are given, as on a GPU."""
    read = varlen.longest

    def longest(name: str, offsets: Tensor, rows: int, given: int | None) -> int:
        return read(name, offsets, rows, given) if given is None else min(given, rows)

    monkeypatch.setattr(varlen, "longest", longest)
    with pretend_gpu() as launches:
        yield Recorder(launches, monkeypatch)


def run(seed: int, steps: int, record: Recorder) -> Sequence:
    launch_cache.clear()
    sequence = Sequence(seed, record)
    for _ in range(steps):
        sequence.step()
    return sequence


@pytest.mark.parametrize("limit", [256, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_launch_what_fresh_ones_do(
    seed: int, limit: int, record: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_cache, "LIMIT", limit)
    sequence = run(seed, 80, record)
    assert sequence.computed > 20 and launch_cache.size() <= limit


@pytest.mark.skipif(not SECONDS, reason="set RANDOM_LAUNCHES to a number of seconds")
def test_many_random_calls(record: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    end, seed = time.monotonic() + SECONDS, int(time.time())
    while time.monotonic() < end:
        seed += 1
        monkeypatch.setattr(launch_cache, "LIMIT", random.Random(seed).choice((256, 8, 3)))
        run(seed, 80, record)
