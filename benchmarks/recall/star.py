"""What star attention still knows: accuracy of the recall model whose context was encoded in blocks.

    python -m benchmarks.recall.star --out benchmarks/results/cpu/star.json
    python -m benchmarks.recall.star --results benchmarks/results/cpu/star.json --markdown

Phase 1 encodes the context on virtual ranks, layer by layer: a block sees itself and the anchor. In phase 2
questions read all ranks' caches by the tree. Beside it stand dense attention, the same questions without a context, and
with the last block alone, which is what is left where phase 2 does not look at the other blocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention import ContiguousKV
from stream_attention.distributed import (
    VirtualRanks,
    shard_context,
    star_cache,
    star_context_attention,
    tree_decode_attention,
)
from stream_attention_tools.bench.results import aligned, conditions, save

from .evaluate import PAIRS, Scene, Score, common_conditions, page, scene
from .model import Cache, Recall

BLOCKS = (8, 12, 24, 48, 96)
"""Sizes of blocks; with the last a context is one block, and star attention is dense."""


class Sizes(NamedTuple):
    block: int
    anchor: int


def settings() -> list[Sizes]:
    """Every block size, with an anchor of a block, of a quarter of one, and with none."""
    return [
        Sizes(block, anchor) for block in BLOCKS for anchor in ((block,) if block == PAIRS else (block, block // 4, 0))
    ]


def encode(model: Recall, keys: Tensor, values: Tensor, sizes: Sizes, ranks: int) -> list[list[Cache]]:
    """Phase 1 of contexts [B, T]: by layer, what each rank keeps."""
    group, length = VirtualRanks(ranks), keys.shape[1]
    cut: dict[str, Any] = {"group": group, "block_size": sizes.block, "anchor_size": sizes.anchor}
    rows = shard_context(model.keys(keys) + model.values(values), **cut)
    positions = shard_context(torch.arange(length), dim=0, **cut)
    kept = []
    for block in model.blocks:
        layers = [block.project(x, where) for x, where in zip(rows, positions, strict=True)]
        query, key, value = ([getattr(layer, name) for layer in layers] for name in ("query", "key", "value"))
        read = star_context_attention(query, key, value, length=length, **cut)
        rows = [block.add(x, out) for x, out in zip(rows, read, strict=True)]
        kept.append([Cache(*pair) for pair in star_cache(key, value, length=length, **cut)])
    return kept


def answer(model: Recall, questions: Tensor, kept: Sequence[Sequence[Cache]], position: int) -> Tensor:
    """Phase 2: logits [B, Tq, VALUES] of questions that read all ranks' caches."""
    x = model.keys(questions)
    for block, caches in zip(model.blocks, kept, strict=True):
        query = block.project(x, torch.tensor([position])).query
        parts = [ContiguousKV(cache.key, cache.value) for cache in caches]
        # Questions leave nothing in the cache, so none is hidden from another.
        read = tree_decode_attention(query, parts, group=VirtualRanks(len(parts)), causal=False)[0]
        x = block.add(x, read)
    logits: Tensor = model.head(model.norm(x))
    return logits


def evaluate(scene: Scene) -> list[dict[str, Any]]:
    """A row each for dense attention, no context, every setting, and the last block alone."""
    model, pairs = scene.model, scene.pairs
    length = pairs.keys.shape[1]

    def row(method: str, sizes: Sizes | None, score: Score) -> dict[str, Any]:
        block, anchor = (None, None) if sizes is None else sizes
        return {"method": method, "block_size": block, "anchor_size": anchor, **score._asdict()}

    empty = [[Cache(layer.key[:, :0], layer.value[:, :0])] for layer in scene.layers]
    rows = [
        row("dense", None, scene.scored(scene.whole)),
        row("no context", None, scene.scored(answer(model, pairs.questions, empty, length))),
    ]
    for sizes in settings():
        kept = encode(model, pairs.keys, pairs.values, sizes, ranks=length // sizes.block)
        rows.append(row("star", sizes, scene.scored(answer(model, pairs.questions, kept, length))))
        if not sizes.anchor:
            last = [caches[-1:] for caches in kept]
            rows.append(row("last block alone", sizes, scene.scored(answer(model, pairs.questions, last, length))))
    return rows


def measured() -> dict[str, Any]:
    """A results file: conditions, then the rows."""
    asked = {**common_conditions(), "ranks": "virtual, a block each"}
    return {"suite": "star recall", **conditions("cpu"), "conditions": asked, "rows": evaluate(scene())}


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Headings, then one row each."""
    return [
        ["context", "block", "anchor", "accuracy", "KL"],
        *(
            [
                row["method"],
                "" if row["block_size"] is None else f"{row['block_size']}",
                "" if row["block_size"] is None else f"{row['anchor_size']}",
                f"{row['accuracy']:.3f}",
                f"{row['kl']:.2g}",
            ]
            for row in rows
        ),
    ]


def markdown(results: dict[str, Any]) -> str:
    """The table for a page, under a line that says of what it is."""
    return page(results, table(results["rows"]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recall.star", description="What star attention still knows of a context."
    )
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--results", type=Path, help="show this file's results and measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    options = parser.parse_args(arguments)
    if options.results and options.out:
        parser.error("--results: expected no --out beside it; nothing is measured.")
    torch.set_num_threads(1)
    results = json.loads(options.results.read_text()) if options.results else measured()
    if options.out:
        save(results, options.out)
    print(markdown(results) if options.markdown else aligned(table(results["rows"])))


if __name__ == "__main__":
    main()
