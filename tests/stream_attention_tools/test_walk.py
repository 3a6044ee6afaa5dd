"""The walk of cold calls: figures that are possible, the same each time, and larger than those of a warm call."""

from __future__ import annotations

import pytest

from stream_attention_tools import walk
from stream_attention_tools.walk import Walk


@pytest.fixture(scope="module")
def table() -> dict[str, Walk]:
    return walk.table()


def test_every_call_is_walked_and_its_figures_are_possible(table: dict[str, Walk]) -> None:
    assert {"attention", "varlen_attention"} <= table.keys() and sum("decode" in name for name in table) >= 2
    package = len(list(walk.Path(walk.PACKAGE).rglob("*.py")))
    for name, one in table.items():
        assert 1 < one.files <= min(one.functions, package), name
        assert one.lines > one.functions and 0 <= one.turns_back < one.lines, name


def test_a_backward_walks_further_than_its_forward(table: dict[str, Walk]) -> None:
    forward, both = table["attention"], table["attention, forward and backward"]
    assert both.files >= forward.files and both.functions > forward.functions and both.lines > forward.lines


def test_a_warm_call_walks_less_than_a_cold_one_and_the_count_repeats() -> None:
    prepare = walk.calls("cpu")["attention"]
    prepare(64)()  # whatever is imported first
    for _ in range(2):
        walk.forget()
        cold = walk.walk(prepare(64))
        warm = walk.walk(prepare(64))
        warmer = walk.walk(prepare(64))
        assert cold.lines > warmer.lines and warm == warmer


def test_nothing_of_ours_is_no_walk() -> None:
    assert walk.walk(lambda: sum(range(3))) == Walk(0, 0, 0, 0)


def test_the_command_prints_a_markdown_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert walk.main([]) == 0
    heading, rule, *rows = capsys.readouterr().out.splitlines()
    assert heading.startswith("| cold call on cpu | files |") and set(rule) == {"|", "-"}
    assert len(rows) >= 5 and all(row.count("|") == heading.count("|") for row in rows)


def test_the_design_is_short_and_shows_the_walk_of_every_call(table: dict[str, Walk]) -> None:
    page = (walk.Path(__file__).parents[2] / "DESIGN.md").read_text()
    assert len(page.splitlines()) <= 200
    shown = page.partition("<!-- walk -->\n")[2].partition("\n<!-- /walk -->")[0]
    assert all(f"| {name} |" in shown for name in table)
