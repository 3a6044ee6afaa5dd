"""Serving workloads: formulas beside figures computed elsewhere, checks, a run on the CPU, the file of the H200."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.workloads import __main__ as command
from benchmarks.workloads import batches, figures, measure
from benchmarks.workloads import calls as providers
from torch import Tensor

from stream_attention import paged_attention

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "workloads.json"
COMMAND = "python -m benchmarks.workloads --fa3 DIR --out benchmarks/results/h200/workloads.json"
LIMITS = batches.TB_PER_S, batches.TFLOP_PER_S
HEADS = batches.SHAPES["32/8 d128"]
SMALL = batches.Heads(4, 2, 32)

# By number: new tokens, keys in thousands (of 11 those that are seen), GFLOP and MB at 32/8 d128, and the floor in
# microseconds at three shapes of heads. From a table that was made before this code.
EXPECTED = {
    1: (8319, 1180, 569, 4964, (1101, 1559, 779)),
    2: (2112, 279, 520, 1175, (712, 1424, 712)),
    3: (64, 1080, 17.7, 4430, (982, 983, 491)),
    4: (36000, 36, 816, 737, (1117, 2234, 1117)),
    5: (320, 524, 42.9, 2153, (477, 478, 239)),
    6: (64, 279, 4.6, 1142, (253, 253, 127)),
    7: (256, 262, 4.3, 1078, (239, 240, 120)),
    8: (1, 131, 2.1, 537, (119, 119, 60)),
    9: (8, 655, 10.7, 2684, (595, 595, 298)),
    10: (256, 66, 17.1, 273, (60, 61, 31)),
    11: (128, 131, 2.1, 539, (120, 120, 60)),
    12: (4096, 201, 417, 889, (571, 1141, 571)),
}


def workload(number: int) -> batches.Workload:
    return batches.WORKLOADS[number - 1]


# Formulas


@pytest.mark.parametrize("number", EXPECTED)
def test_the_formulas_give_the_figures_of_an_independent_table(number: int) -> None:
    one = workload(number)
    queries, keys, gflop, megabytes, floors = EXPECTED[number]
    seen = sum(min(request.keys, one.window or request.keys) for request in one.requests)
    assert one.number == number and one.queries == queries and seen / 1e3 == pytest.approx(keys, abs=5)
    digit = 0.05 if gflop < 100 else 0.5  # a thousandth, since lengths between two are rounded
    assert batches.flops(one, HEADS) / 1e9 == pytest.approx(gflop, abs=digit, rel=1e-3)
    assert batches.traffic(one, HEADS) / 1e6 == pytest.approx(megabytes, abs=0.5)
    for shape, floor in zip(batches.SHAPES.values(), floors, strict=True):
        assert batches.floor_us(one, shape, *LIMITS)[0] == pytest.approx(floor, abs=0.51)


def test_shared_pages_are_counted_once_where_asked() -> None:
    assert batches.traffic(workload(6), HEADS, shared_once=True) / 1e6 == pytest.approx(85, abs=0.5)


def test_what_bounds_the_workloads() -> None:
    bound = {one.number: batches.floor_us(one, batches.SHAPES[one.heads], *LIMITS)[1] for one in batches.WORKLOADS}
    assert [number for number, by in bound.items() if by == "compute"] == [2, 4, 12]


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_visible_pairs_are_those_of_a_mask(window: int | None) -> None:
    requests = [batches.Request(4, 9), batches.Request(1, 7), batches.Request(5, 5)]
    one = batches.Workload(0, "small", requests, 4, window=window)
    pairs, seen = 0, 0
    for queries, keys in requests:
        ahead = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        mask = (ahead >= 0) & (ahead < (window or keys))
        pairs, seen = pairs + int(mask.sum()), seen + int(mask.any(0).sum())
    assert batches.flops(one, SMALL) == 4 * 4 * 32 * pairs
    assert batches.traffic(one, SMALL) == 2 * 2 * 32 * (2 * seen + 4 * 10)


def test_a_node_of_a_tree_sees_its_ancestors() -> None:
    mask = batches.ancestors(16)
    assert mask[15].nonzero().flatten().tolist() == [0, 1, 3, 7, 15]
    assert mask[2].nonzero().flatten().tolist() == [0, 2] and int(mask.sum()) == 54
    tree = workload(10)
    assert batches.visible(tree) == 16 * (16 * 4080 + 54)


def test_lengths_are_divided_and_few_new_tokens_are_kept() -> None:
    for one in batches.WORKLOADS:
        small = batches.scaled(one, 64)
        assert len(small.requests) == len(one.requests) and small.keys < one.keys / 16
        for before, after in zip(one.requests, small.requests, strict=True):
            assert after.queries == (before.queries if before.queries <= 16 else -(-before.queries // 64))
            assert 1 <= after.queries <= after.keys
        assert small.shared % small.page == 0
    assert batches.scaled(workload(11), 64).window == 16


# Tensors


@pytest.mark.parametrize("number", [1, 6, 8, 10])
def test_new_tokens_are_where_the_table_says_and_pages_are_nobody_elses(number: int) -> None:
    one = batches.scaled(workload(number), 64)
    made = providers.step(one, SMALL, "cpu", 64)
    used = [made.table[n, : -(-request.keys // one.page)] for n, request in enumerate(one.requests)]
    common = one.shared // one.page
    own = torch.cat([pages[common:] for pages in used])
    assert own.unique().numel() == own.numel() and 0 not in own
    assert all(torch.equal(pages[:common], used[0][:common]) for pages in used)
    assert made.key_pages.shape[0] == own.numel() + common + 1
    start = 0
    for pages, request in zip(used, one.requests, strict=True):
        new = slice(request.keys - request.queries, request.keys)
        for pool, rows in zip((made.key_pages, made.value_pages), made.new, strict=False):
            written = pool[pages.long()].flatten(0, 1)[new]
            assert torch.equal(written, rows[start : start + request.queries])
        start += request.queries
    assert start == made.query.shape[0] == int(made.offsets[-1])


# Checks


@pytest.mark.parametrize("number", [1, 5, 11, 12])
def test_a_wrong_result_is_found_and_ends_the_run(number: int) -> None:
    made = providers.step(batches.scaled(workload(number), 256), SMALL, "cpu", 256)
    call = providers.calls(made, "not here")["paged"]
    assert not isinstance(call, str)
    out = call()
    assert measure.checked(made, out).right
    for wrong in (out * 1.1, out + torch.nan, out.flip(0) if number == 12 else torch.zeros_like(out)):
        assert not measure.checked(made, wrong).right
    with pytest.raises(measure.Wrong, match=r"paged: error .* allowed"):
        measure._verdict(made, "paged", lambda: torch.zeros_like(out))


def test_a_window_that_is_one_key_longer_is_found() -> None:
    made = providers.step(batches.scaled(workload(11), 256), SMALL, "cpu", 256)
    wider = made.pages | {"window": (made.pages["window"][0] + 1, 0)}
    attend: Any = paged_attention
    assert not measure.checked(made, attend(*made.call, **wider, sink=made.sink)).right


# FlashAttention-3 in this file is its arguments alone: the op runs on a GPU.


class Forward:
    """Takes what FlashAttention-3's op takes, by the names it has for it, and computes it with ours."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.metadata = factor, []

    def default(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        max_seqlen_q: int,
        page_table: Tensor,
        is_causal: bool,
        window_size_left: int,
        window_size_right: int,
        scheduler_metadata: Tensor | None,
        num_splits: int,
    ) -> tuple[Tensor, None]:
        assert is_causal and num_splits == 0 and page_table.dtype is torch.int32
        self.metadata.append(scheduler_metadata)
        window = (window_size_left, window_size_right)
        pages = {"page_table": page_table, "max_seqlen_q": max_seqlen_q, "window": window}
        attend: Any = paged_attention
        return attend(q, k, v, cu_seqlens_q, seqused_k, **pages) * self.factor, None


def metadata(
    *,
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    headdim_v: int,
    qkv_dtype: torch.dtype,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: None,
    cu_seqlens_k_new: None,
    seqused_q: None,
    leftpad_k: None,
    page_size: int,
    max_seqlen_k_new: int,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    attention_chunk: int,
    has_softcap: bool,
    num_splits: int,
    pack_gqa: None,
    sm_margin: int,
) -> Tensor:
    assert (num_heads, num_heads_k, headdim, headdim_v) == (4, 2, 32, 32) and qkv_dtype is torch.bfloat16
    assert seqused_k.shape == (batch_size,) and cu_seqlens_q.shape == (batch_size + 1,)
    assert max_seqlen_k % page_size == 0 and max_seqlen_k >= int(seqused_k.max())
    return torch.tensor([max_seqlen_q])


def test_flash_attention_3_is_given_the_same_problem() -> None:
    made = providers.step(batches.scaled(workload(5), 256), SMALL, "cpu", 256)
    forward = Forward()
    ops = SimpleNamespace(fwd=forward, get_scheduler_metadata=SimpleNamespace(default=metadata))
    entries = measure.measure(made, ops, 3, lambda text: None)
    for name in providers.PEERS:
        assert entries[name]["error"] <= entries[name]["allowed"] and entries[name]["called"]["median_us"] > 0
    given = [one is not None for one in forward.metadata]
    assert any(given) and not all(given)


def test_a_peer_that_is_wrong_or_lacks_something_gets_no_time() -> None:
    made = providers.step(batches.scaled(workload(3), 1024), SMALL, "cpu", 1024)
    entries = measure.measure(made, SimpleNamespace(fwd=Forward(1.1)), 3, lambda text: None)
    assert entries["fa3"]["unavailable"].startswith("Wrong: fa3: error") and "called" not in entries["fa3"]
    assert "get_scheduler_metadata" in entries["fa3, metadata reused"]["unavailable"]
    for number, word in ((10, "tree masks"), (11, "sinks")):
        made = providers.step(batches.scaled(workload(number), 1024), SMALL, "cpu", 1024)
        assert providers.calls(made, SimpleNamespace())["fa3"] == f"it has no {word}"


# The command


def test_the_whole_script_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "workloads.json"
    monkeypatch.setattr("sys.argv", f"workloads --cpu --scale 1024 --rounds 3 --out {out}".split())
    assert command.main() == 0
    printed = capsys.readouterr().err
    found = json.loads(out.read_text())
    assert found["scale"] == 1024 and found["machine"]["device"] == "cpu" and len(found["cells"]) == 12
    for name, cell in found["cells"].items():
        assert name in printed
        assert list(cell["providers"]) == [*providers.OURS, *providers.PEERS]
        for provider, one in cell["providers"].items():
            if "unavailable" in one:
                assert provider not in ("paged", "paged, plan reused") or cell["tree"]
            else:
                assert one["called"]["p20_us"] <= one["called"]["median_us"] <= one["called"]["p80_us"]
                assert provider == "write_kv" or one["error"] <= one["allowed"]
        assert cell["providers"]["fa3"]["unavailable"] in ("no --fa3 DIR was given", "it has no sinks")
    tree = next(cell for cell in found["cells"].values() if cell["tree"])["providers"]
    takes_trees = "tree_mask" in inspect.signature(paged_attention).parameters
    assert ("called" in tree["paged"]) is takes_trees and "called" in tree["decode"]
    few = {cell["number"] for cell in found["cells"].values() if "called" in cell["providers"]["decode"]}
    assert {3, 5, 6, 7, 8, 9, 10, 11} <= few and not few & {1, 2, 4}


REFUSED = {
    "--only 13": "--only: expected numbers from 1 to 12; got 13",
    "--scale 0": "--scale: expected at least 1; got 0",
    "--rounds 0": "--rounds: expected at least 1; got 0",
    "--markdown nowhere.json": "--markdown: expected a results file; there is no nowhere.json",
    "--heads 8/8": "--heads: invalid choice: '8/8'",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_call_is_refused_in_words(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["workloads", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert REFUSED[words] in capsys.readouterr().err


def test_without_a_gpu_it_says_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["workloads"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main() == 2
    assert "--cpu --scale 64" in capsys.readouterr().err


def test_a_run_that_hangs_is_ended_and_says_where() -> None:
    words = ["-m", "benchmarks.workloads", "--cpu", "--scale", "2", "--limit", "1"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1 and "Timeout" in done.stderr and "benchmarks/workloads/__main__.py" in done.stderr


# What the figures say


def measured(factor: float, number: int = 3) -> dict[str, Any]:
    """A cell in which FlashAttention-3 takes twice the floor, and ours that by a factor."""
    one = workload(number)
    cell = batches.described(one, batches.SHAPES[one.heads], LIMITS)
    theirs = 2 * cell["floor_us"]
    times = {"paged": theirs / factor, "fa3": theirs}
    cell["providers"] = {name: {"unavailable": "not here"} for name in (*providers.OURS, *providers.PEERS)}
    for name, us in times.items():
        cell["providers"][name] = {kind: {"median_us": us} for kind in ("replayed", "called")}
    return {"cells": {one.name: cell}}


def test_bars_are_of_the_peer_and_higher_where_flops_are_the_floor() -> None:
    assert figures.missed(measured(1.0)) == [] == figures.missed(measured(1.06, number=2))
    slow = figures.missed(measured(0.97))
    assert len(slow) == 2 and "replayed: 0.970, the bar is 1.00" in slow[0] and "called" in slow[1]
    assert len(figures.missed(measured(1.04, number=2))) == 2
    alone = measured(2 * 0.84, number=11)
    assert figures.missed(alone) == [f"{workload(11).name}, of the floor: 0.840, the bar is 0.85"]
    assert figures.missed(measured(2 * 0.86, number=11)) == []
    del alone["cells"][workload(11).name]["providers"]["paged"]["replayed"]
    assert "not measured" in figures.missed(alone)[0]


def test_the_table_is_written_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, file = tmp_path / "page.md", tmp_path / "workloads.json"
    page.write_text("before\n<!-- workloads -->\nold\n<!-- /workloads -->\nafter\n")
    file.write_text(json.dumps(measured(1.25)))
    monkeypatch.setattr("sys.argv", ["workloads", "--markdown", str(file), "--page", str(page)])
    assert command.main() == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- workloads -->\n| # | workload |") and "old" not in text
    assert "| 1.57 ms | 1.96 ms |  |  |  |  | 1.25 | 1.25 | 0.62 |\n<!-- /workloads -->\nafter\n" in text


def test_the_page_lists_what_is_measured() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    table = page.partition("<!-- workload list -->\n")[2].partition("\n<!-- /workload list -->")[0]
    assert table == figures.listed()


# The file of the H200


def results() -> dict[str, Any]:
    if not RESULTS.exists():
        pytest.skip(f"no {RESULTS.relative_to(ROOT)} yet; on the H200: {COMMAND}")
    return json.loads(RESULTS.read_text())


def test_the_file_has_every_workload_and_enough_rounds() -> None:
    found = results()
    assert found["machine"]["name"] == "NVIDIA H200" and found["rounds"] >= 20 and found["scale"] == 1
    by_number = {
        cell["number"]: cell for cell in found["cells"].values() if cell["heads"] == workload(cell["number"]).heads
    }
    assert list(by_number) == list(EXPECTED)
    for number, cell in by_number.items():
        one = workload(number)
        said = batches.described(one, batches.SHAPES[one.heads], tuple(found["limits"].values()))
        assert {name: cell[name] for name in said} == said and cell["pool_bytes"] > 0
        for name, entry in cell["providers"].items():
            if "unavailable" in entry:
                continue
            assert entry["peak_bytes"] >= 0 and (name == "write_kv" or entry["error"] <= entry["allowed"])
            for kind in ("replayed", "called"):
                assert 0 < entry[kind]["p20_us"] <= entry[kind]["median_us"] <= entry[kind]["p80_us"]


def test_the_bars_are_met() -> None:
    assert figures.missed(results()) == []


def test_the_page_shows_the_file() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert page == figures.written(page, results())
