"""Time the two phases of star attention beside dense attention over the same tokens.

    python -m benchmarks.star --out benchmarks/results/h200/star.json
    python -m benchmarks.star --device cpu --lengths 512 --ranks 1 2 4 --heads 4 --kv-heads 2 --dim 32

Ranks are virtual and run one after another on one device. A rank's phase 1 is its blocks of the context and its copy of
the anchor; its phase 2 is the state over its part of the cache and the merge of all ranks' states, its own in the place
of the others'. What is sent is not in these times. `critical` is the slowest rank: what P devices would take. Blocks
are a rank's share with an anchor of a block, as in the paper, or those of `StreamAttentionConfig`. Before it is timed,
phase 1 is compared with dense attention where they are equal (in the first block), and phase 2 everywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention import ContiguousKV, StreamAttentionConfig, attention, decode_attention
from stream_attention.distributed import (
    VirtualRanks,
    shard_context,
    star_cache,
    star_context_attention,
    tree_decode_attention,
)
from stream_attention.distributed.transport import Pending, Start, Strategy, Transport, Wait
from stream_attention_tools.bench.results import aligned, conditions, save
from stream_attention_tools.bench.timing import CLOCKS, Clock, Latency, interleaved

QUERIES = (1, 128)
"""New tokens of a call of phase 2: a step of decoding, and a question."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Problem(NamedTuple):
    """B=1, causal."""

    length: int
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: str


class Sizes(NamedTuple):
    """How a context is cut."""

    ranks: int
    block: int
    anchor: int


class OneRank(Transport):
    """One rank of several, alone: what others would send is what it sends itself, and arrives at once."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.ranks = size, (rank,)

    def run(self, strategies: Sequence[Strategy[Any]], device: torch.device) -> list[Any]:
        (strategy,) = strategies
        answer: Any = None
        while True:
            try:
                request = strategy.send(answer)
            except StopIteration as stop:
                return [stop.value]
            if isinstance(request, Start):
                answer = Pending(request.communication)
            else:
                communication = request.pending.communication if isinstance(request, Wait) else request
                answer = dict(communication.sends)


def settings(problem: Problem, ranks: Sequence[int]) -> list[Sizes]:
    """For every number of ranks, a block for each and the anchor a block; then blocks of the config's size."""
    config = StreamAttentionConfig()
    share = [Sizes(size, -(-problem.length // size), -(-problem.length // size)) for size in ranks]
    small = [Sizes(size, config.star_attention_block_size, config.star_attention_anchor_size) for size in ranks]
    return [*share, *(one for one in small if one.block * one.ranks <= problem.length)]


def drawn(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(problem.device).manual_seed(0)
    query, key, value = (
        torch.randn(1, problem.length, heads, problem.dim, generator=generator, device=problem.device).to(problem.dtype)
        for heads in (problem.heads, problem.kv_heads, problem.kv_heads)
    )
    return query, key, value


def cut(sizes: Sizes, group: Transport) -> dict[str, Any]:
    return {"group": group, "block_size": sizes.block, "anchor_size": sizes.anchor}


def rows_of(tensors: Sequence[Tensor], sizes: Sizes, rank: int) -> list[Tensor]:
    """What a rank encodes."""
    return [shard_context(t, **cut(sizes, OneRank(sizes.ranks, rank))) for t in tensors]


def parts_of(key: Tensor, value: Tensor, sizes: Sizes) -> list[ContiguousKV]:
    """What the ranks keep."""
    found = []
    for rank in range(sizes.ranks):
        options = cut(sizes, OneRank(sizes.ranks, rank))
        found.append(ContiguousKV(*star_cache(*rows_of((key, value), sizes, rank), length=key.shape[1], **options)))
    return found


def encode(rows: Sequence[Tensor], length: int, sizes: Sizes, rank: int) -> Tensor:
    """Phase 1 of a rank."""
    found: Tensor = star_context_attention(*rows, length=length, **cut(sizes, OneRank(sizes.ranks, rank)))
    return found


def dense_answer(query: Tensor, cache: ContiguousKV) -> Tensor:
    """Phase 2 on one device that has the whole cache."""
    if query.shape[1] == 1:
        return decode_attention(query, cache)
    return attention(query, cache.key, cache.value, causal=True)


def check(problem: Problem, sizes: Sizes, tensors: Sequence[Tensor], dense: Tensor) -> float:
    """The largest difference from dense attention where there should be none, by what is allowed."""
    query, key, value = tensors
    first = encode(rows_of(tensors, sizes, 0), problem.length, sizes, 0)[:, : sizes.block]
    found = [(first - dense[:, : first.shape[1]]).abs().max()]
    parts, whole = parts_of(key, value, sizes), ContiguousKV(key, value)
    for count in QUERIES:
        new = query[:, -count:]
        out = tree_decode_attention(new, parts, group=VirtualRanks(sizes.ranks))[0]
        found.append((out - dense_answer(new, whole)).abs().max())
    return torch.stack(found).max().item() / TOLERANCE[problem.dtype]


def timed(calls: dict[str, Callable[[], object]], problem: Problem, repeats: int, ranks: int) -> dict[str, Any]:
    """Medians in milliseconds: of dense attention, of every rank, and of the slowest of them round by round."""
    clock: Clock = "events" if problem.device == "cuda" else "cpu"
    samples = interleaved({name: _each(call) for name, call in calls.items()}, clock, repeats, warmup=1)
    by_rank = [samples[f"{rank}"] for rank in range(ranks)]
    slowest = [max(taken) for taken in zip(*by_rank, strict=True)]
    return {
        "dense_ms": Latency.of(samples["dense"]).median,
        "ranks_ms": [Latency.of(one).median for one in by_rank],
        "critical_ms": Latency.of(slowest).median,
    }


def _each(call: Callable[[], object]) -> Callable[[int], object]:
    return lambda turn: call()


def measure(problem: Problem, ranks: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """One row per setting and phase."""
    tensors = drawn(problem)
    query, key, value = tensors
    whole, dense = ContiguousKV(key, value), attention(query, key, value, causal=True)
    rows = []
    for sizes in settings(problem, ranks):
        told = {"length": problem.length, **sizes._asdict(), "difference": check(problem, sizes, tensors, dense)}
        calls: dict[str, Callable[[], object]] = {"dense": partial(attention, query, key, value, causal=True)}
        for rank in range(sizes.ranks):
            calls[f"{rank}"] = partial(encode, rows_of(tensors, sizes, rank), problem.length, sizes, rank)
        rows.append({**told, "phase": 1, "queries": problem.length, **timed(calls, problem, repeats, sizes.ranks)})
        del calls
        parts = parts_of(key, value, sizes)
        for count in QUERIES:
            new = query[:, -count:]
            asking: dict[str, Callable[[], object]] = {"dense": partial(dense_answer, new, whole)}
            for rank, part in enumerate(parts):
                asking[f"{rank}"] = partial(tree_decode_attention, new, part, group=OneRank(sizes.ranks, rank))
            rows.append({**told, "phase": 2, "queries": count, **timed(asking, problem, repeats, sizes.ranks)})
    return rows


HEADING = ["tokens", "ranks", "block", "anchor", "phase", "queries", "dense ms", "slowest rank ms", "dense / slowest"]


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Headings, then one row per setting and phase."""
    return [
        HEADING,
        *(
            [
                *(f"{row[name]}" for name in ("length", "ranks", "block", "anchor", "phase", "queries")),
                f"{row['dense_ms']:.3g}",
                f"{row['critical_ms']:.3g}",
                f"{row['dense_ms'] / row['critical_ms']:.2f}",
            ]
            for row in rows
        ),
    ]


def markdown(results: dict[str, Any]) -> str:
    """The table for a page, under a line that says of what it is."""
    machine, versions, told, commit = (results[name] for name in ("machine", "versions", "conditions", "commit"))
    heading, *body = table(results["rows"])
    origin = f"commit {(commit['hash'] or 'none')[:12]}{' with changes' if commit['dirty'] else ''}"
    lines = [
        f"{told['problem']}. {machine['name']}, torch {versions['torch']}, {results['date'][:10]}, {origin}; "
        f"{told['timing']}.",
        "",
        f"| {' | '.join(heading)} |",
        f"|{'---|' * len(heading)}",
        *(f"| {' | '.join(row)} |" for row in body),
    ]
    return "\n".join(lines)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.star", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072], metavar="N")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="P")
    parser.add_argument("--heads", type=int, default=32, metavar="N")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N")
    parser.add_argument("--dim", type=int, default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed rounds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--results", type=Path, metavar="FILE", help="show this file's results and measure nothing")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    options = parser.parse_args(arguments)
    if options.results and options.out:
        parser.error("--results: expected no --out beside it; nothing is measured.")
    longest = max(QUERIES) * max(options.ranks)
    for name, found, least in (
        ("--lengths", min(options.lengths), longest),
        ("--ranks", min(options.ranks), 1),
        ("--repeats", options.repeats, 3),
    ):
        if found < least:
            parser.error(f"{name}: expected at least {least}; got {found}.")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.results:
        results = json.loads(options.results.read_text())
    else:
        if options.device == "cpu":
            torch.set_num_threads(1)
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        shape = (options.heads, options.kv_heads, options.dim, dtype, options.device)
        rows = [row for n in options.lengths for row in measure(Problem(n, *shape), options.ranks, options.repeats)]
        clock = CLOCKS["events" if options.device == "cuda" else "cpu"]
        results = {
            "suite": "star",
            **conditions(options.device),
            "conditions": {
                "problem": f"B=1 Hq={options.heads} Hkv={options.kv_heads} D={options.dim} {str(dtype)[6:]}, causal",
                "timing": f"{clock}, median of {options.repeats} rounds; ranks are virtual, one after another on one "
                "device, and what is sent is not timed",
                "difference": "largest difference from dense attention where there should be none, by what is allowed",
            },
            "rows": rows,
        }
    if options.out:
        save(results, options.out)
    print(markdown(results) if options.markdown else aligned(table(results["rows"])))
    return 0 if all(row["difference"] <= 1 for row in results["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
