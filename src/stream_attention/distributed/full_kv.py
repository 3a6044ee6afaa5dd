"""What a rank computes that has all the keys: some rows, or some heads, of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.problem import Wanted
from .autograd import Tensors
from .shard import Run
from .shard_attention import Attention, RowGradients, Rows, Saved, State, sink_gradient


def full_kv_forward(
    attention: Attention, rows: Rows, key: Tensor, value: Tensor, k_runs: Sequence[Run]
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the rows, out in the query's dtype."""
    state = State(rows.query, value.shape[-1])
    attention.forward(state, rows, key, value, k_runs)
    return state.finish(rows.sink, rows.query.dtype, rows.runs)


def full_kv_backward(
    attention: Attention, rows: Rows, key: Tensor, value: Tensor, k_runs: Sequence[Run], saved: Saved, tensors: Tensors
) -> tuple[Any, ...]:
    """fp32 gradients of query, key, value, mask, bias, alibi_slopes, sink and seed, of those `tensors` that want one.

    Those of key and value always: other ranks may want them.
    """
    query, _, _, _, bias, slopes, sink, _ = tensors
    query_wanted, *others = (t is not None and t.requires_grad for t in (query, bias, slopes))
    grads = RowGradients(rows, Wanted(query_wanted, True, True, *others))
    dk, dv = (torch.zeros_like(t, dtype=saved.lse.dtype) for t in (key, value))
    attention.backward(grads, saved, rows, key, value, dk, dv, k_runs)
    return grads.query, dk, dv, None, grads.bias, grads.alibi_slopes, sink_gradient(sink, saved), None
