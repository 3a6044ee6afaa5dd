"""KV caches to decode from: how a tile of one is read, and how tokens are appended.

Imports torch alone. Constructors check metadata and read no tensor, which may be a synchronisation. `validate` reads
lengths and page tables: on a CPU at every use, elsewhere on request.
"""

from .fp8 import Fp8KV
from .plain import ContiguousKV, PagedKV
from .quantized import QuantizedKV
from .write import Rotary

KVCache = ContiguousKV | PagedKV | QuantizedKV

__all__ = ["ContiguousKV", "Fp8KV", "KVCache", "PagedKV", "QuantizedKV", "Rotary"]
