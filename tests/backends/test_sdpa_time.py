"""A GPU that our kernels never ran on: when they are timed beside torch's own, and what plans make of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_here import pretend_here

from stream_attention import explain
from stream_attention.backends import installed, probe, sdpa_time
from stream_attention.backends.base import Backend
from stream_attention.backends.eager import Eager
from stream_attention.backends.probe import Answer
from stream_attention.base.problem import KV, Hardware, Operands, Problem, Scores, Shape
from stream_attention.dispatch.plan import plan

PlannedWith = Callable[[str | None], None]

FASTER = Answer(True, "forward of 1x2048x16x128, bf16, causal: 0.3 ms, torch's 0.4 ms")
SLOWER = Answer(False, "forward of 1x2048x16x128, bf16, causal: 0.5 ms, torch's 0.4 ms")


def problem(**facts: Any) -> Problem:
    """A plain one on an A100."""
    shape, scores = Shape(2, 4096, 16, 16, 128, 128), Scores(128**-0.5)
    a100 = Hardware(torch.device("cuda", 0), 80, 108)
    return Problem(shape, KV("dense", 4096), Operands(torch.bfloat16), a100, scores=scores).replace(**facts)


class Times:
    """In place of the timing: says what it is told, and counts."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked = answer, list[tuple[str, int]]()

    def __call__(self, problem: Problem, portable: Backend, torchs: Backend) -> Answer:
        assert (portable.name, torchs.name) == ("triton", "eager")
        self.asked.append((problem.kind, sdpa_time.tile_widths(problem)[0]))
        return self.answer


Timed = Callable[..., Times]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planned_with: PlannedWith) -> Timed:
    """`timed(answer, arch)`: such a GPU, on which the timing says so."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def with_answer(answer: Answer, arch: int = 80, name: str = "NVIDIA A100-SXM4-80GB") -> Times:
        pretend_here(monkeypatch, arch, name)
        planned_with(installed.HOPPER_TRITON[0])
        times = Times(answer)
        monkeypatch.setattr(sdpa_time, "compare", times)
        return times

    return with_answer


@pytest.mark.parametrize("facts", [{}, {"backward": True}, {"right": 0}, {"head_dim": 64, "value_dim": 64}], ids=str)
def test_where_torchs_op_is_faster_it_computes_plain_problems(timed: Timed, facts: dict[str, Any]) -> None:
    timed(SLOWER)
    planned = plan(problem(**facts))
    assert planned.backend == "eager" and planned.config.path == "cuda_flash"
    assert planned.passed_over[1] == ("triton", (f"on this GPU torch's own op is preferred: {SLOWER.words}",))
    assert plan(problem(**facts), "triton").backend == "triton"


@pytest.mark.parametrize("facts", [{}, {"backward": True}, {"right": 0}], ids=str)
def test_where_it_is_not_ours_do(timed: Timed, facts: dict[str, Any]) -> None:
    times = timed(FASTER)
    assert plan(problem(**facts)).backend == "triton" and len(times.asked) == 1


def test_a_direction_and_a_head_dim_are_timed_once(timed: Timed) -> None:
    times = timed(FASTER)
    for length in (1024, 4096, 8192):
        for dim in (64, 96, 128):
            plan(problem(q_len=length, k_len=length, head_dim=dim, value_dim=dim))
    plan(problem(backward=True))
    assert times.asked == [("forward", 64), ("forward", 128), ("backward", 128)]


@pytest.mark.parametrize(
    "facts",
    [
        {"mask": True},
        {"alibi": True},
        {"left": 100, "right": 0},
        {"dropout_p": 0.1},
        {"backward": True, "deterministic": True},
        {"layout": "packed"},
        {"dtype": torch.float32},
        {"q_len": 1, "k_len": 65536},
        {"value_dim": 64},
    ],
    ids=str,
)
def test_what_torchs_op_cannot_do_is_not_timed_and_ours(timed: Timed, facts: dict[str, Any]) -> None:
    times = timed(SLOWER)
    assert plan(problem(**facts)).backend == "triton" and not times.asked


def test_on_a_gpu_that_they_ran_on_nothing_is_timed(timed: Timed) -> None:
    times = timed(SLOWER, 90, "NVIDIA H100 PCIe")
    short = problem(arch=90, q_len=512, k_len=512, batch=1)
    assert plan(short).backend == "triton" and not times.asked


def test_for_a_gpu_that_is_not_here_nothing_is_timed(timed: Timed) -> None:
    times = timed(SLOWER, 90, "NVIDIA H200")
    assert plan(problem()).backend == "triton" and not times.asked


def test_each_gpu_is_timed_by_itself(timed: Timed) -> None:
    assert timed(SLOWER).asked == [] and plan(problem()).backend == "eager"
    assert timed(FASTER).asked == [] and plan(problem()).backend == "eager"  # remembered on disk
    other = timed(FASTER, name="NVIDIA A100-PCIE-40GB")
    assert plan(problem()).backend == "triton" and len(other.asked) == 1


# What explain says


def test_explain_says_that_they_never_ran_there_and_what_was_timed(
    timed: Timed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stream_attention.ops import explain as module

    problems = [problem()]
    monkeypatch.setattr(module, "problems_of_call", lambda *tensors, **arguments: (problems, "auto"))
    never = "gpu       no kernel of ours ever ran on compute capability 8.0, only on NVIDIA H200 (9.0)"
    timed(FASTER)
    explain(*torch.empty(3, 1, 8, 2, 4))
    assert capsys.readouterr().out.splitlines()[-2:] == [never, f"timed     {FASTER.words}"]
    timed(SLOWER, name="another")
    explain(*torch.empty(3, 1, 8, 2, 4))
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == never
    assert f"not       triton: on this GPU torch's own op is preferred: {SLOWER.words}" in printed
    problems[:] = [problem(arch=90)]
    explain(*torch.empty(3, 1, 8, 2, 4))
    assert "never" not in capsys.readouterr().out


# The comparison


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("ours", "theirs", "yes"), [(2.0, 2.0, True), (2.05, 2.0, True), (2.1, 2.0, False)])
def test_ours_may_be_slower_by_noise_alone(
    ours: float, theirs: float, yes: bool, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [ours, theirs] * 7
    times[0] = 100.0  # one outlier

    def ms(call: Any) -> float:
        call()
        return times.pop(0)

    monkeypatch.setattr(sdpa_time, "_ms", ms)
    asked = problem(device=torch.device("cpu"), arch=0, backward=backward, head_dim=64, value_dim=64)
    found = sdpa_time.compare(asked, Eager(), Eager(), length=64)
    kind = "backward" if backward else "forward"
    assert found == Answer(yes, f"{kind} of 1x64x16x64, bf16, causal: {ours:.3g} ms, torch's {theirs:.3g} ms")


def test_a_torch_that_lacks_its_op_is_not_faster() -> None:
    class Lacks(Eager):
        def prepare(self, *call: Any) -> Any:
            raise RuntimeError("no kernel image is available")

    found = sdpa_time.compare(problem(device=torch.device("cpu"), arch=0), Eager(), Lacks(), length=64)
    assert found == Answer(True, "torch's op raises RuntimeError")


def test_a_portable_kernel_that_fails_is_no_answer() -> None:
    class Fails(Eager):
        def prepare(self, *call: Any) -> Any:
            raise RuntimeError("Failed to find C compiler")

    with pytest.raises(probe.Unanswered):
        sdpa_time.compare(problem(device=torch.device("cpu"), arch=0), Fails(), Eager(), length=64)
