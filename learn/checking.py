"""What every check.py shares: it finds your function, has it checked, and says in words what is wrong.

A step's check.py has `complaints(candidate)`, which yields one sentence for each thing that is wrong, and

    def main(argv: list[str] | None = None) -> int:
        return checking.run(__file__, "name_of_the_function", complaints, argv)
"""

from __future__ import annotations

import argparse
import importlib.util
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
    """Check `name` of the exercise.py (or solution.py) beside `check_file`. Returns 0 if it is right."""
    parser = argparse.ArgumentParser(description=f"check {name} of exercise.py")
    parser.add_argument("--solution", action="store_true", help="check solution.py instead")
    file = Path(check_file).with_name("solution.py" if parser.parse_args(argv).solution else "exercise.py")
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


def load(file: Path, name: str) -> Callable[..., Any]:
    """A function of a file that is found by its path."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
