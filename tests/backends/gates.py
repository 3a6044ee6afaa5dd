"""Run the compile gates, and keep a record of what passed: which sources, with which Triton releases.

    python tests/backends/gates.py          # with the installed Triton
    python tests/backends/gates.py --all    # with each of RELEASES in turn, from .venv/triton-X
    python tests/backends/gates.py --check  # run nothing; whether the record has these sources and the installed Triton

The same sources, compiled by the same Triton, give the same machine code. So a test of `*_compiled.py` is skipped where
the record says that it passed with these very sources and this release; `GATES=all` in the environment runs it. The
record, gates_passed.json, is committed with a change of a kernel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("gates_passed.json")
PACKAGE = ROOT / "src" / "stream_attention"
TOOLS = ROOT / "src" / "stream_attention_tools"
SOURCES = (
    *(PACKAGE / name for name in ("base", "gpu", "backends", "dispatch/plan.py")),
    *(TOOLS / name for name in ("offline.py", "testing/inputs.py", "testing/offline.py")),
    ROOT / "tests" / "backends",
    ROOT / "benchmarks" / "results" / "h200",
)
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Each is gated. The Hopper kernels are enabled for those that ran on a GPU: `backends.installed.HOPPER_TRITON`."""
GATED_TRITON = tuple(triton.rpartition(".")[0] for triton in RELEASES)
"""The same as releases: 3.6, not 3.6.0."""


def digest() -> str:
    """One number for the sources that the gates depend on, and for the machine code that is recorded."""
    found = hashlib.sha256()
    for source in SOURCES:
        files = (
            [source] if source.is_file() else sorted(source.rglob("*.py")) + sorted(source.glob("machine_code_*.json"))
        )
        for file in files:
            if file.samefile(__file__):  # what records is nothing that is compiled or looked at
                continue
            found.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return found.hexdigest()


def installed() -> str | None:
    """The version of the Triton that is found first, if there is any."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _release(triton: str) -> str:
    return ".".join(triton.split(".")[:2])


def _record() -> dict[str, Any]:
    """What is recorded of these sources; nothing, if that is of others."""
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    sources = digest()
    return found if found.get("sources") == sources and "releases" in found else {"sources": sources, "releases": {}}


def unchanged() -> bool:
    """Whether the gates were passed by exactly these sources with the installed Triton."""
    triton = installed()
    return triton is not None and _record()["releases"].get(_release(triton), {}).get("triton") == triton


def record(triton: str, passed: int, skipped: int) -> None:
    """Note that the gates passed. What other releases passed stays, if it was with these sources."""
    noted = _record()
    row = {"triton": triton, "date": time.strftime("%Y-%m-%d"), "passed": passed, "skipped": skipped}
    noted["releases"] = dict(sorted({**noted["releases"], _release(triton): row}.items()))
    RECORD.write_text(json.dumps(noted, indent=1) + "\n")


class _Counts:
    """A plugin of pytest that keeps how many tests passed, were skipped, or were not selected."""

    passed = skipped = deselected = 0

    def pytest_deselected(self, items: list[Any]) -> None:
        self.deselected += len(items)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        self.passed, self.skipped = (len(terminalreporter.stats.get(name, [])) for name in ("passed", "skipped"))


def is_selection(arguments: list[str], deselected: int) -> bool:
    """Whether arguments of pytest leave some of the gates out. With workers it is they who deselect, so words count."""
    words = [
        argument for argument in arguments if argument.startswith(("-k", "-m", "--lf", "--last", "--ff", "--dese"))
    ]
    return bool(words or deselected or any(".py" in argument or "::" in argument for argument in arguments))


def run(arguments: list[str]) -> bool:
    """Run the gates with the installed Triton, and record it if they pass."""
    import pytest
    import triton

    assert triton.__version__ == installed(), f"{triton.__file__} is not the Triton {installed()} that was asked for"
    os.environ |= {"GATES": "all", "OMP_NUM_THREADS": "1"}
    os.chdir(ROOT)
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "backends").rglob("test_*_compiled.py"))
    counts, began = _Counts(), time.time()
    failed = pytest.main([*files, *arguments], plugins=[counts]) or not counts.passed
    said = "failed" if failed else f"{counts.passed} passed, {counts.skipped} skipped"
    if not failed and is_selection(arguments, counts.deselected):
        said += ", not recorded: only some of them ran"
    elif not failed:
        record(triton.__version__, counts.passed, counts.skipped)
    print(f"gates with Triton {triton.__version__}: {said}, {time.time() - began:.0f} s", flush=True)
    return not failed


def _unpacked(triton: str) -> Path:
    """The folder with a version of Triton, and nothing that it asks for. pip fetches it once."""
    folder = ROOT / ".venv" / f"triton-{triton}"
    if not (folder / ".complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder), f"triton=={triton}"], check=True)
        (folder / ".complete").touch()
    return folder


def run_all(arguments: list[str]) -> bool:
    """Run the gates with each release, in a process that finds it before what is installed; all else stays."""
    said = []
    for triton in RELEASES:
        folders = [] if triton == installed() else [str(_unpacked(triton))]
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        began = time.time()
        done = subprocess.run([sys.executable, __file__, *arguments], env={**os.environ, "PYTHONPATH": path})
        said.append((triton, done.returncode, time.time() - began))
    for triton, code, seconds in said:
        print(f"Triton {triton}: {'failed' if code else 'passed'} in {seconds:.0f} s")
    return not any(code for _, code, _ in said)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the compile gates and record that they passed.")
    parser.add_argument("--all", action="store_true", help=f"with each of {', '.join(RELEASES)}, which pip fetches")
    parser.add_argument("--check", action="store_true", help="run nothing: say whether these sources have passed")
    options, arguments = parser.parse_known_args()  # the rest is pytest's
    if options.check:
        passed = unchanged()
        print(
            f"gates with Triton {installed()}: {'passed' if passed else 'not passed by these sources; run make gates'}"
        )
        return 0 if passed else 1
    return 0 if (run_all if options.all else run)(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
