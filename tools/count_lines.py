"""Count the lines of code of `stream_attention` and `stream_attention_tools`: no blank lines, comments or docstrings.

python -m tools.count_lines             by package and folder, and what is beyond the goals
python -m tools.count_lines --files     each file too
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SRC = Path(__file__).resolve().parents[1] / "src"
LIBRARY, TOOLS = "stream_attention", "stream_attention_tools"

MOST_IN_LIBRARY = 16_000
MOST_IN_BOTH = 26_000
LONGEST_FILE = 600
"""The goals. The first two are of lines of code, the third is of all lines of a file."""

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Count(NamedTuple):
    code: int
    lines: int  # all of them


def code_lines(source: str) -> set[int]:
    """Numbers, from 1, of the lines with code of a Python source. A string that is a statement is a docstring."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return code


def count(src: Path = SRC) -> dict[str, Count]:
    """Of every file of both packages, by its path under `src`."""
    found = {}
    for package in (LIBRARY, TOOLS):
        for path in sorted((src / package).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            found[path.relative_to(src).as_posix()] = Count(len(code_lines(source)), len(source.splitlines()))
    return found


def totals(counts: dict[str, Count]) -> Counter[str]:
    """Lines of code by folder: each package, and the folders right below it."""
    found: Counter[str] = Counter()
    for path, one in counts.items():
        package, *rest = path.split("/")
        found[package] += one.code
        if len(rest) > 1:
            found[f"{package}/{rest[0]}"] += one.code
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.count_lines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--files", action="store_true", help="list every file, the longest first")
    flags = parser.parse_args(argv)
    counts = count()
    by_folder = totals(counts)
    for folder, code in sorted(by_folder.items()):
        print(f"{code:7,}  {folder}")
    library, both = by_folder[LIBRARY], by_folder[LIBRARY] + by_folder[TOOLS]
    print(f"\n{library:7,}  {LIBRARY}; goal: at most {MOST_IN_LIBRARY:,}{missed_by(library - MOST_IN_LIBRARY)}")
    print(f"{both:7,}  both packages; goal: fewer than {MOST_IN_BOTH:,}{missed_by(both - MOST_IN_BOTH + 1)}")
    longest = sorted(counts.items(), key=lambda item: -item[1].lines)
    print(f"\nfiles of more than {LONGEST_FILE} lines" if not flags.files else "\nfiles", "(lines, of them code):")
    shown = [pair for pair in longest if flags.files or pair[1].lines > LONGEST_FILE]
    for path, one in shown:
        print(f"{one.lines:7,} {one.code:6,}  {path}")
    if not shown:
        print("   none")
    return 0


def missed_by(lines: int) -> str:
    return f", missed by {lines:,}" if lines > 0 else ", met"


if __name__ == "__main__":
    sys.exit(main())
