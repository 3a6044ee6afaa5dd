"""The study of double buffering: both builds run, are checked and compared; and the page says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.studies import double_buffer

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results" / "h200" / "cp_async.json"
PROGRAM = """#!/bin/sh
cat <<END
{"dtype": "bf16", "dim": 64, "seq": 8, "heads": 16, "causal": false, "iters": 20, "limit": 0.01,
 "single_ms": %s, "single_tflops": 6.0, "check": {"single_error": 0.001}}
END
"""


def test_the_builds_take_turns_and_the_ratio_is_of_their_medians(tmp_path: Path) -> None:
    for name, ms in (("on", 2.0), ("off", 3.0)):
        program = double_buffer.program(tmp_path, name)
        program.parent.mkdir()
        program.write_text(PROGRAM % ms)
        program.chmod(0o755)
    found = double_buffer.measure(tmp_path, rounds=3, rows={"a row": "--seq 8"})
    (row,) = found["rows"]
    assert row["ms"] == {"on": [2.0] * 3, "off": [3.0] * 3} and row["off_over_on"] == 1.5
    assert row["tflops"] == {"on": 9.0, "off": 6.0}  # the last run: 6 TFLOP/s in 3 ms
    assert found["largest_error"]["off"]["--dtype fp32 --dim 64"] == {"error": 0.001, "limit": 0.01}
    assert double_buffer.table(found).splitlines()[-1] == "| a row | 2.00 | 9 | 3.00 | 6 | 1.50 |"


def test_the_page_says_what_was_measured() -> None:
    if not FILE.exists():
        command = "python3 -m benchmarks.studies.double_buffer --out benchmarks/results/h200/cp_async.json"
        pytest.skip(f"no {FILE.name} yet; on the H200: {command}")
    found = json.loads(FILE.read_text())
    assert "H200" in found["machine"]["name"] and found["commit"]["hash"]
    assert [row["name"] for row in found["rows"]] == list(double_buffer.ROWS)
    for of_build in found["largest_error"].values():
        assert all(one["error"] <= one["limit"] for one in of_build.values())
    assert double_buffer.table(found) in (ROOT / "cuda" / "README.md").read_text()
