"""Check the exercise: python learn/04_online_softmax/check.py [--solution]"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checking

INF, NAN = torch.inf, torch.nan


def state(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """By definition: scores `[rows, keys]`, values `[keys, dim]`."""
    return torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)


def complaints(candidate: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 20, generator=generator)
    values = torch.randn(20, 3, generator=generator)
    left, right = state(scores[:, :5], values[:5]), state(scores[:, 5:], values[5:])
    whole = state(scores, values)
    nothing, unknown = (torch.zeros(6, 3), torch.full((6,), -INF)), (torch.full((6, 3), NAN), torch.full((6,), -INF))
    high = state(scores + 500, values)
    part_high, rest_high = state(scores[:, :9] + 500, values[:9]), state(scores[:, 9:] + 500, values[9:])
    far = state(scores - 400, values)

    cases = {
        "5 keys and 15 keys": (left, right, whole, "The larger sum has the larger share: a plain mean is wrong."),
        "15 keys and 5 keys": (right, left, whole, "The order must not matter."),
        "scores near 500": (part_high, rest_high, high, "exp(500) is infinite: subtract before you exponentiate."),
        "a state 900 below the other": (far, high, high, "exp(-900) is 0, and that is right."),
        "a state and an empty one": (whole, nothing, whole, "An empty state changes nothing."),
        "an empty state and a state": (nothing, whole, whole, "An empty state changes nothing."),
        "an empty state that holds NaN": (unknown, whole, whole, "0 * NaN is NaN: do not look at its out."),
        "two empty states": (nothing, nothing, nothing, "-inf minus -inf is NaN."),
    }
    for name, (a, b, expected, hint) in cases.items():
        got = candidate(*a, *b)
        for part, value, exact in zip(("out", "lse"), got, expected, strict=True):
            if value.shape != exact.shape:
                yield f"{name}: {part} has shape {list(value.shape)} where {list(exact.shape)} is right."
            elif value.isnan().any():
                yield f"{name}: there is NaN in {part}. {hint}"
            elif not torch.allclose(value, exact, rtol=1e-5, atol=1e-4 if part == "lse" else 1e-5):
                yield f"{name}: {part} begins {value[0].tolist()} where {exact[0].tolist()} is right. {hint}"


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "merge", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
