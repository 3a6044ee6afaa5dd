"""stream-attention-test: compare attention with the fp64 reference on random inputs.

Every row of the output is compared, with --backward every gradient too. The tolerance is derived from plain PyTorch's
error: twice (gradients: three times) that of the same computation in the same dtype, plus the rounding of the result.
The exit code is 1 if a provider exceeds it or the file could not be written, 2 if the command line cannot be run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..bench import grid as grid_
from ..bench import providers as providers_
from ..bench import results as results_
from ..bench.accuracy import check_all, gradient_case
from ..bench.grid import Grid
from ..bench.providers import Provider
from ..bench.run import described
from ..bench.suites import Cell
from ..testing.inputs import Case, draw
from . import flags, values
from .command import command


def _run(options: argparse.Namespace) -> int:
    device = flags.device(options.device)
    fields = {"batch": 2} | flags.problem(options, device)
    grid = Grid(**fields, seq=(options.seq,), backward=options.backward)
    providers = providers_.by_name(flags.fa3_folder(options.fa3, device))
    flags.writable_file("--json-out", options.json_out)
    cell = _cell(grid, options.providers, providers)
    found = compare(cell, providers, options.seed)
    show(found, cell)
    if options.json_out is not None:
        why = flags.write_error(results_.save, results_.conditions(device) | found, options.json_out)
        if flags.report_unwritten({options.json_out: why}):
            return 1
        print(f"written to {options.json_out}")
    return 0 if all(_passed(one) for one in found["providers"].values()) else 1


def compare(cell: Cell, providers: dict[str, Provider], seed: int = 0) -> dict[str, Any]:
    """What each provider of a cell computes beside fp64, by provider and by result."""
    entries: dict[str, Any] = {}
    for name in cell.everybody:
        provider = providers[name]
        x = draw(provider.case(cell.case), seed)
        try:
            verdicts = check_all(provider, cell, x, seed)
        except Exception as error:
            entries[name] = {"failed": f"{type(error).__name__}: {error}"}
            continue
        keys = ("error", "mean", "allowed", "right")
        results = {one.of: {key: getattr(one, key) for key in keys} for one in verdicts}
        entries[name] = {"ran": provider.ran(x) or provider.about, "results": results}
    return {"problem": described(cell.case), "direction": cell.direction, "seed": seed, "providers": entries}


def show(found: dict[str, Any], cell: Cell) -> None:
    """Print the documented line of ours, then everybody's errors beside what is allowed."""
    kind = "output and gradients" if cell.direction != "forward" else "output"
    print(f"{_in_words(cell.case)}, inputs of seed {found['seed']}: {kind} beside fp64")
    compared = gradient_case(cell.case)
    if cell.direction != "forward" and compared != cell.case:
        print(f"gradients on as much of it as the dense reference holds: {_in_words(compared)}")
    ours = found["providers"][cell.ours[0]]
    if "results" in ours:
        out = ours["results"]["out"]
        print(f"Mean abs diff: {out['mean']:.3e}, Max abs diff: {out['error']:.3e}")
    rows = [["provider", "result", "max error", "allowed", "", "computed by"]]
    for name, one in found["providers"].items():
        if "failed" in one:
            rows.append([name, "", "", "", "FAIL", one["failed"]])
        for of, result in one.get("results", {}).items():
            verdict = "PASS" if result["right"] else "FAIL"
            rows.append([name, of, f"{result['error']:.3e}", f"{result['allowed']:.3e}", verdict, one["ran"]])
    print(f"\n{results_.aligned(rows)}")


def _cell(grid: Grid, asked: Sequence[str] | None, providers: dict[str, Provider]) -> Cell:
    if asked is not None:
        return flags.cells_with(asked, providers, grid)[0]
    peer = grid_.baseline(providers, grid.cells())[0]
    return grid.cells(peers=() if peer == grid_.PLAIN else (peer,))[0]


def _in_words(case: Case) -> str:
    kind = f"{'causal' if case.causal else 'full'}{f', dropout {case.dropout_p:g}' if case.dropout_p else ''}"
    dtype = str(case.dtype).removeprefix("torch.")
    return f"B={case.B} T={case.Tk} Hq={case.Hq} Hkv={case.Hkv} D={case.D} {dtype} {kind} on {case.device}"


def _passed(one: dict[str, Any]) -> bool:
    return "failed" not in one and all(result["right"] for result in one["results"].values())


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    flags.add_device(parser)
    add("--seq", type=values.count, default=512, metavar="N", help="sequence length; default 512")
    flags.add_problem(parser, batch=2)
    add("--backward", action="store_true", help="compare the gradients of query, key and value too")
    add("--seed", type=values.seed, default=0, metavar="N", help="of the random inputs; default 0")
    flags.add_providers(parser)
    flags.add_fa3(parser)
    what = "write the errors, with commit, versions and machine"
    add("--json-out", "--json_out", type=values.path_or_none, metavar="FILE", help=what)


main = command("stream-attention-test", __doc__, _flags, _run)

if __name__ == "__main__":
    sys.exit(main())
