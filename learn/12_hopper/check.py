"""Checks exercise.py: a producer and a consumer run on a model of the ring, in many orders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking

Parities = Callable[[int, int], tuple[int, int, int]]


class Ring:
    """What the two roles share. A barrier is the number of its current phase."""

    def __init__(self, slots: int) -> None:
        self.full, self.empty = [0] * slots, [0] * slots
        self.held: list[int | None] = [None] * slots


def passes(phase: int, parity: int) -> bool:
    """Whether a wait returns: the current phase is not the one that is waited for."""
    return phase % 2 != parity


def produce(ring: Ring, use: int, answer: tuple[int, int, int]) -> str:
    slot = answer[0]
    if ring.held[slot] is not None:
        return f"the producer filled slot {slot} for use {use} before tile {ring.held[slot]} was read"
    ring.held[slot] = use
    ring.full[slot] += 1
    return ""


def consume(ring: Ring, use: int, answer: tuple[int, int, int]) -> str:
    slot = answer[0]
    if ring.held[slot] != use:
        there = "nothing yet" if ring.held[slot] is None else f"tile {ring.held[slot]}"
        return f"the consumer wanted tile {use} in slot {slot} and found {there}"
    ring.held[slot] = None
    ring.empty[slot] += 1
    return ""


def trial(parities: Parities, slots: int, uses: int, choose: Callable[[], bool]) -> str:
    """Run both roles to the end; `choose` says who goes first when both may. Returns what went wrong."""
    ring, filled, read = Ring(slots), 0, 0
    while read < uses:
        ahead, behind = parities(filled, slots), parities(read, slots)
        may_fill = filled < uses and passes(ring.empty[ahead[0]], ahead[2])
        may_read = passes(ring.full[behind[0]], behind[1])
        if not may_fill and not may_read:
            return f"both wait for ever, after {filled} tiles were put there and {read} were read"
        if may_fill and (not may_read or choose()):
            wrong, filled = produce(ring, filled, ahead), filled + 1
        else:
            wrong, read = consume(ring, read, behind), read + 1
        if wrong:
            return wrong
    return ""


def complaints(candidate: Parities) -> Iterator[str]:
    for slots in (1, 2, 3, 4):
        used = {candidate(use, slots)[0] for use in range(4 * slots)}
        if used != set(range(slots)):
            yield f"a ring of {slots} should use slots {list(range(slots))}; yours uses {sorted(used)}"
            return
    for slots in (1, 2, 3, 4):
        orders = {"the producer first": lambda: True, "the consumer first": lambda: False}
        for seed in range(20):
            orders[f"by chance, seed {seed}"] = partial(Random(seed).choice, (True, False))
        for name, choose in orders.items():
            wrong = trial(candidate, slots, 5 * slots, choose)
            if wrong:
                yield f"a ring of {slots}, {name}: {wrong}"
                return


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "slot_and_parities", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
