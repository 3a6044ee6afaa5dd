"""When two trainings count as the same: the one place that says so.

Losses are smoothed over 10 steps. At every step after the 20th, ours may differ from SDPA with the same seed by at most
the spread there: the largest difference between two seeds of SDPA within 10 steps on either side. The window is there
because two curves also cross, where a difference of nothing would say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SMOOTHED_OVER = 10
AFTER = 20
WITHIN = 10


class Verdict(NamedTuple):
    """Whether a curve stays within the spread, and where it comes closest to leaving it."""

    within: bool
    worst_step: int  # counted from 1
    difference: float  # nats, there
    spread: float  # nats, there

    @property
    def share(self) -> float:
        """Of the spread, at the worst step; above 1 is outside."""
        return self.difference / self.spread if self.spread else 0.0 if self.difference == 0 else float("inf")


def judge(losses: Sequence[float], peer: Sequence[float], other_seed: Sequence[float]) -> Verdict | None:
    """Losses step by step against SDPA with the same seed and with another; None where there are too few to judge."""
    if not len(losses) == len(peer) == len(other_seed):
        raise ValueError(f"losses: expected equally many; got {len(losses)}, {len(peer)} and {len(other_seed)}.")
    if len(losses) <= AFTER:
        return None
    difference = (smoothed(losses) - smoothed(peer)).abs()
    allowed = spread(peer, other_seed)
    shares = torch.where(difference == 0, 0.0, difference / allowed)[AFTER:]
    worst = AFTER + int(shares.argmax())  # NaN counts as largest
    within = bool((difference <= allowed)[AFTER:].all())  # NaN is not
    return Verdict(within, worst + 1, float(difference[worst]), float(allowed[worst]))


def smoothed(losses: Sequence[float]) -> Tensor:
    """At each step the mean of the last 10; of fewer before there are so many."""
    sums = F.pad(torch.tensor(losses, dtype=torch.float64).cumsum(0), (SMOOTHED_OVER, 0))
    counts = torch.arange(1, len(losses) + 1).clamp(max=SMOOTHED_OVER)
    return (sums[SMOOTHED_OVER:] - sums[:-SMOOTHED_OVER]) / counts


def spread(one: Sequence[float], other: Sequence[float]) -> Tensor:
    """At each step, how far two seeds are apart at most within 10 steps of it, smoothed."""
    apart = F.pad((smoothed(one) - smoothed(other)).abs(), (WITHIN, WITHIN))
    return apart.unfold(0, 2 * WITHIN + 1, 1).amax(1)
