"""What every check.py shares: it finds your function, has it checked, and says in words what is wrong.

A step's check.py has `complaints(candidate)`, which yields one sentence for each thing that is wrong, and

    def main(argv: list[str] | None = None) -> int:
        return checking.run(__file__, "name_of_the_function", complaints, argv)

Before a kernel is interpreted it asks whether the installed numpy and Triton can, so that the learner is not blamed for
them; so do the programs, by `require_interpreter`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def run(
    check_file: str,
    name: str,
    complaints: Callable[[Callable[..., Any]], Iterable[str]],
    argv: list[str] | None = None,
) -> int:
    """Check `name` of the exercise.py (or solution.py) beside `check_file`.

    Returns:
        0 if it is right, 1 if it is not, 2 if what is installed cannot run it.
    """
    parser = argparse.ArgumentParser(description=f"check {name} of exercise.py")
    parser.add_argument("--solution", action="store_true", help="check solution.py instead")
    file = Path(check_file).with_name("solution.py" if parser.parse_args(argv).solution else "exercise.py")
    if _interprets(file) and (reason := why_no_interpreter()):
        print(f"{file.name} was not run. {reason}")
        return 2
    try:
        found = list(complaints(load(file, name)))
    except NotImplementedError as gap:
        found = [f"not written yet. {gap}"]
    except Exception as error:
        traceback.print_exc()
        found = [f"it raised {type(error).__name__}: {error}"]
    if not found:
        print(f"{file.name}: {name} is right.")
        return 0
    print(f"{file.name}: {name} is not right yet.")
    for sentence in found:
        print(f"- {sentence}")
    return 1


def require_interpreter() -> None:
    """End the program, with the reason, where Triton's interpreter cannot run here."""
    if reason := why_no_interpreter():
        sys.exit(reason)


def why_no_interpreter() -> str:
    """Why Triton's interpreter cannot run with what is installed, and what to type; "" if it can.

    For `range(start, stop, BLOCK)` it makes ints of arrays of one element, which NumPy 2.4 refuses. Triton 3.7 does it
    another way (tried: NumPy 2.4.6 with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0).
    """
    numpy, triton = (_version_of(package) for package in ("numpy", "triton"))
    if triton is None:
        hint = "Type: pip install triton" if sys.platform == "linux" else "It is for Linux; in Windows, try WSL."
        return f"Triton is not installed. {hint}"
    if numpy is None:
        return "numpy is not installed, and Triton's interpreter needs it. Type: pip install 'numpy<2.4'"
    if _numbers(numpy) >= (2, 4) and _numbers(triton) < (3, 7):
        return (
            f"numpy {numpy} and Triton {triton} are installed. Triton's interpreter before 3.7 cannot run loops with "
            "numpy 2.4 or newer, however they are written. Type: pip install 'numpy<2.4'"
        )
    return ""


def _interprets(file: Path) -> bool:
    """Whether a file has kernels, to be run by the interpreter."""
    has_kernels = re.search(r"^import triton\b", file.read_text(encoding="utf-8"), re.MULTILINE) is not None
    return has_kernels and os.environ.get("TRITON_INTERPRET") == "1"


def _version_of(package: str) -> str | None:
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def load(file: Path, name: str) -> Callable[..., Any]:
    """A function of a file that is found by its path."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
