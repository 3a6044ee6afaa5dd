"""Making KV caches smaller: `create_kv_compressor(method)` with one file per method, and `quantize_kv`."""

from .chunk import ChunkBasedCompressor
from .compressor import CompressionStats, KVCompressor, create_kv_compressor
from .hybrid import HybridCompressor
from .importance import ImportanceBasedCompressor
from .key_norm import KeyNormCompressor
from .quantize import QuantizedTensor, quantize_kv
from .quantized import QuantizedCompressor
from .snap import SnapCompressor
from .streaming import StreamingCompressor

__all__ = [
    "ChunkBasedCompressor",
    "CompressionStats",
    "HybridCompressor",
    "ImportanceBasedCompressor",
    "KVCompressor",
    "KeyNormCompressor",
    "QuantizedCompressor",
    "QuantizedTensor",
    "SnapCompressor",
    "StreamingCompressor",
    "create_kv_compressor",
    "quantize_kv",
]
