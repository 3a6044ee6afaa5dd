"""FlashAttention-3's functions: `from stream_attention.compat.flash_attn_interface import flash_attn_func`.

Names, defaults, positions, layouts and what is returned are those of its `hopper` folder. They run where `attention`
does, so on a CPU too. `pack_gqa`, `sm_margin`, `scheduler_metadata` and `num_splits` tune its kernels and change no
result; here they are accepted and have no effect. `qv`, the scales of FP8 tensors and `attention_chunk` are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..ops.merge import merge_states
from .arguments import Window
from .errors import as_runtime_error, refuse_given
from .flash_attn import dense, packed, unpacked
from .kv_cache import Cached, attend, rotary_of

__version__ = "3.0.0+stream.attention"
__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """FlashAttention-3's `flash_attn_func` by `attention`: differentiable, causal aligned bottom-right.

    Args:
        q: `[B, Tq, Hq, D]`; k: `[B, Tk, Hkv, D]`; v: `[B, Tk, Hkv, Dv]`.
        window_size: a side below 0 is unbounded. softcap: 0 or less is none.
        deterministic: False follows `torch.use_deterministic_algorithms`.
        return_attn_probs: also return the LSE `[B, Hq, Tq]`, and no probabilities.
        The rest: see the module.

    Raises:
        RuntimeError: a bad argument, as the library's own checks. NotImplementedError, which is one: what is not here.

    >>> import torch
    >>> from stream_attention.compat.flash_attn_interface import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 128, 8, 64)
    >>> out, lse = flash_attn_func(q, k[:, :, :2], v[:, :, :2], causal=True, return_attn_probs=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
    """
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None or attention_chunk:
        _refuse_missing(qv, q_descale, k_descale, v_descale, attention_chunk)
    options = softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs
    return dense(q, k, v, 0.0, *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of queries, keys and values in one tensor, which is not copied.

    Args:
        qkv: `[B, T, 3, H, D]`, or with `num_heads_q` the heads of all three, `[B, T, Hq + 2 Hkv, D]`.

    Raises:
        As `flash_attn_func`; AssertionError: a shape that is neither, as in the library.

    >>> import torch
    >>> from stream_attention.compat.flash_attn_interface import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(2, 128, 12, 64), causal=True, num_heads_q=8).shape
    torch.Size([2, 128, 8, 64])
    """
    if q_descale is not None or k_descale is not None or v_descale is not None or attention_chunk:
        _refuse_missing(None, q_descale, k_descale, v_descale, attention_chunk)
    q, k, v = _split(qkv, num_heads_q)
    options = softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs
    return dense(q, k, v, 0.0, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """FlashAttention-3's `flash_attn_varlen_func` by `varlen_attention`.

    Args:
        q: `[Nq, Hq, D]`; k: `[Nk, Hkv, D]`; v: `[Nk, Hkv, Dv]`.
        seqused_q, seqused_k: int32 `[B]`: of each sequence only so many of its first rows are used. Rows that are used
            are copied together first; the others' output is 0, with LSE -inf.
        The rest: as in `flash_attn_func`; the LSE is `[Hq, Nq]`.

    Raises:
        As `flash_attn_func`.

    >>> import torch
    >>> from stream_attention.compat.flash_attn_interface import flash_attn_varlen_func
    >>> q, k, v = torch.randn(3, 10, 4, 32)
    >>> offsets, used = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, seqused_k=used).shape
    torch.Size([10, 4, 32])
    """
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None or attention_chunk:
        _refuse_missing(qv, q_descale, k_descale, v_descale, attention_chunk)
    order = None
    if seqused_k is not None:
        order, cu_seqlens_k = _used("seqused_k", k.shape[0], cu_seqlens_k, seqused_k)
        k, v, order = k.index_select(0, order), v.index_select(0, order), None
    if seqused_q is not None:
        order, cu_seqlens_q = _used("seqused_q", q.shape[0], cu_seqlens_q, seqused_q)
        q = q.index_select(0, order)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = *offsets, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic
    if order is None:
        return packed(q, k, v, *options, return_lse=return_attn_probs)
    out, lse = packed(q, k, v, *options, return_lse=True)
    place = order.argsort()
    out = out.index_select(0, place)
    return (out, lse.index_select(1, place)) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """FlashAttention-3's `flash_attn_with_kvcache`: writes k and v into the cache, in place, and attends.

    `cache_seqlens` is not advanced: that is the caller's. Not differentiable. By `decode_attention`, and with ragged
    queries by `paged_attention`.

    Args:
        q: `[B, Tq, Hq, D]`, or with `cu_seqlens_q`, int32 `[B + 1]`, and `max_seqlen_q` ragged, `[Nq, Hq, D]`.
        k, v: new tokens, `[B, n, Hkv, D]`, or with `cu_seqlens_k_new` ragged, `[N, Hkv, D]`; written from
            `cache_seqlens` on.
        k_cache, v_cache: `[rows, T, Hkv, D]`, or with a `page_table`, int32 `[B, pages of a row]`, pages.
        rotary_cos, rotary_sin: `[positions, R / 2]`: rotate q and k by position, counted from `rotary_seqlens`, or else
            `cache_seqlens`; every row of q by that of the first where it is neither causal nor in a window.
        cache_batch_idx, cache_leftpad: int32 `[B]`: the row of the cache, or of the page table, and its first token.
        return_softmax_lse: also return the LSE, `[B, Hq, Tq]` or ragged `[Hq, Nq]`, and two empty tensors, which the
            library has for the results of splits.
        The rest: see the module.

    Raises:
        As `flash_attn_func`; AssertionError: a cache whose last dim is not contiguous, as in the library.

    >>> import torch
    >>> from stream_attention.compat.flash_attn_interface import flash_attn_with_kvcache
    >>> pages, table = torch.randn(6, 16, 2, 32), torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)
    >>> lengths = torch.tensor([20, 7], dtype=torch.int32)
    >>> flash_attn_with_kvcache(torch.randn(2, 1, 8, 32), pages, pages, cache_seqlens=lengths, page_table=table).shape
    torch.Size([2, 1, 8, 32])
    """
    _refuse_missing(qv, q_descale, k_descale, v_descale, attention_chunk)
    rotary = rotary_of(rotary_cos, rotary_sin, rotary_interleaved, q, k)
    new = k, v, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, rotary, rotary_seqlens
    given = Cached(q, k_cache, v_cache, *new)._replace(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q
    )
    options = softmax_scale, causal, window_size, softcap, None
    out, lse = attend(given, *options, return_lse=return_softmax_lse)
    return out if lse is None else (out, lse, lse.new_empty(0), lse.new_empty(0))


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """FlashAttention-3's `flash_attn_combine` by `merge_states`: attention over splits of the keys as over all.

    Args:
        out_partial: fp32 `[splits, B, Tq, Hq, Dv]`; lse_partial: fp32 `[splits, B, Tq, Hq]`.
        out: `[B, Tq, Hq, Dv]` to write into. out_dtype: of the result; None: fp32.

    Returns:
        The output and its LSE, `[B, Tq, Hq]`.

    Raises:
        RuntimeError: a bad argument, as the library's own checks.

    >>> import torch
    >>> from stream_attention.compat.flash_attn_interface import flash_attn_combine
    >>> out, lse = flash_attn_combine(torch.randn(3, 2, 8, 4, 16), torch.randn(3, 2, 8, 4), out_dtype=torch.bfloat16)
    >>> out.dtype, lse.shape
    (torch.bfloat16, torch.Size([2, 8, 4]))
    """
    for name, given in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if given.dtype is not torch.float32:
            refuse(name, "dtype torch.float32", given.dtype, error=RuntimeError)
    if out_partial.dim() != 5 or lse_partial.shape != out_partial.shape[:4]:
        expected = "[splits, B, Tq, Hq, Dv] and [splits, B, Tq, Hq]"
        got = f"{list(out_partial.shape)} and {list(lse_partial.shape)}"
        refuse("out_partial and lse_partial", expected, got, error=RuntimeError)
    dtype = torch.float32 if out_dtype is None else out_dtype
    if out is not None and (out.dtype is not dtype or out.shape != out_partial.shape[1:]):
        expected, got = f"{dtype} of shape {list(out_partial.shape[1:])}", f"{out.dtype} of shape {list(out.shape)}"
        refuse("out", expected, got, error=RuntimeError)
    try:
        merged, lse = merge_states(out_partial, lse_partial.transpose(2, 3))
    except (TypeError, ValueError) as error:
        raise as_runtime_error(error) from error
    result = merged.to(dtype) if out is None else out.copy_(merged)
    return result, lse.transpose(1, 2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An int32 tensor to pass as `scheduler_metadata`: kernels here share the work on the device and read none.

    >>> import torch
    >>> from stream_attention.compat.flash_attn_interface import get_scheduler_metadata
    >>> get_scheduler_metadata(2, 1, 64, 8, 2, 32, torch.tensor([20, 7], dtype=torch.int32)).dtype
    torch.int32
    """
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


def _refuse_missing(qv: Any, q_descale: Any, k_descale: Any, v_descale: Any, attention_chunk: int) -> None:
    refuse_given("There is no second product of queries here.", qv=qv)
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    refuse_given('Pass fp16 or bf16 tensors; attention(..., precision="fp8") quantises them.', **scales)
    refuse_given(
        "Chunks are not supported; packed sequences by flash_attn_varlen_func are.", attention_chunk=attention_chunk
    )


def _split(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    if qkv.dim() == 5 and qkv.shape[-3] == 3:
        return unpacked("qkv", qkv, 3, 5)
    kv_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2) if qkv.dim() == 4 and num_heads_q is not None else (0, 1)
    if rest or kv_heads < 1 or num_heads_q is None:
        expected = "[B, T, 3, H, D], or [B, T, Hq + 2 Hkv, D] and num_heads_q"
        refuse("qkv", expected, f"{list(qkv.shape)} and {num_heads_q}", error=AssertionError)
    return qkv.split([num_heads_q, kv_heads, kv_heads], dim=2)


def _used(name: str, rows: int, offsets: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """An order of the rows of a pack in which those that are used come first, and their offsets; on the device."""
    if used.shape != (offsets.shape[0] - 1,) or used.dtype is not torch.int32:
        expected = f"int32 of shape [{offsets.shape[0] - 1}]"
        refuse(name, expected, f"{used.dtype} of shape {list(used.shape)}", error=RuntimeError)
    used = torch.minimum(used.clamp(min=0), offsets.diff().to(used.dtype))
    row = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp_(max=max(used.shape[0] - 1, 0))
    unused = row - offsets[sequence] >= used[sequence]
    return unused.int().argsort(stable=True), torch.nn.functional.pad(used.cumsum(0, dtype=offsets.dtype), (1, 0))
