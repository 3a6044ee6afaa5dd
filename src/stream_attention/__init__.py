"""StreamAttention: exact attention for PyTorch in one streaming pass over K/V, O(N) memory, forward and backward."""

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
from .ops.attention import attention
from .ops.explain import explain
from .ops.merge import merge_states
from .ops.varlen import varlen_attention
from .plan import Plan, force_backend

__version__ = "0.1.0"

__all__ = [
    "FlashAttentionV3",
    "FusedOnlineAttention",
    "Plan",
    "StreamAttention",
    "StreamAttentionConfig",
    "StreamMultiheadAttention",
    "UnsupportedProblem",
    "attention",
    "create_fused_online_attention",
    "create_stream_attention",
    "explain",
    "force_backend",
    "merge_states",
    "varlen_attention",
]
