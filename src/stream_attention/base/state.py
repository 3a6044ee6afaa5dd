"""The algebra of attention states.

A state is `(out, lse)`: `out` is the softmax-weighted mean of the values seen so far, `lse` the log of the sum of their
exponentiated scores (natural log). Two states over disjoint keys merge into the state over their union:

    lse = log(exp(lse_a) + exp(lse_b))
    out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

Merging is associative and commutative, and the empty state `(0, -inf)` is its identity, so split-KV, rings, sinks and
shared prefixes all fold with this one rule, in any order. Partial `out` is fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EMPTY = float("-inf")
"""LSE of a state that has seen no key."""


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge states: outs `[B, T, H, Dv]` with lses `[B, H, T]` (packed: `[N, H, Dv]` with `[H, N]`).

    Computed in the dtype of the LSEs and returned in the dtype of the first `out`. Differentiable; the `out` of an
    empty state is not looked at, whatever it holds.
    """
    stacked = torch.stack(tuple(lses))
    lse = logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.where(lse == EMPTY, torch.zeros_like(lse), lse))
    total = torch.zeros_like(outs[0], dtype=stacked.dtype)
    for out, weight, empty in zip(outs, weights, stacked == EMPTY, strict=True):
        total = total + per_row(weight) * out.to(stacked.dtype).masked_fill(per_row(empty), 0.0)  # 0 * NaN is NaN
    return total.to(outs[0].dtype), lse


def logsumexp(x: Tensor, dim: int) -> Tensor:
    """`torch.logsumexp` with gradient 0 instead of NaN where everything is -inf."""
    peak = x.detach().amax(dim, keepdim=True)
    peak = torch.where(peak == EMPTY, torch.zeros_like(peak), peak)
    total = torch.exp(x - peak).sum(dim)
    seen = total != 0
    log_total = torch.log(torch.where(seen, total, torch.ones_like(total)))
    return torch.where(seen, log_total + peak.squeeze(dim), torch.full_like(total, EMPTY))


def per_row(x: Tensor) -> Tensor:
    """Lay `[B, H, T]` (packed: `[H, N]`) along an output: `[B, T, H, 1]` (`[N, H, 1]`)."""
    return x.transpose(-1, -2).unsqueeze(-1)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a sink `[H]` into a state: one more logit in the denominator, with no value behind it."""
    logit = sink.to(lse.dtype).view(-1, 1)
    total = logsumexp(torch.stack((lse, logit.expand_as(lse))), dim=0)
    weight = torch.exp(lse - torch.where(total == EMPTY, torch.zeros_like(total), total))
    return (out.to(lse.dtype) * per_row(weight)).to(out.dtype), total


class Saved(NamedTuple):
    """What a backward reads: the state of all keys, in the dtypes of the call's results, and its gradients."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    @property
    def delta(self) -> Tensor:
        """rowsum(dO * O) - dLSE, `[B, H, T]`."""
        delta = (self.grad_out.to(self.lse.dtype) * self.out).sum(-1).transpose(1, 2)
        return delta if self.grad_lse is None else delta - self.grad_lse

    def sink_gradient(self, sink: Tensor) -> Tensor:
        """The sink takes exp(sink - lse) of each row and gives no value: its gradient is -sum of that times delta."""
        share = torch.exp(sink.to(self.lse.dtype).view(-1, 1) - self.lse)
        return -torch.where(self.lse == EMPTY, 0.0, share * self.delta).sum((0, 2))
