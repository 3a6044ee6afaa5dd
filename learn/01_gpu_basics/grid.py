"""A GPU's grid in plain Python: which thread computes which element, and what its loads cost.

python learn/01_gpu_basics/grid.py [--length 10] [--threads 4] [--size 32]

Needs nothing but Python. A kernel is a generator here: `yield` is `__syncthreads()`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

WARP = 32  # threads that execute each instruction together
SECTOR = 32  # bytes: the least that the memory of an NVIDIA GPU delivers
FLOAT = 4  # bytes


class Dim(NamedTuple):
    x: int
    y: int = 1


class Thread(NamedTuple):
    """What a CUDA kernel knows without being told: blockIdx, blockDim and threadIdx."""

    block: Dim
    dim: Dim
    thread: Dim

    @property
    def rank(self) -> int:
        """Its number in the block, x first. Ranks 0 to 31 are the first warp."""
        return self.thread.y * self.dim.x + self.thread.x


class Array:
    """Numbers in global memory that notes who reads what, and when.

    The n-th read of each thread of a warp is one request. It moves every sector in which a thread of the warp reads.
    """

    def __init__(self, values: Iterable[float]) -> None:
        self.values = list(values)
        self.requests: dict[tuple[Dim, int, int], set[int]] = {}
        self.loads = 0
        self._reads_of: Counter[tuple[Dim, int]] = Counter()

    def read(self, who: Thread, index: int) -> float:
        turn = self._reads_of[who.block, who.rank]
        self._reads_of[who.block, who.rank] += 1
        sectors = self.requests.setdefault((who.block, who.rank // WARP, turn), set())
        sectors.add(index * FLOAT // SECTOR)
        self.loads += 1
        return self.values[index]

    @property
    def bytes_moved(self) -> int:
        return SECTOR * sum(len(sectors) for sectors in self.requests.values())


Kernel = Callable[..., Iterator[None]]


def launch(kernel: Kernel, grid: Dim, dim: Dim, *arguments: Any) -> None:
    """Run every thread of every block. Threads of a block run from barrier to barrier; blocks know nothing of each
    other, and a GPU may run them in any order."""
    for y in range(grid.y):
        for x in range(grid.x):
            shared: dict[Any, float] = {}
            ranks = [Dim(tx, ty) for ty in range(dim.y) for tx in range(dim.x)]
            running = [kernel(Thread(Dim(x, y), dim, rank), shared, *arguments) for rank in ranks]
            while running:
                running = [thread for thread in running if next(thread, "done") != "done"]


def cdiv(a: int, b: int) -> int:
    """How many pieces of b cover a: division rounded up."""
    return (a + b - 1) // b


def vec_add(at: Thread, shared: dict[Any, float], x: Array, y: Array, out: list[float], n: int) -> Iterator[None]:
    i = at.block.x * at.dim.x + at.thread.x
    if i < n:
        out[i] = x.read(at, i) + y.read(at, i)
    yield from ()  # no barrier; this makes it a generator like the others


def copy_with_stride(at: Thread, shared: dict[Any, float], x: Array, stride: int) -> Iterator[None]:
    x.read(at, (at.block.x * at.dim.x + at.thread.x) * stride)
    yield from ()


def mul_plain(at: Thread, shared: dict[Any, float], a: Array, b: Array, out: list[float], n: int) -> Iterator[None]:
    col = at.block.x * at.dim.x + at.thread.x
    row = at.block.y * at.dim.y + at.thread.y
    if row < n and col < n:
        out[row * n + col] = sum(a.read(at, row * n + k) * b.read(at, k * n + col) for k in range(n))
    yield from ()


def mul_tiled(at: Thread, shared: dict[Any, float], a: Array, b: Array, out: list[float], n: int) -> Iterator[None]:
    tile, (tx, ty) = at.dim.x, at.thread
    col, row = at.block.x * tile + tx, at.block.y * tile + ty
    total = 0.0
    for k0 in range(0, n, tile):
        shared["a", ty, tx] = a.read(at, row * n + k0 + tx) if row < n and k0 + tx < n else 0.0
        shared["b", ty, tx] = b.read(at, (k0 + ty) * n + col) if col < n and k0 + ty < n else 0.0
        yield  # the tile is there before anybody reads it
        total += sum(shared["a", ty, k] * shared["b", k, tx] for k in range(tile))
        yield  # everybody has read it before anybody writes the next
    if row < n and col < n:
        out[row * n + col] = total


def show_threads(n: int, threads: int) -> None:
    x, y, out = Array(range(n)), Array([100.0] * n), [float("nan")] * n
    blocks = cdiv(n, threads)
    launch(vec_add, Dim(blocks), Dim(threads), x, y, out, n)
    print(f"{n} elements, {threads} threads a block: {blocks} blocks, {blocks * threads - n} threads idle")
    for block in range(blocks):
        indices = range(block * threads, (block + 1) * threads)
        print(f"  block {block}: elements {' '.join(str(i) if i < n else '-' for i in indices)}")
    print(f"  all right: {out == [i + 100.0 for i in range(n)]}\n")


def show_coalescing() -> None:
    print("One warp reads 32 floats, 128 bytes, and the memory delivers whole sectors of 32 bytes:")
    for stride in (1, 2, 8, 32):
        x = Array([0.0] * (WARP * stride))
        launch(copy_with_stride, Dim(1), Dim(WARP), x, stride)
        print(f"  stride {stride:2}: {x.bytes_moved:4} bytes moved, {100 * WARP * FLOAT // x.bytes_moved:3} % of use")
    print()


def show_tiles(n: int) -> None:
    tile = 8
    values = [float(i % 5 - 2) for i in range(n * n)]
    exact = [sum(values[r * n + k] * values[k * n + c] for k in range(n)) for r in range(n) for c in range(n)]
    print(f"{n} x {n} times {n} x {n}, blocks of {tile} x {tile} threads, numbers read from global memory:")
    for name, kernel in (("plain", mul_plain), ("tiled", mul_tiled)):
        a, b, out = Array(values), Array(values), [float("nan")] * (n * n)
        launch(kernel, Dim(cdiv(n, tile), cdiv(n, tile)), Dim(tile, tile), a, b, out, n)
        print(f"  {name}: {a.loads + b.loads:6} loads, all right: {out == exact}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=10, help="elements of the vectors; default 10")
    parser.add_argument("--threads", type=int, default=4, help="threads of a block; default 4")
    parser.add_argument("--size", type=int, default=32, help="rows and columns of the matrices; default 32")
    options = parser.parse_args(argv)
    show_threads(options.length, options.threads)
    show_coalescing()
    show_tiles(options.size)


if __name__ == "__main__":
    main()
