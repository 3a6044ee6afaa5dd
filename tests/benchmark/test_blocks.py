"""The sweep of tile sizes up to 256: what it tries, its table, and the page that has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.studies import blocks

from stream_attention.backends.triton.tuning import FORCEABLE, TritonConfig

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results" / "h200" / "block_sweep.json"


def test_every_size_is_one_that_a_caller_may_force() -> None:
    found = blocks.configs()
    assert len(found) == len(set(found)) == 48
    assert {(config.block_m, config.block_n) for config in found if 256 in config[:2]} == {
        *((256, keys) for keys in (32, 64, 128, 256)),
        *((queries, 256) for queries in (64, 128)),
    }
    for config in found:
        assert all(getattr(config, name) in legal for name, legal in FORCEABLE.items())


def row(config: TritonConfig, dim: int, causal: bool, **figures: Any) -> dict[str, Any]:
    return {"head_dim": dim, "causal": causal, "config": list(config), "error": ""} | figures


def test_the_table_has_the_fastest_of_a_size_and_says_what_does_not_fit() -> None:
    full = "OutOfResources: out of resource: shared memory, Required: 327680, Hardware limit: 232448."
    rows = []
    for dim in blocks.HEAD_DIMS:
        for causal in (False, True):
            for config in blocks.configs():
                if config[:2] == (256, 256):
                    figures = {"error": full if dim == 128 else "RuntimeError: ptxas"}
                else:
                    figures = {"tflops": 100.0 * config.num_warps + config.num_stages}
                rows.append(row(config, dim, causal, **figures))
    heading, _, *lines = blocks.table(rows).splitlines()
    assert heading.endswith("| 256 x 128 | 256 x 256 |") and len(lines) == 4
    assert lines[0] == f"| d64 full |{' 803 |' * 11} failed |"
    assert lines[3] == f"| d128 causal |{' 803 |' * 11} too large |"


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert blocks.main(["--out", str(tmp_path / "sweep.json")]) == 1
    assert "the sweep needs a GPU" in capsys.readouterr().err


def test_the_page_says_what_was_measured() -> None:
    if not FILE.exists():
        command = "python3 -m benchmarks.studies.blocks --out benchmarks/results/h200/block_sweep.json"
        pytest.skip(f"no {FILE.name} yet; on the H200: {command}")
    found = json.loads(FILE.read_text())
    assert "H200" in found["machine"]["name"] and found["commit"]["hash"]
    assert len(found["rows"]) == 4 * len(blocks.configs())
    assert blocks.table(found["rows"]) in (ROOT / "docs" / "performance.md").read_text()
