"""The benchmark command on tiny cells: who is asked, who is refused a speed, what is written."""

import builtins
import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stream_attention_tools.bench import providers as providers_
from stream_attention_tools.bench import results as results_
from stream_attention_tools.bench import suites as suites_
from stream_attention_tools.bench.accuracy import check, check_all
from stream_attention_tools.bench.progress import progress
from stream_attention_tools.bench.providers.ours import Plain
from stream_attention_tools.bench.run import measured
from stream_attention_tools.bench.suites import (
    SUITES,
    Cell,
    calls,
    chunked,
    flops,
    kv_bytes,
    shortened,
    tensor_bytes,
)
from stream_attention_tools.bench.summary import compared
from stream_attention_tools.bench.timing import CLOCKS, Latency, interleaved, paired_ratio
from stream_attention_tools.cli import benchmark as cli
from stream_attention_tools.cli import report
from stream_attention_tools.report.page import page
from stream_attention_tools.testing.inputs import Case, Tensors, draw, packed, sequences

TINY = Case(B=2, Tq=32, Tk=32, Hq=4, Hkv=2, D=16, Dv=16)
PROVIDERS = providers_.by_name()


class Wrong(providers_.Sdpa):
    """SDPA, off by a thousandth."""

    def __init__(self) -> None:
        super().__init__("wrong")

    def attend(self, x: Tensors) -> torch.Tensor:
        return super().attend(x) * 1.001


class TopLeft(providers_.Sdpa):
    """SDPA's own causal alignment, where a chunk of new queries would see the oldest keys alone."""

    def attend(self, x: Tensors) -> torch.Tensor:
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


class LastRowWrong(providers_.Sdpa):
    """Wrong in one row of the last batch entry."""

    def attend(self, x: Tensors) -> torch.Tensor:
        out = super().attend(x).clone()
        out[-1, -1] += 0.1
        return out


class Nan(providers_.Sdpa):
    def attend(self, x: Tensors) -> torch.Tensor:
        out = super().attend(x).clone()
        out[0, 0, 0, 0] = torch.nan
        return out


def benchmark(
    suite: str, cells: list[Cell], providers: dict[str, providers_.Provider], repeats: int, warmup: int
) -> dict[str, Any]:
    """Measure and show cells as the command does."""
    found = measured(suite, cells, providers, "wall", repeats, warmup, float("inf"))
    cli._show_suite(found, cells, providers)
    cli._shortfalls(found)
    return found


def tiny(**changes: object) -> Cell:
    return Cell("tiny", replace(TINY, **changes), "forward", ("stream",), ("sdpa", "dense"), bar=100.0)


# The arithmetic


def test_flops_are_counted_by_one_formula() -> None:
    case = Case(B=2, Tq=8, Tk=8, Hq=4, Hkv=2, D=16, Dv=32)
    assert flops(case) == 2 * 2 * 4 * 8 * 8 * (16 + 32)
    assert flops(replace(case, causal=True)) == flops(case) / 2
    assert flops(case, "backward") == 2.5 * flops(case)
    assert flops(replace(case, Tq=1, causal=True)) == flops(case) / 8  # one query sees all its keys


def test_kv_bytes_count_each_kv_head_once() -> None:
    assert kv_bytes(Case(B=2, Tq=1, Tk=10, Hq=8, Hkv=2, D=16, Dv=16, dtype=torch.bfloat16)) == 2 * 10 * 2 * 32 * 2


def test_traffic_counts_each_tensor_once_a_call_and_gradients_again() -> None:
    case = Case(B=2, Tq=10, Tk=10, Hq=8, Hkv=2, D=16, Dv=16, dtype=torch.bfloat16)
    cell = Cell("a", case, "forward", (), ())
    query_and_out, key_and_value = 2 * 10 * 8 * 32 * 2, 2 * 10 * 2 * 32 * 2
    assert tensor_bytes(cell, case) == query_and_out + key_and_value
    assert tensor_bytes(cell._replace(direction="backward"), case) == 2 * (query_and_out + key_and_value)
    assert tensor_bytes(cell._replace(chunk=5), case) == query_and_out + 1.5 * key_and_value  # 5 keys, then all 10


def test_a_pack_counts_its_sequences_one_by_one() -> None:
    one = Case(B=1, Tq=8, Tk=8, Hq=4, Hkv=2, D=16, Dv=32, causal=True, dtype=torch.bfloat16)
    cases = {n: replace(one, B=1, Tq=n, Tk=n) for n in (8, 3)} | {"more keys": replace(one, Tq=2, Tk=9)}
    pack = packed(one, (8, 3, 2, 3), (8, 3, 9, 3))
    parts = [cases[8], cases[3], cases["more keys"], cases[3]]
    assert (pack.B, pack.Tq, pack.Tk) == (4, 8, 9)
    assert flops(pack, "backward") == sum(flops(case, "backward") for case in parts)
    assert kv_bytes(pack) == sum(map(kv_bytes, parts))
    cell = Cell("a", pack, "forward", (), ())
    assert tensor_bytes(cell, pack) == sum(tensor_bytes(cell, case) for case in parts)
    equal = packed(one, (8,) * 3)
    assert flops(equal) == flops(replace(one, B=3)) and tensor_bytes(cell, equal) == tensor_bytes(
        cell, replace(one, B=3)
    )


def test_a_shorter_pack_keeps_its_features() -> None:
    pack = packed(replace(TINY, causal=True, alibi="BH"), (50, 5, 8), (50, 80, 8))
    short = shortened(pack, rows=20, batch=2)
    assert short == packed(replace(TINY, causal=True, alibi="BH"), (20, 5), (20, 20))
    x = draw(short)
    assert x.packed and (x.query.shape, x.key.shape) == ((25, 4, 16), (40, 2, 16))
    assert x.options["cu_seqlens_q"].tolist() == [0, 20, 25] and x.options["max_seqlen_k"] == 20
    assert x.options["alibi_slopes"].shape == (2, 4)
    assert not draw(TINY).packed and draw(TINY).packing == {}


def test_percentiles_and_paired_ratios() -> None:
    latency = Latency.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    assert (latency.best, latency.p20, latency.median, latency.p80) == (1.0, 2.0, 3.5, 5.0)
    assert Latency.of([1.0, 2.0, 3.0])[:3] == pytest.approx((2.0, 1.4, 2.6))
    assert Latency.of([7.0])[:4] == (7.0, 7.0, 7.0, 7.0)
    assert paired_ratio([10.0, 200.0, 11.0], [10.0, 100.0, 10.0]) == pytest.approx(1.1)


@pytest.mark.parametrize("rounds", [1, 3, 4, 50])
def test_a_ratio_is_one_by_its_opposite_of_any_number_of_rounds(rounds: int) -> None:
    ours, theirs = torch.rand(2, rounds, generator=torch.Generator().manual_seed(0)).add(0.5).tolist()
    assert paired_ratio(ours, theirs) * paired_ratio(theirs, ours) == pytest.approx(1.0, abs=1e-12)


def test_a_line_says_our_speed_beside_whom_and_whether_the_bar_is_met() -> None:
    timed = {"best_ms": 1.0, "tflops": 1.0}
    entries = {
        "stream": timed | {"median_ms": 4.0},
        "sdpa": timed | {"median_ms": 5.0},
        "fa3": timed | {"median_ms": 2.0},
    }
    cell = {"name": "a", "direction": "forward", "providers": entries, "ours": "stream", "fastest_peer": "sdpa"}
    assert results_.line(cell | {"bar": None}).endswith("  1.25x the speed of sdpa")
    assert results_.line(cell | {"bar": 1.25}).endswith("of sdpa (meets the bar of 0.80x)")
    assert results_.line(cell | {"fastest_peer": "fa3", "bar": 1.0}).endswith(
        "  0.50x the speed of fa3 (MISSES the bar of 1.00x)"
    )


def test_everybody_runs_once_a_round_and_inputs_rotate() -> None:
    ran: list[tuple[str, int]] = []
    calls = {name: lambda n, name=name: ran.append((name, n)) for name in ("a", "b")}
    samples = interleaved(calls, "wall", repeats=4, warmup=1)
    assert {name: len(its) for name, its in samples.items()} == {"a": 4, "b": 4}
    assert sorted(ran[2:]) == sorted((name, n) for name in ("a", "b") for n in range(4))
    assert [name for name, _ in ran[2:]] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_the_budget_ends_a_cell_after_three_rounds() -> None:
    ran: list[int] = []
    assert len(interleaved({"a": ran.append}, "cpu", repeats=50, warmup=20, budget_s=0.0)["a"]) == 3
    assert ran == [0, 0, 1, 2]  # one round to warm up


def test_what_comes_before_a_timed_call_is_not_in_its_time() -> None:
    order: list[str] = []

    def before() -> None:
        order.append("before")
        time.sleep(0.05)

    calls = {name: lambda n, name=name: order.append(name) for name in ("a", "b")}
    samples = interleaved(calls, "wall", repeats=2, warmup=1, before=before)
    assert order == ["a", "b", *["before", "a", "before", "b"], *["before", "b", "before", "a"]]
    assert min(samples["a"] + samples["b"]) < 50  # the others, where the machine is busy, may be longer


# Who is right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"causal": True, "alibi": "H"},
        {"alibi": "BH", "softcap": 5.0},
        {"mask": (1, 1, 32, 32)},
        {"bias": (2, 4, 32, 32), "window": (7, -1)},
        {"causal": True, "window": (7, 0)},
        {"Tq": 1},
        {"causal": True, "Tq": 12},
    ],
    ids=str,
)
def test_every_provider_that_can_is_right(changes: dict[str, object], dtype: torch.dtype) -> None:
    cell = tiny(**changes, dtype=dtype)
    x = draw(cell.case)
    checked = []
    for name in ("stream", "eager", "blocked", "dense", "sdpa"):
        if PROVIDERS[name].why_not(cell) is None:
            verdict = check(PROVIDERS[name], cell, x)
            assert verdict.right, (name, verdict)
            checked.append(name)
    assert {"stream", "eager", "blocked", "dense"} <= set(checked)


@pytest.mark.parametrize("name", ["stream", "sdpa", "dense"])
def test_gradients_are_checked_too(name: str) -> None:
    cell = tiny(causal=True)._replace(direction="forward+backward")
    assert check(PROVIDERS[name], cell, draw(cell.case)).right


@pytest.mark.parametrize(
    "changes", [{"sink": True}, {"dropout_p": 0.25}, {"sink": True, "dropout_p": 0.5, "B": 3}], ids=str
)
def test_sink_and_dropout_are_checked_on_rows_of_the_cell(changes: dict[str, object]) -> None:
    cell = tiny(causal=True, Tq=100, Tk=100, **changes)
    assert check(PROVIDERS["stream"], cell, draw(cell.case)).right
    assert PROVIDERS["dense"].why_not(cell) and PROVIDERS["sdpa"].why_not(cell)


def test_a_sequence_in_chunks_is_the_whole_sequence_and_is_checked_as_such() -> None:
    cell = tiny(causal=True)._replace(chunk=12)
    parts = chunked(draw(cell.case), cell.chunk)
    assert [(part.query.shape[1], part.key.shape[1]) for part in parts] == [(12, 12), (12, 24), (8, 32)]
    assert [(case.Tq, case.Tk) for case in calls(cell)] == [(12, 12), (12, 24), (8, 32)]
    for name in ("stream", "blocked", "dense", "sdpa"):
        assert check(PROVIDERS[name], cell, draw(cell.case)).right, name
    assert not check(TopLeft(), cell, draw(cell.case)).right


def test_everything_is_compared_where_it_is_asked_for() -> None:
    cell = tiny(causal=True, B=3)._replace(direction="backward")
    verdicts = check_all(PROVIDERS["stream"], cell, draw(cell.case))
    assert [verdict.of for verdict in verdicts] == ["out", "d_query", "d_key", "d_value"]
    assert all(verdict.right and 0 < verdict.mean < verdict.error for verdict in verdicts)
    assert not check_all(LastRowWrong(), cell, draw(cell.case))[0].right


def test_nan_is_never_right() -> None:
    verdict = check_all(Nan(), tiny(), draw(tiny().case))[0]
    assert not verdict.right and math.isnan(verdict.error)


def test_plain_computes_the_problem_without_its_modifiers() -> None:
    cell = tiny(causal=True, alibi="H", dropout_p=0.5)
    bare = PROVIDERS["plain"].case(cell.case)
    assert bare == replace(TINY, Hkv=4, causal=True)
    assert check(PROVIDERS["plain"], cell, draw(bare)).right


def test_plain_keeps_the_pack() -> None:
    pack = packed(replace(TINY, causal=True, sink=True), (5, 9))
    assert PROVIDERS["plain"].case(pack) == packed(replace(TINY, causal=True, Hkv=4), (5, 9))


def test_who_cannot_says_why() -> None:
    assert "not both" in (PROVIDERS["sdpa"].why_not(tiny(causal=True, mask=(1, 1, 32, 32))) or "")
    assert "--fa3 DIR" in (PROVIDERS["fa3"].why_not(tiny()) or "--fa3 DIR")
    assert "got cpu" in (PROVIDERS["gluon"].why_not(tiny()) or "")
    assert PROVIDERS["sdpa flash"].why_not(tiny()) == "it is a CUDA kernel, and the device is the cpu"


def test_a_wrong_provider_is_found_out_and_gets_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    cell = tiny()._replace(peers=("wrong", "dense"))
    found = benchmark("tiny", [cell], PROVIDERS | {"wrong": Wrong()}, repeats=3, warmup=0)
    entry = found["cells"][0]["providers"]["wrong"]
    assert entry["right"] is False and entry["error"] > entry["allowed"]
    assert "median_ms" not in entry and "median_ms" in found["cells"][0]["providers"]["dense"]
    assert "WRONG: wrong on tiny" in capsys.readouterr().out


class Broken(providers_.Sdpa):
    def attend(self, x: Tensors) -> torch.Tensor:
        raise RuntimeError("no kernel image")


@pytest.mark.parametrize("whose", ["ours", "peers"])
def test_one_of_ours_that_fails_is_wrong_and_a_peer_that_fails_is_not_measured(whose: str) -> None:
    cell = tiny()._replace(**{whose: ("broken",)})
    found = benchmark("tiny", [cell], PROVIDERS | {"broken": Broken()}, repeats=3, warmup=0)
    entry = found["cells"][0]["providers"]["broken"]
    assert "no kernel image" in entry["failed" if whose == "ours" else "unavailable"]
    assert (entry.get("right") is False) == (whose == "ours")


class BrokenOurs(providers_.Ours):
    def attend(self, x: Tensors) -> torch.Tensor:
        raise RuntimeError("no kernel image")


def test_one_of_ours_that_fails_is_wrong_also_where_it_stands_among_the_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"plain": BrokenOurs("plain", "auto")})
    assert cli.main([*QUICK, "--seq", "32", "--heads", "2", "--dropout", "0.1"]) == 1
    printed = capsys.readouterr()
    assert "WRONG: plain on causal dropout=0.1 32 fp32 (forward)" in printed.out
    assert "plain FAILED: RuntimeError: no kernel image" in printed.err
    assert all(PROVIDERS[name].ours for name in ("stream", "eager", "plain", "blocked", "triton deterministic"))
    assert not any(PROVIDERS[name].ours for name in ("sdpa", "dense", "flex", "fa3"))


def test_a_cell_without_a_time_of_ours_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = {name: providers_.Ours(name, f"{name}, which nobody wrote") for name in ("gluon", "triton")}
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | absent)
    cells = [tiny()._replace(ours=("gluon", "stream")), tiny()._replace(name="other", ours=("gluon", "triton"))]
    monkeypatch.setitem(SUITES, "cpu", lambda: iter(cells))
    quick = ["--suite", "cpu", "--repeats", "3", "--warmup", "0"]
    assert cli.main(quick) == 1
    printed = capsys.readouterr().out
    assert "NONE OF OURS was timed on other (forward)" in printed and printed.count("NONE OF OURS") == 1
    assert cli.main([*quick, "--only", "tiny"]) == 0  # one of ours is enough
    assert "NONE OF OURS" not in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_suite")
def test_an_error_that_is_nan_is_null_in_the_file_and_a_report_is_made_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"sdpa": Nan("sdpa")})
    out = tmp_path / "a.json"
    assert cli.main(["--suite", "cpu", "--repeats", "3", "--warmup", "0", "--out", str(out)]) == 1

    def refused(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    cell = json.loads(out.read_text(), parse_constant=refused)["cells"][0]
    assert cell["providers"]["sdpa"]["error"] is None and cell["providers"]["sdpa"]["right"] is False
    assert report.main(["--html", str(tmp_path / "html"), str(out)]) == 0
    assert "wrong: error nan" in (tmp_path / "html" / "index.html").read_text()


def test_gpu_tables_show_rates_and_decoding_its_bandwidth() -> None:
    cell = {"name": "a", "direction": "forward", "ours": "triton", "fastest_peer": None, "bar": None}
    timed = {"median_ms": 0.5, "tflops": 512.4}
    how = {"conditions": {"timing": CLOCKS["events"]}}
    gpu = {"machine": {"device": "cuda"}, "cells": [cell | {"providers": {"triton": timed}}], **how}
    assert results_.table(gpu)[1] == ["a", "forward", "512"]
    gpu["cells"] = [cell | {"providers": {"triton": timed | {"tb_per_s": 3.456}}}]
    assert results_.table(gpu)[1] == ["a", "forward", "500 us (3.46)"]


def test_what_a_call_costs_in_all_is_shown_as_time() -> None:
    cell = {"name": "a", "direction": "forward", "ours": "stream", "fastest_peer": "fa3", "bar": 1.0}
    one, other = ({"median_ms": ms, "tflops": 1.2} for ms in (0.0215, 0.043))
    calls = {
        "machine": {"device": "cuda"},
        "cells": [cell | {"providers": {"stream": one, "fa3": other}}],
        "conditions": {"timing": CLOCKS["calls"]},
    }
    assert results_.table(calls)[1] == ["a", "forward", "21.5 us", "43 us", "2.00", "1.00"]


PACK = packed(replace(TINY, causal=True), (20, 3, 64), (20, 30, 64))


class Sequences(providers_.Sdpa):
    """SDPA, one packed sequence after the other."""

    def __init__(self) -> None:
        super().__init__("sequences")

    def why_not(self, cell: Cell) -> str | None:
        return None

    def attend(self, x: Tensors) -> torch.Tensor:
        ends = [x.options[f"cu_seqlens_{side}"].tolist() for side in "qk"]
        parts = []
        for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True):
            options = {"causal": x.options["causal"]}
            alone = Tensors(x.query[None, a:b], x.key[None, c:d], x.value[None, c:d], options, x.grad_out[None, a:b])
            parts.append(super().attend(alone)[0])
        return torch.cat(parts)


@pytest.mark.parametrize("direction", ["forward", "forward+backward", "backward"])
def test_a_pack_is_measured_and_who_has_none_is_not(direction: str, tmp_path: Path) -> None:
    cell = Cell("packed causal", PACK, direction, ("eager", "stream"), ("sdpa", "sequences"))
    found = benchmark("tiny", [cell], PROVIDERS | {"sequences": Sequences()}, repeats=3, warmup=0)
    entry = found["cells"][0]
    assert entry["fastest_peer"] == "sequences" and entry["ratio"] > 0
    assert entry["providers"]["sdpa"] == {"unavailable": "it has no packed sequences"}
    assert entry["problem"] | {"B": 3, "Tq": 64, "Tk": 64, "lengths_k": (20, 30, 64)} == entry["problem"]
    for name in ("eager", "stream", "sequences"):
        one = entry["providers"][name]
        assert one["right"] and one["tflops"] * one["median_ms"] * 1e9 == pytest.approx(flops(PACK, direction))
    assert entry["providers"]["eager"]["ran"].startswith("eager: one sequence at a time")
    results_.save(found, tmp_path / "a.json")
    assert "packed causal" in page([results_.load(tmp_path / "a.json")])


def test_what_modifiers_cost_is_counted_against_the_same_backend(tmp_path: Path) -> None:
    names = ("eager", "reference")
    plain = {f"plain {name}": Plain(name) for name in names}
    cell = tiny(softcap=5.0)._replace(ours=names, peers=tuple(plain), bar=None)
    other = tiny()._replace(name="other", ours=("stream",), peers=("sdpa",))
    found = benchmark("tiny", [cell, other], PROVIDERS | plain, repeats=3, warmup=0)
    entry, its = found["cells"][0], found["cells"][0]["providers"]
    assert entry["fastest_peer"] == f"plain {entry['ours']}"
    assert entry["ratio"] == its[entry["ours"]]["vs_plain"] and all(its[name]["vs_plain"] > 0 for name in names)
    assert not any("vs_plain" in one for name, one in its.items() if name not in names)
    heads, row, last = results_.table(found)
    for name in names:
        column = heads.index(f"speed, {name} / plain {name}")
        plain_ms, ms = (its[one]["median_ms"] for one in (f"plain {name}", name))
        assert row[column] == f"{plain_ms / ms:.2f}" and last[column] == ""
    assert not compared(found).is_cost and compared(found | {"cells": [entry]}).is_cost
    results_.save_csv(found, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        assert [bool(row["vs_plain"]) for row in csv.DictReader(file)] == [True, True, False, False, False, False]


def test_a_backend_whose_plain_call_is_missing_is_compared_with_no_other() -> None:
    plain = {"plain eager": BrokenOurs("plain eager", "eager"), "plain reference": Plain("reference")}
    cell = tiny(softcap=5.0)._replace(ours=("eager",), peers=tuple(plain), bar=None)
    entry = benchmark("tiny", [cell], PROVIDERS | plain, repeats=3, warmup=0)["cells"][0]
    assert entry["fastest_peer"] is None and entry["ratio"] is None and "vs_plain" not in entry["providers"]["eager"]


# A suite


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "cpu", lambda: iter([tiny(), tiny(causal=True)._replace(name="tiny causal")]))


@pytest.mark.usefixtures("tiny_suite")
def test_the_results_file_says_what_where_when_and_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiny.json"
    assert cli.main(["--device", "cpu", "--suite", "cpu", "--repeats", "3", "--warmup", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["suite"] == "cpu" and set(found["commit"]) == {"hash", "dirty"}
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["python"]
    assert found["machine"]["name"] and found["machine"]["threads"] == torch.get_num_threads()
    assert found["conditions"]["repeats"] == 3 and found["date"].endswith("Z")
    assert [cell["name"] for cell in found["cells"]] == ["tiny", "tiny causal"]
    for cell in found["cells"]:
        assert cell["problem"]["Hkv"] == 2 and cell["problem"]["dtype"] == "float32"
        assert cell["ours"] == "stream" and cell["fastest_peer"] in ("sdpa", "dense")
        assert cell["ratio"] > 0 and cell["met"] == (cell["ratio"] <= cell["bar"])
        for one in cell["providers"].values():
            assert one["right"] and one["error"] <= one["allowed"]
            assert one["best_ms"] <= one["p20_ms"] <= one["median_ms"] <= one["p80_ms"] and one["tflops"] > 0
            assert one["peak_bytes"] >= 2 * 32 * 4 * 16 * 4 and one["gb_per_s"] > 0  # its own output, at least
        assert cell["providers"]["stream"]["ran"].startswith("eager: ")
    printed = capsys.readouterr()
    assert "tiny causal" in printed.out and str(out) in printed.out
    assert "tiny causal" in printed.err and "\x1b" not in printed.err  # not a terminal: plain lines


@pytest.mark.usefixtures("tiny_suite")
def test_the_exit_code_is_1_if_a_provider_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"sdpa": Wrong()})
    assert cli.main(["--suite", "cpu", "--repeats", "3", "--warmup", "0"]) == 1
    assert cli.main(["--seq", "32", "--iters", "3", "--warmup", "0"]) == 1


# The grid

QUICK = ["--iters", "3", "--warmup", "0", "--device", "cpu"]


def table(printed: str) -> list[list[str]]:
    """The rows of the documented table, by its head."""
    lines = printed.splitlines()
    first = next(n for n, line in enumerate(lines) if line.split()[:1] == ["SeqLen"])
    return [line.split() for line in lines[first : lines.index("", first)]]


def test_the_documented_command_prints_the_documented_columns_and_names_its_baseline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "grid.json"
    shape = ["--seq", "64", "128", "--batch", "1", "--heads", "4", "--dim", "16"]
    assert cli.main([*shape, "--warmup", "1", "--iters", "3", "--device", "cpu", "--json_out", str(out)]) == 0
    printed, progress_lines = capsys.readouterr()
    heads, *rows = table(printed)
    documented = ["SeqLen", "Fused(ms)", "Fused(TF)", "FA3(ms)", "FA3(TF)", "FA3/Fused(ms)"]
    assert heads[:6] == [head.replace("FA3", "SDPA") for head in documented]  # what ran is what the table says
    assert heads[6:] == ["Fused(GB/s)", "Fused(p20-p80)"]
    assert [row[0] for row in rows] == ["64", "128"]
    assert "SDPA/Fused(ms) is its median by ours: above 1, ours is the faster.\n" in printed
    assert "FLOPs = 2 B Hq Tq Tk (D + Dv)" in printed and "Fused is stream_attention.attention: eager" in printed
    assert printed.index("checked against fp64") < printed.index("SeqLen")

    found = json.loads(out.read_text())
    assert [cell["problem"]["dtype"] for cell in found["cells"]] == ["float32"] * 2
    for cell, row in zip(found["cells"], rows, strict=True):
        ours, peer = cell["providers"]["stream"], cell["providers"]["sdpa"]
        assert cell["problem"]["causal"] and cell["baseline"] == "sdpa"
        assert (cell["fused_time_ms"], cell["fused_tflops"]) == (ours["median_ms"], ours["tflops"])
        assert (cell["baseline_time_ms"], cell["baseline_tflops"]) == (peer["median_ms"], peer["tflops"])
        assert cell["speedup_vs_baseline"] == peer["median_ms"] / ours["median_ms"]
        assert row[5] == f"{cell['speedup_vs_baseline']:.2f}" and f" {row[5]}x the speed of sdpa\n" in progress_lines
        assert not any("fa3" in key for key in cell)
        assert float(row[1]) == pytest.approx(ours["median_ms"], abs=1e-3)
        work = 2 * 4 * cell["seq_len"] ** 2 * 32 / 2  # one formula for both columns
        assert all(one["tflops"] * one["median_ms"] * 1e9 == pytest.approx(work) for one in (ours, peer))


class StandIn(providers_.Sdpa):
    """Computes as SDPA does, under FlashAttention-3's name."""

    def __init__(self) -> None:
        super().__init__("fa3", label="FA3")


def test_the_columns_are_called_fa3_where_fa3_itself_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"fa3": StandIn()})
    out = tmp_path / "grid.json"
    assert cli.main([*QUICK, "--seq", "64", "--providers", "sdpa", "fa3", "--json-out", str(out)]) == 0
    heads = table(capsys.readouterr().out)[0]
    assert heads[:6] == ["SeqLen", "Fused(ms)", "Fused(TF)", "FA3(ms)", "FA3(TF)", "FA3/Fused(ms)"]
    assert heads[8:] == ["SDPA(ms)", "SDPA(TF)", "SDPA/Fused(ms)"]
    cell = json.loads(out.read_text())["cells"][0]
    assert cell["fa3_time_ms"] == cell["baseline_time_ms"] and cell["speedup_vs_fa3"] > 0 and cell["fa3_tflops"] > 0


def test_chunks_have_a_column_and_everybody_is_right_on_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*QUICK, "--seq", "100", "--heads", "2", "--chunk", "32"]) == 0
    heads, row = table(capsys.readouterr().out)
    assert heads[:3] == ["SeqLen", "Chunk", "Fused(ms)"] and row[:2] == ["100", "32"]


@pytest.mark.parametrize(
    ("argv", "problem", "baseline"),
    [
        (["--decode", "--kv-heads", "2"], {"Tq": 1, "Tk": 64, "Hkv": 2, "causal": True}, "sdpa"),
        (["--backward", "--dtype", "bf16"], {"Tq": 64, "dtype": "bfloat16"}, "sdpa"),
        (["--dropout", "0.25", "--no-causal"], {"dropout_p": 0.25, "Tq": 64}, "plain"),
        (["--dtype", "fp16"], {"dtype": "float16"}, "sdpa"),
    ],
)
def test_what_the_flags_say_is_what_is_measured(
    argv: list[str], problem: dict[str, object], baseline: str, tmp_path: Path
) -> None:
    out = tmp_path / "grid.json"
    assert cli.main([*QUICK, "--seq", "64", "--heads", "4", *argv, "--json-out", str(out)]) == 0
    cell = json.loads(out.read_text())["cells"][0]
    assert problem.items() <= cell["problem"].items()
    assert ("causal" in cell["problem"]) == ("--no-causal" not in argv)
    assert cell["direction"] == ("backward" if "--backward" in argv else "forward")
    assert cell["baseline"] == baseline and cell["baseline_time_ms"] > 0 and cell["fused_time_ms"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["forward", "--backward", "--decode"])
def test_on_a_gpu_ours_is_right_and_timed(mode: str, tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    shape = "--seq 256 512 --batch 1 --heads 4 --dim 64 --dtype bf16 --iters 3 --warmup 1 --device cuda".split()
    assert cli.main([*shape, *[mode][mode == "forward" :], "--json-out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["machine"]["device"] == "cuda" and len(found["cells"]) == 2
    for cell in found["cells"]:
        assert cell["providers"]["stream"]["right"] and cell["fused_time_ms"] > 0 and cell["baseline_time_ms"] > 0


@pytest.mark.parametrize("kv_heads", ["4", "2"])
def test_beside_dropout_stands_what_it_costs_and_no_race(kv_heads: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--seq", "32", "--heads", "4", "--kv-heads", kv_heads, "--dropout", "0.1"]
    assert cli.main([*QUICK, *flags]) == 0
    printed = capsys.readouterr().out
    heads = ", with a KV head for every head" if kv_heads == "2" else ""
    assert f"No peer draws the same dropout mask; Plain is our own call without dropout{heads}: what dropou" in printed
    assert "one by it is how many times as long dropout makes a call" in printed and "faster" not in printed


def test_csv_has_a_row_per_cell_and_provider_and_the_report_is_one_page(tmp_path: Path) -> None:
    sheet, report = tmp_path / "grid.csv", tmp_path / "report"
    argv = [*QUICK, "--seq", "32", "64", "--providers", "stream", "eager", "sdpa-math"]
    assert cli.main([*argv, "--csv", str(sheet), "--report", str(report)]) == 0
    with sheet.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["Tk"], row["provider"]) for row in rows] == [
        (length, name) for length in ("32", "64") for name in ("stream", "eager", "sdpa math")
    ]
    assert all(float(row["median_ms"]) > 0 and row["right"] == "True" for row in rows)
    assert "<html" in (report / "index.html").read_text()


def test_who_is_here_and_which_suites_there_are_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list", "--device", "cpu"]) == 0
    listed = capsys.readouterr().out
    assert all(name.replace(" ", "-") in listed for name in PROVIDERS)
    assert all(f"  {suite}, " in listed for suite in SUITES) and "d128 causal 4096" in listed
    if not providers_.base.installed("flash_attn"):
        assert "not here: flash_attn is not installed" in listed


class Terminal:
    """A stderr that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


def stderr_as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_terminal_gets_a_bar_that_says_what_runs_now(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = stderr_as_terminal(monkeypatch)
    with progress(2) as shown:
        shown.now("causal 512: checking stream")
        shown.done("causal 512 done")
    assert "causal 512: checking stream" in terminal.text and "1/2" in terminal.text and "0:00:0" in terminal.text


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = stderr_as_terminal(monkeypatch)
    real = builtins.__import__

    def without_rich(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    with progress(1) as shown:
        shown.now("causal 512: checking stream")
        shown.done("causal 512 done")
    assert terminal.text == "causal 512 done\n"


# Refusals

CORES = os.cpu_count() or 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--suite", "cpu", "--only", "no such cell"], "no such cell"),
        (["--suite", "cpu", "--only", "nothing"], "  causal 1024 fp32 forward"),
        (["--suite", "cpu", "--device", "cpu", "--seq", "64"], "leave out --seq"),
        (["--suite", "decode", "--device", "cpu"], "--device cuda"),
        (["--device", "cpu", "--threads", "2", "--clock", "cpu"], "--threads 1"),
        (["--device", "cpu", "--fa3", "."], "Hopper"),
        (
            ["--device", "cpu", "--threads", "100000"],
            f"--threads: expected at most {4 * CORES}, 4 for each of the {CORES} c",
        ),
        (["--device", "cpu", "--providers", "sdpa-flash"], "--providers sdpa-flash: it is a CUDA kernel, and the d"),
        (["--device", "cpu", "--dropout", "0.1", "--providers", "sdpa"], "dropout"),
        (["--device", "cpu", "--providers", "nobody"], "sdpa-math"),
        (["--device", "cpu", "--kv-heads", "3"], "--kv-heads: expected a divisor of --heads 8; got 3"),
        (["--device", "cpu", "--chunk", "8", "--backward"], "leave out --backward"),
        (["--device", "cpu", "--chunk", "8", "--no-causal"], "leave out --no-causal"),
        (["--list", "--csv", "a.csv", "--report", "out"], "measures nothing that could be written; leave out --csv, -"),
        (["--list", "--json-out", "a.json"], "leave out --json-out"),
        pytest.param(
            ["--device", "cuda"],
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here"),
        ),
    ],
)
def test_refusals(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cli.main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--out", "--json_out", "--csv", "--report"])
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"stream": Broken("stream")})
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    taken = "file" if flag == "--report" else "folder"  # a report is a folder, the others are files
    for path in (tmp_path / "file" / "below", tmp_path / taken):
        assert cli.main([*QUICK, "--seq", "32", flag, str(path)]) == 2
        assert f"{path} cannot be written: " in capsys.readouterr().err.replace("/index.html", "")
    assert (tmp_path / "file").read_text() == "kept" and (tmp_path / "folder").is_dir()


@pytest.mark.parametrize("flag", ["--out", "--json-out", "--csv", "--report"])
def test_folders_that_are_not_there_are_made(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "grid"
    assert cli.main([*QUICK, "--seq", "32", flag, str(path)]) == 0
    assert (path / "index.html" if flag == "--report" else path).stat().st_size > 100


LIMITED = """
import resource, sys
from stream_attention_tools.cli.benchmark import main
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
sys.exit(main(sys.argv[1:]))
"""


def test_a_full_disk_keeps_the_old_files_and_the_table_is_printed(tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    outputs = {"--json-out": tmp_path / "a.json", "--csv": tmp_path / "a.csv", "--report": tmp_path / "page"}
    (tmp_path / "page").mkdir()
    files = [tmp_path / "a.json", tmp_path / "a.csv", tmp_path / "page" / "index.html"]
    for path in files:
        path.write_text("old")
    told = [word for flag, path in outputs.items() for word in (flag, str(path))]
    command = [sys.executable, "-c", LIMITED, *QUICK, "--seq", "32", *told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert table(done.stdout)[1][0] == "32" and "written to" not in done.stdout
    for path in files:
        assert f"{path} cannot be written: File too large; what was there before is as it was\n" in done.stderr
        assert path.read_text() == "old"
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(files)


def interrupted(after: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command, interrupted by Ctrl-C when it has said a word."""
    command = [sys.executable, "-u", "-m", "stream_attention.cli.benchmark", "--device", "cpu", *argv]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    seen = ""
    while after not in seen and (line := running.stderr.readline()):
        seen += line
    running.send_signal(signal.SIGINT)
    printed, said = running.communicate(timeout=120)
    return subprocess.CompletedProcess(command, running.returncode, printed, seen + said)


def test_ctrl_c_keeps_the_cells_that_were_done_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    # The first cell is short, and the second one takes long.
    done = interrupted("causal 32 ", "--seq", "32", "4096", "--iters", "30", "--warmup", "0", "--json-out", str(out))
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert [cell["seq_len"] for cell in json.loads(out.read_text())["cells"]] == [32]
    assert f"interrupted after 1 of 2 cells: those were written to {out}\n" in done.stderr
    assert [row[0] for row in table(done.stdout)[1:]] == ["32"]


def test_ctrl_c_before_a_cell_is_done_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    out.write_text("old")
    done = interrupted("1 cell", "--seq", "64", "--iters", "1000000", "--json-out", str(out))
    assert done.returncode == 130 and "interrupted before a cell was done: nothing was written" in done.stderr
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


def test_iterations_that_are_asked_for_are_all_made_whatever_a_cell_may_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--seq", "64", "--device", "cpu", "--warmup", "0", "--cell-seconds", "1e-9"]
    for asked, rounds, words in (
        ([], 3, "up to 50 rounds each, stopped after 1e-09 s"),
        (["--iters", "7"], 7, "7 roun"),
    ):
        out = tmp_path / "grid.json"
        assert cli.main([*shape, *asked, "--json-out", str(out)]) == 0
        found = json.loads(out.read_text())
        assert {one["repeats"] for one in found["cells"][0]["providers"].values()} == {rounds}
        assert words in capsys.readouterr().err
        assert found["conditions"]["cell_seconds"] == (None if asked else 1e-9)


class Gone:
    """A stdout whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None: ...


def test_what_was_measured_is_kept_although_nobody_reads_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    assert cli.main([*QUICK, "--seq", "32", "--json-out", str(tmp_path / "grid.json")]) == 141
    assert json.loads((tmp_path / "grid.json").read_text())["cells"][0]["ratio"] > 0


@pytest.mark.parametrize(
    ("argv", "flag", "beside"),
    [
        (["--json-out", "a", "--csv", "a"], "--csv", "--json-out"),
        (["--json-out", "a", "--csv", "b/../a"], "--csv", "--json-out"),
        (["--report", "a", "--json-out", "a/index.html"], "--report", "--json-out"),
        (["--report", "a", "--csv", "a"], "--report", "--csv"),
        (["--json-out", "a/b", "--csv", "a"], "--csv", "--json-out"),
    ],
)
def test_two_outputs_in_one_place_are_refused(
    argv: list[str],
    flag: str,
    beside: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"stream": Broken("stream")})
    assert cli.main([*QUICK, "--seq", "32", *argv]) == 2
    assert f"{flag}: expected a file apart from that of {beside}; got " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suite", list(SUITES))
def test_suites_name_known_providers_and_no_cell_twice(suite: str) -> None:
    cells = list(SUITES[suite]())
    assert cells and len({(cell.name, cell.direction) for cell in cells}) == len(cells)
    assert {name for cell in cells for name in (*cell.ours, *cell.peers)} <= set(PROVIDERS)
    assert {cell.case.device for cell in cells} == {"cpu" if suite == "cpu" else "cuda"}


def test_the_grid_is_that_of_the_published_comparisons() -> None:
    grid = list(suites_.forward())
    assert len(grid) == 36
    assert {(cell.case.B * cell.case.Tq, cell.case.Hq * cell.case.D) for cell in grid} == {(16384, 2048)}


@pytest.mark.parametrize(
    "wrong",
    [
        ["--repeats", "0"],
        ["--seq", "0"],
        ["--threads", "-1"],
        ["--warmup", "-1"],
        ["--cell-seconds", "0"],
        ["--dropout", "1"],
    ],
)
def test_numbers_that_measure_nothing_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(wrong)
    assert re.search(f"argument (--iters/)?{wrong[0]}: expected", capsys.readouterr().err)


def test_the_backward_suite_measures_what_determinism_costs_and_compares_it_with_nobody() -> None:
    cells = list(SUITES["backward"]())
    assert len(cells) == 36 and {cell.direction for cell in cells} == {"backward"}
    assert all(cell.beside == ("gluon deterministic",) and not {*cell.beside} & {*cell.ours} for cell in cells)
    assert [cell.name for cell in SUITES["modifiers-backward"]()] == [cell.name for cell in SUITES["modifiers"]()]


def test_the_shapes_are_grouped_heads_and_packs_of_as_many_rows() -> None:
    cells = list(SUITES["shapes"]())
    assert {(cell.case.causal, cell.case.packed) for cell in cells} == {(a, b) for a in (0, 1) for b in (0, 1)}
    for cell in cells:
        case = cell.case
        assert [sum(its) for its in zip(*sequences(case), strict=True)] == [16384, 16384]
        assert {"sdpa flash", "sdpa cudnn", "fa3"} <= {*cell.peers} and cell.ours == ("gluon", "triton")
        heads = (case.Hq, case.Hkv)
        assert heads == ((2048 // case.D,) * 2 if case.packed else (32, 8)) and case.dtype is torch.bfloat16
    packs = {(cell.case.D, cell.case.lengths_q) for cell in cells if cell.case.packed}
    ragged = suites_.RAGGED
    assert packs == {(128, (512,) * 32), (128, (4096,) * 4), *((dim, ragged) for dim in (64, 128, 256))}
    assert min(ragged) >= 64 and max(ragged) <= 4096 and any(length % 64 for length in ragged)


def test_modifiers_are_compared_with_plain_calls_of_the_same_backends() -> None:
    cells = [*SUITES["modifiers"](), *SUITES["modifiers-backward"]()]
    assert all(cell.peers == tuple(f"plain {name}" for name in cell.ours) for cell in cells)
    assert {name for cell in cells for name in cell.ours} == {"gluon", "triton"}
