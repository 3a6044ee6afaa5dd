"""Attention in FP8: `attention(precision="fp8")` after its checks, and the form that takes quantised keys and values.

A pre-pass quantises, in one launch for queries, keys and values; `backends/reference/fp8.py` specifies the quantised
values ("codes") and what is computed from them. There is no gradient, and nothing here falls back to another precision.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..backends import BY_NAME
from ..backends.installed import makes_fp8_codes
from ..base.fp8_layout import CodedInputs, KeyCodes
from ..base.graph_break import graph_break
from ..base.kv_layouts.fp8 import Fp8KV
from ..base.problem import CallOptions, Inputs, Problem
from ..dispatch import call_key, launch_cache, validate
from ..dispatch.call_key import Key, layout_of
from ..dispatch.launch_cache import PreparedCall
from ..dispatch.plan import Plan, plan
from ..dispatch.prepare import no_autocast, problem_of, warn_if_lacking, without_autocast
from . import varlen
from .attention import in_autocast_dtype, op_arguments

REASON = "FP8 kernels are launched, not traced"


@graph_break(REASON)
def quantize_fp8(
    key: Tensor,
    value: Tensor,
    *,
    rotate: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Fp8KV:
    """Quantise keys and values to e4m3, with a scale for every 128 rows of a head, for any number of `attention_fp8`.

    The values are those that `attention(precision="fp8")` uses. This is one launch if Triton runs on a GPU of compute
    capability 8.9 or newer; elsewhere plain torch computes the same bits, slowly.

    Args:
        key: `[B, Tk, Hkv, D]`, fp16 or bf16, D of 64, 128 or 256; packed sequences: `[Nk, Hkv, D]`.
        value: of the key's shape.
        rotate: rotate keys by a Hadamard matrix, against outlier channels; `attention_fp8` rotates the queries
            likewise.
        cu_seqlens: int32 or int64 `[sequences + 1]`, where sequences are packed.
        max_seqlen: the longest of them; None reads the offsets, which on an accelerator is a host synchronisation.

    Raises:
        ValueError, TypeError: a bad argument, before any work.

    >>> import torch
    >>> from stream_attention import quantize_fp8
    >>> quantize_fp8(*torch.randn(2, 1, 300, 4, 64).bfloat16())
    <Fp8KV: 1 rows of 300 keys, 4 heads of 64, of bfloat16 on cpu>
    """
    key, value = _as_they_lie(key, value)
    found = call = None
    if launch_cache.ENABLED and not call_key.is_watched():
        found = _key_of_keys(key, value, rotate, cu_seqlens, max_seqlen)
        if found is not None:
            cache_key, most = found
            call = launch_cache.find(cache_key, key, value, cu_seqlens, most)
    if call is None:
        validate.fp8_keys(key, value, rotate, cu_seqlens, max_seqlen)
        most = key.shape[-3]
        if cu_seqlens is not None:
            most = varlen.longest("cu_seqlens", cu_seqlens, most, max_seqlen)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.clone()  # the caller may use his for the next batch
    if call is not None or (makes_fp8_codes(key.device) and key.numel()):
        codes = _codes_by_kernel(call, None if found is None else found[0], key, value, cu_seqlens, most, rotate)
    else:
        from ..backends.reference import fp8 as reference_fp8

        with no_autocast(key.device.type), torch.no_grad():
            codes = reference_fp8.quantize_keys(key, value, cu_seqlens, rotate)
    return Fp8KV(codes, tuple(key.shape), key.dtype, rotate, cu_seqlens, most)


def _codes_by_kernel(
    call: Any, cache_key: Key | None, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, most: int, rotate: bool
) -> KeyCodes:
    """What a launch writes: as it was prepared before, or prepared and kept now."""
    from ..gpu.quantize_fp8 import QuantizeKeys

    prepare = partial(QuantizeKeys.prepare, key, value, cu_seqlens, most, rotate)
    if call is None:
        call = prepare()
        if cache_key is not None:
            launch_cache.keep(cache_key, call, template=call)
    codes: KeyCodes = call.room(key)
    if launch_cache.COMPARE:  # blocks that a pack leaves free are not written
        for t in codes[:3]:
            t.view(torch.uint8).zero_()
        fresh = codes._replace(key=codes.key.clone(), value=codes.value.clone(), scales=codes.scales.clone())
    launch_cache.labelled("quantize_fp8", call, key, value, cu_seqlens, codes)
    if launch_cache.COMPARE:
        prepare()(key, value, cu_seqlens, fresh)
        launch_cache.compare(codes[:3], fresh[:3])
    return codes


def _key_of_keys(key: Any, value: Any, rotate: Any, cu_seqlens: Any, max_seqlen: Any) -> tuple[Key, int] | None:
    """The key of a call of `quantize_fp8`, and its longest sequence; None where it must be checked first."""
    split = _split(key), _split(value)
    if None in split or type(rotate) is not bool:
        return None
    (of_key, lengths), (of_value, value_lengths) = split  # type: ignore[misc]
    most, offsets = lengths[0], None
    if cu_seqlens is not None:
        if not varlen.has_offsets(key, cu_seqlens, max_seqlen):
            return None
        most, offsets = varlen.longest("cu_seqlens", cu_seqlens, most, max_seqlen), layout_of(cu_seqlens)
    elif max_seqlen is not None:
        return None
    return Key((quantize_fp8, rotate, of_key, of_value, offsets), (lengths, value_lengths, most)), most


def _split(t: Any) -> tuple[tuple[Any, ...], tuple[int, tuple[int, ...]]] | None:
    """The layout of rows `[..., T, H, D]` but for their length and strides, and these; None where a call with them is
    not kept."""
    if not isinstance(t, Tensor) or t.dim() < 3 or (t.requires_grad and torch.is_grad_enabled()):
        return None
    layout = layout_of(t)
    if not layout:
        return None
    dtype, shape, strides, device, offset = layout
    if device >= 0 and call_key.is_elsewhere(device):
        return None
    return (dtype, shape[:-3], shape[-2:], device, offset), (shape[-3], strides)


class Fp8Options(TypedDict, total=False):
    causal: bool
    window: tuple[int, int] | None
    scale: float | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    backend: str


@overload
def attention_fp8(
    query: Tensor, kv: Fp8KV, *, return_lse: Literal[False] = False, **options: Unpack[Fp8Options]
) -> Tensor: ...
@overload
def attention_fp8(
    query: Tensor, kv: Fp8KV, *, return_lse: Literal[True], **options: Unpack[Fp8Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_fp8(
    query: Tensor, kv: Fp8KV, *, return_lse: bool, **options: Unpack[Fp8Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
@graph_break(REASON)
def attention_fp8(
    query: Tensor,
    kv: Fp8KV,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in FP8 to keys and values that are quantised already: only the queries are quantised, 64 rows a scale.

    If every key is visible to some query, the result has the bits of `attention(precision="fp8")` on the keys and
    values that `kv` was made of. (Here a masked key still counts in the scale of its block.)

    Args:
        query: `[B, Tq, Hq, D]`, fp16 or bf16; packed sequences: `[Nq, Hq, D]`.
        kv: what `quantize_fp8` returned; where its keys are rotated, the queries are rotated here.
        cu_seqlens_q, max_seqlen_q: of the queries, where those of `kv` are packed; as in `varlen_attention`.
        causal, window, scale, return_lse, backend: as in `attention`.

    Returns:
        `[B, Tq, Hq, D]` in the query's dtype (packed: `[Nq, Hq, D]`), or `(out, lse)`.

    Raises:
        ValueError, TypeError: a bad argument, before any work.
        UnsupportedProblem: the backend that was named, or every backend, does not support the call here; the message
            says why.

    >>> import torch
    >>> from stream_attention import attention_fp8, quantize_fp8
    >>> query, key, value = torch.randn(3, 1, 300, 4, 64).bfloat16()
    >>> attention_fp8(query, quantize_fp8(key, value), causal=True, backend="reference").shape
    torch.Size([1, 300, 4, 64])
    """
    (query,) = _as_they_lie(query)
    options = causal, window, 0.0, scale, 0.0, None, None, return_lse, backend, None, False
    found = call = None
    inputs: Any = None
    if launch_cache.ENABLED and not call_key.is_watched():
        found = _look_up(query, kv, cu_seqlens_q, max_seqlen_q, options)
        if found is not None:
            key, inputs, op_options = found
            call = launch_cache.find(key, inputs, key.lengths, op_options)
    if call is None:
        arguments = _checked(query, kv, cu_seqlens_q, max_seqlen_q, CallOptions(*options))
        call, inputs = prepare(arguments, kv.rotate), CodedInputs._make(arguments[: _INPUTS + 1])
        if found is not None:
            launch_cache.keep_prepared(key, call, inputs)
    out, lse = call(inputs, return_lse)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def explain_fp8(query: Tensor, kv: Fp8KV, **arguments: Any) -> Plan:
    """Print which kernel would run for `attention_fp8(query, kv, **arguments)`, and how; compute nothing.

    >>> import torch
    >>> from stream_attention import explain_fp8, quantize_fp8
    >>> query, key, value = torch.randn(3, 1, 300, 4, 64).bfloat16()
    >>> plan = explain_fp8(query, quantize_fp8(key, value), causal=True, backend="reference")
    forward   dense B=1 Tq=300 Tk=300 Hq=4 Hkv=4 D=64 Dv=64 bfloat16 on cpu scale=0.125 causal in fp8
    backend   reference: dense, quantised values in fp64
    """
    given = validate.bound(attention_fp8, query, kv, **arguments)
    planned, _ = _planned(_checked(query, kv, given["cu_seqlens_q"], given["max_seqlen_q"], CallOptions.of(given)))
    print(planned)
    return planned


def _look_up(
    query: Any, kv: Any, cu_seqlens_q: Any, max_seqlen_q: Any, given: tuple[Any, ...]
) -> tuple[Key, CodedInputs, tuple[Any, ...]] | None:
    """The key of a call of `attention_fp8`, its inputs and options; None where it must be checked first."""
    split = _split(query)
    if split is None or type(kv) is not Fp8KV or query.dim() != len(kv.shape):
        return None
    options = call_key.options_of(query.shape[-1], given)
    codes, k_ends = [layout_of(t) for t in kv.codes[:3]], kv.cu_seqlens
    if options is None or call_key.NO_LAYOUT in codes:
        return None
    q_len, offsets = 0, None
    if cu_seqlens_q is not None:
        if k_ends is None or not varlen.has_offsets(query, cu_seqlens_q, max_seqlen_q) or not k_ends.is_contiguous():
            return None
        q_len = varlen.longest("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q)
        offsets = layout_of(cu_seqlens_q), layout_of(k_ends)
    elif k_ends is not None or max_seqlen_q is not None:
        return None
    kind, (rows, strides) = split
    others = [(dtype, device, offset) for dtype, _, _, device, offset in codes]
    *lead, k_rows, heads, dim = kv.shape
    family = attention_fp8, options, kind, kv.rotate, kv.dtype, *lead, heads, dim, offsets, *others
    lengths = rows, k_rows, k_rows, strides, codes[0][2], codes[1][2], (q_len, kv.max_seqlen)
    inputs = CodedInputs(query, *kv.codes[:2], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=k_ends, kv=kv)
    return Key(family, lengths), inputs, options


def _checked(
    query: Tensor, kv: Fp8KV, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None, options: CallOptions
) -> tuple[Any, ...]:
    """Check a call of `attention_fp8` and turn it into `CodedInputs` and the options of the library op."""
    (query,) = _as_they_lie(query)
    validate.fp8_query(query, kv, cu_seqlens_q, max_seqlen_q)
    validate.options(options, query)
    q_len = 0
    if cu_seqlens_q is not None:
        q_len = varlen.longest("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q)
    inputs = Inputs(query, *kv.codes[:2], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=kv.cu_seqlens)
    arguments = op_arguments(inputs, options, q_len, kv.max_seqlen)
    return *arguments[:_INPUTS], kv, *arguments[_INPUTS:]


_INPUTS = len(Inputs._fields)


def _planned(arguments: tuple[Any, ...]) -> tuple[Plan, Any]:
    """The plan of a call that was checked, and its inputs: `CodedInputs` where an `Fp8KV` is the last of them."""
    kv = arguments[_INPUTS]
    if not isinstance(kv, Fp8KV):
        problem, inputs, backend = problem_of(arguments)
        return plan(in_fp8(problem), backend), inputs
    rows = kv.codes.scales.new_empty(()).expand(kv.shape)  # of the shape of what was quantised
    problem, _, backend = problem_of((arguments[0], rows, rows, *arguments[3:_INPUTS], *arguments[_INPUTS + 1 :]))
    return plan(in_fp8(problem), backend), CodedInputs._make(arguments[: _INPUTS + 1])


@graph_break(REASON)
def call(arguments: tuple[Any, ...], rotate: bool) -> tuple[Tensor, Tensor | None]:
    """Compute `(out, lse)` in FP8, of a call that was checked as one of the library op."""
    inputs = Inputs._make(arguments[:_INPUTS])
    query, key, value = (t.resolve_neg() for t in inputs[:3])
    inputs = inputs._replace(query=query, key=key, value=value)
    return prepare((*inputs, *arguments[_INPUTS:]), rotate).forward(inputs, True)


def prepare(arguments: tuple[Any, ...], rotate: bool) -> PreparedCall:
    """A call that was checked, planned and bound: the pre-pass and the kernel."""
    planned, inputs = _planned(arguments)
    warn_if_lacking(planned)
    problem, backend = planned.problem, BY_NAME[planned.backend]
    forward = backend.prepare_fp8(problem, inputs, planned.config, rotate)
    if not backend.compiles:
        forward = without_autocast(forward, problem.device.type)
    return PreparedCall(planned, problem, forward, arguments[len(inputs) :], partial(prepare, rotate=rotate))


def in_fp8(problem: Problem) -> Problem:
    """The same call computed from quantised values, which have the layout that kernels read."""
    return problem.replace(fp8=True, tma_compatible=True)


def _as_they_lie(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In autocast's dtype, and with what torch does to a view when it is read, which kernels would not see."""
    return tuple(t.resolve_neg() if isinstance(t, Tensor) else t for t in in_autocast_dtype(*tensors))
