"""The report: one HTML page with plots and tables, complete in itself, for a phone, a desk, the dark and paper.

Every word that comes from a results file is escaped. There is no script, and nothing is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from stream_attention.files import write_file

from ..bench.summary import (
    Cell,
    Compared,
    Entry,
    capital,
    compared,
    duration,
    durations,
    figure,
    geometric_mean,
    length,
    names,
    not_measured,
    origin,
    rate,
    rows,
    short,
    size,
    span,
    speed,
    speed_over,
    strictness,
    timed,
)
from . import plots, style

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
    order = names(results)
    several = len(results) > 1
    body = [
        "<header><h1>StreamAttention benchmark</h1>",
        *(f"<p>{escape(line)}</p>" for line in dict.fromkeys(map(origin, results))),
        "</header>",
        *(_contents(results) if several else ()),
        *(part for number, found in enumerate(results, 1) for part in _section(found, order, f"r{number}")),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><title>StreamAttention benchmark</title>',
            f"<style>\n{style.sheet()}</style></head>",
            "<body><main>",
            *body,
            "</main></body>",
            "</html>\n",
        ]
    )


def _contents(results: Sequence[dict[str, Any]]) -> list[str]:
    heading = ("measured", "cells", "mean", "best", "worst")
    lines = []
    for number, found in enumerate(results, 1):
        link = f'<a href="#r{number}">{escape(_name(found))}</a>'
        shown = ["", "", ""]
        if (its := compared(found)) is not None:
            shown = [f"{x:.2f}" for x in (its.mean, speed(its.best), speed(its.worst))]
        lines.append([link, str(len(found["cells"])), *shown])
    caption = "Our speed as a multiple of the fastest peer's, geometric means and ends: above 1.00 ours is faster."
    return ["<nav>", *_table(heading, lines, caption), "</nav>"]


def _name(results: dict[str, Any]) -> str:
    suite = str(results.get("suite") or "results").replace("-", " ")
    return f"{'CPU' if suite == 'cpu' else capital(suite)} on {results['machine']['name']}"


def _section(results: dict[str, Any], order: Sequence[str], anchor: str) -> list[str]:
    return [
        f'<section id="{anchor}"><h2>{escape(_name(results))}</h2>',
        *_summary(results),
        *_conditions(results),
        "<h3>Speed</h3>",
        *plots.speed(results, order),
        "<h3>Speed beside the fastest peer</h3>",
        *_heat_map(results),
        "<h3>Memory</h3>",
        *plots.memory(results, order),
        "<h3>Accuracy</h3>",
        *plots.accuracy(results, order),
        "<h3>All measurements</h3>",
        *_ran(results),
        *_everything(results),
        "<h3>Not measured</h3>",
        *_missing(results),
        "</section>",
    ]


# Words


def _summary(results: dict[str, Any]) -> list[str]:
    its = compared(results)
    if its is None:
        return ["<p>No cell has both ours and a peer, so there is nothing to compare.</p>"]
    count = f"{len(its.cells)} {'cell' if len(its.cells) == 1 else 'cells'}"
    tiles = [
        ("geometric mean", its.mean, f"of {count}"),
        *((word, speed(cell), _beside(cell)) for word, cell in (("best", its.best), ("worst", its.worst))),
    ]
    faster = f"; above 1.00 ours is faster, as it is in {its.faster or 'none'} of them"
    words = [
        f"Our fastest has {its.mean:.2f} times the speed of {_peer(its)} in the geometric mean of {count}, "
        f"from {speed(its.worst):.2f} ({_beside(its.worst)}) to {speed(its.best):.2f} ({_beside(its.best)})"
        f"{'' if its.is_cost else faster}."
    ]
    held = [cell for cell in its.cells if cell["bar"] is not None]
    missed = [cell for cell in held if not cell.get("met")]
    if held:
        told = f"{len(missed)} miss it: {', '.join(map(_title, missed))}" if missed else "none misses it"
        words.append(f"Of the {len(held)} held to a bar, {told}.")
    return [
        '<dl class="tiles">',
        *(
            f"<div><dt>{word}</dt><dd><b>{value:.2f}x</b> <span>{escape(told)}</span></dd></div>"
            for word, value, told in tiles
        ),
        "</dl>",
        f"<p>{escape(' '.join(words))}</p>",
        *_beside_each(results),
    ]


def _peer(its: Compared) -> str:
    return "our own call without the modifiers" if its.is_cost else "the fastest peer"


def _title(cell: Cell) -> str:
    return f"{cell['name']}, {cell['direction']}"


def _beside(cell: Cell) -> str:
    return f"{_title(cell)}, beside {cell['fastest_peer']}"


def _beside_each(results: dict[str, Any]) -> list[str]:
    lines = []
    for name in names([results]):
        found = speed_over(results["cells"], name, paired=True)
        if found:
            told = f" <small>{escape(WORDS[name])}</small>" if name in WORDS else ""
            lines.append([f"{escape(name)}{told}", str(len(found)), f"{geometric_mean(found):.2f}", span(found)])
    if not lines:
        return []
    caption = "Speed of our fastest as a multiple of each other's: above 1.00 ours is faster."
    return _table(("beside", "cells", "geometric mean", "range"), lines, caption)


def _conditions(results: dict[str, Any]) -> list[str]:
    commit, told = results["commit"], results["conditions"]
    changes = " with changes" if commit["dirty"] else ""
    ratio = {"ratio in the results file": told["ratio"]} if "ratio" in told else {}  # this page has its inverse
    groups = {
        "date": results["date"],
        "commit": f"{commit['hash'] or 'none yet'}{changes}",
        "machine": _joined({"name": results["machine"]["name"], **results["machine"]}),
        "versions": _joined(results["versions"]),
        "rounds": _joined({name: value for name, value in told.items() if not isinstance(value, str)}),
        **{name: value for name, value in told.items() if isinstance(value, str) and name != "ratio"},
        **ratio,
    }
    terms = [
        f"<div><dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in groups.items()
        if value is not None
    ]
    return ["<h3>Conditions</h3>", '<dl class="conditions">', *terms, "</dl>"]


def _joined(facts: dict[str, Any]) -> str:
    words = {"memory_gib": "GiB of memory", "cell_seconds": "seconds per cell at most", "name": ""}
    return ", ".join(
        f"{value} {words[name]}".strip() if name in words else f"{name} {value}"
        for name, value in facts.items()
        if value is not None
    )


# Tables


def _heat_map(results: dict[str, Any]) -> list[str]:
    its = compared(results)
    if its is None:
        return ["<p>No cell has both ours and a peer.</p>"]
    directions = dict.fromkeys(cell["direction"] for cell in its.cells)
    lengths = sorted({length(cell) for cell in its.cells})
    lines = []
    for row in rows(its.cells):
        at: dict[int, list[Cell]] = {}
        for cell in row.cells:
            at.setdefault(length(cell), []).append(cell)
        label = row.label if len(directions) == 1 else f"{row.label}, {row.direction}"
        head = f'<th scope="row">{escape(label)}</th>'
        lines.append(head + "".join(_heated(at.get(keys, [])) for keys in lengths))
    caption = (
        f"Our speed as a multiple of that of {_peer(its)}, over length. Blue and above 1.00: ours is faster; orange "
        "and below: slower."
    )
    if not its.is_cost:
        fastest = Counter(str(cell["fastest_peer"]) for cell in its.cells)
        caption += f" Fastest peer: {', '.join(f'{name} in {count}' for name, count in fastest.items())}."
    if any(cell["bar"] is not None and not cell.get("met") for cell in its.cells):
        caption += " An exclamation mark: the cell's bar is missed."
    head = "".join(f'<th scope="col">{short(keys)}</th>' for keys in lengths)
    return [
        f'<figure><div class="scroll"><table class="heat"><thead><tr><th scope="col">length</th>{head}</tr></thead>',
        *(f"<tr>{line}</tr>" for line in lines),
        f"</table></div><figcaption>{escape(caption)}</figcaption></figure>",
    ]


def _heated(cells: Sequence[Cell]) -> str:
    if not cells:
        return "<td></td>"
    worst = min(map(speed, cells))
    missed = "!" if any(cell["bar"] is not None and not cell.get("met") for cell in cells) else ""
    shown = ", ".join(f"{speed(cell):.2f}" for cell in cells)
    return f'<td class="{style.heat(worst)}">{shown}{missed}</td>'


def _ran(results: dict[str, Any]) -> list[str]:
    """What a provider that chooses by itself chose."""
    found = Counter(
        (name, str(one["ran"])) for cell in results["cells"] for name, one in timed(cell).items() if "ran" in one
    )
    return [f"<p>{escape(f'{name} ran {ran} (cells: {count}).')}</p>" for (name, ran), count in found.items()]


def _everything(results: dict[str, Any]) -> list[str]:
    """A row per provider, under a heading per cell: narrow enough that a phone shows the columns that matter."""
    unit = rate(results)
    entries = [one for cell in results["cells"] for one in timed(cell).values()]
    columns: dict[str, Callable[[Entry], str]] = {
        "median": lambda one: duration(one["median_ms"]),
        "p20-p80": lambda one: durations(one["p20_ms"], one["p80_ms"]) if "p20_ms" in one else "",
        unit.unit: lambda one: figure(unit.of(one)),
        "best": lambda one: duration(one["best_ms"]) if "best_ms" in one else "",
        "error / allowed": lambda one: "" if (share := strictness(one)) is None else f"{share:.3f}",
    }
    if any("gb_per_s" in one for one in entries):
        columns["GB/s"] = lambda one: figure(one["gb_per_s"]) if one.get("gb_per_s") is not None else ""
    if any("share_of_read_bandwidth" in one for one in entries):
        columns["of reading alone"] = lambda one: f"{one.get('share_of_read_bandwidth', 0):.2f}"
    if any("eager" in one for one in entries):
        columns["eager"] = lambda one: duration(one["eager"]["median_ms"]) if "eager" in one else ""
    if any("peak_bytes" in one for one in entries):
        columns["peak memory"] = lambda one: size(one["peak_bytes"]) if one.get("peak_bytes") is not None else ""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in ("provider", *columns))
    bodies = []
    for cell in results["cells"]:
        told = _title(cell)
        if cell["ratio"] is not None:
            told += f": {speed(cell):.2f}x the speed of {cell['fastest_peer']}"
        if (eager := cell.get("eager", {})).get("ratio") is not None:
            told += f", eager {1 / eager['ratio']:.2f}x that of {eager['fastest_peer']}"
        heading = f'<th scope="rowgroup" colspan="{len(columns) + 1}"><span>{escape(told)}</span></th>'
        bodies.append(f"<tbody><tr>{heading}</tr>")
        for name, one in timed(cell).items():
            kind = ' class="ours"' if name == cell["ours"] else ""
            figures_ = "".join(f"<td>{read(one)}</td>" for read in columns.values())
            bodies.append(f'<tr{kind}><th scope="row">{escape(name)}</th>{figures_}</tr>')
        bodies.append("</tbody>")
    caption = (
        "Times are per call, our fastest in bold. Over each group stands its speed as a multiple of the fastest "
        "peer's, the median over the rounds."
    )
    return [
        f'<figure><div class="scroll" tabindex="0"><table class="all"><thead><tr>{head}</tr></thead>',
        *bodies,
        f"</table></div><figcaption>{escape(caption)}</figcaption></figure>",
    ]


def _missing(results: dict[str, Any]) -> list[str]:
    found = not_measured(results)
    if not found:
        return ["<p>Everybody who was asked was measured in every cell.</p>"]
    lines = [[escape(name), escape(reason), str(count)] for (name, reason), count in found.items()]
    return _table(("provider", "why not", "cells"), lines, "Who has no figure, and in how many cells.")


def _table(heading: Sequence[str], lines: Iterable[Sequence[str]], caption: str) -> list[str]:
    """A table that scrolls in a box of its own. `lines` are HTML; the rest is text."""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in heading)
    return [
        f'<figure><div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>',
        *(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines),
        f"</table></div><figcaption>{escape(caption)}</figcaption></figure>",
    ]
