"""StreamAttention: exact attention for PyTorch in one streaming pass over K/V, O(N) memory, forward and backward."""

from importlib import import_module
from typing import TYPE_CHECKING

from .base.errors import UnsupportedProblem
from .base.kv_layouts import ContiguousKV, Fp8KV, PagedKV, QuantizedKV, Rotary
from .core import (
    FusedOnlineAttention,
    StreamAttention,
    StreamAttentionConfig,
    StreamMultiheadAttention,
    create_fused_online_attention,
    create_stream_attention,
)
from .dispatch.plan import Plan, force_backend
from .kvcache import create_kv_compressor, quantize_kv
from .moved import install as _find_old_names
from .ops import append as _append  # noqa: F401  # caches append by its kernel
from .ops.attention import attention
from .ops.decode import decode_attention, decode_workspace, explain_decode
from .ops.explain import explain
from .ops.fp8 import attention_fp8, explain_fp8, quantize_fp8
from .ops.mass import attention_mass
from .ops.merge import merge_states
from .ops.paged import explain_paged, paged_attention, paged_plan
from .ops.varlen import varlen_attention
from .ops.write_kv import write_kv
from .utils.checkpoint import gradient_checkpoint_sequential

if TYPE_CHECKING:
    from . import masks as masks
    from .core import FlashAttentionV3
    from .core.ring_attention import RingAttention
    from .core.star_attention import StarAttention
    from .distributed import ring_attention
    from .utils.memory import MemoryProfiler

__version__ = "0.1.0"

_find_old_names()

__all__ = [
    "ContiguousKV",
    "FlashAttentionV3",
    "Fp8KV",
    "FusedOnlineAttention",
    "MemoryProfiler",
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
    "attention_fp8",
    "attention_mass",
    "create_fused_online_attention",
    "create_kv_compressor",
    "create_stream_attention",
    "decode_attention",
    "decode_workspace",
    "explain",
    "explain_decode",
    "explain_fp8",
    "explain_paged",
    "force_backend",
    "gradient_checkpoint_sequential",
    "merge_states",
    "paged_attention",
    "paged_plan",
    "quantize_fp8",
    "quantize_kv",
    "ring_attention",
    "varlen_attention",
    "write_kv",
]

_ELSEWHERE = {
    "FlashAttentionV3": "core",
    "MemoryProfiler": "utils.memory",
    "RingAttention": "core.ring_attention",
    "StarAttention": "core.star_attention",
    "ring_attention": "distributed",
}
"""Names that are imported when they are asked for: baseline and profiler are instruments, and torch may have been built
without torch.distributed."""

if not TYPE_CHECKING:  # to a type checker they do not exist

    def __getattr__(name: str) -> object:
        if name == "masks":  # a package, which is imported when it is asked for
            return import_module(f"{__name__}.masks")
        if name in _ELSEWHERE:
            return getattr(import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
