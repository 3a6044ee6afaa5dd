"""paged_attention(): ragged queries of many requests against keys in pages."""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.graph_break import graph_break
from ..base.problem import PagedInputs, PagedPlan
from ..dispatch import paged, validate, validate_paged
from ..dispatch.paged import PagedOptions
from ..dispatch.plan import Plan


class Options(TypedDict, total=False):
    page_table: Tensor | None
    kv_indptr: Tensor | None
    kv_indices: Tensor | None
    max_seqlen_q: Required[int]
    max_seqlen_k: int | None
    causal: bool | Tensor
    window: tuple[int, int] | None
    tree_mask: Tensor | None
    tree_offsets: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    softcap: float
    scale: float | None
    k_scale: Tensor | float | None
    v_scale: Tensor | float | None
    out: Tensor | None
    plan: PagedPlan | None
    batch_invariant: bool
    validate: bool | None
    backend: str


@overload
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
@validate.refuses_foreign
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *unexpected: Any,
    page_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    causal: bool | Tensor = True,
    window: tuple[int, int] | None = None,
    tree_mask: Tensor | None = None,
    tree_offsets: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    plan: PagedPlan | None = None,
    batch_invariant: bool = False,
    validate: bool | None = None,
    backend: str = "auto",
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each request over all its keys, which lie in pages: prompts, parts of prompts
    and single tokens in one call, as engines that serve models ask for it.

    The new tokens' keys are written first, as `write_kv` does, so `seqused_k` counts them: query t of request b, of
    q_b, stands at position `seqused_k[b] - q_b + t`, and sees what it sees in `attention`. A request may have no
    queries, or no keys: its rows are 0 then. Not differentiable. On a GPU nothing synchronises: offsets, lengths
    and pages are read on the device.

    Args:
        query: `[Nq, Hq, D]`, fp16, bf16, fp32 or fp64; request b is `query[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]`.
            Rows behind the last request are padding.
        key_pages: `[P, page, Hkv, D]`; value_pages: `[P, page, Hkv, Dv]`, pages of 1 to 1024 tokens in the query's
            dtype or in float8_e4m3fn. All strides are free but that of the last dim: pools with heads before tokens are
            passed as `.transpose(1, 2)`, keys and values in one row as `.split(D, -1)`.
        cu_seqlens_q: int32 `[B + 1]`, from 0, not decreasing.
        seqused_k: int32 `[B]`, the keys of each request.
        page_table: int32 `[B, W]`: position p of request b is token `p % page` of page `page_table[b, p // page]`.
            Entries behind a request's keys are not looked at, nor those of pages before the window of all its queries.
        kv_indptr, kv_indices: in place of a table, int32 `[B + 1]` and int32 or int64 `[entries]`: the pages of request
            b are `kv_indices[kv_indptr[b] : kv_indptr[b + 1]]`.
        max_seqlen_q: at least the queries of any request; tiles are chosen by it.
        max_seqlen_k: at least the keys of any request, for the check alone; None: what its pages can hold.
        causal: a query sees no key behind it; a bool or int32 tensor `[B]` says it of each request.
        window, alibi_slopes (`[Hq]` or `[B, Hq]`), sink, softcap, scale: as in `attention`.
        tree_mask, tree_offsets: which of its request's new tokens each of them sees, in place of `causal` among them,
            as for draft tokens: they see all older ones. bool `[elements]`, a mask `[q_b, q_b]` of every request that
            has one, one behind the other, and int32 or int64 `[B + 1]`: request b's is
            `tree_mask[tree_offsets[b] : tree_offsets[b + 1]]`, nothing where it has none.
        k_scale, v_scale: what keys and values in e4m3 are to be multiplied by: a number, or fp32 `[]`, `[Hkv]` or
            `[B, Hkv]`. As `write_kv` takes them.
        return_lse: also return the log-sum-exp, `[Hq, Nq]`, fp32 (fp64 for fp64).
        out: `[Nq, Hq, Dv]` to write into; rows of no request stay as they are. Without it they are 0. Their LSE is
            -inf.
        plan: from `paged_plan`, where other calls have the same offsets and lengths, as the layers of a model do.
        batch_invariant: a request's result has the same bits whatever other requests the call has. Costs speed where
            there are few long requests, and with long prompts.
        validate: True: check offsets, lengths and pages first. None: on a CPU only, since the check synchronises with a
            GPU. Unchecked, a length is clamped to what the request's pages hold, and a key whose page does not exist
            reads as NaN.
        backend: "auto", "triton" (a GPU) or "eager" (plain torch, request by request).

    Raises:
        ValueError, TypeError: a bad argument, before any work; the message names it with expected and actual.
        UnsupportedProblem: the backend that was named cannot; the message says why.

    >>> import torch
    >>> from stream_attention import paged_attention
    >>> key_pages, value_pages = torch.randn(2, 6, 16, 2, 32)  # six pages of 16 tokens
    >>> table = torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)
    >>> offsets, keys = torch.tensor([[0, 10, 11], [10, 20, 0]], dtype=torch.int32)  # a prompt of 10, and a token of 20
    >>> query = torch.randn(11, 8, 32)
    >>> paged_attention(query, key_pages, value_pages, offsets, keys[:2], page_table=table, max_seqlen_q=10).shape
    torch.Size([11, 8, 32])
    """
    if unexpected or foreign:
        validate_calls.unexpected(paged_attention, unexpected, foreign)
    if plan is not None and not isinstance(plan, PagedPlan):
        refuse("plan", "a PagedPlan, from paged_plan", type(plan).__name__, error=TypeError)
    inputs, options = _stated(
        query, key_pages, value_pages, cu_seqlens_q, seqused_k, page_table, kv_indptr, kv_indices, max_seqlen_q,
        max_seqlen_k, causal, window, tree_mask, tree_offsets, alibi_slopes, sink, softcap, scale, k_scale, v_scale,
        return_lse, out, batch_invariant, backend,
    )  # fmt: skip
    result, lse = paged.compute(inputs, options, validate, plan)
    return result if lse is None else (result, lse)


def paged_plan(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    page_table: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    batch_invariant: bool = False,
    out: PagedPlan | None = None,
    backend: str = "auto",
) -> PagedPlan:
    """List the work of a step once, for the `paged_attention` of all its layers: `paged_attention(..., plan=plan)`.

    The arguments are those of these calls, which may differ in what tensors hold, in `causal` and in all that is not
    named here, but have the same offsets, lengths and left side of the window. `out` is a plan to write over, made for
    as many queries and requests at least, so that a CUDA graph may read it.

    >>> import torch
    >>> from stream_attention import paged_attention, paged_plan
    >>> pages, table = torch.randn(6, 16, 2, 32), torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)
    >>> offsets, keys = torch.tensor([[0, 10, 11], [10, 20, 0]], dtype=torch.int32)
    >>> step = pages, pages, offsets, keys[:2]
    >>> more = {"page_table": table, "max_seqlen_q": 10}
    >>> plan = paged_plan(torch.randn(11, 8, 32), *step, **more)
    >>> [paged_attention(query, *step, **more, plan=plan).shape for query in torch.randn(2, 11, 8, 32)]
    [torch.Size([11, 8, 32]), torch.Size([11, 8, 32])]
    """
    pages = _pages_of(page_table, kv_indptr, kv_indices)
    inputs = PagedInputs(query, key_pages, value_pages, cu_seqlens_q, seqused_k, pages, kv_indptr)
    options = PagedOptions(max_seqlen_q, max_seqlen_k, causal, window, batch_invariant=batch_invariant, backend=backend)
    return _list_work(inputs, options, out)


@graph_break("the work of a step is listed outside of its graph")
def _list_work(inputs: PagedInputs, options: PagedOptions, out: PagedPlan | None) -> PagedPlan:
    call, read = paged.prepared(inputs, options, False)
    with torch.no_grad():
        plan: PagedPlan = call.plan(read, None if out is None else out.work)
        return plan


def _pages_of(page_table: Any, kv_indptr: Any, kv_indices: Any) -> Any:
    """The table, or the list; refuses both and neither."""
    if (page_table is None) == (kv_indices is None) or (kv_indptr is None) != (kv_indices is None):
        given = {"page_table": page_table, "kv_indptr": kv_indptr, "kv_indices": kv_indices}
        here = [name for name, t in given.items() if t is not None]
        refuse("page_table", "it, or kv_indptr and kv_indices", " and ".join(here) or "neither")
    return kv_indices if page_table is None else page_table


def _stated(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor | None,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    causal: Any,
    window: tuple[int, int] | None,
    tree_mask: Tensor | None,
    tree_offsets: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    softcap: float,
    scale: float | None,
    k_scale: Any,
    v_scale: Any,
    return_lse: bool,
    out: Tensor | None,
    batch_invariant: bool,
    backend: str,
) -> tuple[PagedInputs, PagedOptions]:
    """The tensors of a call, and what else it is told."""
    pages: Any = page_table
    if page_table is None or kv_indptr is not None or kv_indices is not None:
        pages = _pages_of(page_table, kv_indptr, kv_indices)
    each = k_each = v_each = None
    if isinstance(causal, Tensor):
        each, causal = causal, True
    k_number = v_number = 1.0
    if k_scale is not None or v_scale is not None:
        k_each, k_number = _scale("k_scale", k_scale, key_pages)
        v_each, v_number = _scale("v_scale", v_scale, key_pages)
    inputs = PagedInputs(
        query, key_pages, value_pages, cu_seqlens_q, seqused_k, pages, kv_indptr, alibi_slopes, sink, each, tree_mask,
        tree_offsets, k_each, v_each, out, return_lse,
    )  # fmt: skip
    options = PagedOptions(
        max_seqlen_q, max_seqlen_k, causal, window, softcap, scale, k_number, v_number, batch_invariant, backend
    )
    return inputs, options


def _scale(name: str, given: Any, pages: Tensor) -> tuple[Tensor | None, float]:
    """What pages are multiplied by: a tensor, and a number."""
    if given is None:
        return None, 1.0
    scale = validate_paged.scale(name, given, pages)
    return (scale, 1.0) if isinstance(scale, Tensor) else (None, scale)


def explain_paged(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, **arguments: Any
) -> Plan:
    """Print which kernel would run for `paged_attention` with these arguments, and how; compute nothing.

    >>> import torch
    >>> from stream_attention import explain_paged
    >>> pages, table = torch.randn(6, 16, 2, 32), torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)
    >>> offsets, keys = torch.tensor([[0, 10, 11], [10, 20, 0]], dtype=torch.int32)
    >>> plan = explain_paged(
    ...     torch.randn(11, 8, 32), pages, pages, offsets, keys[:2], page_table=table, max_seqlen_q=10
    ... )  # doctest: +ELLIPSIS
    paged     B=2 Tq<=10 Hq=8 Hkv=2 D=32 Dv=32 float32 on cpu, pages of 16, up to 32 keys
    backend   eager: ...
    not       gluon: does not support ragged queries on pages
    not       triton: ...
    """
    given = validate_calls.bound(paged_attention, query, key_pages, value_pages, cu_seqlens_q, seqused_k, **arguments)
    inputs, options = _stated(**{name: given[name] for name in signature(_stated).parameters})
    plan = paged.planned_for(inputs, options)
    print(plan)
    return plan


validate_calls = validate  # an argument has the same name
