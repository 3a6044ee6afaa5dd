"""The sweep, as far as it goes without a GPU: what it tries, and what it proposes from what it measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stream_attention.testing.offline import compiling_for
from stream_attention.tuning.search import MODIFIERS, Cell, candidates, main, propose


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_candidates_fit_the_shared_memory(head_dim: int, dtype: torch.dtype) -> None:
    found = candidates(head_dim, dtype)
    assert len(found) == len(set(found)) >= 10
    for config in found:
        tiles = config.block_m + 2 * config.num_stages * config.block_n
        assert head_dim * dtype.itemsize * tiles <= 227 * 1024


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_cell_poses_the_problem_it_is_named_for(modifier: str) -> None:
    cell = Cell(64, 128, True, torch.bfloat16, modifier)
    inputs = cell.inputs("cpu", batch=2)
    problem = cell.problem(inputs)
    posed = {
        "window": problem.left >= 0,
        "mask": problem.mask and inputs.mask is not None and inputs.mask.shape[2] > 1,
        "key mask": problem.mask and inputs.mask is not None and inputs.mask.shape[2] == 1,
        "bias": problem.bias is not None,
        "alibi": problem.alibi,
        "softcap": problem.softcap > 0,
        "sink": problem.sink,
        "dropout": problem.dropout_p > 0 and inputs.seed is not None,
    }
    assert [name for name, is_posed in posed.items() if is_posed] == ([modifier] if modifier else [])
    assert problem.right == 0 and problem.batch == 2


def test_every_candidate_of_a_head_dim_compiles_as_it_would_be_launched() -> None:
    from stream_attention.kernels.triton.forward import launch_forward

    cell = Cell(64, 128, False)
    inputs = cell.inputs("cpu", batch=1)
    out, lse = torch.empty_like(inputs.query), torch.empty(1, 32, 128)
    with compiling_for(90) as compiled:
        launch_forward(cell.problem(inputs), inputs, candidates(64)[0], out, lse)
    assert len(compiled) == 1


def measured(config: list[int], length: int, tflops: float, **more: Any) -> dict[str, Any]:
    row = {"head_dim": 64, "causal": False, "modifier": "", "length": length, "config": config}
    return row | {"ms": 1.0, "tflops": tflops, "sdpa_tflops": 100.0, "error": ""} | more


def test_it_proposes_the_fastest_over_all_lengths_and_says_where_it_was_measured() -> None:
    fast, slow, partial = [128, 64, 4, 3, 1, False], [64, 64, 4, 2, 1, False], [64, 32, 4, 2, 1, False]
    rows = [
        measured(slow, 512, 150.0),
        measured(slow, 8192, 90.0),
        measured(fast, 512, 120.0),
        measured(fast, 8192, 130.0),
        measured(partial, 512, 500.0),  # not measured at 8192: nothing to propose
    ]
    best, second = propose(rows, "a GPU, a day")
    assert (
        best.startswith("D=64 full plain: TritonConfig(128, 64, 4, 3)") and "x1.25 of plain SDPA (1.20 1.30 at" in best
    )
    assert "a GPU, a day" in best and "TritonConfig(64, 64, 4, 2)" in second


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main([]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
