"""The nn.Modules, under the names users know."""

from .attention import StreamAttention, build_stream_attention, create_stream_attention
from .config import StreamAttentionConfig
from .flashattention_v3 import FlashAttentionV3
from .fused_online_attention import FusedOnlineAttention, create_fused_online_attention
from .multihead_attention import StreamMultiheadAttention

__all__ = [
    "FlashAttentionV3",
    "FusedOnlineAttention",
    "StreamAttention",
    "StreamAttentionConfig",
    "StreamMultiheadAttention",
    "build_stream_attention",
    "create_fused_online_attention",
    "create_stream_attention",
]
