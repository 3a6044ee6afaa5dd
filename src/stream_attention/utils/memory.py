"""The memory tools under one name: profiler, checkpointing, estimates, chunked attention, and the KV compressors."""

from importlib import import_module
from typing import TYPE_CHECKING

from ..kvcache import (
    ChunkBasedCompressor,
    CompressionStats,
    HybridCompressor,
    ImportanceBasedCompressor,
    KVCompressor,
    QuantizedCompressor,
    create_kv_compressor,
)
from .checkpoint import gradient_checkpoint_sequential, save_attention, stream_checkpoint_policy
from .chunked import MemoryEfficientAttention

if TYPE_CHECKING:
    from stream_attention_tools.memory.estimate import (
        AttentionMemory,
        estimate_attention_memory,
        estimate_kv_cache_bytes,
    )
    from stream_attention_tools.memory.profiler import MemoryProfiler

KVCacheCompressor = KVCompressor
"""Its name in the systems that this library replaces."""

__all__ = [
    "AttentionMemory",
    "ChunkBasedCompressor",
    "CompressionStats",
    "HybridCompressor",
    "ImportanceBasedCompressor",
    "KVCacheCompressor",
    "MemoryEfficientAttention",
    "MemoryProfiler",
    "QuantizedCompressor",
    "create_kv_compressor",
    "estimate_attention_memory",
    "estimate_kv_cache_bytes",
    "gradient_checkpoint_sequential",
    "save_attention",
    "stream_checkpoint_policy",
]

_INSTRUMENTS = {
    "AttentionMemory": "estimate",
    "MemoryProfiler": "profiler",
    "estimate_attention_memory": "estimate",
    "estimate_kv_cache_bytes": "estimate",
}
"""Names of stream_attention_tools.memory, which is imported when one of them is accessed."""

if not TYPE_CHECKING:  # to a type checker they do not exist

    def __getattr__(name: str) -> object:
        if name in _INSTRUMENTS:
            return getattr(import_module(f"{__package__}.{_INSTRUMENTS[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
