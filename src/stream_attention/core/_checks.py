"""Checks that several modules share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from ..dispatch.validate import is_tensor
from .config import StreamAttentionConfig


def copied_config(config: Any, expected: str = "a StreamAttentionConfig") -> StreamAttentionConfig:
    if not isinstance(config, StreamAttentionConfig):
        refuse("config", expected, type(config).__name__, error=TypeError)
    return dataclasses.replace(config)


def checked_config(config: Any, name: str, allowed: str) -> StreamAttentionConfig:
    """A copy of the config of a module over ranks called `name`, which the field `allowed` switches off."""
    config = copied_config(config)
    if not getattr(config, allowed):
        refuse(allowed, f"True for {name}", False, "StreamAttention needs no other ranks.")
    if not config.enable_flash_attention:
        refuse("enable_flash_attention", f"True for {name}", False, "Dense attention has no states to merge.")
    return config


def check_heads(num_heads: int, head_dim: int, query: Tensor, key: Tensor) -> None:
    """Refuse queries of another size, and KV heads that do not divide theirs."""
    check_four_dims(query=query, key=key)
    if query.shape[2:] != (num_heads, head_dim):
        refuse("query", f"[B, Tq, num_heads={num_heads}, head_dim={head_dim}]", list(query.shape))
    if key.shape[2] < 1 or num_heads % key.shape[2]:
        refuse("key", f"heads that divide num_heads={num_heads}", list(key.shape))


def check_four_dims(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        is_tensor(name, tensor)
        if tensor.dim() != 4:
            refuse(name, "four dims [B, T, H, D]", list(tensor.shape))


def check_length(config: StreamAttentionConfig, keys: int, where: str = " on all ranks, the cache included") -> None:
    if keys > config.max_sequence_length:
        limit = f"at most max_sequence_length={config.max_sequence_length} keys{where}"
        refuse("key", limit, keys, "Raise it in the StreamAttentionConfig.")


def appended(name: str, past: Any, new: Sequence[Tensor], hint: str) -> list[Tensor]:
    """The keys and values of a cache, followed by the new ones; only their lengths may differ."""
    sides = past if isinstance(past, (list, tuple)) else (past,)
    if len(sides) != 2 or not all(isinstance(side, Tensor) for side in sides):
        found = ", ".join(type(side).__name__ for side in sides)
        refuse(name, "(key, value), two tensors [B, T, Hkv, D]", found, hint, TypeError)
    for side, old, rows in zip(("key", "value"), sides, new, strict=True):
        ours, theirs = ((t.dtype, t.device, t.shape[:1], t.shape[2:]) for t in (rows, old))
        if ours != theirs:
            batch, _, *rest = rows.shape
            expected = f"[{batch}, T, {', '.join(map(str, rest))}] in {rows.dtype} on {rows.device}"
            refuse(f"{name} ({side})", expected, f"{list(old.shape)} in {old.dtype} on {old.device}")
    return [torch.cat(pair, 1) for pair in zip(sides, new, strict=True)]


def check_counts(**counts: int) -> None:
    """Refuse sizes and repetitions that are not ints of at least 1."""
    for name, count in counts.items():
        check_int(name, count, 1)
