"""Plots as SVG by matplotlib, 360 wide: about a phone's width, and pages lay several side by side.

A `Plot` says what is drawn, `svg` draws it. Letters stay letters, and a picture has the same bytes on every machine
with the same matplotlib. Each provider has a colour and a marker, by its place in an order that a page has once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from html import escape
from io import StringIO
from math import inf
from typing import Any, NamedTuple

from ..bench.summary import short

WIDTH = 360

_NAMES = "paper ink quiet grid s0 s1 s2 s3 s4 s5 s6 s7 faster slower".split()
_LIGHT = (
    "#ffffff #16191d #565d66 #dde1e6 #0063ad #c2500c #007a5a #9c4596 #866a00 #4a4f55 #007389 #b3003b #6fb1e4 #f3a05a"
)
_DARK = (
    "#14171a #eceff2 #a7afb9 #343b43 #62b5f5 #ff9654 #43cf9f #e19fde #e3c541 #c3c9d0 #52cfe4 #ff7f9f #1f6aa8 #a3500f"
)
LIGHT, DARK = (dict(zip(_NAMES, colours.split(), strict=True)) for colours in (_LIGHT, _DARK))
THEMES = {"": LIGHT, "_dark": DARK}  # by what a file name ends in
COLOURS = 8
MARKERS = "osD^vP"

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stream_attention",
    "text.parse_math": False,  # names come from files
    "font.size": 11,
    "font.sans-serif": ["DejaVu Sans"],
    "axes.titlesize": 14,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.markeredgecolor": LIGHT["paper"],
    "grid.color": LIGHT["grid"],
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.titlecolor"), LIGHT["ink"]),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), LIGHT["quiet"]),
}


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


class Plot(NamedTuple):
    title: str
    described: str
    height: float
    draw: Callable[[Any], None]  # on the axes


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
) -> Plot:
    """Values over `axis`, one line per provider; `order` gives them their signs, ours are bold.

    The value axis goes from 0 to `top`, so that panels side by side can share it; or it is logarithmic.
    """

    def draw(axes: Any) -> None:
        for one in series:
            x, y, low, high = zip(*one.points, strict=True)
            sign, bold = _sign(order.index(one.name)), one.name in ours
            size = {"linewidth": 3.5, "markersize": 9} if bold else {"linewidth": 2, "markersize": 7, "zorder": 3}
            axes.vlines(x, low, high, color=sign["color"], linewidth=1)
            axes.plot(x, y, label=one.name, **sign, **size)
        lengths = sorted({point.x for one in series for point in one.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown := lengths[:: -(-len(lengths) // 7)], [short(int(value)) for value in shown])
        axes.minorticks_off()
        if log:
            axes.set_yscale("log", base=2)
        else:
            axes.set_ylim(0, 1.02 * top)
        axes.yaxis.set_major_formatter(lambda value, _: form(value))
        axes.set_xlabel(axis)
        axes.set_title(title, pad=24)
        axes.annotate(unit, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=LIGHT["quiet"])
        legend = axes.figure.legend(loc="outside lower center", ncols=3)
        for text in legend.get_texts():
            text.set_weight("bold" if text.get_text() in ours else "normal")

    rows = -(-len(series) // 3)
    return Plot(title, f"{title}: {unit} over {axis.partition(',')[0]}", 240 + 18 * rows, draw)


def bars(
    title: str,
    unit: str,
    groups: Sequence[tuple[str, dict[str, float]]],
    order: Sequence[str],
    form: Callable[[float], str],
    top: float,
) -> Plot:
    """Values of problems that have no common axis: a group each under its name, a bar with its figure per provider."""

    def draw(axes: Any) -> None:
        row = 0
        for name, values in groups:
            axes.text(0, row, f" {name}", va="center")
            for who, value in values.items():
                row += 1
                sign = _sign(order.index(who))
                axes.barh(row, value, height=0.2, color=sign["color"])
                axes.plot(value, row, label=who, linestyle="", **sign)
                axes.text(value, row, f"   {form(value)}", va="center")
            row += 1
        _upright(axes, unit, row)
        axes.set_xlim(0, 1.3 * top)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: form(value))
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)

    names = {who for _, values in groups for who in values}
    rows = sum(1 + len(values) for _, values in groups)
    return Plot(title, f"{title}: {unit}", 80 + 18 * rows + 18 * -(-len(names) // 3), draw)


def strips(title: str, unit: str, rows: Sequence[tuple[str, Sequence[float]]], order: Sequence[str]) -> Plot:
    """Shares of what is allowed, on a logarithmic axis with a line at 1: a row per provider, a stroke per problem."""
    shown = [value for _, values in rows for value in values if 0 < value < inf]
    least, most = min([*shown, 0.1]), 1.2 * max([*shown, 1.0])

    def draw(axes: Any) -> None:
        for row, (name, values) in enumerate(rows):
            worst, sign = max(values), _sign(order.index(name))
            x = [min(max(value, least), most) for value in (*values, worst)]
            axes.plot(
                x[:-1], [row] * len(values), "|", color=sign["color"], markeredgecolor=sign["color"], markersize=14
            )
            axes.plot(x[-1], row, **sign)
            axes.text(least, row - 0.4, f"{name}: at most {worst:.2f}", va="center")
        axes.set_xscale("log")
        axes.set_xlim(least, most)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.axvline(1, color=LIGHT["quiet"])
        _upright(axes, unit, len(rows))

    return Plot(title, f"{title}: {unit}", 80 + 38 * len(rows), draw)


def _upright(axes: Any, unit: str, rows: int) -> None:
    axes.set_ylim(rows, -0.8)
    axes.set_yticks([])
    axes.set_xlabel(unit)


def _sign(index: int) -> dict[str, Any]:
    """The colour and the marker of a provider."""
    return {"color": LIGHT[f"s{index % COLOURS}"], "marker": MARKERS[index % len(MARKERS)]}


def svg(plot: Plot) -> str:
    """The plot as an element of a page, with the colours of `LIGHT`."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots: expected matplotlib; got none. pip install matplotlib") from error
    file = StringIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, plot.height / 72), layout="constrained")
        axes = figure.subplots()
        axes.set_title(plot.title)
        plot.draw(axes)
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    body = file.getvalue().partition("<svg")[2].partition(">")[2].replace("'DejaVu Sans'", "system-ui, sans-serif")
    for unneeded in (
        "<!--.*?-->",
        "<clipPath.*?</clipPath>",
        ' clip-path="[^"]*"',
        '(?<=<g) id="[^"]*"',
        r"(?<=\.\d\d)\d+",
    ):
        body = re.sub(unneeded, "", body, flags=re.DOTALL)
    words = escape(plot.described)
    opening = f'<svg viewBox="0 0 {WIDTH} {plot.height:g}" role="img" aria-label="{words}"><title>{words}</title>'
    return opening + body


def files(stem: str, plot: Plot) -> dict[str, str]:
    """The plot as files of their own, which name their size: for light pages and for dark ones."""
    inline = svg(plot)
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    sized = inline.replace("<svg", f'<svg {spaces} width="{WIDTH}" height="{plot.height:g}"', 1).strip()
    return {f"{stem}{suffix}.svg": f"{coloured(sized, theme)}\n" for suffix, theme in THEMES.items()}


def coloured(inline: str, theme: dict[str, str]) -> str:
    """A plot in other colours than those of `LIGHT`."""
    names = {colour: name for name, colour in LIGHT.items()}
    return re.sub("|".join(names), lambda found: theme[names[found[0]]], inline)
