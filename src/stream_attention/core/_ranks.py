"""What the modules over several ranks share."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from ..errors import refuse
from .config import StreamAttentionConfig


def checked_config(config: Any, name: str, allowed: str) -> StreamAttentionConfig:
    """A copy of the config of a module called `name`, which the field `allowed` switches off."""
    if not isinstance(config, StreamAttentionConfig):
        refuse("config", "a StreamAttentionConfig", type(config).__name__, error=TypeError)
    if not getattr(config, allowed):
        refuse(allowed, f"True for {name}", False, "StreamAttention needs no other ranks.")
    if not config.enable_flash_attention:
        refuse("enable_flash_attention", f"True for {name}", False, "Dense attention has no states to merge.")
    return dataclasses.replace(config)


def check_heads(config: StreamAttentionConfig, query: Any, key: Any) -> None:
    """Refuse queries that are not those of the config, and KV heads that do not divide them."""
    for name, tensor in (("query", query), ("key", key)):
        if not isinstance(tensor, Tensor):
            refuse(name, "a torch.Tensor", type(tensor).__name__, error=TypeError)
        if tensor.dim() != 4:
            refuse(name, "four dims [B, T, H, D]", list(tensor.shape))
    heads, dim = config.num_heads, config.head_dim
    if query.shape[2:] != (heads, dim):
        refuse("query", f"[B, Tq, num_heads={heads}, head_dim={dim}]", list(query.shape))
    if key.shape[2] < 1 or heads % key.shape[2]:
        refuse("key", f"heads that divide num_heads={heads}", list(key.shape))


def check_length(config: StreamAttentionConfig, keys: int) -> None:
    if keys > config.max_sequence_length:
        limit = f"at most max_sequence_length={config.max_sequence_length} keys on all ranks, the cache included"
        refuse("key", limit, keys, "Raise it in the StreamAttentionConfig.")
