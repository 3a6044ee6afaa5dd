"""What a compressed cache still knows: accuracy, bytes and time of every compression method, at several ratios.

    python -m benchmarks.recall.evaluate --out benchmarks/results/cpu/recall.json
    python -m benchmarks.recall.evaluate --results benchmarks/results/cpu/recall.json --markdown

The context is prefilled, each layer's cache is compressed, then the questions read what is left. What a method sees
matters more than anything else here, so the table says it: nothing but the cache itself; the context's own attention;
the questions that will be asked (which a server has when it compresses after the prompt and the question together);
or, for the oracle alone, where the answers stand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stream_attention import attention_mass
from stream_attention.kvcache import CompressionStats, KVCompressor, create_kv_compressor
from stream_attention.kvcache.compression_spec import CompressionSpec
from stream_attention.kvcache.compressor import Stored
from stream_attention.kvcache.select import best
from stream_attention_tools.bench.results import aligned, conditions, save
from stream_attention_tools.bench.timing import CLOCKS, Call, Latency, interleaved

from .model import QUERY_HEADS, VALUES, Cache, Layer, Pairs, Recall, accuracy, draw
from .weights import WEIGHTS, load

Sees = Literal["cache", "context", "questions", "answers"]

CONTEXTS, PAIRS, QUESTIONS = 256, 96, 16
"""A quarter of a context, 24 pairs, has room for all that is asked."""

RATIOS = (1.0, 4 / 3, 2.0, 4.0)
FORMATS = ("int8", "fp8", "int4", "int2")
SEED = 2026
REPEATS = 30


class Ranked(KVCompressor):
    """Keeps the tokens that a ranking `[B, T]` has highest, the same in every layer: a baseline, or an oracle."""

    def __init__(self, name: str, ranking: Tensor) -> None:
        self.name, self.ranking = name, ranking

    def _choose(self, spec: CompressionSpec) -> Tensor:
        return best(self.ranking.unsqueeze(1).expand(-1, spec.keys.shape[2], -1), spec, "each")

    def _described(self, spec: CompressionSpec) -> str:
        return self.name


class Method(NamedTuple):
    """One method as it is asked: who compresses, what it is shown, and at which ratios (None: what the bits give)."""

    name: str
    sees: Sees
    compressor: KVCompressor
    ratios: tuple[float | None, ...] = RATIOS


class Compressed(NamedTuple):
    """Every layer's cache as it is stored, by what, and what was done."""

    compressor: KVCompressor
    stored: list[tuple[Stored, Stored]]
    stats: list[CompressionStats]
    masks: list[Tensor | None]

    def caches(self) -> list[Cache]:
        """For the questions to read: dequantised if need be."""
        return [
            Cache(*self.compressor.decompress(*kept), mask) for kept, mask in zip(self.stored, self.masks, strict=True)
        ]


class Score(NamedTuple):
    accuracy: float
    kl: float  # nats a question, from the answer with the whole cache; it moves before an answer turns


class Scene(NamedTuple):
    """A model, contexts that it has prefilled, and its answers with the whole cache."""

    model: Recall
    pairs: Pairs
    layers: list[Layer]
    asked: list[Tensor]  # the questions' queries, layer by layer: [B, Tq, Hq, D]
    whole: Tensor  # logits [B, Tq, VALUES]

    def score(self, caches: Sequence[Cache]) -> Score:
        """Of the answers to all questions with these caches."""
        return self.scored(self.model.answer(self.pairs.questions, caches, self.pairs.keys.shape[1])[0])

    def scored(self, logits: Tensor) -> Score:
        """Of answers [B, Tq, VALUES]."""
        before, after = self.whole.log_softmax(-1), logits.log_softmax(-1)
        kl = F.kl_div(after.flatten(0, 1), before.flatten(0, 1), reduction="batchmean", log_target=True)
        return Score(accuracy(logits, self.pairs.answers), kl.item())

    def step(self, compressed: Compressed) -> None:
        """One question of every context: a step of decoding."""
        self.model.answer(self.pairs.questions[:, :1], compressed.caches(), self.pairs.keys.shape[1])


def scene(contexts: int = CONTEXTS, pairs: int = PAIRS, questions: int = QUESTIONS) -> Scene:
    """The trained model before random contexts, which are always the same."""
    model = Recall().eval().requires_grad_(False)
    model.load_state_dict(load()[0])
    drawn = draw(contexts, pairs, questions, torch.Generator().manual_seed(SEED))
    layers = model.prefill(drawn.keys, drawn.values)
    whole, asked = model.answer(drawn.questions, [layer.cache for layer in layers], pairs)
    return Scene(model, drawn, layers, asked, whole)


def methods(pairs: Pairs) -> list[Method]:
    """Every method of `create_kv_compressor`, between a random choice and the oracle.

    The defaults of "snap" and "chunk" are for text, where neighbours belong together and the latest tokens matter. A
    pair has nothing to do with its neighbours, so both are also measured with options that suit such a context.
    """
    make = create_kv_compressor
    chance = torch.rand(pairs.keys.shape, generator=torch.Generator().manual_seed(SEED + 1))
    wanted = chance.scatter(1, pairs.asked, 2.0)
    smaller = (2.0, 4.0, 8.0)
    return [
        Method("random", "cache", Ranked("random", chance)),
        Method("streaming, 4 sinks", "cache", make("streaming", sinks=4)),
        Method("key_norm", "cache", make("key_norm")),
        Method("importance", "context", make("importance", importance="attention_sum")),
        Method("importance", "questions", make("importance", importance="attention_sum")),
        Method("snap", "context", make("snap")),
        Method("snap", "questions", make("snap")),
        Method("snap, window 1, pool 1", "questions", make("snap", window=1, pool=1)),
        Method("chunk", "questions", make("chunk", importance="attention_sum")),
        Method("chunk of 4", "questions", make("chunk", chunk_size=4, importance="attention_sum")),
        Method("hybrid", "context", make("hybrid", importance="attention_sum"), smaller),
        Method("hybrid", "questions", make("hybrid", importance="attention_sum"), smaller),
        *(Method(f"quantized {bits}", "cache", make("quantized", bits=bits), (None,)) for bits in FORMATS),
        Method("oracle", "answers", Ranked("oracle", wanted)),
    ]


def compress(scene: Scene, method: Method, ratio: float | None) -> Compressed:
    """Every layer's cache compressed with what the method may see."""
    stored, stats = [], []
    for layer, asked in zip(scene.layers, scene.asked, strict=True):
        options: dict[str, Any] = {} if ratio is None else {"compression_ratio": ratio}
        if method.sees == "context":
            options["query"] = layer.query
        elif method.sees == "questions":
            options["mass"] = attention_mass(asked, layer.key)
        keys, values, its = method.compressor.compress(layer.key, layer.value, **options)
        stored.append((keys, values))
        stats.append(its)
    masks = [its.mask(QUERY_HEADS) if (its.positions < 0).any() else None for its in stats]
    return Compressed(method.compressor, stored, stats, masks)


def evaluate(scene: Scene, repeats: int) -> list[dict[str, Any]]:
    """One row per method and ratio. Bytes and times are those of one context."""
    rows: list[dict[str, Any]] = []
    compressing: dict[str, Call] = {}
    asking: dict[str, Call] = {}
    contexts = scene.pairs.keys.shape[0]
    for method in methods(scene.pairs):
        for ratio in method.ratios:
            done = compress(scene, method, ratio)
            row = f"{len(rows)}"
            compressing[row] = _each_round(partial(compress, scene, method, ratio))
            asking[row] = _each_round(partial(scene.step, done))
            before = sum(its.original_size for its in done.stats)
            after = sum(its.compressed_size for its in done.stats)
            rows.append(
                {
                    "method": method.name,
                    "sees": method.sees,
                    "asked_ratio": ratio,
                    "tokens": max(its.tokens_retained for its in done.stats),
                    "bytes": after // contexts,
                    "ratio": before / after,
                    **scene.score(done.caches())._asdict(),
                }
            )
    for figure, calls in (("us_to_compress", compressing), ("us_per_question", asking)):
        for row, samples in interleaved(calls, "cpu", repeats, warmup=2).items():
            rows[int(row)][figure] = Latency.of(samples).median * 1e3 / contexts
    return rows


def _each_round(work: Callable[[], object]) -> Call:
    """The same in every round: the contexts of a call are many, and no round has others."""
    return lambda turn: work()


def common_conditions() -> dict[str, Any]:
    """What is asked of whom, for a results file."""
    return {
        "contexts": CONTEXTS,
        "pairs": PAIRS,
        "questions": QUESTIONS,
        "dtype": "float32",
        "chance": 1 / VALUES,
        "weights": hashlib.sha256(WEIGHTS.read_bytes()).hexdigest(),
        "kl": "nats a question, from the answer with the whole cache",
    }


def measured(repeats: int) -> dict[str, Any]:
    """A results file: conditions, then the rows."""
    return {
        "suite": "recall",
        **conditions("cpu"),
        "conditions": {
            **common_conditions(),
            "ratio": "bytes before by bytes after, both layers, scales included",
            "timing": f"{CLOCKS['cpu']}, median of {repeats}; {CONTEXTS} contexts at once, divided by them",
            "question": "both layers and their MLPs, one question of each context, dequantising included",
        },
        "rows": evaluate(scene(), repeats),
    }


HEADING = (
    "method",
    "sees",
    "ratio asked",
    "tokens",
    "bytes",
    "ratio",
    "accuracy",
    "KL",
    "us per question",
    "us to compress",
)


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Headings, then one row per method and ratio; where nothing is dropped or rounded, the first such row alone."""
    shown = [row for n, row in enumerate(rows) if row["ratio"] > 1 or n == 0]
    return [
        HEADING,
        *(
            [
                "whole cache" if row["ratio"] == 1 else row["method"],
                "" if row["ratio"] == 1 else row["sees"],
                "" if row["asked_ratio"] is None else f"{row['asked_ratio']:.3g}",
                f"{row['tokens']}",
                f"{row['bytes']}",
                f"{row['ratio']:.2f}",
                f"{row['accuracy']:.3f}",
                f"{row['kl']:.2g}",
                f"{row['us_per_question']:.1f}",
                "" if row["ratio"] == 1 else f"{row['us_to_compress']:.1f}",
            ]
            for row in shown
        ),
    ]


def markdown(results: dict[str, Any]) -> str:
    """The table for a page, under a line that says of what it is."""
    return page(results, table(results["rows"]))


def page(results: dict[str, Any], rows: Sequence[Sequence[str]]) -> str:
    """Rows, headings first, as a table of Markdown under what was measured."""
    machine, versions, told = results["machine"], results["versions"], results["conditions"]
    commit = results["commit"]["hash"] or "no commit"
    heading, *body = rows
    return "\n".join(
        [
            f"{told['questions']} questions to each of {told['contexts']} contexts of {told['pairs']} pairs, fp32; by "
            f"chance {told['chance']:.3f}. {machine['name']}, {machine['threads']} thread, torch {versions['torch']}, "
            f"{results['date'][:10]}, commit {commit[:12]}{' with changes' if results['commit']['dirty'] else ''}.",
            "",
            f"| {' | '.join(heading)} |",
            f"|{'---|' * len(heading)}",
            *(f"| {' | '.join(row)} |" for row in body),
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recall.evaluate", description="What a compressed cache still knows."
    )
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--results", type=Path, help="show this file's results and measure nothing")
    parser.add_argument("--repeats", type=int, help=f"rounds that are timed; default: {REPEATS}")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    options = parser.parse_args(arguments)
    if options.results and (options.out or options.repeats is not None):
        parser.error("--results: expected neither --out nor --repeats beside it; nothing is measured.")
    repeats = REPEATS if options.repeats is None else options.repeats
    if repeats < 1:
        parser.error(f"--repeats: expected at least 1; got {repeats}.")
    torch.set_num_threads(1)
    results = json.loads(options.results.read_text()) if options.results else measured(repeats)
    print(markdown(results) if options.markdown else aligned(table(results["rows"])))
    if options.out:
        save(results, options.out)


if __name__ == "__main__":
    main()
