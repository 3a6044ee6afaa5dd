"""stream-attention-benchmark: measure attention here, beside its peers, and write down the result.

Every provider is compared with the fp64 reference on a cell before it is timed on it. Without --suite, one problem is
measured over sequence lengths, ours beside the strongest baseline there is; with --suite, a set of cells that the
published figures come from. Ctrl-C keeps the cells that are done. The exit code is 1 if somebody was wrong, a cell has
no time of ours or a file could not be written, 2 if the command line cannot be run, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench import grid as grid_
from ..bench import providers as providers_
from ..bench import results as results_
from ..bench.grid import Grid
from ..bench.providers import Provider
from ..bench.run import measured, why_not, wrong
from ..bench.suites import FLOPS, SUITES, TRAFFIC, Cell
from ..bench.summary import is_plain
from ..bench.timing import Clock
from ..report.page import write_page
from . import flags, values
from .command import Refused, command

THREADS_PER_CORE = 4
GRID_FLAGS = "seq batch heads kv_heads dim dtype causal dropout backward decode chunk providers".split()
OUTPUTS = ("json_out", "csv", "report")


def _run(options: argparse.Namespace) -> int:
    if options.list and (outputs := flags.given(options, OUTPUTS)):
        raise Refused(f"--list measures nothing that could be written; leave out {outputs}")
    suite_device = next(SUITES[options.suite]()).case.device if options.suite and not options.list else None
    device = flags.device(options.device or suite_device)
    clock, eager = _clocks(options, device)
    providers = providers_.by_name(flags.fa3_folder(options.fa3, device))
    grid = None if options.suite else _grid(options, device)
    if options.list:
        return _list(options.suite, grid or Grid(device=device), providers)
    cells = _grid_cells(grid, options.providers, providers) if grid else _suite_cells(options, device)
    cells = _only(cells, options)
    _refuse_outputs(options)

    repeats = options.iters or (50 if grid else 25)
    warmup = options.warmup if options.warmup is not None else 10 if grid else 5
    seconds = float("inf") if options.iters else options.cell_seconds
    limits = f"up to {repeats} rounds each, stopped after {seconds:g} s (--cell-seconds)"
    if options.iters:
        limits = f"{repeats} rounds each (--iters)"
    try:
        print(f"{len(cells)} cell{'s' if len(cells) > 1 else ''}, {limits}", file=sys.stderr, flush=True)
        found = measured(options.suite or "grid", cells, providers, clock, repeats, warmup, seconds, eager)
    except KeyboardInterrupt:
        print("interrupted before a cell was done: nothing was written", file=sys.stderr)
        return 130
    cells = cells[: len(found["cells"])]  # fewer where it was interrupted
    if grid:
        for entry, cell in zip(found["cells"], cells, strict=True):
            entry |= grid_.documented(entry, cell)
    outcomes = _written(found, options)  # before anything is printed: the reader may have gone
    (_show_grid if grid else _show_suite)(found, cells, providers)
    _shortfalls(found)
    kept = [path for path, why in outcomes.items() if why is None]
    for path in kept:
        print(f"written to {path}")
    if not outcomes:
        print("no --json-out, --csv or --report: nothing was written")
    unwritten = flags.report_unwritten(outcomes)
    if "interrupted" in found:
        where = f"written to {', '.join(map(str, kept))}" if kept else "printed above and not written"
        print(f"interrupted {found['interrupted']}: those were {where}", file=sys.stderr)
        return 130
    asked = flags.named(options.providers or [], providers)
    failed = any("unavailable" in entry["providers"][name] for entry in found["cells"] for name in asked)
    failed = failed or any(wrong(entry) or entry["ours"] is None for entry in found["cells"])
    return 1 if unwritten or failed else 0


# What is measured


def _clocks(options: argparse.Namespace, device: str) -> tuple[Clock, Clock | None]:
    """The clock, and the second one of suites that have it."""
    twice = options.suite in ("decode", "caches")
    if device == "cuda":
        if options.clock or options.threads:
            raise Refused("--clock and --threads are for the cpu; calls on cuda are timed by CUDA events")
        if twice:
            return "graph", "eager"
        return "calls" if options.suite == "small" else "events", None
    if options.threads:
        cores = os.cpu_count() or 1
        if options.threads > (most := THREADS_PER_CORE * cores):  # torch would crash or starve the machine
            each = f"{THREADS_PER_CORE} for each of the {cores} cores here"
            raise Refused(f"--threads: expected at most {most}, {each}; got {options.threads}")
        torch.set_num_threads(options.threads)
    if options.clock == "cpu" and torch.get_num_threads() != 1:
        raise Refused(f"--clock cpu counts one thread; say --threads 1, not {torch.get_num_threads()}")
    clock: Clock = options.clock or "wall"
    return clock, clock if twice else None


def _suite_cells(options: argparse.Namespace, device: str) -> list[Cell]:
    if given := flags.given(options, GRID_FLAGS):
        raise Refused(f"--suite {options.suite} has its own cells; leave out {given}")
    cells = list(SUITES[options.suite]())
    if cells[0].case.device != device:
        raise Refused(f"--suite {options.suite} runs on {cells[0].case.device}; say --device {cells[0].case.device}")
    return cells


def _grid(options: argparse.Namespace, device: str) -> Grid:
    if options.chunk:
        refused = {"--backward": options.backward, "--decode": options.decode, "--dropout": options.dropout}
        for flag, is_set in ({"--no-causal": options.causal is False} | refused).items():
            if is_set:
                raise Refused(f"--chunk streams a causal prefill, a forward without dropout; leave out {flag}")
    modes = {name: getattr(options, name) for name in ("backward", "decode", "chunk")}
    fields = {name: value for name, value in modes.items() if value is not None} | flags.problem(options, device)
    return Grid(**fields, seq=tuple(dict.fromkeys(options.seq))) if options.seq else Grid(**fields)


def _grid_cells(grid: Grid, asked: Sequence[str] | None, providers: dict[str, Provider]) -> list[Cell]:
    if asked is not None:
        return flags.cells_with(asked, providers, grid)
    peer, passed_over = grid_.baseline(providers, grid.cells())
    for name, reason in passed_over.items():
        print(f"not the baseline: {name}: {reason}", file=sys.stderr)
    return grid.cells(peers=(peer,))


def _only(cells: list[Cell], options: argparse.Namespace) -> list[Cell]:
    kept = [cell for cell in cells if all(word in _label(cell) for word in options.only)]
    if not kept:
        names = "".join(f"\n  {_label(cell)}" for cell in cells)
        whose = f"the suite {options.suite}" if options.suite else "the grid"
        raise Refused(f"--only {' '.join(options.only)}: {whose} has no such cell; it has{names}")
    return kept


def _refuse_outputs(options: argparse.Namespace) -> None:
    """Refuse what could not be written at the end, before anything is measured."""
    page = None if options.report is None else options.report / "index.html"
    flags.apart({"--json-out": options.json_out, "--csv": options.csv, "--report": page})
    flags.writable_file("--json-out", options.json_out)
    flags.writable_file("--csv", options.csv)
    flags.writable_folder("--report", options.report, "index.html")


def _written(found: dict[str, Any], options: argparse.Namespace) -> dict[Path, str | None]:
    """By file, why it could not be written, or None where it was."""
    page = None if options.report is None else options.report / "index.html"
    calls: dict[Path | None, tuple[Any, ...]] = {
        options.json_out: (results_.save, found, options.json_out),
        options.csv: (results_.save_csv, found, options.csv),
        page: (write_page, [found], options.report),
    }
    return {path: flags.write_error(*call) for path, call in calls.items() if path is not None}


# What is shown


def _show_suite(found: dict[str, Any], cells: list[Cell], providers: dict[str, Provider]) -> None:
    print(f"\n{results_.aligned(results_.table(found))}")
    if (eager := results_.eager_table(found)) is not None:
        print(f"\nby {found['conditions']['eager']}:\n{results_.aligned(eager)}")
    for line in (results_.read_speed(found), results_.losses(found)):
        if line is not None:
            print(line)


def _show_grid(found: dict[str, Any], cells: list[Cell], providers: dict[str, Provider]) -> None:
    entries = found["cells"]
    print("checked against fp64 before it was timed, largest error of what is allowed:")
    for entry, cell in zip(entries, cells, strict=True):
        print(f"  {cell.case.Tk}: {grid_.errors(entry)}")
    print(f"\n{results_.aligned(grid_.table(entries, cells, providers), right=True)}\n")
    ours = cells[0].ours[0]
    ran = dict.fromkeys(entry["providers"][ours].get("ran", "nothing") for entry in entries)
    kind = f"B={cells[0].case.B} Hq={cells[0].case.Hq} Hkv={cells[0].case.Hkv} D={cells[0].case.D}"
    print(f"{cells[0].direction}, {kind}, {found['machine']['name']}, {found['conditions']['timing']}, medians.")
    print(f"Fused is stream_attention.attention: {'; '.join(ran)}.")
    for name in grid_.others(cells[0])[:1]:
        print(_about_baseline(name, providers[name], cells[0]))
    print(f"TF: TFLOP/s, FLOPs = {FLOPS}, for every column.")
    print(f"GB/s: {TRAFFIC}.")
    for entry in entries:
        rounds = min((one["repeats"] for one in entry["providers"].values() if "repeats" in one), default=0)
        if 0 < rounds < found["conditions"]["repeats"]:
            seconds = found["conditions"]["cell_seconds"]
            print(f"{entry['name']}: {rounds} rounds in its {seconds:g} s (--cell-seconds)")


def _about_baseline(name: str, provider: Provider, cell: Cell) -> str:
    ratio = f"{provider.label}/Fused(ms) is its median by ours"
    if not is_plain(name):
        return f"{provider.label} is {provider.about}.\n{ratio}: above 1, ours is the faster."
    cost = "one by it is how many times as long the modifiers make a call"
    if not cell.case.dropout_p:
        return f"{provider.label} is {provider.about}.\n{ratio}; {cost}."
    heads = ", with a KV head for every head" if cell.case.Hkv != cell.case.Hq else ""
    return (
        f"No peer draws the same dropout mask; {provider.label} is our own call without dropout{heads}: "
        f"what dropout costs.\n{ratio}; {cost.replace('the modifiers make', 'dropout makes')}."
    )


def _shortfalls(found: dict[str, Any]) -> None:
    """Who was wrong, where none of ours was timed, and who was not measured."""
    for entry in found["cells"]:
        for name in wrong(entry):
            print(f"WRONG: {name} on {entry['name']} ({entry['direction']})")
        if entry["ours"] is None:
            print(f"NONE OF OURS was timed on {entry['name']} ({entry['direction']})")
    reasons = {
        f"{name}: {one['unavailable']}": None
        for entry in found["cells"]
        for name, one in entry["providers"].items()
        if "unavailable" in one
    }
    for reason in list(reasons)[:12]:
        print(f"not measured: {reason}")


def _list(suite: str | None, grid: Grid, providers: dict[str, Provider]) -> int:
    cell = grid.cells()[0]
    print(f"providers, asked about {_label(cell)} on {grid.device}:")
    for name, provider in providers.items():
        reason = why_not(provider, cell)
        print(f"  {name.replace(' ', '-'):22} {provider.about if reason is None else f'not here: {reason}'}")
    print("\nsuites and their cells (--suite, --only):")
    for known, made in SUITES.items():
        if suite not in (None, known):
            continue
        cells = list(made())
        title = (inspect.getdoc(made) or "").splitlines()[0]
        print(f"  {known}, {len(cells)} cells on {cells[0].case.device}. {title}")
        for direction in dict.fromkeys(cell.direction for cell in cells):
            names = ", ".join(cell.name.replace(" ", _GLUE) for cell in cells if cell.direction == direction)
            lines = textwrap.wrap(f"{direction}: {names}", 116, initial_indent=" " * 4, subsequent_indent=" " * 6)
            print("\n".join(lines).replace(_GLUE, " "))
    return 0


_GLUE = "\x00"  # holds the words of a name together while a line is wrapped


def _label(cell: Cell) -> str:
    return f"{cell.name} {cell.direction}"


# The command line


def _flags(parser: argparse.ArgumentParser) -> None:
    flags.add_device(parser)
    listing = "say who can compute here, or why not, and which suites there are; then end"
    parser.add_argument("--list", action="store_true", help=listing)

    grid = parser.add_argument_group("the grid (without --suite)")
    add = grid.add_argument
    lengths = "sequence lengths; default 512 1024 2048 4096"
    add("--seq", type=values.count, nargs="+", metavar="N", help=lengths)
    flags.add_problem(grid, batch=1)
    add("--backward", action="store_true", default=None, help="time the backward alone")
    add("--decode", action="store_true", default=None, help="one new query per sequence against --seq keys")
    chunk = "the sequence arrives C queries at a time, each chunk a call against all keys so far; default 0: at once"
    add("--chunk", type=values.count_or_none, metavar="C", help=chunk)
    flags.add_providers(grid)

    add = parser.add_argument_group("suites").add_argument
    add("--suite", choices=tuple(SUITES), help="measure this set of cells instead of the grid")
    add("--only", nargs="+", default=[], metavar="WORD", help="cells whose name has all these words")

    how = parser.add_argument_group("measuring")
    add = how.add_argument
    warmup = "rounds that are not counted; default 10, suites 5"
    add("--warmup", type=values.count_or_none, metavar="N", help=warmup)
    rounds = "rounds per cell, exactly, whatever --cell-seconds; default: up to 50, suites 25"
    add("--iters", "--repeats", type=values.count, metavar="N", help=rounds)
    stop = "without --iters, stop a cell's rounds after this long, with at least three; default 4"
    add("--cell-seconds", type=values.seconds, default=4.0, metavar="S", help=stop)
    clock = "on the cpu: wall time, the default, or the process's own CPU time, for a machine others use"
    add("--clock", choices=("wall", "cpu"), help=clock)
    add("--threads", type=values.count, metavar="N", help="CPU threads; default: torch's own choice")
    flags.add_fa3(how)

    add = parser.add_argument_group("output").add_argument
    what = "write the results file: every figure, with commit, versions, machine and conditions"
    add("--json-out", "--json_out", "--out", type=values.path_or_none, metavar="FILE", help=what)
    add("--csv", type=values.path_or_none, metavar="FILE", help="write a row per cell and provider")
    page = "write DIR/index.html, one page with the plots; needs matplotlib"
    add("--report", type=values.path_or_none, metavar="DIR", help=page)


main = command("stream-attention-benchmark", __doc__, _flags, _run)

if __name__ == "__main__":
    sys.exit(main())
