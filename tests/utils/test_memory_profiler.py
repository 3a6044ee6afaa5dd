"""MemoryProfiler on the CPU: sizes that are known, peaks that no snapshot saw, regions in regions, what it writes."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import pytest
import torch

from stream_attention import attention
from stream_attention.utils.memory import MemoryProfiler
from stream_attention_tools.testing.memory import peak_bytes

MIB = 1 << 20


def mebibytes(number: int) -> torch.Tensor:
    return torch.empty(number * MIB, dtype=torch.uint8)


@pytest.fixture
def profiler() -> Iterator[MemoryProfiler]:
    profiler = MemoryProfiler("cpu")
    profiler.start()
    yield profiler
    profiler.stop()


# What it reads


def test_an_allocation_reads_as_large_as_it_is(profiler: MemoryProfiler) -> None:
    kept = mebibytes(64)
    assert profiler.snapshot("made")["allocated_mb"] == 64.0
    del kept
    assert profiler.snapshot("freed")["allocated_mb"] == 0.0


def test_a_peak_is_that_of_the_allocator_and_not_of_the_snapshots(profiler: MemoryProfiler) -> None:
    first = mebibytes(3)
    second = mebibytes(5)
    del second
    taken = profiler.snapshot("after")
    assert (taken["allocated_mb"], taken["peak_allocated_mb"]) == (3.0, 8.0)
    assert profiler.snapshot("later")["peak_allocated_mb"] == 3.0  # since the snapshot before
    assert profiler.report()["peak_allocated_mb"] == 8.0
    del first


def test_what_a_kernel_allocates_inside_is_seen() -> None:
    query, key, value = torch.randn(3, 1, 256, 4, 32)

    def call() -> torch.Tensor:
        return attention(query, key, value, softcap=5.0)  # the blocked pass, which works with tiles

    call()
    with MemoryProfiler("cpu") as profiler, profiler.region("call"):
        call()
    (region,) = profiler.report()["regions"]
    assert region["peak_beyond_mb"] * MIB == peak_bytes(call)
    assert region["retained_mb"] == 0.0 < query.nbytes / MIB < region["peak_beyond_mb"]


def test_a_backward_is_seen(profiler: MemoryProfiler) -> None:
    query, key, value = torch.randn(3, 1, 128, 2, 32).unbind()
    query.requires_grad_()
    with profiler.region("forward"):
        out = attention(query, key, value)
    with profiler.region("backward"):
        out.backward(torch.ones_like(out))
    forward, backward = profiler.report()["regions"]
    assert forward["retained_mb"] * MIB == out.nbytes + 2 * 128 * 4  # and the LSE
    assert query.grad is not None and backward["retained_mb"] * MIB == query.grad.nbytes - 2 * 128 * 4


def test_the_process_and_the_machine_are_read_where_the_system_says_them(profiler: MemoryProfiler) -> None:
    taken = profiler.snapshot("now")
    if not Path("/proc/self/statm").exists():
        assert taken["process_mb"] is None
        return
    with mmap(-1, 64 * MIB) as touched:
        for page in range(0, 64 * MIB, 4096):
            touched[page] = 1
        after = profiler.snapshot("touched")
    assert after["allocated_mb"] == taken["allocated_mb"]  # it is not torch's
    assert 60 < after["process_mb"] - taken["process_mb"] < 80
    assert after["reserved_mb"] == after["process_mb"] < after["device_mb"]


# Regions


def test_a_region_has_the_peaks_of_those_within_and_not_of_those_beside(profiler: MemoryProfiler) -> None:
    with profiler.region("before"):
        mebibytes(50)
    with profiler.region("outer"):
        kept = mebibytes(1)
        with profiler.region("inner"):
            mebibytes(10)
            profiler.snapshot("within")  # reads, and so resets, the peak
        mebibytes(4)
    regions = {one["name"]: one for one in profiler.report()["regions"]}
    assert list(regions) == ["before", "outer", "outer/inner"]
    assert [one["depth"] for one in regions.values()] == [0, 0, 1]
    assert [one["peak_mb"] for one in regions.values()] == [50.0, 11.0, 11.0]
    assert [one["retained_mb"] for one in regions.values()] == [0.0, 1.0, 0.0]
    assert regions["outer/inner"]["before_mb"] == 1.0 and regions["outer/inner"]["peak_beyond_mb"] == 10.0
    assert regions["outer"]["time_s"] >= regions["outer/inner"]["time_s"] > 0
    del kept


def test_a_region_decorates_a_function_and_ends_where_an_error_leaves_it(profiler: MemoryProfiler) -> None:
    @profiler.region("step")
    def step() -> None:
        mebibytes(2)
        raise ValueError("on the way")

    for _ in range(2):
        with pytest.raises(ValueError, match="on the way"):
            step()
    regions = profiler.report()["regions"]
    assert [(one["name"], one["depth"], one["peak_beyond_mb"]) for one in regions] == [("step", 0, 2.0)] * 2
    assert all(one["time_s"] is not None for one in regions)


def test_a_region_in_which_the_profiler_stops_stays_open(profiler: MemoryProfiler) -> None:
    with profiler.region("cut"):
        mebibytes(2)
        profiler.stop()
    (region,) = profiler.report()["regions"]
    assert region["peak_mb"] == 2.0 and region["after_mb"] is region["time_s"] is region["retained_mb"] is None
    assert "cut" in str(profiler)


# Reports


def test_the_report_has_what_the_documents_of_old_show(profiler: MemoryProfiler) -> None:
    kept = mebibytes(2)
    profiler.snapshot("made")
    report = profiler.report()
    assert {"label", "allocated_mb", "reserved_mb", "timestamp"} <= report["snapshots"][0].keys()
    assert [one["label"] for one in report["snapshots"]] == ["start", "made"]
    assert {"peak_allocated_mb", "peak_reserved_mb"} <= report.keys()
    (delta,) = report["deltas"]
    assert (delta["from"], delta["to"], delta["allocated_delta_mb"]) == ("start", "made", 2.0)
    assert delta["time_delta_s"] > 0
    del kept


def test_a_diff_spans_snapshots_and_knows_the_peak_between(profiler: MemoryProfiler) -> None:
    first = mebibytes(1)
    profiler.snapshot("a")
    mebibytes(7)
    profiler.snapshot("b")
    second = mebibytes(2)
    profiler.snapshot("b")
    assert profiler.diff("start", "a")["peak_allocated_mb"] == 1.0
    whole = profiler.diff("a", -1)
    assert (whole["allocated_delta_mb"], whole["peak_allocated_mb"]) == (2.0, 8.0)
    assert profiler.report()["deltas"] == [profiler.diff(at, at + 1) for at in range(3)]
    del first, second


def test_a_second_start_forgets(profiler: MemoryProfiler) -> None:
    kept = mebibytes(9)
    profiler.start()
    report = profiler.report()
    assert report["peak_allocated_mb"] == 0.0 and len(report["snapshots"]) == 1
    del kept


def test_json_is_the_report(profiler: MemoryProfiler, tmp_path: Path) -> None:
    with profiler.region("make"):
        mebibytes(1)
    profiler.stop()
    text = profiler.to_json(tmp_path / "memory.json")
    assert json.loads(text) == json.loads((tmp_path / "memory.json").read_text()) == profiler.report()


def test_the_table_has_a_line_for_everything(profiler: MemoryProfiler) -> None:
    with profiler.region("outer"), profiler.region("inner"):
        mebibytes(12)
    lines = str(profiler).splitlines()
    assert lines[0].startswith("cpu: at most 12.0 MiB allocated")
    assert [line.split()[0] for line in lines[1:]] == ["snapshot", "start", "region", "outer", "inner"]
    assert lines[-1].startswith("  inner") and lines[-1].split()[1:3] == ["0.0", "12.0"]


@pytest.mark.parametrize("with_regions", [True, False])
def test_the_picture_has_the_names(profiler: MemoryProfiler, with_regions: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    if with_regions:
        with profiler.region("attention block"):
            mebibytes(2)
    profiler.snapshot("halfway")
    profiler.plot(tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert "halfway" in drawn and "MiB" in drawn and ("attention block" in drawn) == with_regions


# Refusals


def test_nothing_is_taken_down_by_a_profiler_that_does_not_run() -> None:
    profiler = MemoryProfiler("cpu")
    with pytest.raises(RuntimeError, match=r"snapshot: expected a profiler that runs.*start\(\)"):
        profiler.snapshot("early")
    with pytest.raises(RuntimeError, match="region: expected a profiler that runs"), profiler.region("early"):
        pass
    with pytest.raises(RuntimeError, match="report: expected a profiler that was started"):
        profiler.report()
    profiler.stop()  # has nothing to end


def test_snapshots_that_are_not_there_or_not_after_are_refused(profiler: MemoryProfiler) -> None:
    for label in ("step", "step", "end"):
        profiler.snapshot(label)
    with pytest.raises(ValueError, match="snapshot: expected the label of one snapshot; got 'nothing', that of 0"):
        profiler.diff("start", "nothing")
    with pytest.raises(ValueError, match=r"'step', that of 2\. Name it by its number"):
        profiler.diff("start", "step")
    with pytest.raises(ValueError, match="second: expected a snapshot after 'end'; got 'start'"):
        profiler.diff("end", "start")
    with pytest.raises(ValueError, match="snapshot: expected a number below 4; got 4"):
        profiler.diff(0, 4)


def test_devices_without_an_allocator_to_read_are_refused() -> None:
    with pytest.raises(ValueError, match="device: expected cpu or cuda; got meta"):
        MemoryProfiler("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device: expected cpu, as torch finds no CUDA device; got cuda"):
            MemoryProfiler("cuda")
        assert MemoryProfiler().device.type == "cpu"


def test_another_profiler_is_not_disturbed() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="expected no other torch profiler"):
            MemoryProfiler("cpu").start()
        assert torch._C._autograd._profiler_enabled()


def test_one_that_is_forgotten_leaves_no_profiler_of_torch_behind() -> None:
    profiler = MemoryProfiler("cpu")
    profiler.start()
    assert torch._C._autograd._profiler_enabled()
    del profiler
    gc.collect()
    assert not torch._C._autograd._profiler_enabled()
