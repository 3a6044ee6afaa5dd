"""decode_attention(): one or a few new queries against a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from inspect import signature
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import BY_NAME
from ..base.graph_break import uncompiled
from ..base.kv_layouts import ContiguousKV, KVCache
from ..base.kv_layouts.base import Cache
from ..base.problem import (
    KV,
    UNBOUNDED,
    DecodeInputs,
    Operands,
    Positions,
    Problem,
    Scores,
    Shape,
    Window,
    hardware_of,
)
from ..dispatch import plan as planning
from ..dispatch import validate
from ..dispatch.plan import Plan, parse, requested
from ..dispatch.plan import plan as make_plan
from ..dispatch.prepare import no_autocast
from ..dispatch.validate import unexpected as refuse_unexpected
from ..gpu.decode_tuning import workspace_numbers


class DecodeOptions(TypedDict, total=False):
    causal: bool
    window: tuple[int, int] | None
    tree_mask: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    softcap: float
    scale: float | None
    num_splits: int | None
    batch_invariant: bool
    out: Tensor | None
    workspace: Tensor | None
    validate: bool | None
    backend: str


@overload
def decode_attention(
    query: Tensor, cache: KVCache, *, return_lse: Literal[False] = False, **options: Unpack[DecodeOptions]
) -> Tensor: ...
@overload
def decode_attention(
    query: Tensor, cache: KVCache, *, return_lse: Literal[True], **options: Unpack[DecodeOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def decode_attention(
    query: Tensor, cache: KVCache, *, return_lse: bool, **options: Unpack[DecodeOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@validate.refuses_foreign
def decode_attention(
    query: Tensor,
    cache: KVCache,
    *unexpected: Any,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    tree_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    validate: bool | None = None,
    backend: str = "auto",
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each row over everything its cache holds.

    The tokens are appended first, so a row's length counts them: query t of row b stands at position
    `lengths[b] - Tq + t`, before position 0 if the row has fewer keys than queries, and sees what it sees in
    `attention`. A row whose length is 0 returns 0. No gradient flows through it: what requires one is refused while
    gradients are on. On a GPU nothing synchronises: lengths and pages are read on the device, so a CUDA graph of a call
    serves a cache that grows.

    Args:
        query: `[B, Tq, Hq, D]`, fp16, bf16, fp32 or fp64; Tq is 1, or a few that were guessed ahead.
        cache: `ContiguousKV`, `PagedKV` or `QuantizedKV` of B rows, in the query's dtype.
        causal: a query sees no key behind it. `window=(left, right)`, `alibi_slopes`, `sink`, `softcap`, `scale`: as in
            `attention`.
        tree_mask: bool `[B, Tq, Tq]`: which of the new tokens each of them sees, in place of `causal` among them; they
            see all older ones. A query before position 0 is no token of its row and sees nothing.
        num_splits: parts of a row's keys that run side by side and are merged, at most one for each block of keys;
            None: planned to fill the GPU.
        batch_invariant: keys are split in the same places whatever the batch, so that a row's result has the same bits
            whatever shares its batch. Costs speed where few rows are long.
        return_lse: also return the log-sum-exp, `[B, Hq, Tq]`, fp32 (fp64 for fp64).
        out: `[B, Tq, Hq, Dv]` to write into. Like the workspace, it shares no memory with what is read.
        workspace: room for parts, made by `decode_workspace`, for calls that run one after another. With it and `out`
            nothing is allocated (but the LSE, if that is wanted).
        validate: True: look at lengths and pages first, and refuse a length that is negative or beyond the capacity,
            and a page that is needed and does not exist. None: on a CPU; on a GPU that would synchronise, so there a
            length counts as the nearest one in range, and a token whose page does not exist reads as NaN.
        backend: "auto", "gluon" (quantised caches on a Hopper), "triton" (a GPU) or "eager" (plain torch, any device).

    Raises:
        ValueError, TypeError: a bad argument, before any work; the message names it with expected and actual.
        UnsupportedProblem: the backend that was named cannot; the message says why.

    >>> import torch
    >>> from stream_attention import ContiguousKV, decode_attention
    >>> key, value = torch.randn(2, 2, 100, 4, 16)
    >>> cache = ContiguousKV(key, value, lengths=torch.tensor([7, 100], dtype=torch.int32))
    >>> decode_attention(torch.randn(2, 1, 8, 16), cache).shape
    torch.Size([2, 1, 8, 16])
    """
    if unexpected or foreign:
        refuse_unexpected(decode_attention, unexpected, foreign)
    facts = None
    plain = tree_mask is None and alibi_slopes is None and sink is None and (validate is None or validate is False)
    if plain and isinstance(cache, Cache) and not (torch.is_grad_enabled() and cache.requires_grad):
        splitting = num_splits, batch_invariant, backend
        facts = _facts(query, causal, window, softcap, scale, splitting, return_lse, out, workspace)
        if facts is not None:
            addresses = cache.addresses
            known = _known(cache, addresses, facts)
            if known is not None:
                return known(query, addresses, out, workspace)
    _refuse_gradients(query, cache, alibi_slopes, sink)
    with torch.no_grad():  # as a decorator it takes 10 us more
        plan = _planned(
            query, cache, causal, window, tree_mask, alibi_slopes, sink, softcap, scale,
            num_splits, batch_invariant, return_lse, out, workspace, validate, backend,
        )  # fmt: skip
        slopes = alibi_slopes[None] if alibi_slopes is not None and alibi_slopes.dim() == 1 else alibi_slopes
        return _decode(plan, DecodeInputs(query, cache, tree_mask, slopes, sink, out, return_lse, workspace), facts)


def _refuse_gradients(query: Any, cache: Any, alibi_slopes: Any, sink: Any) -> None:
    validate.without_gradient(
        "decode_attention", "attention()", query=query, cache=cache, alibi_slopes=alibi_slopes, sink=sink
    )


def decode_again(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    window: tuple[int, int] | None,
    softcap: float,
    scale: float,
) -> Tensor | None:
    """`decode_attention` on `ContiguousKV(key, value, lengths)`, if one that lies as it was decoded before; else None.

    For a caller who has tensors alone, and new views of them at each call: to make the cache, with the checks that it
    passed before, takes the host longer than the rest.
    """
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        return None
    facts = _facts(query, True, window, softcap, scale, (None, False, "auto"), False, None, None)
    known = None if facts is None else _by_layout.get((_lies(key, value, lengths), facts))
    if known is None:
        return None
    return known(query, (key.data_ptr(), value.data_ptr(), lengths.data_ptr()), None, None)


def _facts(
    query: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    splitting: tuple[Any, ...],
    return_lse: Any,
    out: Any,
    workspace: Any,
) -> Hashable | None:
    """All that decides how a plain call on a cache is computed, but for the cache; None where it must take the ordinary
    way.

    Checking a call, planning it and telling it to a kernel take the host longer than a short one takes a GPU. A cache
    keeps the launches of its calls, and one with the facts of an earlier call goes straight to that. Types are looked
    at because 1 equals True in a dict, but is refused.
    """
    num_splits, batch_invariant, backend = splitting
    if (
        torch.compiler.is_compiling()
        or type(query) is not Tensor
        or not query.is_cuda
        or query.is_neg()
        or type(causal) is not bool
        or (window is not None and not (type(window) is tuple and [*map(type, window)] == [int, int]))
        or type(softcap) is not float
        or (scale is not None and type(scale) is not float)
        or (num_splits is not None and type(num_splits) is not int)
        or type(batch_invariant) is not bool
        or type(return_lse) is not bool
        or type(backend) is not str
        or (out is not None and (type(out) is not Tensor or out.is_neg()))
        or (workspace is not None and type(workspace) is not Tensor)
        or query.get_device() != torch._C._cuda_getDevice()
        or (torch.is_grad_enabled() and query.requires_grad)
        or forward_ad._current_level >= 0
    ):
        return None
    return (
        *_layout(query),
        causal,
        window,
        softcap,
        scale,
        splitting,
        planning._forced,
        return_lse,
        None if out is None else _layout(out),
        None if workspace is None else _layout(workspace),
    )


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16


def _lies(key: Any, value: Any, lengths: Any) -> Hashable | None:
    """How a `ContiguousKV` of these tensors lies: beside the facts of a call and the addresses all that its launch
    depends on. None where a tensor may be more than its memory."""
    for t in (key, value, lengths):
        if t is not None and (type(t) is not Tensor or t.is_neg()):
            return None
    return _layout(key), _layout(value), None if lengths is None else _layout(lengths)


Compute = Callable[[Tensor, tuple[int, ...], Tensor | None, Tensor | None], Any]
"""A call that was made before: query, addresses of the cache, out, workspace."""

MOST_CALLS = 256
"""Kinds of call that are remembered, of a cache and by layout, before all are forgotten."""

_by_layout: dict[Hashable, Compute] = {}
"""Calls on every `ContiguousKV` there was, by how it lay: some are made anew for each call, of memory that stays.

The launch is told the addresses of the call at hand. So it does not matter where a cache lies, whether the one that
was decoded first still exists, or who has its memory now; and nothing here keeps a tensor.
"""


def _known(cache: Cache, addresses: tuple[int, ...], facts: Hashable) -> Compute | None:
    """The call with these facts on this cache, or on one that lay as it does."""
    calls = cache.__dict__.setdefault("_calls", {})
    known = calls.get((addresses, facts))
    if known is None and isinstance(cache, ContiguousKV):
        known = _by_layout.get((_lies(cache.key, cache.value, cache.lengths), facts))
        if known is not None:
            _keep(calls, (addresses, facts), known)  # where it is found sooner, should the cache stay
    return known


def _remember(cache: Cache, facts: Hashable, repeat: Any, out: Tensor, lse: Tensor | None, numbers: int) -> None:
    """Keep a call that was computed, with room for `numbers` of its parts, with the cache that it read and, if others
    may lie as that does, by its layout."""
    out_shape, lse_shape, float32 = out.shape, None if lse is None else lse.shape, torch.float32

    def compute(query: Tensor, addresses: tuple[int, ...], out: Tensor | None, workspace: Tensor | None) -> Any:
        if out is None:
            out = query.new_empty(out_shape)
        else:
            torch.autograd.graph.increment_version(out)
        lse = None if lse_shape is None else query.new_empty(lse_shape, dtype=float32)
        if numbers and workspace is None:
            workspace = query.new_empty(numbers, dtype=float32)
        repeat(query, addresses, out, lse, workspace)
        return out if lse is None else (out, lse)

    _keep(cache.__dict__.setdefault("_calls", {}), (cache.addresses, facts), compute)
    lies = _lies(cache.key, cache.value, cache.lengths) if isinstance(cache, ContiguousKV) else None
    if lies is not None:
        _keep(_by_layout, (lies, facts), compute)


def _keep(calls: dict[Hashable, Compute], facts: Hashable, compute: Compute) -> None:
    if len(calls) >= MOST_CALLS:
        calls.clear()
    calls[facts] = compute


def _planned(
    query: Tensor,
    cache: KVCache,
    causal: bool,
    window: tuple[int, int] | None,
    tree_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    softcap: float,
    scale: float | None,
    num_splits: int | None,
    batch_invariant: bool,
    return_lse: bool,
    out: Tensor | None,
    workspace: Tensor | None,
    look: bool | None,
    backend: str,
) -> Plan:
    """Check a call, state its problem and plan it."""
    validate.decoding(query, cache, tree_mask, alibi_slopes, sink, out)
    validate.options(causal, window, softcap, scale, 0.0, None, None, return_lse, query)
    left, right = window or (UNBOUNDED, UNBOUNDED)
    if causal and tree_mask is None:
        right = 0 if right == UNBOUNDED else min(right, 0)
    validate.lengths_and_pages(cache, query.shape[1], left, look)
    scores = Scores(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        softcap=float(softcap),
        mask=tree_mask is not None,
        alibi=alibi_slopes is not None,
        sink=sink is not None,
    )
    plan = _plan(
        decode_problem(query, cache, window=Window(left, right), scores=scores), num_splits, batch_invariant, backend
    )
    validate.workspace(workspace, query, workspace_numbers(plan.problem, plan.config))
    return plan


def _decode(plan: Plan, inputs: DecodeInputs, facts: Hashable | None) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a planned call, and remember it if it has facts."""
    backend = BY_NAME[plan.backend]
    if backend.compiles:
        validate.without_tangent(inputs.query, inputs.cache, inputs.alibi_slopes, inputs.sink)
        result, lse = _launch(plan, inputs, facts)
    else:
        with no_autocast(inputs.query.device.type):
            result, lse, _ = backend.decode(plan.problem, inputs, plan.config)
    return result if lse is None else (result, lse)


@uncompiled("launches of kernels are not traced")
def _launch(plan: Plan, inputs: DecodeInputs, facts: Hashable | None) -> tuple[Tensor, Tensor | None]:
    """Compute by kernels that are launched, and remember the call if it has facts."""
    if inputs.out is not None:
        torch.autograd.graph.increment_version(inputs.out)
    result, lse, repeat = BY_NAME[plan.backend].decode(plan.problem, inputs, plan.config)
    if facts is not None and repeat is not None:
        _remember(inputs.cache, facts, repeat, result, lse, workspace_numbers(plan.problem, plan.config))
    return result, lse


def decode_workspace(
    query: Tensor,
    cache: KVCache,
    *,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Room for the parts of calls like this one: `decode_attention(query, cache, ..., workspace=...)`.

    Serves calls with queries and caches of these shapes and the same `num_splits`, `batch_invariant` and `backend`,
    whatever else they ask for, one after another: what two streams do at once needs two. It holds nothing between them.

    >>> import torch
    >>> from stream_attention import ContiguousKV, decode_workspace
    >>> cache = ContiguousKV(*torch.randn(2, 2, 100, 4, 16))
    >>> decode_workspace(torch.randn(2, 1, 8, 16), cache)  # plain torch on a CPU needs none
    tensor([])
    """
    validate.decoding(query, cache, None, None, None, None)
    plan = _plan(decode_problem(query, cache), num_splits, batch_invariant, backend)
    return query.new_empty(workspace_numbers(plan.problem, plan.config), dtype=torch.float32)


def explain_decode(query: Tensor, cache: KVCache, **arguments: Any) -> Plan:
    """Print which kernel would run for `decode_attention(query, cache, **arguments)`, and how; compute nothing.

    >>> import torch
    >>> from stream_attention import ContiguousKV, explain_decode
    >>> plan = explain_decode(torch.randn(2, 1, 8, 16), ContiguousKV(*torch.randn(2, 2, 100, 4, 16)))
    ... # doctest: +ELLIPSIS
    decode    B=2 Tq=1 Hq=8 Hkv=4 D=16 Dv=16 float32 on cpu, contiguous, up to 100 keys
    backend   eager: torch's CPU flash op over the keys of each row; with a softcap plain torch, tiles of 1024 keys
    not       gluon: supports only quantised caches
    not       triton: ...
    """
    try:
        bound = signature(decode_attention).bind(query, cache, **arguments)
    except TypeError as error:
        if unknown := arguments.keys() - signature(decode_attention).parameters.keys():
            refuse_unexpected(decode_attention, (), sorted(unknown))
        raise TypeError(f"decode_attention() {error}") from None
    bound.apply_defaults()
    given = [value for name, value in bound.arguments.items() if name not in ("unexpected", "foreign")]
    _refuse_gradients(query, cache, bound.arguments["alibi_slopes"], bound.arguments["sink"])
    plan = _planned(*given)
    print(plan)
    return plan


def decode_problem(query: Tensor, cache: KVCache, **asked: Any) -> Problem:
    """What a call on a cache has to compute; `asked` are the window and the scores of its problem."""
    batch, q_len, q_heads, head_dim = query.shape
    capacity = cache.capacity
    return Problem(
        Shape(batch, q_len, q_heads, cache.kv_heads, head_dim, cache.value_dim),
        KV("cache", capacity, cache.page_size, cache.coding),
        Operands(query.dtype),
        hardware_of(query.device),
        positions=Positions(capacity - q_len, q_base=capacity - q_len),  # of a row that is full
        **asked,
    )


def _plan(problem: Problem, num_splits: int | None, batch_invariant: bool, backend: str) -> Plan:
    validate.splits(num_splits, batch_invariant)
    request = parse(requested(backend))
    return make_plan(problem, request._replace(num_splits=num_splits, batch_invariant=batch_invariant))
