"""Plots: every value where the axis says, each provider with its sign, the same bytes each time."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from stream_attention_tools.bench.summary import figure, size
from stream_attention_tools.report import figures
from stream_attention_tools.report.figures import DARK, LIGHT, Plot, Point, Series

Figure = pytest.importorskip("matplotlib.figure").Figure

SERIES = [
    Series(name, [Point(x, y, y - 2, y + 3) for x, y in ((512, 100.0 + n), (1024, 200.0 + n), (2048, 400.0 + n))])
    for n, name in enumerate(("us", "them", "others"))
]
NAMES = [one.name for one in SERIES]


def plot(log: bool = False) -> Plot:
    return figures.lines("a title", "TFLOP/s", SERIES, NAMES, {"us"}, figure, 402.0, log)


def axes_of(one: Plot) -> Any:
    axes = Figure().subplots()
    one.draw(axes)
    return axes


def words(one: Plot) -> set[str | None]:
    return {element.text for element in ElementTree.fromstring(figures.files("a", one)["a.svg"]).iter()}


@pytest.mark.parametrize("log", [False, True])
def test_every_value_is_drawn_with_its_spread_on_the_axis_that_was_asked_for(log: bool) -> None:
    axes = axes_of(plot(log))
    for one, line, strokes in zip(SERIES, axes.lines, axes.collections, strict=True):
        assert line.get_label() == one.name
        assert list(zip(*line.get_data(), strict=True)) == [(point.x, point.y) for point in one.points]
        assert [(low[1], high[1]) for low, high in strokes.get_segments()] == [(p.low, p.high) for p in one.points]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log" if log else "linear")
    assert log or axes.get_ylim() == (0.0, pytest.approx(1.02 * 402))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["512", "1k", "2k"]


def test_providers_differ_in_colour_and_in_shape() -> None:
    signs = [figures._sign(n) for n in range(figures.COLOURS)]
    assert len({sign["color"] for sign in signs}) == figures.COLOURS
    assert len({sign["marker"] for sign in signs[:6]}) == 6


def test_ours_is_bold_in_the_line_and_in_the_legend() -> None:
    axes = axes_of(plot())
    ours, *others = (line.get_linewidth() for line in axes.lines)
    assert ours > max(others)
    (legend,) = axes.figure.legends
    assert [text.get_weight() for text in legend.get_texts()] == ["bold", "normal", "normal"]


def test_many_lengths_do_not_crowd_the_axis() -> None:
    many = [Series("us", [Point.exact(2.0**n, 1.0) for n in range(13)])]
    axes = axes_of(figures.lines("a", "b", many, ["us"], (), figure, 1.0))
    assert len(axes.get_xticklabels()) <= 7


def test_bars_show_every_figure() -> None:
    groups = [("a problem", {"us": 2.0**30, "them": 2.0**20}), ("another", {"us": 3.0 * 2**20})]
    one = figures.bars("a title", "peak memory", groups, NAMES, size, 2.0**30)
    assert [bar.get_width() for bar in axes_of(one).patches] == [2.0**30, 2.0**20, 3.0 * 2**20]
    assert {" a problem", " another", "   1 GiB", "   1 MiB", "   3 MiB"} <= words(one)


def test_strips_name_the_worst_and_bear_zero_and_infinity() -> None:
    one = figures.strips("a title", "error / allowed", [("us", [0.0, 0.02]), ("them", [5.0, float("inf")])], NAMES)
    assert {"us: at most 0.02", "them: at most inf"} <= words(one)


def test_one_length_alone_can_be_drawn() -> None:
    alone = [Series("us", [Point(512, 3.0, 3.0, 3.0)])]
    assert "us" in words(figures.lines("a", "b", alone, ["us"], (), figure, 3.0))


def test_a_name_is_text_and_no_formula() -> None:
    odd = [Series("$x < &", SERIES[0].points)]
    assert "$x < &" in words(figures.lines("a", "b", odd, ["$x < &"], (), figure, 400.0))


def test_a_plot_is_the_same_each_time_and_stands_alone_with_its_colours() -> None:
    assert figures.files("a", plot()) == figures.files("a", plot())
    light, dark = figures.files("a", plot()).values()
    assert ElementTree.fromstring(dark).get("width") == "360"
    assert LIGHT["s0"] in light and LIGHT["s0"] not in dark and DARK["s0"] in dark
