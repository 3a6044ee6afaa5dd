"""Twelve batches of serving engines on paged keys, beside FlashAttention-3: `paged_attention` by replay and as called.

    python -m benchmarks.workloads --fa3 DIR --out benchmarks/results/h200/workloads.json
    python -m benchmarks.workloads --markdown benchmarks/results/h200/workloads.json
    python -m benchmarks.workloads --cpu --scale 64

The second writes the table into docs/performance.md; the third runs everything but graphs and peers on a CPU, with
lengths divided by 64, in about a minute. On an H200 the twelve are meant to take at most 150 s at one shape of heads,
most of it to compile (not run there yet; `seconds` in the file). Before anything is timed, rows of the first, the
longest and the last request are compared with attention in fp64. One of ours that is wrong ends the run.

Keys lie in pages that are permuted over their pool, tables are as wide as 128k tokens, and `write_kv` has written the
new tokens. All calls of a workload take turns, the L2 cache is cleared before each, and times are medians. `replayed`
is the time of a CUDA graph on the device. `called` is from Python, from an idle device to an idle device.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stream_attention_tools.bench.progress import progress
from stream_attention_tools.bench.results import conditions, save
from stream_attention_tools.files import write_file

from .batches import SHAPES, TB_PER_S, TFLOP_PER_S, WORKLOADS, described, scaled
from .calls import fa3_or_why_not, step
from .figures import line, missed, written
from .measure import Wrong, measure

TIMING = {
    "replayed": "CUDA events around the replay of a CUDA graph of the call",
    "called": "perf_counter around a call from Python, on a GPU from an idle device to an idle device",
    "order": "interleaved, one call each per round; on a GPU the L2 cache is cleared before each",
}
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workloads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--fa3", type=Path, metavar="DIR", help="a folder with fa3.so.xz and libcudart.so.12")
    add("--out", type=Path, metavar="FILE", help="write the figures to this JSON file, after each workload")
    add("--rounds", type=int, default=21, help="default: %(default)s")
    add("--heads", default="own", choices=("own", *SHAPES, "all"), help="default: each workload's own shape")
    add("--only", type=int, nargs="+", metavar="N", help="numbers of workloads, from 1 to 12")
    add("--cpu", action="store_true", help="run on the CPU: no graphs, no peers")
    add("--scale", type=int, default=1, metavar="N", help="divide lengths by N")
    add("--tb-per-s", type=float, default=TB_PER_S, help="what the GPU reads; default: %(default)s, of an H200")
    add("--tflop-per-s", type=float, default=TFLOP_PER_S, help="what it computes; default: %(default)s, of an H200")
    add("--limit", type=int, default=120, metavar="S", help="seconds a workload may hang; default: %(default)s")
    add("--markdown", type=Path, metavar="FILE", help="write the table of a results file into the page, and end")
    add("--page", type=Path, default=PAGE, help="default: docs/performance.md")
    options = parser.parse_args()
    if options.markdown is not None:
        if not options.markdown.exists():
            parser.error(f"--markdown: expected a results file; there is no {options.markdown}")
        write_file(options.page, written(options.page.read_text(), json.loads(options.markdown.read_text())))
        return 0
    numbers = [one.number for one in WORKLOADS]
    if wrong := [n for n in options.only or () if n not in numbers]:
        parser.error(f"--only: expected numbers from {numbers[0]} to {numbers[-1]}; got {wrong[0]}")
    for name in ("scale", "rounds", "limit"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1; got {getattr(options, name)}")
    if not options.cpu and not torch.cuda.is_available():
        print("this measures calls on a GPU, and there is none; on a CPU: --cpu --scale 64", file=sys.stderr)
        return 2
    try:
        return run(options)
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; the exit code is 1 if one of ours is wrong."""
    began, device = time.perf_counter(), "cpu" if options.cpu else "cuda"
    limits = options.tb_per_s, options.tflop_per_s
    found: dict[str, Any] = {}
    results = conditions(device) | {
        "rounds": options.rounds,
        "scale": options.scale,
        "timing": TIMING,
        "limits": dict(zip(("tb_per_s", "tflop_per_s"), limits, strict=True)),
        "cells": found,
    }
    fa3 = fa3_or_why_not(options.fa3, device)
    chosen = [one for one in WORKLOADS if options.only is None or one.number in options.only]
    pairs = [
        (scaled(one, options.scale), SHAPES[shape])
        for one in chosen
        for shape in (SHAPES if options.heads == "all" else [one.heads if options.heads == "own" else options.heads])
    ]
    with progress(len(pairs)) as shown, torch.no_grad():
        for workload, heads in pairs:
            name = f"{workload.number} {workload.name}, {heads}"
            cell = described(workload, heads, limits)
            faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.__stderr__)
            try:
                made = step(workload, heads, device, options.scale)
                cell["pool_bytes"] = made.key_pages.nbytes + made.value_pages.nbytes
                cell["providers"] = measure(made, fa3, options.rounds, shown.now)
            except Wrong as error:
                print(f"{name}: {error}; nothing of it was timed", file=sys.stderr)
                return 1
            found[name] = cell
            results["seconds"] = round(time.perf_counter() - began, 1)
            shown.done(line(name, cell))
            del made
            if device == "cuda":
                torch.cuda.empty_cache()
            if options.out is not None:
                save(results, options.out)
    if device == "cuda":
        for sentence in missed(results):
            print(f"missed: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
