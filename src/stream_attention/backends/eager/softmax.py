"""The online softmax in torch, a tile of scores at a time:

new_max = max(row_max, max_j s_j)        acc = acc * exp(row_max - new_max) + sum_j exp(s_j - new_max) v_j
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...base.state import EMPTY


def online_softmax_step(scores: Tensor, row_max: Tensor, row_sum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one tile into the running softmax: new max and sum, by what `acc` is rescaled, and the tile's `p`.

    Scores become `p` in place. A row without a visible key has max -inf, and `p` 0 rather than NaN.
    """
    new_max = torch.maximum(row_max, scores.amax(-1))
    finite_max = new_max.clamp_min(torch.finfo(scores.dtype).min)
    rescale = torch.exp(row_max - finite_max)
    p = exp_(scores.sub_(finite_max.unsqueeze(-1)))
    return new_max, row_sum * rescale + p.sum(-1), rescale, p


def normalised(acc: Tensor, row_max: Tensor, row_sum: Tensor, keep: float = 1.0) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of all tiles; of a row without a visible key 0 and -inf. `keep`: the share that dropout leaves."""
    has_keys = row_sum != 0  # also where it is NaN, from a visible key
    row_sum = row_sum.masked_fill(~has_keys, 1.0)
    return acc / (row_sum * keep).unsqueeze(-1), torch.where(has_keys, row_max + row_sum.log(), EMPTY)


def exp_(x: Tensor) -> Tensor:
    """exp in place, by way of exp2. The error of x * log2(e) is at most |x| eps, times exp(x): below eps for x <= 0."""
    return x.mul_(math.log2(math.e)).exp2_()
