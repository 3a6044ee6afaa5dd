"""What the report draws: speed, memory and accuracy of a results file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..bench.summary import Entry, Row, capital, figure, length, rate, rows, size, strictness
from . import figures
from .figures import Plot, Point, Series


class Panels(NamedTuple):
    """Plots side by side."""

    plots: list[Plot]
    caption: str


class Quantity(NamedTuple):
    """What a plot shows of a provider's entry."""

    unit: str
    read: Callable[[Entry], Point | None]
    form: Callable[[float], str]
    caption: str
    log: bool = False


def speed(results: dict[str, Any], order: Sequence[str]) -> list[Panels]:
    unit = rate(results)

    def read(one: Entry) -> Point | None:
        if "median_ms" not in one:
            return None
        middle = unit.of(one)
        low, high = (middle * one["median_ms"] / one.get(f"{end}_ms", one["median_ms"]) for end in ("p80", "p20"))
        return Point(0, middle, low, high)

    thin = " Thin upright strokes reach from p20 to p80." if any(row.is_line for row in rows(results["cells"])) else ""
    caption = f"{unit.unit}, medians. Higher is faster.{thin}"
    return _panels(results, order, Quantity(unit.unit, read, figure, caption))


def memory(results: dict[str, Any], order: Sequence[str]) -> list[Panels]:
    def read(one: Entry) -> Point | None:
        peak = one.get("peak_bytes")
        return None if "median_ms" not in one or not peak else Point.exact(0, float(peak))

    caption = "Peak memory of one call beyond its inputs. Lower is better; over length, both axes are logarithmic."
    return _panels(results, order, Quantity("peak memory", read, size, caption, log=True))


def _panels(results: dict[str, Any], order: Sequence[str], shown: Quantity) -> list[Panels]:
    """For each direction a plot of every row with enough lengths for lines, and bars of the other cells."""
    found = []
    for direction in dict.fromkeys(cell["direction"] for cell in results["cells"]):
        its = [row for row in rows(results["cells"]) if row.direction == direction]
        lined = {row.label: series for row in its if row.is_line and (series := series_of(row, shown.read))}
        highest = max((p.high for series in lined.values() for one in series for p in one.points), default=0.0)
        ours = {cell["ours"] for row in its for cell in row.cells}
        plots = [
            figures.lines(label, shown.unit, series, order, ours, shown.form, highest, shown.log)
            for label, series in lined.items()
        ]
        others = (row for row in its if not row.is_line)
        plots += _bars("Other problems" if plots else "By problem", others, order, shown)
        if plots:
            found.append(Panels(plots, f"{capital(direction)}. {shown.caption}"))
    return found


def series_of(row: Row, read: Callable[[Entry], Point | None]) -> list[Series]:
    """A line over length for everybody of whom there is something to read."""
    found: dict[str, list[Point]] = {}
    for cell in row.cells:
        for name, one in cell["providers"].items():
            if (point := read(one)) is not None:
                found.setdefault(name, []).append(point._replace(x=float(length(cell))))
    return [Series(name, points) for name, points in found.items()]


def _bars(title: str, its: Iterable[Row], order: Sequence[str], shown: Quantity) -> list[Plot]:
    groups: list[tuple[str, dict[str, float]]] = []
    for cell in (cell for row in its for cell in row.cells):
        points = {name: shown.read(one) for name, one in cell["providers"].items()}
        if values := {name: point.y for name, point in points.items() if point is not None}:
            groups.append((str(cell["name"]), values))
    if not groups:
        return []
    highest = max(most for _, values in groups for most in values.values())
    return [figures.bars(title, shown.unit, groups, order, shown.form, highest)]


def accuracy(results: dict[str, Any], order: Sequence[str]) -> list[Panels]:
    shares: dict[str, list[float]] = {}
    for cell in results["cells"]:
        for name, one in cell["providers"].items():
            share = strictness(one)
            if share is not None and not math.isnan(share):
                shares.setdefault(name, []).append(share)
    if not shares:
        return []
    signs = [*order, *(name for name in shares if name not in order)]
    plot = figures.strips("Error by what is allowed", "error / allowed", list(shares.items()), signs)
    caption = (
        "Error against fp64 as a share of what is allowed, a stroke per cell and the sign at the worst. "
        "A provider that is past 1 is wrong and has no speed."
    )
    return [Panels([plot], caption)]
