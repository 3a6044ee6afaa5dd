"""What every checker shares: it tells a wrong exercise from an installation that can run none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .outputs import ROOT

numpy = pytest.importorskip("numpy")
triton = pytest.importorskip("triton")  # before TRITON_INTERPRET is set: its own functions choose when it is imported

LEARN = ROOT / "learn"


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(LEARN))
    import checking

    return checking


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def say(its_numpy: str, its_triton: str) -> None:
        monkeypatch.setattr(numpy, "__version__", its_numpy)
        monkeypatch.setattr(triton, "__version__", its_triton)

    return say


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The check.py of a step whose exercise and solution have kernels."""
    for name in ("exercise", "solution"):
        (tmp_path / f"{name}.py").write_text("import triton\n\n\ndef answer():\n    return 42\n")
    return tmp_path / "check.py"


def complaints(candidate: Callable[[], int]) -> list[str]:
    return [] if candidate() == 42 else ["it is not 42"]


def never(candidate: Any) -> list[str]:
    raise AssertionError("was run")


# Versions


@pytest.mark.parametrize(
    ("its_numpy", "its_triton", "can"),
    [
        ("2.3.5", "3.6.0", True),
        ("2.4.0", "3.6.0", False),
        ("2.4.0rc1", "3.6.0+git123", False),
        ("3.0.0", "3.5.1", False),
        ("2.4.6", "3.7.1", True),
        ("2.10.0", "3.6.0", False),
        ("2.4.6", "3.10.0", True),
        ("1.26.4", "3.6.0", True),
    ],
)
def test_numpy_2_4_needs_triton_3_7(checking: Any, installed: Any, its_numpy: str, its_triton: str, can: bool) -> None:
    installed(its_numpy, its_triton)
    assert (checking.why_no_interpreter() == "") == can


def test_the_versions_that_we_pick_can(checking: Any, installed: Any) -> None:
    """Every NumPy of constraints.txt works with the oldest Triton that is supported, so with any."""
    pinned = re.findall(r"^numpy==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    oldest = re.search(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pinned and oldest
    for numpy in pinned:
        installed(numpy, f"{oldest[1]}.0")
        assert checking.why_no_interpreter() == ""


@pytest.mark.parametrize("missing", ["triton", "numpy"])
def test_what_is_not_installed_is_named(checking: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "platform", "linux")
    reason = checking.why_no_interpreter()
    assert "is not installed" in reason and f"pip install {missing}" in reason.replace("'", "")
    if missing == "triton":
        monkeypatch.setattr(sys, "platform", "win32")
        assert "try WSL" in checking.why_no_interpreter()


# The checker


@pytest.mark.parametrize("flags", [[], ["--solution"]], ids=str)
def test_the_checker_names_the_cause_before_it_runs_anything(
    checking: Any,
    installed: Any,
    step: Path,
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed("2.4.6", "3.6.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert checking.run(str(step), "answer", never, flags) == 2
    file = "solution.py" if flags else "exercise.py"
    assert capsys.readouterr().out == (
        f"{file} was not run. numpy 2.4.6 and Triton 3.6.0 are installed. Triton's interpreter before 3.7 cannot run "
        "loops with numpy 2.4 or newer, however they are written. Type: pip install 'numpy<2.4'\n"
    )


@pytest.mark.parametrize("case", ["versions that can", "kernels that are compiled", "no kernels"])
def test_otherwise_the_checker_checks(
    checking: Any,
    installed: Any,
    step: Path,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed("2.3.5" if case == "versions that can" else "2.4.6", "3.6.0")
    monkeypatch.setenv("TRITON_INTERPRET", "0" if case == "kernels that are compiled" else "1")
    if case == "no kernels":
        step.with_name("exercise.py").write_text("def answer():\n    return 42\n")
    assert checking.run(str(step), "answer", complaints, []) == 0
    assert capsys.readouterr().out == "exercise.py: answer is right.\n"


# The programs

INJECTED = """
import runpy, sys
import numpy
numpy.__version__ = "2.4.6"
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="this Triton's interpreter takes any numpy")
@pytest.mark.parametrize("file", ["06_flash_forward/flash.py", "06_flash_forward/check.py"])
def test_a_program_that_is_started_says_it_too(file: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", INJECTED, str(LEARN / file)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    said = ended.stdout + ended.stderr
    assert ended.returncode in (1, 2) and "Type: pip install 'numpy<2.4'" in said and "Traceback" not in said


def test_every_program_that_interprets_kernels_asks() -> None:
    interpreting = [path for path in LEARN.glob("*/*.py") if "\nINTERPRETED = " in path.read_text()]
    assert {path.name for path in interpreting} >= {"vec_add.py", "flash.py", "causal.py", "backward.py", "decode.py"}
    ask = "    if INTERPRETED:\n        checking.require_interpreter()\n"
    assert [path.name for path in interpreting if ask not in path.read_text()] == []
