"""Step 3: where softmax overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# The program


def test_the_text_shows_what_the_program_prints(step: Any) -> None:
    assert step.printed("softmax") == step.outputs[0]


def test_the_limits_are_those_of_the_dtypes(step: Any) -> None:
    program = step.load("softmax")
    for dtype in program.DTYPES.values():
        limit = program.largest_exponent(dtype)
        assert torch.tensor(limit).double().exp().to(dtype).isfinite()
        assert torch.tensor(limit + 0.011).double().exp().to(dtype).isinf()


def test_the_shift_changes_nothing_but_the_range(step: Any) -> None:
    program = step.load("softmax")
    x = torch.randn(4, 9, dtype=torch.float64)
    torch.testing.assert_close(program.safe_softmax(x), program.naive_softmax(x))
    torch.testing.assert_close(program.safe_softmax(x + 1000), program.naive_softmax(x))
    assert program.naive_softmax(x + 1000).isnan().all()
    torch.testing.assert_close(program.logsumexp(x + 1000), torch.logsumexp(x, -1) + 1000)


def test_the_numbers_by_hand(step: Any) -> None:
    x = torch.tensor([91.0, 92.0, 93.0])
    program = step.load("softmax")
    for number in (*program.safe_softmax(x).tolist(), program.logsumexp(x).item(), 1.5032):
        assert f"{number:.4f}" in step.text
    assert f"{torch.exp(x - 93).sum():.4f}" == "1.5032"


# The exercise


def test_the_checker_accepts_the_solution_and_says_what_is_missing(step: Any) -> None:
    assert step.checked("--solution") == (0, "solution.py: softmax_and_lse is right.\n")
    status, said = step.checked()
    assert status == 1 and "What is the maximum of a row that is all -inf?" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("torch.exp(scores - peak)", "torch.exp(scores)"), "large scores: there is NaN in the weights. exp(91) is"),
        (("scores.amax(-1, keepdim=True)", "scores.amax()"), "Each row has its own maximum"),
        (("torch.where(peak == -torch.inf, 0.0, peak)", "peak"), "a row that sees nothing: there is NaN"),
        (("torch.where(total == 0, 1.0, total)", "total"), "a row that sees nothing: there is NaN in the weights"),
        (("(peak + torch.log(total))", "torch.log(total)"), "small scores: lse ["),
        ((".squeeze(-1)", ""), "One lse a row"),
        (("torch.exp(scores - peak)", "scores.sub_(peak).exp_()"), "the scores that were given have changed"),
    ],
    ids=["no shift", "one maximum", "no guard of the maximum", "0 / 0", "lse without the shift", "shape", "in place"],
)
def test_the_checker_says_what_is_wrong(step: Any, change: tuple[str, str], words: str) -> None:
    assert words in step.complaints(step.mutant(change).softmax_and_lse)
