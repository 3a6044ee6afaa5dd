"""The report: one HTML page with plots and tables, complete in itself, for a phone, a desk, the dark and paper.

What `page.html` shows is put into words here. The template escapes it; there is no script, and nothing is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from stream_attention_tools.files import write_file

from ..bench import summary
from ..bench.summary import Cell, Compared, Entry, compared, duration, figure, names, speed, timed
from . import figures, plots

FOLDER = Path(__file__).parent
WORDS = {
    "auto": "attention() as called, on the backend it picks",
    "blocked": "our streaming pass on the CPU, also where attention() would call torch's kernel",
    "dense": "matmul, softmax, matmul in plain torch, holding all scores",
    "plain": "our own call without the modifier",
    "plain gluon": "our own call without the modifier, on the backend gluon",
    "plain triton": "our own call without the modifier, on the backend triton",
    "fa3": "FlashAttention-3",
    "decode": "decode_attention() on rows in full precision",
}
HEAT_STEPS = (1.02, 1.1, 1.25, 1.5, 2.0)
"""Where the heat map's colour deepens: a speed, or one by it, up to the first of these is neither faster nor slower."""


def write_page(results: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write `folder/index.html` from the contents of results files, a section each; returns its path.

    The folder is made, and those around it.
    """
    if not results:
        raise ValueError("results: expected at least one; got none.")
    path = folder / "index.html"
    write_file(path, page(results))
    return path


def page(results: Sequence[dict[str, Any]]) -> str:
    """The page's text."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    def drawn(plot: figures.Plot) -> Markup:
        return Markup(figures.coloured(figures.svg(plot), {name: f"var(--{name})" for name in figures.LIGHT}))

    template = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("page.html")
    style = Markup((FOLDER / "page.css").read_text(encoding="utf-8"))
    return template.render(light=figures.LIGHT, dark=figures.DARK, style=style, drawn=drawn, **contents(results))


def contents(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the template shows of results files."""
    order = names(results)
    sections = [_section(found, order) | {"anchor": f"r{number}"} for number, found in enumerate(results, 1)]
    return {"origins": list(dict.fromkeys(map(summary.origin, results))), "sections": sections}


def _section(results: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    its = compared(results)
    suite = str(results.get("suite") or "results").replace("-", " ")
    return {
        "name": f"{'CPU' if suite == 'cpu' else summary.capital(suite)} on {results['machine']['name']}",
        "cells": len(results["cells"]),
        "shares": [f"{x:.2f}" for x in (its.mean, speed(its.best), speed(its.worst))] if its else ["", "", ""],
        "tiles": _tiles(its) if its else None,
        "summary": _summary(its) if its else "No cell has both ours and a peer, so there is nothing to compare.",
        "beside": _beside_each(results) if its else None,
        "conditions": _conditions(results),
        "speed": plots.speed(results, order),
        "heat": _heat_map(its) if its else None,
        "memory": plots.memory(results, order),
        "accuracy": plots.accuracy(results, order),
        "ran": _ran(results),
        **_everything(results),
        "missing": [(*who, count) for who, count in summary.not_measured(results).items()],
    }


# Sentences


def _count(its: Compared) -> str:
    return f"{len(its.cells)} {'cell' if len(its.cells) == 1 else 'cells'}"


def _tiles(its: Compared) -> list[tuple[str, str, str]]:
    ends = (("best", its.best), ("worst", its.worst))
    mean = ("geometric mean", f"{its.mean:.2f}", f"of {_count(its)}")
    return [mean, *((word, f"{speed(cell):.2f}", _beside(cell)) for word, cell in ends)]


def _summary(its: Compared) -> str:
    faster = f"; above 1.00 ours is faster, as it is in {its.faster or 'none'} of them"
    sentences = (
        f"Our fastest has {its.mean:.2f} times the speed of {_peer(its)} in the geometric mean of {_count(its)}, "
        f"from {speed(its.worst):.2f} ({_beside(its.worst)}) to {speed(its.best):.2f} ({_beside(its.best)})"
        f"{'' if its.is_cost else faster}."
    )
    barred = [cell for cell in its.cells if cell["bar"] is not None]
    if barred:
        missed = list(filter(summary.is_missed, barred))
        outcome = f"{len(missed)} miss it: {', '.join(map(_title, missed))}" if missed else "none misses it"
        sentences += f" Of the {len(barred)} held to a bar, {outcome}."
    return sentences


def _peer(its: Compared) -> str:
    return "our own call without the modifiers" if its.is_cost else "the fastest peer"


def _title(cell: Cell) -> str:
    return f"{cell['name']}, {cell['direction']}"


def _beside(cell: Cell) -> str:
    return f"{_title(cell)}, beside {cell['fastest_peer']}"


def _beside_each(results: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    over = {name: summary.speed_over(results["cells"], name) for name in names([results])}
    return [
        (name, WORDS.get(name, ""), [str(len(found)), f"{geometric_mean(found):.2f}", summary.span(found)])
        for name, found in over.items()
        if found
    ]


def _conditions(results: dict[str, Any]) -> list[tuple[str, str]]:
    commit, conditions = results["commit"], results["conditions"]
    texts = {name: value for name, value in conditions.items() if isinstance(value, str) and name != "ratio"}
    groups = {
        "date": results["date"],
        "commit": f"{commit['hash'] or 'none yet'}{' with changes' if commit['dirty'] else ''}",
        "machine": _joined({"name": results["machine"]["name"], **results["machine"]}),
        "versions": _joined(results["versions"]),
        "rounds": _joined({name: value for name, value in conditions.items() if not isinstance(value, str)}),
        **texts,
        "ratio in the results file": conditions.get("ratio"),  # this page has its inverse
    }
    return [(str(name).replace("_", " "), str(value)) for name, value in groups.items() if value is not None]


def _joined(fields: dict[str, Any]) -> str:
    words = {"memory_gib": "GiB of memory", "cell_seconds": "seconds per cell at most", "name": ""}
    present = {name: value for name, value in fields.items() if value is not None}
    return ", ".join(f"{v} {words[name]}".strip() if name in words else f"{name} {v}" for name, v in present.items())


# Tables


def _heat_map(its: Compared) -> dict[str, Any]:
    directions = {cell["direction"] for cell in its.cells}
    lengths = sorted({summary.length(cell) for cell in its.cells})
    rows = []
    for row in summary.rows(its.cells):
        label = row.label if len(directions) == 1 else f"{row.label}, {row.direction}"
        rows.append((label, [_heated([cell for cell in row.cells if summary.length(cell) == n]) for n in lengths]))
    caption = (
        f"Our speed as a multiple of that of {_peer(its)}, over length. Blue and above 1.00: ours is faster; orange "
        "and below: slower."
    )
    if not its.is_cost:
        fastest = Counter(str(cell["fastest_peer"]) for cell in its.cells)
        caption += f" Fastest peer: {', '.join(f'{name} in {count}' for name, count in fastest.items())}."
    if any(map(summary.is_missed, its.cells)):
        caption += " An exclamation mark: the cell's bar is missed."
    return {"caption": caption, "heading": ["length", *map(summary.short, lengths)], "rows": rows}


def _heated(cells: Sequence[Cell]) -> dict[str, str]:
    shown = ", ".join(f"{speed(cell):.2f}" for cell in cells) + "!" * any(map(summary.is_missed, cells))
    return {"kind": heat(min(map(speed, cells))), "shown": shown} if cells else {}


def heat(speed: float) -> str:
    """The class of the colour of a speed as a multiple of another: h0 about even, f1-f5 faster, w1-w5 slower."""
    depth = sum(max(speed, 1 / speed) > step for step in HEAT_STEPS)
    return "h0" if depth == 0 else f"{'f' if speed > 1 else 'w'}{depth}"


def _ran(results: dict[str, Any]) -> list[str]:
    """What a provider that chooses by itself chose."""
    entries = [item for cell in results["cells"] for item in timed(cell).items()]
    found = Counter((name, str(one["ran"])) for name, one in entries if "ran" in one)
    return [f"{name} ran {ran} (cells: {count})." for (name, ran), count in found.items()]


def _everything(results: dict[str, Any]) -> dict[str, Any]:
    """A row per provider, under a heading per cell: narrow enough that a phone shows the columns that matter."""
    unit = summary.rate(results)
    entries = [one for cell in results["cells"] for one in timed(cell).values()]
    columns: dict[str, Callable[[Entry], str]] = {
        "median": lambda one: duration(one["median_ms"]),
        "p20-p80": lambda one: summary.durations(one["p20_ms"], one["p80_ms"]) if "p20_ms" in one else "",
        unit.unit: lambda one: figure(unit.of(one)),
        "best": lambda one: duration(one["best_ms"]) if "best_ms" in one else "",
        "error / allowed": lambda one: "" if (share := summary.strictness(one)) is None else f"{share:.3f}",
    }
    optional: dict[str, tuple[str, Callable[[Any], str]]] = {
        "gb_per_s": ("GB/s", figure),
        "share_of_read_bandwidth": ("of reading alone", "{:.2f}".format),
        "eager": ("eager", lambda eager: duration(eager["median_ms"])),
        "peak_bytes": ("peak memory", summary.size),
    }
    for key, (heading, shown) in optional.items():
        if any(key in one for one in entries):
            columns[heading] = partial(_optional, key, shown)
    measured = []
    for cell in results["cells"]:
        title = _title(cell)
        if summary.is_compared(cell):
            title += f": {speed(cell):.2f}x the speed of {cell['fastest_peer']}"
        if (eager := summary.eager_speed(cell)) is not None:
            title += f", eager {eager:.2f}x that of {cell['eager']['fastest_peer']}"
        its = timed(cell).items()
        rows = [(name, name == cell["ours"], [read(one) for read in columns.values()]) for name, one in its]
        measured.append((title, rows))
    return {"columns": list(columns), "measured": measured}


def _optional(key: str, shown: Callable[[Any], str], one: Entry) -> str:
    return "" if one.get(key) is None else shown(one[key])
