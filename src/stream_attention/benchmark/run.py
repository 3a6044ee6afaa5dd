"""Measure cells: ask who can, check who is right, time those who are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch

from ..testing.inputs import Case
from ..testing.memory import peak_bytes
from .accuracy import check
from .cells import FLOPS, TRAFFIC, Cell, Tensors, calls, chunked, draw, flops, kv_bytes, tensor_bytes
from .progress import progress
from .providers import Provider
from .results import conditions, line
from .timing import CALLS_IN_A_ROW, CLOCKS, Call, Clock, Latency, interleaved, paired_ratio

L2_BYTES = 128 << 20
"""What the input sets of a GPU cell must exceed together: over twice the L2 cache of any GPU of today."""


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
) -> dict[str, Any]:
    """A cell's entry in the results: every provider's error, memory and latency, or why it has none.

    `now` is told what is being done.
    """
    inputs: dict[Case, list[Tensors]] = {}  # those who compute the same problem share their inputs
    entries: dict[str, dict[str, Any]] = {}
    ready: dict[str, Call] = {}
    for name in (*cell.ours, *cell.beside, *cell.peers):
        now(f"{cell.name}: checking {name}")
        provider = providers[name]
        reason = why_not(provider, cell)
        if reason is not None:
            entries[name] = {"unavailable": reason}
            continue
        case = provider.case(cell.case)
        if case not in inputs:
            inputs[case] = _input_sets(case, cell)
        try:
            verdict = check(provider, cell, inputs[case][0])
            entries[name] = {"error": verdict.error, "allowed": verdict.allowed, "right": verdict.right}
            if not verdict.right:
                continue
            last = chunked(inputs[case][0], cell.chunk)[-1]
            if (ran := provider.ran(last, backward=cell.direction == "backward")) is not None:
                entries[name]["ran"] = ran
            ready[name] = _bare(provider, inputs[case]) if clock == "calls" else _call(provider, cell, inputs[case])
            entries[name]["peak_bytes"] = _peak_bytes(ready[name], case)
        except Exception as error:  # a peer that fails is not measured; one of ours that fails is wrong
            ready.pop(name, None)
            reason = f"{type(error).__name__}: {error}"
            ours = provider.ours or name not in cell.peers
            entries[name] = {"failed": reason, "right": False} if ours else {"unavailable": reason}
    now(f"{cell.name}: timing {', '.join(ready)}")
    with torch.set_grad_enabled(cell.direction != "forward"):
        samples = interleaved(ready, clock, repeats, warmup, budget_s) if ready else {}
    for name, its in samples.items():
        latency, case = Latency.of(its), providers[name].case(cell.case)
        entries[name] |= {f"{field}_ms": getattr(latency, field) for field in ("median", "p20", "p80", "best")}
        entries[name] |= {"repeats": len(its), "tflops": flops(case, cell.direction) / latency.median / 1e9}
        entries[name]["gb_per_s"] = tensor_bytes(cell, case) / latency.median / 1e6
        if cell.unit == "TB/s":
            entries[name]["tb_per_s"] = kv_bytes(case) / latency.median / 1e9
    compared = _compared(cell, samples)
    for name in samples:
        if compared["ours"] is not None and name != compared["ours"]:
            entries[name]["vs_ours"] = paired_ratio(samples[name], samples[compared["ours"]])
        if (own := f"plain {name}") in samples:
            entries[name]["vs_plain"] = paired_ratio(samples[name], samples[own])
    return {
        "name": cell.name,
        "direction": cell.direction,
        "problem": described(cell.case) | ({"chunk": cell.chunk} if cell.chunk else {}),
        "providers": entries,
        **compared,
    }


def _peak_bytes(call: Call, case: Case) -> int:
    """The most memory that one call holds beyond its inputs, its result included; the caller has warmed up."""
    return peak_bytes(lambda: call(0), case.device)


def _input_sets(case: Case, cell: Cell) -> list[Tensors]:
    first = draw(case)
    size = sum(t.nbytes for t in (first.query, first.key, first.value))
    count = min(8, L2_BYTES // size + 2) if case.device == "cuda" else 2
    sets = [first, *(draw(case, seed) for seed in range(1, count))]
    if cell.direction != "forward":
        for x in sets:
            for t in (x.query, x.key, x.value):
                t.requires_grad_()
    return sets


def _bare(provider: Provider, sets: list[Tensors]) -> Call:
    alone = [provider.bare(x) for x in sets]
    return lambda n: alone[n % len(alone)]()


def _call(provider: Provider, cell: Cell, sets: list[Tensors]) -> Call:
    parts = [chunked(x, cell.chunk) for x in sets]

    def forward(n: int) -> object:
        return [provider.attend(part) for part in parts[n % len(parts)]]

    def both(n: int) -> object:
        x = sets[n % len(sets)]
        return torch.autograd.grad(provider.attend(x), (x.query, x.key, x.value), x.grad_out)

    if cell.direction == "forward":
        return forward
    if cell.direction == "forward+backward":
        return both
    outs = [provider.attend(x) for x in sets]

    def backward(n: int) -> object:
        x = sets[n % len(sets)]
        leaves = (x.query, x.key, x.value)
        return torch.autograd.grad(outs[n % len(sets)], leaves, x.grad_out, retain_graph=True)

    return backward


def described(case: Case) -> dict[str, Any]:
    """What a case says, as JSON: shapes, and whatever is not at its default."""
    shapes = ("B", "Tq", "Tk", "Hq", "Hkv", "D", "Dv", "dtype")
    described = {
        field.name: getattr(case, field.name)
        for field in fields(case)
        if field.name in shapes or getattr(case, field.name) != field.default
    }
    return described | {"dtype": str(case.dtype).removeprefix("torch.")}


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


def _turn(clock: Clock) -> str:
    return f"{CALLS_IN_A_ROW} calls" if clock == "calls" else "one call"


def measured(
    suite: str,
    cells: Sequence[Cell],
    providers: dict[str, Provider],
    clock: Clock,
    repeats: int,
    warmup: int,
    cell_seconds: float,
) -> dict[str, Any]:
    """What a results file holds: every cell's entry, and under which conditions it was measured."""
    found: dict[str, Any] = {
        "suite": suite,
        **conditions(cells[0].case.device),
        "conditions": {
            "repeats": repeats,
            "warmup": warmup,
            "cell_seconds": cell_seconds if cell_seconds < float("inf") else None,
            "timing": CLOCKS[clock],
            "order": f"interleaved, {_turn(clock)} each per round; inputs rotate",
            "ratio": "median over the rounds of our time by that of the fastest peer; where those are plain calls, by "
            "that of the same backend's",
            "flops": FLOPS,
            "gb_per_s": TRAFFIC,
        },
        "cells": [],
    }
    with progress(len(cells)) as shown:
        for cell in cells:
            entry = measure(cell, providers, clock, repeats, warmup, cell_seconds, shown.now)
            found["cells"].append(entry)
            shown.done(line(entry))
            if cell.case.device == "cuda":
                torch.cuda.empty_cache()
    return found
