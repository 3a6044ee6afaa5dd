"""Plots: every value where the axis says, names that do not cover each other, the same bytes each time."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from stream_attention_tools.bench.summary import figure, size
from stream_attention_tools.report import figures
from stream_attention_tools.report.figures import Point, Series

SERIES = [
    Series(name, [Point(x, y, y, y) for x, y in ((512, 100.0 + n), (1024, 200.0 + n), (2048, 400.0 + n))])
    for n, name in enumerate(("us", "them", "others"))
]
NAMES = [one.name for one in SERIES]


def drawn(log: bool = False) -> str:
    return figures.lines("a title", "TFLOP/s", SERIES, NAMES, {"us"}, figure, 402.0, log)


def heights(svg: str, words: str) -> list[float]:
    """Where the markers are whose title has these words."""
    return [
        float(found)
        for found in re.findall(rf"<title>[^<]*{words}[^<]*</title><path[^>]*translate\([\d.]+ ([\d.]+)\)", svg)
    ]


def tick(svg: str, text: str) -> float:
    found = re.search(rf'y="([\d.]+)" class="quiet" text-anchor="end">{text}<', svg)
    assert found, text
    return float(found[1]) - 4  # a number stands four pixels below its line


def test_a_marker_stands_at_its_value() -> None:
    svg = drawn()
    assert heights(svg, "us, 512: ")[0] == pytest.approx(tick(svg, "100"), abs=0.11)
    assert heights(svg, "us, 2048: ")[0] == pytest.approx(tick(svg, "400"), abs=0.11)
    zero, top = tick(svg, "0"), tick(svg, "400")
    assert heights(svg, "them, 1024: ")[0] == pytest.approx(zero + (top - zero) * 201 / 400, abs=0.11)


def test_a_logarithmic_axis_has_equal_steps_for_doublings() -> None:
    first, second, third = heights(drawn(log=True), "us, ")
    assert first - second == pytest.approx(second - third, abs=0.2)


def test_names_at_line_ends_keep_their_order_and_distance_and_stay_inside() -> None:
    svg = drawn()
    found = {name: float(y) for y, name in re.findall(r'y="([\d.]+)"(?: class="bold")?>(us|them|others)<', svg)}
    assert found["others"] <= found["them"] - 14 and found["them"] <= found["us"] - 14
    assert min(found.values()) > 40 and max(found.values()) < 212


@pytest.mark.parametrize("top", [0.003, 0.9, 1.0, 7.3, 99.0, 100.0, 812.0, 4096.0])
def test_ticks_are_round_few_and_within_the_range(top: float) -> None:
    ticks = figures._steps(top)
    assert ticks[0] == 0 and 0.6 * top < ticks[-1] <= top * (1 + 1e-9) and 3 <= len(ticks) <= 6


def test_providers_differ_in_colour_and_in_shape() -> None:
    signs = [figures.sign(n) for n in range(figures.COLOURS)]
    assert len(set(signs)) == figures.COLOURS
    assert len({re.search(r' d="([^"]+)"', sign)[1] for sign in signs[:6]}) == 6  # type: ignore[index]


def test_bars_show_every_figure() -> None:
    groups = [("a problem", {"us": 2.0**30, "them": 2.0**20}), ("another", {"us": 3.0 * 2**20})]
    svg = figures.bars("a title", "peak memory", groups, NAMES, size, 2.0**30)
    texts = [element.text for element in ElementTree.fromstring(svg).iter("text")]
    assert {"a problem", "another", "1 GiB", "1 MiB", "3 MiB"} <= set(texts)


def test_strips_name_the_worst_and_bear_zero_and_infinity() -> None:
    svg = figures.strips("a title", "error / allowed", [("us", [0.0, 0.02]), ("them", [5.0, float("inf")])], NAMES)
    assert "us: at most 0.02" in svg and "them: at most inf" in svg
    ElementTree.fromstring(svg)


def test_one_length_alone_can_be_drawn() -> None:
    alone = [Series("us", [Point(512, 3.0, 3.0, 3.0)])]
    ElementTree.fromstring(figures.lines("a", "b", alone, ["us"], (), figure, 3.0))


def test_a_plot_is_the_same_each_time_and_stands_alone_with_its_colours() -> None:
    assert drawn() == drawn()
    svg = figures.standalone(drawn(), figures.DARK)
    assert ElementTree.fromstring(svg).get("height") is not None
    assert figures.DARK["s0"] in svg and "var(" not in svg
