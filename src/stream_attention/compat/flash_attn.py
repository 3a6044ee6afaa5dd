"""FlashAttention-2's functions: `from stream_attention.compat.flash_attn import flash_attn_func`.

Names, defaults, positions, layouts and what is returned are those of flash-attn 2.8. They run where `attention` does,
so on a CPU too, and also take fp32, fp64 and head dims beyond 256. Dropout has the same meaning, not the same pattern.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..ops.attention import attention
from ..ops.paged import paged_attention
from ..ops.varlen import varlen_attention
from .arguments import Window, as_int, sides
from .errors import as_runtime_error, refuse_missing
from .kv_cache import Cached, attend, rotary_of

__version__ = "2.8.3+stream.attention"
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """flash-attn's `flash_attn_func` by `attention`: differentiable, causal aligned bottom-right.

    Args:
        q: `[B, Tq, Hq, D]`; k: `[B, Tk, Hkv, D]`; v: `[B, Tk, Hkv, Dv]`.
        window_size: a side below 0 is unbounded. softcap: 0 or less is none.
        deterministic: False follows `torch.use_deterministic_algorithms`.
        return_attn_probs: also return the LSE `[B, Hq, Tq]`, inf in a row without keys, and an empty tensor in place of
            the probabilities, which the library returns with dropout alone and which are not materialised here.

    Raises:
        RuntimeError: a bad argument, as the library's own checks. NotImplementedError, which is one: probabilities.

    >>> import torch
    >>> from stream_attention.compat.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 128, 8, 64)
    >>> out, lse, _ = flash_attn_func(q, k[:, :, :2], v[:, :, :2], causal=True, return_attn_probs=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    if return_attn_probs:
        _refuse_probs(dropout_p)
        return _with_no_probs(*dense(q, k, v, *options, return_lse=True))
    return dense(q, k, v, *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of queries, keys and values in one tensor, `[B, T, 3, H, D]`, which is not copied.

    Raises:
        As `flash_attn_func`.

    >>> import torch
    >>> from stream_attention.compat.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(2, 128, 3, 8, 64), causal=True).shape
    torch.Size([2, 128, 8, 64])
    """
    q, k, v = unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of keys and values in one tensor, `[B, Tk, 2, Hkv, D]`, which is not copied.

    Raises:
        As `flash_attn_func`.

    >>> import torch
    >>> from stream_attention.compat.flash_attn import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(torch.randn(2, 10, 8, 64), torch.randn(2, 128, 2, 4, 64)).shape
    torch.Size([2, 10, 8, 64])
    """
    k, v = unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """flash-attn's `flash_attn_varlen_func` by `varlen_attention`; with a `block_table` by `paged_attention`.

    Args:
        q: `[Nq, Hq, D]`; k: `[Nk, Hkv, D]`; v: `[Nk, Hkv, Dv]`.
        block_table: int32 `[B, pages of a sequence]`: keys and values are pages `[P, page, Hkv, D]`, of 1 to 1024
            tokens, and `cu_seqlens_k` has their lengths. A backward raises, and dropout is refused.
        The rest: as in `flash_attn_func`; the LSE is `[Hq, Nq]`.

    Raises:
        As `flash_attn_func`.

    >>> import torch
    >>> from stream_attention.compat.flash_attn import flash_attn_varlen_func
    >>> q, k, v = torch.randn(3, 10, 4, 32)
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([10, 4, 32])
    """
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    others = softmax_scale, causal, window_size, softcap, alibi_slopes
    if return_attn_probs:
        _refuse_probs(dropout_p)
    if block_table is not None:
        if dropout_p:
            refuse_missing("dropout_p", "0 with a block_table", dropout_p, "Pass keys without pages.")
        on_pages = *offsets, block_table, *others, return_attn_probs
        with_graph = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        found = (_OnPages.apply if with_graph else _on_pages)(q, k, v, *on_pages)
    else:
        options = *offsets, dropout_p, *others, deterministic, return_attn_probs
        found = packed(q, k, v, *options)
    return _with_no_probs(*found) if return_attn_probs else found


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of queries, keys and values in one tensor, `[N, 3, H, D]`, which is not copied.

    Raises:
        As `flash_attn_func`.

    >>> import torch
    >>> from stream_attention.compat.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 4, 32), offsets, 7, causal=True).shape
    torch.Size([10, 4, 32])
    """
    q, k, v = unpacked("qkv", qkv, 3, 4)
    others = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, *others)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of keys and values in one tensor, `[Nk, 2, Hkv, D]`, which is not copied.

    Raises:
        As `flash_attn_func`.

    >>> import torch
    >>> from stream_attention.compat.flash_attn import flash_attn_varlen_kvpacked_func
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> q, kv = torch.randn(10, 4, 32), torch.randn(10, 2, 2, 32)
    >>> flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([10, 4, 32])
    """
    k, v = unpacked("kv", kv, 2, 4)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    others = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    arguments = *offsets, dropout_p, *others
    return flash_attn_varlen_func(q, k, v, *arguments)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attn's `flash_attn_with_kvcache` by `decode_attention`: writes k and v into the cache and attends to it.

    `cache_seqlens` is not advanced: that is the caller's. Not differentiable.

    Args:
        q: `[B, Tq, Hq, D]`; k: `[B, n, Hkv, D]`, v: `[B, n, Hkv, Dv]`: new tokens, written from `cache_seqlens` on.
        k_cache: `[rows, T, Hkv, D]`, or with a `block_table`, int32 `[B, pages of a row]`, pages `[P, page, Hkv, D]`.
        rotary_cos, rotary_sin: `[positions, R / 2]`: rotate q and k by position, with every row of q at that of the
            first where nothing but the cache's end bounds it (neither causal nor a window).
        cache_batch_idx, cache_leftpad: int32 `[B]`: the row of the cache, and its first token. The rows of the cache
            must follow each other in memory.
        num_splits: has no effect; how many there are is planned, and changes no result.
        return_softmax_lse: also return the LSE `[B, Hq, Tq]`, inf in a row without keys.

    Raises:
        RuntimeError, AssertionError: a bad argument, as the library's own checks.
        NotImplementedError, which is a RuntimeError: a cache whose rows do not follow each other, where they must.

    >>> import torch
    >>> from stream_attention.compat.flash_attn import flash_attn_with_kvcache
    >>> (k_cache, v_cache), (k, v) = torch.zeros(2, 2, 64, 4, 16), torch.randn(2, 2, 1, 4, 16)
    >>> lengths = torch.tensor([5, 63], dtype=torch.int32)
    >>> flash_attn_with_kvcache(torch.randn(2, 1, 8, 16), k_cache, v_cache, k, v, cache_seqlens=lengths).shape
    torch.Size([2, 1, 8, 16])
    >>> torch.equal(k_cache[0, 5], k[0, 0]), lengths.tolist()
    (True, [5, 63])
    """
    if block_table is not None:
        for name, one in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if one is not None:
                refuse(name, "None with a block_table", "a tensor", error=RuntimeError)
    rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, q, k)
    given = Cached(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, rotary)
    options = softmax_scale, causal, window_size, softcap, alibi_slopes
    out, lse = attend(given, *options, return_lse=return_softmax_lse)
    return out if lse is None else (out, _inf_without_keys(lse))


# What FlashAttention-3's functions share


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_lse: bool = False,
) -> Any:
    """`attention`, by FlashAttention's conventions."""
    try:
        return attention(
            q if q.stride(-1) == 1 else q.contiguous(),
            k if k.stride(-1) == 1 else k.contiguous(),
            v if v.stride(-1) == 1 else v.contiguous(),
            causal=causal,
            window=sides(window_size),
            alibi_slopes=alibi_slopes,
            softcap=max(0.0, float(softcap)),
            scale=softmax_scale,
            dropout_p=dropout_p,
            deterministic=deterministic or None,
            return_lse=return_lse,
        )
    except (TypeError, ValueError) as error:
        raise as_runtime_error(error) from error


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_lse: bool = False,
) -> Any:
    """`varlen_attention`, by FlashAttention's conventions."""
    try:
        return varlen_attention(
            q if q.stride(-1) == 1 else q.contiguous(),
            k if k.stride(-1) == 1 else k.contiguous(),
            v if v.stride(-1) == 1 else v.contiguous(),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=as_int(max_seqlen_q),
            max_seqlen_k=as_int(max_seqlen_k),
            causal=causal,
            window=sides(window_size),
            alibi_slopes=alibi_slopes,
            softcap=max(0.0, float(softcap)),
            scale=softmax_scale,
            dropout_p=dropout_p,
            deterministic=deterministic or None,
            return_lse=return_lse,
        )
    except (TypeError, ValueError) as error:
        raise as_runtime_error(error) from error


def unpacked(name: str, tensor: Tensor, count: int, dims: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of `[..., count, H, D]`, as views."""
    if tensor.dim() != dims or tensor.shape[-3] != count:
        layout = f"[B, T, {count}, H, D]" if dims == 5 else f"[N, {count}, H, D]"
        refuse(name, f"shape {layout}", list(tensor.shape), error=RuntimeError)
    return tensor.unbind(-3)


def _on_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    block_table: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_lse: bool,
) -> Any:
    try:
        return paged_attention(
            q if q.stride(-1) == 1 else q.contiguous(),
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k.diff(),
            page_table=block_table,
            max_seqlen_q=as_int(max_seqlen_q),
            max_seqlen_k=as_int(max_seqlen_k),
            causal=causal,
            window=sides(window_size),
            alibi_slopes=alibi_slopes,
            softcap=max(0.0, float(softcap)),
            scale=softmax_scale,
            return_lse=return_lse,
        )
    except (TypeError, ValueError) as error:
        raise as_runtime_error(error) from error


class _OnPages(torch.autograd.Function):
    """`_on_pages` of tensors that require a gradient: the library computes it, and so does this until one is taken."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Any:
        return _on_pages(q, k, v, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_missing("block_table", "None where a gradient is taken", "a tensor", "Pass keys without pages.")


def _refuse_probs(dropout_p: float) -> None:
    if dropout_p:
        hint = "Probabilities are not materialised; without dropout the LSE is returned."
        refuse_missing("return_attn_probs", "False with dropout", True, hint)


def _with_no_probs(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Out, LSE, and an empty tensor, which the library too returns for probabilities without dropout."""
    return out, _inf_without_keys(lse), out.new_empty(0)


def _inf_without_keys(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -float("inf"), float("inf"))
