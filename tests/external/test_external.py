"""Other people's tests of the drop-in functions: what was committed of them, and themselves where they are."""

from __future__ import annotations

import json
import os
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from tests.external.__main__ import MARKS, PAGE, ROOT, run, tables
from tests.external.sample import Axis, sample
from tests.external.suites import SUITES

COMMAND = "python -m tests.external --folder $EXTERNAL_TESTS --out benchmarks/results/cpu/external.json --page"
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "external.json"
FOLDER = os.environ.get("EXTERNAL_TESTS")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    if not RESULTS.exists():
        pytest.skip(f"{RESULTS.name} is missing: {COMMAND}")
    return json.loads(RESULTS.read_text())


@pytest.mark.parametrize("name", SUITES)
def test_what_was_committed_has_no_failure_and_a_reason_for_everything_deselected(
    name: str, results: dict[str, Any]
) -> None:
    found, suite = results["suites"][name], SUITES[name]
    assert (found["repository"], found["commit"], found["file"]) == (suite.repository, suite.commit, suite.file)
    assert found["failed"] == 0 and found["failures"] == {}
    assert found["passed"] >= 50
    assert set(found["deselected"]) <= {entry.reason for entry in suite.deselected}
    run_or_skipped = found["passed"] + sum(found["skipped"].values())
    assert run_or_skipped + sum(found["deselected"].values()) + found["not sampled"] == found["parametrisations"]
    assert all(reason.strip() for reason in [*found["deselected"], *found["skipped"]])


def test_the_page_says_what_was_committed(results: dict[str, Any]) -> None:
    page = PAGE.read_text()
    assert page.split(MARKS[0])[1].split(MARKS[1])[0].strip() == tables(results)
    assert all(suite.commit in page for suite in SUITES.values())


def test_every_entry_of_the_list_has_a_reason_of_its_own() -> None:
    for suite in SUITES.values():
        assert all(entry.reason and entry.tests for entry in suite.deselected)


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None, reason="EXTERNAL_TESTS names no folder of other people's tests")
@pytest.mark.parametrize("name", SUITES)
def test_a_suite_passes(name: str) -> None:
    assert FOLDER is not None
    found = run(name, Path(FOLDER).resolve())
    assert found["failures"] == {} and found["passed"]


def test_the_sample_has_every_pair_without_what_is_deselected() -> None:
    axes = [Axis((name,), tuple((value,) for value in range(3))) for name in "abcd"]
    found = sample(axes, lambda row: "both are 2" if row["a"] == row["b"] == 2 else None, 81)
    assert found.of == 81 and found.dropped == {"both are 2": 9}
    met = {pair for row in found.rows for pair in combinations(sorted(row.items()), 2)}
    every = {((a, i), (b, j)) for (a, b), i, j in product(combinations("abcd", 2), range(3), range(3))} - {
        (("a", 2), ("b", 2))
    }
    assert met == every and found.pairs == (len(every), len(every))
    assert len(found.rows) < 20


def test_the_sample_is_as_small_as_it_is_told_and_the_same_each_time() -> None:
    axes = [Axis(("q", "k"), ((1, 2), (3, 4), (5, 6))), Axis(("shape",), (((1, 2),), ((1, 3),)))]
    first, again = (sample(axes, lambda row: None, 2) for _ in range(2))
    assert first == again and len(first.rows) == 2
    assert first.rows[0].keys() == {"q", "k", "shape"}
