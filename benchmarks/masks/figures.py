"""What the figures say: bars, and the tables of the pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from stream_attention_tools.bench.results import filled
from stream_attention_tools.bench.summary import markdown_table, origin, short_time, size

from .calls import OURS, PEERS
from .cases import CASES, NEW_LENGTH_MS
from .measure import DIRECTIONS

ROOT = Path(__file__).parents[2]


class Place(NamedTuple):
    """Where the figures of a device are kept and shown."""

    file: Path
    page: Path
    mark: str


PLACES = {
    "cpu": Place(ROOT / "benchmarks/results/cpu/masks.json", ROOT / "docs/masks.md", "masks cpu"),
    "cuda": Place(ROOT / "benchmarks/results/h200/masks.json", ROOT / "docs/performance.md", "masks"),
}


def median(cell: dict[str, Any], name: str, direction: str) -> float | None:
    """Milliseconds; None where there are none."""
    found: float | None = cell["providers"].get(name, {}).get(direction, {}).get("median_ms")
    return found


def speed(cell: dict[str, Any], peer: str, direction: str) -> float | None:
    """Ours over a peer's."""
    ours, theirs = median(cell, "ours", direction), median(cell, peer, direction)
    return None if ours is None or theirs is None else theirs / ours


class Held(NamedTuple):
    """A bar and what was measured."""

    case: str
    direction: str
    peer: str
    bar: float
    speed: float | None

    @property
    def is_missed(self) -> bool:
        return self.speed is None or self.speed < self.bar


def held(results: dict[str, Any]) -> Iterator[Held]:
    """The bars of the device, of the cases that are in the file."""
    for case in CASES:
        for bar in case.bars.get(results["machine"]["device"], ()) if case.name in results["cells"] else ():
            for direction in DIRECTIONS:
                least: float | None = getattr(bar, direction)
                if least is not None:
                    figure = speed(results["cells"][case.name], bar.peer, direction)
                    yield Held(case.name, direction, bar.peer, least, figure)


def missed(results: dict[str, Any]) -> list[str]:
    """The bars that are missed, as sentences; what was not measured misses them."""
    found = []
    for one in held(results):
        if one.is_missed:
            shown = "not measured" if one.speed is None else f"{one.speed:.3f}"
            found.append(f"{one.case}, {one.direction}: {shown} of the speed of {one.peer}, the bar is {one.bar:.2f}")
    ours = results.get("new_length_ms", {}).get("ours")
    if results["machine"]["device"] == "cuda" and ours is not None and ours[0] > NEW_LENGTH_MS:
        found.append(f"a new length: {ours[0]:.0f} ms, the bar is {NEW_LENGTH_MS:.0f} ms")
    return found


SPEED = "speed, ours / dense mask"


def times(results: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of times, headings first: two for each case."""
    rows = [["mask", "visible", "direction", *OURS, *PEERS, SPEED]]
    for name, cell in results["cells"].items():
        for direction in DIRECTIONS:
            told = [median(cell, one, direction) for one in (*OURS, *PEERS)]
            figure = speed(cell, "dense mask", direction)
            shown = ["" if ms is None else short_time(ms) for ms in told]
            rows.append([name, f"{cell['density']:.1%}", direction, *shown, "" if figure is None else f"{figure:.2f}"])
    return filled(rows)


def memory(results: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of memory: the peak of forward and backward, and the tensors of the mask or bias."""
    rows = [["mask", *(f"{name}: {what}" for name in (*OURS, *PEERS) for what in ("peak", "mask"))]]
    for name, cell in results["cells"].items():
        found = [name]
        for one in (*OURS, *PEERS):
            entry = cell["providers"].get(one, {})
            there = "peak_bytes" in entry
            found += [size(entry["peak_bytes"]), size(entry["mask_bytes"])] if there else ["", ""]
        rows.append(found)
    return filled(rows)


def bars(results: dict[str, Any]) -> list[list[str]]:
    """Rows of the table of bars."""
    rows = [["mask", "direction", "ours", "peer", "peer's", "speed, ours / peer", "bar"]]
    for one in held(results):
        cell = results["cells"][one.case]
        ms = [median(cell, name, one.direction) for name in ("ours", one.peer)]
        ours, theirs = ("not measured" if each is None else short_time(each) for each in ms)
        figure = "" if one.speed is None else f"{one.speed:.2f}"
        bar = f"{one.bar:.2f}{' missed' if one.is_missed else ''}"
        rows.append([one.case, one.direction, ours, one.peer, theirs, figure, bar])
    return rows


def markdown(results: dict[str, Any]) -> str:
    """The tables for a page, below a line that says where and when they were measured."""
    clock = results["timing"]["clock"]
    lines = [f"{origin(results)}; {clock}: medians.", "", *markdown_table(times(results)), ""]
    lines += ["Bars:", "", *markdown_table(bars(results)), ""]
    lines += [
        "Memory: the peak of forward and backward beyond what was there before, and the tensors of mask or bias:",
        "",
        *markdown_table(memory(results)),
    ]
    new = results.get("new_length_ms")
    if new and results["machine"]["device"] == "cuda":  # a CPU compiles nothing
        told = (f"{name} {short_time(first)}, again {short_time(again)}" for name, (first, again) in new.items())
        lines += ["", f"The first call of a new length, forward and backward: {'; '.join(told)}."]
    return "\n".join(lines)


def written(page: str, mark: str, results: dict[str, Any]) -> str:
    """A page with the tables of these results between its marks."""
    marks = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}{markdown(results)}\n{found[2]}", page)


def line(name: str, cell: dict[str, Any]) -> str:
    """A case in one line."""
    parts = [name]
    for direction in DIRECTIONS:
        told = ((one, median(cell, one, direction)) for one in (*OURS, *PEERS))
        parts.append(f"{direction} {', '.join(f'{one} {short_time(ms)}' for one, ms in told if ms is not None)}")
    return "  ".join(parts)
