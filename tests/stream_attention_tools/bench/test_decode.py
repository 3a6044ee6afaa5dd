"""The suites of decoding, on tiny cells: caches that hold what they were made of, two clocks, the share of reading."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import ContiguousKV
from stream_attention_tools.bench import results as results_
from stream_attention_tools.bench import suites as suites_
from stream_attention_tools.bench.accuracy import check, check_all
from stream_attention_tools.bench.bandwidth import read_bandwidth
from stream_attention_tools.bench.providers import by_name
from stream_attention_tools.bench.providers.decode import Append, Decode, Quantized, paged
from stream_attention_tools.bench.run import in_a_row, measure, measured
from stream_attention_tools.bench.schema import lacking
from stream_attention_tools.bench.suites import SUITES, Cell, kv_bytes
from stream_attention_tools.bench.summary import eager_speed
from stream_attention_tools.bench.timing import CLOCKS
from stream_attention_tools.cli import benchmark as cli
from stream_attention_tools.report.page import page
from stream_attention_tools.testing.inputs import Case, Tensors, draw, packed

PROVIDERS = by_name()
KINDS = ("decode", "paged 16", "paged 64", "paged 256", "fp8", "int8", "int4", "batch invariant")
CASE = Case(B=2, Tq=1, Tk=330, Hq=4, Hkv=2, D=16, Dv=16)  # longer than what quantize_kv leaves in full precision
RAGGED = packed(CASE, (1, 1, 1), (7, 330, 41))
NEW = replace(CASE, Tk=1)


def cell_of(case: Case, *ours: str, peers: tuple[str, ...] = (), **changes: Any) -> Cell:
    return Cell("cell", case, "forward", ours, peers, unit="TB/s")._replace(**changes)


# The cells


def test_decoding_is_held_to_the_fastest_peer_in_ten_cells() -> None:
    cells = list(suites_.decode())
    assert len(cells) == 10 and {cell.bar for cell in cells} == {1.0}
    assert {(cell.ours, cell.beside, cell.peers) for cell in cells} == {
        (("decode",), ("triton",), ("sdpa flash", "sdpa cudnn", "fa3"))
    }


def test_every_kind_of_cache_is_compared_with_bf16_rows() -> None:
    cells = {cell.name: cell for cell in suites_.caches()}
    for kind, bar in (
        ("paged 16", 1.05),
        ("paged 64", 1.05),
        ("paged 256", 1.05),
        ("fp8", 1 / 1.85),
        ("int4", 1 / 2.6),
    ):
        cell = cells[f"{kind} b8 32/8 d128 32768"]
        assert (cell.ours, cell.peers, cell.bar) == ((kind,), ("decode",), bar)
    assert cells["int8 b1 32/8 d128 8192"].bar is None and cells["paged 16 b1 32/8 d128 8192"].bar == 1.05
    assert cells["ragged b8 32/8 d128"].case.lengths_k == suites_.RAGGED_ROWS
    assert all(512 <= length <= 32768 for length in suites_.RAGGED_ROWS)


# Caches


@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_pages_hold_the_rows_and_are_shuffled(page: int) -> None:
    x = draw(CASE)
    cache = paged(ContiguousKV(x.key, x.value), page)
    cache.validate()
    assert cache.page == page and cache.lengths.tolist() == [330, 330]
    key, value = cache.tile(0, 330)
    assert torch.equal(key, x.key) and torch.equal(value, x.value)
    table = cache.page_table.flatten()
    assert table.sort().values.tolist() == list(range(len(table)))
    assert len(table) < 4 or not torch.equal(table, table.sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [CASE, replace(CASE, Tq=3, causal=True), RAGGED], ids=["dense", "three queries", "ragged"]
)
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_right(name: str, case: Case, dtype: torch.dtype) -> None:
    cell = cell_of(replace(case, dtype=dtype), name)
    assert PROVIDERS[name].why_not(cell) is None
    x = draw(cell.case)
    assert check(PROVIDERS[name], cell, x).right
    assert all(verdict.right for verdict in check_all(PROVIDERS[name], cell, x))


def test_a_bare_call_writes_where_it_wrote_before_and_computes_what_attend_does() -> None:
    x = draw(CASE)
    call: Any = PROVIDERS["decode"].bare(x)
    first = call()
    expected = first.clone()
    first.fill_(torch.nan)
    assert call() is first and torch.equal(first, expected) and torch.equal(first, PROVIDERS["decode"].attend(x))


@pytest.mark.parametrize(("name", "share"), [("fp8", 0.5), ("int8", 0.5), ("int4", 0.25)])
def test_what_is_read_of_codes_is_what_the_cache_holds(name: str, share: float) -> None:
    case = replace(CASE, Tk=4096, dtype=torch.bfloat16)
    read = PROVIDERS[name].kv_bytes(case, draw(case)) / kv_bytes(case)
    assert share < read < share + 0.25
    assert PROVIDERS["paged 16"].kv_bytes(case, draw(case)) == kv_bytes(case)


class Coarser(Quantized):
    """Reads int4 where the reference gets int8."""

    def __init__(self) -> None:
        super().__init__("int8")

    def attend(self, x: Tensors) -> Tensor:
        return Quantized("int4").attend(x)


class Unordered(Decode):
    """Reads pages in the order in which they lie."""

    def cache(self, x: Tensors) -> Any:
        cache = paged(ContiguousKV(x.key, x.value), 64)
        return replace(cache, page_table=cache.page_table.flatten().sort().values.view_as(cache.page_table))


@pytest.mark.parametrize("wrong", [Coarser(), Unordered("unordered", "pages")], ids=["codes", "pages"])
def test_what_another_cache_holds_is_wrong(wrong: Decode) -> None:
    cell = cell_of(replace(CASE, dtype=torch.bfloat16), wrong.name)
    assert not check(wrong, cell, draw(cell.case)).right


# Tokens that are appended


class Unturned(Append):
    def _rotary(self, x: Tensors) -> None:
        return None


class Early(Append):
    """Has a token more than it should when the first arrives."""

    def _lengths(self, x: Tensors) -> Tensor:
        return super()._lengths(x) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["append", "append rotary"])
def test_append_is_right(name: str, dtype: torch.dtype) -> None:
    cell = cell_of(replace(NEW, dtype=dtype), name)
    assert PROVIDERS[name].why_not(cell) is None and check(PROVIDERS[name], cell, draw(cell.case)).right


@pytest.mark.parametrize("wrong", [Unturned("wrong", rotary=True), Early("wrong")], ids=["unturned", "elsewhere"])
def test_a_token_that_is_not_what_arrived_is_a_failure(wrong: Append) -> None:
    entry = measure(cell_of(NEW, "wrong"), {"wrong": wrong}, "wall", repeats=3, warmup=0)["providers"]["wrong"]
    assert entry["right"] is False and "append: expected the token that arrived" in entry["failed"]


# Who cannot


@pytest.mark.parametrize(
    ("name", "cell", "words"),
    [
        ("decode", cell_of(CASE, direction="backward"), "no gradient flows"),
        ("decode", cell_of(replace(CASE, Tq=17)), "16 at most"),
        ("decode", cell_of(packed(CASE, (1, 2), (7, 9))), "as many queries of every row"),
        ("paged 16", cell_of(replace(CASE, mask=(1, 1, 1, 330))), "without mask"),
        ("append", cell_of(CASE), "one token for every row"),
        ("append rotary", cell_of(replace(NEW, sink=True)), "without sink"),
    ],
)
def test_who_cannot_says_why(name: str, cell: Cell, words: str) -> None:
    assert words in (PROVIDERS[name].why_not(cell) or "")


# Two clocks


def test_calls_in_a_row_stay_on_their_inputs_or_rotate() -> None:
    ran: list[int] = []
    alone = [lambda n=n: ran.append(n) for n in range(3)]
    for rotating, expected in ((False, [1] * 5), (True, [1, 2, 0, 1, 2])):
        ran.clear()
        timed = in_a_row(PROVIDERS["decode"], alone, 5, rotating)
        timed.call(4)
        assert ran == expected and timed.calls == 5


STAND_INS = [
    cell_of(CASE, "decode", peers=("sdpa",), name="b2 4/2 d16 330", beside=("stream",), bar=100.0),
    cell_of(CASE, "paged 16", peers=("decode",), name="paged 16 b2 4/2 d16 330", bar=100.0),
    cell_of(CASE, "int4", peers=("decode",), name="int4 b2 4/2 d16 330"),
    cell_of(RAGGED, "decode", name="ragged b3 4/2 d16"),
    cell_of(NEW, "append", name="append b2 4/2 d16", beside=("append rotary",)),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes of the stand-ins."""
    path = tmp_path_factory.mktemp("results") / "caches.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITES, "caches", lambda: iter(STAND_INS))
        argv = ["--suite", "caches", "--device", "cpu", "--repeats", "3", "--warmup", "0", "--out", str(path)]
        assert cli.main(argv) == 0
    return results_.load(path)


def test_both_clocks_are_in_the_results_file(found: dict[str, Any]) -> None:
    assert found["conditions"]["timing"] == found["conditions"]["eager"] == CLOCKS["wall"]
    for cell in found["cells"]:
        for one in cell["providers"].values():
            assert one["right"] and one["median_ms"] > 0 and one["repeats"] == 3
            eager = one["eager"]
            assert 0 < eager["best_ms"] <= eager["p20_ms"] <= eager["median_ms"] <= eager["p80_ms"]
    first = found["cells"][0]
    assert first["fastest_peer"] == first["eager"]["fastest_peer"] == "sdpa" and first["met"]
    assert first["eager"]["ratio"] == pytest.approx(1 / first["providers"]["sdpa"]["eager"]["vs_ours"])
    assert set(first["eager"]) == {"ours", "fastest_peer", "ratio"}
    assert [cell["ratio"] is None for cell in found["cells"]] == [False, False, False, True, True]


def test_every_speed_is_a_share_of_reading_in_the_same_run(found: dict[str, Any]) -> None:
    read = found["read_bandwidth"]
    assert read["tb_per_s"] == max(read["ways"].values()) == read["ways"][read["way"]] > 0
    for cell in found["cells"]:
        for one in cell["providers"].values():
            assert one["share_of_read_bandwidth"] == pytest.approx(one["tb_per_s"] / read["tb_per_s"])
    dense = found["cells"][0]["providers"]["decode"]
    assert dense["tb_per_s"] * dense["median_ms"] * 1e9 == pytest.approx(kv_bytes(CASE))


def test_tables_have_both_clocks_and_a_column_for_whom_cells_are_named_after(found: dict[str, Any]) -> None:
    heads, *rows = results_.table(found)
    assert heads == [
        *("problem", "direction", "decode", "stream", "sdpa", "as named", "append rotary"),
        *("TB/s, ours / reading alone", "speed, ours / fastest peer", "bar"),
    ]
    assert [bool(row[heads.index("as named")]) for row in rows] == [False, True, True, False, True]
    eager_heads, *eager = results_.eager_table(found) or []
    assert eager_heads == [*heads[:7], "speed, ours / fastest peer"]
    assert [row[0] for row in eager] == [row[0] for row in rows]
    assert eager[0][-1] == f"{eager_speed(found['cells'][0]):.2f}"
    written = results_.markdown(found)
    assert written.count("\n|---") == 2 and "Reading alone " in written
    assert f"The same calls, time by {CLOCKS['wall']}:\n\n| problem |" in written


def test_the_sheet_and_the_page_have_both_clocks(found: dict[str, Any], tmp_path: Path) -> None:
    results_.save_csv(found, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        first = next(csv.DictReader(file))
    one = found["cells"][0]["providers"]["decode"]
    assert float(first["eager_median_ms"]) == one["eager"]["median_ms"]
    assert float(first["share_of_read_bandwidth"]) == one["share_of_read_bandwidth"]
    text = page([found])
    assert '<th scope="col">eager</th>' in text and '<th scope="col">of reading alone</th>' in text
    assert f"eager {eager_speed(found['cells'][0]):.2f}x that of sdpa</span>" in text


def test_a_line_says_both() -> None:
    timed = {"median_ms": 0.0125, "best_ms": 0.012, "tb_per_s": 2.7, "eager": {"median_ms": 0.03}}
    fa3 = timed | {"median_ms": 0.015625}
    sdpa = timed | {"median_ms": 0.02, "eager": {"median_ms": 0.024}}
    eager = {"ours": "decode", "fastest_peer": "sdpa", "ratio": 1.25}
    cell = {"name": "a", "direction": "forward", "ours": "decode", "fastest_peer": "fa3", "ratio": 0.7}
    cell["providers"] = {"decode": timed, "fa3": fa3, "sdpa": sdpa}
    said = results_.line(cell | {"bar": 1.0, "met": True, "eager": eager})
    assert "decode 12.5 us (best 12 us, 2.7 TB/s, eager 30 us)" in said
    assert said.endswith("1.25x the speed of fa3 (meets the bar of 1.00x)  eager 0.80x that of sdpa")


def test_who_has_no_graph_keeps_the_other_clock(found: dict[str, Any]) -> None:
    cell = dict(found["cells"][0])
    figures = ("median_ms", "tflops", "tb_per_s")
    kept = {key: one for key, one in cell["providers"]["sdpa"].items() if key not in figures}
    cell["providers"] = cell["providers"] | {"sdpa": kept | {"unavailable": "no CUDA graph of it: RuntimeError: no"}}
    results = found | {"cells": [cell]}
    assert lacking(results) == [] and "sdpa" not in results_.table(results)[0]
    assert "sdpa" in (results_.eager_table(results) or [[]])[0]
    assert "no CUDA graph of it" in page([results])


def test_results_of_one_clock_have_one_table() -> None:
    results = measured("decode", STAND_INS[:1], PROVIDERS, "wall", 3, 0, 1.0)
    assert lacking(results) == [] and results_.eager_table(results) is None
    assert "eager" not in results["conditions"] and "eager" not in results_.markdown(results)


def test_a_second_clock_without_its_figures_is_no_results_file(found: dict[str, Any]) -> None:
    cell = found["cells"][0]
    broken = cell | {"eager": {}, "providers": {"decode": cell["providers"]["decode"] | {"eager": {"best_ms": 1.0}}}}
    assert lacking(found | {"cells": [broken]}) == [
        *(f"cells[0].eager.{key}" for key in ("ours", "fastest_peer", "ratio")),
        "cells[0].providers['decode'].eager.median_ms",
    ]


def test_reading_is_measured_by_the_fastest_of_several_ways() -> None:
    read = read_bandwidth("cpu", "wall")
    assert len(read["ways"]) > 1 and 0 < read["tb_per_s"] < 5
