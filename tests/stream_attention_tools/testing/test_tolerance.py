"""The measure itself: it passes what is right and catches what is wrong, however little of it there is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_cases import random_case, why_not
from torch import Tensor

from stream_attention import UnsupportedProblem, attention
from stream_attention.backends.eager import blocked as eager
from stream_attention_tools.testing import (
    Case,
    check_case,
    make,
    peak_bytes,
    poisoned_memory,
    tolerance,
)

EVERYTHING = Case(
    B=2, Tq=9, Tk=12, Hq=4, Hkv=2, D=8, Dv=8, causal=True, mask=(2, 1, 9, 12), bias=(1, 4, 9, 12), alibi="BH",
    sink=True, softcap=5.0, dropout_p=0.2, lse_grad=True,
)  # fmt: skip


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Let a backend's `(out, lse)` pass through `fault` before it is checked."""
    honest = tolerance.run
    monkeypatch.setattr(tolerance, "run", lambda *arguments: fault(*honest(*arguments)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_result_has_an_error_within_a_positive_bound(dtype: torch.dtype) -> None:
    report = check_case(Case(**(vars(EVERYTHING) | {"dtype": dtype})), "eager")
    names = {"out", "lse", "d_query", "d_key", "d_value", "d_bias", "d_alibi_slopes", "d_sink"}
    assert set(report.errors) == set(report.bounds) == names
    assert all(bound > 0 for bound in report.bounds.values())
    assert 0 < report.worst <= 1


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("out", lambda out, lse: (out * (1 + 2e-5), lse)),
        ("lse", lambda out, lse: (out, lse + 2e-5)),
        ("d_query", lambda out, lse: (out.detach() + 1.0001 * (out - out.detach()), lse)),
        ("out", lambda out, lse: (out.masked_fill(torch.arange(out.numel()).view_as(out) == 100, torch.nan), lse)),
        ("lse is -inf for other rows", lambda out, lse: (out, lse.masked_fill(lse == lse.min(), -torch.inf))),
        ("out has dtype", lambda out, lse: (out.double(), lse)),
    ],
    ids=["output 2e-5 off", "lse 2e-5 off", "gradient 1e-4 off", "one nan", "one -inf", "dtype"],
)
def test_a_fault_is_caught_with_the_line_that_reproduces_it(
    monkeypatch: pytest.MonkeyPatch, what: str, fault: Any
) -> None:
    case = Case(B=2, Tq=9, Tk=12, Hq=4, Hkv=2, D=8, Dv=8, lse_grad=True)
    check_case(case, "eager")
    with_fault(monkeypatch, fault)
    with pytest.raises(AssertionError, match=what) as caught:
        check_case(case, "eager")
    first_line = str(caught.value).splitlines()[0]
    assert eval(first_line.removeprefix("check_case")) == (case, "eager")


@pytest.mark.parametrize("tip", [3e-7, -3e-7])
def test_a_tie_may_be_rounded_either_way(monkeypatch: pytest.MonkeyPatch, tip: float) -> None:
    """One key and dropout: the output is ten times the value, in bf16 often a tie, and delta is made from it.

    Eager autograd knows that the one probability has no gradient and is exact here, so that noise is all there is.
    """
    case = Case(
        B=3, Tq=2, Tk=1, Hq=1, Hkv=1, D=128, Dv=128, dtype=torch.bfloat16, seed=550028909, causal=True,
        mask=(3, 1, 1, 1), scale=0.3, dropout_p=0.9,
    )  # fmt: skip
    honest = eager._blocked_forward

    def tipped(problem: Any, inputs: Any, config: Any) -> tuple[Tensor, Tensor]:
        out, lse = honest(problem.replace(partial=True), inputs, config)
        return (out * (1 + tip)).to(problem.out_dtype), lse

    monkeypatch.setattr(eager, "_blocked_forward", tipped)
    check_case(case, "eager")
    tip *= 3e4  # half a percent is no tie
    with pytest.raises(AssertionError, match=r"wrong by more than the tolerance: .*d_query"):
        check_case(case, "eager")


def test_an_input_that_was_written_to_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = tolerance.run

    def writes(case: Case, tensors: Any, *rest: Any) -> Any:
        result = honest(case, tensors, *rest)
        tensors["key"].detach()[0, 0, 0, 0] = 0
        return result

    monkeypatch.setattr(tolerance, "run", writes)
    with pytest.raises(AssertionError, match="key was written to"):
        check_case(Case(backward=False), "eager")


def test_a_wrong_shape_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with_fault(monkeypatch, lambda out, lse: (out, lse.mT))
    with pytest.raises(AssertionError, match="lse has shape"):
        check_case(Case(backward=False), "eager")


def test_memory_nobody_wrote_is_nan_and_the_settings_come_back() -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with poisoned_memory():
            assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(5, dtype=torch.bfloat16).isnan().all()
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled


def test_peak_bytes_counts_what_lives_at_once() -> None:
    def fn() -> None:
        first = torch.zeros(1 << 20)
        second = first + 1
        del first, second
        torch.zeros(1 << 18)

    for _ in range(2):
        assert 8 << 20 <= peak_bytes(fn) < 8 << 20 | 1 << 12


def test_cases_are_reproducible_pasteable_and_equal_on_every_layout() -> None:
    rng = random.Random(0)
    for case in (random_case(rng) for _ in range(200)):
        assert eval(repr(case)) == case
        assert "\n" not in repr(case)
    drawn = [make(case) for case in (EVERYTHING, EVERYTHING)]
    assert all(torch.equal(a, b) for a, b in zip(drawn[0][:3], drawn[1][:3], strict=True))
    for layout in ("heads_first", "qkv_packed", "strided", "offset"):
        query, _, _, options = make(Case(**(vars(EVERYTHING) | {"layout": layout})))
        assert torch.equal(query, drawn[0][0]) and torch.equal(options["bias"], drawn[0][3]["bias"])
        assert query.stride(-1) == 1
        assert not query.is_contiguous() or query.storage_offset() == 3


def test_why_not_is_in_the_words_of_the_backend() -> None:
    assert why_not(EVERYTHING, "eager") == ()
    assert why_not(Case(lengths_q=(3, 0), lengths_k=(4, 1)), "eager") == ()


def test_a_refusal_is_not_taken_for_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise UnsupportedProblem("not today")

    monkeypatch.setattr(tolerance, "run", refuse)
    with pytest.raises(UnsupportedProblem):
        check_case(Case(), "eager")
    assert attention(*make(Case())[:3]).shape == (1, 16, 2, 16)
