"""Checks exercise.py: every token has one holder, causal work is in balance, and the keys really go round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking

Answer = Callable[[int, int, int], tuple[list[int], list[int]]]


def complaints(candidate: Answer) -> Iterator[str]:
    for ranks, length in ((1, 5), (2, 8), (3, 12), (4, 32), (4, 30)):
        where = f"ranks={ranks}, length={length}"
        answers = [candidate(rank, ranks, length) for rank in range(ranks)]
        wrong = faulty_rows([rows for rows, _ in answers], length) or faulty_owners([owners for _, owners in answers])
        if wrong:
            yield f"{where}: {wrong}"
            return


def faulty_rows(rows: list[list[int]], length: int) -> str:
    holders: dict[int, int] = {}
    for rank, its in enumerate(rows):
        for position in its:
            if not 0 <= position < length:
                return f"rank {rank} holds position {position}, which does not exist"
            if position in holders:
                return f"position {position} is held by rank {holders[position]} and by rank {rank}"
            holders[position] = rank
        if its != sorted(its):
            return f"the positions of rank {rank} are not in order"
    if len(holders) < length:
        return f"nobody holds position {min(set(range(length)) - holders.keys())}"
    work = [sum(position + 1 for position in its) for its in rows]  # a causal row at position p needs p + 1 scores
    if max(work) - min(work) > length:
        return f"the ranks need {work} scores: that is not in balance, as striped rows would be"
    dealt = [holders[position] for position in range(length)]
    if dealt != [position % len(rows) for position in range(length)]:
        return f"positions 0, 1, 2, ... should go to ranks 0, 1, 2, ... in turn; yours go to {dealt[: 2 * len(rows)]}"
    return ""


def faulty_owners(owners: list[list[int]]) -> str:
    """Play the ring: at every step each rank passes on what it holds."""
    ranks = len(owners)
    held = list(range(ranks))
    for step in range(ranks):
        for rank in range(ranks):
            if owners[rank][step] != held[rank]:
                said = f"you say those of rank {owners[rank][step]}"
                return f"at step {step} rank {rank} holds the keys of rank {held[rank]}; {said}"
        held = [held[(rank - 1) % ranks] for rank in range(ranks)]
    return ""


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "rows_and_owners", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
