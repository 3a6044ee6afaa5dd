"""The sweep, as far as it goes without a GPU: what it tries, and what it proposes from what it measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stream_attention.backends.triton.tuning import Tile, TritonConfig
from stream_attention_tools.testing.offline import compiling_for
from stream_attention_tools.tune import KERNELS, MODIFIERS, Cell, bench, candidates, main, propose, random_problem


def rows_held(kernel: str, config: Any) -> int:
    """Rows of operands in shared memory: those a program owns, and those that stream by, once per stage."""
    block_m, block_n, stages = config.block_m, config.block_n, config.num_stages
    if kernel == "forward":
        return block_m + stages * 2 * block_n
    if kernel == "query":
        return 2 * block_m + stages * 2 * block_n
    return stages * 2 * (block_m + block_n) if kernel == "bias" else 2 * block_n + stages * 2 * block_m


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_fit_the_shared_memory(kernel: str, head_dim: int, dtype: torch.dtype) -> None:
    found = candidates(kernel, head_dim, dtype)
    assert len(found) == len(set(found)) >= (9 if kernel == "forward" else 5)
    for config in found:
        assert type(config) is (TritonConfig if kernel == "forward" else Tile)
        assert head_dim * dtype.itemsize * rows_held(kernel, config) <= 227 * 1024


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_cell_poses_the_problem_it_is_named_for(modifier: str) -> None:
    cell = Cell(64, 128, True, torch.bfloat16, modifier)
    problem, inputs = random_problem(cell.case("cpu", batch=2))
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


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_candidate_compiles_as_it_would_be_launched(kernel: str) -> None:
    cell = Cell(64, 128, False, modifier="bias" if kernel == "bias" else "")
    problem, inputs = random_problem(cell.case("cpu", batch=1))
    problem = problem.replace(device=torch.device("cuda"), arch=90, num_sms=132)
    with compiling_for(90) as compiled:
        bench(kernel, problem, inputs).launch(candidates(kernel, 64)[0])
    assert compiled[-1].metadata.name == f"_{'key' if kernel in ('dk', 'dv') else kernel}_kernel"


def measured(config: list[int], length: int, ms: float, kernel: str = "key") -> dict[str, Any]:
    row = {"head_dim": 64, "causal": False, "modifier": "", "kernel": kernel, "length": length, "config": config}
    return row | {"ms": ms, "tflops": 300 / ms, "sdpa_ms": 2.0, "error": ""}


def test_it_proposes_the_fastest_over_all_lengths_and_says_where_it_was_measured() -> None:
    fast, slow, partial = [128, 64, 4, 3, 1], [64, 64, 4, 2, 1], [64, 32, 4, 2, 1]
    rows = [
        measured(slow, 512, 1.0),
        measured(slow, 8192, 2.0),
        measured(fast, 512, 1.25),
        measured(fast, 8192, 1.0),
        measured(partial, 512, 0.1),  # not measured at 8192: nothing to propose
        measured(slow, 512, 4.0, "query"),  # by itself
    ]
    best, second, other = propose(rows, "a GPU, a day")
    assert best.startswith("D=64 full plain key: (128, 64, 4, 3)") and "0.89 of the best (0.80 1.00 at [512" in best
    assert "240 300 TFLOP/s, 0.62 0.50 of the time of plain SDPA; a GPU, a day" in best
    assert second.startswith("D=64 full plain key: (64, 64, 4, 2)") and "0.71 of the best" in second
    assert other.startswith("D=64 full plain query: (64, 64, 4, 2)") and "2.00 of the time of plain SDPA" in other


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main([]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--head-dims", "20"], "--head-dims: expected multiples of 8 up to 256"),
        (["--lengths", "0"], "--lengths: expected positive numbers; got 0"),
        (["--lengths", "1000"], "--lengths: expected divisors of 16384"),
        (["--repeats", "0"], "--repeats: expected positive numbers; got 0"),
        (["--kernels", "forward", "key"], "--kernels: sweep the forward by itself"),
        (["--kernels", "bias"], "expected --modifiers bias"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_with_or_without_a_gpu(
    wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(wrong)
    assert words in capsys.readouterr().err
