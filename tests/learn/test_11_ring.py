from __future__ import annotations

from typing import Any

import pytest
import torch

from .outputs import results, shown


def test_the_program_prints_what_the_text_shows(step: Any) -> None:
    assert step.started("ring") == shown(step.text, "python learn/11_ring/ring.py")


def test_a_length_that_cannot_be_dealt_is_refused(step: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.load("ring").main(["--length", "100"])
    assert "expected a multiple of twice the ranks, 6; got 100" in capsys.readouterr().err


def test_states_merge_and_empty_ones_do_not_count(step: Any) -> None:
    ring = step.load("ring")
    q, k, v = torch.randn(3, 6, 8, dtype=torch.float64)
    at = torch.arange(6)
    whole, lse = ring.attend(q, k, v, at, at)
    parts = [
        ring.attend(q, k[part], v[part], at, at[part]) for part in (slice(2), slice(2, 6))
    ]  # some rows see nothing
    out, total = ring.merge(*parts[1], *parts[0])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(total, lse.to(total.dtype))


def test_the_text_says_what_was_measured(step: Any) -> None:
    schemes = {one["scheme"]: one["measured_critical_ms"] for one in results("ring")["forward"]["schemes"]}
    words = " ".join(step.text.split())
    assert f"{schemes['ring contiguous']:.1f} ms in contiguous" in words
    assert f"{schemes['ring zigzag']:.1f} ms in zigzag" in words
    assert results("ring")["forward"]["ranks"] == 8 and 240 * 241 // 2 == 28920 and "28,920" in words


def test_the_solution_passes_and_the_gap_is_named(step: Any) -> None:
    assert step.checked("--solution")[0] == 0
    status, said = step.checked()
    assert status == 1 and "not written yet" in said


def owners(rank: int, ranks: int) -> list[int]:
    return [(rank - step) % ranks for step in range(ranks)]


def contiguous(rank: int, ranks: int, length: int) -> Any:
    return torch.arange(length).chunk(ranks)[rank].tolist(), owners(rank, ranks)


def the_other_way_round(rank: int, ranks: int, length: int) -> Any:
    return list(range(rank, length, ranks)), [(rank + step) % ranks for step in range(ranks)]


def rest_dropped(rank: int, ranks: int, length: int) -> Any:
    return [rank + ranks * i for i in range(length // ranks)], owners(rank, ranks)


def everything(rank: int, ranks: int, length: int) -> Any:
    return list(range(length)), owners(rank, ranks)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (contiguous, "not in balance"),
        (the_other_way_round, "at step 1 rank 0 holds the keys of rank 2; you say those of rank 1"),
        (rest_dropped, "nobody holds position 28"),
        (everything, "is held by rank 0 and by rank 1"),
    ],
)
def test_plausible_mistakes_are_found(step: Any, wrong: Any, word: str) -> None:
    assert word in step.complaints(wrong)
