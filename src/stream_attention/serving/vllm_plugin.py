"""What vLLM calls in each of its processes (entry point `stream_attention` of the group `vllm.general_plugins`)."""

from __future__ import annotations

NAME = "STREAM_ATTENTION"
"""What users pass as `--attention-backend`."""

BACKEND = "stream_attention.serving.vllm.StreamAttentionBackend"
"""Where vLLM finds it. It is imported when a model is loaded with that name, not before."""


def register() -> None:
    """Make our attention known to vLLM, in this process; again does nothing."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
