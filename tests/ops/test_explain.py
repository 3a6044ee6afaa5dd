"""explain(): what a call would do, in words, without doing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import UnsupportedProblem, attention, explain
from stream_attention.backends.eager import blocked as eager
from stream_attention.dispatch.plan import plan
from stream_attention.ops.explain import problems_of_call


def qkv(**options: Any) -> list[Tensor]:
    return [torch.zeros(1, 8, 2, 4, **options) for _ in range(3)]


# What it prints


def test_explain_prints_the_plan_it_returns(capsys: pytest.CaptureFixture[str]) -> None:
    planned = explain(*qkv(), causal=True)
    assert planned == plan(planned.problem)
    assert capsys.readouterr().out == f"{planned}\n"


@pytest.mark.parametrize(
    ("return_lse", "heading"),
    [(False, "of the same call"), (True, "of the same call, with a gradient through the LSE")],
)
def test_explain_prints_the_backward_where_a_gradient_is_wanted(
    return_lse: bool, heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = explain(*qkv(requires_grad=True), causal=True, return_lse=return_lse)
    printed = capsys.readouterr().out
    backward = plan(planned.problem.replace(backward=True, lse_grad=return_lse))
    assert printed == "\n".join([str(planned), f"backward  {heading}", *str(backward).splitlines()[1:], ""])
    assert printed.count("Tq=8") == 1  # one call, one problem
    assert not planned.problem.backward


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("heads", "first", "then"),
    [
        (64, "gluon: 2 warpgroups of ", "gluon: one pass, tiles of "),
        (1, "triton: tiles of ", "triton: dQ in tiles of "),
    ],
)
def test_explain_shows_forward_and_backward_on_a_gpu(
    heads: int, first: str, then: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    shape = (1, 1024, heads, 128)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
    planned = explain(*tensors, causal=True)
    printed = capsys.readouterr().out.splitlines()
    forward, backward = printed[: len(printed) // 2], printed[len(printed) // 2 :]
    assert planned.backend == first.partition(":")[0]
    assert forward[0].startswith("forward   dense B=1 Tq=1024") and backward[0].startswith("backward  of the same call")
    assert forward[1].startswith(f"backend   {first}") and backward[1].startswith(f"backend   {then}")
    passed_over = [line.startswith("not       gluon: the call is short") for line in (*forward[2:], *backward[2:])]
    assert passed_over == [True, True] * (heads == 1)


def test_explain_takes_packed_sequences() -> None:
    offsets = torch.tensor([0, 3, 8])
    planned = explain(*(t[0] for t in qkv()), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert planned.problem.packed and (planned.problem.batch, planned.problem.q_len) == (2, 5)


# What it does not do


def test_explain_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(eager, "forward", lambda *args: calls.append(args))
    explain(*qkv(requires_grad=True), softcap=3.0)
    assert calls == []


def test_tensors_without_data_pose_the_problem_of_those_with() -> None:
    options: dict[str, Any] = {"causal": True, "window": (3, 3), "dropout_p": 0.1, "return_lse": True}
    (forward, backward), backend = problems_of_call(*qkv(requires_grad=True), **options, backend="eager")
    elsewhere, _ = problems_of_call(*qkv(requires_grad=True, device="meta"), **options)
    assert backend == "eager" and backward == forward.replace(backward=True, lse_grad=True)
    assert [one.replace(device=torch.device("cpu")) for one in elsewhere] == [forward, backward]
    with torch.no_grad():
        assert problems_of_call(*qkv(requires_grad=True), **options)[0] == [forward]


@pytest.mark.parametrize(
    ("shape", "transposed"),
    [((1, 2, 257, 8), True), ((1, 4, 32, 8), True), ((1, 5, 32, 8), False), ((1, 1, 32, 8), False)],
    ids=str,
)
def test_explain_says_where_the_layout_looks_transposed(
    shape: tuple[int, ...], transposed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    explain(*[torch.zeros(shape)] * 3)
    last = capsys.readouterr().out.splitlines()[-1]
    words = f"layout    looks transposed: {list(shape)} is read as [B, T, H, D]; pass x.transpose(1, 2)"
    assert (last == words) == transposed


# Refusals


def test_explain_raises_what_the_call_would() -> None:
    with pytest.raises(ValueError, match="softcap"):
        explain(*qkv(), softcap=-1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        explain(*qkv(), casual=True)


def test_a_plan_that_is_refused_is_not_half_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for refusing in (explain, attention):
        with pytest.raises(UnsupportedProblem, match="backend 'triton' cannot do this problem"):
            refusing(*qkv(requires_grad=True), backend="triton")
    assert capsys.readouterr().out == ""
