"""The first call of a process: the benchmark's refusals, and the bars of its results file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import first_call

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200" / "first_call.json"


def test_a_process_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "PROCESS", "raise ValueError('no GPU of {shape}')")
    with pytest.raises(SystemExit, match="warm cache: ValueError: no GPU"):
        first_call.first_call("warm cache", tmp_path, tmp_path)


def test_machine_code_that_is_not_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = "import os, pathlib; pathlib.Path(os.environ['TRITON_CACHE_DIR'], 'kernel.cubin').touch(); print('{{}}')"
    monkeypatch.setattr(first_call, "PROCESS", compiles)
    with pytest.raises(SystemExit, match="something was compiled"):
        first_call.first_call("machine code", tmp_path, tmp_path)


def test_each_way_runs_in_turn_with_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def first_call_of(way: str, machine_code: Path, cache: Path) -> dict[str, float]:
        seen.append((way, cache.name))
        return {"forward": float(len(seen))}

    monkeypatch.setattr(first_call, "first_call", first_call_of)
    found = first_call.measure(tmp_path, 3)
    assert [way for way, _ in seen] == ["warm cache", *first_call.WAYS, *first_call.WAYS[:2] * 2]
    assert {cache for way, cache in seen if way == "warm cache"} == {"warm"}
    assert len({cache for way, cache in seen if way == "machine code"}) == 3
    assert found["machine code"]["forward"] == {"median": 5.0, "all": [2.0, 5.0, 7.0]}


def test_a_folder_without_machine_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["first_call", "--machine-code", str(tmp_path)])
    with pytest.raises(SystemExit):
        first_call.main()
    assert "--machine-code: expected a folder written by prebuild" in capsys.readouterr().err


def test_the_bars_are_met() -> None:
    """With machine code 1.0 s, with the backward 1.5 s; with a warm cache 1 s more than `import triton`."""
    if not FILE.exists():
        command = f"python -m benchmarks.first_call --machine-code CODE --out benchmarks/results/h200/{FILE.name}"
        pytest.skip(f"no {FILE.name} yet; on the H200: {command}")
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    assert found["machine"]["name"] == "NVIDIA H200" and found["repeats"] >= 3
    carried, warm = found["seconds"]["machine code"], found["seconds"]["warm cache"]
    assert carried["forward"]["median"] <= 1.0 and carried["forward + backward"]["median"] <= 1.5
    assert warm["forward"]["median"] - warm["import triton"]["median"] <= 1.0
