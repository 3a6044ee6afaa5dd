"""How fast: everybody in turn, one call each per round, so that a change of clock or of load meets them all alike.

Each round takes the next set of inputs; on a GPU the sets together exceed the L2 cache. A GPU's calls are timed by CUDA
events while the host runs ahead (each round is queued behind a short sleep on the device), so launches cost nothing
unless a provider launches more slowly than it computes for a whole round. A call may stand for several of a provider's,
in a CUDA graph or in a row, so that what is around them is shared; who makes it divides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Clock = Literal["events", "graph", "calls", "eager", "wall", "cpu"]
"""CUDA events; these around replays of a CUDA graph; many calls in a row on a GPU, host and device, on inputs that stay
or that rotate; perf_counter; or the CPU time of the process, which other load on the machine hardly touches. That is
for one thread: with more, threads that wait for each other spin, and it would count the waiting as work."""

CALLS_IN_A_ROW = 200
"""What the clock "calls" counts as one; "eager", whose calls are longer, fewer of them."""
EAGER_CALLS_IN_A_ROW = 50
REPLAYED_CALLS = 24
"""At least as many calls lie between two events of the clock "graph"."""

CLOCKS = {
    "events": "CUDA events, device time",
    "graph": "CUDA events around replays of a CUDA graph that has a call on each set of inputs, device time",
    "calls": f"perf_counter over {CALLS_IN_A_ROW} calls in a row, synchronised at both ends, host and device",
    "eager": f"perf_counter over {EAGER_CALLS_IN_A_ROW} calls in a row on rotating inputs, synchronised at both ends, "
    "host and device",
    "wall": "perf_counter, wall time",
    "cpu": "process_time, CPU time of one thread",
}

Call = Callable[[int], object]
"""Computes once, on the inputs set of this number."""

HOST_LEAD_CYCLES = 8_000_000  # about 4 ms: a round of six backwards takes the host more than one


class Latency(NamedTuple):
    """Milliseconds."""

    median: float
    p20: float
    p80: float
    best: float
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Latency:
        """Between two samples lies what is between them: the median of an even number is the mean of the middle two."""
        shares = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
        median, p20, p80 = torch.tensor(samples, dtype=torch.float64).quantile(shares).tolist()
        return cls(median, p20, p80, min(samples), len(samples))


def paired_ratio(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Median over the rounds of our time by the peer's: what else the machine did in a round cancels.

    Of an even number it is the geometric mean of the middle two, so that the peer's by ours is exactly one by it.
    """
    return math.exp(Latency.of([math.log(one / other) for one, other in zip(ours, peer, strict=True)]).median)


def interleaved(
    calls: dict[str, Call],
    clock: Clock,
    repeats: int,
    warmup: int,
    budget_s: float = float("inf"),
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of each call, round by round: `repeats` rounds, or fewer after `budget_s`, but at least three.

    The `warmup` rounds before them stop after `budget_s` too, after at least one. `before` precedes every timed call,
    outside of its time: it clears the L2 cache where the inputs do not rotate.
    """
    began = time.perf_counter()
    for n in range(warmup):
        for call in calls.values():
            call(n)
        if time.perf_counter() - began > budget_s:
            break
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    began = time.perf_counter()
    for n in range(repeats):
        turned = names[n % len(names) :] + names[: n % len(names)]  # nobody always runs after the same neighbour
        for name, ms in _round({name: calls[name] for name in turned}, n, clock, before).items():
            samples[name].append(ms)
        if n >= 2 and time.perf_counter() - began > budget_s:
            break
    return samples


def _round(calls: dict[str, Call], n: int, clock: Clock, before: Callable[[], object]) -> dict[str, float]:
    if clock in ("events", "graph"):
        return _cuda_round(calls, n, before)
    if clock in ("calls", "eager"):
        return {name: _synchronised(call, n, before) for name, call in calls.items()}
    now = time.process_time if clock == "cpu" else time.perf_counter
    taken = {}
    for name, call in calls.items():
        before()
        began = now()
        call(n)
        taken[name] = (now() - began) * 1e3
    return taken


def _synchronised(call: Call, n: int, before: Callable[[], object]) -> float:
    """Milliseconds from a device with nothing to do to the next such moment: what the host takes, or the device if that
    takes longer."""
    before()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call(n)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def _cuda_round(calls: dict[str, Call], n: int, before: Callable[[], object]) -> dict[str, float]:
    events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
    torch.cuda._sleep(HOST_LEAD_CYCLES)
    for name, call in calls.items():
        before()
        events[name][0].record()
        call(n)
        events[name][1].record()
    torch.cuda.synchronize()
    return {name: begun.elapsed_time(ended) for name, (begun, ended) in events.items()}


@torch.no_grad()
def captured(calls: Sequence[Callable[[], object]], allowed: float) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, one after the other, as the layers of a model that decodes are.

    Its replay must write the results that the calls had before, wherever they are tensors, up to `allowed`; a
    RuntimeError says if it does not.
    """
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):  # what is done once, as compiling, cannot be captured
        for _ in range(2):
            expected = [_first(call()) for call in calls]
        expected = [None if one is None else one.clone() for one in expected]
    here.wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            written = [_first(call()) for call in calls]
    finally:
        torch.cuda.set_stream(here)  # a capture that fails stays in its own
    for _ in range(2):  # the second finds what the first has left behind
        for one in written:
            if one is not None:
                one.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    for one, before in zip(written, expected, strict=True):
        if one is not None and before is not None and not float((one - before).abs().max()) <= allowed:
            raise RuntimeError(f"replayed, its result is off by {float((one - before).abs().max()):.2e}")
    return graph


def _first(returned: object) -> Tensor | None:
    """The output among what a call returns; some return the LSE too, some nothing."""
    if isinstance(returned, (tuple, list)):
        returned = returned[0]
    return returned if isinstance(returned, Tensor) else None
