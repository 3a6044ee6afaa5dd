"""The road of a call of ragged queries on paged keys: checked and planned once, found again by its metadata.

`stream_attention::paged` and `::paged_into` are the same call as library ops, which torch.compile sees: lengths are
sizes and integers of a graph there, so a length that is new compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import BY_NAME
from ..base.kv_layouts import checks
from ..base.problem import AUTO, CallOptions, PagedInputs, PagedPlan, Problem, Request, Scores, paged_problem
from ..gpu.paged_tuning import MOST_KEYS, rounded_queries
from . import call_key, launch_cache, validate, validate_paged
from . import plan as planning
from .plan import Plan, parse, requested
from .plan import plan as make_plan
from .prepare import no_autocast, warn_if_lacking


class PagedOptions(NamedTuple):
    """What a call is told beside its tensors."""

    max_seqlen_q: int
    max_seqlen_k: int | None = None
    causal: bool = True  # requests that have no tree; not looked at where a tensor says it
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    scale: float | None = None
    k_scale: float = 1.0  # of all keys in e4m3
    v_scale: float = 1.0
    batch_invariant: bool = False
    backend: str = AUTO


def compute(
    inputs: PagedInputs, options: PagedOptions, look: bool | None, plan: PagedPlan | None
) -> tuple[Tensor, Tensor | None]:
    """Out and, if wanted, LSE."""
    if torch.compiler.is_compiling() or call_key.is_watched():
        return _by_op(inputs, options, look, plan)
    return _compute(inputs, options, look, plan)


def _compute(
    inputs: PagedInputs, options: PagedOptions, look: bool | None, plan: PagedPlan | None
) -> tuple[Tensor, Tensor | None]:
    call, read = prepared(inputs, options, look)
    with torch.no_grad(), no_autocast(inputs.query.device.type):
        found: tuple[Tensor, Tensor | None] = launch_cache.labelled("paged", call, read, plan)
        if launch_cache.COMPARE:
            fresh, read = prepared(inputs._replace(out=None), options, look, anew=True)
            rows = slice(None) if inputs.out is None else slice(int(inputs.cu_seqlens_q[-1]))
            out, lse = fresh(read, None)
            launch_cache.compare((found[0][rows], found[1]), (out[rows], lse))
        return found


def prepared(
    inputs: PagedInputs, options: PagedOptions, look: bool | None, anew: bool = False
) -> tuple[Any, PagedInputs]:
    """A call as it was prepared before, or prepared now, and what it reads."""
    key, lengths = None, inputs.seqused_k
    looks = isinstance(lengths, Tensor) and checks.should_validate(look, lengths)
    if launch_cache.ENABLED and not looks and not anew:
        key = _key_of(inputs, options)
        if key is not None and (call := launch_cache.find(key)) is not None:
            return call, _as_read(inputs)
    planned = planned_for(inputs, options)
    if looks:
        validate_paged.values(inputs, options.max_seqlen_q, options.max_seqlen_k, planned.problem.left)
    warn_if_lacking(planned)
    backend, read = BY_NAME[planned.backend], _as_read(inputs)
    call = backend.prepare_paged(planned.problem, read, planned.config)
    if key is not None and backend.compiles:
        launch_cache.keep(key, call)
    return call, read


def check(inputs: PagedInputs, options: PagedOptions) -> None:
    """Check all but the values of integers."""
    validate_paged.tensors(inputs, options.max_seqlen_q, options.max_seqlen_k)
    given = {name: t for name, t in inputs._asdict().items() if isinstance(t, Tensor)}
    validate.without_gradient("paged_attention", "varlen_attention()", **given)
    validate.without_tangent("paged_attention has no forward-mode derivative; use varlen_attention().", **given)
    validate.options(CallOptions.of({**options._asdict(), "return_lse": inputs.return_lse}), inputs.query)
    validate.flags(batch_invariant=options.batch_invariant)


def planned_for(inputs: PagedInputs, options: PagedOptions) -> Plan:
    """Check a call, but for the values of its integers, and plan it."""
    check(inputs, options)
    query, key, *_ = inputs
    longest, most_keys = options.max_seqlen_q, min(inputs.page_table.shape[-1] * key.shape[1], MOST_KEYS)
    scale = max(query.shape[-1], 1) ** -0.5 if options.scale is None else float(options.scale)
    scores = Scores(
        scale * options.k_scale,
        float(options.softcap),
        mask=inputs.tree_mask is not None,
        alibi=inputs.alibi_slopes is not None,
        sink=inputs.sink is not None,
        value_scale=options.v_scale,
    )
    problem: Problem = paged_problem(inputs, longest, most_keys, options.causal, options.window, scores=scores)
    request: Request = parse(requested(options.backend))._replace(batch_invariant=options.batch_invariant)
    return make_plan(problem, request)


def _as_read(inputs: PagedInputs) -> PagedInputs:
    """As kernels read them: slopes and scales 2-D, small tensors contiguous, no negated view, and one page at least,
    which is looked up where a request has no keys."""
    changed: dict[str, Any] = {}
    table, slopes, sink, query = inputs.page_table, inputs.alibi_slopes, inputs.sink, inputs.query
    if inputs.kv_indptr is not None and not table.numel():
        changed = {"page_table": table.new_zeros(1), "kv_indptr": torch.zeros_like(inputs.kv_indptr)}
    if query.is_neg():
        changed["query"] = query.resolve_neg()
    if slopes is not None and not (slopes.dim() == 2 and slopes.is_contiguous()):
        changed["alibi_slopes"] = (slopes if slopes.dim() == 2 else slopes[None]).contiguous()
    if sink is not None and not sink.is_contiguous():
        changed["sink"] = sink.contiguous()
    for name in ("k_scale", "v_scale"):
        scale = getattr(inputs, name)
        if scale is not None and scale.dim() != 2:
            changed[name] = scale.reshape(1, -1)
    return inputs._replace(**changed) if changed else inputs


_INTEGERS = "cu_seqlens_q", "seqused_k", "page_table", "kv_indptr", "causal", "tree_mask", "tree_offsets"
_BY_REQUEST = "alibi_slopes", "k_scale", "v_scale"
_AT = {name: place for place, name in enumerate(PagedInputs._fields)}


def _key_of(inputs: PagedInputs, options: PagedOptions) -> Any:
    """The key of a call; None where it must be checked first. How many queries, requests and listed pages there are is
    no part of it."""
    longest, most_keys, causal, window, softcap, scale, k_scale, v_scale, batch_invariant, backend = options
    if (
        type(causal) is not bool
        or type(batch_invariant) is not bool
        or not (type(softcap) is type(k_scale) is type(v_scale) is float)
        or (window is not None and (type(window) is not tuple or [*map(type, window)] != [int, int]))
        or (scale is not None and type(scale) is not float)
        or type(inputs.return_lse) is not bool
        or type(backend) is not str
        or type(longest) is not int
        or longest < 0
        or (most_keys is not None and (type(most_keys) is not int or most_keys < 0))
    ):
        return None
    tensors = inputs[:-1]
    if not all(t is None or isinstance(t, Tensor) for t in tensors):
        return None
    layouts = [None if t is None else call_key.layout_of(t) for t in tensors]
    query, key, value, offsets, lengths, table, indptr, *_ = layouts
    if call_key.NO_LAYOUT in layouts or not query or not offsets or not lengths or not table:
        return None
    if call_key.is_elsewhere(query[3]) or (
        torch.is_grad_enabled() and any(t.requires_grad for t in tensors if t is not None)
    ):
        return None
    integers, by_request = ([layouts[_AT[name]] for name in names] for names in (_INTEGERS, _BY_REQUEST))
    out, sink, rows, requests = layouts[_AT["out"]], layouts[_AT["sink"]], query[1][:1], lengths[1]
    if inputs.out is not None and inputs.out.is_inference() and not torch.is_inference_mode_enabled():
        return None  # to be refused, as what follows
    if not rows or len(requests) != 1 or offsets[1] != (requests[0] + 1,) or (out and out[1][:1] != rows):
        return None
    if (indptr[1] != offsets[1] or len(table[1]) != 1) if indptr else table[1][:-1] != requests:
        return None
    said, tree, trees = integers[-3:]
    if (said and said[1] != requests) or (trees is None) != (tree is None) or (trees and trees[1] != offsets[1]):
        return None
    if any(t and t[2][-1:] != (1,) for t in integers) or (tree and len(tree[1]) != 1):
        return None
    if any(t and len(t[1]) == 2 and t[1][:1] not in (requests, (1,)) for t in by_request):
        return None
    sized = (None if t is None else (t[0], len(t[1]), t[1][1:], t[2], *t[3:]) for t in (query, out))
    shared = [t and len(t[1]) == 2 and t[1][:1] == (1,) for t in by_request]
    its = (None if t is None else (t[0], len(t[1]), t[1][-1:], t[2], *t[3:]) for t in by_request)
    others = (None if t is None else (t[0], len(t[1]), t[2], *t[3:]) for t in integers)
    if backend == AUTO:
        backend = planning._forced
    # Strides of dims of size 1 are not looked at: one query, or one request, is another call.
    asked = *options[2:-1], backend, inputs.return_lse, rounded_queries(longest), rows == (1,), requests == (1,)
    return ("paged", *sized, key, value, *shared, *its, *others, sink, *asked), ()


# The library ops.

_INPUTS = [name for name in PagedInputs._fields if name not in ("out", "return_lse")]
_OPTIONAL = set(PagedInputs._field_defaults)
_SCHEMA = ", ".join(f"Tensor{'?' if name in _OPTIONAL else ''} {name}" for name in _INPUTS) + (
    ", SymInt max_seqlen_q, SymInt? max_seqlen_k, bool is_causal, SymInt[]? window, float softcap, float? scale, "
    "float key_scale, float value_scale, bool batch_invariant, str backend, bool? validate, Tensor? work, "
    "SymInt[] made_for"
)
_library = torch.library.Library("stream_attention", "FRAGMENT")
_library.define(f"paged({_SCHEMA}) -> (Tensor out, Tensor lse)")
_library.define(f"paged_into({_SCHEMA}, Tensor(a!) out) -> Tensor lse")


def _by_op(
    inputs: PagedInputs, options: PagedOptions, look: bool | None, plan: PagedPlan | None
) -> tuple[Tensor, Tensor | None]:
    """The call as an op."""
    check(inputs, options)
    given = *inputs[:-2], *options, look, *((None, ()) if plan is None else plan)
    if inputs.out is None:
        out, lse = torch.ops.stream_attention.paged.default(*given)
    else:
        out, lse = inputs.out, torch.ops.stream_attention.paged_into.default(*given, inputs.out)
    return out, lse if inputs.return_lse else None


def _read(arguments: Sequence[Any], out: Tensor | None = None) -> tuple[Any, ...]:
    """What `_compute` takes, of the arguments of an op."""
    tensors, (*options, look, work, made_for) = arguments[: len(_INPUTS)], arguments[len(_INPUTS) :]
    asked = PagedOptions._make(options)
    if asked.window is not None:
        asked = asked._replace(window=tuple(asked.window))  # type: ignore[arg-type]
    plan = None if work is None else PagedPlan(work, tuple(made_for))
    return PagedInputs._make((*tensors, out, True)), asked, look, plan


def _paged(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = _compute(*_read(arguments))
    assert lse is not None
    return out, lse


def _paged_into(*arguments: Any) -> Tensor:
    _, lse = _compute(*_read(arguments[:-1], arguments[-1]))
    assert lse is not None
    return lse


def _fake_paged(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, value = arguments[0], arguments[2]
    return query.new_empty((*query.shape[:2], value.shape[3])), _fake_paged_into(*arguments)


def _fake_paged_into(*arguments: Any) -> Tensor:
    query = arguments[0]
    lse_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty((query.shape[1], query.shape[0]), dtype=lse_dtype)


for _name, _kernel, _fake in (("paged", _paged, _fake_paged), ("paged_into", _paged_into, _fake_paged_into)):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stream_attention::{_name}", _fake, lib=_library)
