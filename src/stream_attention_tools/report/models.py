"""The table of whole models: tokens per second and peak memory, from a results file of `benchmarks.models.measure`."""

from __future__ import annotations

from typing import Any

from ..bench.results import aligned
from ..bench.summary import Cell, Entry, names, origin, size, timed

SUITE = "models"
"""What such a results file calls itself."""

SPEED = "speed, ours / fastest peer"


def line(cell: Cell) -> str:
    """One row in one line, as it is told while it runs."""
    parts = [f"{cell['name']:18}"]
    for name, one in cell["providers"].items():
        if "median_ms" in one:
            parts.append(f"{name} {_shown(one)}")
        elif "failed" in one:
            parts.append(f"{name} FAILED: {one['failed']}")
        elif "unavailable" not in one:
            parts.append(f"{name} WRONG: error {one['error']:.2e}, allowed {one['allowed']:.2e}")
    if cell["ratio"] is not None:
        parts.append(f"{1 / cell['ratio']:.2f}x the speed of {cell['fastest_peer']}{'' if cell['met'] else ', MISSED'}")
    return "  ".join(parts)


def table(results: dict[str, Any]) -> list[list[str]]:
    """Headings, then a line per row: everybody's tokens per second and peak memory, and the speed of ours."""
    columns = names([results])
    found = [["", *columns, SPEED]]
    for cell in results["cells"]:
        its = timed(cell)
        ratio = "" if cell["ratio"] is None else f"{1 / cell['ratio']:.2f}"
        found.append([str(cell["name"]), *(_shown(its[name]) if name in its else "" for name in columns), ratio])
    return found


def aligned_table(results: dict[str, Any]) -> str:
    """The table for a terminal."""
    return aligned(table(results))


def markdown(results: dict[str, Any]) -> str:
    """The table for a page, under a line that says what, where, when and with what it was measured."""
    heading, *body = table(results)
    told = results["conditions"]
    versions = results["versions"]
    return "\n".join(
        [
            f"{told['model']}; training: {told['training']}. {origin(results)}, transformers "
            f"{versions['transformers']}; tokens/s, medians of {told['rounds']} interleaved runs, and the peak memory "
            "beyond the weights.",
            "",
            f"| {' | '.join(heading)} |",
            f"|{'---|' * len(heading)}",
            *(f"| {' | '.join(row)} |" for row in body),
        ]
    )


def _shown(one: Entry) -> str:
    peak = one.get("peak_bytes")
    return f"{one['tokens_per_s']:,.0f}" + ("" if peak is None else f" ({size(peak)})")
