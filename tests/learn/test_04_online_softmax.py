"""Step 4: online softmax by hand, and its merge."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

import pytest
import torch

from stream_attention.base import state as production

# The program


def test_the_text_shows_what_the_program_prints(step: Any) -> None:
    assert step.printed("online") == step.outputs[0]


def test_the_numbers_by_hand(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    online = step.load("online")
    state = online.EMPTY
    by_hand = [(1, "1", "8"), (3, "5/4", "6"), (3, "7/4", "7"), (4, "15/8", "9/2")]
    for score, value, (row_max, row_sum, acc) in zip((1, 3, 2, 4), (8, 4, 2, 1), by_hand, strict=True):
        state = online.merge(state, online.one_key(score, value))
        assert state == (row_max, Fraction(row_sum), Fraction(acc))
    assert state.out == Fraction(12, 5) == Fraction(72, 30)
    halves = [online.merge(online.one_key(a, v), online.one_key(b, w)) for a, v, b, w in ((1, 8, 3, 4), (2, 2, 4, 1))]
    assert online.merge(*halves) == state  # the last question of the text


def test_one_pass_is_two_passes(step: Any) -> None:
    online, random = step.load("online"), Random(0)
    for _ in range(50):
        length = random.randint(1, 12)
        scores, values = ([random.randint(-40, 40) for _ in range(length)] for _ in range(2))
        state = online.EMPTY
        for score, value in zip(scores, values, strict=True):
            state = online.merge(state, online.one_key(score, value))
        assert state.out == online.two_passes(scores, values)


def test_every_order_of_five_keys(step: Any) -> None:
    printed = step.printed("online", "--scores", "5", "-3", "2", "2", "0", "--values", "1", "2", "3", "-4", "5")
    assert "1680 orders and bracketings of 5 keys give 1 result(s)" in printed and printed.count(": True") == 2
    with pytest.raises(SystemExit):
        step.printed("online", "--scores", "1", "2")


# The exercise


def test_the_checker_accepts_the_solution_and_says_what_is_missing(step: Any) -> None:
    assert step.checked("--solution") == (0, "solution.py: merge is right.\n")
    status, said = step.checked()
    assert status == 1 and "Which share of the whole sum is it?" in said


def test_the_checker_accepts_what_production_does(step: Any) -> None:
    def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
        out, lse = production.merge([out_a[:, None], out_b[:, None]], [lse_a[None], lse_b[None]])
        return out[:, 0], lse[0]

    assert step.complaints(merge) == ""


def mean(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


def sigmoid(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    share = torch.sigmoid(lse_b - lse_a)[:, None]
    return out_a + share * (out_b - out_a), torch.logaddexp(lse_a, lse_b)


def unshifted(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    a, b = lse_a.exp()[:, None], lse_b.exp()[:, None]
    return (out_a * a + out_b * b) / (a + b), torch.log(a + b)[:, 0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (mean, "a plain mean is wrong"),
        (sigmoid, "two empty states: there is NaN in out"),
        (sigmoid, "an empty state that holds NaN: there is NaN in out"),
        (unshifted, "scores near 500: there is NaN in out. exp(500) is infinite"),
    ],
)
def test_the_checker_says_what_is_wrong(step: Any, wrong: Any, words: str) -> None:
    assert words in step.complaints(wrong)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("torch.where(lse == -torch.inf, 0.0, lse)", "lse"), "two empty states: there is NaN in out"),
        (("torch.where(seen, part, 0.0)", "part"), "an empty state that holds NaN"),
        (("share * torch", "torch"), "5 keys and 15 keys: out begins"),
    ],
    ids=["no guard", "0 times NaN", "no shares"],
)
def test_the_checker_finds_small_mistakes(step: Any, change: tuple[str, str], words: str) -> None:
    assert words in step.complaints(step.mutant(change).merge)
