"""varlen_attention(): packed sequences, no padding."""

from __future__ import annotations

from typing import Any, Literal, Required, Unpack, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..base.problem import CallOptions, Inputs
from ..dispatch import call_key, launch_cache, validate
from .attention import OPTIONS, TENSORS, Options, checked, compute, look_up, op_arguments


class PackedOptions(Options, total=False):
    cu_seqlens_q: Required[Tensor]
    cu_seqlens_k: Required[Tensor]
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    mask: None
    bias: None


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[PackedOptions]
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[PackedOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Unpack[PackedOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@validate.refuses_foreign
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *unexpected: Any,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: None = None,
    bias: None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    precision: str | None = None,
    rotate: bool = False,
    backend: str = "auto",
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over packed sequences: row r of sequence b attends to the keys of sequence b alone.

    Sequence b is `query[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]` and likewise for keys; sequences may be empty. Rows
    past the last entry are 0 with LSE -inf and zero gradients. Causal, window, ALiBi and dropout count within a
    sequence.

    Args:
        query: `[Nq, Hq, D]`; key: `[Nk, Hkv, D]`; value: `[Nk, Hkv, Dv]`.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[sequences + 1]`, from 0, not decreasing.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequences. If None they are read from `cu_seqlens`, which on
            an accelerator is a host synchronisation. One that is too small is refused on a CPU; on an accelerator
            nobody looks, results are undefined, and the call may not end.
        alibi_slopes: `[Hq]` or `[sequences, Hq]`.
        mask, bias: refused here; use `attention`.
        The rest: as in `attention`.

    Returns:
        `[Nq, Hq, Dv]`, or `(out, lse)` with lse `[Hq, Nq]`.

    Raises:
        As `attention`. Values of `cu_seqlens` are checked where that needs no synchronisation of its own.

    >>> import torch
    >>> from stream_attention import varlen_attention
    >>> query, key, value = torch.randn(3, 10, 4, 32)
    >>> offsets = torch.tensor([0, 3, 3, 10])
    >>> varlen_attention(query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True).shape
    torch.Size([10, 4, 32])
    """
    if unexpected or foreign:
        validate.unexpected(varlen_attention, unexpected, foreign)
    dense = query, key, value, mask, bias, alibi_slopes, sink
    options = causal, window, softcap, scale, dropout_p, seed, deterministic, return_lse, backend, precision, rotate
    if isinstance(query, Tensor) and hasattr(query, "device_mesh"):
        from .dtensor import dtensor_attention

        tensors = dict(zip(TENSORS, dense, strict=True)) | {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        others = dict(zip(OPTIONS, options, strict=True)) | {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        return dtensor_attention(varlen_attention, tensors, others)
    found = None
    cu_seqlens = cu_seqlens_q, cu_seqlens_k
    if mask is None and bias is None and launch_cache.ENABLED and not call_key.is_watched():
        lengths = _lengths(query, key, value, cu_seqlens, max_seqlen_q, max_seqlen_k)
        if lengths is not None:
            found = look_up(dense, options, cu_seqlens, lengths)
            if found is not None and found.call is not None:
                return found.compute(return_lse)
    given = CallOptions(*options)
    return compute(_checked(Inputs(*dense, None, *cu_seqlens), given, max_seqlen_q, max_seqlen_k), given, found)


def _lengths(
    query: Any, key: Any, value: Any, cu_seqlens: tuple[Any, Any], max_seqlen_q: Any, max_seqlen_k: Any
) -> tuple[int, int] | None:
    """The longest sequences of a pack whose offsets are contiguous; None where the call must be checked first."""
    q_offsets, k_offsets = cu_seqlens
    if (
        type(q_offsets) is type(k_offsets) is type(query) is type(key) is Tensor
        and type(max_seqlen_q) is type(max_seqlen_k) is int
        and q_offsets.is_cuda
        and k_offsets.is_cuda
        and query.dim() == key.dim() == 3
        and q_offsets.is_contiguous()
        and k_offsets.is_contiguous()
        and max_seqlen_q >= 0
        and max_seqlen_k >= 0
    ):  # nothing is read on the host, and the key of the call says the rest
        return min(max_seqlen_q, query.shape[0]), min(max_seqlen_k, key.shape[0])
    if not has_offsets(query, q_offsets, max_seqlen_q) or not has_offsets(key, k_offsets, max_seqlen_k):
        return None
    if type(value) is not Tensor or value.is_nested or value.shape[:-1] != key.shape[:-1]:
        return None
    q_len = longest("cu_seqlens_q", cu_seqlens[0], query.shape[0], max_seqlen_q)
    return q_len, longest("cu_seqlens_k", cu_seqlens[1], key.shape[0], max_seqlen_k)


def has_offsets(rows: Any, offsets: Any, given: Any) -> bool:
    """Whether a pack has contiguous offsets, which can be read before the call is checked."""
    if type(rows) is not Tensor or rows.is_nested or rows.dim() != 3 or type(offsets) is not Tensor:
        return False
    return (
        offsets.dtype in (torch.int32, torch.int64)
        and offsets.dim() == 1
        and offsets.numel() > 0
        and offsets.is_contiguous()
        and offsets.device == rows.device
        and (given is None or (type(given) is int and given >= 0))
    )


def prepare_varlen(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> tuple[Any, ...]:
    """Check a call of `varlen_attention` and turn it into arguments of the library op; nothing is computed."""
    inputs = Inputs(query, key, value, *map(others.get, Inputs._fields[3:]))._replace(seed=None)
    return _checked(inputs, CallOptions.of(others), others.get("max_seqlen_q"), others.get("max_seqlen_k"))


def _checked(
    inputs: Inputs, options: CallOptions, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[Any, ...]:
    inputs = checked(inputs, options, validate.varlen_tensors, max_seqlen_q, max_seqlen_k)
    offsets: Any = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    q_len = longest("cu_seqlens_q", offsets[0], inputs.query.shape[0], max_seqlen_q)
    k_len = longest("cu_seqlens_k", offsets[1], inputs.key.shape[0], max_seqlen_k)
    return op_arguments(inputs, options, q_len, k_len)


def longest(name: str, cu_seqlens: Tensor, rows: int, given: int | None) -> int:
    """The longest sequence: as given, or read from the offsets. Offsets are checked whenever they are read."""
    has_values = not torch.compiler.is_compiling() and not isinstance(cu_seqlens, FakeTensor)
    on_host = cu_seqlens.device.type == "cpu" and has_values
    if given is not None and not on_host:
        return min(given, rows)
    return validate.cu_seqlens_values(name, cu_seqlens.tolist(), rows, given)
