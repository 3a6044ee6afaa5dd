"""A solution of the exercise."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_and_lse(scores: Tensor) -> tuple[Tensor, Tensor]:
    peak = scores.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)  # -inf - -inf is NaN; with 0 every exponential of that row is 0
    e = torch.exp(scores - peak)
    total = e.sum(-1, keepdim=True)  # at least 1, or exactly 0 in a row that sees nothing
    weights = e / torch.where(total == 0, 1.0, total)
    return weights, (peak + torch.log(total)).squeeze(-1)
