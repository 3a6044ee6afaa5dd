"""Calls in CUDA graphs, and reading at full speed: what only a GPU can show."""

from __future__ import annotations

import pytest
import torch

from stream_attention_tools.bench.bandwidth import read_bandwidth
from stream_attention_tools.bench.providers import by_name
from stream_attention_tools.bench.run import Timed, graphed, measure
from stream_attention_tools.bench.suites import Cell
from stream_attention_tools.bench.timing import captured
from stream_attention_tools.testing.inputs import Case, draw

pytestmark = pytest.mark.gpu

CASE = Case(B=2, Tq=1, Tk=1024, Hq=8, Hkv=2, D=64, Dv=64, dtype=torch.bfloat16, device="cuda")
KINDS = ("paged 16", "fp8", "int8", "int4", "batch invariant", "triton")


def test_both_clocks_measure_every_kind_and_its_peers() -> None:
    cell = Cell("cell", CASE, "forward", ("decode",), ("sdpa flash", "sdpa cudnn"), beside=KINDS, unit="TB/s")
    entry = measure(cell, by_name(), "graph", repeats=5, warmup=1, eager="eager")
    for name, one in entry["providers"].items():
        assert one["right"] and one["median_ms"] > 0 and one["eager"]["median_ms"] > 0, (name, one)
    assert entry["ratio"] > 0 and entry["eager"]["ratio"] > 0


def test_a_replay_that_writes_something_else_is_seen() -> None:
    count = torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match="replayed, its result is off by"):
        captured([lambda: count.add_(1).clone()], allowed=0.5)


def test_a_peer_that_synchronises_has_no_graph_and_ours_must_have_one() -> None:
    x = draw(CASE)

    def synchronises() -> torch.Tensor:
        return x.query * float(x.query.sum())

    assert "no CUDA graph of it" in str(graphed(by_name()["sdpa"], [synchronises], 1.0))
    with pytest.raises(RuntimeError):
        graphed(by_name()["decode"], [synchronises], 1.0)
    assert isinstance(graphed(by_name()["sdpa"], [lambda: x.query * 2], 1.0), Timed)  # nothing is left behind


def test_a_kernel_of_ours_is_among_the_ways_to_read() -> None:
    read = read_bandwidth("cuda", "graph")
    assert len(read["ways"]) == 3 and 0.05 < read["tb_per_s"] < 20
