"""Every ratio that a page shows is one of speeds, and follows from the numbers in its row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
OURS = {"auto", "blocked", "gluon", "triton", "stream", "decode", "as named", "append rotary", "e4m3"}
"""Columns of ours. Some are also a peer of others: `decode` of the kinds of caches that are named."""

PER_SECOND = re.compile(r"([\d,]+(?:\.\d+)?)(?: \(.*\))?")
TIME = re.compile(r"([\d.]+) (s|ms|us)(?: \([\d.-]+\))?(?:, [\d.]+)?|(\d+) \([\d-]+\)")
UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0}


class Shown(NamedTuple):
    """A speed, from the least to the most that is rounded to what is shown."""

    least: float
    most: float


def shown(cell: str) -> Shown | None:
    """Tokens or operations per second as they are, a time as its inverse."""
    if found := TIME.fullmatch(cell):
        digits, unit = (found[1], UNITS[found[2]]) if found[1] else (found[3], 1.0)
        low, high = rounded(digits)
        return Shown(1 / (high * unit), 1 / (low * unit))
    if found := PER_SECOND.fullmatch(cell):
        return Shown(*rounded(found[1].replace(",", "")))
    return None


def rounded(digits: str) -> tuple[float, float]:
    step = 10.0 ** -len(digits.partition(".")[2])
    return float(digits) - step / 2, float(digits) + step / 2


def tables(page: str) -> list[list[dict[str, str]]]:
    """The rows of a page's tables, by heading."""
    found: list[list[dict[str, str]]] = []
    heads: list[str] | None = None
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            heads = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if heads is None:
            heads = cells
            found.append([])
        elif not set(line) <= set("|-"):
            found[-1].append(dict(zip(heads, cells, strict=False)))  # a cell may have an escaped bar
    return found


def possible(ours: list[str], others: list[str], row: dict[str, str]) -> Shown:
    """The fastest of ours over the fastest of others, of any numbers that round to those of a row."""
    one, other = ([speed for name in names if (speed := shown(row[name]))] for names in (ours, others))
    fastest, peer = (Shown(max(s.least for s in its), max(s.most for s in its)) for its in (one, other))
    return Shown(fastest.least / peer.most, fastest.most / peer.least)


def holds(ratio: str, expected: Shown) -> bool:
    low, high = rounded(ratio)
    return low <= expected.most + 1e-9 and high >= expected.least - 1e-9


RATIOS = {
    "speed over sdpa": (["stream_attention"], ["sdpa"]),
    "static, over the faster sdpa": (["stream_attention static"], ["sdpa", "sdpa static"]),
    "speed, ours / peer": (["ours"], ["peer's"]),
    "speed, ours / dense mask": (["ours"], ["dense mask"]),
    "speed, gluon / plain gluon": (["gluon"], ["plain gluon"]),
    "speed, triton / plain triton": (["triton"], ["plain triton"]),
}
FASTEST = "speed, ours / fastest peer"


def sides(row: dict[str, str], heading: str) -> tuple[list[str], list[str]]:
    """Which columns of a row a ratio compares."""
    if heading != FASTEST:
        return RATIOS[heading]
    there = [name for name in row if name not in ("problem", "direction", "bar") and "/" not in name and row[name]]
    ours = [name for name in there if name in OURS]
    named = "as named" if "as named" in there else "append rotary" if "append rotary" in there else None
    if named:
        return [named], [name for name in there if name != named]
    if plain := [name for name in there if name.startswith("plain")]:
        fastest = max(ours, key=lambda name: shown(row[name]) or Shown(0, 0))
        own = f"plain {fastest}"
        return [fastest], [own] if own in plain else plain
    if ours == ["stream"] and {"sdpa", "fa3"} == {*there} - {"stream"}:
        return ours, ["fa3"]  # short calls, whose bar is FlashAttention-3
    if "decode" in ours:
        ours = ["decode"]  # beside it stands the Triton kernel of `attention`
    return ours, [name for name in there if name not in ours and not re.search("deterministic|rotated|kernel", name)]


def ratios() -> list[tuple[str, str, dict[str, str]]]:
    return [
        (page, heading, row)
        for page in PAGES
        for table in tables(page)
        for row in table
        for heading in (FASTEST, *RATIOS)
        if row.get(heading)
    ]


def test_every_ratio_follows_from_the_numbers_beside_it() -> None:
    found = ratios()
    assert len(found) > 150 and {"README.md", "docs/performance.md"} <= {page for page, _, _ in found}
    wrong = [
        (page, row, heading)
        for page, heading, row in found
        if not holds(row[heading], possible(*sides(row, heading), row))
    ]
    assert not wrong, wrong


def test_no_heading_compares_times() -> None:
    """A ratio of times below 1 would be good, beside others above 1."""
    heads = {head for page in PAGES for table in tables(page) for row in table[:1] for head in row}
    assert not [head for head in heads if re.search(r"^time, .* / |time by |peer / ours", head)]


@pytest.mark.parametrize(("cell", "least", "most"), [("2 ms", 1 / 2500, 1 / 1500), ("676", 675.5, 676.5)])
def test_a_number_is_what_rounds_to_it(cell: str, least: float, most: float) -> None:
    assert shown(cell) == pytest.approx(Shown(least, most))


def test_a_ratio_that_does_not_follow_is_noticed() -> None:
    row = {"ours": "20 (19-24)", "peer's": "27 (26-28)"}
    expected = possible(["ours"], ["peer's"], row)
    assert holds("1.35", expected) and not holds("1.10", expected) and not holds("0.74", expected)
