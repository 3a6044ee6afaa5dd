"""chunk: adjacent tokens are kept or dropped together, so that phrases stay whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.errors import check_int, refuse
from .compression_spec import CompressionSpec
from .compressor import KVCompressor
from .importance import ImportanceBasedCompressor
from .select import comparable, in_order


class ChunkBasedCompressor(KVCompressor):
    """Splits the real tokens of a row into chunks of `chunk_size` and keeps those of the highest mean score.

    Chunks are kept from the best on while they fit into the budget, so fewer tokens than the budget may be kept; where
    a chunk would be larger than the budget, chunks are as large as that. `importance` is the `method` of
    `ImportanceBasedCompressor`. `heads`: "each" head keeps its own chunks, or all the "same".
    """

    def __init__(self, chunk_size: int = 64, *, importance: str = "auto", heads: str = "each") -> None:
        self.chunk_size = check_int("chunk_size", chunk_size, 1)
        if heads not in ("each", "same"):
            refuse("heads", '"each" or "same"', repr(heads))
        self.heads = heads
        self.importance = ImportanceBasedCompressor(importance)
        self.uses_query = self.importance.uses_query

    def _choose(self, spec: CompressionSpec) -> Tensor:
        scores = self.importance.scores(spec)
        if self.heads == "same":
            scores = scores.sum(1, keepdim=True).expand_as(scores)
        real = spec.is_real
        scores = comparable(scores, real)
        kept = torch.zeros_like(scores, dtype=torch.bool)
        for row, (length, budget) in enumerate(zip(spec.lengths, spec.budgets(), strict=True)):
            places = (~real[row]).long().argsort(stable=True)[:length]  # of its real tokens
            if length:
                kept[row, :, places] = self._kept_of_row(scores[row, :, places], budget)
        return in_order((~kept).long().argsort(dim=-1, stable=True), kept.sum(-1))

    def _kept_of_row(self, scores: Tensor, budget: int) -> Tensor:
        """Which of a row's real tokens are kept, by their scores `[Hkv, n]`."""
        length, size = scores.shape[1], min(self.chunk_size, budget)
        by_chunk = F.pad(scores, (0, -length % size)).unflatten(1, (-1, size))
        sizes = torch.full((by_chunk.shape[1],), size, device=scores.device)
        sizes[-1] = length - size * (by_chunk.shape[1] - 1)
        order = (by_chunk.sum(-1) / sizes).argsort(dim=-1, descending=True, stable=True)
        fits = sizes[order].cumsum(-1) <= budget
        return torch.zeros_like(fits).scatter(1, order, fits).repeat_interleave(size, 1)[:, :length]

    def _described(self, spec: CompressionSpec) -> str:
        return f"chunks of {self.chunk_size} by {self.importance._described(spec)}"
