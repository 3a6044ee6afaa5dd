"""Checks exercise.py: every key once, whole tiles, nobody has too many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking

Split = Callable[[int, int, int], list[tuple[int, int]]]
PROBLEMS = ((64, 2, 32), (500, 4, 32), (500, 16, 32), (100, 3, 16), (100, 8, 16), (33, 2, 32), (10, 4, 32), (1, 1, 64))


def complaints(candidate: Split) -> Iterator[str]:
    for keys, splits, block in PROBLEMS:
        wrong = fault(candidate(keys, splits, block), keys, splits, block)
        if wrong:
            yield f"keys={keys}, splits={splits}, block={block}: {wrong}"
            return


def fault(ranges: list[tuple[int, int]], keys: int, splits: int, block: int) -> str:
    """What is wrong with an answer, in words."""
    if len(ranges) != splits:
        return f"expected {splits} ranges, one for each program; got {len(ranges)}"
    reached = 0
    for split, (begin, end) in enumerate(ranges):
        if begin > end:
            return f"split {split} ends before it begins: {begin} to {end}"
        if begin < reached:
            return f"key {begin} is read twice, by split {split} and before it: its weight would count double"
        if begin > reached:
            return f"keys {reached} to {begin - 1} are read by nobody"
        if begin % block and begin < keys:
            return f"split {split} begins at key {begin}, in the middle of a tile of {block}"
        reached = end
    if reached < keys:
        return f"keys {reached} to {keys - 1} are read by nobody"
    if reached > keys:
        return f"the last split ends at {reached}, behind the last key: it would read what is not there"
    tiles = [-(-(end - begin) // block) for begin, end in ranges]
    most, fewest = max(tiles), -(-sum(tiles) // splits)
    if most > fewest:
        return f"a split has {most} tiles where {fewest} would do: everybody waits for it"
    return ""


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "split_ranges", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
