"""Attention in FP8: `attention(precision="fp8")` behind its checks, and the form that takes keys and values as codes.

Codes are made by a pre-pass, one launch for queries, keys and values; `backends/reference/fp8.py` specifies them and
what is computed from them. There is no gradient, and nothing here falls back to another precision.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..backends import BY_NAME, makes_fp8_codes
from ..base.graph_break import uncompiled
from ..base.kv_layouts.fp8 import Fp8KV
from ..base.problem import UNBOUNDED, Forward, Inputs, Problem, distinct
from ..dispatch import launch_cache, validate
from ..dispatch.plan import Plan, plan, requested
from ..dispatch.prepare import no_autocast, problem_of, warn_if_lacking
from .attention import in_autocast_dtype, op_arguments
from .varlen import longest

if TYPE_CHECKING:
    from ..base.fp8_layout import KeyCodes, QueryCodes

REASON = "FP8 kernels are launched, not traced"


def quantize_fp8(
    key: Tensor,
    value: Tensor,
    *,
    rotate: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Fp8KV:
    """Keys and values as e4m3 codes with a scale for every 128 rows of a head, to be attended to any number of times.

    They are the codes that `attention(precision="fp8")` makes of them. One launch where Triton runs on a GPU of compute
    capability 8.9 or newer; elsewhere plain torch computes the same bits, slowly.

    Args:
        key: `[B, Tk, Hkv, D]`, fp16 or bf16, D of 64, 128 or 256; packed sequences: `[Nk, Hkv, D]`.
        value: of the key's shape.
        rotate: turn keys by a Hadamard matrix, against outliers in a few of their channels; `attention_fp8` turns the
            queries likewise.
        cu_seqlens: int32 or int64 `[sequences + 1]`, where sequences are packed.
        max_seqlen: the longest of them; None reads the offsets, which on an accelerator is a host synchronisation.

    Raises:
        ValueError, TypeError: a bad argument, before any work.

    >>> import torch
    >>> from stream_attention import quantize_fp8
    >>> quantize_fp8(*torch.randn(2, 1, 300, 4, 64).bfloat16())
    <Fp8KV: 1 rows of 300 keys, 4 heads of 64, of bfloat16 on cpu>
    """
    return _quantized(key, value, rotate, cu_seqlens, max_seqlen)


@uncompiled(REASON)
def _quantized(key: Tensor, value: Tensor, rotate: bool, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Fp8KV:
    key, value = _as_they_lie(key, value)
    validate.fp8_keys(key, value, rotate, cu_seqlens, max_seqlen)
    most = key.shape[-3]
    if cu_seqlens is not None:
        most = longest("cu_seqlens", cu_seqlens, key.shape[0], max_seqlen)
        cu_seqlens = cu_seqlens.clone()  # the caller may use his for the next batch
    with no_autocast(key.device.type), torch.no_grad():
        codes: Any
        if makes_fp8_codes(key.device) and key.numel():
            from ..gpu import quantize_fp8 as kernels

            codes = kernels.quantize_keys(key, value, cu_seqlens, most, rotate)
        else:
            from ..backends.reference import fp8 as reference_fp8

            codes = reference_fp8.quantize_keys(key, value, cu_seqlens, rotate)
    return Fp8KV(codes, tuple(key.shape), key.dtype, rotate, cu_seqlens, most)


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
    """Attention in FP8 to keys and values that are codes already: the queries alone are quantised, 64 rows to a scale.

    Bit for bit what `attention(precision="fp8")` computes of the keys and values that `kv` was made of, where every key
    is seen by some query (one that is not has a say in the scale of its block here).

    Args:
        query: `[B, Tq, Hq, D]`, fp16 or bf16; packed sequences: `[Nq, Hq, D]`.
        kv: what `quantize_fp8` returned; where its keys are rotated, the queries are rotated here.
        cu_seqlens_q, max_seqlen_q: of the queries, where those of `kv` are packed; as in `varlen_attention`.
        causal, window, scale, return_lse, backend: as in `attention`.

    Returns:
        `[B, Tq, Hq, D]` in the query's dtype (packed: `[Nq, Hq, D]`), or `(out, lse)`.

    Raises:
        ValueError, TypeError: a bad argument, before any work.
        UnsupportedProblem: the backend that was named, or none, can do it here; the message says why.

    >>> import torch
    >>> from stream_attention import attention_fp8, quantize_fp8
    >>> query, key, value = torch.randn(3, 1, 300, 4, 64).bfloat16()
    >>> attention_fp8(query, quantize_fp8(key, value), causal=True, backend="reference").shape
    torch.Size([1, 300, 4, 64])
    """
    out, lse = _attended(query, kv, causal, window, scale, return_lse, cu_seqlens_q, max_seqlen_q, backend)
    return (out, lse) if return_lse else out


def explain_fp8(query: Tensor, kv: Fp8KV, **arguments: Any) -> Plan:
    """Print which kernel would run for `attention_fp8(query, kv, **arguments)`, and how; compute nothing.

    >>> import torch
    >>> from stream_attention import explain_fp8, quantize_fp8
    >>> query, key, value = torch.randn(3, 1, 300, 4, 64).bfloat16()
    >>> plan = explain_fp8(query, quantize_fp8(key, value), causal=True, backend="reference")
    forward   dense B=1 Tq=300 Tk=300 Hq=4 Hkv=4 D=64 Dv=64 bfloat16 on cpu scale=0.125 causal in fp8
    backend   reference: dense, quantised values in fp64
    """
    try:
        bound = signature(attention_fp8).bind(query, kv, **arguments)
    except TypeError as error:
        raise TypeError(f"attention_fp8() {error}") from None
    bound.apply_defaults()
    planned, _ = _planned(**bound.arguments)
    print(planned)
    return planned


@uncompiled(REASON)
def _attended(query: Tensor, kv: Fp8KV, *options: Any) -> tuple[Tensor, Tensor]:
    planned, inputs = _planned(query, kv, *options)
    query, cu_q, cu_k = inputs.query, inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if planned.problem.empty:
        return _nothing(query)
    with no_autocast(query.device.type), torch.no_grad():
        queries: Any
        if planned.backend == "reference":
            from ..backends.reference import fp8 as reference_fp8

            queries = reference_fp8.quantize_queries(query, cu_q, kv.rotate)
        else:
            from ..gpu import quantize_fp8 as kernels

            queries = kernels.quantize_queries(query, cu_q, planned.problem.q_len, kv.rotate)
        return attend_to_codes(planned, queries, kv.codes, cu_q, cu_k)


def _planned(
    query: Tensor,
    kv: Fp8KV,
    causal: bool,
    window: tuple[int, int] | None,
    scale: float | None,
    return_lse: bool,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    backend: str,
) -> tuple[Plan, Inputs]:
    """Check the arguments of `attention_fp8`, and plan it; the inputs' key and value only have the shape of theirs."""
    backend = requested(backend)
    (query,) = _as_they_lie(query)
    validate.fp8_query(query, kv, cu_seqlens_q, max_seqlen_q)
    validate.options(causal, window, 0.0, scale, 0.0, None, None, return_lse, query)
    keys = kv.codes.scales.new_empty(()).expand(kv.shape)
    inputs = Inputs(query, keys, keys, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=kv.cu_seqlens)
    q_len = 0 if cu_seqlens_q is None else longest("cu_seqlens_q", cu_seqlens_q, query.shape[0], max_seqlen_q)
    arguments = op_arguments(inputs, causal, window, 0.0, scale, 0.0, None, None, backend, q_len, kv.max_seqlen)
    problem, inputs, backend = problem_of(arguments)
    return plan(in_fp8(problem), backend), inputs


@uncompiled(REASON)
def call(arguments: tuple[Any, ...], rotate: bool) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` in FP8, of a call that was checked as one of the library op."""
    inputs = Inputs._make(arguments[: len(Inputs._fields)])
    query, key, value = (t.resolve_neg() for t in inputs[:3])
    inputs = inputs._replace(query=query, key=key, value=value)
    out, lse = prepare((*inputs, *arguments[len(inputs) :]), rotate).forward(inputs, True)
    assert lse is not None
    return out, lse


def prepare(arguments: tuple[Any, ...], rotate: bool) -> launch_cache.PreparedCall:
    """A call that was checked as one of the library op, planned and bound: the pre-pass and the kernel."""
    problem, inputs, backend = problem_of(arguments)
    planned = plan(in_fp8(problem), backend)
    forward = _prepare(planned, inputs, rotate)
    anew = partial(prepare, rotate=rotate)
    places = launch_cache.places_of(inputs)
    return launch_cache.PreparedCall(planned, planned.problem, forward, places, arguments[len(Inputs._fields) :], anew)


def _prepare(planned: Plan, inputs: Inputs, rotate: bool) -> Forward:
    warn_if_lacking(planned)
    problem = planned.problem
    if problem.empty:
        return lambda inputs, with_lse: _nothing(inputs.query)
    if planned.backend == "reference":

        def by_reference(inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor]:
            with no_autocast(problem.device.type), torch.no_grad():
                codes = make_codes(planned, inputs, rotate)
                return attend_to_codes(planned, *codes, inputs.cu_seqlens_q, inputs.cu_seqlens_k)

        return by_reference

    from ..gpu.quantize_fp8 import as_integers, bind_quantize, rooms
    from ..gpu.scratch import Scratch

    query, key, value, cu_q, cu_k = distinct(*inputs[:3], inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    assert query is not None and key is not None and value is not None
    samples = rooms(query.to("meta"), key.to("meta"), cu_q, cu_k)
    tensors = query, key, value, *samples, cu_q, cu_k
    quantize = bind_quantize(*tensors, problem.q_len, problem.k_len, rotate, problem.left)
    prepare_fp8 = BY_NAME[planned.backend].prepare_fp8
    launch, attend = prepare_fp8(problem, *samples, cu_q, cu_k, planned.config, query.device)
    scratch = Scratch.of(*(t for codes in samples for t in codes[:-1]))

    assert quantize is not None

    def compute(inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor]:
        query, key, value = inputs[:3]
        ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        is_compiled = quantize.is_compiled and launch.is_compiled
        memory, (q_codes, q_scales, k_codes, v_codes, k_scales) = scratch.allocate(query, is_compiled)
        codes = q_codes, k_codes, v_codes, q_scales, k_scales
        quantize(query, key, value, *as_integers(*codes), *ends)
        result = attend(*codes, *ends, query)
        del memory  # all that reads it is queued
        return result

    return compute


def in_fp8(problem: Problem) -> Problem:
    """The same call computed from codes, which lie as kernels read them, however its tensors do."""
    return problem.replace(fp8=True, addressable=True)


def make_codes(planned: Plan, inputs: Inputs, rotate: bool) -> tuple[QueryCodes, KeyCodes]:
    """The pre-pass of a planned call."""
    problem, (query, key, value) = planned.problem, (t.resolve_neg() for t in inputs[:3])
    if planned.backend != "reference":
        from ..gpu.quantize_fp8 import quantize

        ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        return quantize(query, key, value, *ends, problem.q_len, problem.k_len, rotate, problem.left)

    from ..backends.reference import fp8 as reference_fp8

    hidden = _hidden(problem, inputs)
    if hidden is not None:
        key, value = (t.masked_fill(hidden[:, None, None], 0.0) for t in (key, value))
    queries = reference_fp8.quantize_queries(query, inputs.cu_seqlens_q, rotate)
    return queries, reference_fp8.quantize_keys(key, value, inputs.cu_seqlens_k, rotate)


def attend_to_codes(
    planned: Plan, queries: QueryCodes, keys: KeyCodes, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of a planned call whose codes are there."""
    problem, offsets = planned.problem, (cu_seqlens_q, cu_seqlens_k)
    if planned.backend != "reference":
        return BY_NAME[planned.backend].forward_fp8(problem, queries, keys, *offsets, planned.config)

    from ..backends.reference import fp8 as reference_fp8
    from ..gpu.scratch import Outputs

    rows, row_lses = reference_fp8.attention(problem, queries, keys, *offsets)
    out, lse = Outputs.of(problem, queries.rows).allocate(queries.scales)
    count = rows.shape[-3]  # of a pack behind whose last sequence there are rows, fewer than these
    out[..., :count, :, :] = rows
    lse[..., :count] = row_lses
    return out, lse


def _hidden(problem: Problem, inputs: Inputs) -> Tensor | None:
    """Keys that no query of the call sees, `[Tk]` or of a pack `[Nk]`: codes of 0, which have no say in a scale."""
    if problem.left == problem.right == UNBOUNDED:
        return None
    q_ends, k_ends = [0, problem.q_len], [0, problem.k_len]
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        q_ends, k_ends = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    hidden = torch.ones(inputs.key.shape[-3], dtype=torch.bool, device=inputs.key.device)
    for (q_first, q_last), (k_first, k_last) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        queries, keys = q_last - q_first, k_last - k_first
        floor = 0 if problem.left == UNBOUNDED else max(keys - queries - problem.left, 0)
        limit = keys if problem.right == UNBOUNDED else min(keys + problem.right, keys)
        hidden[k_first + floor : k_first + max(limit, 0)] = False
    return hidden


def _as_they_lie(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In autocast's dtype, and with what torch does to a view when it is read, which kernels would not see."""
    return tuple(t.resolve_neg() if isinstance(t, Tensor) else t for t in in_autocast_dtype(*tensors))


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """The state of queries that see no key."""
    *lead, rows, heads, _ = query.shape
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    return out, query.new_full((*lead, heads, rows), -torch.inf, dtype=torch.float32)
