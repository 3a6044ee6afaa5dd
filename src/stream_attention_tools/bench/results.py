"""The results file: what was measured, of what, where, when and how; and its table."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from stream_attention import __version__
from stream_attention_tools.files import write_file

from .schema import lacking
from .summary import (
    capital,
    eager_speed,
    faster,
    is_compared,
    is_missed,
    markdown_table,
    origin,
    short_time,
    span,
    speed,
)
from .timing import CLOCKS


def conditions(device: str) -> dict[str, Any]:
    """Commit, date, versions and machine."""
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {
            "stream_attention": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": installed_version("triton"),
            "cuda": torch.version.cuda if device == "cuda" else None,
            "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        },
        "machine": _gpu() if device == "cuda" else _cpu(),
    }


def _commit() -> dict[str, Any]:
    """From git; for a copy of the tree without git from an environment variable, "HASH" or "HASH-dirty"."""
    if commit := os.environ.get("STREAM_ATTENTION_COMMIT"):
        return {"hash": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}

    def git(*words: str) -> str | None:
        here = Path(__file__).parent
        command = ["git", "--no-optional-locks", *words]  # whoever works there is not kept waiting
        try:
            done = subprocess.run(command, cwd=here, capture_output=True, encoding="utf-8", timeout=30)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or not Path(top, "src", "stream_attention").is_dir():  # installed, maybe inside another's checkout
        return {"hash": None, "dirty": None}
    changed = git("status", "--porcelain")
    return {"hash": git("rev-parse", "--verify", "HEAD"), "dirty": None if changed is None else bool(changed)}


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """What this machine's CPU calls itself; where the system does not say, its instruction set."""
    listing = Path("/proc/cpuinfo")  # Linux
    if listing.exists():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu() -> dict[str, Any]:
    how = {"threads": torch.get_num_threads(), "isa": torch.backends.cpu.get_cpu_capability()}
    return {"device": "cpu", "name": cpu_name(), **how}


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    size = {
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
    }
    return {"device": "cuda", "name": properties.name, **size, "capability": f"{properties.major}.{properties.minor}"}


def save(results: dict[str, Any], path: Path) -> None:
    """Write a results file, and make the folders around it. A number that is not finite is null there."""
    finite = json.loads(json.dumps(results), parse_constant=lambda name: None)
    write_file(path, json.dumps(finite, indent=1, allow_nan=False) + "\n")


def load(path: Path) -> dict[str, Any]:
    """What a results file holds; a ValueError says what it lacks to be one."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("expected a results file of the benchmark command; it is nested too deeply") from None
    if missing := lacking(found):
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        listed = f"{', '.join(missing[:8])}{more}"
        raise ValueError(f"expected a results file of the benchmark command; missing or of another kind: {listed}")
    return found


def line(entry: dict[str, Any], shown: Callable[[dict[str, Any]], str] | None = None) -> str:
    """One cell in one line, with every timed entry as `shown`: by default its times and rate."""
    parts = [f"{entry['name']:28} {entry['direction']:16}"]
    for name, one in entry["providers"].items():
        if "median_ms" in one:
            parts.append(f"{name} {(shown or _times)(one)}")
        elif "failed" in one:
            parts.append(f"{name} FAILED: {one['failed']}")
        elif "unavailable" not in one:
            parts.append(f"{name} WRONG: error {one['error']:.2e}, allowed {one['allowed']:.2e}")
    if is_compared(entry):
        parts.append(f"{speed(entry):.2f}x the speed of {entry['fastest_peer']}{_bar(entry)}")
    if (eager := eager_speed(entry)) is not None:
        parts.append(f"eager {eager:.2f}x that of {entry['eager']['fastest_peer']}")
    return "  ".join(parts)


def _times(one: dict[str, Any]) -> str:
    rate = f"{one['tb_per_s']:.3g} TB/s" if "tb_per_s" in one else f"{one['tflops']:.3g} TFLOP/s"
    eager = f", eager {short_time(one['eager']['median_ms'])}" if "eager" in one else ""
    return f"{short_time(one['median_ms'])} (best {short_time(one['best_ms'])}, {rate}{eager})"


def _bar(entry: dict[str, Any]) -> str:
    if entry["bar"] is None:
        return ""
    return f" ({'MISSES' if is_missed(entry) else 'meets'} the bar of {1 / entry['bar']:.2f}x)"


SPEED = "speed, ours / fastest peer"
NAMED = "as named"


def table(results: dict[str, Any]) -> list[list[str]]:
    """Rows of the short table, headings first: one row per cell, one column per provider, then our speed by the fastest
    peer's.

    Every ratio is one of speeds, of the medians beside it. Providers that cells are named after share one column. In
    between stand the speed with modifiers over that without, on each backend, and the share of the read bandwidth.
    """
    by_rate = _unit(results) != "time"
    cells = results["cells"]
    costs = dict.fromkeys(name for cell in cells for name, one in cell["providers"].items() if "vs_plain" in one)
    beside = [f"speed, {name} / plain {name}" for name in costs]
    names, shown = _by_column(cells, "median_ms", lambda one: _shown(one, by_rate))
    rows = [["problem", "direction", *names, *beside, "TB/s, ours / reading alone", SPEED, "bar"]]
    for cell, times in zip(cells, shown, strict=True):
        its = cell["providers"]
        cost = [_over_plain(its, name) for name in costs]
        share = _optional(its.get(cell.get("ours"), {}).get("share_of_read_bandwidth"))
        bar = "" if cell["bar"] is None else f"{1 / cell['bar']:.2f}{' missed' if is_missed(cell) else ''}"
        compared = speed(cell) if is_compared(cell) else None
        rows.append([cell["name"], cell["direction"], *times, *cost, share, _optional(compared), bar])
    return filled(rows)


def eager_table(results: dict[str, Any]) -> list[list[str]] | None:
    """The same cells by the second clock, times alone; None where there was none."""
    cells = [cell for cell in results["cells"] if "eager" in cell]
    names, shown = _by_column(cells, "eager", lambda one: short_time(one["eager"]["median_ms"]))
    if not names:
        return None
    rows = [["problem", "direction", *names, SPEED]]
    for cell, times in zip(cells, shown, strict=True):
        rows.append([cell["name"], cell["direction"], *times, _optional(eager_speed(cell))])
    return filled(rows)


def _over_plain(its: dict[str, Any], name: str) -> str:
    plain = f"plain {name}"
    timed = all("median_ms" in its.get(one, {}) for one in (name, plain))
    return f"{faster(its, name, plain):.2f}" if timed else ""


def _by_column(
    cells: list[dict[str, Any]], key: str, show: Callable[[dict[str, Any]], str]
) -> tuple[list[str], list[list[str]]]:
    """Headings of everybody who has a key, and by cell what is shown under them."""
    found = []
    for cell in cells:
        named = {NAMED if cell["name"].startswith(f"{name} ") else name: one for name, one in cell["providers"].items()}
        found.append({name: show(one) for name, one in named.items() if key in one})
    names = list(dict.fromkeys(name for its in found for name in its))
    return names, [[its.get(name, "") for name in names] for its in found]


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def filled(rows: list[list[str]]) -> list[list[str]]:
    """Without the columns that say nothing."""
    kept = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    return [[row[column] for column in kept] for row in rows]


def read_speed(results: dict[str, Any]) -> str | None:
    """How fast the device read a large buffer in the same run, where that was measured."""
    read = results.get("read_bandwidth")
    return None if read is None else f"reading alone {read['tb_per_s']:.2f} TB/s ({read['way']})"


def losses(results: dict[str, Any]) -> str | None:
    """What who computes in fewer bits loses, over the cells; None where nobody does."""
    found: dict[str, list[float]] = {}
    for cell in results["cells"]:
        for name, one in cell["providers"].items():
            if one.get("rms_error") is not None:
                found.setdefault(name, []).append(one["rms_error"])
    if all(max(its) < 0.02 for its in found.values()):
        return None
    return "relative rms error: " + ", ".join(f"{name} {span(its, '.1%')}" for name, its in found.items())


def _shown(one: dict[str, Any], by_rate: bool) -> str:
    """A measurement as readers compare it: decoding by time and TB/s, other GPU cells by TFLOP/s, or by time."""
    if "tb_per_s" in one:
        return f"{short_time(one['median_ms'])} ({one['tb_per_s']:.2f})"
    return f"{one['tflops']:.0f}" if by_rate else short_time(one["median_ms"])


def _unit(results: dict[str, Any]) -> str:
    if results["machine"].get("device") != "cuda" or results["conditions"]["timing"] == CLOCKS["calls"]:
        return "time"
    decoding = any("tb_per_s" in one for cell in results["cells"] for one in cell["providers"].values())
    return "time (TB/s of K and V)" if decoding else "TFLOP/s"


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """A table for a terminal, columns flush left, or right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(place, row, widths)).rstrip() for row in rows)


_SHAPE = ("B", "Tq", "Tk", "Hq", "Hkv", "D", "Dv", "dtype", "causal", "dropout_p", "chunk")
_TIMES = "median_ms p20_ms p80_ms best_ms repeats".split()
_RATES = "tflops gb_per_s tb_per_s share_of_read_bandwidth".split()
_FIGURES = (*_TIMES, *_RATES, "vs_ours", "vs_plain", *(f"eager_{name}" for name in (*_TIMES, "vs_ours")), "peak_bytes")
_VERDICT = "error allowed rms_error right ran unavailable failed".split()


def save_csv(results: dict[str, Any], path: Path) -> None:
    """One row per cell and provider."""
    text = io.StringIO(newline="")
    rows = csv.DictWriter(text, ("cell", "direction", *_SHAPE, "provider", *_FIGURES, *_VERDICT))
    rows.writeheader()
    for cell in results["cells"]:
        shape = {key: value for key, value in cell["problem"].items() if key in _SHAPE}
        for name, one in cell["providers"].items():
            eager = {f"eager_{key}": value for key, value in one.get("eager", {}).items()}
            figures = {key: value for key, value in one.items() if key != "eager"} | eager
            rows.writerow({"cell": cell["name"], "direction": cell["direction"], **shape, "provider": name} | figures)
    write_file(path, text.getvalue())


def markdown(results: dict[str, Any]) -> str:
    """The table for a page, under a line that says where, when and with what it was measured."""
    reading = "" if (speed := read_speed(results)) is None else f" {capital(speed)}."
    note = f" {results['note']}" if "note" in results else ""  # by hand: what is not as the line says
    lines = [
        f"{origin(results)}; {_unit(results)} by {results['conditions']['timing']}: medians.{reading}{note}",
        "",
        *markdown_table(table(results)),
    ]
    if (eager := eager_table(results)) is not None:
        lines += ["", f"The same calls, time by {results['conditions']['eager']}:", "", *markdown_table(eager)]
    return "\n".join(lines)
