"""How the tests of the learning path reach its files: by path, as nothing in learn/ is a package.

`step` is the folder that has the name of the test file: tests/learn/test_03_softmax.py gets learn/03_softmax. A test of
a step in Triton asks for one of two fixtures: `interpreter` where its kernels run, `compiler` where they are compiled
for a GPU that is not there. Each is skipped in the process of the other.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Step:
    """A step of the path. Files are named without `.py`."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], scratch: Path) -> None:
        self.folder = folder
        self._capsys = capsys
        self._scratch = scratch

    def load(self, name: str) -> ModuleType:
        """A file of the step as a module: a fresh one each time."""
        return _module(self.folder / f"{name}.py", f"learn_{self.folder.name}_{name}")

    def printed(self, name: str, *flags: str) -> str:
        """What `main(flags)` of a program prints, in this process."""
        program = self.load(name)
        self._capsys.readouterr()
        assert not program.main(list(flags)), "a program that ends well returns nothing or 0"
        return self._capsys.readouterr().out

    def started(self, name: str, *flags: str) -> str:
        """What a program prints that a reader starts: in a process of its own, with nothing set."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
        command = [sys.executable, str((self.folder / f"{name}.py").relative_to(ROOT)), *flags]
        env["OMP_NUM_THREADS"] = "1"
        ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def complaints(self, candidate: Callable[..., Any]) -> str:
        """What the step's checker says is wrong with a solution of its exercise, one thing a line; "" is right."""
        return "\n".join(self.load("check").complaints(candidate))

    def checked(self, *flags: str) -> tuple[int, str]:
        """Exit status and words of check.py on exercise.py as it stands in the tree, or with `--solution`."""
        check = self.load("check")
        self._capsys.readouterr()
        status = check.main(list(flags))
        return status, self._capsys.readouterr().out

    @property
    def text(self) -> str:
        return (self.folder / "README.md").read_text()

    @property
    def outputs(self) -> list[str]:
        """What the text says its commands print: each text block that follows a shell block."""
        return re.findall(r"^```bash\n[^`]*^```\n\n```text\n(.*?)^```$", self.text, re.DOTALL | re.MULTILINE)

    def mutant(self, *changes: tuple[str, str]) -> ModuleType:
        """solution.py with a mistake: each change replaces a text that it has exactly once."""
        source = (self.folder / "solution.py").read_text()
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        path = self._scratch / f"wrong_{len(list(self._scratch.iterdir()))}.py"
        path.write_text(source)  # Triton reads the source of a kernel from its file
        return _module(path, f"learn_{self.folder.name}_{path.stem}")


def _module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def step(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Step:
    scratch = tmp_path / "wrong"
    scratch.mkdir()
    return Step(ROOT / "learn" / request.path.stem.removeprefix("test_"), capsys, scratch)


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the programs set TRITON_INTERPRET. That must not outlive the test: other kernels are compiled."""
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))


@pytest.fixture
def interpreter() -> None:
    """triton.jit chooses between compiler and interpreter when it decorates, so these tests have their own process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1; make test does, in a process of its own")
    pytest.importorskip("triton")


@pytest.fixture
def compiler() -> Callable[[Callable[[], Any]], list[Any]]:
    """`compiler(launches)`: the kernels of these launches on CPU tensors, compiled for sm_90 instead of run."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("compiles: not in the process of the interpreter")
    pytest.importorskip("triton")
    from stream_attention_tools.offline import Form, launching_for

    def compiled(launches: Callable[[], Any]) -> list[Any]:
        forms: list[Form] = []
        with launching_for(90, forms.append):
            launches()
        return [form.compile() for form in forms]

    return compiled
