"""What the figures say: bars, and the tables of docs/performance.md."""

from __future__ import annotations

import re
from typing import Any

from stream_attention_tools.bench.summary import markdown_table, short_time

from .batches import SHAPES, TB_PER_S, TFLOP_PER_S, WORKLOADS, described
from .calls import OURS, PEERS

BARS = {"memory": 1.00, "compute": 1.05}
"""Our speed over FlashAttention-3's, by what bounds a workload."""
BAR_ALONE = 0.85
"""The share of the floor where FlashAttention-3 lacks what the workload needs: sinks, tree masks."""


def median(cell: dict[str, Any], name: str, kind: str) -> float | None:
    """Microseconds; None where there are none."""
    found: float | None = cell["providers"][name].get(kind, {}).get("median_us")
    return found


def speed(cell: dict[str, Any], kind: str) -> float | None:
    """Ours over FlashAttention-3's, where each call prepares its own work."""
    one, other = median(cell, OURS[0], kind), median(cell, PEERS[0], kind)
    return None if one is None or other is None else other / one


def share(cell: dict[str, Any]) -> float | None:
    """The floor by the time of a replay."""
    one = median(cell, OURS[0], "replayed")
    return None if one is None else cell["floor_us"] / one


def missed(results: dict[str, Any]) -> list[str]:
    """The bars that are missed, as sentences; what was not measured misses them."""
    found = []
    for name, cell in results["cells"].items():
        alone = cell["sink"] or cell["tree"]
        bar = BAR_ALONE if alone else BARS[cell["bound"]]
        figures = (
            {"of the floor": share(cell)} if alone else {kind: speed(cell, kind) for kind in ("replayed", "called")}
        )
        for what, figure in figures.items():
            if figure is None or figure < bar:
                shown = "not measured" if figure is None else f"{figure:.3f}"
                found.append(f"{name}, {what}: {shown}, the bar is {bar:.2f}")
    return found


TIMES = {"ours": OURS[0], "peer's": PEERS[0], "ours, plan reused": OURS[1], "peer's, metadata reused": PEERS[1]}
TIMES |= {"`decode_attention`": OURS[2], "`write_kv`": OURS[3]}
SPEED = "speed, ours / peer"


def markdown(results: dict[str, Any]) -> str:
    """The figures as a table: times of replays, FlashAttention-3's as the peer's."""
    rows = [["#", "workload", *TIMES, SPEED, "with the host", "floor / ours"]]
    for cell in results["cells"].values():
        times = [median(cell, name, "replayed") for name in TIMES.values()]
        told = ["" if us is None else short_time(us / 1e3) for us in times]
        ratios = speed(cell, "replayed"), speed(cell, "called"), share(cell)
        figures = ["" if one is None else f"{one:.2f}" for one in ratios]
        rows.append([str(cell["number"]), f"{cell['name']}, {cell['heads']}", *told, *figures])
    return "\n".join(markdown_table(rows))


def listed() -> str:
    """What is measured, with what the formulas give, as a table."""
    rows = [["#", "workload", "queries", "keys", "page", "heads", "GFLOP", "MB", "floor", "bound by"]]
    for workload in WORKLOADS:
        one = described(workload, SHAPES[workload.heads], (TB_PER_S, TFLOP_PER_S))
        sizes = (f"{one[name]:,}" for name in ("queries", "keys", "page"))
        figures = f"{one['gflop']:.1f}", f"{one['mb']:.0f}", short_time(one["floor_us"] / 1e3), one["bound"]
        rows.append([str(workload.number), workload.name, *sizes, workload.heads, *figures])
    return "\n".join(markdown_table(rows))


def written(page: str, results: dict[str, Any]) -> str:
    """A page with the table of these results between its marks."""
    marks = re.compile(r"(<!-- workloads -->\n).*?(<!-- /workloads -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}{markdown(results)}\n{found[2]}", page)


def line(name: str, cell: dict[str, Any]) -> str:
    """A cell in one line."""
    parts = [f"{name:52} floor {cell['floor_us']:.0f} us"]
    kind = "replayed" if any("replayed" in one for one in cell["providers"].values()) else "called"
    for provider in cell["providers"]:
        if (us := median(cell, provider, kind)) is not None:
            parts.append(f"{provider} {short_time(us / 1e3)}")
    return "  ".join(parts)
