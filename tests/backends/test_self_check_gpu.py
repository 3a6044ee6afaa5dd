"""The self-check on a Hopper GPU: its verdict on each kind of kernel, its time, and that the caller notices nothing.

The installed Triton is taken for a newer one than the Hopper kernels ran with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu_tools import BF16, captured, keep, qkv

from stream_attention import attention, explain
from stream_attention.backends import BY_NAME, installed, probe, sdpa_time, self_check
from stream_attention.backends.probe import Answer
from stream_attention.base.kv_layouts.quantized_tensor import Coding
from stream_attention.base.problem import KV, Operands, Problem, Scores, Shape, hardware_of
from stream_attention.dispatch import launch_cache, prepare
from stream_attention.dispatch.plan import forget_plans, plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="it is for Hopper"
    ),
]

RELEASE = "99.0"
LARGE = {"B": 2, "Tq": 4096, "Tk": 4096, "Hq": 16, "Hkv": 16, "D": 128}


def problem(**facts: Any) -> Problem:
    shape, device = Shape(2, 4096, 16, 4, 128, 128), torch.device("cuda", torch.cuda.current_device())
    stated = Problem(shape, KV("dense", 4096), Operands(BF16), hardware_of(device), scores=Scores(128**-0.5))
    return stated.replace(**facts)


def dims(dim: int, value_dim: int | None = None) -> dict[str, int]:
    return {"head_dim": dim, "value_dim": value_dim or dim}


def cached(format: str, dim: int) -> dict[str, Any]:
    coding = Coding(format, 64, True, False, torch.float16, 192, True, True)
    return {"layout": "cache", "coding": coding, "q_len": 1, **dims(dim)}


KINDS: dict[str, dict[str, Any]] = {
    **{f"forward {dim}": dims(dim) for dim in (64, 128, 256)},
    "forward 256 and 128": dims(192, 128),
    **{f"backward {dim}": {"backward": True, **dims(dim)} for dim in (64, 128, 256)},
    **{f"fp8 {dim}": {"fp8": True, **dims(dim)} for dim in (64, 128, 256)},
    **{f"decode {format} {dim}": cached(format, dim) for format in ("int4", "int8", "fp8") for dim in (64, 128)},
}

found: dict[str, dict[str, Any]] = {}


@pytest.fixture(autouse=True)
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A newer Triton, and no answers; to call it is to forget them. Compiled kernels stay."""
    monkeypatch.delenv("STREAM_ATTENTION_HOPPER", raising=False)
    monkeypatch.setattr(installed, "triton_release", lambda: RELEASE)
    monkeypatch.setattr(prepare, "_warned", set())
    folders = iter(range(1000))

    def forget() -> None:
        folder = tmp_path / str(next(folders))
        monkeypatch.setattr(probe, "folder", lambda: folder)
        monkeypatch.setattr(probe, "_answers", {})
        forget_plans()
        launch_cache.clear()

    forget()
    yield forget
    forget_plans()
    launch_cache.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_agree_and_it_takes_less_than_a_second_beyond_compiling(
    kind: str, newer: Callable[[], None]
) -> None:
    asked = problem(**KINDS[kind])
    seconds = []
    for _ in range(2):  # the first compiles
        newer()
        begun = time.perf_counter()
        planned = plan(asked)
        seconds.append(time.perf_counter() - begun)
        assert planned.backend == "gluon", planned
    (kept,) = probe.folder().glob("*.json")
    answer = json.loads(kept.read_text())
    found[kind] = {"words": answer["words"], "seconds": round(seconds[1], 4), "with compiling": round(seconds[0], 2)}
    keep(found, "kinds", "self_check")
    assert answer["yes"] and answer["gpu"] == torch.cuda.get_device_name()
    assert seconds[1] < 1, f"{seconds[1]:.2f} s, all kernels compiled"


@pytest.mark.parametrize("kind", ["forward 128", "backward 64", "fp8 128", "decode int4 128"])
def test_what_the_check_allows_is_far_from_a_wrong_tile(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 64 rows of a result are those of another head."""
    right = self_check._compute

    def wrong(backend: Any, *call: Any) -> tuple[torch.Tensor, ...]:
        first, *rest = right(backend, *call)
        if backend.name == "gluon":
            first = first.clone()
            first.flatten(0, -3)[:64] = first.flatten(0, -3)[:64].roll(1, -2)
        return (first, *rest)

    monkeypatch.setattr(self_check, "_compute", wrong)
    planned = plan(problem(**KINDS[kind]))
    assert planned.backend == "triton" and "failed the self-check" in planned.passed_over[0][1][0]


def test_the_first_call_checks_and_is_right_and_leaves_the_caller_alone(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = qkv(**LARGE)
    expected = attention(*tensors, causal=True, backend="triton")
    state, stream = torch.cuda.get_rng_state(), torch.cuda.Stream()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.cuda.stream(stream), torch.autocast("cuda", dtype=torch.float16), torch.inference_mode():
            out = attention(*(t.float() for t in tensors), causal=True)
            assert torch.cuda.current_stream() == stream and torch.is_autocast_enabled("cuda")
            assert out.dtype is torch.float16 and torch.is_inference_mode_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.cuda.synchronize()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert explain(*tensors, causal=True).backend == "gluon"
    assert "\nchecked   forward with Triton " in capsys.readouterr().out


def test_a_first_call_in_a_capture_runs_the_portable_kernel_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv(**LARGE)
    captured(lambda: attention(*tensors, backend="triton"))  # which compiles it
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="not checked yet with Triton"), torch.cuda.graph(graph):
        out = attention(*tensors)
    graph.replay()
    torch.testing.assert_close(out, attention(*tensors, backend="triton"))
    assert not list(probe.folder().glob("*.json"))
    assert plan(problem(kv_heads=16, right=0)).backend == "gluon"  # behind it another call checks


def test_a_compiled_graph_checks_when_it_first_runs() -> None:
    tensors = qkv(**LARGE)
    out = torch.compile(lambda *tensors: attention(*tensors, causal=True) * 2)(*tensors)
    (kept,) = probe.folder().glob("*.json")
    assert json.loads(kept.read_text())["yes"]
    torch.testing.assert_close(out, attention(*tensors, causal=True, backend="triton") * 2, atol=4e-2, rtol=4e-2)


def test_kernels_that_fail_leave_the_call_to_the_portable_one_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*call: Any) -> Any:
        raise AttributeError("'Rows' object has no attribute 'x'")

    monkeypatch.setattr(type(BY_NAME["gluon"]), "prepare", raises)
    tensors = qkv(**LARGE)
    with pytest.warns(UserWarning, match="failed the self-check .*'Rows' object.*pip install torch"):
        out = attention(*tensors)
    assert torch.equal(out, attention(*tensors, backend="triton"))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_portable_kernel_is_timed_beside_torchs(
    dim: int, backward: bool, newer: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU that our kernels never ran on."""
    monkeypatch.setattr(installed, "RAN_ON", {})
    monkeypatch.setenv("STREAM_ATTENTION_HOPPER", "off")
    asked = problem(kv_heads=16, backward=backward, **dims(dim))
    for _ in range(2):
        newer()
        begun = time.perf_counter()
        planned = plan(asked)
        seconds = time.perf_counter() - begun
    answer = sdpa_time.answer(asked)
    assert isinstance(answer, Answer) and "ms, torch's" in answer.words
    assert planned.backend == ("triton" if answer.yes else "eager") and seconds < 1
    found[f"timed, {asked.kind} {dim}"] = {"words": answer.words, "seconds": round(seconds, 4)}
    keep(found, "kinds", "self_check")
