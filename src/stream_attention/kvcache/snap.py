"""snap: the last queries of the prompt choose the tokens before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import check_int, refuse
from .compression_spec import CompressionSpec
from .compressor import KVCompressor
from .importance import from_end, votes
from .select import Heads, best, checked_heads


class SnapCompressor(KVCompressor):
    """Keeps the last `window` real tokens of a row, and those with the most attention of the last `window` queries.

    Scores are averaged over `pool` neighbours, so that the surroundings of a token are kept too (Li et al., "SnapKV",
    2024). A budget smaller than the window keeps the latest of it. A `mass` is used unchanged: compute it with
    `attention_mass(..., window_queries=window)`.
    """

    uses_query = True

    def __init__(self, window: int = 32, pool: int = 5, *, heads: Heads = "each") -> None:
        self.window, self.pool = check_int("window", window, 1), check_int("pool", pool, 1)
        if pool % 2 == 0:
            refuse("pool", "an odd number of neighbours", pool)
        self.heads = checked_heads(heads)

    def _choose(self, spec: CompressionSpec) -> Tensor:
        real = spec.is_real
        later = from_end(real).unsqueeze(1)  # [B, 1, T]
        recent = real.unsqueeze(1) & (later < self.window)
        voted_on = real.unsqueeze(1) & ~recent
        votes_of = votes(spec, self.window).double().masked_fill(~voted_on, 0.0)
        pooled = self._mean_of_neighbours(votes_of) / self._mean_of_neighbours(voted_on.double()).clamp_min(1e-12)
        above = pooled.amax((1, 2), keepdim=True) if pooled.numel() else pooled
        return best(torch.where(recent, above + (1 + self.window - later), pooled), spec, self.heads)

    def _mean_of_neighbours(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x, self.pool, stride=1, padding=self.pool // 2) if x.numel() else x

    def _described(self, spec: CompressionSpec) -> str:
        return f"snap (window {self.window})"
