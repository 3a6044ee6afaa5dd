"""The bounds of a mask as tensors, its band included: keys per query, and queries per key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .mask import Mask


def keys_per_query(mask: Mask, q_len: int, k_len: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """What band and keys per query allow: start and end, int32 `[B or 1, H or 1, Tq]` in [0, Tk]; they may be empty."""
    position = _count(q_len, device or mask.device) + (k_len - q_len)
    start, end = torch.zeros_like(position), torch.full_like(position, k_len)
    if mask.left is not None:
        start = (position - mask.left).clamp(0, k_len)
    if mask.right is not None:
        end = (position + mask.right + 1).clamp(0, k_len)
    return _narrowed(start, mask.key_start, end, mask.key_end, k_len)


def queries_per_key(mask: Mask, q_len: int, k_len: int) -> tuple[Tensor, Tensor]:
    """What band and queries per key allow, without labels: start and end, int32 `[B or 1, H or 1, Tk]` in [0, Tq]."""
    index = _count(k_len, mask.device) - (k_len - q_len)  # of the query at the key's own position
    start, end = torch.zeros_like(index), torch.full_like(index, q_len)
    if mask.right is not None:
        start = (index - mask.right).clamp(0, q_len)
    if mask.left is not None:
        end = (index + mask.left + 1).clamp(0, q_len)
    return _narrowed(start, mask.query_start, end, mask.query_end, q_len)


def _count(length: int, device: torch.device | None) -> Tensor:
    return torch.arange(length, dtype=torch.int64, device=device)[None, None]  # sides of a band may be any int


def _narrowed(
    start: Tensor, given_start: Tensor | None, end: Tensor, given_end: Tensor | None, most: int
) -> tuple[Tensor, Tensor]:
    start, end = start.to(torch.int32), end.to(torch.int32)
    if given_start is not None:
        start = torch.maximum(start, given_start.clamp(0, most))
    if given_end is not None:
        end = torch.minimum(end, given_end.clamp(0, most))
    return torch.broadcast_tensors(start, end)
