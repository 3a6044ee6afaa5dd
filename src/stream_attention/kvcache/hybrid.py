"""hybrid: important tokens are kept, in eight bits."""

from __future__ import annotations

from torch import Tensor

from .compression_spec import CompressionSpec
from .compressor import KVCompressor, Stored
from .importance import ImportanceBasedCompressor
from .quantized import QuantizedCompressor
from .select import Heads


class HybridCompressor(KVCompressor):
    """Keeps the most important tokens, one in `compression_ratio / 2`, and stores them as int8.

    For a 16-bit cache that is about `compression_ratio` in bytes (scales take some of it), for a 32-bit one about twice
    that: `stats.compression_ratio` is the result. `importance` is the `method` of `ImportanceBasedCompressor`, `group`
    that of `QuantizedCompressor`.
    """

    def __init__(self, importance: str = "auto", *, heads: Heads = "each", group: int = 64) -> None:
        self.importance = ImportanceBasedCompressor(importance, heads=heads)
        self.quantized = QuantizedCompressor(8, group=group)
        self.uses_query = self.importance.uses_query

    def _choose(self, spec: CompressionSpec) -> Tensor:
        return self.importance._choose(spec._replace(ratio=max(1.0, spec.ratio / 2)))

    def _store(
        self, keys: Tensor, values: Tensor, valid: Tensor | None, spec: CompressionSpec
    ) -> tuple[Stored, Stored]:
        return self.quantized.stored(keys, values, valid, "int8")

    def _described(self, spec: CompressionSpec) -> str:
        return f"hybrid: {self.importance._described(spec)}, int8"
