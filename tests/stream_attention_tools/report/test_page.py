"""The report: one page, complete in itself, that says what the results file says and nothing it was not told."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stream_attention_tools.bench.summary import duration, figure, rate, speed, timed
from stream_attention_tools.report.figures import COLOURS, DARK, LIGHT
from stream_attention_tools.report.page import FOLDER, contents, heat, page, write_page

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("cpu/cpu", *(f"h200/{name}" for name in ("forward", "backward", "decode", "modifiers", "small")))
VOID = {"meta", "br", "img", "link", "input"}


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


class Parsed(HTMLParser):
    """A page's elements, text and nesting."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.misnested: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.inside or self.inside.pop() != tag:
            self.misnested.append(tag)

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((tuple(self.inside), data.strip()))

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.tags)

    def within(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if tag in inside]

    @property
    def words(self) -> str:
        return " ".join(text for inside, text in self.texts if "style" not in inside)


@cache
def page_of(*names: str) -> str:
    """Drawing takes a third of a second a plot, so a page is made once."""
    return page([results(name) for name in names])


SHOWN = ("cpu/cpu", "h200/forward", "h200/decode")


@pytest.fixture
def everything() -> str:
    return page_of(*SHOWN)


# Structure


def test_the_page_is_written_as_index_html(tmp_path: Path) -> None:
    path = write_page([results("cpu/cpu")], tmp_path / "new")
    assert path == tmp_path / "new" / "index.html"
    assert path.read_text(encoding="utf-8") == page_of("cpu/cpu")
    assert write_page([cells_of(1.0)], tmp_path / "not" / "there").exists()
    with pytest.raises(NotADirectoryError):
        write_page([cells_of(1.0)], path)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_results_has_all_sections(name: str) -> None:
    parsed = Parsed(page_of(name))
    assert parsed.misnested == [] and parsed.inside == []
    assert (parsed.count("h1"), parsed.count("h2"), parsed.count("section")) == (1, 1, 1)
    assert parsed.within("h3") == [
        "Conditions",
        "Speed",
        "Speed beside the fastest peer",
        "Memory",
        "Accuracy",
        "All measurements",
        "Not measured",
    ]


def test_several_results_are_sections_that_the_contents_link_to(everything: str) -> None:
    parsed = Parsed(everything)
    assert parsed.count("h1") == 1 and parsed.count("h2") == len(SHOWN)
    links = [attrs["href"] for tag, attrs in parsed.tags if tag == "a"]
    sections = [f"#{attrs['id']}" for tag, attrs in parsed.tags if tag == "section"]
    assert links == sections and len(set(links)) == len(SHOWN)


def test_nothing_is_fetched_and_nothing_is_run(everything: str) -> None:
    parsed = Parsed(everything)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in parsed.tags}
    assert all(attrs.get("src") is None and str(attrs.get("href", "#"))[0] == "#" for _, attrs in parsed.tags)
    assert "://" not in everything and "url(" not in everything and "@import" not in everything


def test_figures_have_captions_plots_have_titles_and_wide_tables_a_box(everything: str) -> None:
    assert everything.count("<figure>") == everything.count("<figcaption>") > len(SHOWN)
    for found in re.findall(r"<figure>.*?</figure>", everything, re.DOTALL):
        assert re.search(r"<figcaption>[A-Z][^<]{20,}</figcaption>", found)
    plots = re.findall(r"<svg viewBox=\"0 0 360[^>]*>\s*<title>[^<]+</title>", everything)
    assert len(plots) == everything.count('role="img"') > 20
    assert everything.count("<table") == len(re.findall(r'<div class="scroll"[^>]*><table', everything))


def test_the_page_is_for_phones_the_dark_and_print(everything: str) -> None:
    assert 'content="width=device-width, initial-scale=1"' in everything
    assert "@media screen and (prefers-color-scheme: dark)" in everything
    assert "@media print" in everything and "break-inside: avoid" in everything


# The figures are those of the file


@pytest.mark.parametrize("name", NAMES)
def test_every_measurement_and_ratio_of_the_file_is_in_the_page(name: str) -> None:
    found, text = results(name), page_of(name)
    table = text[text.index('<table class="all">') :]
    for cell in found["cells"]:
        beside = f"{speed(cell):.2f}x the speed of {cell['fastest_peer']}"
        start = table.index(f"<span>{cell['name']}, {cell['direction']}: {beside}")
        group = table[start : table.index("</tbody>", start)]
        for who, one in timed(cell).items():
            row = group[group.index(f">{who}</th>") :].partition("</tr>")[0]
            assert row.startswith(f">{who}</th><td>{duration(one['median_ms'])}</td><td>"), (cell["name"], who)
            assert f"<td>{figure(rate(found).of(one))}</td><td>{duration(one['best_ms'])}</td>" in row
    heat = re.findall(r'<td class="\w+">([\d.]+)!?</td>', text)
    assert sorted(heat) == sorted(f"{speed(cell):.2f}" for cell in found["cells"])


def test_the_summary_says_mean_best_and_worst() -> None:
    found = cells_of(0.5, 2.0, 4.0)
    words = Parsed(page([found])).words
    assert "has 0.63 times the speed of the fastest peer in the geometric mean of 3 cells" in words  # one by 4 ** (1/3)
    assert "from 0.25 (full 4096, forward, beside them) to 2.00 (full 1024, forward, beside them)" in words
    assert "above 1.00 ours is faster, as it is in 1 of them" in words
    tiles = "geometric mean 0.63x of 3 cells best 2.00x full 1024, forward, beside them worst 0.25x full 4096, forward"
    assert tiles in words


def test_the_page_compares_in_one_direction() -> None:
    found = cells_of(0.5, 0.5, 0.5)
    words = Parsed(page([found])).words
    assert "geometric mean 2.00x" in words and "them 3 2.00 2.00" in words and "0.50" not in words
    assert "below 1.00" not in words and "as long" not in words


def test_beside_each_peer_stands_the_speed_by_the_medians_that_are_shown() -> None:
    found = cells_of(0.5, 0.5)
    for cell, ms in zip(found["cells"], (3.0, 3.5), strict=True):
        cell["providers"]["others"] = {"median_ms": ms, "tflops": 50.0, "vs_ours": 9.0}
    assert "others 2 6.48 6.00-7.00" in Parsed(page([found])).words  # 3 and 3.5 ms by half a millisecond


def test_our_own_call_without_modifiers_is_no_peer_to_be_faster_than() -> None:
    found = cells_of(2.0)
    [cell] = found["cells"]
    cell |= {"fastest_peer": "plain", "providers": {"us": cell["providers"]["us"], "plain": cell["providers"]["them"]}}
    words = Parsed(page([found])).words
    assert "0.50 times the speed of our own call without the modifiers in the geometric mean of 1 cell" in words
    assert "as it is in" not in words and "Fastest peer:" not in words


def test_the_conditions_are_all_there() -> None:
    found, words = results("h200/forward"), Parsed(page_of("h200/forward")).words
    for fact in (found["date"], found["commit"]["hash"], "NVIDIA H200", "132", "139.8", "2.11.0+cu130", "91900"):
        assert fact in words
    for fact in found["conditions"].values():
        assert str(fact) in words


def test_who_was_not_measured_and_why() -> None:
    words = Parsed(page_of("h200/backward")).words
    reason = "its backward adds to dQ in one order up to D 128, not at 256"
    assert words.endswith(f"gluon deterministic {reason} 12 Who has no figure, and in how many cells.")
    assert Parsed(page_of("h200/forward")).words.endswith("Everybody who was asked was measured in every cell.")
    found = cells_of(1.0, 1.0)
    found["cells"][0]["providers"]["broken"] = {"failed": "OutOfMemory: so much", "right": False}
    found["cells"][1]["providers"]["off"] = {"error": 3e-1, "allowed": 1e-2, "right": False}
    words = Parsed(page([found])).words
    assert "broken failed: OutOfMemory: so much 1" in words
    assert "off wrong: error 3.00e-01, allowed 1.00e-02 1" in words
    assert "off: at most 30.00" in words


def test_memory_is_drawn_where_it_was_measured_and_else_said_to_be_missing() -> None:
    found = cells_of(1.0, 1.0, 1.0)
    assert "Not measured: the results have no peak bytes." in page([found])
    for n, cell in enumerate(found["cells"]):
        cell["providers"]["us"] |= {"peak_bytes": 3 * 2 ** (20 + n), "gb_per_s": 2.5}
    text = page([found])
    (panels,) = contents([found])["sections"][0]["memory"]
    assert "peak memory over length" in panels.plots[0].described
    assert "<td>2.50</td><td>3 MiB</td>" in text and "no peak bytes" not in text


def test_a_missed_bar_is_named_and_marked() -> None:
    found = cells_of(1.0, 1.2)
    for cell in found["cells"]:
        cell |= {"bar": 1.05, "met": cell["ratio"] <= 1.05}
    text = page([found])
    assert "Of the 2 held to a bar, 1 miss it: full 2048, forward." in text
    assert ">0.83!</td>" in text and ">1.00</td>" in text


# Colours


def test_a_speed_is_coloured_by_how_far_it_is_from_one() -> None:
    speeds = (0.4, 0.6, 0.7, 0.85, 0.95, 0.99, 1.0, 1.01, 1.05, 1.2, 1.3, 1.7, 2.5)
    assert [heat(speed) for speed in speeds] == "w5 w4 w3 w2 w1 h0 h0 h0 f1 f2 f3 f4 f5".split()


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_letters_and_lines_can_be_told_from_the_paper(theme: dict[str, str]) -> None:
    def light(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((light(one), light(other)))
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(theme[name], theme["paper"]) >= 4.5 for name in ("ink", "quiet"))
    assert all(contrast(theme[f"s{n}"], theme["paper"]) >= 4.5 for n in range(COLOURS))
    style = (FOLDER / "page.css").read_text()
    heats = re.findall(r"\.(\w\d) \{ background: color-mix\(in srgb, var\(--paper\), var\(--(\w+)\) (\d+)%\)", style)
    assert len(heats) == 10
    for _, end, share in heats:
        parts = zip(*(bytes.fromhex(theme[name][1:]) for name in ("paper", end)), strict=True)
        mixed = bytes(round(a + (b - a) * int(share) / 100) for a, b in parts)
        assert contrast(theme["ink"], f"#{mixed.hex()}") >= 4.5


# Refusals, and what files may hold


def test_no_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="results: expected at least one; got none"):
        write_page([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_everything_from_a_file_is_escaped() -> None:
    evil = "<script>alert('&\"')</script>{0}"
    clean = page([cells_of(1.0, 1.5, 2.0)])

    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            names = {key: f"{key}{evil}" for key in ("us", "them", "repeats", "torch") if key in value}
            return {names.get(key, key): poisoned(one) for key, one in value.items()}
        if isinstance(value, list):
            return [poisoned(one) for one in value]
        return f"{value}{evil}" if isinstance(value, str) else value

    found = cells_of(1.0, 1.5, 2.0)
    found["cells"][0]["providers"]["away"] = {"unavailable": "no"}
    found = poisoned(found)
    found["versions"]["torch"] = "9.9"
    parsed = Parsed(page([found]))
    assert parsed.count("script") == 0 and parsed.misnested == []
    assert parsed.words.count(evil) > 20
    assert {key for _, attrs in parsed.tags for key in attrs} <= {
        key for _, attrs in Parsed(clean).tags for key in attrs
    }


def test_results_with_nobody_timed_still_make_a_page() -> None:
    found = cells_of(1.0)
    found["cells"][0] |= {"ours": None, "fastest_peer": None, "ratio": None, "providers": {"us": {"unavailable": "no"}}}
    words = Parsed(page([found])).words
    assert "No cell has both ours and a peer" in words and "Nobody was timed." in words


def cells_of(*ratios: float) -> dict[str, Any]:
    """Results of ours and them at 1k, 2k, ... keys, with the given ratios and the fewest keys."""
    cells = []
    for n, ratio in enumerate(ratios):
        ours = {"error": 1e-3, "allowed": 1e-2, "right": True, "median_ms": ratio, "tflops": 100 / ratio}
        theirs = copy.deepcopy(ours) | {"median_ms": 1.0, "tflops": 100.0}
        cells.append(
            {
                "name": f"full {1024 << n}",
                "direction": "forward",
                "problem": {"B": 1, "Tq": 1024 << n, "Tk": 1024 << n, "D": 64},
                "providers": {"us": ours, "them": theirs},
                "ours": "us",
                "fastest_peer": "them",
                "ratio": ratio,
                "bar": None,
            }
        )
    return {
        "suite": "made up",
        "commit": {"hash": None, "dirty": None},
        "date": "2026-01-02T03:04:05Z",
        "versions": {"torch": "9.9"},
        "machine": {"name": "A machine"},
        "conditions": {"timing": "a sundial", "repeats": 3},
        "cells": cells,
    }
