"""Star attention measured: what the recall model knows of a context in blocks, and the time of its two phases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.recall import star
from benchmarks.recall.evaluate import PAIRS, Scene, scene
from benchmarks.star import __main__ as latency

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "star.json"
H200 = ROOT / "benchmarks" / "results" / "h200" / "star.json"
SMALL = "--device cpu --lengths 512 --ranks 1 4 --heads 2 --kv-heads 1 --dim 16 --repeats 3".split()


def by_sizes(rows: list[dict[str, Any]], method: str) -> dict[tuple[int, int], dict[str, Any]]:
    return {(row["block_size"], row["anchor_size"]): row for row in rows if row["method"] == method}


@pytest.fixture(scope="module")
def small() -> Scene:
    return scene(contexts=32)


@pytest.fixture(scope="module")
def rows(small: Scene) -> list[dict[str, Any]]:
    return star.evaluate(small)


# What is known


def test_one_block_is_dense_attention(small: Scene) -> None:
    pairs, whole = small.pairs, star.Sizes(PAIRS, PAIRS)
    for ranks in (1, 3):
        kept = star.encode(small.model, pairs.keys, pairs.values, whole, ranks)
        assert sum(cache.key.shape[1] for cache in kept[0]) == PAIRS
        logits = star.answer(small.model, pairs.questions, kept, PAIRS)
        torch.testing.assert_close(logits, small.whole, rtol=1e-4, atol=1e-4)


def test_what_a_block_sees_does_not_depend_on_the_ranks(small: Scene) -> None:
    pairs, sizes = small.pairs, star.Sizes(12, 4)
    one, many = (star.encode(small.model, pairs.keys, pairs.values, sizes, ranks) for ranks in (1, 5))
    for alone, parts in zip(one, many, strict=True):
        torch.testing.assert_close(torch.cat([part.key for part in parts], 1), alone[0].key)


def test_blocks_answer_as_dense_attention_does_and_nothing_does_not(rows: list[dict[str, Any]]) -> None:
    assert by_sizes(rows, "star").keys() == set(star.settings())
    assert all(row["accuracy"] >= 0.99 for row in by_sizes(rows, "star").values())  # measured 1.0000
    assert next(row for row in rows if row["method"] == "no context")["accuracy"] < 0.06  # by chance 0.016


def test_smaller_blocks_and_anchors_are_further_from_dense_attention(rows: list[dict[str, Any]]) -> None:
    kl = {sizes: row["kl"] for sizes, row in by_sizes(rows, "star").items()}
    for block in (8, 12, 24):
        assert kl[block, block] < kl[block, block // 4] < kl[block, 0]  # measured 1.05e-5, 1.41e-5, 1.56e-5 for 8
    assert kl[48, 0] < kl[24, 0] < kl[12, 0] < kl[8, 0]
    assert kl[PAIRS, PAIRS] < 1e-8 and kl[48, 48] < 1e-8  # of two blocks the second sees the anchor: all there is


def test_the_last_block_alone_knows_its_share(rows: list[dict[str, Any]]) -> None:
    for (block, _), row in by_sizes(rows, "last block alone").items():
        assert abs(row["accuracy"] - block / PAIRS) < 0.06  # measured within 0.016 over 256 contexts


# The results and the page


def test_the_results_are_those_of_the_command() -> None:
    results = json.loads(RESULTS.read_text())
    stars = by_sizes(results["rows"], "star")
    assert stars.keys() == set(star.settings()) and results["commit"]["dirty"] is False
    assert all(row["accuracy"] >= 0.999 for row in stars.values())
    assert by_sizes(results["rows"], "last block alone").keys() == {(block, 0) for block in star.BLOCKS[:-1]}
    assert {row["method"] for row in results["rows"]} == {"dense", "no context", "star", "last block alone"}


def shown(name: str) -> str:
    page = (ROOT / "docs" / "distributed.md").read_text()
    return page.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0].strip()


def test_the_page_shows_the_table_of_the_results_file(capsys: pytest.CaptureFixture[str]) -> None:
    star.main(["--results", str(RESULTS), "--markdown"])
    assert shown("star recall") == capsys.readouterr().out.strip()


def test_the_page_shows_the_times_that_were_measured() -> None:
    """On one H200, once they are."""
    assert shown("star latency") == (latency.markdown(json.loads(H200.read_text())) if H200.exists() else "")


# The times of its phases


def test_the_command_times_both_phases_of_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "star.json"
    assert latency.main([*SMALL, "--out", str(file)]) == 0
    results = json.loads(file.read_text())
    cells = [(row["ranks"], row["block"], row["anchor"], row["phase"], row["queries"]) for row in results["rows"]]
    assert cells == [
        *((1, 512, 512, 1, 512), (1, 512, 512, 2, 1), (1, 512, 512, 2, 128)),
        *((4, 128, 128, 1, 512), (4, 128, 128, 2, 1), (4, 128, 128, 2, 128)),
    ]
    for row in results["rows"]:
        assert row["difference"] <= 1 and len(row["ranks_ms"]) == row["ranks"]
        assert 0 < max(row["ranks_ms"]) <= row["critical_ms"] and row["dense_ms"] > 0
    assert latency.main(["--results", str(file), "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "| tokens | ranks | block | anchor | phase |" in printed and "| 512 | 4 | 128 | 128 | 1 | 512 |" in printed


def test_a_difference_from_dense_attention_is_an_exit_code_of_1(tmp_path: Path) -> None:
    file = tmp_path / "star.json"
    latency.main([*SMALL, "--out", str(file)])
    results = json.loads(file.read_text())
    results["rows"][-1]["difference"] = 1.5
    file.write_text(json.dumps(results))
    assert latency.main(["--results", str(file)]) == 1


def test_ranks_take_blocks_of_the_config_where_there_are_enough_of_them() -> None:
    problem = latency.Problem(32768, 32, 8, 128, torch.bfloat16, "cpu")
    assert latency.settings(problem, [2, 8]) == [(2, 16384, 16384), (8, 4096, 4096), (2, 2048, 256), (8, 2048, 256)]
    assert latency.settings(problem._replace(length=4096), [8]) == [(8, 512, 512)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lengths 64", "--lengths: expected at least 1024; got 64"),
        ("--repeats 2", "--repeats: expected at least 3; got 2"),
        ("--ranks 0", "--ranks: expected at least 1; got 0"),
        ("--results a --out b", "--results: expected no --out beside it"),
    ],
)
def test_bad_options_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        latency.main(words.split())
    assert said in capsys.readouterr().err
