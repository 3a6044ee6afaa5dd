"""Measure a cell: ask who can, check who is right, time those who are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch

from ..testing.inputs import Case
from .accuracy import check
from .cells import Cell, Tensors, draw, flops, kv_bytes
from .providers import Provider
from .timing import Call, Clock, Latency, interleaved, paired_ratio

L2_BYTES = 128 << 20
"""What the input sets of a GPU cell must exceed together: over twice the L2 cache of any GPU of today."""


def measure(
    cell: Cell, providers: dict[str, Provider], clock: Clock, repeats: int, warmup: int, budget_s: float = float("inf")
) -> dict[str, Any]:
    """A cell's entry in the results: every provider's error and latency, or why it has none."""
    inputs: dict[Case, list[Tensors]] = {}  # those who compute the same problem share their inputs
    entries: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name in (*cell.ours, *cell.beside, *cell.peers):
        provider = providers[name]
        reason = provider.why_not(cell)
        if reason is not None:
            entries[name] = {"unavailable": reason}
            continue
        case = provider.case(cell.case)
        if case not in inputs:
            inputs[case] = _input_sets(case, cell)
        try:
            verdict = check(provider, cell, inputs[case][0])
        except Exception as error:  # a peer that fails is not measured; one of ours that fails is wrong
            reason = f"{type(error).__name__}: {error}"
            entries[name] = {"failed": reason, "right": False} if name not in cell.peers else {"unavailable": reason}
            continue
        entries[name] = {"error": verdict.error, "allowed": verdict.allowed, "right": verdict.right}
        if verdict.right:
            calls[name] = _call(provider, cell, inputs[case])
    samples = interleaved(calls, clock, repeats, warmup, budget_s) if calls else {}
    for name, its in samples.items():
        latency, case = Latency.of(its), providers[name].case(cell.case)
        entries[name] |= {f"{field}_ms": getattr(latency, field) for field in ("median", "p20", "p80", "best")}
        entries[name] |= {"repeats": len(its), "tflops": flops(case, cell.direction) / latency.median / 1e9}
        if cell.unit == "TB/s":
            entries[name]["tb_per_s"] = kv_bytes(case) / latency.median / 1e9
    return {
        "name": cell.name,
        "direction": cell.direction,
        "problem": _described(cell.case),
        "providers": entries,
        **_compared(cell, samples),
    }


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


def _call(provider: Provider, cell: Cell, sets: list[Tensors]) -> Call:
    def forward(n: int) -> object:
        return provider.attend(sets[n % len(sets)])

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


def _described(case: Case) -> dict[str, Any]:
    """What a case says, as JSON: shapes, and whatever is not at its default."""
    shapes = ("B", "Tq", "Tk", "Hq", "Hkv", "D", "Dv", "dtype")
    described = {
        field.name: getattr(case, field.name)
        for field in fields(case)
        if field.name in shapes or getattr(case, field.name) != field.default
    }
    return described | {"dtype": str(case.dtype).removeprefix("torch.")}


def _compared(cell: Cell, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Our fastest beside the fastest peer, and whether the cell's bar is met."""

    def fastest(names: Iterable[str]) -> str | None:
        return min((n for n in names if n in samples), key=lambda n: Latency.of(samples[n]).median, default=None)

    ours, peer = fastest(cell.ours), fastest(cell.peers)
    compared: dict[str, Any] = {"ours": ours, "fastest_peer": peer, "ratio": None, "bar": cell.bar}
    if ours is not None and peer is not None:
        compared["ratio"] = paired_ratio(samples[ours], samples[peer])
        if cell.bar is not None:
            compared["met"] = compared["ratio"] <= cell.bar
    return compared


def wrong(entry: dict[str, Any]) -> list[str]:
    """Who was wrong on a cell."""
    return [name for name, one in entry["providers"].items() if one.get("right") is False]


def measure_all(
    cells: Iterable[Cell],
    providers: dict[str, Provider],
    clock: Clock,
    repeats: int,
    warmup: int,
    budget_s: float,
    done: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Every cell's entry, each handed to `done` as it is finished."""
    entries = []
    for cell in cells:
        entries.append(measure(cell, providers, clock, repeats, warmup, budget_s))
        done(entries[-1])
        if cell.case.device == "cuda":
            torch.cuda.empty_cache()
    return entries
