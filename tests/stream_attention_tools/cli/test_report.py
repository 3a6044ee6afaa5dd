"""Tables and pictures in pages are written from results files, and the repository's are up to date."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stream_attention_tools.bench.results import markdown
from stream_attention_tools.bench.schema import lacking
from stream_attention_tools.cli import report
from stream_attention_tools.report import models
from stream_attention_tools.report.page import contents, page

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[3]

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
            "problem": {"Tk": 1024},
            "providers": {
                "auto": {"median_ms": 1.5, "tflops": 1.0},
                "sdpa": {"median_ms": 0.75, "tflops": 2.0},
                "fa3": {"unavailable": "not here"},
            },
            "ours": "auto",
            "fastest_peer": "sdpa",
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
        "time by perf_counter: medians.\n\n"
        "| problem | direction | auto | sdpa | speed, ours / fastest peer | bar |\n"
        "|---|---|---|---|---|---|\n"
        "| full 1024 | forward | 1.5 ms | 750 us | 0.50 | 0.95 missed |\n"
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


def test_versions_that_were_tested_together_are_a_row_each(tmp_path: Path) -> None:
    def write(name: str, found: Any) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))

    def clone(exit: int, **versions: str) -> dict[str, Any]:
        tests = {"parallel": "=== 70 passed, 3 skipped in 1 s ===", "serial": "=== 7 passed in 1 s ==="}
        return {"date": "2026-01-02", "versions": versions, "steps": [{"exit": 0}, {"exit": exit, "tests": tests}]}

    of_cpu = {"torch": "9.9", "triton": "3.6.0", "python": "3.11.2", "transformers": "5.0"}
    failed = clone(1, **of_cpu | {"torch": "9.8"})
    write("benchmarks/results/cpu/fresh.json", {"newest": clone(0, **of_cpu), "oldest": failed})
    of_gpu = {"gpu": "A GPU", "versions": {"torch": "9.7", "triton": "3.6.0", "python": "3.12.3"}}
    for count, name in ((2, "gpu_tests_a"), (3, "triton-3.6/gpu_tests_b")):
        write(f"benchmarks/results/h200/{name}.json", {"passed": count, "date": f"2026-01-0{count}", **of_gpu})
    write("tests/backends/gates_passed.json", {"releases": {"3.6": {"triton": "3.6.0"}}})
    page = report.render("<!-- versions -->\nold\n<!-- /versions -->\n", tmp_path / "benchmarks" / "results")
    assert page.splitlines()[3:-1] == [
        "| 9.9 | 3.6.0 | 3.11.2 | 5.0 | CPU | 77 | 2026-01-02 |",
        "| 9.7 | 3.6.0 | 3.12.3 |  | A GPU | 5 | 2026-01-03 |",
        "|  | 3.6.0 |  |  | no device | the compile gates |  |",
    ]


# Pictures


def grid(direction: str, peak: float) -> dict[str, Any]:
    """Results over three lengths, ours at half their speed."""

    def timed(tflops: float) -> dict[str, Any]:
        return {"median_ms": 100 / tflops, "tflops": tflops}

    cells = [
        {
            "name": f"d64 causal {length}",
            "direction": direction,
            "problem": {"Tk": length, "D": 64},
            "providers": {
                "triton": timed(speed / 2),
                "triton deterministic": timed(speed / 4),
                "fa3": timed(speed),
            },
            "ours": "triton",
            "fastest_peer": "fa3",
            "ratio": 2.0,
            "bar": None,
        }
        for length, speed in ((512, peak / 4), (1024, peak / 2), (2048, peak))
    ]
    return RESULTS | {"cells": cells}


@pytest.fixture
def marked(results: Path, tmp_path: Path) -> list[str]:
    """The command's arguments for a page with an overview of two grids."""
    for direction, peak in (("forward", 800.0), ("backward", 400.0)):
        (results / "cpu" / f"{direction}.json").write_text(json.dumps(grid(direction, peak)))
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- overview:cpu/forward,cpu/backward d64 causal -->\n<!-- /overview -->\nafter\n")
    return [str(page), "--results", str(results), "--figures", str(tmp_path / "docs" / "figures")]


def test_an_overview_is_pictures_and_a_table(marked: list[str], tmp_path: Path) -> None:
    assert report.main(marked) == 0
    page = (tmp_path / "docs" / "page.md").read_text()
    assert (
        "|  | TFLOP/s | x fa3 |\n|---|---|---|\n"
        "| forward, head dim 64 | 100-400 | 0.50 |\n| backward, head dim 64 | 50-200 | 0.50 |\n"
    ) in page
    assert 'alt="d64 causal, forward, 512 to 2k tokens, TFLOP/s: triton 100-400, fa3 200-800"' in page
    assert "A CPU, 2 threads, torch 9.9, 2026-01-02, commit 0123456789ab with changes.\n<!-- /overview -->" in page
    linked = set(re.findall(r'(?:src|srcset)="(.*?)"', page))
    written = {path.relative_to(tmp_path / "docs").as_posix() for path in (tmp_path / "docs" / "figures").iterdir()}
    assert (
        linked
        == written
        == {
            f"figures/cpu_{direction}_d64_causal{theme}.svg"
            for direction in ("forward", "backward")
            for theme in ("", "_dark")
        }
    )


def test_pictures_are_svg_with_every_peer_and_no_date(marked: list[str], tmp_path: Path) -> None:
    assert report.main(marked) == 0
    light, dark = (
        (tmp_path / "docs" / "figures" / f"cpu_forward_d64_causal{theme}.svg").read_text() for theme in ("", "_dark")
    )
    for svg in (light, dark):
        root = ElementTree.fromstring(svg)
        assert (root.tag, root.get("width")) == ("{http://www.w3.org/2000/svg}svg", "360")
        assert {"d64 causal, forward", "TFLOP/s", "triton", "fa3", "512", "2k"} <= {node.text for node in root.iter()}
        assert "deterministic" not in svg and "2026" not in svg and "var(" not in svg
    assert light != dark


@pytest.mark.parametrize("change", ["picture edited", "picture gone", "page edited", "results changed"])
def test_check_fails_on_whatever_is_stale_and_writes_nothing(marked: list[str], tmp_path: Path, change: str) -> None:
    assert report.main(marked) == 0
    assert report.main([*marked, "--check"]) == 0
    picture = tmp_path / "docs" / "figures" / "cpu_backward_d64_causal_dark.svg"
    page = tmp_path / "docs" / "page.md"
    if change == "picture edited":
        picture.write_text(picture.read_text() + " ")
    elif change == "picture gone":
        picture.unlink()
    elif change == "page edited":
        page.write_text(page.read_text().replace("0.50", "0.51"))
    else:
        (tmp_path / "cpu" / "backward.json").write_text(json.dumps(grid("backward", 404.0)))
    before = {path: path.read_bytes() for path in (tmp_path / "docs").rglob("*.*")}
    assert report.main([*marked, "--check"]) == 1
    assert {path: path.read_bytes() for path in (tmp_path / "docs").rglob("*.*")} == before
    assert report.main(marked) == 0
    assert report.main([*marked, "--check"]) == 0


# The page of plots


def test_html_is_written_from_results_files(marked: list[str], results: Path, tmp_path: Path) -> None:
    files = [str(results / "cpu" / f"{direction}.json") for direction in ("forward", "backward")]
    assert report.main(["--html", str(tmp_path / "html"), *files]) == 0
    text = (tmp_path / "html" / "index.html").read_text()
    assert text.count("<section ") == 2 and "d64 causal 2048, backward" in text


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.md"], "none.md: expected a page; got No such file or directory."),
        (["lost.md"], "lost.json: expected a results file; got No such file or directory."),
        (
            ["unknown.md"],
            "unknown.md: overview: expected a problem that the results have at three lengths or more; got",
        ),
        (["--html", "out", "none.json"], "none.json: expected a results file; got No such file or directory."),
        (
            ["--html", "out", "other.json"],
            "other.json: expected a results file of the benchmark command; missing or of another kind: cells",
        ),
        (
            ["--html", "out", "three.json"],
            "three.json: expected a results file of the benchmark command; missing or of another kind: cells",
        ),
        (
            ["--html", "out", "bare.json"],
            "bare.json: expected a results file of the benchmark command; missing or of another kind: cells[0].",
        ),
        (
            ["--html", "out", "untold.json"],
            "; missing or of another kind: cells[0].providers['auto'].error, cells[0].providers['auto'].all",
        ),
        (["--html", "out", "page.md"], "page.md: expected JSON; got"),
        (["--html", "out", "binary.json"], "binary.json: expected JSON; got"),
        (["--html", "page.md", "cpu/run.json"], "--html page.md cannot be written: Not a directory."),
        (["--figures", "page.md", "marked.md"], ".svg cannot be written: Not a directory."),
        (["binary.json"], "binary.json: expected a page in UTF-8; got"),
        (
            ["--html", "out", "deep.json"],
            "deep.json: expected a results file of the benchmark command; it is nested to",
        ),
        (
            ["--html", "out", "typed.json"],
            "missing or of another kind: cells[0].providers['auto'].median_ms, cells[0].",
        ),
        (
            ["typed.md"],
            "typed.json: expected a results file of the benchmark command; missing or of another kind: cells",
        ),
        (["--html", "out", "cpu/run.json", "--check"], "--check: expected pages; got --html"),
        (["versions.md"], "versions: expected what the runs of the tests have left; got No such file"),
    ],
)
def test_what_cannot_be_read_is_an_error_in_one_line(
    marked: list[str],
    tmp_path: Path,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lost.md").write_text("<!-- results:cpu/lost -->\n<!-- /results -->\n")
    Path("unknown.md").write_text("<!-- overview:cpu/forward d512 -->\n<!-- /overview -->\n")
    Path("marked.md").write_text("<!-- overview:cpu/forward d64 causal -->\n<!-- /overview -->\n")
    Path("other.json").write_text("[]")
    Path("three.json").write_text("3")
    Path("bare.json").write_text(json.dumps(RESULTS | {"cells": [{}]}))
    Path("untold.json").write_text(json.dumps(RESULTS | {"cells": [RESULTS["cells"][0] | {"providers": {"auto": {}}}]}))
    Path("binary.json").write_bytes(b"\xff\xfe")
    Path("page.md").write_text("no JSON")
    Path("deep.json").write_text("[" * 100_000)
    entry = {"median_ms": "1.5", "tflops": float("inf"), "peak_bytes": [3]}
    Path("typed.json").write_text(
        json.dumps(RESULTS | {"cells": [RESULTS["cells"][0] | {"providers": {"auto": entry}}]})
    )
    Path("versions.md").write_text("<!-- versions -->\n<!-- /versions -->\n")
    Path("typed.md").write_text("<!-- results:typed -->\n<!-- /results -->\n")
    assert report.main([*arguments, "--results", "."]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not Path("out").exists()


OTHERWISE = (None, True, "x", "", 3, -1, 0, 1.5, [], {"a": 1}, float("nan"), float("inf"), 1e308, 10**400)


def places(found: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, one in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        yield (*at, key)
        yield from places(one, (*at, key))


def changed(found: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value in one place."""
    if not place:
        return value
    key, *rest = place
    copy = found.copy()
    copy[key] = changed(found[key], tuple(rest), value)
    return copy


@pytest.mark.parametrize(
    "name", ["h200/forward", "h200/decode", "h200/modifiers", "h200/fp8", "h200/models", "cpu/cpu"]
)
def test_a_field_of_another_type_is_named_or_does_no_harm(name: str) -> None:
    """Every field of a cell and of the file, one at a time: a reader either has a page or a reason."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    found["cells"] = [cell for cell in found["cells"] if cell["name"].startswith("d128 causal")][:3] or found["cells"][
        :1
    ]
    refused = written = 0
    ours = found["cells"][0]["ours"]
    drawn = {("cells", 0, "providers", ours, key) for key in ("median_ms", "tflops", "peak_bytes", "error")}
    for place in places(found):
        for value in OTHERWISE:
            other = changed(found, place, value)
            if lacking(other):
                refused += 1
                continue
            written += 1
            if found.get("suite") == models.SUITE:
                models.markdown(other)
            else:
                assert contents([other]) and markdown(other)
                assert place not in drawn or page([other])  # to draw takes seconds
    assert refused > 300 and written > 300


# This repository


def test_the_tables_and_pictures_of_this_repository_are_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pages = [Path("README.md"), *Path("docs").glob("*.md")]
    marks = ("<!-- results:", "<!-- overview:", "<!-- versions -->")
    marked = [page for page in pages if any(mark in page.read_text() for mark in marks)]
    assert {Path("README.md"), Path("docs/performance.md"), Path("docs/troubleshooting.md")} <= set(marked)
    assert report.main([*map(str, marked), "--check"]) == 0


def test_no_picture_is_left_over() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    pictures = list((ROOT / "docs" / "figures").iterdir())
    assert pictures and [path.name for path in pictures if path.name not in pages] == []
