"""Check the exercise: python learn/05_blocked_attention/check.py [--solution]"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checking

CASES = {  # name: Tq, Tk, D, Dv, block_q, block_k, factor of the queries, what to think of
    "one block": (8, 8, 16, 16, 8, 8, 1.0, "Is the scale D^-0.5?"),
    "two blocks of keys": (8, 16, 16, 16, 8, 8, 1.0, "When the maximum rises, sum and acc are both rescaled."),
    "lengths that are no multiples": (10, 21, 16, 16, 4, 8, 1.0, "The last block is smaller."),
    "values of another width": (10, 21, 16, 8, 4, 8, 1.0, "acc is as wide as v."),
    "large scores": (16, 64, 16, 16, 16, 8, 200.0, "Subtract the running maximum before you exponentiate."),
    "one key a block": (5, 9, 16, 16, 2, 1, 1.0, "This is step 4."),
}


def complaints(candidate: Callable[..., tuple[Any, Any]]) -> Iterator[str]:
    for name, (Tq, Tk, D, Dv, block_q, block_k, factor, hint) in CASES.items():
        rng = np.random.default_rng(Tq * Tk)
        q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in ((Tq, D), (Tk, D), (Tk, Dv)))
        q *= np.float32(factor)
        with np.errstate(all="ignore"):  # what is wrong is said below, in words
            got = candidate(q, k, v, block_q, block_k)
        for part, value, exact in zip(("out", "lse"), got, _exact(q, k, v), strict=True):
            if value.shape != exact.shape:
                yield f"{name}: {part} has shape {value.shape} where {exact.shape} is right."
            elif np.isnan(value).any():
                yield f"{name}: there is NaN in {part}. {hint}"
            elif not np.allclose(value, exact, rtol=1e-3, atol=1e-3):
                off = np.abs(value - exact).max()
                yield f"{name}: {part} is off by up to {off:.2g}. {hint}"
    yield from _memory(candidate)


def _memory(candidate: Callable[..., tuple[Any, Any]]) -> Iterator[str]:
    n, block = 512, 16
    q, k, v = np.random.default_rng(0).standard_normal((3, n, 8), dtype=np.float32)
    tracemalloc.start()
    candidate(q, k, v, block, block)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if peak > n * n:  # a quarter of the matrix of scores
        yield f"memory: {n} queries and keys took {peak} bytes; all scores have {n * n * 4}. Hold a block of them."


def _exact(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    scores = q.astype(np.float64) @ k.astype(np.float64).T * q.shape[1] ** -0.5
    peak = scores.max(1, keepdims=True)
    e = np.exp(scores - peak)
    return e @ v / e.sum(1, keepdims=True), (peak + np.log(e.sum(1, keepdims=True)))[:, 0]


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "blocked_attention", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
