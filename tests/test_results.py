"""What is claimed is in a results file, and the results meet the bars they are held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def speedups(over: str) -> dict[str, float]:
    """By cell of the forward grid, how many times faster the Triton forward is than a peer in the same run."""
    cells = {cell["name"]: cell["providers"] for cell in results("h200/forward")["cells"]}
    return {name: its[over]["median_ms"] / its["triton"]["median_ms"] for name, its in cells.items()}


def test_the_grid_is_complete() -> None:
    grid = {
        f"d{dim} {kind} {length}"
        for dim in (64, 128, 256)
        for kind in ("full", "causal")
        for length in (512, 1024, 2048, 4096, 8192, 16384)
    }
    assert set(speedups("sdpa flash")) == grid


def test_every_provider_was_right_before_it_was_timed() -> None:
    for name in ("cpu/cpu", "h200/forward", "h200/modifiers", "h200/decode"):
        for cell in results(name)["cells"]:
            timed = [one for one in cell["providers"].values() if "median_ms" in one]
            assert timed and all(one["right"] for one in timed), (name, cell["name"])


def test_the_triton_forward_is_never_slower_than_sdpa_flash() -> None:
    narrow = {name: ratio for name, ratio in speedups("sdpa flash").items() if not name.startswith("d256")}
    assert min(narrow.values()) >= 1.0, narrow


def test_the_readme_says_what_was_measured() -> None:
    narrow = [ratio for name, ratio in speedups("sdpa flash").items() if not name.startswith("d256")]
    claim = f"at {min(narrow):.2f}-{max(narrow):.2f} times the speed of SDPA's flash kernel in every cell"
    assert claim in (ROOT / "README.md").read_text().replace("\n", " ")


def test_cpu_bars_are_met() -> None:
    for cell in results("cpu/cpu")["cells"]:
        assert cell["ratio"] <= cell["bar"], cell["name"]


def test_the_gpu_suite_was_run_and_passed() -> None:
    summary = results("h200/gpu_tests")
    assert summary["failed"] == 0 and summary["passed"] > 60
    assert summary["random problems"]["problems"] >= 2000 and summary["random problems"]["failed"] == 0
    assert summary["commit"] and summary["versions"]["torch"] and summary["gpu"]
