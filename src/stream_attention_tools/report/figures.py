"""Plots as SVG text, written by hand: small, the same bytes on every machine, letters that stay readable on a phone.

A plot is drawn 360 wide, about a phone's width, and pages lay several side by side; so its letters are 11-14 px on
every screen. Colours come by class (`s0`, `s1`, ...) from `RULES`; each provider has a marker beside its colour.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ..bench.summary import short

WIDTH = 360

_NAMES = "paper ink quiet grid s0 s1 s2 s3 s4 s5 s6 s7".split()
_LIGHT = "#ffffff #16191d #565d66 #dde1e6 #0063ad #c2500c #007a5a #9c4596 #866a00 #4a4f55 #007389 #b3003b"
_DARK = "#14171a #eceff2 #a7afb9 #343b43 #62b5f5 #ff9654 #43cf9f #e19fde #e3c541 #c3c9d0 #52cfe4 #ff7f9f"
LIGHT, DARK = (dict(zip(_NAMES, colours.split(), strict=True)) for colours in (_LIGHT, _DARK))
COLOURS = 8
RULES = Path(__file__).with_name("figures.css").read_text(encoding="utf-8").strip()
"""The style of every plot, with the colours as variables."""


class Point(NamedTuple):
    x: float
    y: float
    low: float  # y between p20 and p80
    high: float

    @classmethod
    def exact(cls, x: float, y: float) -> Point:
        return cls(x, y, y, y)


class Series(NamedTuple):
    name: str
    points: list[Point]


SHAPES = (
    "M4.5 0A4.5 4.5 0 1 1-4.5 0A4.5 4.5 0 1 1 4.5 0Z",  # disc
    "M-4-4H4V4H-4Z",  # square
    "M0-5.6L5.6 0L0 5.6L-5.6 0Z",  # diamond
    "M0-5L5 4H-5Z",  # triangle up
    "M0 5L5-4H-5Z",  # triangle down
    "M-1.6-5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5V-1.6H-1.6Z",  # cross
)


def marker(index: int, x: float, y: float, scale: float = 1) -> str:
    """The sign of a provider: its shape and colour by its index, so that they are the same all over a page."""
    larger = f" scale({scale:g})" if scale != 1 else ""
    place = f"translate({number(x)} {number(y)}){larger}"
    return f'<path class="mark s{index % COLOURS}" transform="{place}" d="{SHAPES[index % len(SHAPES)]}"/>'


def lines(
    title: str,
    unit: str,
    series: Sequence[Series],
    order: Sequence[str],
    ours: Collection[str],
    form: Callable[[float], str],
    top: float,
    log: bool = False,
    axis: str = "length, tokens",
) -> str:
    """Values over `axis`, one line per provider, named at its end; `order` gives them their signs, ours are bold.

    The value axis goes from 0 to `top`, so that panels side by side can share it; or it is logarithmic.
    """
    points = [point for one in series for point in one.points]
    series = sorted(series, key=lambda one: one.name not in ours)  # first and wide, ours shows under equals
    labels = [_cut(one.name, 20) for one in series]
    upper, lower = 48.0, 204.0
    lengths = sorted({point.x for point in points})
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])
    ticks = _powers([p.y for p in points]) if log else _steps(top)
    top = ticks[-1] if log else max(1.02 * top, ticks[-1])
    left = 14 + 6.2 * max(len(form(tick)) for tick in ticks)
    right = WIDTH - 12 - 7.0 * max(map(len, labels))

    def x_of(value: float) -> float:
        return left + 8 + (right - left - 16) * ((math.log2(value) - first) / (last - first) if last > first else 0.5)

    def y_of(value: float) -> float:
        share = math.log2(value / ticks[0]) / math.log2(top / ticks[0]) if log else value / top
        return lower - (lower - upper) * min(max(share, 0.0), 1.0)

    body = [text(0, 14, title, "title"), text(0, 34, unit, "quiet")]
    for tick in ticks:
        kind = "axis" if tick == ticks[0] else "grid"
        body.append(rule(left, y_of(tick), right, y_of(tick), kind))
        body.append(text(left - 6, y_of(tick) + 4, form(tick), "quiet", "end"))
    room = 5 + 6.2 * max(len(short(int(value))) for value in lengths)
    for value in _thinned(lengths, (right - left) / room):
        body.append(text(x_of(value), lower + 17, short(int(value)), "quiet", "middle"))
    body.append(text((left + right) / 2, lower + 33, axis, "quiet", "middle"))
    ends = [(x_of(one.points[-1].x), y_of(one.points[-1].y)) for one in series]
    for one, label, (end_x, end_y), label_y in zip(series, labels, ends, _spread(ends, upper, lower), strict=True):
        index = order.index(one.name)
        path = "L".join(f"{number(x_of(p.x))} {number(y_of(p.y))}" for p in one.points)
        whiskers = "".join(f"M{number(x_of(p.x))} {number(y_of(p.low))}V{number(y_of(p.high))}" for p in one.points)
        leader = f"M{number(end_x + 6)} {number(end_y)}L{number(right + 4)} {number(label_y)}"
        kind, scale = ("line ours", 1.4) if one.name in ours else ("line", 1)
        body.append(f'<g class="s{index % COLOURS}"><path class="{kind}" d="M{path}"/>')
        body.append(f'<path class="thin" d="{whiskers}{leader}"/></g>')
        for p in one.points:
            tip = f"{one.name}, {int(p.x)}: {form(p.y)} {unit}"
            body.append(with_tip(tip, marker(index, x_of(p.x), y_of(p.y), scale)))
        body.append(text(right + 8, label_y + 4, label, "bold" if one.name in ours else ""))
    return picture(f"{title}: {unit} over {axis.partition(',')[0]}", lower + 40, body)


def bars(
    title: str,
    unit: str,
    groups: Sequence[tuple[str, dict[str, float]]],
    order: Sequence[str],
    form: Callable[[float], str],
    top: float,
) -> str:
    """Values of problems that have no common axis: a group each under its name, a bar with its figure per provider."""
    left, right, upper = 4.0, WIDTH - 10.0, 28.0
    room = 8.0 + 6.6 * max(len(form(value)) for _, values in groups for value in values.values())
    marks: list[str] = []
    y = upper

    def x_of(value: float) -> float:
        return left + (right - room - left) * value / top

    for name, values in groups:
        y += 16
        marks.append(text(left + 6, y, _cut(name, 50)))
        for who, value in values.items():
            y += 14
            index = order.index(who)
            bar = f'<g class="s{index % COLOURS}">{rule(left, y - 4, x_of(value), y - 4, "line")}</g>'
            tip = f"{name}, {who}: {form(value)} {unit}"
            marks.append(with_tip(tip, bar + marker(index, x_of(value), y - 4)))
            marks.append(text(x_of(value) + 8, y, form(value), "quiet"))
        y += 6
    ticks = [(x_of(tick), form(tick), "axis" if tick == 0 else "grid") for tick in _steps(top)]
    return _over_columns(title, unit, ticks, upper, y, marks)


def strips(title: str, unit: str, rows: Sequence[tuple[str, Sequence[float]]], order: Sequence[str]) -> str:
    """Shares of what is allowed, on a logarithmic axis with a line at 1: a row per provider, a stroke per problem."""
    left, right, step = 4.0, WIDTH - 10.0, 38.0
    shown = [value for _, values in rows for value in values if 0 < value < math.inf]
    low = math.floor(math.log10(min([*shown, 0.1])))
    high = max(math.ceil(math.log10(max([*shown, 1.0]))), 0) + 0.15
    upper = 30.0

    def x_of(value: float) -> float:
        exponent = low if value <= 0 else high if value == math.inf else math.log10(value)
        return left + (right - left) * (exponent - low) / (high - low)

    marks: list[str] = []
    for row, (name, values) in enumerate(rows):
        base, worst, index = upper + step * row, max(values), order.index(name)
        strokes = "".join(f"M{number(x_of(value))} {number(base + 20)}v14" for value in values)
        marks.append(text(left + 6, base + 14, f"{_cut(name, 26)}: at most {worst:.2f}"))
        marks.append(f'<g class="s{index % COLOURS}"><path class="thin" d="{strokes}"/></g>')
        marks.append(with_tip(f"{name}, worst: {worst:.3g}", marker(index, x_of(worst), base + 27)))
    ticks = [
        (x_of(10.0**power), f"{10.0**power:g}" if power else "1 = allowed", "grid" if power else "axis")
        for power in range(low, math.floor(high) + 1)
    ]
    return _over_columns(title, unit, ticks, upper, upper + step * len(rows), marks)


def _over_columns(
    title: str, unit: str, ticks: Sequence[tuple[float, str, str]], upper: float, lower: float, marks: Sequence[str]
) -> str:
    """Marks over upright lines, each with its label below it, and under these the unit."""
    body = [text(0, 14, title, "title")]
    for n, (x, label, kind) in enumerate(ticks):
        body.append(rule(x, upper, x, lower, kind))
        body.append(text(x, lower + 16, label, "quiet", "middle" if n else "start"))
    body.append(text((WIDTH - 6) / 2, lower + 32, unit, "quiet", "middle"))
    return picture(f"{title}: {unit}", lower + 38, [*body, *marks])


def sign(index: int) -> str:
    """A provider's marker alone, for a legend."""
    return f'<svg class="sign" viewBox="0 0 14 14" aria-hidden="true">{marker(index, 7, 7)}</svg>'


def standalone(svg: str, theme: dict[str, str]) -> str:
    """A plot as a file of its own: names its size and carries its colours."""
    rules = re.sub(r"var\(--(\w+)\)", lambda found: theme[found[1]], RULES)
    opening = re.match(r"<svg viewBox=\"0 0 (\d+) (\d+)\"", svg)
    assert opening is not None, "every plot is opened by picture"
    size = f'<svg xmlns="http://www.w3.org/2000/svg" width="{opening[1]}" height="{opening[2]}"'
    return f"{svg.replace('<svg', size, 1).replace('>', f'><style>{rules}</style>', 1)}\n"


def picture(title: str, height: float, body: Sequence[str]) -> str:
    title = escape(title)
    opening = f'<svg viewBox="0 0 {WIDTH} {math.ceil(height)}" role="img" aria-label="{title}"><title>{title}</title>'
    return "\n".join([opening, *body, "</svg>"])


def with_tip(words: str, mark: str) -> str:
    """A mark that shows this text to a pointer."""
    return f"<g><title>{escape(words)}</title>{mark}</g>"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    where = f'x="{number(x)}" y="{number(y)}"' + (f' class="{kind}"' if kind else "")
    aligned = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f"<text {where}{aligned}>{escape(words)}</text>"


def rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"/>'


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _steps(top: float) -> list[float]:
    """Round values from 0 up to `top`, four to six of them."""
    unit = 10.0 ** math.floor(math.log10(top))
    step = next(unit * share for share in (0.2, 0.25, 0.5, 1.0, 2.0) if unit * share * 5 >= top)
    return [n * step for n in range(math.floor(top / step + 1e-9) + 1)]


def _powers(values: Sequence[float]) -> list[float]:
    """Powers of two around the values, at most seven of them."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    stride = max(1, math.ceil((high - low) / 6))
    return [2.0**n for n in range(low, max(high, low + 1) + stride, stride)]


def _thinned(values: Sequence[float], most: float) -> list[float]:
    return list(values[:: max(1, math.ceil(len(values) / most))])


def _spread(ends: Sequence[tuple[float, float]], upper: float, lower: float, gap: float = 15.0) -> list[float]:
    """Heights for the names of lines that end at these points: in the same order, no two closer than `gap`."""
    order = sorted(range(len(ends)), key=lambda n: ends[n][1])
    heights = [ends[n][1] for n in order]
    for n in range(1, len(heights)):
        heights[n] = max(heights[n], heights[n - 1] + gap)
    excess = max(0.0, heights[-1] - max(lower, upper + gap * (len(heights) - 1)))
    heights[-1] -= excess
    for n in range(len(heights) - 2, -1, -1):
        heights[n] = min(heights[n], heights[n + 1] - gap)
    placed = dict(zip(order, heights, strict=True))
    return [placed[n] for n in range(len(ends))]
