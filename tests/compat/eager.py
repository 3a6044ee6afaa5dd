"""Attention written out in plain torch, which the drop-in functions are compared with in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from stream_attention.base.kv_layouts.write import Rotary


def visible(q_len: int, k_len: int, causal: bool = False, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """FlashAttention's mask, bool [Tq, Tk]: the last query stands at the last key."""
    position = torch.arange(q_len).unsqueeze(1) + k_len - q_len
    ahead = torch.arange(k_len) - position
    left, right = window
    seen = torch.ones(q_len, k_len, dtype=torch.bool)
    if causal:
        seen &= ahead <= 0
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, Tq, Hq, Dv], lse [B, Hq, Tq]) of q [B, Tq, Hq, D] and k, v [B, Tk, Hkv, D]."""
    groups = q.shape[2] // k.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        q_len, k_len = scores.shape[-2:]
        distance = (torch.arange(q_len).unsqueeze(1) + k_len - q_len - torch.arange(k_len)).abs()
        scores = scores - slopes.reshape(-1, q.shape[2], 1, 1) * distance
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    blind = (scores == -torch.inf).all(-1)  # their softmax, and its gradient, would be NaN
    scores = scores.masked_fill(blind.unsqueeze(-1), 0.0)
    weights = scores.softmax(-1).masked_fill(blind.unsqueeze(-1), 0.0)
    return (weights @ value).transpose(1, 2), scores.logsumexp(-1).masked_fill(blind, -torch.inf)


def rotated(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """x [B, n, H, D] rotated by complex numbers: another way than the library's."""
    if not x.numel():
        return x
    pairs = rotary.cos.shape[1]
    factor = torch.complex(rotary.cos, rotary.sin)[positions].unsqueeze(2)
    head, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    paired = head.unflatten(-1, (pairs, 2)) if rotary.interleaved else head.unflatten(-1, (2, pairs)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(paired.contiguous()) * factor)
    return torch.cat([(turned if rotary.interleaved else turned.transpose(-1, -2)).flatten(-2), rest], -1)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
