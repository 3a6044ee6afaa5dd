"""The table of whole models: tokens per second and peak memory, from a results file of `benchmarks.models.measure`."""

from __future__ import annotations

from typing import Any

from ..bench import results
from ..bench.summary import Cell, Entry, markdown_table, names, origin, size, timed

OURS = "stream_attention"
SUITE = "models"
"""What such a results file calls itself."""

PEER = "sdpa"
SPEEDS = "speed over sdpa", "static, over the faster sdpa"


def line(cell: Cell) -> str:
    """One row in one line, printed while the command runs."""
    return results.line(cell, _shown)


def table(found: dict[str, Any]) -> list[list[str]]:
    """Headings, then a line per row: everybody's tokens per second and peak memory, and the speed of ours over SDPA's:
    each with the cache that grows, and ours with the static one over the faster of SDPA's."""
    columns = names([found])
    rows = [["", *columns, *SPEEDS]]
    for cell in found["cells"]:
        its = timed(cell)
        speeds = [_speed(its, OURS, [PEER]), _speed(its, f"{OURS} static", [PEER, f"{PEER} static"])]
        rows.append([str(cell["name"]), *(_shown(its[name]) if name in its else "" for name in columns), *speeds])
    return rows


def _speed(its: dict[str, Entry], one: str, others: list[str]) -> str:
    """The speed of one as a multiple of the fastest of others, of the tokens per second that are shown."""
    fastest = max((its[name]["tokens_per_s"] for name in others if name in its), default=None)
    return f"{its[one]['tokens_per_s'] / fastest:.2f}" if one in its and fastest else ""


def markdown(found: dict[str, Any]) -> str:
    """The table for a page, under a line that says what, where, when and with what it was measured."""
    conditions = found["conditions"]
    first = (
        f"{conditions['model']}; training: {conditions['training']}. {origin(found)}, transformers "
        f"{found['versions']['transformers']}; tokens/s, medians of {conditions['rounds']} interleaved runs, and the "
        "peak memory beyond the weights."
    )
    return "\n".join([first, "", *markdown_table(table(found))])


def _shown(one: Entry) -> str:
    peak = one.get("peak_bytes")
    return f"{one['tokens_per_s']:,.0f}" + ("" if peak is None else f" ({size(peak)})")
