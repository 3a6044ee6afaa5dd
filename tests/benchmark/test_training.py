"""Two trainings that differ in their attention alone learn the same, and the verdict would see it if they did not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.training import train, verdict
from benchmarks.training.gpt import GPT, Size, ours, ours_deterministic, rotated, sdpa
from benchmarks.training.text import (
    CLASSES,
    FIRST,
    MARKS,
    RULES,
    SUCCESSORS,
    SYMBOLS,
    VOCABULARY,
    WITH_ATTENTION,
    WITHOUT_ATTENTION,
    language,
    text,
)

TINY = Size(VOCABULARY, context=64, width=64, layers=2)
STEPS = 30


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return train.train(TINY, STEPS, batch=4, device="cpu", deterministic=True)


# The text


def test_a_seed_has_its_text_and_every_seed_the_same_language() -> None:
    first = text(4, 200, seed=0)
    assert first.shape == (4, 200) and torch.equal(first, text(4, 200, seed=0))
    assert not torch.equal(first, text(4, 200, seed=1))
    assert torch.equal(language(), language())


def test_a_symbol_is_never_followed_by_the_same_under_two_rules() -> None:
    follow = language()
    assert follow.shape == (RULES, SYMBOLS, SUCCESSORS) and follow.min() == MARKS and follow.max() == VOCABULARY - 1
    assert all(len(set(row.tolist())) == RULES * SUCCESSORS for row in follow.transpose(0, 1).flatten(1))


def test_the_marks_open_a_text_and_decide_what_follows() -> None:
    written = text(64, 300, seed=3)
    marks, symbols = written[:, :CLASSES], written[:, CLASSES:] - MARKS
    assert torch.equal(marks // RULES, torch.arange(CLASSES).expand_as(marks))
    assert set((marks % RULES).flatten().tolist()) == set(range(RULES)) and symbols.min() >= 0
    rules = (marks % RULES).gather(1, symbols[:, :-1] % CLASSES)
    chosen = language()[rules, symbols[:, :-1]] == symbols[:, 1:, None] + MARKS  # [sequence, position, successor]
    assert chosen.any(-1).all()
    assert chosen[..., 0].float().mean().item() == pytest.approx(FIRST, abs=0.02)


def test_what_remains_to_be_guessed_is_counted_right() -> None:
    nats = torch.distributions.Categorical(torch.tensor([FIRST, 1 - FIRST])).entropy().item()
    among_all = torch.tensor([FIRST, 1 - FIRST]).repeat(RULES) / RULES
    assert pytest.approx(nats) == WITH_ATTENTION
    assert pytest.approx(torch.distributions.Categorical(among_all).entropy().item()) == WITHOUT_ATTENTION


# The model


def test_the_measured_model_has_8_heads_of_128_and_2048_positions() -> None:
    size = Size(VOCABULARY)
    assert (size.layers, size.heads, size.head_dim, size.context) == (4, 8, 128, 2048)


def test_a_seed_has_its_weights() -> None:
    one, same, other = (GPT(TINY, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_the_untrained_model_knows_nothing() -> None:
    assert GPT(TINY, 0)(text(4, 65, 0), sdpa).item() == pytest.approx(math.log(VOCABULARY), abs=0.1)


def test_a_token_does_not_reach_earlier_ones() -> None:
    model, tokens = GPT(TINY, 0), text(1, 65, 0)
    changed = tokens.clone()
    changed[:, 40] = 0
    for attend in (ours, sdpa):
        assert model(tokens[:, :40], attend).item() == model(changed[:, :40], attend).item()
        assert model(tokens, attend).item() != model(changed, attend).item()


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    model = GPT(TINY, 0)
    query, key = torch.randn(2, 1, 1, 1, TINY.head_dim, generator=torch.Generator().manual_seed(0))

    def score_at(i: int, j: int) -> float:
        there = (rotated(x, model.cos[n : n + 1], model.sin[n : n + 1]) for x, n in ((query, i), (key, j)))
        return float(torch.mul(*there).sum())

    assert score_at(7, 3) == pytest.approx(score_at(60, 56), abs=1e-4)
    assert abs(score_at(7, 3) - score_at(7, 4)) > 0.01


def test_both_attentions_give_the_same_gradients() -> None:
    tokens = text(2, 65, 0)
    found = []
    for attend in (ours, ours_deterministic, sdpa):
        model = GPT(TINY, 0)
        model(tokens, attend).backward()
        found.append(model.blocks[0].qkv.weight.grad)
    for mine in found[:2]:
        torch.testing.assert_close(mine, found[2], rtol=1e-3, atol=1e-6)


# The verdict


def falling(steps: int = 200, seed: int = 0, late: float = 0.0) -> list[float]:
    """A curve with the noise of a seed, perhaps a few steps late."""
    noise = torch.randn(steps, generator=torch.Generator().manual_seed(seed)) * 0.01
    return [1 + 5 * math.exp(-(n - late) / 60) + float(noise[n]) for n in range(steps)]


def test_a_curve_is_within_the_spread_if_it_is_the_peers_or_the_other_seeds() -> None:
    peer, other = falling(), falling(seed=1, late=2)
    same = verdict.judge(peer, peer, other)
    assert same is not None and same.within and same.difference == same.share == 0
    bound = verdict.judge(other, peer, other)
    assert bound is not None and bound.within and bound.share <= 1


def test_a_curve_that_is_shifted_beyond_the_spread_is_refused() -> None:
    peer, other = falling(), falling(seed=1, late=2)
    most = float(verdict.spread(peer, other)[verdict.AFTER :].max())
    least = float(verdict.spread(peer, other)[verdict.AFTER :].min())
    beyond = verdict.judge([loss + 1.01 * most for loss in peer], peer, other)
    assert beyond is not None and not beyond.within and beyond.share > 1
    inside = verdict.judge([loss - 0.99 * least for loss in peer], peer, other)
    assert inside is not None and inside.within and inside.share == pytest.approx(0.99)


def test_one_place_outside_is_enough_and_is_named() -> None:
    peer, other = falling(), falling(seed=1, late=2)
    ours = [loss + (1.0 if n == 120 else 0.0) for n, loss in enumerate(peer)]
    found = verdict.judge(ours, peer, other)
    assert found is not None and not found.within
    assert 121 <= found.worst_step <= 130 and found.difference == pytest.approx(1.0 / verdict.SMOOTHED_OVER)


def test_the_first_20_steps_are_not_judged_but_what_they_left_in_the_mean_is_gone_after_30() -> None:
    peer, other = falling(), falling(seed=1, late=2)
    early = [loss + (10.0 if n < 10 else 0.0) for n, loss in enumerate(peer)]
    found = verdict.judge(early, peer, other)
    assert found is not None and found.within
    assert verdict.judge(peer[:20], peer[:20], other[:20]) is None


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_loss_that_is_not_a_number_is_never_within(which: int) -> None:
    curves = [falling(), falling(), falling(seed=1, late=2)]
    curves[which][150] = math.nan
    found = verdict.judge(*curves)
    assert found is not None and not found.within


def test_seeds_that_never_part_leave_no_room() -> None:
    peer = falling()
    found = verdict.judge([loss + 1e-6 for loss in peer], peer, peer)
    assert found is not None and not found.within and found.share == math.inf


def test_where_two_seeds_cross_the_spread_is_that_beside_the_crossing() -> None:
    apart = verdict.spread([n / 100 for n in range(100)], [0.5] * 100)
    assert float(apart[54]) == pytest.approx(0.105)  # the mean of 45 ... 54 is 49.5, and 39.5 ten steps before


def test_curves_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="expected equally many; got 30, 31 and 30"):
        verdict.judge(falling(30), falling(31), falling(30))


# The trainings


def test_both_attentions_learn_the_same(results: dict[str, Any]) -> None:
    mine, peer, other, deterministic = (run["losses"] for run in results["runs"])
    assert mine == pytest.approx(peer, abs=1e-4) and deterministic == pytest.approx(peer, abs=1e-4)
    assert max(abs(one - two) for one, two in zip(other, peer, strict=True)) > 1e-2
    assert all(one["within"] and one["share"] < 0.1 for one in results["verdict"].values())


def test_the_loss_falls(results: dict[str, Any]) -> None:
    for run in results["runs"]:
        assert sum(run["losses"][-5:]) / 5 < sum(run["losses"][:5]) / 5 - 0.3, run["name"]


def test_the_results_say_what_was_run(results: dict[str, Any]) -> None:
    assert [run["name"] for run in results["runs"]] == [
        "ours, seed 0",
        "sdpa, seed 0",
        "sdpa, seed 1",
        "ours deterministic, seed 0",
    ]
    assert {"commit", "date", "versions", "machine"} <= results.keys()
    assert results["conditions"]["steps"] == STEPS and results["conditions"]["heads"] == 2
    assert (
        results["step_time_by_sdpa"].keys()
        == results["verdict"].keys()
        == {"ours, seed 0", "ours deterministic, seed 0"}
    )
    for run in results["runs"]:
        assert len(run["losses"]) == STEPS and run["timed_steps"] == STEPS - train.UNTIMED
        assert 0 < run["p20_ms"] <= run["median_ms"] <= run["p80_ms"]
    mine, peer, *_ = (run["plan"] for run in results["runs"])
    assert mine["forward"].startswith("eager: ") and mine["backward"].startswith("eager: ")
    assert peer["forward"] == "FLASH_ATTENTION"


def test_the_command_writes_results_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "training.json"
    small = "--device cpu --steps 3 --batch 2 --context 64 --width 64 --layers 1".split()
    assert train.main([*small, "--json-out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["suite"] == "training" and written["verdict"] == {"ours, seed 0": None}
    heading, first, *_ = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "training" and "none: 20 steps or fewer" in first


def test_the_curves_are_drawn(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.training.plot import draw

    draw(results, tmp_path / "curves.svg")
    assert "ours deterministic, seed 0" in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--steps 0", "--steps: expected at least 1; got 0"),
        ("--width 300", "--width: expected a multiple of 128, or of 4 below 256; got 300"),
        ("--width 66", "--width: expected a multiple of 128, or of 4 below 256; got 66"),
        ("--plot-out curves.pdf", "--plot-out: expected a name ending in .png or .svg; got curves.pdf"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--device", "cpu", *options.split()])
    assert words in capsys.readouterr().err
