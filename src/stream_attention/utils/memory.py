"""The memory tools under one name: profiler, checkpointing, estimates, chunked attention, and the KV compressors."""

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
from .estimate import AttentionMemory, estimate_attention_memory, estimate_kv_cache_bytes
from .profiler import MemoryProfiler

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
