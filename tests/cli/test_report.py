"""Tables in pages are written from results files, and the repository's are up to date."""

import json
from pathlib import Path

import pytest

from stream_attention.cli import report

ROOT = Path(__file__).resolve().parents[2]

RESULTS = {
    "commit": {"hash": "0123456789abcdef", "dirty": True},
    "date": "2026-01-02T03:04:05Z",
    "versions": {"torch": "9.9"},
    "machine": {"name": "A CPU", "threads": 2},
    "conditions": {"timing": "perf_counter"},
    "cells": [
        {
            "name": "full 1024",
            "direction": "forward",
            "providers": {"auto": {"median_ms": 1.5}, "sdpa": {"median_ms": 0.75}, "fa3": {"unavailable": "not here"}},
            "ratio": 2.0,
            "bar": 1.05,
            "met": False,
        },
    ],
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "run.json").write_text(json.dumps(RESULTS))
    return tmp_path


def test_a_marked_table_is_written_and_the_rest_is_left_alone(results: Path) -> None:
    page = "before\n<!-- results:cpu/run -->\nold\n<!-- /results -->\nafter\n"
    assert report.render(page, results) == (
        "before\n<!-- results:cpu/run -->\n"
        "A CPU, 2 threads, torch 9.9, 2026-01-02, commit 0123456789ab with changes; "
        "time by perf_counter: medians, and the median of the ratios round by round.\n\n"
        "| problem | direction | auto | sdpa | time, ours / fastest peer | bar |\n"
        "|---|---|---|---|---|---|\n"
        "| full 1024 | forward | 1.5 ms | 750 us | 2.00 | 1.05 missed |\n"
        "<!-- /results -->\nafter\n"
    )
    assert report.render("no table here", results) == "no table here"


def test_check_fails_on_a_stale_page_and_writes_nothing(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- results:cpu/run -->\n<!-- /results -->\n")
    before = page.read_text()
    assert report.main([str(page), "--results", str(results), "--check"]) == 1
    assert page.read_text() == before
    assert report.main([str(page), "--results", str(results)]) == 0
    assert report.main([str(page), "--results", str(results), "--check"]) == 0
    assert "full 1024" in page.read_text()


def test_the_tables_of_this_repository_are_not_stale() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    marked = [page for page in pages if "<!-- results:" in page.read_text()]
    assert marked, "no page shows results"
    assert report.main([*map(str, marked), "--results", str(ROOT / "benchmarks" / "results"), "--check"]) == 0
