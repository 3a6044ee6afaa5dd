"""paged_attention(): ragged queries of many requests against keys in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Required, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..backends import BY_NAME
from ..base.errors import refuse
from ..base.graph_break import graph_break
from ..base.kv_layouts import checks
from ..base.problem import AUTO, CallOptions, PagedInputs, PagedPlan, Problem, Scores, paged_problem, sides_of
from ..dispatch import call_key, launch_cache, validate, validate_paged
from ..dispatch import plan as planning
from ..dispatch.plan import Plan, parse, requested
from ..dispatch.plan import plan as make_plan
from ..dispatch.prepare import no_autocast, warn_if_lacking
from ..gpu.paged_tuning import MOST_KEYS, rounded_queries


class PagedOptions(TypedDict, total=False):
    page_table: Tensor | None
    kv_indptr: Tensor | None
    kv_indices: Tensor | None
    max_seqlen_q: Required[int]
    max_seqlen_k: int | None
    causal: bool
    window: tuple[int, int] | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    softcap: float
    scale: float | None
    out: Tensor | None
    plan: PagedPlan | None
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
    **options: Unpack[PagedOptions],
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
    **options: Unpack[PagedOptions],
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
    **options: Unpack[PagedOptions],
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
    causal: bool = True,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    plan: PagedPlan | None = None,
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
            dtype. All strides are free but that of the last dim: pools with heads before tokens are passed as
            `.transpose(1, 2)`, keys and values in one row as `.split(D, -1)`.
        cu_seqlens_q: int32 `[B + 1]`, from 0, not decreasing.
        seqused_k: int32 `[B]`, the keys of each request.
        page_table: int32 `[B, W]`: position p of request b is token `p % page` of page `page_table[b, p // page]`.
            Entries behind a request's keys are not looked at, nor those of pages before the window of all its queries.
        kv_indptr, kv_indices: in place of a table, int32 `[B + 1]` and int32 or int64 `[entries]`: the pages of request
            b are `kv_indices[kv_indptr[b] : kv_indptr[b + 1]]`.
        max_seqlen_q: at least the queries of any request; tiles are chosen by it.
        max_seqlen_k: at least the keys of any request, for the check alone; None: what its pages can hold.
        causal, window, alibi_slopes (`[Hq]` or `[B, Hq]`), sink, softcap, scale: as in `attention`.
        return_lse: also return the log-sum-exp, `[Hq, Nq]`, fp32 (fp64 for fp64).
        out: `[Nq, Hq, Dv]` to write into; rows of no request stay as they are. Without it they are 0. Their LSE is
            -inf.
        plan: from `paged_plan`, where other calls have the same offsets and lengths, as the layers of a model do.
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
    table: Any = page_table
    if table is None or kv_indptr is not None or kv_indices is not None:
        table = _pages_of(page_table, kv_indptr, kv_indices)
    inputs = PagedInputs(
        query, key_pages, value_pages, cu_seqlens_q, seqused_k, table, kv_indptr, alibi_slopes, sink, out, return_lse
    )
    if plan is not None and not isinstance(plan, PagedPlan):
        refuse("plan", "a PagedPlan, from paged_plan", type(plan).__name__, error=TypeError)
    options = causal, window, softcap, scale, backend
    result, lse = _paged(inputs, options, (max_seqlen_q, max_seqlen_k), validate, plan)
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
    table = _pages_of(page_table, kv_indptr, kv_indices)
    inputs = PagedInputs(query, key_pages, value_pages, cu_seqlens_q, seqused_k, table, kv_indptr)
    call, read = _prepared(inputs, (causal, window, 0.0, None, backend), (max_seqlen_q, max_seqlen_k), False)
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


validate_calls = validate  # an argument has the same name


def _paged(
    inputs: PagedInputs, options: tuple[Any, ...], longest: tuple[Any, Any], look: bool | None, plan: PagedPlan | None
) -> tuple[Tensor, Tensor | None]:
    """Compute a call."""
    if torch.compiler.is_compiling():
        return _paged_outside(inputs, options, longest, look, plan)
    call, read = _prepared(inputs, options, longest, look)
    with torch.no_grad(), no_autocast(inputs.query.device.type):
        found: tuple[Tensor, Tensor | None] = launch_cache.labelled("paged", call, read, plan)
        if launch_cache.COMPARE:
            fresh, read = _prepared(inputs._replace(out=None), options, longest, look, anew=True)
            rows = slice(None) if inputs.out is None else slice(int(inputs.cu_seqlens_q[-1]))
            out, lse = fresh(read, None)
            launch_cache.compare((found[0][rows], found[1]), (out[rows], lse))
        return found


def _prepared(
    inputs: PagedInputs, options: tuple[Any, ...], longest: tuple[Any, Any], look: bool | None, anew: bool = False
) -> tuple[Any, PagedInputs]:
    """A call as it was prepared before, or prepared now, and what it reads."""
    key, lengths = None, inputs.seqused_k
    looks = isinstance(lengths, Tensor) and checks.should_validate(look, lengths)
    if launch_cache.ENABLED and not looks and not anew and not call_key.is_watched():
        key = _key_of(inputs, options, longest)
        if key is not None and (call := launch_cache.find(key)) is not None:
            return call, _as_read(inputs)
    validate_paged.tensors(inputs, *longest)
    validate.without_gradient(
        "paged_attention",
        "varlen_attention()",
        query=inputs.query,
        key_pages=inputs.key_pages,
        value_pages=inputs.value_pages,
        alibi_slopes=inputs.alibi_slopes,
        sink=inputs.sink,
    )
    planned = _planned(inputs, options, longest)
    if looks:
        validate_paged.values(inputs, longest[0], longest[1], planned.problem.left)
    warn_if_lacking(planned)
    backend, read = BY_NAME[planned.backend], _as_read(inputs)
    call = backend.prepare_paged(planned.problem, read, planned.config)
    if key is not None and backend.compiles:
        launch_cache.keep(key, call)
    return call, read


_paged_outside = graph_break("launches of kernels are not traced")(_paged)


def _as_read(inputs: PagedInputs) -> PagedInputs:
    """As kernels read them: slopes `[B or 1, Hq]`, small tensors contiguous, no negated view, and one page at least,
    which is looked up where a request has no keys."""
    slopes, sink, table = inputs.alibi_slopes, inputs.sink, inputs.page_table
    if inputs.kv_indptr is not None and not table.numel():
        inputs = inputs._replace(page_table=table.new_zeros(1), kv_indptr=torch.zeros_like(inputs.kv_indptr))
    if inputs.query.is_neg():
        inputs = inputs._replace(query=inputs.query.resolve_neg())
    if slopes is None and (sink is None or sink.is_contiguous()):
        return inputs
    slopes = slopes if slopes is None or slopes.dim() == 2 else slopes[None]
    return inputs._replace(
        alibi_slopes=None if slopes is None else slopes.contiguous(), sink=None if sink is None else sink.contiguous()
    )


def _planned(inputs: PagedInputs, options: tuple[Any, ...], longest: tuple[Any, Any]) -> Plan:
    """State the problem of tensors that were checked, and plan it."""
    causal, window, softcap, scale, backend = options
    query, key, *_ = inputs
    validate.options(CallOptions(causal, window, softcap, scale, return_lse=inputs.return_lse), query)
    most_keys = min(inputs.page_table.shape[-1] * key.shape[1], MOST_KEYS)
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    scores = Scores(scale, float(softcap), alibi=inputs.alibi_slopes is not None, sink=inputs.sink is not None)
    problem: Problem = paged_problem(inputs, longest[0], most_keys, window=sides_of(causal, window), scores=scores)
    return make_plan(problem, parse(requested(backend)))


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
    given = validate.bound(paged_attention, query, key_pages, value_pages, cu_seqlens_q, seqused_k, **arguments)
    tensors = [given[name] for name in ("query", "key_pages", "value_pages", "cu_seqlens_q", "seqused_k")]
    pages = _pages_of(*[given[name] for name in ("page_table", "kv_indptr", "kv_indices")])
    others = [given[name] for name in ("kv_indptr", "alibi_slopes", "sink", "out", "return_lse")]
    options = tuple(given[name] for name in ("causal", "window", "softcap", "scale", "backend"))
    inputs = PagedInputs._make((*tensors, pages, *others))
    longest = given["max_seqlen_q"], given["max_seqlen_k"]
    validate_paged.tensors(inputs, *longest)
    plan = _planned(inputs, options, longest)
    print(plan)
    return plan


def _key_of(inputs: PagedInputs, options: tuple[Any, ...], longest: tuple[Any, Any]) -> Any:
    """The key of a call; None where it must be checked first. How many queries, requests and listed pages there are is
    no part of it."""
    causal, window, softcap, scale, backend = options
    if (
        type(causal) is not bool
        or type(softcap) is not float
        or (window is not None and (type(window) is not tuple or [*map(type, window)] != [int, int]))
        or (scale is not None and type(scale) is not float)
        or type(inputs.return_lse) is not bool
        or type(backend) is not str
        or any(type(n) is not int or n < 0 for n in longest if n is not None)
        or longest[0] is None
    ):
        return None
    tensors = inputs[:-1]
    if not all(t is None or isinstance(t, Tensor) for t in tensors):
        return None
    layouts = [None if t is None else call_key.layout_of(t) for t in tensors]
    query, key, value, offsets, lengths, table, indptr, slopes, sink, out = layouts
    if call_key.NO_LAYOUT in layouts or not query or not offsets or not lengths or not table:
        return None
    if call_key.is_elsewhere(query[3]) or (torch.is_grad_enabled() and any(t.requires_grad for t in _given(tensors))):
        return None
    rows, requests, integers = query[1][:1], lengths[1], (offsets, lengths, table, indptr)
    if not rows or len(requests) != 1 or offsets[1] != (requests[0] + 1,) or (out and out[1][:1] != rows):
        return None  # to be refused, as what follows
    if (indptr[1] != offsets[1] or len(table[1]) != 1) if indptr else table[1][:-1] != requests:
        return None
    if any(t and t[2][-1:] != (1,) for t in integers) or (slopes and len(slopes[1]) == 2 and slopes[1][:1] != requests):
        return None
    sizes = [None if t is None else (t[0], len(t[1]), t[1][1:], t[2], *t[3:]) for t in (query, out, slopes)]
    others = [None if t is None else (t[0], len(t[1]), t[2], *t[3:]) for t in integers]
    if backend == AUTO:
        backend = planning._forced
    # Strides of dims of size 1 are not looked at: one query, or one request, is another call.
    asked = *options[:-1], backend, inputs.return_lse, rounded_queries(longest[0]), rows == (1,), requests == (1,)
    return ("paged", *sizes, key, value, *others, sink, *asked), ()


def _given(tensors: Sequence[Any]) -> list[Tensor]:
    return [t for t in tensors if t is not None]
