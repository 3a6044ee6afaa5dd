"""What padding on the right costs a model: a forward, and a training step, with none, 25 and 50 % of the batch padded.

    PYTHONPATH=src python -m benchmarks.models.padding --json-out benchmarks/results/h200/padding.json
    OMP_NUM_THREADS=1 PYTHONPATH=src python -m benchmarks.models.padding --json-out benchmarks/results/cpu/padding.json

Rows of the batch have different lengths; the longest is not padded. Every attention computes every position, those of
padding too, and is timed only if all of them are right. Labels are -100 at padding. Everybody runs in turn.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from stream_attention.integration.hf import register
from stream_attention_tools.bench.progress import progress
from stream_attention_tools.bench.results import aligned, conditions, load, save
from stream_attention_tools.bench.summary import capital, faster, origin
from stream_attention_tools.bench.timing import Clock, Latency, interleaved, paired_ratio

from .llama import TINY, Shape, made
from .rows import OURS
from .runs import Verdict, choose, compared

PEERS = ("sdpa", "eager")
SHARES = {"none": (1.0, 1.0, 1.0, 1.0), "25 %": (1.0, 0.75, 0.75, 0.5), "50 %": (1.0, 0.5, 0.25, 0.25)}
"""By the share of the batch that is padding, how much of each row is tokens."""
DIRECTIONS = ("forward", "training")
ROUNDS, WARMUP = 20, 2


class Size(NamedTuple):
    shape: Shape
    length: int
    dtype: torch.dtype
    clock: Clock
    timing: str


SIZES = {
    "cuda": Size(
        Shape(2, vocabulary=32000),
        2048,
        torch.bfloat16,
        "calls",
        "perf_counter over a run, synchronised at both ends, host and device",
    ),
    "cpu": Size(
        Shape(2, hidden=256, mlp=512, heads=8, kv_heads=4, head_dim=32, vocabulary=512),
        512,
        torch.float32,
        "cpu",
        "process_time over a run, CPU time of one thread",
    ),
}


class Bench:
    """A model and its batch, padded by different shares."""

    def __init__(self, size: Size, device: str) -> None:
        self.size = size
        self.model = made(size.shape, device, size.length).to(size.dtype)
        generator = torch.Generator(device).manual_seed(0)
        rows = len(SHARES["none"])
        self.ids = torch.randint(1, size.shape.vocabulary, (rows, size.length), device=device, generator=generator)
        at = torch.arange(size.length, device=device)
        self.masks = {
            share: (at < torch.tensor(self.lengths(share), device=device).unsqueeze(1)).long() for share in SHARES
        }

    def lengths(self, share: str) -> list[int]:
        return [round(part * self.size.length) for part in SHARES[share]]

    def pairs(self, share: str) -> int:
        """Query-key pairs of a head, those of padded queries too."""
        return sum(count * (count + 1) // 2 + (self.size.length - count) * count for count in self.lengths(share))

    def forward(self, model: Any, share: str) -> Tensor:
        with torch.no_grad():
            return model(self.ids, attention_mask=self.masks[share], use_cache=False).logits

    def train(self, model: Any, share: str) -> Tensor:
        """A step whose gradients are left in the weights; returns that of the first projection."""
        model.zero_grad(set_to_none=True)
        mask = self.masks[share]
        labels = self.ids.masked_fill(mask == 0, -100)
        model(self.ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad

    def verdicts(
        self, run: Callable[[Any, str], Tensor], share: str, providers: Sequence[str], exact: Any
    ) -> dict[str, Verdict]:
        """Of each provider, against the model `exact`; the error of sdpa says how much is allowed."""

        def found(name: str) -> Tensor:
            choose(self.model, name)
            return run(self.model, share).to(exact.dtype)

        expected, sdpa = run(exact, share), found("sdpa")
        factor = 3.0 if run == self.train else 2.0
        return {name: compared(expected, found(name), sdpa, factor=factor) for name in providers}

    def call(self, run: Callable[[Any, str], Tensor], share: str, provider: str) -> Callable[[int], object]:
        def once(_: int) -> None:
            choose(self.model, provider)
            run(self.model, share)

        return once


def measured(size: Size, device: str, rounds: int) -> dict[str, Any]:
    """A results file."""
    register()
    common = conditions(device)
    common["versions"]["transformers"] = transformers.__version__
    cells: list[dict[str, Any]] = []
    with progress(len(DIRECTIONS)) as shown:
        bench = Bench(size, device)
        for direction in DIRECTIONS:
            cells += _cells(bench, direction, rounds, shown.now)
            shown.done(direction)
    return {"suite": "padding", **common, "conditions": told(size, rounds), "cells": cells}


def _cells(bench: Bench, direction: str, rounds: int, now: Callable[[str], None]) -> list[dict[str, Any]]:
    run = bench.forward if direction == "forward" else bench.train
    verdicts: dict[tuple[str, str], Verdict] = {}
    exact = copy.deepcopy(bench.model).to(torch.float64 if bench.size.dtype is torch.float32 else torch.float32)
    choose(exact, "sdpa")
    for share in SHARES:
        now(f"{direction}: checking, padding {share}")
        its = bench.verdicts(run, share, (OURS, *PEERS), exact)
        verdicts |= {(share, name): verdict for name, verdict in its.items()}
    del exact
    now(f"{direction}: timing")
    calls = {f"{share}|{name}": bench.call(run, share, name) for (share, name), one in verdicts.items() if one.right}
    times = interleaved(calls, bench.size.clock, rounds, WARMUP)
    return [_cell(bench, direction, share, verdicts, times) for share in SHARES]


def _cell(
    bench: Bench,
    direction: str,
    share: str,
    verdicts: dict[tuple[str, str], Verdict],
    times: dict[str, list[float]],
) -> dict[str, Any]:
    entries: dict[str, dict[str, Any]] = {}
    tokens = bench.ids.numel()
    flops = (1 if direction == "forward" else 3) * bench.size.shape.flops(tokens, bench.pairs(share), tokens)
    for name in (OURS, *PEERS):
        verdict, its = verdicts[share, name], times.get(f"{share}|{name}")
        entries[name] = {**verdict._asdict(), "right": verdict.right}
        if its is None:
            continue
        taken = Latency.of(its)
        entries[name] |= {f"{field}_ms": getattr(taken, field) for field in ("median", "p20", "p80", "best")}
        entries[name] |= {"repeats": taken.repeats, "tflops": flops / taken.median / 1e9}
        if (unpadded := times.get(f"none|{name}")) is not None:
            entries[name]["vs_unpadded"] = paired_ratio(its, unpadded)
        if (ours := times.get(f"{share}|{OURS}")) is not None and name != OURS:
            entries[name]["vs_ours"] = paired_ratio(its, ours)
    there = [name for name in PEERS if "median_ms" in entries[name]]
    peer = min(there, key=lambda name: entries[name]["median_ms"], default=None)
    ours_timed = "median_ms" in entries[OURS]
    return {
        "name": f"{direction}, padding {share}",
        "direction": direction,
        "problem": {"Tk": bench.size.length, "B": len(bench.ids), "lengths": bench.lengths(share)},
        "providers": entries,
        "ours": OURS if ours_timed else None,
        "fastest_peer": peer,
        "ratio": 1 / entries[peer]["vs_ours"] if peer is not None and ours_timed else None,
        "bar": None,
    }


def told(size: Size, rounds: int) -> dict[str, Any]:
    shape, dtype = size.shape, str(size.dtype).removeprefix("torch.")
    return {
        "model": f"a Llama of {shape.layers} layers, hidden {shape.hidden}, MLP {shape.mlp}, {shape.heads}/"
        f"{shape.kv_heads} heads of {shape.head_dim}, vocabulary {shape.vocabulary}, random {dtype} weights",
        "batch": f"{len(SHARES['none'])} rows of {size.length}, padded on the right",
        "training": "a forward with its loss and a backward, no optimiser; labels of -100 at padding",
        "rounds": rounds,
        "timing": size.timing,
        "order": "interleaved, one run each per round, in rotating order",
        "ratio": f"median over the rounds of the time of {OURS} by that of the fastest peer",
        "vs_unpadded": "median over the rounds of the time by that of the same attention without padding",
        "checked": "logits of all positions, or a gradient, against twice as many bits: at most 2 (gradient: 3) times "
        "the error of sdpa",
        "compiled": "nothing",
    }


def table(results: dict[str, Any]) -> list[list[str]]:
    """A line per cell: the median and its spread, and beside it the speed over that without padding."""
    found = [["", OURS, *PEERS, "speed over sdpa"]]
    unpadded = {cell["name"].split(",")[0]: cell["providers"] for cell in reversed(results["cells"])}  # the first ones
    for cell in results["cells"]:
        entries, without = cell["providers"], unpadded[cell["name"].split(",")[0]]
        shown = [_shown(entries[name], without[name]) for name in (OURS, *PEERS)]
        both = all("median_ms" in entries[name] for name in (OURS, "sdpa"))
        found.append([cell["name"], *shown, f"{faster(entries, OURS, 'sdpa'):.2f}" if both else ""])
    return found


def _shown(one: dict[str, Any], unpadded: dict[str, Any]) -> str:
    if "median_ms" not in one:
        return "wrong"
    spread = f"{one['median_ms']:.1f} ms ({one['p20_ms']:.1f}-{one['p80_ms']:.1f})"
    return f"{spread}, {unpadded['median_ms'] / one['median_ms']:.2f}" if "median_ms" in unpadded else spread


def markdown(results: dict[str, Any]) -> str:
    """The table for a page, under a line that says what, where, when and with what it was measured."""
    heading, *body = table(results)
    said = results["conditions"]
    return "\n".join(
        [
            f"{capital(said['model'])}; {said['batch']}. {origin(results)}, transformers "
            f"{results['versions']['transformers']}; {said['timing']}: medians of {said['rounds']} interleaved runs "
            "(20th to 80th percentile); after the comma, speed over the same attention unpadded.",
            "",
            f"| {' | '.join(heading)} |",
            f"|{'---|' * len(heading)}",
            *(f"| {' | '.join(row)} |" for row in body),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models.padding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=there, help="default: cuda if there is one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows, to see that it runs")
    parser.add_argument("--json-out", type=Path, help="write the results to this file")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print a results file as Markdown, and end")
    options = parser.parse_args(arguments)
    if options.show is not None:
        print(markdown(load(options.show)))
        return 0
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1; got {options.rounds}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a GPU that torch sees, or cpu; got cuda.")
    if options.json_out is not None and not options.json_out.parent.is_dir():
        parser.error(f"--json-out: expected a file in a folder that is there; got {options.json_out}.")
    if options.device == "cpu" and torch.get_num_threads() > 1:
        parser.error("--device cpu: expected one thread, whose CPU time is counted. Set OMP_NUM_THREADS=1.")
    size = SIZES[options.device]
    if options.tiny:
        size = size._replace(shape=TINY, length=32)
    found = measured(size, options.device, options.rounds)
    if options.json_out is not None:
        save(found, options.json_out)
    print(aligned(table(found)))
    wrong = [
        f"{cell['name']}: {name}"
        for cell in found["cells"]
        for name, one in cell["providers"].items()
        if not one["right"]
    ]
    for one in wrong:
        print(f"WRONG: {one}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
