"""Attention in blocks, in NumPy: the same result, without the matrix of scores, and the bytes that each way moves.

python learn/05_blocked_attention/blocked.py [--lengths 128 256 512 1024] [--dim 64] [--block-q 128] [--block-k 64]
"""

from __future__ import annotations

import argparse
import tracemalloc
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class SlowMemory:
    """Stands for a GPU's global memory: what is loaded from it and stored to it is counted, in bytes.

    What a function holds between a load and a store stands for registers and shared memory.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def load(self, array: Array, rows: slice = slice(None)) -> Array:
        self.bytes += array[rows].nbytes
        return array[rows]

    def store(self, array: Array, tile: Array, rows: slice = slice(None)) -> None:
        self.bytes += tile.nbytes
        array[rows] = tile


def standard_attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    """Three kernels, with two matrices of n x n numbers in slow memory between them."""
    n, dim = q.shape
    scores, weights = np.empty((n, len(k)), np.float32), np.empty((n, len(k)), np.float32)
    out = np.empty((n, v.shape[1]), np.float32)
    memory.store(scores, memory.load(q) @ memory.load(k).T / np.float32(dim**0.5))

    row = memory.load(scores)
    e = np.exp(row - row.max(1, keepdims=True))
    memory.store(weights, e / e.sum(1, keepdims=True))

    memory.store(out, memory.load(weights) @ memory.load(v))
    return out


def blocked_attention(q: Array, k: Array, v: Array, memory: SlowMemory, block_q: int = 128, block_k: int = 64) -> Array:
    """One kernel: for a block of queries, walk over the blocks of keys with the running state of step 4."""
    n, dim = q.shape
    out = np.empty((n, v.shape[1]), np.float32)
    for start_q in range(0, n, block_q):  # on a GPU these are programs that run at the same time
        rows = slice(start_q, min(start_q + block_q, n))
        q_tile = memory.load(q, rows) / np.float32(dim**0.5)
        row_max = np.full((len(q_tile), 1), -np.inf, np.float32)
        row_sum = np.zeros((len(q_tile), 1), np.float32)
        acc = np.zeros((len(q_tile), v.shape[1]), np.float32)
        for start_k in range(0, len(k), block_k):
            keys = slice(start_k, min(start_k + block_k, len(k)))
            scores = q_tile @ memory.load(k, keys).T  # [block_q, block_k], and gone with the next block
            new_max = np.maximum(row_max, scores.max(1, keepdims=True))
            weights = np.exp(scores - new_max)
            rescale = np.exp(row_max - new_max)
            row_sum = row_sum * rescale + weights.sum(1, keepdims=True)
            acc = acc * rescale + weights @ memory.load(v, keys)
            row_max = new_max
        memory.store(out, acc / row_sum, rows)
    return out


def measured(attend: Callable[..., Array], *tensors: Array, **blocks: int) -> tuple[Array, int, int]:
    """The result, the bytes moved, and the peak of memory that was allocated on the way, the result included."""
    memory = SlowMemory()
    tracemalloc.start()
    out = attend(*tensors, memory, **blocks)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return out, memory.bytes, peak


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024], help="queries and keys")
    parser.add_argument("--dim", type=int, default=64, help="numbers of a query, key or value; default 64")
    parser.add_argument("--block-q", type=int, default=128, help="queries of a block; default 128")
    parser.add_argument("--block-k", type=int, default=64, help="keys of a block; default 64")
    options = parser.parse_args(argv)
    blocks = {"block_q": options.block_q, "block_k": options.block_k}

    print(f"head dim {options.dim}, fp32, blocks of {options.block_q} queries and {options.block_k} keys")
    print("        |  moved, MB          |  peak memory, MB    |")
    print(" length | standard   blocked  | standard   blocked  | largest difference")
    rng = np.random.default_rng(0)
    for n in options.lengths:
        q, k, v = rng.standard_normal((3, n, options.dim), dtype=np.float32)
        expected, standard_bytes, standard_peak = measured(standard_attention, q, k, v)
        out, blocked_bytes, blocked_peak = measured(blocked_attention, q, k, v, **blocks)
        difference = np.abs(out - expected).max()
        print(
            f"{n:7} | {standard_bytes / 1e6:8.2f}  {blocked_bytes / 1e6:8.2f}  "
            f"| {standard_peak / 1e6:8.1f}  {blocked_peak / 1e6:8.1f}  "
            f"| {'below 1e-5' if difference < 1e-5 else f'{difference:.1e}'}"
        )


if __name__ == "__main__":
    main()
