"""`attention` of jagged nested tensors: a pack, computed by `varlen_attention` where it lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dispatch import validate
from .varlen import varlen_attention


def nested_attention(tensors: dict[str, Any], options: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Of query `[B, j, Hq, D]` and key and value `[B, k, Hkv, D]`, j and k ragged: `[B, j, Hq, Dv]` with the offsets of
    the query, and with `return_lse` the LSE `[B, Hq, j]`."""
    query, key, value, mask, bias = (tensors.pop(name) for name in ("query", "key", "value", "mask", "bias"))
    (q_rows, k_rows, v_rows), packing = packed(query, key, value, mask, bias)
    result = varlen_attention(q_rows, k_rows, v_rows, **packing, **tensors, **options)
    if isinstance(result, Tensor):
        return _like(query, result, 1)
    out, lse = result
    return _like(query, out, 1), _like(query, lse, 2)


def packed(
    query: Any, key: Any, value: Any, mask: Tensor | None, bias: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """The rows of nested tensors and the arguments of `varlen_attention` that describe them."""
    validate.nested_tensors(query, key, value, mask, bias)
    packing = {
        "cu_seqlens_q": query.offsets(),
        "cu_seqlens_k": key.offsets(),
        "max_seqlen_q": query._get_max_seqlen(),  # read once, and kept with the offsets
        "max_seqlen_k": key._get_max_seqlen(),
    }
    return (query.values(), key.values(), value.values()), packing


def _like(query: Any, rows: Tensor, jagged_dim: int) -> Tensor:
    """Results of packed rows, nested as the query is."""
    return torch.nested.nested_tensor_from_jagged(
        rows, query.offsets(), jagged_dim=jagged_dim, max_seqlen=query._get_max_seqlen()
    )
