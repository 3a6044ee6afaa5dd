"""The comparison of Triton releases: its arithmetic, its results file, and the table in the documentation."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.releases import __main__ as releases

from stream_attention.backends.installed import HOPPER_TRITON
from stream_attention_tools.bench.suites import flops

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results" / "h200" / "releases.json"
RESULT = json.loads(FILE.read_text(encoding="utf-8"))


def one_round(triton: str, us: float) -> dict[str, Any]:
    return {
        "versions": {"triton": triton},
        "cells": {name: {"us": us, "flop": 1e12} for name in releases.cells(short=True)},
    }


def test_ratios_are_of_the_medians_and_mean_speed() -> None:
    rounds = {
        "3.6.0": [one_round("3.6.0", us) for us in (100.0, 90.0, 500.0)],
        "3.9.0": [one_round("3.9.0", us) for us in (200.0, 210.0, 190.0)],
    }
    result = releases.combined(rounds, argparse.Namespace(repeats=20), 3)
    assert set(result["speed"]["3.9.0"].values()) == {0.5}
    assert result["geometric_mean"]["3.9.0"] == pytest.approx({"forward": 0.5, "backward": 0.5})
    assert set(result["tflops"]["3.6.0"].values()) == {1e12 / 100 / 1e6}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch, causal: bool, direction: str) -> None:
    import stream_attention

    right, off = stream_attention.attention, 0.0

    def attention(*tensors: Any, backend: str, **options: Any) -> Any:
        return right(*tensors, backend="eager", **options) + off * tensors[2].sum(1, keepdim=True)

    monkeypatch.setattr(stream_attention, "attention", attention)
    tensors = [torch.randn(2, 32, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad = torch.randn_like(tensors[0])
    releases.check(tensors, grad, causal, direction)()
    off = 0.1
    with pytest.raises(AssertionError, match="a wrong kernel is not timed"):
        releases.check(tensors, grad, causal, direction)


def test_the_results_are_of_the_whole_grid_and_of_one_machine() -> None:
    assert RESULT["baseline"] == "3.6.0" and RESULT["machine"]["name"] == "NVIDIA H200"
    cells = releases.cells(short=False)
    assert cells and all(its.keys() == cells.keys() for its in RESULT["us"].values())
    for name, cell in cells.items():
        us = statistics.median(RESULT["us"]["3.6.0"][name])
        assert RESULT["tflops"]["3.6.0"][name] == pytest.approx(flops(cell.case, cell.direction) / us / 1e6)
    assert all(len(rounds) >= 3 for its in RESULT["us"].values() for rounds in its.values())


def test_the_newer_release_keeps_most_of_the_speed() -> None:
    """What was reached; docs/performance.md says what is missing."""
    speed = RESULT["speed"]["3.9.0"]
    assert min(speed.values()) > 0.86
    assert all(mean > 0.97 for mean in RESULT["geometric_mean"]["3.9.0"].values())


def test_the_documentation_shows_the_results() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- releases -->\n(.*?)\n<!-- /releases -->", page, re.DOTALL)
    assert shown is not None
    assert shown[1] == releases.markdown(RESULT), f"python -m benchmarks.releases --show {FILE.relative_to(ROOT)}"


@pytest.mark.parametrize("release", HOPPER_TRITON)
@pytest.mark.parametrize(("direction", "least"), [("forward", 300), ("backward", 100)])
def test_random_problems_were_right_with_each_enabled_release(release: str, direction: str, least: int) -> None:
    folder = FILE.parent if release == "3.6" else FILE.parent / f"triton-{release}"
    summary = json.loads((folder / f"gpu_tests_gluon_{direction}.json").read_text(encoding="utf-8"))
    assert summary["versions"]["triton"].startswith(f"{release}.") and not summary["failed"]
    assert summary["random problems"]["problems"] >= least and not summary["random problems"]["failed"]


@pytest.mark.parametrize("release", ["3.7", "3.8"])
def test_other_releases_ran_the_short_grid(release: str) -> None:
    """A process that measures checks each cell first."""
    found = json.loads((FILE.parent / f"triton-{release}" / "cells.json").read_text(encoding="utf-8"))
    assert found["versions"]["triton"].startswith(f"{release}.")
    assert found["cells"].keys() == releases.cells(short=True).keys()


@pytest.mark.parametrize("which", ["gluon_forward", "gluon_backward", "gluon_shards", "append"])
def test_the_gpu_tests_passed_with_the_newest_release(which: str) -> None:
    summary = json.loads((FILE.parent / "triton-3.9" / f"gpu_tests_{which}.json").read_text(encoding="utf-8"))
    assert summary["versions"]["triton"].startswith("3.9.")
    assert summary["passed"] > 0 and not summary["failed"] and not summary["error"]


def test_the_readme_says_what_the_newest_release_costs() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    means, speed = RESULT["geometric_mean"]["3.9.0"].values(), RESULT["speed"]["3.9.0"].values()
    (mean,) = {f"{one:.2f}" for one in means}
    assert f"at {mean} of that speed on average and at {min(speed):.2f} in the slowest cell" in readme


COMMITS = json.loads((FILE.parent / "commits.json").read_text(encoding="utf-8"))


def test_kernels_are_as_fast_as_before_the_work_on_one_road() -> None:
    """The file compares an earlier commit, the other one, with a later: its speeds are the earlier one's."""
    (before,) = COMMITS["speed"]
    cells = COMMITS["speed"][before]
    assert {sum(name.endswith(one) for name in cells) for one in ("forward", "backward")} == {36}
    assert sum(name.endswith("decode") for name in cells) == 10
    assert all(len(times) >= 4 for its in COMMITS["us"].values() for times in its.values())
    assert max(COMMITS["geometric_mean"][before].values()) < 1 / 0.995
    assert sum(speed > 1 / 0.98 for speed in cells.values()) <= 1 and max(cells.values()) < 1 / 0.97
