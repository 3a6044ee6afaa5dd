"""python -m stream_attention.cli.benchmark: measure attention here, beside its peers, and write down the result.

Every provider is compared with the fp64 reference on a cell before it is timed on it. The exit code is 1 if one of them
was wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..benchmark import providers as providers_
from ..benchmark import results as results_
from ..benchmark.cells import SUITES, Cell
from ..benchmark.providers import Provider
from ..benchmark.run import measure_all, wrong
from ..benchmark.timing import CLOCKS, Clock


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parser().parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no CUDA device here", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    clock: Clock = "events" if options.device == "cuda" else options.clock
    if clock == "cpu" and torch.get_num_threads() != 1:
        print(f"--clock cpu counts one thread; say --threads 1, not {torch.get_num_threads()}", file=sys.stderr)
        return 2
    suite = options.suite or {"cpu": "cpu", "cuda": "forward"}[options.device]
    cells = [cell for cell in SUITES[suite]() if all(word in _label(cell) for word in options.only)]
    if not cells:
        print(f"--only {' '.join(options.only)}: the suite {suite} has no such cell", file=sys.stderr)
        return 2
    if any(cell.case.device != options.device for cell in cells):
        print(f"--suite {suite} runs on {cells[0].case.device}; say --device {cells[0].case.device}", file=sys.stderr)
        return 2
    found = benchmark(
        suite, cells, providers_.by_name(options.fa3), clock, options.repeats, options.warmup, options.cell_seconds
    )
    if options.out is None:
        print("no --out: nothing was written")
    else:
        results_.save(found, options.out)
        print(f"written to {options.out}")
    return 1 if any(wrong(entry) for entry in found["cells"]) else 0


def benchmark(
    suite: str,
    cells: list[Cell],
    providers: dict[str, Provider],
    clock: Clock = "wall",
    repeats: int = 25,
    warmup: int = 5,
    cell_seconds: float = float("inf"),
) -> dict[str, Any]:
    """Measure the cells, print each as it is finished and the table last; returns what a results file holds."""
    device = cells[0].case.device
    found: dict[str, Any] = {
        "suite": suite,
        **results_.conditions(device),
        "conditions": {
            "repeats": repeats,
            "warmup": warmup,
            "cell_seconds": cell_seconds if cell_seconds < float("inf") else None,
            "timing": CLOCKS[clock],
            "order": "interleaved, one call each per round; inputs rotate",
            "ratio": "median over the rounds of our time by that of the fastest peer",
            "flops": "2 B Hq Tq Tk (D + Dv), halved for causal, x2.5 backward, x3.5 forward+backward",
        },
    }
    with _progress(len(cells)) as done:
        found["cells"] = measure_all(cells, providers, clock, repeats, warmup, cell_seconds, done)
    print(f"\n{results_.aligned(results_.table(found))}")
    for entry in found["cells"]:
        for name in wrong(entry):
            print(f"WRONG: {name} on {entry['name']} ({entry['direction']})")
    reasons = {
        f"{name}: {one['unavailable']}": None
        for entry in found["cells"]
        for name, one in entry["providers"].items()
        if "unavailable" in one
    }
    for reason in list(reasons)[:12]:
        print(f"not measured: {reason}")
    return found


@contextmanager
def _progress(total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """How a finished cell is shown: above a bar on a terminal that has rich, else as a plain line."""
    if sys.stdout.isatty():
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
        except ImportError:
            pass
        else:
            with Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
                task = bar.add_task("cells", total=total)

                def show(entry: dict[str, Any]) -> None:
                    bar.console.print(results_.line(entry), markup=False, highlight=False)
                    bar.advance(task)

                yield show
            return
    yield lambda entry: print(results_.line(entry), flush=True)


def _label(cell: Cell) -> str:
    return f"{cell.name} {cell.direction}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stream_attention.cli.benchmark", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--suite", choices=tuple(SUITES), help="default: cpu, or forward on cuda")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells whose name has all these words")
    parser.add_argument("--out", type=Path, metavar="JSON", help="benchmarks/results/<machine>/<name>.json")
    parser.add_argument("--repeats", type=_count, default=25, help="rounds per cell")
    parser.add_argument("--warmup", type=_count_or_none, default=5, help="rounds per cell that are not counted")
    parser.add_argument(
        "--cell-seconds", type=_seconds, default=4.0, help="stop a cell's rounds after this long, with at least three"
    )
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time, for a machine others use"
    )
    parser.add_argument("--threads", type=_count, help="CPU threads; default: torch's own choice")
    parser.add_argument("--fa3", type=Path, metavar="PATH", help="folder with fa3.so.xz and libcudart.so.12")
    return parser


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1; got {text}")
    return int(text)


def _count_or_none(text: str) -> int:
    return 0 if int(text) == 0 else _count(text)


def _seconds(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds; got {text}")
    return float(text)


if __name__ == "__main__":
    sys.exit(main())
