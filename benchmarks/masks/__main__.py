"""Attention with masks as data, beside the same masks as matrices, packed sequences, FlexAttention and SDPA.

    python -m benchmarks.masks --fa3 DIR --out benchmarks/results/h200/masks.json
    python -m benchmarks.masks --cpu --rounds 7 --out benchmarks/results/cpu/masks.json
    python -m benchmarks.masks --markdown

The third writes the tables of the files that there are into docs/performance.md and docs/masks.md. On an H200 a run is
meant to take at most 150 s, most of it to compile (not run there yet; `seconds` in the file): a case and direction that
takes longer than `--budget` seconds gets fewer rounds, at least three. On one thread of a CPU it took 13 minutes.

Before anything is timed, rows of the output and all gradients that follow from them are compared with attention in
fp64. One of ours that is wrong ends the run; a peer that is wrong gets no time. Forward and backward are timed apart,
all providers of a case in turn. Masks, FlexAttention's block masks and copies of shared tokens are made before.
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
from stream_attention_tools.bench.timing import CLOCKS
from stream_attention_tools.files import write_file

from ..workloads.calls import fa3_or_why_not
from ..workloads.measure import Wrong
from .cases import CASES, SIZES, Sizes
from .figures import PLACES, line, missed, written
from .measure import measure, new_length


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.masks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--fa3", type=Path, metavar="DIR", help="a folder with fa3.so.xz and libcudart.so.12")
    add("--out", type=Path, metavar="FILE", help="write the figures to this JSON file, after each case")
    add("--rounds", type=int, default=11, help="default: %(default)s")
    add("--budget", type=float, default=4.0, metavar="S", help="seconds of a case and direction on a GPU; default: 4")
    add("--only", default="", metavar="WORDS", help="cases whose name contains this")
    add("--cpu", action="store_true", help="run on the CPU: smaller sizes, one thread, CPU time, no FlexAttention")
    add("--limit", type=int, default=120, metavar="S", help="seconds a case may hang on a GPU; default: %(default)s")
    add("--markdown", action="store_true", help="write the tables into the pages, and end")
    options = parser.parse_args()
    if options.markdown:
        for place in PLACES.values():
            if place.file.exists():
                text = written(place.page.read_text(), place.mark, json.loads(place.file.read_text()))
                write_file(place.page, text)
        return 0
    for name in ("rounds", "limit"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1; got {getattr(options, name)}")
    if not any(options.only in case.name for case in CASES):
        parser.error(
            f"--only: expected words of a case: {', '.join(case.name for case in CASES)}; got {options.only!r}"
        )
    if not options.cpu and not torch.cuda.is_available():
        print("this measures calls on a GPU, and there is none; on a CPU: --cpu", file=sys.stderr)
        return 2
    device, threads = "cpu" if options.cpu else "cuda", torch.get_num_threads()
    if options.cpu:
        torch.set_num_threads(1)
        options.budget = float("inf")
    try:
        return run(options, device, SIZES[device])
    finally:
        faulthandler.cancel_dump_traceback_later()
        torch.set_num_threads(threads)


def run(options: argparse.Namespace, device: str, sizes: Sizes) -> int:
    """Measure what is asked for; the exit code is 1 if one of ours is wrong."""
    began = time.perf_counter()
    found: dict[str, Any] = {}
    timing = {
        "clock": CLOCKS["cpu" if device == "cpu" else "events"],
        "order": "in turn, one call each per round; on a GPU the L2 cache is cleared before each",
    }
    results: dict[str, Any] = conditions(device) | {"rounds": options.rounds, "timing": timing, "cells": found}
    fa3 = fa3_or_why_not(options.fa3, device)
    chosen = [case for case in CASES if options.only in case.name]
    with progress(len(chosen)) as shown:
        for case in chosen:
            if device == "cuda":
                faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.__stderr__)
            try:
                found[case.name] = measure(case, sizes, device, fa3, options.rounds, options.budget, shown.now)
                if case is CASES[0]:
                    results["new_length_ms"] = new_length(case, sizes, device, sizes.length * 15 // 16)
            except Wrong as error:
                print(f"{case.name}: {error}; nothing of it was timed", file=sys.stderr)
                return 1
            results["seconds"] = round(time.perf_counter() - began, 1)
            shown.done(line(case.name, found[case.name]))
            if device == "cuda":
                torch.cuda.empty_cache()
            if options.out is not None:
                save(results, options.out)
    for sentence in missed(results):
        print(f"missed: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
