"""xformers' `memory_efficient_attention` and its bias classes, of xformers 0.0.33 and 0.0.34.

They run where `attention` does, so on a CPU too. Dropout has the same meaning, not the same pattern.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..ops.attention import attention
from ..ops.merge import merge_states
from ..ops.paged import paged_attention
from ..ops.varlen import varlen_attention
from .attn_bias import (
    VARLEN_BIASES,
    AttentionBias,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)
from .errors import refuse_missing
from .kv_cache import as_pages
from .sdpa import top_left

__version__ = "0.0.34+stream.attention"
__all__ = [
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]

Bias = Tensor | AttentionBias | None


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """xformers' `memory_efficient_attention` by `attention`, `varlen_attention` or `paged_attention`.

    Args:
        query: `[B, Tq, H, D]`, `[B, Tq, D]`, or with groups of heads `[B, Tq, G, H, D]`; key and value likewise, with
            as many heads. Where the heads of a group are one expanded, it is read once.
        attn_bias: a tensor `[B, H, Tq, Tk]` to add, with a gradient, or a class of `attn_bias`. Biases of packs want
            B = 1. Those of keys with room behind them, or in pages, are not differentiable.
        p: the probability of dropout.
        op: None; kernels of xformers cannot be chosen.
        output_dtype: None, or the query's.

    Raises:
        ValueError: a bad argument. NotImplementedError: what is not here, by name.

    >>> import torch
    >>> from stream_attention.compat.attn_bias import BlockDiagonalMask
    >>> from stream_attention.compat.xformers import memory_efficient_attention
    >>> mask = BlockDiagonalMask.from_seqlens([3, 7], device="cpu").make_causal()
    >>> query, key, value = torch.randn(3, 1, 10, 4, 32)
    >>> memory_efficient_attention(query, key, value, attn_bias=mask).shape
    torch.Size([1, 10, 4, 32])
    """
    return _compute(query, key, value, attn_bias, p, scale, op, output_dtype)[0]


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`memory_efficient_attention` without gradients."""
    with torch.no_grad():
        return _compute(query, key, value, attn_bias, p, scale, op, output_dtype)[0]


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and its LSE, `[B, H, Tq]`, without gradients: for a backward of the caller's own."""
    with torch.no_grad():
        return _compute(query, key, value, attn_bias, p, scale, op, output_dtype)


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, `(out, lse)`, for `merge_attentions`. The output is in fp32, from one in the
    query's dtype.

    >>> import torch
    >>> from stream_attention.compat.xformers import memory_efficient_attention_partial, merge_attentions
    >>> query, key = torch.randn(2, 1, 16, 2, 8)
    >>> parts = [memory_efficient_attention_partial(query, x, x) for x in key.split(8, 1)]
    >>> out, lse = merge_attentions(*zip(*parts))
    >>> torch.allclose(out, memory_efficient_attention(query, key, key), atol=1e-6)
    True
    """
    if p:
        refuse_missing("p", "0", p)
    with torch.no_grad():
        out, lse = _compute(query, key, value, attn_bias, p, scale, op, None)
    state = torch.promote_types(query.dtype, torch.float32)
    return out.to(state if output_dtype is None else output_dtype), lse


def merge_attentions(
    attn_split: Tensor | Sequence[Tensor],
    lse_split: Tensor | Sequence[Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention over disjoint sets of keys as over their union, by `merge_states`; differentiable.

    Args:
        attn_split: outputs `[B, T, H, D]` or `[B, T, G, H, D]`, a sequence or stacked in dim 0.
        lse_split: their LSEs, `[B, H, T]` or `[B, G, H, T]`.
    """
    outs, lses = list(attn_split), list(lse_split)
    groups = [x.shape[2:4] for x in outs if x.dim() == 5]
    if groups:
        outs, lses = [x.flatten(2, 3) for x in outs], [x.flatten(1, 2) for x in lses]
    out, lse = merge_states(outs, lses)
    if groups:
        out, lse = out.unflatten(2, groups[0]), lse.unflatten(1, groups[0])
    return out if output_dtype is None else out.to(output_dtype), lse if write_lse else None


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias,
    p: float,
    scale: float | None,
    op: Any,
    output_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    if op is not None:
        refuse_missing("op", "None", op, "stream_attention.explain prints which kernel runs.")
    if output_dtype is not None and output_dtype is not query.dtype:
        refuse_missing("output_dtype", f"None or the query's {query.dtype}", output_dtype)
    dims, groups = query.dim(), query.shape[2:-1]
    _check(query, key, value, attn_bias, groups)
    if dims != 4:
        query, key, value = (_with_one_dim_of_heads(x) for x in (query, key, value))
    try:
        if isinstance(attn_bias, VARLEN_BIASES):
            options = {"scale": scale, "dropout_p": p, "return_lse": True}
            out, lse = _packed(query[0], key[0], value[0], attn_bias, options)
            out, lse = out.unsqueeze(0), lse.unsqueeze(0)
        else:
            out, lse = _dense(query, key, value, attn_bias, scale, p)
    except TypeError as error:  # xformers raises ValueError for a dtype too
        raise ValueError(str(error)) from error
    if dims == 4:
        return out, lse
    return (out.squeeze(2), lse) if dims == 3 else (out.unflatten(2, groups), lse.unflatten(1, groups))


def _check(query: Tensor, key: Tensor, value: Tensor, bias: Any, groups: Sequence[int]) -> None:
    """Refuse what xformers does, and this library would compute: other numbers of heads, biases that broadcast."""
    dims = query.dim()
    if not 3 <= dims <= 5 or key.dim() != dims or value.dim() != dims:
        refuse("query, key and value", f"{_LAYOUTS}, all alike", _shapes(query, key, value))
    if not groups == key.shape[2:-1] == value.shape[2:-1]:
        hint = "Expand those of key and value."
        refuse("query, key and value", "as many heads in each", _shapes(query, key, value), hint)
    if bias is None:
        return
    if isinstance(bias, Tensor) or type(bias) is LowerTriangularMaskWithTensorBias:
        tensor: Tensor = bias if isinstance(bias, Tensor) else bias._bias
        expected = [query.shape[0], groups[-1], query.shape[1], key.shape[1]] if dims == 4 else list(tensor.shape)
        if list(tensor.shape) != expected:
            refuse("attn_bias", f"shape [B, H, Tq, Tk] = {expected}", list(tensor.shape))
    elif not isinstance(bias, AttentionBias):
        refuse("attn_bias", "a tensor or a bias of stream_attention.compat.attn_bias", type(bias).__name__)
    if dims == 3 and isinstance(bias, AttentionBias) and type(bias) is not LowerTriangularMask:
        refuse("attn_bias", "None, a tensor or a LowerTriangularMask with [B, T, D]", type(bias).__name__)
    if isinstance(bias, VARLEN_BIASES) and not query.shape[0] == key.shape[0] == value.shape[0] == 1:
        refuse("query, key and value", f"B = 1 with a {type(bias).__name__}", _shapes(query, key, value))


_LAYOUTS = "[B, T, H, D], [B, T, D] or [B, T, G, H, D]"


def _shapes(*tensors: Tensor) -> list[list[int]]:
    return [list(x.shape) for x in tensors]


def _with_one_dim_of_heads(x: Tensor) -> Tensor:
    """`[B, T, H, D]`; of groups `[B, T, G, H, D]` whose heads are one expanded, that one: `[B, T, G, D]`."""
    if x.dim() == 3:
        return x.unsqueeze(2)
    return x[:, :, :, 0] if x.shape[3] > 1 and x.stride(3) == 0 else x.flatten(2, 3)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Bias, scale: float | None, p: float
) -> tuple[Tensor, Tensor]:
    causal, window, bias = False, None, None
    if isinstance(attn_bias, Tensor):
        bias = _as_bias(attn_bias)
    elif attn_bias is not None:
        if isinstance(attn_bias, LowerTriangularMaskWithTensorBias):
            bias = _as_bias(attn_bias._bias)
        if attn_bias.top_left:
            causal, window, keys = top_left(query.shape[1], key.shape[1])
            if keys != key.shape[1]:
                key, value = key[:, :keys], value[:, :keys]
                bias = None if bias is None else bias[..., :keys]
        else:
            window = attn_bias.sides
    return attention(
        query, key, value, causal=causal, window=window, bias=bias, scale=scale, dropout_p=p, return_lse=True
    )


def _as_bias(tensor: Tensor) -> Tensor:
    """`[B, H, Tq, Tk]` of `[B, Tq, Tk]`, or of `[B, G, H, Tq, Tk]`."""
    return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.flatten(1, 2) if tensor.dim() == 5 else tensor


def _packed(query: Tensor, key: Tensor, value: Tensor, bias: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A pack `[N, H, D]`."""
    queries, keys = bias.q_seqinfo, bias.k_seqinfo
    if query.shape[0] != queries.seqstart_py[-1]:
        refuse("query", f"{queries.seqstart_py[-1]} rows, as its attn_bias has", query.shape[0])
    options["window"] = None if bias.sides == (-1, -1) else bias.sides
    if not isinstance(bias, BlockDiagonalMask):
        return _on_pages(query, key, value, bias, options)
    if key.shape[0] != keys.seqstart_py[-1]:
        refuse("key", f"{keys.seqstart_py[-1]} rows, as its attn_bias has", key.shape[0])
    if bias.top_left and queries.seqstart_py != keys.seqstart_py:
        hint = "make_causal_from_bottomright() is another mask, whose last query stands at the last key."
        refuse_missing("attn_bias", "as many keys as queries in every sequence", "others", hint)
    offsets = {"cu_seqlens_q": queries.seqstart, "cu_seqlens_k": keys.seqstart}
    longest = {"max_seqlen_q": max(queries.max_seqlen, 0), "max_seqlen_k": max(keys.max_seqlen, 0)}
    found: Any = varlen_attention(query, key, value, **offsets, **longest, **options)
    return found


def _on_pages(query: Tensor, key: Tensor, value: Tensor, bias: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys with room behind them, read where they lie."""
    if options.pop("dropout_p"):
        refuse_missing("p", f"0 with a {type(bias).__name__}", "another")
    keys, first, lengths = bias.k_seqinfo, None, bias.k_seqinfo.seqlen
    sequences = len(bias.q_seqinfo.starts)
    if isinstance(bias, BlockDiagonalPaddedKeysMask):
        size, table = keys.padding, torch.arange(sequences, dtype=torch.int32, device=key.device).unsqueeze(1)
    elif isinstance(bias, BlockDiagonalGappyKeysMask):
        size, steps = 1, torch.arange(keys.max_seqlen, dtype=torch.int32, device=key.device)
        table = keys.seqstart[:-1].unsqueeze(1) + steps
    else:
        size, table = bias.page_size, bias.block_tables
        if hasattr(keys, "padding"):
            lengths = keys.seqlen
        else:
            first, lengths = keys.seqstart[:-1], keys.seqlen - keys.seqstart[:-1]
    if key.shape[0] % size:
        refuse("key", f"a multiple of {size} rows, as its attn_bias has", key.shape[0])
    pages = key.unflatten(0, (-1, size)), value.unflatten(0, (-1, size))
    key, value, table = as_pages(*pages, table, first)
    options |= {"page_table": table, "max_seqlen_q": max(bias.q_seqinfo.max_seqlen, 0), "causal": False}
    found: Any = paged_attention(query, key, value, bias.q_seqinfo.seqstart, lengths, **options)
    return found
