"""Caches to decode from: what holds the keys and values of earlier tokens, how a tile of it is read, how it grows.

Imports torch alone. What a cache is made of is checked without reading a tensor, which may be a synchronisation.
Lengths and page tables are read by `validate`: on a CPU at every use, elsewhere if asked.
"""

from .fp8 import Fp8KV
from .plain import ContiguousKV, PagedKV
from .quantized import QuantizedKV
from .write import Rotary

KVCache = ContiguousKV | PagedKV | QuantizedKV

__all__ = ["ContiguousKV", "Fp8KV", "KVCache", "PagedKV", "QuantizedKV", "Rotary"]
