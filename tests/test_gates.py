"""What is left out because it has passed before is exactly what has not changed, with a release that it passed with."""

from __future__ import annotations

import json
from pathlib import Path

import gates
import pytest

from stream_attention.backends.installed import HOPPER_TRITON


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one source of gates that have passed with Triton 3.6.0, which is installed."""
    file = tmp_path / "kernels" / "kernel.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")
    for name, value in {"ROOT": tmp_path, "SOURCES": (file.parent,), "RECORD": tmp_path / "passed.json"}.items():
        monkeypatch.setattr(gates, name, value)
    install("3.6.0", monkeypatch)
    gates.record("3.6.0", 10, 1)
    return file


def install(triton: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "installed", lambda: triton)


def test_the_same_sources_have_passed(source: Path) -> None:
    assert gates.unchanged()
    source.write_text("x = 1\n")
    assert gates.unchanged()


def test_a_changed_a_new_and_a_renamed_source_have_not(source: Path) -> None:
    source.write_text("x = 2\n")
    assert not gates.unchanged()
    source.write_text("x = 1\n")
    source.with_name("other.py").write_text("")
    assert not gates.unchanged()
    source.with_name("other.py").unlink()
    source.rename(source.with_name("renamed.py"))
    assert not gates.unchanged()


@pytest.mark.parametrize("triton", ["3.6.1", "3.9.0", None])
def test_with_another_triton_they_have_not(source: Path, monkeypatch: pytest.MonkeyPatch, triton: str | None) -> None:
    install(triton, monkeypatch)
    assert not gates.unchanged()


def test_each_release_has_its_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gates.record("3.9.0", 5, 0)
    releases = json.loads(gates.RECORD.read_text())["releases"]
    assert {name: (row["triton"], row["passed"], row["skipped"]) for name, row in releases.items()} == {
        "3.6": ("3.6.0", 10, 1),
        "3.9": ("3.9.0", 5, 0),
    }
    for triton in ("3.6.0", "3.9.0"):
        install(triton, monkeypatch)
        assert gates.unchanged()


def test_a_record_of_other_sources_says_nothing_of_these(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("x = 2\n")
    gates.record("3.9.0", 5, 0)
    assert json.loads(gates.RECORD.read_text())["releases"].keys() == {"3.9"}
    assert not gates.unchanged()


def test_nothing_that_was_never_recorded_has(source: Path) -> None:
    gates.RECORD.unlink()
    assert not gates.unchanged()


def test_the_sources_are_there() -> None:
    assert all(source.exists() for source in gates.SOURCES)


@pytest.mark.parametrize("arguments", [["-k", "decode"], ["-kdecode"], ["--lf"], ["tests/x.py::test_one"], ["-m", "a"]])
def test_a_selection_is_not_recorded(arguments: list[str]) -> None:
    assert gates.is_selection(["-n", "2", "--dist", "loadgroup", *arguments], 0)


def test_all_of_them_are_no_selection() -> None:
    assert not gates.is_selection(["-n", "2", "--dist", "loadgroup", "-q", "-x"], 0)
    assert gates.is_selection([], 1)


def test_every_enabled_release_is_gated() -> None:
    assert set(HOPPER_TRITON) <= set(gates.GATED_TRITON)
