"""What a results file shows: its cells over length, how ours compares, who was not measured. No torch, no drawing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

Cell = dict[str, Any]
Entry = dict[str, Any]


class Row(NamedTuple):
    """Cells that differ in length only, shortest first."""

    label: str
    direction: str
    cells: list[Cell]

    @property
    def is_line(self) -> bool:
        """Enough lengths, each once, to be drawn over length."""
        return len({length(cell) for cell in self.cells}) == len(self.cells) >= 3


class Rate(NamedTuple):
    """What speed is counted in, and how to read it from a timed entry."""

    unit: str
    of: Callable[[Entry], float]


class Compared(NamedTuple):
    """Our speed as a multiple of the fastest peer's, over the cells that have both."""

    cells: list[Cell]
    mean: float  # geometric
    best: Cell
    worst: Cell
    faster: int  # cells in which ours takes less time than every peer

    @property
    def is_cost(self) -> bool:
        """Whether the peer is our own call without the modifiers everywhere: what they cost, and no race."""
        return all(is_plain(str(cell["fastest_peer"])) for cell in self.cells)


def timed(cell: Cell) -> dict[str, Entry]:
    """The providers of a cell that have a speed."""
    return {name: one for name, one in cell["providers"].items() if "median_ms" in one}


def names(results: Iterable[dict[str, Any]]) -> list[str]:
    """Everybody who was timed, in the order of first appearance."""
    return list(dict.fromkeys(name for found in results for cell in found["cells"] for name in timed(cell)))


def length(cell: Cell) -> int:
    """Keys of a cell: what plots and heat maps run over."""
    return int(cell["problem"]["Tk"])


def label(cell: Cell) -> str:
    """A cell's name without its length."""
    words = [word for word in str(cell["name"]).split() if word != str(length(cell))]
    return " ".join(words) or str(cell["name"])


def rows(cells: Iterable[Cell]) -> list[Row]:
    """The cells by direction and label, in the order of the file."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell["direction"], label(cell)), []).append(cell)
    return [Row(its_label, direction, sorted(its, key=length)) for (direction, its_label), its in found.items()]


def rate(results: dict[str, Any]) -> Rate:
    """Decoding by bytes of K and V, the rest by FLOPs; CPUs in GFLOP/s."""
    entries = [one for cell in results["cells"] for one in timed(cell).values()]
    if entries and all("tb_per_s" in one for one in entries):
        return Rate("TB/s of K and V", lambda one: float(one["tb_per_s"]))
    if max((one["tflops"] for one in entries), default=1.0) < 1:
        return Rate("GFLOP/s", lambda one: 1e3 * float(one["tflops"]))
    return Rate("TFLOP/s", lambda one: float(one["tflops"]))


def is_compared(cell: Cell) -> bool:
    """Whether both ours and a peer were timed."""
    return {cell.get("ours"), cell.get("fastest_peer")} <= timed(cell).keys()


def speed(cell: Cell) -> float:
    """Our speed as a multiple of the fastest peer's, in a cell that has both: of their medians, as readers see them."""
    return faster(cell["providers"], cell["ours"], cell["fastest_peer"])


def is_missed(cell: Cell) -> bool:
    """Whether a cell has a bar, and our speed as it is shown is below it."""
    return cell["bar"] is not None and not (is_compared(cell) and speed(cell) >= 1 / cell["bar"])


def eager_speed(cell: Cell) -> float | None:
    """Our speed by the second clock; None where it did not time both."""
    entries = {name: one["eager"] for name, one in cell["providers"].items() if "eager" in one}
    names = cell.get("eager", {}).get("ours"), cell.get("eager", {}).get("fastest_peer")
    return faster(entries, *names) if set(names) <= entries.keys() else None


def faster(entries: dict[str, Entry], one: str, other: str) -> float:
    """The speed of one provider as a multiple of another's."""
    return float(entries[other]["median_ms"] / entries[one]["median_ms"])


def compared(results: dict[str, Any]) -> Compared | None:
    """None where no cell has both ours and a peer."""
    cells = [cell for cell in results["cells"] if is_compared(cell)]
    if not cells:
        return None
    ordered = sorted(cells, key=speed, reverse=True)
    speeds = [speed(cell) for cell in cells]
    return Compared(cells, geometric_mean(speeds), ordered[0], ordered[-1], sum(one > 1 for one in speeds))


def speed_over(cells: Iterable[Cell], other: str) -> list[float]:
    """By cell that has both, our fastest's speed as a multiple of another provider's."""
    found = []
    for cell in cells:
        its = timed(cell)
        if {other, cell["ours"]} <= its.keys() and cell["ours"] != other:
            found.append(faster(its, cell["ours"], other))
    return found


def is_plain(name: str) -> bool:
    """Whether a name is our own call without the modifiers, "plain", or that on one backend, such as "plain gluon"."""
    return name.split()[0] == "plain"


def is_variant(name: str, cells: Iterable[Cell]) -> bool:
    """Whether a name is one of ours and more, as "triton deterministic" is: no peer."""
    first, *more = name.split()
    return bool(more) and any(first == cell["ours"] for cell in cells)


def strictness(one: Entry) -> float | None:
    """Error by what is allowed: at most 1 if right, NaN where that was computed; None where nothing was."""
    if "error" not in one:
        return None
    error, allowed = _errors(one)
    return error / allowed if allowed else (0.0 if error == 0 else math.inf)


def not_measured(results: dict[str, Any]) -> Counter[tuple[str, str]]:
    """(provider, reason) by the number of cells it was not timed in."""
    found: Counter[tuple[str, str]] = Counter()
    for cell in results["cells"]:
        for name, one in cell["providers"].items():
            if "median_ms" in one:
                continue
            if "unavailable" in one:
                found[name, str(one["unavailable"])] += 1
            elif "failed" in one:
                found[name, f"failed: {one['failed']}"] += 1
            else:
                error, allowed = _errors(one)
                found[name, f"wrong: error {error:.2e}, allowed {allowed:.2e}"] += 1
    return found


def _errors(one: Entry) -> tuple[float, float]:
    """Error and what is allowed; a results file has null for NaN."""
    error, allowed = (math.nan if one[key] is None else float(one[key]) for key in ("error", "allowed"))
    return error, allowed


def origin(results: dict[str, Any]) -> str:
    """Where, when and with what, in one line."""
    machine, commit = results["machine"], results["commit"]
    changes = " with changes" if commit["dirty"] else ""
    words = [
        machine["name"],
        f"{machine['threads']} threads" if "threads" in machine else "",
        f"torch {results['versions']['torch']}",
        results["date"][:10],
        f"commit {commit['hash'][:12]}{changes}" if commit["hash"] else "no commit yet",
    ]
    return ", ".join(word for word in words if word)


# Figures as readers write them


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, headings first."""
    heading, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [heading, f"|{'---|' * len(rows[0])}", *body]


def capital(words: str) -> str:
    """With a capital, the rest as it is."""
    return f"{words[:1].upper()}{words[1:]}"


def short(count: int) -> str:
    """16384 as 16k, 1048576 as 1M; what is no whole number of them as it is."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def figure(value: float) -> str:
    """Three digits: 0.155, 4.60, 321, 1250; whole numbers without a point."""
    return f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:#.3g}".rstrip(".")


def duration(ms: float) -> str:
    return _timed_as(ms, ms)


def durations(low: float, high: float) -> str:
    """A range in the unit of its end: 213-219 µs."""
    return f"{_timed_as(low, high).split()[0]}-{_timed_as(high, high)}"


def _timed_as(ms: float, scale: float) -> str:
    unit, name = (1e3, "s") if scale >= 1e3 else (1.0, "ms") if scale >= 1 else (1e-3, "µs")
    return f"{figure(ms / unit)} {name}"


def short_time(ms: float) -> str:
    """For a terminal: 1.5 ms, 750 us."""
    unit, name = (1e3, "s") if ms >= 1e3 else (1.0, "ms") if ms >= 1 else (1e-3, "us")
    return f"{ms / unit:.3g} {name}"


def size(count: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{figure(count / unit)} {name}"
    return f"{count:.0f} B"


def span(values: Sequence[float], form: str = ".2f") -> str:
    """The least and the greatest: 1.12-1.52."""
    least, most = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == most else f"{least}-{most}"
