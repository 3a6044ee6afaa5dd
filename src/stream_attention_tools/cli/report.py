"""python -m stream_attention.cli.report: write results into the tables and pictures of pages, or as an HTML page.

    python -m stream_attention.cli.report README.md docs/performance.md           # write what is marked in the pages
    python -m stream_attention.cli.report --check README.md docs/performance.md   # exit 1 if a page or picture is stale
    python -m stream_attention.cli.report --html DIR RESULTS.json...              # write DIR/index.html

A page marks a place with two comments, and the first names results by their place under benchmarks/results. `results`
is the table of one file. `overview` is one problem of each file over length, as pictures, and a short table:

    <!-- results:cpu/cpu -->
    <!-- /results -->

    <!-- overview:h200/forward,h200/backward d128 causal -->
    <!-- /overview -->
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stream_attention.files import write_file

from ..bench.results import load, markdown
from ..report import models, readme_report
from ..report.page import write_page
from .ending import quiet

_TABLE = re.compile(r"(<!-- results:(?P<name>[\w./-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
_OVERVIEW = re.compile(
    r"(<!-- overview:(?P<names>[\w./,-]+) (?P<label>[^\n]+?) -->\n).*?(<!-- /overview -->)", re.DOTALL
)


class _Refused(Exception):
    """What is wrong with a file, in one line."""


def render(page: str, folder: Path, figures: str = "docs/figures") -> str:
    """The page with everything marked written anew from the results in `folder`; `figures` is where pictures are."""

    def table(found: re.Match[str]) -> str:
        results = _results(folder / f"{found['name']}.json")
        written = models.markdown if results.get("suite") == models.SUITE else markdown
        return f"{found[1]}{written(results)}\n{found[3]}"

    def shown(found: re.Match[str]) -> str:
        results = _named(found["names"], folder)
        return f"{found[1]}{readme_report.markdown(results, found['label'], figures)}\n{found[4]}"

    return _OVERVIEW.sub(shown, _TABLE.sub(table, page))


def pictures(page: str, folder: Path) -> dict[str, str]:
    """By file name, the pictures that a page marks."""
    found: dict[str, str] = {}
    for mark in _OVERVIEW.finditer(page):
        found |= readme_report.files(_named(mark["names"], folder), mark["label"])
    return found


def _named(names: str, folder: Path) -> dict[str, dict[str, Any]]:
    return {name: _results(folder / f"{name}.json") for name in names.split(",")}


def _results(path: Path) -> dict[str, Any]:
    try:
        return load(path)
    except OSError as error:
        raise _Refused(f"{path}: expected a results file; got {error.strerror or error}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _Refused(f"{path}: expected JSON; got {error}.") from None
    except ValueError as error:
        raise _Refused(f"{path}: {error}.") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _Refused(f"{path}: expected a page; got {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise _Refused(f"{path}: expected a page in UTF-8; got {error}.") from None


def _write(path: Path, text: str) -> None:
    try:
        write_file(path, text)
    except OSError as error:
        raise _Refused(f"{path} cannot be written: {error.strerror or error}.") from None


def _fresh(pages: Sequence[Path], results: Path, figures: Path) -> dict[Path, str]:
    """By path, what every page and picture should say."""
    found: dict[Path, str] = {}
    for path in pages:
        page = _text(path)
        link = Path(os.path.relpath(figures, path.parent)).as_posix()
        try:
            found[path] = render(page, results, link)
            found |= {figures / name: svg for name, svg in pictures(page, results).items()}
        except ValueError as error:
            raise _Refused(f"{path}: {error}") from None
    return found


@quiet
def main(argv: Sequence[str] | None = None, prog: str = "python -m stream_attention.cli.report") -> int:
    """The command; returns its exit code: 0, 1 if --check finds something stale, 2 if a file is missing or wrong."""
    options = _parser(prog).parse_args(argv)
    try:
        if options.html is not None:
            if options.check:
                raise _Refused("--check: expected pages; got --html, which is always written.")
            results = [_results(path) for path in options.files]
            try:
                path = write_page(results, options.html)
            except OSError as error:
                raise _Refused(f"--html {options.html} cannot be written: {error.strerror or error}.") from None
            print(f"written to {path}")
            return 0
        fresh = _fresh(options.files, options.results, options.figures)
        stale = [path for path, text in fresh.items() if not path.exists() or _text(path) != text]
        for path in sorted(stale, key=options.files.__contains__):  # pictures before the pages that show them
            if not options.check:
                _write(path, fresh[path])
            print(f"{path} {'is stale' if options.check else 'written'}")
    except _Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    return 1 if stale and options.check else 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="pages; with --html, results files")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page or picture is stale")
    parser.add_argument("--html", type=Path, metavar="DIR", help="write DIR/index.html from the results files")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="default: %(default)s")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"), help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
