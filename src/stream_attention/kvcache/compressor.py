"""The base of KV compressors: they choose tokens, choose the format to store them in, and report the cost.

A method overrides `_choose` (which positions of each head are kept), `_store` (in what format) or both, nothing else.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from .compression_spec import CompressionSpec, checked
from .quantize import QuantizedTensor
from .select import everything, gather

Stored = Tensor | QuantizedTensor
"""Keys or values as a compressor returns them."""

METHODS = {
    "importance": "ImportanceBasedCompressor",
    "chunk": "ChunkBasedCompressor",
    "quantized": "QuantizedCompressor",
    "hybrid": "HybridCompressor",
    "streaming": "StreamingCompressor",
    "snap": "SnapCompressor",
    "key_norm": "KeyNormCompressor",
}
"""Class of each method, in the file of the method's name."""


@dataclass(frozen=True, eq=False)
class CompressionStats:
    """What a compression kept and what it cost. Sizes are bytes of the tensors, scales included.

    The bytes of `positions` are not counted: a caller who does not need them may drop them.
    """

    method: str
    original_size: int
    compressed_size: int
    tokens: int  # length of the input
    tokens_retained: int  # length of the output: the most that a head of a row keeps
    compression_time: float  # seconds on the host; on an accelerator, until all kernels are launched
    positions: Tensor = field(repr=False)  # int64 [B, Hkv, tokens_retained], rising, -1 after the last of a head

    @property
    def compression_ratio(self) -> float:
        """Bytes of the input per byte of the output; 1 where there is no input."""
        return self.original_size / self.compressed_size if self.compressed_size else 1.0

    @property
    def memory_saved_mb(self) -> float:
        """Negative where the scales of a small cache take more bytes than it does."""
        return (self.original_size - self.compressed_size) / 2**20

    @property
    def counts(self) -> Tensor:
        """How many tokens each head keeps, int64 `[B, Hkv]`."""
        return (self.positions >= 0).sum(-1)

    def mask(self, q_heads: int | None = None) -> Tensor:
        """Which slots have a token: bool `[B, Hq, 1, tokens_retained]`, the `mask` of an attention over the result.

        `q_heads` is Hq where that is more than the KV heads.
        """
        valid = self.positions >= 0
        kv_heads = valid.shape[1]
        heads = kv_heads if q_heads is None else q_heads
        if heads % kv_heads:
            refuse("q_heads", f"a multiple of the {kv_heads} KV heads", heads)
        return valid.repeat_interleave(heads // kv_heads, dim=1).unsqueeze(2)

    def __str__(self) -> str:
        return (
            f"{self.method}: {self.tokens_retained} of {self.tokens} tokens, {self.compressed_size} of "
            f"{self.original_size} bytes ({self.compression_ratio:.2f}x) in {1e3 * self.compression_time:.2f} ms"
        )


class KVCompressor(ABC):
    """Makes a cache smaller. The rows of a batch do not influence each other, and nothing is random."""

    uses_query = False
    """Whether this method uses `query` and `mass`; where it does not, they are refused."""

    def compress(
        self,
        keys: Tensor,
        values: Tensor,
        compression_ratio: float = 8.0,
        *,
        query: Tensor | None = None,
        mass: Tensor | None = None,
        lengths: Tensor | None = None,
        key_mask: Tensor | None = None,
        causal: bool = True,
        scale: float | None = None,
    ) -> tuple[Stored, Stored, CompressionStats]:
        """A smaller cache, its tokens in position order, and statistics.

        A row of n real tokens keeps floor(n / compression_ratio) of them, but at least one; padding is never kept.
        Where heads or rows keep fewer tokens than others, they end in empty slots, at which `stats.positions` is -1 and
        `stats.mask()` False: pass that mask to an attention over the result.

        Args:
            keys: `[B, T, Hkv, D]`, fp16, bf16, fp32 or fp64.
            values: `[B, T, Hkv, Dv]`, likewise.
            compression_ratio: at least 1. How many times fewer tokens; for "quantized" and "hybrid" see there.
            query: `[B, Tq, Hq, D]`: the queries whose attention is the score of a token. As in `attention`, the last
                query is at the last index of the cache; a query on padding does not count.
            mass: `[B, Hkv, T]`, in place of `query`: `attention_mass(...)` of any modifiers.
            lengths: int `[B]`: row b has real tokens in its first lengths[b] slots. Read on the host.
            key_mask: bool `[B, T]`, True = a real token, in place of `lengths`: padding anywhere. Read on the host.
            causal: of the attention of `query`.
            scale: of the attention of `query`; default D ** -0.5.

        Returns:
            keys `[B, kept, Hkv, D]`, values `[B, kept, Hkv, Dv]` (tensors, or `QuantizedTensor`s, see `decompress`)
            and `CompressionStats`.

        Raises:
            ValueError, TypeError: a bad argument, or one that this method would not use, before any work.
        """
        spec = CompressionSpec(keys, values, compression_ratio, [], key_mask, query, mass, causal, scale)
        spec = checked(spec, lengths, self.uses_query)
        described, began = self._described(spec), time.perf_counter()
        with torch.no_grad():
            positions = self._choose(spec)
        valid = None
        if positions is None:
            positions = everything(keys)
        else:
            valid = (positions >= 0).transpose(1, 2)
            keys, values = gather(keys, positions), gather(values, positions)
        stored = self._store(keys, values, valid, spec)
        sizes = spec.nbytes, sum(one.nbytes for one in stored), spec.keys.shape[1], positions.shape[-1]
        return *stored, CompressionStats(described, *sizes, time.perf_counter() - began, positions)

    def decompress(self, keys: Stored, values: Stored) -> tuple[Tensor, Tensor]:
        """What `compress` returned as plain tensors of the cache's dtype, without the dropped tokens."""
        return decompress(keys, values)

    @abstractmethod
    def _choose(self, spec: CompressionSpec) -> Tensor | None:
        """Positions to keep, int64 `[B, Hkv, kept]`, rising, -1 after the last of a head; None: every slot."""

    @abstractmethod
    def _described(self, spec: CompressionSpec) -> str:
        """The `method` of the stats."""

    def _store(self, keys: Tensor, values: Tensor, valid: Any, spec: CompressionSpec) -> tuple[Stored, Stored]:
        """The format of the kept tokens. `valid`, bool `[B, kept, Hkv]` or None: slots that have one; None: all."""
        return keys, values


def create_kv_compressor(method: str = "hybrid", **options: Any) -> KVCompressor:
    """The compressor of a method, by name; `options` are its class's arguments.

    The importance of "importance", its class's `method`, is called `importance` here, as it is in "hybrid".

    Raises:
        ValueError: no such method, or a bad option.
        TypeError: an option that the method does not have.

    >>> import torch
    >>> from stream_attention.kvcache import create_kv_compressor
    >>> keys, values = torch.randn(2, 1, 64, 2, 16)
    >>> create_kv_compressor("streaming", sinks=2).compress(keys, values, 8.0)[2].positions[0, 0].tolist()
    [0, 1, 58, 59, 60, 61, 62, 63]
    """
    if method not in METHODS:
        refuse("method", f"one of {', '.join(METHODS)}", repr(method))
    if method == "importance" and "importance" in options:
        options["method"] = options.pop("importance")
    compressor: KVCompressor = getattr(import_module(f".{method}", __package__), METHODS[method])(**options)
    return compressor


def decompress(keys: Stored, values: Stored) -> tuple[Tensor, Tensor]:
    """What a compressor returned as plain tensors."""
    for name, stored in (("keys", keys), ("values", values)):
        if not isinstance(stored, (Tensor, QuantizedTensor)):
            refuse(name, "a tensor or QuantizedTensor that compress() returned", type(stored).__name__, error=TypeError)
    key, value = (one.dequantize() if isinstance(one, QuantizedTensor) else one for one in (keys, values))
    return key, value
