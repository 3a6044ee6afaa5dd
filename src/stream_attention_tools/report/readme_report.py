"""The README's pictures and table: one problem over length from each results file, and every head dim in a line."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

from ..bench import summary
from ..bench.summary import Entry, Rate, Row, is_variant, length, markdown_table, names, span, speed_over, timed
from . import figures
from .figures import Plot, Point, Series
from .plots import series_of


class Picture(NamedTuple):
    stem: str
    description: str
    plot: Plot


def files(results: Mapping[str, dict[str, Any]], label: str) -> dict[str, str]:
    """The pictures by file name, one for light pages and one for dark pages each. `results` come by their names."""
    drawn = (figures.files(picture.stem, picture.plot) for picture in _pictures(results, label))
    return {name: svg for its in drawn for name, svg in its.items()}


def markdown(results: Mapping[str, dict[str, Any]], label: str, folder: str) -> str:
    """The pictures, which are kept in `folder`, side by side where there is room; the table; where they come from."""
    shown = [
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}/{picture.stem}_dark.svg">\n'
        f'<img src="{folder}/{picture.stem}.svg" width="{figures.WIDTH}" alt="{escape(picture.description)}"></picture>'
        for picture in _pictures(results, label)
    ]
    origin = (
        "Over all lengths, full and causal: our TFLOP/s, and our speed divided by each peer's, so that above 1.00\n"
        f"ours is faster.\n{'; '.join(dict.fromkeys(map(summary.origin, results.values())))}."
    )
    return "\n".join([*shown, "", *_table(list(results.values())), "", origin])


def _pictures(results: Mapping[str, dict[str, Any]], label: str) -> list[Picture]:
    """On one scale, so that they can be compared."""
    found = {
        _stem(name, row): row
        for name, its in results.items()
        for row in summary.rows(its["cells"])
        if row.label == label and row.is_line
    }
    if not found:
        raise ValueError(f"overview: expected a problem that the results have at three lengths or more; got {label!r}.")
    unit = summary.rate({"cells": [cell for row in found.values() for cell in row.cells]})
    series = {stem: _series(row, unit) for stem, row in found.items()}
    top = max(point.y for its in series.values() for one in its for point in one.points)
    order = names(results.values())
    pictures = []
    for stem, row in found.items():
        ours = {cell["ours"] for cell in row.cells}
        title = f"{label}, {row.direction}"
        speeds = ", ".join(f"{one.name} {span([point.y for point in one.points], '.0f')}" for one in series[stem])
        first, last = (summary.short(length(row.cells[end])) for end in (0, -1))
        described = f"{title}, {first} to {last} tokens, {unit.unit}: {speeds}"
        plot = figures.lines(title, unit.unit, series[stem], order, ours, summary.figure, top)
        pictures.append(Picture(stem, described, plot))
    return pictures


def _stem(name: str, row: Row) -> str:
    """h200_forward_d128_causal; the direction is named where the results are not."""
    words = [*name.split("/"), *row.label.replace("/", "-").split()]
    return "_".join(words if row.direction in words else [*words, *row.direction.split("+")])


def _series(row: Row, rate: Rate) -> list[Series]:
    def read(one: Entry) -> Point | None:
        return Point.exact(0, rate.of(one)) if "median_ms" in one else None

    return [one for one in series_of(row, read) if not is_variant(one.name, row.cells)]


def _table(results: list[dict[str, Any]]) -> list[str]:
    """A line per direction and head dim, a column for everybody whom ours is compared with."""
    cells = [cell for its in results for cell in its["cells"] if cell["ours"] is not None]
    for cell in cells:
        if "D" not in cell["problem"]:
            raise ValueError(f"overview: expected the head dim D in every problem; {cell['name']!r} has none.")
    others = [name for name in names(results) if speed_over(cells, name) and not is_variant(name, cells)]
    lines = [["", "TFLOP/s", *(f"x {name}" for name in others)]]
    for direction, dim in dict.fromkeys((cell["direction"], cell["problem"]["D"]) for cell in cells):
        its = [cell for cell in cells if (cell["direction"], cell["problem"]["D"]) == (direction, dim)]
        speed = span([timed(cell)[cell["ours"]]["tflops"] for cell in its], ".0f")
        ratios = [span(found) if (found := speed_over(its, name)) else "" for name in others]
        lines.append([f"{direction}, head dim {dim}", speed, *ratios])
    return markdown_table(lines)
