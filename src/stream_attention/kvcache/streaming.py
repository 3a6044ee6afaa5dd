"""streaming: the first few tokens and the latest ones are kept; those between are dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.errors import check_int
from .compression_spec import CompressionSpec
from .compressor import KVCompressor
from .select import best


class StreamingCompressor(KVCompressor):
    """Keeps the first `sinks` real tokens of a row and fills the budget with the last ones, at least one.

    The attention sinks keep a model stable (Xiao et al., "Efficient streaming language models", 2023). The model cannot
    retrieve dropped tokens.
    """

    def __init__(self, sinks: int = 4) -> None:
        self.sinks = check_int("sinks", sinks, 0)

    def _choose(self, spec: CompressionSpec) -> Tensor:
        real = spec.is_real
        sinks = [min(self.sinks, max(0, budget - 1)) for budget in spec.budgets()]
        place = real.cumsum(1) - 1
        first = place < torch.tensor(sinks, device=real.device).view(-1, 1)
        scores = torch.where(first, real.shape[1] - place, place - real.shape[1]).double()
        return best(scores.unsqueeze(1).expand(-1, spec.keys.shape[2], -1), spec, "each")

    def _described(self, spec: CompressionSpec) -> str:
        return "streaming"
