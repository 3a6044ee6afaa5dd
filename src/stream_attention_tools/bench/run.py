"""Measure cells: ask who can, check who is right, time those who are.

What a clock times are a provider's calls on its sets of inputs, one by one, in a row, or replayed by a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..testing.inputs import Case, Tensors, draw
from ..testing.memory import peak_bytes
from . import timing
from .accuracy import check
from .bandwidth import read_bandwidth
from .progress import progress
from .providers import Provider
from .providers.base import error_line
from .results import conditions, line
from .suites import FLOPS, TRAFFIC, Cell, calls, chunked, flops, tensor_bytes
from .timing import CLOCKS, REPLAYED_CALLS, Call, Clock, Latency, captured, interleaved, paired_ratio

L2_BYTES = 128 << 20
"""What the input sets of a GPU cell must exceed together: over twice the L2 cache of any GPU of today."""

BAR = ("bar", "met")
"""The keys of a comparison that are about a cell's bar, which the first clock alone is held to."""

Bare = Callable[[], object]


class Timed(NamedTuple):
    """What is timed as one, and how many calls of the provider it makes."""

    call: Call
    calls: int = 1


def in_a_row(provider: Provider, alone: Sequence[Bare], count: int = 1, rotating: bool = False) -> Timed:
    """Bare calls in a row, all on the inputs of a number, or each on the next."""

    def row(n: int) -> None:
        turn = [alone[(n + k * rotating) % len(alone)] for k in range(count)]
        with provider.call_context():
            for call in turn:
                call()

    return Timed(row, count)


def graphed(provider: Provider, alone: Sequence[Bare], allowed: float) -> Timed | str:
    """Replays of a CUDA graph of the bare calls; of a peer that cannot be captured, why."""
    try:
        with provider.call_context():
            graph = captured(alone, allowed)
    except Exception as error:
        if provider.ours:
            raise
        return f"no CUDA graph of it: {error_line(error)}"
    replays = -(-REPLAYED_CALLS // len(alone))

    def replayed(n: int) -> None:
        for _ in range(replays):
            graph.replay()

    return Timed(replayed, replays * len(alone))


def one_by_one(provider: Provider, cell: Cell, sets: list[Tensors]) -> Timed:
    """A cell as a whole: all its chunks, its gradients."""
    parts = [chunked(x, cell.chunk) for x in sets]

    def forward(n: int) -> object:
        return [provider.attend(part) for part in parts[n % len(parts)]]

    def both(n: int) -> object:
        x = sets[n % len(sets)]
        return torch.autograd.grad(provider.attend(x), (x.query, x.key, x.value), x.grad_out)

    if cell.direction == "forward":
        return Timed(forward)
    if cell.direction == "forward+backward":
        return Timed(both)
    outs = [provider.attend(x) for x in sets]

    def backward(n: int) -> object:
        x = sets[n % len(sets)]
        leaves = (x.query, x.key, x.value)
        return torch.autograd.grad(outs[n % len(sets)], leaves, x.grad_out, retain_graph=True)

    return Timed(backward)


def why_not(provider: Provider, cell: Cell) -> str | None:
    """Why a provider cannot compute a cell: the first of its reasons over the cell's calls."""
    reasons = (provider.why_not(cell._replace(case=case)) for case in calls(cell))
    return next((reason for reason in reasons if reason is not None), None)


def measure(
    cell: Cell,
    providers: dict[str, Provider],
    clock: Clock,
    repeats: int,
    warmup: int,
    budget_s: float = float("inf"),
    now: Callable[[str], None] = lambda text: None,
    eager: Clock | None = None,
) -> dict[str, Any]:
    """A cell's entry in the results: every provider's error, memory and latency, or why it has none.

    `now` is called with what is being done. Where there is a second clock, `eager`, bare calls are timed by both.
    """
    inputs: dict[Case, list[Tensors]] = {}  # those who compute the same problem share their inputs
    entries: dict[str, dict[str, Any]] = {}
    ready: dict[str, Timed] = {}
    rows: dict[str, Timed] = {}  # by the second clock
    for name in cell.everybody:
        now(f"{cell.name}: checking {name}")
        provider = providers[name]
        reason = why_not(provider, cell)
        if reason is not None:
            entries[name] = {"unavailable": reason}
            continue
        case = provider.case(cell.case)
        try:
            if case not in inputs:
                inputs[case] = _input_sets(case, cell, providers)
            verdict = check(provider, cell, inputs[case][0])
            entries[name] = {"error": verdict.error, "allowed": verdict.allowed, "right": verdict.right}
            if verdict.rms is not None:
                entries[name]["rms_error"] = verdict.rms
            if not verdict.right:
                continue
            last = chunked(inputs[case][0], cell.chunk)[-1]
            if (ran := provider.ran(last, backward=cell.direction == "backward")) is not None:
                entries[name]["ran"] = ran
            if eager is None and clock not in ("calls", "graph"):
                ready[name] = one_by_one(provider, cell, inputs[case])
                entries[name]["peak_bytes"] = peak_bytes(partial(ready[name].call, 0), case.device)
                continue
            alone = [provider.bare(x) for x in inputs[case]]
            entries[name]["peak_bytes"] = peak_bytes(partial(in_a_row(provider, alone).call, 0), case.device)
            if eager is not None:
                rows[name] = in_a_row(provider, alone, timing.EAGER_CALLS_IN_A_ROW, rotating=True)
            if clock != "graph":
                ready[name] = in_a_row(provider, alone, timing.CALLS_IN_A_ROW if clock == "calls" else 1)
            elif isinstance(replayed := graphed(provider, alone, verdict.allowed), Timed):
                ready[name] = replayed
            else:
                entries[name]["unavailable"] = replayed
        except Exception as error:  # a peer that fails is not measured; one of ours that fails is wrong
            ready.pop(name, None)
            rows.pop(name, None)
            reason = f"{type(error).__name__}: {error}"
            ours = provider.ours or name not in cell.peers
            entries[name] = {"failed": reason, "right": False} if ours else {"unavailable": reason}
    now(f"{cell.name}: timing {', '.join(ready)}")
    with torch.set_grad_enabled(cell.direction != "forward"):
        samples = _sampled(ready, clock, repeats, warmup, budget_s)
        eager_samples = _sampled(rows, eager or clock, repeats, warmup, budget_s)
    for name, its in samples.items():
        latency, case = _latency(its), providers[name].case(cell.case)
        median = latency["median_ms"]
        entries[name] |= latency | {"tflops": flops(case, cell.direction) / median / 1e9}
        entries[name]["gb_per_s"] = tensor_bytes(cell, case) / median / 1e6
        if cell.unit == "TB/s":
            entries[name]["tb_per_s"] = providers[name].kv_bytes(case, inputs[case][0]) / median / 1e9
    compared = _compared(cell, samples)
    for name in samples:
        entries[name] |= _beside_ours(name, samples, compared["ours"])
        if (own := f"plain {name}") in samples:
            entries[name]["vs_plain"] = paired_ratio(samples[name], samples[own])
    if eager is not None:
        compared["eager"] = {key: one for key, one in _compared(cell, eager_samples).items() if key not in BAR}
        for name, its in eager_samples.items():
            entries[name]["eager"] = _latency(its) | _beside_ours(name, eager_samples, compared["eager"]["ours"])
    return {
        "name": cell.name,
        "direction": cell.direction,
        "problem": described(cell.case) | ({"chunk": cell.chunk} if cell.chunk else {}),
        "providers": entries,
        **compared,
    }


def _sampled(
    timed: dict[str, Timed], clock: Clock, repeats: int, warmup: int, budget_s: float
) -> dict[str, list[float]]:
    """Milliseconds of one call of each provider, round by round."""
    if not timed:
        return {}
    samples = interleaved({name: one.call for name, one in timed.items()}, clock, repeats, warmup, budget_s)
    return {name: [ms / timed[name].calls for ms in its] for name, its in samples.items()}


def _latency(samples: list[float]) -> dict[str, Any]:
    *times, repeats = Latency.of(samples)
    return dict(zip(("median_ms", "p20_ms", "p80_ms", "best_ms"), times, strict=True)) | {"repeats": repeats}


def _beside_ours(name: str, samples: dict[str, list[float]], ours: str | None) -> dict[str, float]:
    return {} if ours in (None, name) else {"vs_ours": paired_ratio(samples[name], samples[ours])}


def _input_sets(case: Case, cell: Cell, providers: dict[str, Provider]) -> list[Tensors]:
    """So many that those who compute the case read more than the L2 cache holds, whoever reads the least of them."""
    first = draw(case)
    able = [one for name in cell.everybody if why_not(one := providers[name], cell) is None]
    least = min(one.kv_bytes(case, first) for one in able if one.case(cell.case) == case)
    count = min(16, int(L2_BYTES // (first.query.nbytes + least)) + 2) if case.device == "cuda" else 2
    sets = [first, *(draw(case, seed) for seed in range(1, count))]
    if cell.direction != "forward":
        for x in sets:
            for t in (x.query, x.key, x.value):
                t.requires_grad_()
    return sets


def described(case: Case) -> dict[str, Any]:
    """A case as JSON: shapes, and every field that is not at its default."""
    shapes = ("B", "Tq", "Tk", "Hq", "Hkv", "D", "Dv", "dtype")
    return case.given(*shapes) | {"dtype": str(case.dtype).removeprefix("torch.")}


def _compared(cell: Cell, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Our fastest beside the fastest peer, and whether the cell's bar is met.

    Where the peers are plain calls, a backend has no other peer than its own: what the modifiers cost on it.
    """

    def fastest(names: Iterable[str]) -> str | None:
        return min((n for n in names if n in samples), key=lambda n: Latency.of(samples[n]).median, default=None)

    ours = fastest(cell.ours)
    own = f"plain {ours}"
    peer = fastest((own,) if own in cell.peers else cell.peers)
    compared: dict[str, Any] = {"ours": ours, "fastest_peer": peer, "ratio": None, "bar": cell.bar}
    if ours is not None and peer is not None:
        compared["ratio"] = paired_ratio(samples[ours], samples[peer])
        if cell.bar is not None:
            compared["met"] = compared["ratio"] <= cell.bar
    return compared


def wrong(entry: dict[str, Any]) -> list[str]:
    """Who was wrong on a cell."""
    return [name for name, one in entry["providers"].items() if one.get("right") is False]


def measured(
    suite: str,
    cells: Sequence[Cell],
    providers: dict[str, Provider],
    clock: Clock,
    repeats: int,
    warmup: int,
    cell_seconds: float,
    eager: Clock | None = None,
) -> dict[str, Any]:
    """What a results file holds: every cell's entry, and under which conditions it was measured.

    Cells in TB/s are compared with the speed at which the device reads, measured before them. Ctrl-C ends it
    with the cells that are done, if there are any, and `interrupted` says how many.
    """
    turn = {"calls": f"{timing.CALLS_IN_A_ROW} calls", "graph": f"{REPLAYED_CALLS} calls or more"}
    found: dict[str, Any] = {
        "suite": suite,
        **conditions(cells[0].case.device),
        "conditions": {
            "repeats": repeats,
            "warmup": warmup,
            "cell_seconds": cell_seconds if cell_seconds < float("inf") else None,
            "timing": CLOCKS[clock],
            **({} if eager is None else {"eager": CLOCKS[eager]}),
            "order": f"interleaved, {turn.get(clock, 'one call')} each per round; inputs rotate",
            "ratio": "median over the rounds of our time by that of the fastest peer; where those are plain calls, by "
            "that of the same backend's",
            "flops": FLOPS,
            "gb_per_s": TRAFFIC,
        },
        "cells": [],
    }
    with progress(len(cells)) as shown:
        if any(cell.unit == "TB/s" for cell in cells):
            shown.now("reading a large buffer")
            found["read_bandwidth"] = read_bandwidth(cells[0].case.device, clock)
        try:
            for cell in cells:
                entry = measure(cell, providers, clock, repeats, warmup, cell_seconds, shown.now, eager)
                for one in entry["providers"].values():
                    if "tb_per_s" in one:
                        one["share_of_read_bandwidth"] = one["tb_per_s"] / found["read_bandwidth"]["tb_per_s"]
                found["cells"].append(entry)
                shown.done(line(entry))
                if cell.case.device == "cuda":
                    torch.cuda.empty_cache()
        except KeyboardInterrupt:
            if not found["cells"]:
                raise
            found["interrupted"] = f"after {len(found['cells'])} of {len(cells)} cells"
    return found
