"""The benchmark command on tiny cells: who is asked, who is refused a speed, what is written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stream_attention.benchmark import cells as cells_
from stream_attention.benchmark import providers as providers_
from stream_attention.benchmark import results as results_
from stream_attention.benchmark.accuracy import check
from stream_attention.benchmark.cells import SUITES, Cell, Tensors, draw, flops, kv_bytes
from stream_attention.benchmark.timing import Latency, interleaved, paired_ratio
from stream_attention.cli import benchmark as cli
from stream_attention.testing.inputs import Case

TINY = Case(B=2, Tq=32, Tk=32, Hq=4, Hkv=2, D=16, Dv=16)
PROVIDERS = providers_.by_name()


class Wrong(providers_.Sdpa):
    """SDPA, off by a thousandth."""

    def __init__(self) -> None:
        super().__init__("wrong")

    def attend(self, x: Tensors) -> torch.Tensor:
        return super().attend(x) * 1.001


def tiny(**changes: object) -> Cell:
    return Cell("tiny", replace(TINY, **changes), "forward", ("auto",), ("sdpa", "dense"), bar=100.0)


# The arithmetic


def test_flops_are_counted_by_one_formula() -> None:
    case = Case(B=2, Tq=8, Tk=8, Hq=4, Hkv=2, D=16, Dv=32)
    assert flops(case) == 2 * 2 * 4 * 8 * 8 * (16 + 32)
    assert flops(replace(case, causal=True)) == flops(case) / 2
    assert flops(case, "backward") == 2.5 * flops(case)
    assert flops(replace(case, Tq=1, causal=True)) == flops(case) / 8  # one query sees all its keys


def test_kv_bytes_count_each_kv_head_once() -> None:
    assert kv_bytes(Case(B=2, Tq=1, Tk=10, Hq=8, Hkv=2, D=16, Dv=16, dtype=torch.bfloat16)) == 2 * 10 * 2 * 32 * 2


def test_percentiles_and_paired_ratios() -> None:
    latency = Latency.of([5.0, 1.0, 3.0, 2.0, 4.0, 100.0])
    assert (latency.best, latency.p20, latency.median, latency.p80) == (1.0, 2.0, 3.0, 5.0)
    assert paired_ratio([10.0, 200.0, 11.0], [10.0, 100.0, 10.0]) == pytest.approx(1.1)


def test_everybody_runs_once_a_round_and_inputs_rotate() -> None:
    ran: list[tuple[str, int]] = []
    calls = {name: lambda n, name=name: ran.append((name, n)) for name in ("a", "b")}
    samples = interleaved(calls, "wall", repeats=4, warmup=1)
    assert {name: len(its) for name, its in samples.items()} == {"a": 4, "b": 4}
    assert sorted(ran[2:]) == sorted((name, n) for name in ("a", "b") for n in range(4))
    assert [name for name, _ in ran[2:]] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_the_budget_ends_a_cell_after_three_rounds() -> None:
    assert len(interleaved({"a": lambda n: None}, "cpu", repeats=50, warmup=0, budget_s=0.0)["a"]) == 3


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
    ],
    ids=str,
)
def test_every_provider_that_can_is_right(changes: dict[str, object], dtype: torch.dtype) -> None:
    cell = tiny(**changes, dtype=dtype)
    x = draw(cell.case)
    checked = []
    for name in ("auto", "eager", "blocked", "dense", "sdpa"):
        if PROVIDERS[name].why_not(cell) is None:
            verdict = check(PROVIDERS[name], cell, x)
            assert verdict.right, (name, verdict)
            checked.append(name)
    assert {"auto", "eager", "blocked", "dense"} <= set(checked)


@pytest.mark.parametrize("name", ["auto", "sdpa", "dense"])
def test_gradients_are_checked_too(name: str) -> None:
    cell = tiny(causal=True)._replace(direction="forward+backward")
    assert check(PROVIDERS[name], cell, draw(cell.case)).right


@pytest.mark.parametrize(
    "changes", [{"sink": True}, {"dropout_p": 0.25}, {"sink": True, "dropout_p": 0.5, "B": 3}], ids=str
)
def test_sink_and_dropout_are_checked_on_rows_of_the_cell(changes: dict[str, object]) -> None:
    cell = tiny(causal=True, Tq=100, Tk=100, **changes)
    assert check(PROVIDERS["auto"], cell, draw(cell.case)).right
    assert PROVIDERS["dense"].why_not(cell) and PROVIDERS["sdpa"].why_not(cell)


def test_plain_computes_the_problem_without_its_modifiers() -> None:
    cell = tiny(causal=True, alibi="H", dropout_p=0.5)
    bare = PROVIDERS["plain"].case(cell.case)
    assert bare == replace(TINY, Hkv=4, causal=True)
    assert check(PROVIDERS["plain"], cell, draw(bare)).right


def test_who_cannot_says_why() -> None:
    assert "top-left" in (PROVIDERS["sdpa"].why_not(tiny(causal=True, Tq=16)) or "")
    assert "--fa3" in (PROVIDERS["fa3"].why_not(tiny()) or "")
    assert "gluon" in (PROVIDERS["gluon"].why_not(tiny()) or "")
    assert "CUDA" in (PROVIDERS["sdpa flash"].why_not(tiny()) or "")


def test_a_wrong_provider_is_found_out_and_gets_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    cell = tiny()._replace(peers=("wrong", "dense"))
    found = cli.benchmark("tiny", [cell], PROVIDERS | {"wrong": Wrong()}, repeats=3, warmup=0)
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
    found = cli.benchmark("tiny", [cell], PROVIDERS | {"broken": Broken()}, repeats=3, warmup=0)
    entry = found["cells"][0]["providers"]["broken"]
    assert "no kernel image" in entry["failed" if whose == "ours" else "unavailable"]
    assert (entry.get("right") is False) == (whose == "ours")


def test_gpu_tables_show_rates_and_decoding_its_bandwidth() -> None:
    cell = {"name": "a", "direction": "forward", "ratio": 0.5, "bar": None}
    timed = {"median_ms": 0.5, "tflops": 512.4}
    gpu = {"machine": {"device": "cuda"}, "cells": [cell | {"providers": {"triton": timed}}]}
    assert results_.table(gpu)[1] == ["a", "forward", "512", "0.50"]
    gpu["cells"] = [cell | {"providers": {"triton": timed | {"tb_per_s": 3.456}}}]
    assert results_.table(gpu)[1] == ["a", "forward", "500 us (3.46)", "0.50"]


# The command


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "cpu", lambda: iter([tiny(), tiny(causal=True)._replace(name="tiny causal")]))


@pytest.mark.usefixtures("tiny_suite")
def test_the_results_file_says_what_where_when_and_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "tiny.json"
    assert cli.main(["--device", "cpu", "--repeats", "3", "--warmup", "1", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["suite"] == "cpu" and set(found["commit"]) == {"hash", "dirty"}
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["python"]
    assert found["machine"]["name"] and found["machine"]["threads"] == torch.get_num_threads()
    assert found["conditions"]["repeats"] == 3 and found["date"].endswith("Z")
    assert [cell["name"] for cell in found["cells"]] == ["tiny", "tiny causal"]
    for cell in found["cells"]:
        assert cell["problem"]["Hkv"] == 2 and cell["problem"]["dtype"] == "float32"
        assert cell["ours"] == "auto" and cell["fastest_peer"] in ("sdpa", "dense")
        assert cell["ratio"] > 0 and cell["met"] == (cell["ratio"] <= cell["bar"])
        for one in cell["providers"].values():
            assert one["right"] and one["error"] <= one["allowed"]
            assert one["best_ms"] <= one["p20_ms"] <= one["median_ms"] <= one["p80_ms"] and one["tflops"] > 0
    printed = capsys.readouterr().out
    assert "tiny causal" in printed and str(out) in printed
    assert "\x1b" not in printed  # not a terminal: plain lines


@pytest.mark.usefixtures("tiny_suite")
def test_the_exit_code_is_1_if_a_provider_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers_, "by_name", lambda fa3=None: PROVIDERS | {"sdpa": Wrong()})
    assert cli.main(["--repeats", "3", "--warmup", "0"]) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--suite", "cpu", "--only", "no such cell"], "no such cell"),
        (["--suite", "decode"], "--device cuda"),
        (["--threads", "2", "--clock", "cpu"], "--threads 1"),
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


@pytest.mark.parametrize("suite", list(SUITES))
def test_suites_name_known_providers_and_no_cell_twice(suite: str) -> None:
    cells = list(SUITES[suite]())
    assert cells and len({(cell.name, cell.direction) for cell in cells}) == len(cells)
    assert {name for cell in cells for name in (*cell.ours, *cell.peers)} <= set(PROVIDERS)
    assert {cell.case.device for cell in cells} == {"cpu" if suite == "cpu" else "cuda"}


def test_the_grid_is_that_of_the_published_comparisons() -> None:
    grid = list(cells_.forward())
    assert len(grid) == 36
    assert {(cell.case.B * cell.case.Tq, cell.case.Hq * cell.case.D) for cell in grid} == {(16384, 2048)}


@pytest.mark.parametrize(
    "wrong", [["--repeats", "0"], ["--threads", "-1"], ["--warmup", "-1"], ["--cell-seconds", "0"]]
)
def test_numbers_that_measure_nothing_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(wrong)
    assert f"argument {wrong[0]}: expected" in capsys.readouterr().err


def test_the_backward_suite_measures_what_determinism_costs_and_compares_it_with_nobody() -> None:
    cells = list(SUITES["backward"]())
    assert len(cells) == 36 and {cell.direction for cell in cells} == {"backward"}
    assert all(cell.beside == ("triton deterministic",) and not {*cell.beside} & {*cell.ours} for cell in cells)
    assert [cell.name for cell in SUITES["modifiers-backward"]()] == [cell.name for cell in SUITES["modifiers"]()]
