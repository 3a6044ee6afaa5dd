"""decode_attention(): one or a few new queries against a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..backends import BY_NAME
from ..base.graph_break import graph_break
from ..base.kv_layouts import ContiguousKV, KVCache, PagedKV, QuantizedKV
from ..base.problem import (
    AUTO,
    UNBOUNDED,
    CallOptions,
    DecodeInputs,
    Problem,
    Request,
    Scores,
    decode_problem,
    resized_decode,
    sides_of,
)
from ..dispatch import call_key, launch_cache, validate
from ..dispatch import plan as planning
from ..dispatch.plan import Plan, parse, requested
from ..dispatch.plan import plan as make_plan
from ..dispatch.prepare import no_autocast, warn_if_lacking
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
    `attention`. A row whose length is 0 returns 0. It is not differentiable: with gradients enabled, tensors that
    require one are refused. On a GPU nothing synchronises: lengths and pages are read on the device, so a CUDA graph of
    a call serves a cache that grows.

    Args:
        query: `[B, Tq, Hq, D]`, fp16, bf16, fp32 or fp64; Tq is 1, or a few, as with draft tokens.
        cache: `ContiguousKV`, `PagedKV` or `QuantizedKV` of B rows, in the query's dtype.
        causal: a query sees no key behind it. `window=(left, right)`, `alibi_slopes`, `sink`, `softcap`, `scale`: as in
            `attention`.
        tree_mask: bool `[B, Tq, Tq]`: which of the new tokens each of them sees, in place of `causal` among them; they
            see all older ones. A query before position 0 is no token of its row and sees nothing.
        num_splits: splits of a row's keys that are computed in parallel and merged, at most one for each block of keys;
            None: planned to fill the GPU, and shared by rows by their lengths.
        batch_invariant: split keys at fixed positions, so that a row's result has the same bits whatever shares its
            batch. Costs speed where there are few long rows.
        return_lse: also return the log-sum-exp, `[B, Hq, Tq]`, fp32 (fp64 for fp64).
        out: `[B, Tq, Hq, Dv]` to write into. Like the workspace, it shares no memory with what is read.
        workspace: memory for the splits, from `decode_workspace`, for calls that run one after another. With it and
            `out` only the LSE is allocated, if it is returned.
        validate: True: check lengths and pages first, and refuse a length that is negative or beyond the capacity,
            and a visible page that does not exist. None: on a CPU only, since the check synchronises with a GPU.
            Unchecked, a length is clamped to the range, and a token whose page does not exist reads as NaN.
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
    inputs = DecodeInputs(query, cache, tree_mask, alibi_slopes, sink, out, return_lse, workspace)
    return _decode(inputs, (causal, window, softcap, scale, num_splits, batch_invariant, backend), validate)


def decode_contiguous(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    sink: Tensor | None,
    window: int,
    softcap: float,
    scale: float,
) -> Tensor:
    """`decode_attention` on `ContiguousKV(key, value, lengths)`, for a caller with new views in every call: those that
    lie as in a cached call are not checked anew, which takes the host as long as the rest.

    `window` includes the query's own key; 0: no window. A compiled graph calls it as an op, without a break.
    """
    if torch.compiler.is_compiling():
        return torch.ops.stream_attention.decode_static(query, key, value, lengths, sink, window, softcap, scale)
    sides = (window - 1, 0) if window else None
    cache = object.__new__(ContiguousKV)  # checked where the call is not in the launch cache
    fields = cache.__dict__
    fields["key"], fields["value"], fields["lengths"] = key, value, lengths
    inputs = DecodeInputs(query, cache, None, None, sink, None, False, None)
    result: Tensor = _decode(inputs, (True, sides, softcap, scale, None, False, AUTO), None, False)
    return result


_library = torch.library.Library("stream_attention", "FRAGMENT")
_library.define(
    "decode_static(Tensor query, Tensor key, Tensor value, Tensor lengths, Tensor? sink, int window, float softcap, "
    "float scale) -> Tensor"
)


def _fake_decode(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


_library.impl("decode_static", decode_contiguous, "CompositeExplicitAutograd")
torch.library.register_fake("stream_attention::decode_static", _fake_decode, lib=_library)


def _decode(inputs: DecodeInputs, options: tuple[Any, ...], look: bool | None, is_checked: bool = True) -> Any:
    """Compute a call: as it was prepared before, or prepared now, after a check of its cache if need be."""
    key = None
    if launch_cache.ENABLED and not call_key.is_watched():
        key, addresses = _key_of(inputs, options)
        if key is not None and (call := launch_cache.find(key, key[1], inputs, options)) is not None:
            return _run(call, addresses, inputs, options, look)
    if not is_checked:
        inputs.cache.__post_init__()
    _refuse_gradients(inputs.query, inputs.cache, inputs.alibi_slopes, inputs.sink)
    with torch.no_grad():  # as a decorator it takes 10 us more
        plan = _planned(inputs, options, look)
        if torch.compiler.is_compiling() and BY_NAME[plan.backend].compiles:
            return _decode_outside(inputs, options, False)
        compute = _prepare(plan, inputs)
        if key is not None:
            templates: _Templates | None = launch_cache.template_of(key)
            own_lengths = inputs.tree, inputs.out, inputs.workspace  # a call with one of these is no template
            if hasattr(compute, "resized") and all(t is None for t in own_lengths):
                templates = templates or _Templates()
                templates.add(key[1], plan, compute)
            launch_cache.keep(key, compute, templates)
        result, lse = compute(inputs)
        return result if lse is None else (result, lse)


_decode_outside = graph_break("launches of kernels are not traced")(_decode)


Key = tuple["_Layout", tuple[Any, ...]]
"""The key of a call: the layout of its cache but for lengths; these, the layouts of its other tensors, its options."""

Call = Callable[..., tuple[Tensor, Tensor | None]]
"""A prepared call: of its inputs and, where they are known, the addresses of its cache's tensors."""


def _run(call: Call, addresses: list[int], inputs: DecodeInputs, options: tuple[Any, ...], look: bool | None) -> Any:
    """Compute a cached call, labelled for a profiler, and compare it with one that is prepared anew if asked to."""
    if look is not False and (look is not None or inputs.query.is_cpu):
        left = UNBOUNDED if options[1] is None else options[1][0]
        validate.lengths_and_pages(inputs.cache, inputs.query.shape[1], left, look)
    found = launch_cache.labelled("decode", call, inputs, addresses)
    if launch_cache.COMPARE:
        given = inputs.out
        fresh = inputs._replace(out=None if given is None else torch.empty_like(given), workspace=None)
        with torch.no_grad():
            launch_cache.compare(found, _prepare(_planned(fresh, options, False), fresh)(fresh))
    return found if inputs.return_lse else found[0]


class _Templates:
    """Calls that were prepared, on caches that lie alike but for their lengths, from which those of other lengths are
    made: a growing cache has another capacity in each step, and draft tokens come in other numbers."""

    def __init__(self) -> None:
        self._calls: tuple[tuple[Hashable, Plan, Call], ...] = ()  # the newest first, each with its kind

    def add(self, lengths: tuple[Any, ...], plan: Plan, call: Call) -> None:
        self._calls = (_kind_of(lengths), plan, call), *self._calls[: _MOST_TEMPLATES - 1]

    def resized(self, lengths: tuple[Any, ...], inputs: DecodeInputs, options: tuple[Any, ...]) -> Call | None:
        """The call whose key has these lengths; None where it is to be checked and prepared in full."""
        kind = _kind_of(lengths)
        templates = [one for one in self._calls if one[0] == kind]
        cache: Any = inputs.cache
        key, value, *_ = cache.tensors
        q_len, capacity = inputs.query.shape[1], cache.capacity
        if not templates or not q_len or not 0 < capacity < _FARTHEST or key.shape[1] != value.shape[1]:
            return None
        *_, num_splits, batch_invariant, _ = options
        _, plan, _ = templates[0]
        problem = resized_decode(plan.problem, q_len, capacity)
        request = Request(num_splits=num_splits, batch_invariant=batch_invariant)
        config = BY_NAME[plan.backend].configure(problem, request)
        template: Any
        for _, _, template in templates:
            call: Call | None = template.resized(problem, inputs, config)
            if call is not None:
                return call
        return None


_MOST_TEMPLATES = 16
_FARTHEST = 1 << 30
"""A capacity that kernels do not support."""


def _kind_of(lengths: tuple[Any, ...]) -> Hashable:
    """What decides a call on a cache beside lengths and what its family has."""
    _, (dtype, shape, strides, device, offset), *others = lengths
    return dtype, shape[:1], shape[2:], strides[3:], device, offset, *others


class _Layout:
    """Metadata of the tensors of a cache, and what else it says of itself: a part of the key of its calls that the
    cache keeps. Hashed once."""

    __slots__ = ("_hash", "_metadata")

    def __init__(self, metadata: tuple[Any, ...]) -> None:
        self._metadata, self._hash = metadata, hash(metadata)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Layout) and self._metadata == other._metadata


def _layout_of(cache: Any) -> tuple[list[int], _Layout | None, tuple[Any, ...]]:
    """The addresses of a cache's tensors, their layout but for the lengths of rows, and these: those that it keeps,
    unless an address differs since. No layout where a tensor is more than its memory, or has none."""
    tensors = cache.tensors
    try:
        addresses = [_ABSENT if t is None else t.data_ptr() for t in tensors]
    except RuntimeError:  # such as a tensor of torch.func
        return [], None, ()
    known: tuple[list[int], _Layout, tuple[Any, ...]] | None = cache.__dict__.get("_layout")
    if known is not None and known[0] == addresses:
        return known
    for t in tensors:
        if t is not None and (type(t) is not Tensor or t.is_neg()):
            return addresses, None, ()
    if 0 in addresses:
        return addresses, None, ()
    metadata: list[Any] = [None if t is None else (t.dtype, t.shape, t.stride(), t.get_device()) for t in tensors]
    lengths: list[Any] = []
    if type(cache) is ContiguousKV:
        for place, (dtype, shape, strides, device) in enumerate(metadata[:2]):
            if len(shape) == 4:
                batch, tokens, heads, dim = shape
                metadata[place] = dtype, batch, heads, dim, strides[3], device
                lengths += tokens, strides
    found: tuple[Any, ...] = (type(cache), *metadata, *[at % 16 for at in addresses])
    if type(cache) is QuantizedKV:
        found += cache.residual, *[(side.format, side.dim, side.group, side.dtype) for side in (cache.key, cache.value)]
    known = cache.__dict__["_layout"] = addresses, _Layout(found), (*lengths,)
    return known


def _key_of(inputs: DecodeInputs, options: tuple[Any, ...]) -> tuple[Key | None, list[int]]:
    """The key of a call and the addresses of the cache's tensors. No key where a call must be checked first. Types are
    looked at because 1 equals True as a key, but is refused."""
    query, cache, tree, slopes, sink, out, return_lse, workspace = inputs
    causal, window, softcap, scale, num_splits, batch_invariant, backend = options
    if (
        type(cache) not in _CACHES
        or type(causal) is not bool
        or type(softcap) is not float
        or (scale is not None and type(scale) is not float)
        or (num_splits is not None and type(num_splits) is not int)
        or type(batch_invariant) is not bool
        or type(return_lse) is not bool
        or type(backend) is not str
        or (window is not None and (type(window) is not tuple or [*map(type, window)] != [int, int]))
    ):
        return _NO_KEY
    addresses, layout, lengths = _layout_of(cache)
    queries = call_key.layout_of(query)
    if layout is None or not queries or (queries[3] >= 0 and call_key.is_elsewhere(queries[3])):
        return _NO_KEY
    outs: Any = None
    scratch: Any = None
    if out is not None and not (outs := call_key.layout_of(out)):
        return _NO_KEY
    if type(workspace) is Tensor and not workspace.numel():
        scratch = _NO_SPLITS
    elif workspace is not None and not (scratch := call_key.layout_of(workspace)):
        return _NO_KEY
    if backend == AUTO:
        backend = planning._forced
    rest: tuple[Any, ...] = (
        lengths, queries, causal, window, softcap, scale, num_splits, batch_invariant, return_lse, backend, outs,
        scratch,
    )  # fmt: skip
    if tree is not None or slopes is not None or sink is not None:
        others = [None if t is None else call_key.layout_of(t) for t in (tree, slopes, sink)]
        if call_key.NO_LAYOUT in others:
            return _NO_KEY
        rest += (*others,)
    if torch.is_grad_enabled() and (
        query.requires_grad
        or cache.requires_grad
        or (slopes is not None and slopes.requires_grad)
        or (sink is not None and sink.requires_grad)
    ):
        return _NO_KEY  # to be refused
    return (layout, rest), addresses


_CACHES = frozenset((ContiguousKV, PagedKV, QuantizedKV))
_NO_KEY: tuple[None, list[int]] = None, []
_NO_SPLITS = "no splits"
"""Stands for the layout of a workspace without elements: there is nothing to merge."""

_ABSENT = -1
"""Stands for the address of a tensor that a cache does not have; 0 is that of one without memory."""


def _refuse_gradients(query: Any, cache: Any, alibi_slopes: Any, sink: Any) -> None:
    validate.without_gradient(
        "decode_attention", "attention()", query=query, cache=cache, alibi_slopes=alibi_slopes, sink=sink
    )


def _planned(inputs: DecodeInputs, options: tuple[Any, ...], look: bool | None) -> Plan:
    """Check a call, state its problem and plan it."""
    query, cache, tree, slopes, sink, _, return_lse, workspace = inputs
    causal, window, softcap, scale, num_splits, batch_invariant, backend = options
    validate.decoding(inputs)
    validate.options(CallOptions(causal, window, softcap, scale, return_lse=return_lse), query)
    sides = sides_of(causal and tree is None, window)
    validate.lengths_and_pages(cache, query.shape[1], sides.left, look)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    scores = Scores(scale, float(softcap), tree is not None, alibi=slopes is not None, sink=sink is not None)
    problem = decode_problem(query, cache, window=sides, scores=scores)
    plan = _plan(problem, num_splits, batch_invariant, backend)
    validate.workspace(workspace, query, workspace_numbers(plan.problem, plan.config))
    return plan


def _prepare(plan: Plan, inputs: DecodeInputs) -> Call:
    """The planned call on every cache that lies as this one does."""
    warn_if_lacking(plan)
    backend = BY_NAME[plan.backend]
    if backend.compiles:
        read = {name: getattr(inputs.cache, name) for name in inputs.cache.STORES}
        read |= {name: getattr(inputs, name) for name in ("query", "alibi_slopes", "sink")}
        hint = 'The kernels have no forward-mode derivative: pass backend="eager", or use attention().'
        validate.without_tangent(hint, **read)
    compute = backend.prepare_decode(plan.problem, _with_rows(inputs), plan.config)
    if backend.compiles:
        return compute if inputs.alibi_slopes is None else lambda inputs, *at: compute(_with_rows(inputs), *at)
    device = plan.problem.device.type

    def run(inputs: DecodeInputs, *_: Any) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad(), no_autocast(device):
            return compute(_with_rows(inputs))

    return run


def _with_rows(inputs: DecodeInputs) -> DecodeInputs:
    """Slopes as kernels read them, `[B or 1, Hq]`."""
    slopes = inputs.alibi_slopes
    return inputs if slopes is None or slopes.dim() == 2 else inputs._replace(alibi_slopes=slopes[None])


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
    validate.decoding(DecodeInputs(query, cache))
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
    given = validate.bound(decode_attention, query, cache, **arguments)
    _refuse_gradients(query, cache, given["alibi_slopes"], given["sink"])
    tensors = [given[name] for name in ("tree_mask", "alibi_slopes", "sink", "out", "return_lse", "workspace")]
    asked = "causal", "window", "softcap", "scale", "num_splits", "batch_invariant", "backend"
    inputs, options = DecodeInputs(query, cache, *tensors), tuple(given[name] for name in asked)
    plan = _planned(inputs, options, given["validate"])
    print(plan)
    return plan


def _plan(problem: Problem, num_splits: int | None, batch_invariant: bool, backend: str) -> Plan:
    validate.splits(num_splits, batch_invariant)
    request = parse(requested(backend))
    return make_plan(problem, request._replace(num_splits=num_splits, batch_invariant=batch_invariant))
