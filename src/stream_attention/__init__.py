"""StreamAttention: exact attention for PyTorch in one streaming pass over K/V, O(N) memory, forward and backward."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from .cache_views import ContiguousKV, PagedKV, QuantizedKV, Rotary
from .core import (
    FlashAttentionV3,
    FusedOnlineAttention,
    StreamAttention,
    StreamAttentionConfig,
    StreamMultiheadAttention,
    create_fused_online_attention,
    create_stream_attention,
)
from .errors import UnsupportedProblem
from .kvcache import create_kv_compressor, quantize_kv
from .ops.attention import attention
from .ops.decode import decode_attention, decode_workspace, explain_decode
from .ops.explain import explain
from .ops.mass import attention_mass
from .ops.merge import merge_states
from .ops.varlen import varlen_attention
from .plan import Plan, force_backend

if TYPE_CHECKING:
    from .core.ring_attention import RingAttention
    from .core.star_attention import StarAttention
    from .distributed import ring_attention

__version__ = "0.1.0"

__all__ = [
    "ContiguousKV",
    "FlashAttentionV3",
    "FusedOnlineAttention",
    "PagedKV",
    "Plan",
    "QuantizedKV",
    "RingAttention",
    "Rotary",
    "StarAttention",
    "StreamAttention",
    "StreamAttentionConfig",
    "StreamMultiheadAttention",
    "UnsupportedProblem",
    "attention",
    "attention_mass",
    "create_fused_online_attention",
    "create_kv_compressor",
    "create_stream_attention",
    "decode_attention",
    "decode_workspace",
    "explain",
    "explain_decode",
    "force_backend",
    "merge_states",
    "quantize_kv",
    "ring_attention",
    "varlen_attention",
]

_ELSEWHERE = {
    "RingAttention": "core.ring_attention",
    "StarAttention": "core.star_attention",
    "ring_attention": "distributed",
}
"""Names that are imported when they are asked for: torch may have been built without torch.distributed."""

_LATER = {
    "gradient_checkpoint_sequential": "torch.utils.checkpoint.checkpoint_sequential is torch's own",
    "MemoryProfiler": "torch.cuda.memory_stats() is torch's own",
}
"""Names that the documentation of earlier systems has, and what to know until they are here."""

if not TYPE_CHECKING:  # to a type checker they do not exist

    def __getattr__(name: str) -> object:
        if name in _ELSEWHERE:
            return getattr(import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # An AttributeError, or hasattr would raise. But `from stream_attention import name` hides its message, so the
        # import machinery, whose frame asks, gets the ImportError that it would make of it.
        importing = sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
        error = ImportError if importing else AttributeError
        raise error(f"stream_attention.{name} is not in version {__version__} yet ({_LATER[name]})")
