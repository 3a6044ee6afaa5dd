"""Checks exercise.py against the mask itself, tile by tile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking

Ranges = Callable[[int, int, int, int, int], tuple[int, int, int, int]]


def problems() -> Iterator[tuple[int, int, int, int, int]]:
    yield 0, 31, 1000, 64, 32  # no window to speak of: plain causal
    yield 64, 95, 20, 128, 32  # a window that is narrower than a tile
    yield 96, 127, 200, 100, 32  # queries past the last key
    yield 50, 50, 16, 128, 16  # one query
    luck = Random(7)
    for _ in range(300):
        first, left = luck.randrange(120), luck.choice((0, 5, 31, 32, 33, 64, 500))
        last, k_len = first + luck.randrange(40), luck.randrange(1, 150)
        if max(first - left, 0) < k_len:
            yield first, last, left, k_len, luck.choice((8, 16, 32))


def complaints(candidate: Ranges) -> Iterator[str]:
    for first, last, left, k_len, block_n in problems():
        where = f"first_pos={first}, last_pos={last}, left={left}, k_len={k_len}, block_n={block_n}"
        begin, whole_begin, whole_end, end = got = candidate(first, last, left, k_len, block_n)
        if not begin <= whole_begin <= whole_end <= end:
            yield f"{where}: expected begin <= whole_begin <= whole_end <= end; got {got}"
            return
        for tile in range(max(end, -(-k_len // block_n))):
            keys = range(tile * block_n, min((tile + 1) * block_n, k_len))
            seen = [[p - left <= key <= p for key in keys] for p in range(first, last + 1)]
            needed, whole = any(map(any, seen)), len(keys) == block_n and all(map(all, seen))
            if needed and not begin <= tile < end:
                yield f"{where}: some query sees a key of tile {tile}, and you do not read it: the answer is wrong"
            elif not needed and begin <= tile < end:
                yield f"{where}: no query sees a key of tile {tile}, and you read it: right, but slow"
            elif not whole and whole_begin <= tile < whole_end:
                yield f"{where}: tile {tile} is not seen whole, and you do not mask it: the answer is wrong"
            elif whole and not whole_begin <= tile < whole_end:
                yield f"{where}: every query sees all of tile {tile}, and you mask it: right, but slow"
            else:
                continue
            return


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "tile_ranges", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
