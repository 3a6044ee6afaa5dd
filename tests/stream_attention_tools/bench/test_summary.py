"""What is read from a results file, and how figures are written."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stream_attention_tools.bench import summary


def cell(name: str, keys: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "direction": "forward", "problem": {"Tk": keys}, "providers": {}, "ours": "us"} | more


@pytest.mark.parametrize(
    ("name", "keys", "label"),
    [
        ("d64 full 512", 512, "d64 full"),
        ("gqa 8/2 causal 1024 fp32", 1024, "gqa 8/2 causal fp32"),
        ("window 1024", 4096, "window 1024"),  # no length of the cell
        ("1024", 1024, "1024"),
    ],
)
def test_a_label_is_the_name_without_the_length(name: str, keys: int, label: str) -> None:
    assert summary.label(cell(name, keys)) == label


def test_rows_are_by_direction_and_label_and_are_lines_from_three_lengths_on() -> None:
    cells = [cell(f"a {n}", n) for n in (4, 1, 2)] + [cell("b 1", 1), cell("a 1", 1, direction="backward")]
    found = summary.rows(cells)
    assert [(row.label, row.direction, row.is_line) for row in found] == [
        ("a", "forward", True),
        ("b", "forward", False),
        ("a", "backward", False),
    ]
    assert [summary.length(one) for one in found[0].cells] == [1, 2, 4]
    assert not summary.rows([cell(f"a {n}", 7) for n in range(3)])[0].is_line
    assert not summary.rows([cell("a 7", 7)] * 3)[0].is_line  # one length, three times


def test_speeds_are_read_in_one_unit() -> None:
    def of(**entry: float) -> tuple[str, float]:
        one = {"median_ms": 1.0} | entry
        found = summary.rate({"cells": [cell("a", 1, providers={"us": one})]})
        return found.unit, found.of(one)

    assert of(tflops=321.0) == ("TFLOP/s", 321.0)
    assert of(tflops=0.155) == ("GFLOP/s", 155.0)
    assert of(tflops=5.0, tb_per_s=1.2) == ("TB/s of K and V", 1.2)


def test_speed_over_counts_cells_that_have_both() -> None:
    def timed(**ms: float) -> dict[str, Any]:
        return {name: {"median_ms": value} for name, value in ms.items()}

    cells = [cell("a", 1, providers=timed(us=2.0, them=3.0)), cell("b", 1, providers=timed(us=2.0))]
    assert summary.speed_over(cells, "them") == [1.5]
    assert summary.speed_over(cells, "us") == []
    assert summary.is_variant("us deterministic", cells)
    assert not any(summary.is_variant(name, cells) for name in ("us", "them", "sdpa flash"))


def test_strictness_is_error_by_what_is_allowed() -> None:
    assert summary.strictness({"error": 1.0, "allowed": 4.0}) == 0.25
    assert summary.strictness({"error": 0.0, "allowed": 0.0}) == 0.0
    assert summary.strictness({"error": 1.0, "allowed": 0.0}) == math.inf
    assert summary.strictness({"unavailable": "no"}) is None


def test_figures_are_written_with_three_digits_and_their_unit() -> None:
    assert [summary.figure(x) for x in (0, 0.1551, 4.6, 20.0, 99.96, 321.4, 1234.5)] == (
        "0 0.155 4.60 20 100 321 1234".split()
    )
    assert [summary.duration(x) for x in (0.0287, 0.98, 1.3, 2345.0)] == ["28.7 µs", "980 µs", "1.30 ms", "2.35 s"]
    assert summary.durations(0.9, 1.1) == "0.900-1.10 ms"
    assert [summary.size(x) for x in (12, 2048, 1.5 * 2**20, 3 * 2**30)] == ["12 B", "2 KiB", "1.50 MiB", "3 GiB"]
    assert [summary.short(x) for x in (512, 1000, 1024, 16384, 1 << 20)] == ["512", "1000", "1k", "16k", "1M"]
    assert (summary.span([1.2, 0.5]), summary.span([1.001, 1.002])) == ("0.50-1.20", "1.00")
    assert summary.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
