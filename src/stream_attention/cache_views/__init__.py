"""Caches to decode from: what holds the keys and values of earlier tokens, how a tile of it is read, how it grows.

Imports torch alone. What is checked here is checked without reading a tensor, which would be a synchronisation;
`validate` reads.
"""

from .fp8 import Fp8KV
from .plain import ContiguousKV, PagedKV
from .quantized import QuantizedKV
from .write import Rotary

KVCache = ContiguousKV | PagedKV | QuantizedKV

__all__ = ["ContiguousKV", "Fp8KV", "KVCache", "PagedKV", "QuantizedKV", "Rotary"]
