"""A Llama-3-8B-shaped model with our attention and with others, end to end: tokens per second and peak memory.

    PYTHONPATH=src python -m benchmarks.models.measure --json-out benchmarks/results/h200/models.json
    PYTHONPATH=src python -m benchmarks.models.measure --only decode 32k --rounds 9

Prefill is one forward of the prompt; training a forward with its loss and a backward. Decoding is a loop of forwards,
each of the likeliest token, on a cache that a prompt has filled: everybody takes a step in turn, so that each step is a
repeat, and another load of the host meets all alike. It is done twice: in the first pass every length is new to the
process, and who prepares something for each length does so; `first_median_ms` is of that pass, all else of the second.
Nothing is compiled. A decoding row's cache is DynamicCache, the default of `generate()`, unless a provider's name says
another: "static" is StaticCache, "int8" and "int4" are ours. All rows of a batch hold the same keys and values, each
its own copy. The results file is written after every row.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from stream_attention.integration.hf import register
from stream_attention_tools.bench.progress import progress
from stream_attention_tools.bench.results import aligned, conditions, save
from stream_attention_tools.bench.timing import Latency, paired_ratio
from stream_attention_tools.files import check_writable
from stream_attention_tools.report.models import line, table

from . import runs
from .llama import TINY, Shape, made
from .rows import BAR, OURS, PEERS, Row, rows
from .runs import Checks, Pairs, choose

LAYERS, TRAINED_LAYERS, ROUNDS = 8, 4, 5

Ready = tuple[Callable[[], Any], Callable[[Any], Any]]
"""What is done before a run, untimed, and the run, which takes what that returned."""


class Bench:
    """One model at a time on a device, and what its rows share: a prompt, and the keys and values that it leaves."""

    def __init__(self, shape: Shape, device: str, longest: int, training: bool) -> None:
        self.shape, self.device = shape, device
        self.model = made(shape, device, longest).train(training)
        self.checks = Checks(self.model)
        generator = torch.Generator(device).manual_seed(0)
        self.ids = torch.randint(1, shape.vocabulary, (1, longest), device=device, generator=generator)
        self._pairs: Pairs = []

    def pairs(self, row: Row) -> Pairs | None:
        """Keys and values of a decoding row's context."""
        if row.direction != "decode":
            return None
        if not self._pairs or self._pairs[0][0].shape[2] < row.context:
            choose(self.model, OURS)
            _, cache = runs.prefill(self.model, self.ids[:, : row.context])
            self._pairs = runs.pairs_of(cache)
        parts = ((key[:, :, : row.context], value[:, :, : row.context]) for key, value in self._pairs)
        return [tuple(x.expand(row.batch, -1, -1, -1) for x in part) for part in parts]  # type: ignore[misc]

    def ready(self, row: Row, provider: str, new: int) -> Ready:
        model, ids, pairs = self.model, self.ids[:, : row.context], self.pairs(row)
        if row.direction == "prefill":
            return lambda: None, lambda _: runs.prefill(model, ids)
        if row.direction == "training":
            return lambda: None, lambda _: runs.train(model, ids)
        assert pairs is not None
        token = ids[:, :1].expand(row.batch, -1)
        return lambda: runs.filled(model, provider, pairs, row.new), lambda cache: runs.decode(model, cache, token, new)

    def flops(self, row: Row) -> float:
        if row.direction == "decode":
            return self.shape.flops(row.batch, row.batch * (row.context + row.new // 2), row.batch)  # of a step
        pairs = row.batch * row.context * (row.context + 1) // 2
        if row.direction == "prefill":
            return self.shape.flops(row.tokens, pairs, row.batch)
        return 3 * self.shape.flops(row.tokens, pairs, row.tokens)


class Sample:
    """The time of one run, and the most memory that it held beyond the weights and the prompt's keys and values."""

    ms: float
    peak: int | None

    def __init__(self, bench: Bench, provider: str, ready: Ready) -> None:
        on_gpu = bench.device == "cuda"
        choose(bench.model, provider)
        standing = torch.cuda.memory_allocated() if on_gpu else 0
        prepared = ready[0]()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        ready[1](prepared)
        if on_gpu:
            torch.cuda.synchronize()
        self.ms = (time.perf_counter() - began) * 1e3
        self.peak = torch.cuda.max_memory_allocated() - standing if on_gpu else None
        bench.model.zero_grad(set_to_none=True)


def in_turn(bench: Bench, ready: dict[str, Ready], rounds: int) -> Iterator[tuple[str, Sample]]:
    """Runs of everybody, `rounds` each; nobody always runs after the same neighbour."""
    names = list(ready)
    for n in range(rounds):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            yield name, Sample(bench, name, ready[name])


def steps_in_turn(bench: Bench, row: Row, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Milliseconds of every step of everybody's decoding, a step each in turn. All caches are there at once."""
    pairs = bench.pairs(row)
    assert pairs is not None
    first = bench.ids[:, :1].expand(row.batch, -1)
    state = {name: (runs.filled(bench.model, name, pairs, row.new), first) for name in names}
    on_gpu = bench.device == "cuda"
    for n in range(row.new):
        for name in [*names[n % len(names) :], *names[: n % len(names)]]:
            choose(bench.model, name)
            cache, token = state[name]
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            token = runs.step(bench.model, cache, token)
            if on_gpu:
                torch.cuda.synchronize()
            yield name, (time.perf_counter() - began) * 1e3
            state[name] = cache, token


def measure(bench: Bench, row: Row, rounds: int, now: Callable[[str], None]) -> dict[str, Any]:
    """A row's entry in the results."""
    entries: dict[str, dict[str, Any]] = {}
    ready: dict[str, Ready] = {}
    peaks: dict[str, list[int | None]] = {}
    for name in row.providers:
        if (reason := runs.why_not(name)) is not None:
            entries[name] = {"unavailable": reason}
            continue
        now(f"{row.name}: checking {name}")
        try:
            verdict = bench.checks.verdict(row, name, bench.ids, bench.pairs(row))
            entries[name] = {**verdict._asdict(), "right": verdict.right}
            if verdict.right:
                short = Sample(bench, name, bench.ready(row, name, min(row.new, runs.CHECKED_NEW)))  # warms up
                peaks[name] = [short.peak]
                ready[name] = bench.ready(row, name, row.new)
        except Exception as error:  # who fails is not measured; one of ours that fails is wrong
            told = f"{type(error).__name__}: {error}"
            entries[name] = {"failed": told, "right": False} if name.startswith(OURS) else {"unavailable": told}
    bench.checks.forget()
    gc.freeze()  # the collector looks at nothing of all this during a run
    times: dict[str, list[float]] = {name: [] for name in ready}
    now(f"{row.name}: timing")
    if row.direction == "decode":
        first: dict[str, list[float]] = {name: [] for name in ready}
        for found in (first, times):
            for name, ms in steps_in_turn(bench, row, list(ready)):
                found[name].append(ms)
        for name, its in first.items():
            entries[name]["first_median_ms"] = Latency.of(its).median
    else:
        for name, sample in in_turn(bench, ready, rounds):
            times[name].append(sample.ms)
            peaks[name].append(sample.peak)
    for name, its in times.items():
        taken = Latency.of(its)
        entries[name] |= {f"{field}_ms": getattr(taken, field) for field in ("median", "p20", "p80", "best")}
        entries[name] |= {
            "repeats": taken.repeats,
            "tokens_per_s": 1e3 * row.tokens / taken.median,
            "tflops": bench.flops(row) / taken.median / 1e9,
            "peak_bytes": max((peak for peak in peaks[name] if peak is not None), default=None),
        }
        if OURS in times and name != OURS:
            entries[name]["vs_ours"] = paired_ratio(its, times[OURS])
    peer = min((name for name in PEERS if name in times), key=lambda name: Latency.of(times[name]).median, default=None)
    ratio = paired_ratio(times[OURS], times[peer]) if peer is not None and OURS in times else None
    return {
        "name": row.name,
        "direction": row.direction,
        "problem": {"Tk": row.context, "B": row.batch, "tokens": row.tokens, "layers": bench.shape.layers},
        "providers": entries,
        "ours": OURS if OURS in times else None,
        "fastest_peer": peer,
        "ratio": ratio,
        "bar": BAR,
        **({} if ratio is None else {"met": ratio <= BAR}),
    }


def measured(
    asked: Sequence[Row], shape: Shape, trained: Shape, device: str, rounds: int, out: Path | None
) -> dict[str, Any]:
    """A results file, which is also written after every row."""
    register()
    common = conditions(device)
    common["versions"]["transformers"] = transformers.__version__
    found: dict[str, Any] = {"suite": "models", **common, "conditions": told(shape, trained, rounds), "cells": []}
    with progress(len(asked)) as shown:
        for training in (False, True):
            its = [row for row in asked if (row.direction == "training") == training]
            if not its:
                continue
            shown.now("making the model")
            longest = max(row.context + row.new for row in its)
            bench = Bench(trained if training else shape, device, longest, training)
            for row in its:
                found["cells"].append(measure(bench, row, rounds, shown.now))
                shown.done(line(found["cells"][-1]))
                if out is not None:
                    save(found, out)
                gc.unfreeze()
                if device == "cuda":
                    torch.cuda.empty_cache()
            del bench
            gc.collect()
    return found


def told(shape: Shape, trained: Shape, rounds: int) -> dict[str, Any]:
    return {
        "model": shape.told(),
        "training": f"{trained.layers} layers; a forward with its loss and a backward, no optimiser",
        "rounds": rounds,
        "timing": "perf_counter over a run, for decoding a step, synchronised at both ends, host and device",
        "order": "interleaved, one run or step each in turn, in rotating order; a short run of each before",
        "steps": "decoded twice: first_median_ms is of the first pass, where every length is new; else the second",
        "ratio": f"median over the rounds of the time of {OURS} by that of the fastest peer",
        "tokens_per_s": "tokens of the prompt, of all rows of a decoded step, or of the training step",
        "peak_bytes": "most that a run held beyond weights and the prompt's keys and values; its own cache is counted",
        "checked": f"logits of {runs.CHECKED_LAST} tokens, {runs.CHECKED_NEW} decoded ones, or a gradient, on up to "
        f"{runs.CHECKED} tokens, against fp32: at most 2 (gradient: 3) times the error of sdpa in bf16",
        "compiled": "nothing",
    }


def only(found: list[Row], words: Sequence[str]) -> list[Row]:
    return [row for row in found if all(word in row.name.split() for word in words)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=there, help="default: cuda if there is one")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of prefill and decoding; default: %(default)s")
    parser.add_argument("--trained-layers", type=int, default=TRAINED_LAYERS, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of prefill and training; default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=256, metavar="N", help="decoded in a pass, at most; default: %(default)s"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows whose name has all these words")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows, to see that it runs")
    parser.add_argument("--json-out", type=Path, help="write the results to this file, after every row")
    options = parser.parse_args(arguments)
    for name in ("layers", "trained_layers", "rounds", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1; got {getattr(options, name)}.")
    if options.json_out is not None:
        try:
            check_writable(options.json_out)
        except OSError as error:
            parser.error(f"--json-out: expected a file that can be written; got {options.json_out}: {error.strerror}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a GPU that torch sees, or cpu; got cuda.")
    asked = only(rows(options.tiny), options.only)
    asked = [row._replace(new=min(row.new, options.steps)) for row in asked]
    if not asked:
        known = ", ".join(row.name for row in rows(options.tiny))
        parser.error(f"--only: expected words of {known}; got {' '.join(options.only)}.")
    shape, trained = (TINY, TINY) if options.tiny else (Shape(options.layers), Shape(options.trained_layers))
    began = time.perf_counter()
    found = measured(asked, shape, trained, options.device, options.rounds, options.json_out)
    print(aligned(table(found)))
    print(f"{time.perf_counter() - began:.0f} s in all")
    wrong = [
        f"{cell['name']}: {name}"
        for cell in found["cells"]
        for name, one in cell["providers"].items()
        if one.get("right") is False
    ]
    for one in wrong:
        print(f"WRONG: {one}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
