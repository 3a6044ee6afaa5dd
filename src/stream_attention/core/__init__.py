"""The nn.Modules, under the names users know. Those over several ranks, and the baseline, which is an instrument, are
imported when they are asked for."""

from typing import TYPE_CHECKING, Any

from .attention import StreamAttention, build_stream_attention, create_stream_attention
from .config import StreamAttentionConfig
from .fused_online_attention import FusedOnlineAttention, create_fused_online_attention
from .multihead_attention import StreamMultiheadAttention

if TYPE_CHECKING:
    from stream_attention_tools.baseline import FlashAttentionV3

    from .ring_attention import RingAttention, create_ring_attention
    from .star_attention import StarAttention, create_star_attention

__all__ = [
    "FlashAttentionV3",
    "FusedOnlineAttention",
    "RingAttention",
    "StarAttention",
    "StreamAttention",
    "StreamAttentionConfig",
    "StreamMultiheadAttention",
    "build_stream_attention",
    "create_fused_online_attention",
    "create_ring_attention",
    "create_star_attention",
    "create_stream_attention",
]

_LAZY = {
    "FlashAttentionV3": "flashattention_v3",
    "RingAttention": "ring_attention",
    "create_ring_attention": "ring_attention",
    "StarAttention": "star_attention",
    "create_star_attention": "star_attention",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
