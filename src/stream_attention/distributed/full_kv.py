"""What a rank computes that has all the keys: some rows, or some heads, of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.state import Saved
from .autograd import Tensors
from .shard import Run
from .shard_attention import Attention, RowGradients, Rows, State


def full_kv_forward(
    attention: Attention, rows: Rows, key: Tensor, value: Tensor, k_runs: Sequence[Run]
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the rows, out in the query's dtype."""
    state = State(rows.query, value.shape[-1])
    attention.forward(state, rows, key, value, k_runs)
    return state.finish(rows.sink, rows.query.dtype, rows.runs)


def full_kv_backward(
    attention: Attention, rows: Rows, key: Tensor, value: Tensor, k_runs: Sequence[Run], saved: Saved, tensors: Tensors
) -> Tensors:
    """fp32 gradients of query, key, value, mask, bias, alibi_slopes, sink and seed, of those `tensors` that want one.

    Those of key and value always: other ranks may want them.
    """
    grads = RowGradients(rows, saved, tensors)
    dk, dv = (torch.zeros_like(t, dtype=saved.lse.dtype) for t in (key, value))
    attention.backward(grads, key, value, dk, dv, k_runs)
    return grads.with_keys(dk, dv)
