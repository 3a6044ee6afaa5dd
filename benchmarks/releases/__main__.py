"""Compare the speed of our kernels between Triton releases, or between commits of this library.

    python -m benchmarks.releases --triton 3.9.0=/tmp/triton-3.9.0 --rounds 3 --out releases.json
    python -m benchmarks.releases --source ddc84db=/tmp/old/src --decode --out commits.json

The first is what this Python has; each `--triton VERSION=FOLDER` adds a release, unpacked in a folder, and each
`--source COMMIT=FOLDER` both packages as they are in another `src`. They take turns, a fresh process each, `--rounds`
times. A cell's time is the median over all rounds. Ratios mean speed: above 1.00 what was added is faster. Every cell
is first checked against SDPA in fp32, on one batch entry and two heads of the same random inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from stream_attention_tools.bench.results import conditions, save
from stream_attention_tools.bench.suites import SUITES, Cell, flops

SHORT = (1024, 8192)
"""Lengths of the 24 cells of `--short`, forward and backward."""


DIRECTIONS = ("forward", "backward", "decode")


def cells(short: bool, decode: bool = False) -> dict[str, Cell]:
    """The cells of the suites `forward` and `backward`, or 24 of them, and those of `decode`."""
    found = [cell for direction in DIRECTIONS[:2] for cell in SUITES[direction]()]
    named = {f"{cell.name} {cell.direction}": cell for cell in found if not short or cell.case.Tq in SHORT}
    return named | ({f"{cell.name} decode": cell for cell in SUITES["decode"]()} if decode else {})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.releases", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--triton", action="append", default=[], metavar="VERSION=FOLDER")
    parser.add_argument("--source", action="append", default=[], metavar="COMMIT=FOLDER")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="timed calls a cell and round")
    parser.add_argument("--short", action="store_true", help="24 cells instead of 72")
    parser.add_argument("--decode", action="store_true", help="the cells of decoding too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="print a results file as a table of Markdown, and end"
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # the process of one round
    options = parser.parse_args()
    if options.show:
        print(markdown(json.loads(options.show.read_text())))
        return 0
    if options.out is None:
        parser.error("say where the results go: --out FILE")
    if options.measure:
        save(measure(cells(options.short, options.decode), options.repeats), options.out)
        return 0
    for one in options.source:
        commit, _, folder = one.partition("=")
        if not commit or not Path(folder, "stream_attention").is_dir():
            parser.error(f"--source: expected COMMIT=FOLDER with the package stream_attention; got {one!r}")
    if wrong := [one for one in options.triton if not re.fullmatch(r"[\d.]+=.+", one)]:
        parser.error(f"--triton: expected VERSION=FOLDER; got {wrong[0]!r}")
    if not options.triton and not options.source:
        parser.error("say what to compare with: --triton VERSION=FOLDER or --source COMMIT=FOLDER")
    releases = dict(one.split("=", 1) for one in options.triton)
    for version, folder in releases.items():
        if not list(Path(folder).glob(f"triton-{version}.dist-info")):
            parser.error(f"--triton: {folder} has no Triton {version}")
    rounds: dict[str, list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        for name, folder in {"": "", **releases, **dict(one.split("=", 1) for one in options.source)}.items():
            found = in_a_process(folder, options)
            triton = found["versions"]["triton"]
            if name in releases and name != triton:
                print(f"asked for Triton {name}; measured {triton}", file=sys.stderr)
                return 1
            rounds.setdefault(name or triton, []).append(found)
            print(f"round {number + 1} of {options.rounds}: {name or triton}", flush=True)
        result = combined(rounds, options, number + 1)
        save(result, options.out)  # after every round: who is interrupted keeps those that are done
    print(table(result))
    return 0


def in_a_process(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """One round with the Triton or the library of a folder, or with those that are here."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "round.json")
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "benchmarks.releases", "--measure", "--out", str(out)]
        command += ["--repeats", str(options.repeats)]
        command += [flag for flag in ("--short", "--decode") if getattr(options, flag[2:])]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
        return json.loads(out.read_text())


def measure(cells: dict[str, Cell], repeats: int) -> dict[str, Any]:
    """Microseconds of every cell in this process."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    found: dict[str, dict[str, float]] = {}
    for name, cell in cells.items():
        case = cell.case
        sizes = (case.Tq, case.Hq), (case.Tk, case.Hkv), (case.Tk, case.Hkv)
        query, key, value = (torch.randn(case.B, *size, case.D, dtype=case.dtype, device=case.device) for size in sizes)
        if name.endswith("decode"):
            call = check_decode(query, key, value)
        else:
            tensors = [t.requires_grad_() for t in (query, key, value)]
            call = check(tensors, torch.randn_like(query), case.causal, cell.direction)
        for _ in range(3):
            call()
        times = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # the host gets ahead
            flush.zero_()
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        found[name] = {"us": statistics.median(times), "flop": flops(case, cell.direction)}
    return conditions("cuda") | {"cells": found}


def check(tensors: list[Any], grad: Any, causal: bool, direction: str) -> Any:
    """The call that is timed, after its results agreed with SDPA's in fp32 on one batch entry and two heads."""
    from stream_attention import attention

    def ours() -> Any:
        return attention(*tensors, causal=causal, backend="gluon")

    out = ours()
    exact = [t[:1, :, :2].detach().float().requires_grad_() for t in tensors]
    wide = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in exact), is_causal=causal)
    wide = wide.transpose(1, 2)
    pairs = [(out[:1, :, :2], wide)]
    if direction == "backward":
        theirs = torch.autograd.grad(wide, exact, grad[:1, :, :2].float())
        pairs += [
            (one[:1, :, :2], other)
            for one, other in zip(torch.autograd.grad(ours(), tensors, grad), theirs, strict=True)
        ]
    for got, expected in pairs:
        agree(got, expected)
    if direction == "forward":
        plain = [t.detach() for t in tensors]
        return lambda: attention(*plain, causal=causal, backend="gluon")
    return lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True)


def check_decode(query: Any, key: Any, value: Any) -> Any:
    """The same of one query of each row against a cache."""
    from stream_attention import ContiguousKV, decode_attention

    lengths = torch.full(key.shape[:1], key.shape[1], dtype=torch.int32, device=key.device)
    cache = ContiguousKV(key, value, lengths)
    group = query.shape[2] // key.shape[2]
    one = query[:1, :, :group], key[:1, :, :1], value[:1, :, :1]
    wide = torch.nn.functional.scaled_dot_product_attention(*(t.float().transpose(1, 2) for t in one), enable_gqa=True)
    agree(decode_attention(query, cache)[:1, :, :group], wide.transpose(1, 2))
    return lambda: decode_attention(query, cache)


def agree(got: Any, expected: Any) -> None:
    error = ((got.float() - expected).norm() / expected.norm()).item()
    assert error < 1e-2, f"relative error {error:.1e}: a wrong kernel is not timed"


def combined(rounds: dict[str, list[dict[str, Any]]], options: argparse.Namespace, done: int) -> dict[str, Any]:
    """The rounds that are done as one results file."""
    first, *others = rounds
    names = list(rounds[first][0]["cells"])
    us = {
        release: {name: statistics.median(one["cells"][name]["us"] for one in its) for name in names}
        for release, its in rounds.items()
    }
    return {
        **{key: value for key, value in rounds[first][0].items() if key != "cells"},
        "baseline": first,
        "how": f"{done} rounds of alternating processes, medians of {options.repeats} calls by CUDA events, "
        "L2 cleared before each; a cell's time is the median of its rounds",
        "us": {
            release: {name: [one["cells"][name]["us"] for one in its] for name in names}
            for release, its in rounds.items()
        },
        "tflops": {
            release: {name: rounds[first][0]["cells"][name]["flop"] / us[release][name] / 1e6 for name in names}
            for release in rounds
        },
        "speed": {release: {name: us[first][name] / us[release][name] for name in names} for release in others},
        "geometric_mean": {
            release: {
                direction: statistics.geometric_mean(
                    us[first][name] / us[release][name] for name in names if name.endswith(direction)
                )
                for direction in DIRECTIONS
                if any(name.endswith(direction) for name in names)
            }
            for release in others
        },
    }


def table(result: dict[str, Any]) -> str:
    """Speed of every release over the first, a line a cell."""
    releases = list(result["speed"])
    lines = [f"{'':26}{result['baseline']:>9} TFLOP/s  " + "".join(f"{one:>8}" for one in releases)]
    for name, tflops in result["tflops"][result["baseline"]].items():
        lines.append(
            f"{name:26}{tflops:9.0f}          " + "".join(f"{result['speed'][one][name]:8.3f}" for one in releases)
        )
    for direction in result["geometric_mean"][releases[0]]:
        means = "".join(f"{result['geometric_mean'][one][direction]:8.3f}" for one in releases)
        lines.append(f"{'geometric mean ' + direction:26}{'':19}{means}")
    return "\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    """Speed of every release over the first, lowest to highest over the lengths."""
    lines = []
    for release, speed in result["speed"].items():
        what = f"Triton {release}" if re.fullmatch(r"[\d.]+", release) else release
        lines += [f"| {what} over {result['baseline']} | forward | backward |", "|---|---|---|"]
        for kind in dict.fromkeys(" ".join(name.split()[:2]) for name in speed if not name.endswith("decode")):
            spans = []
            for direction in ("forward", "backward"):
                its = [
                    ratio for name, ratio in speed.items() if name.startswith(f"{kind} ") and name.endswith(direction)
                ]
                spans.append(f"{min(its):.2f}-{max(its):.2f}")
            lines.append(f"| {kind} | {' | '.join(spans)} |")
        means = [f"{result['geometric_mean'][release][direction]:.3f}" for direction in ("forward", "backward")]
        lines.append(f"| geometric mean | {' | '.join(means)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
