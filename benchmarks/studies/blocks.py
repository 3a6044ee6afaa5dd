"""Whether tiles of 256 queries or keys would pay in the Triton forward: every size beside the others.

    python -m benchmarks.studies.blocks --out benchmarks/results/h200/block_sweep.json

Blocks of 64 to 256 queries by 32 to 256 keys, each with 4 and 8 warps and 2 and 3 stages, at 4096 tokens, bf16, batch *
length 16384, hidden size 2048, head dims 64 and 128, full and causal. Every one is compared with SDPA before it is
timed. What does not fit the GPU's shared memory or does not compile stays in the file with its reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from stream_attention.backends.triton.tuning import TritonConfig
from stream_attention_tools.bench.results import conditions, save
from stream_attention_tools.tune import Cell, sweep

QUERIES, KEYS, WARPS, STAGES = (64, 128, 256), (32, 64, 128, 256), (4, 8), (2, 3)
HEAD_DIMS, LENGTH = (64, 128), 4096
SHARED_MEMORY = "out of resource: shared memory"
"""What Triton says where a tile does not fit."""


def configs() -> list[TritonConfig]:
    return [TritonConfig(*sizes) for sizes in product(QUERIES, KEYS, WARPS, STAGES)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.blocks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the results go")
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="timed calls of each; default 20")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("the sweep needs a GPU, and torch.cuda.is_available() is False", file=sys.stderr)
        return 1
    cells = [Cell(dim, LENGTH, causal) for dim in HEAD_DIMS for causal in (False, True)]
    rows = sweep(cells, ["forward"], options.repeats, {("forward", dim): configs() for dim in HEAD_DIMS})
    result = conditions("cuda") | {"how": f"medians of {options.repeats} calls by CUDA events", "rows": rows}
    print(table(rows))
    save(result, options.out)
    return 0


def best(rows: list[dict[str, Any]]) -> dict[tuple[int, bool, int, int], dict[str, Any]]:
    """By head dim, causal, queries and keys of a tile: the fastest over warps and stages, or the first that failed."""
    found: dict[tuple[int, bool, int, int], dict[str, Any]] = {}
    for row in rows:
        place = (row["head_dim"], row["causal"], *row["config"][:2])
        if place not in found or row.get("tflops", 0.0) > found[place].get("tflops", 0.0):
            found[place] = row
    return found


def shown(row: dict[str, Any]) -> str:
    if "tflops" in row:
        return f"{row['tflops']:.0f}"
    return "too large" if SHARED_MEMORY in row["error"] else "failed"


def table(rows: list[dict[str, Any]]) -> str:
    """TFLOP/s by tile, as docs/performance.md has it: the fastest over warps and stages."""
    found = best(rows)
    sizes = list(product(QUERIES, KEYS))
    lines = [f"| queries x keys | {' | '.join(f'{m} x {n}' for m, n in sizes)} |", f"|{'---|' * (1 + len(sizes))}"]
    for dim, causal in product(HEAD_DIMS, (False, True)):
        cells = [shown(found[dim, causal, m, n]) for m, n in sizes]
        lines.append(f"| d{dim} {'causal' if causal else 'full'} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
