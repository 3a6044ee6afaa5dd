"""python -m stream_attention.cli.report: write results into the tables and pictures of pages, or as an HTML page.

    python -m stream_attention.cli.report README.md docs/performance.md           # write what is marked in the pages
    python -m stream_attention.cli.report --check README.md docs/performance.md   # exit 1 if a page or picture is stale
    python -m stream_attention.cli.report --html DIR RESULTS.json...              # write DIR/index.html

A page marks a place with two comments, and the first names results by their place under benchmarks/results. `results`
is the table of one file. `overview` is one problem of each file over length, as pictures, and a short table. `versions`
is the table of versions that were tested together:

    <!-- results:cpu/cpu -->
    <!-- /results -->

    <!-- overview:h200/forward,h200/backward d128 causal -->
    <!-- /overview -->

    <!-- versions -->
    <!-- /versions -->
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stream_attention_tools.files import write_file

from ..bench.results import markdown
from ..report import models, readme_report, versions
from ..report.page import write_page
from .command import Refused, command, results

_TABLE = re.compile(r"(<!-- results:(?P<name>[\w./-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
_OVERVIEW = re.compile(
    r"(<!-- overview:(?P<names>[\w./,-]+) (?P<label>[^\n]+?) -->\n).*?(<!-- /overview -->)", re.DOTALL
)
_VERSIONS = re.compile(r"(<!-- versions -->\n).*?(<!-- /versions -->)", re.DOTALL)


def render(page: str, folder: Path, figures: str = "docs/figures") -> str:
    """The page with everything marked written anew from the results in `folder`; `figures` is where pictures are."""

    def table(found: re.Match[str]) -> str:
        its = results(folder / f"{found['name']}.json")
        written = models.markdown if its.get("suite") == models.SUITE else markdown
        return f"{found[1]}{written(its)}\n{found[3]}"

    def shown(found: re.Match[str]) -> str:
        named = _named(found["names"], folder)
        return f"{found[1]}{readme_report.markdown(named, found['label'], figures)}\n{found[4]}"

    def tested(found: re.Match[str]) -> str:
        with _refusing("versions: expected what the runs of the tests have left; got"):
            return f"{found[1]}{versions.markdown(folder)}\n{found[2]}"

    return _VERSIONS.sub(tested, _OVERVIEW.sub(shown, _TABLE.sub(table, page)))


def pictures(page: str, folder: Path) -> dict[str, str]:
    """By file name, the pictures that a page marks."""
    found: dict[str, str] = {}
    for mark in _OVERVIEW.finditer(page):
        found |= readme_report.files(_named(mark["names"], folder), mark["label"])
    return found


def _named(names: str, folder: Path) -> dict[str, dict[str, Any]]:
    return {name: results(folder / f"{name}.json") for name in names.split(",")}


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Refuse a file with these words where the system cannot read or write it."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{what} {error.strerror or error}.") from None


def _text(path: Path) -> str:
    with _refusing(f"{path}: expected a page; got"):
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Refused(f"{path}: expected a page in UTF-8; got {error}.") from None


def _fresh(pages: Sequence[Path], folder: Path, figures: Path) -> dict[Path, str]:
    """By path, what every page and picture should say."""
    found: dict[Path, str] = {}
    for path in pages:
        page = _text(path)
        link = Path(os.path.relpath(figures, path.parent)).as_posix()
        try:
            found[path] = render(page, folder, link)
            found |= {figures / name: svg for name, svg in pictures(page, folder).items()}
        except ValueError as error:
            raise Refused(f"{path}: {error}") from None
    return found


def _run(options: argparse.Namespace) -> int:
    """The exit code: 1 if --check finds something stale."""
    if options.html is not None:
        if options.check:
            raise Refused("--check: expected pages; got --html, which is always written.")
        found = [results(path) for path in options.files]
        with _refusing(f"--html {options.html} cannot be written:"):
            print(f"written to {write_page(found, options.html)}")
        return 0
    fresh = _fresh(options.files, options.results, options.figures)
    stale = [path for path, text in fresh.items() if not path.exists() or _text(path) != text]
    for path in sorted(stale, key=options.files.__contains__):  # pictures before the pages that show them
        if not options.check:
            with _refusing(f"{path} cannot be written:"):
                write_file(path, fresh[path])
        print(f"{path} {'is stale' if options.check else 'written'}")
    return 1 if stale and options.check else 0


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="pages; with --html, results files")
    add("--check", action="store_true", help="write nothing; exit 1 if a page or picture is stale")
    add("--html", type=Path, metavar="DIR", help="write DIR/index.html from the results files")
    add("--results", type=Path, default=Path("benchmarks/results"), help="default: %(default)s")
    add("--figures", type=Path, default=Path("docs/figures"), help="default: %(default)s")


main = command("python -m stream_attention.cli.report", __doc__, _flags, _run, refused=(Refused, ImportError))

if __name__ == "__main__":
    sys.exit(main())
