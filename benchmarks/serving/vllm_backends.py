"""Backends that take the place of vLLM's own on a CPU: ours, and one that is deliberately wrong.

On a CPU vLLM ignores every name but CPU_ATTN, so these have its name, and `register_backend` overrides it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stream_attention.serving.vllm import Step, StreamAttentionBackend, StreamAttentionImpl

COUNTS = {"calls": 0, "mixed": 0, "most_requests": 0}
"""Calls of `forward`, those with prompts and single tokens together, and the most requests of one."""


class CountingImpl(StreamAttentionImpl):
    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        if attn_metadata is not None:
            queries = attn_metadata.query_start_loc.diff()
            COUNTS["calls"] += 1
            COUNTS["mixed"] += int((queries == 1).any() and (queries > 1).any())
            COUNTS["most_requests"] = max(COUNTS["most_requests"], len(queries))
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **options)


class WrongImpl(CountingImpl):
    """Queries read the keys and values of other heads."""

    def forward(self, layer: Any, query: Tensor, *rest: Any, **options: Any) -> Tensor:
        return super().forward(layer, query.flip(1), *rest, **options)


class OnCpu(StreamAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[StreamAttentionImpl]:
        return CountingImpl


class Wrong(OnCpu):
    @staticmethod
    def get_impl_cls() -> type[StreamAttentionImpl]:
        return WrongImpl
