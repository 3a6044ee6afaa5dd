"""The report: one HTML page with plots and tables, complete in itself, for a phone, a desk, the dark and paper.

Every word that comes from a results file is escaped. There is no script, and nothing is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from stream_attention.base.files import write_file

from ..bench import summary
from ..bench.summary import Cell, Compared, Entry, compared, duration, figure, names, speed, timed
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
    body = _contents(results) if len(results) > 1 else []
    for number, found in enumerate(results, 1):
        body += _section(found, order, f"r{number}")
    origins = "\n".join(f"<p>{escape(line)}</p>" for line in dict.fromkeys(map(summary.origin, results)))
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(style=style.sheet(), origins=origins, body="\n".join(body))


def _contents(results: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for number, found in enumerate(results, 1):
        link = f'<a href="#r{number}">{escape(_name(found))}</a>'
        shown = ["", "", ""]
        if (its := compared(found)) is not None:
            shown = [f"{x:.2f}" for x in (its.mean, speed(its.best), speed(its.worst))]
        lines.append([link, str(len(found["cells"])), *shown])
    caption = "Our speed as a multiple of the fastest peer's, geometric means and ends: above 1.00 ours is faster."
    return ["<nav>", *_table(("measured", "cells", "mean", "best", "worst"), _cells(lines), caption), "</nav>"]


def _name(results: dict[str, Any]) -> str:
    suite = str(results.get("suite") or "results").replace("-", " ")
    return f"{'CPU' if suite == 'cpu' else summary.capital(suite)} on {results['machine']['name']}"


def _section(results: dict[str, Any], order: Sequence[str], anchor: str) -> list[str]:
    parts = {
        "Conditions": _conditions(results),
        "Speed": plots.speed(results, order),
        "Speed beside the fastest peer": _heat_map(results),
        "Memory": plots.memory(results, order),
        "Accuracy": plots.accuracy(results, order),
        "All measurements": [*_ran(results), *_everything(results)],
        "Not measured": _missing(results),
    }
    lines = [f'<section id="{anchor}"><h2>{escape(_name(results))}</h2>', *_summary(results)]
    for heading, part in parts.items():
        lines += [f"<h3>{heading}</h3>", *part]
    return [*lines, "</section>"]


# Sentences


def _summary(results: dict[str, Any]) -> list[str]:
    its = compared(results)
    if its is None:
        return ["<p>No cell has both ours and a peer, so there is nothing to compare.</p>"]
    count = f"{len(its.cells)} {'cell' if len(its.cells) == 1 else 'cells'}"
    tiles = {"geometric mean": (its.mean, f"of {count}")}
    tiles |= {word: (speed(cell), _beside(cell)) for word, cell in (("best", its.best), ("worst", its.worst))}
    faster = f"; above 1.00 ours is faster, as it is in {its.faster or 'none'} of them"
    sentences = (
        f"Our fastest has {its.mean:.2f} times the speed of {_peer(its)} in the geometric mean of {count}, "
        f"from {speed(its.worst):.2f} ({_beside(its.worst)}) to {speed(its.best):.2f} ({_beside(its.best)})"
        f"{'' if its.is_cost else faster}."
    )
    barred = [cell for cell in its.cells if cell["bar"] is not None]
    missed = [cell for cell in barred if not cell.get("met")]
    if barred:
        outcome = f"{len(missed)} miss it: {', '.join(map(_title, missed))}" if missed else "none misses it"
        sentences += f" Of the {len(barred)} held to a bar, {outcome}."
    shown = (
        f"<div><dt>{word}</dt><dd><b>{value:.2f}x</b> <span>{escape(of)}</span></dd></div>"
        for word, (value, of) in tiles.items()
    )
    return ['<dl class="tiles">', *shown, "</dl>", f"<p>{escape(sentences)}</p>", *_beside_each(results)]


def _peer(its: Compared) -> str:
    return "our own call without the modifiers" if its.is_cost else "the fastest peer"


def _title(cell: Cell) -> str:
    return f"{cell['name']}, {cell['direction']}"


def _beside(cell: Cell) -> str:
    return f"{_title(cell)}, beside {cell['fastest_peer']}"


def _beside_each(results: dict[str, Any]) -> list[str]:
    lines = []
    for name in names([results]):
        if found := summary.speed_over(results["cells"], name, paired=True):
            words = f" <small>{escape(WORDS[name])}</small>" if name in WORDS else ""
            mean = f"{summary.geometric_mean(found):.2f}"
            lines.append([f"{escape(name)}{words}", str(len(found)), mean, summary.span(found)])
    if not lines:
        return []
    caption = "Speed of our fastest as a multiple of each other's: above 1.00 ours is faster."
    return _table(("beside", "cells", "geometric mean", "range"), _cells(lines), caption)


def _conditions(results: dict[str, Any]) -> list[str]:
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
    terms = [
        f"<div><dt>{escape(str(name).replace('_', ' '))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in groups.items()
        if value is not None
    ]
    return ['<dl class="conditions">', *terms, "</dl>"]


def _joined(fields: dict[str, Any]) -> str:
    words = {"memory_gib": "GiB of memory", "cell_seconds": "seconds per cell at most", "name": ""}
    present = {name: value for name, value in fields.items() if value is not None}
    return ", ".join(f"{v} {words[name]}".strip() if name in words else f"{name} {v}" for name, v in present.items())


# Tables


def _heat_map(results: dict[str, Any]) -> list[str]:
    its = compared(results)
    if its is None:
        return ["<p>No cell has both ours and a peer.</p>"]
    directions = {cell["direction"] for cell in its.cells}
    lengths = sorted({summary.length(cell) for cell in its.cells})
    lines = []
    for row in summary.rows(its.cells):
        label = row.label if len(directions) == 1 else f"{row.label}, {row.direction}"
        at = ([cell for cell in row.cells if summary.length(cell) == keys] for keys in lengths)
        lines.append(f'<tr><th scope="row">{escape(label)}</th>{"".join(map(_heated, at))}</tr>')
    caption = (
        f"Our speed as a multiple of that of {_peer(its)}, over length. Blue and above 1.00: ours is faster; orange "
        "and below: slower."
    )
    if not its.is_cost:
        fastest = Counter(str(cell["fastest_peer"]) for cell in its.cells)
        caption += f" Fastest peer: {', '.join(f'{name} in {count}' for name, count in fastest.items())}."
    if any(map(_missed, its.cells)):
        caption += " An exclamation mark: the cell's bar is missed."
    return _table(("length", *map(summary.short, lengths)), lines, caption, ' class="heat"')


def _missed(cell: Cell) -> bool:
    return cell["bar"] is not None and not cell.get("met")


def _heated(cells: Sequence[Cell]) -> str:
    if not cells:
        return "<td></td>"
    shown = ", ".join(f"{speed(cell):.2f}" for cell in cells)
    return f'<td class="{style.heat(min(map(speed, cells)))}">{shown}{"!" if any(map(_missed, cells)) else ""}</td>'


def _ran(results: dict[str, Any]) -> list[str]:
    """What a provider that chooses by itself chose."""
    entries = [item for cell in results["cells"] for item in timed(cell).items()]
    found = Counter((name, str(one["ran"])) for name, one in entries if "ran" in one)
    return [f"<p>{escape(f'{name} ran {ran} (cells: {count}).')}</p>" for (name, ran), count in found.items()]


def _everything(results: dict[str, Any]) -> list[str]:
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
    groups = []
    for cell in results["cells"]:
        title = _title(cell)
        if cell["ratio"] is not None:
            title += f": {speed(cell):.2f}x the speed of {cell['fastest_peer']}"
        if (eager := cell.get("eager", {})).get("ratio") is not None:
            title += f", eager {1 / eager['ratio']:.2f}x that of {eager['fastest_peer']}"
        heading = f'<th scope="rowgroup" colspan="{len(columns) + 1}"><span>{escape(title)}</span></th>'
        groups.append(f"<tbody><tr>{heading}</tr>")
        for name, one in timed(cell).items():
            kind = ' class="ours"' if name == cell["ours"] else ""
            figures = "".join(f"<td>{read(one)}</td>" for read in columns.values())
            groups.append(f'<tr{kind}><th scope="row">{escape(name)}</th>{figures}</tr>')
        groups.append("</tbody>")
    caption = (
        "Times are per call, our fastest in bold. Over each group stands its speed as a multiple of the fastest "
        "peer's, the median over the rounds."
    )
    return _table(("provider", *columns), groups, caption, ' class="all"')


def _optional(key: str, shown: Callable[[Any], str], one: Entry) -> str:
    return "" if one.get(key) is None else shown(one[key])


def _missing(results: dict[str, Any]) -> list[str]:
    found = summary.not_measured(results)
    if not found:
        return ["<p>Everybody who was asked was measured in every cell.</p>"]
    lines = [[escape(name), escape(reason), str(count)] for (name, reason), count in found.items()]
    return _table(("provider", "why not", "cells"), _cells(lines), "Who has no figure, and in how many cells.")


def _cells(lines: Iterable[Sequence[str]]) -> list[str]:
    """Rows of a table whose cells are HTML."""
    return [f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines]


def _table(heading: Sequence[str], rows: Iterable[str], caption: str, kind: str = "") -> list[str]:
    """A table that scrolls in a box of its own. `rows` are HTML; the rest is text."""
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in heading)
    return [
        f'<figure><div class="scroll" tabindex="0"><table{kind}><thead><tr>{head}</tr></thead>',
        *rows,
        f"</table></div><figcaption>{escape(caption)}</figcaption></figure>",
    ]
