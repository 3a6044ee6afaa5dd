"""Online softmax: a weighted mean in one pass, and the merge of two such passes, in exact arithmetic.

python learn/04_online_softmax/online.py [--scores 1 3 2 4] [--values 8 4 2 1]

Scores are whole numbers and weights are powers of 2 here, not of e, so that every number is a fraction that you can
follow by hand. The kernels do the same in fp32 (they too use powers of 2, of scores times log2(e)).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from typing import NamedTuple

EMPTY_MAX = -math.inf


class State(NamedTuple):
    """What is known after some keys: the largest score, and two sums relative to it."""

    row_max: float  # m: a whole number, or -inf
    row_sum: Fraction  # l: sum of 2^(s - m)
    acc: Fraction  # o: sum of 2^(s - m) v

    @property
    def out(self) -> Fraction:
        return self.acc / self.row_sum

    @property
    def lse(self) -> float:
        """In powers of 2: log2 of the sum of 2^s."""
        return self.row_max + math.log2(self.row_sum)


EMPTY = State(EMPTY_MAX, Fraction(0), Fraction(0))


def power(exponent: float) -> Fraction:
    return Fraction(0) if exponent == -math.inf else Fraction(2) ** int(exponent)


def merge(a: State, b: State) -> State:
    """The state of both sets of keys: each is rescaled from its own maximum to the larger one, and the sums add up."""
    row_max = max(a.row_max, b.row_max)
    if row_max == EMPTY_MAX:
        return EMPTY  # -inf minus -inf is no number
    rescale_a, rescale_b = power(a.row_max - row_max), power(b.row_max - row_max)
    return State(row_max, a.row_sum * rescale_a + b.row_sum * rescale_b, a.acc * rescale_a + b.acc * rescale_b)


def one_key(score: int, value: int) -> State:
    """2^(s - s) is 1."""
    return State(score, Fraction(1), Fraction(value))


def two_passes(scores: Sequence[int], values: Sequence[int]) -> Fraction:
    """The definition: the maximum first, then the sums."""
    m = max(scores)
    weights = [power(s - m) for s in scores]
    return sum((w * v for w, v in zip(weights, values, strict=True)), Fraction(0)) / sum(weights)


def show_steps(scores: Sequence[int], values: Sequence[int]) -> State:
    print("score value |  max rescale  weight |    sum     acc |    out")
    state = EMPTY
    for score, value in zip(scores, values, strict=True):
        new = merge(state, one_key(score, value))
        rescale, weight = power(state.row_max - new.row_max), power(score - new.row_max)
        state = new
        cells = [str(rescale), str(weight), str(state.row_sum), str(state.acc), str(state.out)]
        print("{:5} {:5} | {:4.0f}  {:>6}  {:>6} | {:>6}  {:>6} | {:>6}".format(score, value, state.row_max, *cells))
    print(f"out {state.out} = {float(state.out):g}, lse {state.lse:.4f}; in two passes {two_passes(scores, values)}\n")
    return state


def every_bracketing(states: Sequence[State]) -> list[State]:
    """All ways to merge neighbours until one is left."""
    if len(states) == 1:
        return [states[0]]
    return [
        merge(left, right)
        for cut in range(1, len(states))
        for left in every_bracketing(states[:cut])
        for right in every_bracketing(states[cut:])
    ]


def show_algebra(scores: Sequence[int], values: Sequence[int]) -> None:
    keys = [one_key(score, value) for score, value in zip(scores, values, strict=True)]
    results = [state for order in permutations(keys) for state in every_bracketing(order)]
    whole = results[0]
    print(f"{len(results)} orders and bracketings of {len(keys)} keys give {len(set(results))} result(s)")
    print(f"merging with nothing changes nothing: {merge(whole, EMPTY) == whole == merge(EMPTY, whole)}")
    print(f"nothing with nothing is nothing: {merge(EMPTY, EMPTY) == EMPTY}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=int, nargs="+", default=[1, 3, 2, 4], help="whole numbers; default 1 3 2 4")
    parser.add_argument("--values", type=int, nargs="+", default=[8, 4, 2, 1], help="as many; default 8 4 2 1")
    options = parser.parse_args(argv)
    if len(options.scores) != len(options.values) or len(options.scores) > 5:
        parser.error("expected as many values as scores, 5 at most")
    show_steps(options.scores, options.values)
    show_algebra(options.scores, options.values)


if __name__ == "__main__":
    main()
