"""python -m stream_attention.cli.report [--check] FILE...: write results into the tables of pages.

A page holds a table between two comments, and the first names the results by their place under benchmarks/results:

    <!-- results:cpu/cpu -->
    <!-- /results -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..benchmark.results import load, markdown

_MARKED = re.compile(r"(<!-- results:(?P<name>[\w./-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def render(page: str, folder: Path) -> str:
    """The page with every marked table written anew from the results in `folder`."""

    def table(found: re.Match[str]) -> str:
        text = markdown(load(folder / f"{found['name']}.json"))
        return f"{found[1]}{text}\n{found[3]}"

    return _MARKED.sub(table, page)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m stream_attention.cli.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("pages", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    options = parser.parse_args(argv)
    stale = []
    for path in options.pages:
        page = path.read_text()
        fresh = render(page, options.results)
        if fresh != page:
            stale.append(path)
            if not options.check:
                path.write_text(fresh)
    for path in stale:
        print(f"{path} {'is stale' if options.check else 'rewritten'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
