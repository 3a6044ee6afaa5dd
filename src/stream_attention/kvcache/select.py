"""From scores to positions, and from positions to a smaller cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..dispatch.validate import real
from .compression_spec import CompressionSpec

Heads = str | Sequence[float]
"""How a row's budget is shared out: "each", "same", "adaptive", or one weight per KV head."""

SAFE_SHARE = 0.2
"""The part of an even budget that "adaptive" leaves to every head, whatever the others score."""


def everything(keys: Tensor) -> Tensor:
    """The positions of a cache of which all tokens are kept."""
    batch, length, heads, _ = keys.shape
    return torch.arange(length, device=keys.device).expand(batch, heads, length)


def gather(x: Tensor, positions: Tensor) -> Tensor:
    """Tokens of x `[B, T, Hkv, D]` at positions `[B, Hkv, kept]`; 0 where a position is -1."""
    index = positions.transpose(1, 2).unsqueeze(-1)  # [B, kept, Hkv, 1]
    if x.shape[1] == 0:
        return x
    taken = x.gather(1, index.clamp_min(0).expand(*index.shape[:3], x.shape[-1]))
    return taken.masked_fill(index < 0, 0.0)


def checked_heads(heads: Any) -> Heads:
    """A valid `heads` argument."""
    if heads in ("each", "same", "adaptive"):
        return str(heads)
    if isinstance(heads, str) or not isinstance(heads, Sequence) or not heads:
        refuse("heads", '"each", "same", "adaptive" or one weight per KV head', repr(heads))
    for weight in heads:
        real("heads", weight)
        if weight <= 0:
            refuse("heads", "weights above 0", list(heads))
    return tuple(heads)


def best(scores: Tensor, spec: CompressionSpec, heads: Heads) -> Tensor:
    """Positions of the highest scores `[B, Hkv, T]` among real tokens; of equal ones the earlier.

    Every row keeps its budget per head: "each" head its own choice, or all the "same" one, that of the scores summed.
    "adaptive" spends a row's budget of all heads on its highest scores, wherever they are, but leaves each head
    `SAFE_SHARE` of an even part; weights divide it in their proportion.
    """
    batch, kv_heads, length = scores.shape
    budgets = spec.budgets()
    if not isinstance(heads, str) and len(heads) != kv_heads:
        refuse("heads", f"one weight for each of the {kv_heads} KV heads", list(heads))
    if heads == "same":
        scores = scores.sum(1, keepdim=True).expand(batch, kv_heads, length)
    scores = comparable(scores, spec.is_real)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if heads == "adaptive":
        return in_order(order, _adaptive_counts(scores, order, budgets))
    weights = [1.0] * kv_heads if isinstance(heads, str) else list(heads)
    shares = [weight * kv_heads / sum(weights) for weight in weights]
    table = [
        [min(n, max(1, int(budget * share + 1e-6))) for share in shares]
        for n, budget in zip(spec.lengths, budgets, strict=True)
    ]
    counts = torch.tensor(table, dtype=torch.int64, device=scores.device).view(batch, kv_heads)
    return in_order(order, counts, max(map(max, table), default=0))


def comparable(scores: Tensor, tokens: Tensor) -> Tensor:
    """Scores `[B, Hkv, T]` that are -inf for padding and for nothing else, and finite for `tokens` `[B, T]`."""
    finite = scores.nan_to_num(nan=torch.finfo(scores.dtype).min)  # infinities become the largest finite values
    return finite.masked_fill(~tokens.unsqueeze(1), -torch.inf)


def in_order(order: Tensor, counts: Tensor, kept: int | None = None) -> Tensor:
    """The first counts `[B, Hkv]` of each order `[B, Hkv, T]`, rising, padded with -1 to `kept`, the largest count."""
    if kept is None:
        kept = int(counts.max()) if counts.numel() else 0
    length = order.shape[-1]
    chosen = torch.arange(kept, device=order.device) < counts.unsqueeze(-1)
    positions = torch.where(chosen, order[..., :kept], length).sort(-1).values
    return positions.masked_fill(positions == length, -1)


def _adaptive_counts(scores: Tensor, order: Tensor, budgets: list[int]) -> Tensor:
    batch, kv_heads, length = scores.shape
    ranks = torch.arange(length, device=scores.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, ranks)  # of each token within its head
    budget = torch.tensor(budgets, device=scores.device).view(-1, 1, 1)
    safe = (budget * SAFE_SHARE).floor().clamp_min(1.0).minimum(budget)
    flat = scores.masked_fill(rank < safe, torch.inf).flatten(1)
    best_of_row = flat.argsort(dim=-1, descending=True, stable=True)
    taken = torch.arange(flat.shape[1], device=scores.device) < budget.flatten(1) * kv_heads
    counts = torch.zeros_like(flat, dtype=torch.int64).scatter_(1, best_of_row, taken.long())
    return counts.view(batch, kv_heads, length).sum(-1)
