"""The recall model knows every pair of its context, and what it no longer knows is what a compressor dropped.

Thresholds come from 4096 questions (256 contexts, the seed of `evaluate.py`) and from six other draws of 1024: beside
each stands what was measured, lowest and highest. The standard error of an accuracy of 0.5 is 0.008 here.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from benchmarks.recall import evaluate, train, weights
from benchmarks.recall.model import HEAD_DIM, KEYS, KV_HEADS, LAYERS, VALUES, Recall, draw, rotated

from stream_attention.kvcache.compressor import METHODS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "recall.json"
SHA256 = "1920ce9394f1608153fc4d51301fe70eb4aec0d45a21c07a3aaf7d25fb534b45"


@pytest.fixture(scope="module")
def scene() -> evaluate.Scene:
    return evaluate.scene()


def compressed(scene: evaluate.Scene, name: str, sees: str, ratio: float | None) -> evaluate.Compressed:
    (method,) = (one for one in evaluate.methods(scene.pairs) if (one.name, one.sees) == (name, sees))
    return evaluate.compress(scene, method, ratio)


def score(scene: evaluate.Scene, name: str, sees: str, ratio: float | None) -> evaluate.Score:
    return scene.score(compressed(scene, name, sees, ratio).caches())


# The task and the model


def test_every_question_has_one_answer() -> None:
    pairs = draw(8, 96, 16, torch.Generator().manual_seed(0))
    assert all(len(set(row.tolist())) == 96 for row in pairs.keys)
    assert all(len(set(row.tolist())) == 16 for row in pairs.asked)
    assert pairs.keys.max() < KEYS and pairs.values.max() < VALUES
    row, question = 3, 5
    place = pairs.keys[row].tolist().index(int(pairs.questions[row, question]))
    assert pairs.answers[row, question] == pairs.values[row, place]


def test_the_whole_cache_knows_every_pair(scene: evaluate.Scene) -> None:
    whole = scene.score([layer.cache for layer in scene.layers])
    assert whole.accuracy >= 0.99  # measured 1.0000 in every draw
    assert whole.kl == pytest.approx(0, abs=1e-6)


def test_questions_do_not_see_each_other(scene: evaluate.Scene) -> None:
    caches = [layer.cache for layer in scene.layers]
    alone, _ = scene.model.answer(scene.pairs.questions[:, 3:4], caches, evaluate.PAIRS)
    torch.testing.assert_close(alone, scene.whole[:, 3:4])


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0))

    def score_at(i: int, j: int) -> float:
        return float((rotated(query, torch.tensor([i])) * rotated(key, torch.tensor([j]))).sum())

    assert torch.equal(rotated(query, torch.tensor([0])), query)
    assert score_at(7, 3) == pytest.approx(score_at(96, 92), abs=1e-4)
    assert abs(score_at(7, 3) - score_at(7, 4)) > 0.01


# Dropping tokens costs what the tokens held


@pytest.mark.parametrize("name", ["random", "streaming, 4 sinks", "key_norm"])
@pytest.mark.parametrize(
    ("ratio", "low", "high"),
    [
        # A pair that is gone is guessed, so the accuracy is the share of the pairs that stay: 0.75, 0.5, 0.25. Key
        # norms choose other tokens in each layer, and what one layer still holds is a help: they stand highest.
        (4 / 3, 0.65, 0.85),  # measured 0.71-0.79
        (2.0, 0.40, 0.65),  # measured 0.46-0.54
        (4.0, 0.18, 0.35),  # measured 0.23-0.28
    ],
)
def test_a_choice_that_knows_nothing_loses_what_it_drops(
    scene: evaluate.Scene, name: str, ratio: float, low: float, high: float
) -> None:
    assert low < score(scene, name, "cache", ratio).accuracy < high


@pytest.mark.parametrize("name", ["importance", "snap"])
def test_the_context_does_not_know_what_will_be_asked(scene: evaluate.Scene, name: str) -> None:
    assert score(scene, name, "context", 2.0).accuracy < 0.70  # measured 0.49-0.58; 1.00 where the questions vote


@pytest.mark.parametrize("name", ["importance", "snap, window 1, pool 1"])
@pytest.mark.parametrize("ratio", [4 / 3, 2.0, 4.0])
def test_the_attention_of_the_questions_finds_what_they_ask_for(scene: evaluate.Scene, name: str, ratio: float) -> None:
    assert score(scene, name, "questions", ratio).accuracy >= 0.99  # measured 1.0000 in every draw


def test_chunks_keep_neighbours_that_nobody_asked_for(scene: evaluate.Scene) -> None:
    half, quarter = (score(scene, "chunk of 4", "questions", ratio).accuracy for ratio in (2.0, 4.0))
    assert 0.92 < half < 0.995  # measured 0.961-0.972: 16 pairs seldom lie in more than 12 chunks
    assert 0.50 < quarter < 0.75  # measured 0.611-0.639: 6 chunks


def test_defaults_for_text_do_not_suit_pairs_without_neighbours(scene: evaluate.Scene) -> None:
    """A window of 32 recent tokens and votes pooled over 5 neighbours take the room of what was asked for."""
    half = score(scene, "snap", "questions", 2.0).accuracy
    assert 0.60 < half < 0.85  # measured 0.714-0.729; 1.0000 with window 1 and pool 1


def test_rows_that_keep_fewer_tokens_are_masked(scene: evaluate.Scene) -> None:
    """A chunk of 64 and one of 32 do not fit into 72 together: rows keep one or the other."""
    done = compressed(scene, "chunk", "questions", 4 / 3)
    assert set(torch.cat([stats.counts for stats in done.stats]).flatten().tolist()) == {32, 64}
    unmasked = [cache._replace(mask=None) for cache in done.caches()]
    assert scene.score(done.caches()).kl != scene.score(unmasked).kl


def test_the_oracle_shows_that_a_quarter_of_the_cache_is_enough(scene: evaluate.Scene) -> None:
    assert score(scene, "oracle", "answers", 4.0).accuracy >= 0.99  # measured 1.0000 in every draw


# Dropping bits costs little, and the more the more


def test_eight_and_four_bits_keep_the_answers(scene: evaluate.Scene) -> None:
    for bits in ("int8", "fp8", "int4"):
        assert score(scene, f"quantized {bits}", "cache", None).accuracy >= 0.99  # measured 1.0000 in every draw


def test_fewer_bits_are_worse(scene: evaluate.Scene) -> None:
    eight, four, two = (score(scene, f"quantized int{bits}", "cache", None) for bits in (8, 4, 2))
    assert eight.kl * 10 < four.kl and four.kl * 10 < two.kl  # measured 4.8e-8, 1.1e-5 and 4e-2
    assert 0.95 < two.accuracy < eight.accuracy - 0.002  # measured 0.981-0.994, 0.991 here; of int8 1.0000


def test_hybrid_keeps_what_the_questions_ask_for_in_eight_bits(scene: evaluate.Scene) -> None:
    assert score(scene, "hybrid", "questions", 8.0).accuracy >= 0.99  # measured 1.0000 in every draw
    stats = compressed(scene, "hybrid", "questions", 8.0).stats[0]
    assert stats.tokens_retained == 24 and stats.compression_ratio > 12


# What is kept, and what it weighs


def test_every_method_is_measured_and_keeps_its_tokens_in_order(scene: evaluate.Scene) -> None:
    methods = evaluate.methods(scene.pairs)
    assert {name.split(",")[0].split(" ")[0] for name, *_ in methods} == {*METHODS, "random", "oracle"}
    for method in methods:
        for ratio in method.ratios:
            for stats in evaluate.compress(scene, method, ratio).stats:
                held = stats.positions >= 0
                assert (held.diff(dim=-1) == 0).logical_or(~held[..., 1:]).all()  # what holds nothing comes last
                assert (stats.positions.diff(dim=-1) > 0)[held[..., 1:]].all()
                assert stats.positions.max() < evaluate.PAIRS


@pytest.mark.parametrize(("ratio", "tokens"), [(1.0, 96), (4 / 3, 72), (2.0, 48), (4.0, 24)])
def test_bytes_are_those_of_the_tokens_that_stay(scene: evaluate.Scene, ratio: float, tokens: int) -> None:
    done = compressed(scene, "importance", "questions", ratio)
    held = evaluate.CONTEXTS * tokens * KV_HEADS * HEAD_DIM * 2 * 4  # keys and values, fp32
    assert [stats.compressed_size for stats in done.stats] == [held] * LAYERS
    assert sum(x.nbytes for cache in done.caches() for x in (cache.key, cache.value)) == held * LAYERS


# The weights


def test_the_weights_are_those_that_were_measured() -> None:
    assert hashlib.sha256(weights.WEIGHTS.read_bytes()).hexdigest() == SHA256
    assert weights.WEIGHTS.stat().st_size < 500_000
    tensors, told = weights.load()
    assert {name: x.shape for name, x in tensors.items()} == {n: x.shape for n, x in Recall().state_dict().items()}
    assert told["made by"] == "python -m benchmarks.recall.train"
    assert (told["steps"], told["seed"], told["batch"]) == ("1600", f"{train.SEED}", f"{train.BATCH}")
    assert {"optimizer", "accuracy", "torch", "machine", "threads", "date", "seconds"} <= told.keys()


def test_the_file_is_safetensors(tmp_path: Path) -> None:
    """Written by the format's own words: length, header, numbers in the header's order without gaps."""
    path = tmp_path / "two.safetensors"
    weights.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.5)}, {"why": "test"}, path)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert json.loads(raw[8 : 8 + length]) == {
        "__metadata__": {"why": "test"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]},
    }
    assert length % 8 == 0 and raw[8 + length :] == struct.pack("<7f", 0, 1, 2, 3, 4, 5, 7.5)
    tensors, told = weights.load(path)
    assert told == {"why": "test"} and torch.equal(tensors["a"], torch.arange(6.0).reshape(2, 3))
    assert tensors["b"].shape == () and tensors["b"] == 7.5


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"a: expected float32; got torch\.float16"):
        weights.save({"a": torch.zeros(2, dtype=torch.float16)}, {}, tmp_path / "half.safetensors")
    assert not list(tmp_path.iterdir())


# The commands


def test_training_runs_and_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("one.safetensors", "two.safetensors")]
    for file in files:
        train.main(["--steps", "3", "--out", str(file)])
    printed = capsys.readouterr()
    assert "step 3/3" in printed.err and "wrote" in printed.out
    (one, told), (two, _) = map(weights.load, files)
    assert told["steps"] == "3" and told["seed"] == f"{train.SEED}"
    assert all(torch.equal(one[name], two[name]) for name in one)
    torch.manual_seed(train.SEED)
    assert not torch.equal(Recall().state_dict()["head.weight"], one["head.weight"])


def test_the_curriculum_ends_with_the_contexts_that_are_asked_about() -> None:
    lengths = [train.pairs_at(step / 1600) for step in range(1600)]
    assert lengths[0] == train.SHORT == 32 and lengths[-1] == train.LONG == evaluate.PAIRS
    assert lengths == sorted(lengths) and lengths[800] == train.LONG


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in (
        (train.main, ["--steps", "0"]),
        (evaluate.main, ["--repeats", "0"]),
        (evaluate.main, ["--results", str(RESULTS), "--repeats", "3"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            command(words)
        assert f"{words[0]}" in capsys.readouterr().err


def test_the_results_are_of_these_weights_and_still_so(scene: evaluate.Scene) -> None:
    """Accuracies in the file are computed anew; another machine may round a doubtful answer the other way."""
    results = json.loads(RESULTS.read_text())
    assert results["conditions"]["weights"] == SHA256
    rows = {(row["method"], row["sees"], row["asked_ratio"]): row for row in results["rows"]}
    (whole,) = {row["bytes"] for row in results["rows"] if row["ratio"] == 1}
    methods = evaluate.methods(scene.pairs)
    assert rows.keys() == {(one.name, one.sees, ratio) for one in methods for ratio in one.ratios}
    for name, sees in (("random", "cache"), ("importance", "questions"), ("chunk of 4", "questions")):
        row = rows[name, sees, 2.0]
        assert row["accuracy"] == pytest.approx(score(scene, name, sees, 2.0).accuracy, abs=0.005)
        assert row["bytes"] == whole / 2 and row["us_per_question"] > 0 and row["us_to_compress"] > 0


def test_the_table_says_what_each_method_sees(capsys: pytest.CaptureFixture[str]) -> None:
    evaluate.main(["--results", str(RESULTS), "--markdown"])
    said, _, heading, rule, whole, *rows = capsys.readouterr().out.splitlines()
    conditions = json.loads(RESULTS.read_text())["conditions"]
    assert said.startswith(
        "{questions} questions to each of {contexts} contexts of {pairs} pairs".format_map(conditions)
    )
    assert heading.startswith("| method | sees | ratio asked |") and set(rule) <= set("|-")
    assert whole.startswith(f"| whole cache |  | 1 | {conditions['pairs']} | ")
    assert all(row.split(" | ")[1] in ("cache", "context", "questions", "answers") for row in rows)


def test_the_page_shows_the_table_of_the_results_file() -> None:
    page = (ROOT / "docs" / "kv_cache.md").read_text()
    shown = page.partition("<!-- recall -->\n")[2].partition("\n<!-- /recall -->")[0]
    assert shown == evaluate.markdown(json.loads((ROOT / "benchmarks/results/cpu/recall.json").read_text())).strip()
