"""Check the exercise: python learn/03_softmax/check.py [--solution]"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checking

INF = torch.inf

CASES = {  # name: scores and what to think of if they come out wrong
    "small scores": (torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]), "Weights are exp(x) over their sum."),
    "three dims": (torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)), "The last dim is that of keys."),
    "large scores": (torch.tensor([[91.0, 92.0, 93.0], [1e30, 0.0, -1e30]]), "exp(91) is not a number of fp32."),
    "small and large rows": (torch.tensor([[0.0, 1.0], [500.0, 501.0]]), "Each row has its own maximum."),
    "very negative scores": (
        torch.tensor([[-201.0, -200.0], [-1e30, -1e30]]),
        "Their exponentials are all 0 without a shift.",
    ),
    "a hidden key": (torch.tensor([[1.0, -INF, 2.0]]), "exp(-inf) is 0, which is what is wanted."),
    "a row that sees nothing": (torch.tensor([[-INF, -INF], [1.0, 2.0]]), "-inf minus -inf is NaN, and so is 0 / 0."),
}


def complaints(candidate: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Iterator[str]:
    for name, (scores, hint) in CASES.items():
        given = scores.clone()
        weights, lse = candidate(given)
        exact_weights, exact_lse = _exact(scores)
        if weights.shape != scores.shape or lse.shape != scores.shape[:-1]:
            shapes = f"{list(weights.shape)} and {list(lse.shape)}"
            right = f"{list(scores.shape)} and {list(scores.shape[:-1])}"
            yield f"{name}: weights and lse have shapes {shapes} where {right} are right. One lse a row."
        elif weights.isnan().any() or lse.isnan().any():
            yield f"{name}: there is NaN in the {'weights' if weights.isnan().any() else 'lse'}. {hint}"
        elif not torch.allclose(weights.double(), exact_weights, rtol=1e-5, atol=1e-7):
            yield f"{name}: weights {weights.tolist()} where {exact_weights.tolist()} is right. {hint}"
        elif not torch.allclose(lse.double(), exact_lse, rtol=1e-6, atol=1e-6):
            yield f"{name}: lse {lse.tolist()} where {exact_lse.tolist()} is right. {hint}"
        if not torch.equal(given, scores):
            yield f"{name}: the scores that were given have changed."


def _exact(scores: Tensor) -> tuple[Tensor, Tensor]:
    """By torch in fp64, where a row that sees nothing is NaN and is put right."""
    weights = torch.softmax(scores.double(), -1)
    return torch.where(weights.isnan(), 0.0, weights), torch.logsumexp(scores.double(), -1)


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "softmax_and_lse", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
