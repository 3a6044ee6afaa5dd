"""torch's `scaled_dot_product_attention`, in its layout `[B, H, T, D]` and with its causal mask, aligned top-left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..dispatch.validate import is_tensor
from ..ops.attention import attention

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by `attention`, differentiable, the mask too.

    Args:
        query: `[..., Hq, Tq, D]`; key: `[..., Hkv, Tk, D]`; value: `[..., Hkv, Tk, Dv]`, with leading dims that
            broadcast; also `[Tq, D]` and the like.
        attn_mask: broadcastable to `[..., Hq, Tq, Tk]`: boolean, True = attend, or floating, added to the scores, in
            the query's dtype or fp32. Or a `torch.nn.attention.bias.CausalBias`, of which nothing is materialised.
        is_causal: query i sees keys j <= i, whatever the lengths (top-left; `attention` aligns bottom-right).
        enable_gqa: Hq may be a multiple of Hkv.

    Returns:
        `[..., Hq, Tq, Dv]`; a row that sees no key is 0.

    Raises:
        RuntimeError: a bad argument, as in torch; TypeError: no tensor; ValueError: a `CausalBias` and `is_causal`.

    >>> import torch
    >>> from stream_attention.compat.sdpa import scaled_dot_product_attention
    >>> query, key = torch.randn(2, 8, 10, 64), torch.randn(2, 8, 30, 64)
    >>> ours = scaled_dot_product_attention(query, key, key, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-6)
    True
    """
    is_tensor("query", query)
    is_tensor("key", key)
    is_tensor("value", value)
    if not query.dim() == key.dim() == value.dim() == 4:
        return _in_four_dims((query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa)
    batch, heads, q_len, _ = query.shape
    k_batch, kv_heads, k_len, _ = key.shape
    v_batch, v_heads, _, _ = value.shape
    if not batch == k_batch == v_batch or kv_heads != v_heads or (heads != kv_heads and not enable_gqa):
        query, key, value = _broadcast(query, key, value, 1 if enable_gqa else 2)
    mask = bias = window = None
    keys = k_len
    if attn_mask is not None:
        is_tensor("attn_mask", attn_mask)
        if type(attn_mask).__name__ == "CausalBias":  # torch imports its compiler with that class: 3 s
            is_causal, window, keys = _aligned(attn_mask, q_len, k_len, is_causal)
        elif is_causal:
            refuse("attn_mask", "None where is_causal is set", "a tensor", error=RuntimeError)
        elif attn_mask.dtype is torch.bool:
            mask = attn_mask
        elif attn_mask.dtype is query.dtype or attn_mask.dtype is torch.float32:
            bias = attn_mask
        else:
            refuse("attn_mask", f"dtype bool, float32 or {query.dtype}", attn_mask.dtype, error=RuntimeError)
    elif is_causal:
        is_causal, window, keys = top_left(q_len, k_len)
    if keys != k_len:
        key, value = key[:, :, :keys], value[:, :, :keys]
    try:
        out: Tensor = attention(
            (query if query.stride(-1) == 1 else query.contiguous()).transpose(1, 2),
            (key if key.stride(-1) == 1 else key.contiguous()).transpose(1, 2),
            (value if value.stride(-1) == 1 else value.contiguous()).transpose(1, 2),
            causal=is_causal,
            window=window,
            mask=mask,
            bias=bias,
            scale=scale,
            dropout_p=dropout_p,
        )
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"scaled_dot_product_attention, of tensors as [B, T, H, D]: {error}") from error
    return out.transpose(1, 2)


def top_left(q_len: int, k_len: int) -> tuple[bool, tuple[int, int] | None, int]:
    """What makes query i see the keys j <= i in an op that aligns bottom-right: `causal`, `window`, and how many keys.

    Keys behind the last query are seen by none. With fewer keys than queries, the window's right side is their
    difference.

    >>> top_left(3, 3), top_left(3, 5), top_left(5, 3)
    ((True, None, 3), (True, None, 3), (False, (-1, 2), 3))
    """
    if q_len <= k_len:
        return True, None, q_len
    return False, (-1, q_len - k_len), k_len


def _aligned(bias: Any, q_len: int, k_len: int, is_causal: bool) -> tuple[bool, tuple[int, int] | None, int]:
    """`top_left` of a `CausalBias` that is, or causal as `attention` aligns it."""
    if is_causal:
        hint = "CausalBias should not be used with causal=True."
        refuse("attn_mask", "None where is_causal is set", "a CausalBias", hint)
    sizes = bias.seq_len_q, bias.seq_len_kv
    if sizes != (q_len, k_len):
        refuse("attn_mask", f"a CausalBias of {q_len} queries and {k_len} keys", sizes, error=RuntimeError)
    return top_left(q_len, k_len) if bias.variant.name == "UPPER_LEFT" else (True, None, k_len)


def _in_four_dims(
    tensors: tuple[Tensor, ...],
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The call with missing dims in front, or with leading dims flattened into one."""
    least, dims = min(x.dim() for x in tensors), max(x.dim() for x in tensors)
    if least < 2:
        refuse("query, key and value", "at least 2 dims of each", [x.dim() for x in tensors], error=RuntimeError)
    query, key, value = (x[(None,) * (max(dims, 4) - x.dim())] for x in tensors)
    lead = torch.broadcast_shapes(*[x.shape[:-3] for x in (query, key, value)])
    if dims > 4:
        query, key, value = (x.expand(*lead, *x.shape[-3:]).flatten(0, -4) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    out = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return out.unflatten(0, lead) if dims > 4 else out[(0,) * (4 - dims)]


def _broadcast(query: Tensor, key: Tensor, value: Tensor, dims: int) -> tuple[Tensor, ...]:
    """The tensors with their first dims, batch and perhaps heads, expanded to one shape."""
    leads = [x.shape[:dims] for x in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*leads)
    except RuntimeError:
        hint = "Pass enable_gqa=True where query heads share those of keys." if dims == 2 else ""
        got = " and ".join(str(list(one)) for one in leads)
        refuse("query, key and value", "first dims that broadcast", got, hint, RuntimeError)
    return tuple(x.expand(*lead, *x.shape[dims:]) for x in (query, key, value))
