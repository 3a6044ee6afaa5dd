"""What CI leaves out because it has passed before is exactly what has not changed."""

from __future__ import annotations

from pathlib import Path

import gates
import pytest


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one source of gates that have passed."""
    file = tmp_path / "kernels" / "kernel.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")
    for name, value in {"ROOT": tmp_path, "SOURCES": (file.parent,), "RECORD": tmp_path / "passed.json"}.items():
        monkeypatch.setattr(gates, name, value)
    gates.record()
    return file


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


def test_another_compiler_has_not(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "version", lambda name: "0.0")
    assert not gates.unchanged()


def test_nothing_that_was_never_recorded_has(source: Path) -> None:
    gates.RECORD.unlink()
    assert not gates.unchanged()


def test_the_sources_are_there() -> None:
    assert all(source.exists() for source in gates.SOURCES)
