"""One cache of prepared calls, above the dispatcher.

Checking a call, stating its problem, planning it and binding its kernels takes the host longer than a short kernel
takes a GPU, and depends on nothing but the metadata of its tensors, its options and a few global switches. These are
the key. A call whose key was seen before goes straight to its launches; with gradients inside one autograd.Function,
which finds the backward by the forward and the layout of the incoming gradient.

Where something must see an op, the call passes the dispatcher and comes back here below it: torch.compile, torch.func,
dispatch and function modes, tracing, forward-mode AD and tensor subclasses. A profiler sees the same road, labelled.

Entries hold no tensor and no address. What depends on values (offsets of a pack on a CPU) is checked in every call.

`STREAM_ATTENTION_LAUNCH_CACHE=0` turns the cache off; `=compare` also computes each call the ordinary way and raises if
a bit differs.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ..base.problem import Backward, Forward, Gradients, Inputs, Problem, Wanted, gradient_of, resized
from . import validate
from .call_key import (
    HAS_WATCHERS,
    NO_LAYOUT,
    PLAIN_TYPES,
    Key,
    are_aligned,
    is_profiled,
    is_watched,
    key_of,
    layout_of,
    options_of,
)
from .plan import Plan, plan, rounded_length
from .prepare import plan_backward, prepare_backward, prepare_forward, problem_of

__all__ = ["NO_LAYOUT", "PLAIN_TYPES", "Key", "is_profiled", "is_watched", "key_of", "layout_of", "options_of"]
"""Of the key, what callers take from here."""

LIMIT = 256
"""Calls that are kept. One more drops the oldest: lengths that never come back must not pile up, and every object that
lives on is one more for the garbage collector. A call that was dropped is made from another of its family."""

_setting = os.environ.get("STREAM_ATTENTION_LAUNCH_CACHE", "1").lower()
ENABLED = _setting not in ("0", "false", "off", "no") and HAS_WATCHERS
"""Whether calls are looked up at all."""

COMPARE = _setting == "compare"
"""Whether each cached call is also computed the ordinary way, and compared bit for bit."""

_MOST_BACKWARDS = 64
"""Backwards that one call keeps: gradients come in a few layouts."""

_INPUTS = len(Inputs._fields)
_DIFFERENTIABLE = tuple(Inputs._fields.index(name) for name in Wanted._fields)


class PreparedCall:
    """How calls with one key are computed."""

    __slots__ = (
        "_backwards", "_checked", "_family", "_lengths", "_options", "_places", "_planned", "_problem", "_wanted",
        "anew", "forward", "looks_transposed",
    )  # fmt: skip

    def __init__(
        self,
        planned: Plan,
        problem: Any,
        forward: Forward,
        places: tuple[int, ...],
        options: tuple[Any, ...],
        anew: Any = None,
    ) -> None:
        self._places = places  # of the inputs that are there
        self.anew: Callable[..., PreparedCall] = anew or prepare  # prepares a call with these arguments, for `COMPARE`
        self._planned = planned  # of these lengths, or of some that share their plan
        self._problem = problem
        self.forward = forward
        self.looks_transposed = False  # whether a caller is to be warned of the layout
        self._options = options  # of the op, behind its tensors
        self._backwards: dict[Hashable, Backward] = {}
        self._wanted: dict[tuple[bool, ...], tuple[bool, ...]] = {}  # by ctx.needs_input_grad
        self._family: _Family | None = None
        self._lengths: Hashable = None  # as its family rounds them
        self._checked: set[Hashable] = set()

    @property
    def is_deterministic(self) -> bool:
        """Whether gradients have the same bits in every run. Those of a GPU need not, unless it was asked for."""
        return self._problem.device.type == "cpu" or self._problem.deterministic

    def __call__(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """`(out, lse)`, with gradients if they are on and some input wants one."""
        if is_profiled():
            with torch.profiler.record_function("stream_attention::forward"):
                return self._compute(inputs, with_lse)
        return self._compute(inputs, with_lse)

    def _compute(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        if torch.is_grad_enabled():
            wanted = tuple([(t := inputs[place]) is not None and t.requires_grad for place in _DIFFERENTIABLE])
            if True in wanted:
                if wanted not in self._checked:
                    self._check_backward(inputs, wanted)
                if self._places == _QKV:
                    return _apply(self, *inputs[:3])
                return _apply(self, *[inputs[place] for place in self._places])
        result = self.forward(inputs, with_lse)
        if COMPARE:
            compare(result, self.anew(self.arguments(inputs)).forward(inputs, with_lse))
        return result

    def _check_backward(self, inputs: Inputs, wanted: Hashable) -> None:
        """Refuse now, not in the backward, where the backend that was named has none."""
        plan(gradient_of(self._problem, inputs), self._options[-1])
        self._checked.add(wanted)

    def arguments(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """Those of the op."""
        return (*tensors, *self._options)

    def inputs_of(self, tensors: Sequence[Tensor]) -> Inputs:
        """All inputs, given those that are there."""
        if self._places == _QKV:
            return Inputs(*tensors)
        found: list[Tensor | None] = [None] * _INPUTS
        for place, tensor in zip(self._places, tensors, strict=True):
            found[place] = tensor
        return Inputs._make(found)

    def wanted(self, needed: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which gradients are needed, in the order of `Wanted`, given those of the inputs that are there."""
        found = self._wanted.get(needed)
        if found is None:
            by_place = dict(zip(self._places, needed, strict=True))
            found = self._wanted[needed] = tuple(by_place.get(place, False) for place in _DIFFERENTIABLE)
        return found

    def backward(
        self,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> Gradients:
        """The gradients that are wanted, contiguous."""
        key = _backward_key(inputs, out, lse, grad_out, grad_lse, wanted)
        known = self._backwards.get(key)
        if known is None:
            known = self._prepare_backward(inputs, out, lse, grad_out, grad_lse, Wanted(*wanted))
            with _lock:
                while len(self._backwards) >= _MOST_BACKWARDS:
                    del self._backwards[next(iter(self._backwards))]
                self._backwards[key] = known
        if is_profiled():
            with torch.profiler.record_function("stream_attention::backward"):
                return known(inputs, out, lse, grad_out, grad_lse)
        return known(inputs, out, lse, grad_out, grad_lse)

    def _prepare_backward(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> Backward:
        saved, family = (out, lse, grad_out, grad_lse), self._family
        read = (*inputs[:3], out, grad_out)
        if grad_lse is not None or not all(t.data_ptr() % 16 == 0 and are_aligned(t.stride()) for t in read):
            family = None
        if family is not None:
            found = family.backward(self, inputs, saved, wanted)
            if found is not None:
                return found
        planned, tensors = plan_backward(self.arguments(inputs), grad_lse, wanted)
        made = prepare_backward(planned, tensors, *saved, wanted)
        if family is not None and hasattr(made, "resized"):
            family.add_backward(wanted, planned, made)
        return made

    def gradients_of(self, grads: Sequence[Tensor | None], needed: tuple[bool, ...]) -> list[Tensor | None]:
        """Those of the inputs that are there, None where one is not needed, given all in the order of `Wanted`."""
        if self._places == _QKV:
            return [grad if need else None for grad, need in zip(grads, needed, strict=False)]
        by_place = dict(zip(_DIFFERENTIABLE, grads, strict=True))
        return [by_place.get(place) if need else None for place, need in zip(self._places, needed, strict=True)]


_QKV = 0, 1, 2


def places_of(inputs: Iterable[Tensor | None]) -> tuple[int, ...]:
    return tuple([place for place, t in enumerate(inputs) if t is not None])


def _backward_key(
    inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, wanted: tuple[bool, ...]
) -> Hashable:
    """What a backward depends on beside the key of its forward: how its tensors lie. Those that were saved may lie
    anew, by hooks on saved tensors."""
    query, key, value = inputs[:3]
    addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr() | lse.data_ptr()
    if (addresses | grad_out.data_ptr()) % 16 or grad_lse is not None or query.dtype is torch.float32:
        layouts = [None if t is None else layout_of(t) for t in (*inputs, out, lse, grad_out, grad_lse)]
        return (wanted, torch.backends.cuda.matmul.allow_tf32, *layouts)
    found = (
        wanted,
        query.stride(),
        key.stride(),
        value.stride(),
        out.stride(),
        lse.stride(),
        grad_out.stride(),
        grad_out.dtype,
        query.get_device(),
        key.get_device(),
        value.get_device(),
        out.get_device(),
        lse.get_device(),
        grad_out.get_device(),
    )
    others = [layout_of(t) for t in inputs[3:] if t is not None]  # which ones they are, the forward's key says
    return (*found, *others) if others else found


class _Family:
    """Calls that differ in their lengths and strides alone: what was prepared for some of them makes the others.

    Lengths choose the backend and its configuration, and may change a constexpr, such as whether a window hides
    anything. So templates are kept by the first two, a few for each, and found by lengths as plans round them.
    """

    __slots__ = ("_plans", "_problem", "_templates", "calls", "key", "latest", "newest")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.latest: tuple[Hashable, Any] = None, None  # lengths and call that were made last
        self.calls: dict[Hashable, PreparedCall] = {}  # by lengths and strides
        self.newest: Any = None  # of those that `keep_call` kept
        self._problem: Any = None  # of a call that can be resized
        self._plans: dict[Hashable, tuple[Plan, list[Any]]] = {}  # by rounded lengths, each with its templates
        self._templates: dict[Hashable, list[Any]] = {}  # calls by backend and configuration; backwards likewise

    def add_template(self, call: PreparedCall) -> None:
        """Make others from a call that was prepared, if it can be resized and its tensors are aligned."""
        planned = call._planned
        self._problem = call._problem
        call._family, call._lengths = self, _rounded_lengths(call._problem)
        _keep_newest(self._templates.setdefault((planned.backend, planned.config), []), call)

    def made(self, lengths: Hashable, make: Callable[[], Any]) -> Any:
        """A call that is new, kept when it is asked for again."""
        made_for, call = self.latest
        if made_for == lengths:
            _add(self, lengths, call)
        else:
            call = make()
            if call is not None:
                self.latest = lengths, call
        return call

    def resized(self, inputs: Any, lengths: Any, options: tuple[Any, ...]) -> PreparedCall | None:
        """The call of the family with these inputs, whose key has these lengths; None where there is no template."""
        q_len, k_len, v_rows, q_strides, k_strides, v_strides, longest = lengths
        like = self._problem
        if (
            like is None
            or k_len != v_rows
            or not (are_aligned(q_strides) and are_aligned(k_strides) and are_aligned(v_strides))
        ):
            return None
        if like.packed:
            q_len, k_len = longest
        problem = resized(like, q_len, k_len, *options[:3])
        rounded = _rounded_lengths(problem)
        planned, templates = self._plan(rounded, problem, options[-1])
        for template in templates:
            forward = template.forward.resized(problem, inputs, planned.config)
            if forward is not None:
                options, anew = (*longest, *options), template.anew
                call = PreparedCall(planned, problem, forward, template._places, options, anew)
                call._family, call._lengths, call._checked = self, rounded, template._checked
                call._wanted = template._wanted
                if not like.packed and like.q_heads > min(q_len, validate.MOST_HEADS):
                    call.looks_transposed = validate.looks_transposed(inputs.query, inputs.key)
                return call
        return None

    def backward(self, call: PreparedCall, inputs: Inputs, saved: tuple[Any, ...], wanted: Wanted) -> Backward | None:
        """The backward of a call of the family; None where there is no template for it."""
        problem = call._problem.replace(backward=True, row_grad=wanted.alibi_slopes or wanted.sink)
        if problem.dtype is torch.float32:
            problem = problem.replace(tf32=torch.backends.cuda.matmul.allow_tf32)
        planned, templates = self._plan((call._lengths, wanted, problem.tf32), problem, call._options[-1], wanted)
        for template in templates:
            found: Backward | None = template.resized(problem, inputs, planned.config, *saved)
            if found is not None:
                return found
        return None

    def add_backward(self, wanted: Wanted, planned: Plan, made: Any) -> None:
        key = wanted, planned.problem.tf32, planned.backend, planned.config
        _keep_newest(self._templates.setdefault(key, []), made)

    def _plan(
        self, rounded: Hashable, problem: Problem, backend: str, wanted: Wanted | None = None
    ) -> tuple[Plan, list[Any]]:
        """The plan of a problem whose lengths are `rounded`, and the templates that have it."""
        found = self._plans.get(rounded)
        if found is None:
            planned = plan(problem, backend)
            key: tuple[Any, ...] = planned.backend, planned.config
            if wanted is not None:
                key = wanted, problem.tf32, *key
            with _lock:
                found = planned, self._templates.setdefault(key, [])
                while len(self._plans) >= LIMIT:
                    del self._plans[next(iter(self._plans))]
                self._plans[rounded] = found
        return found


def _is_template(call: PreparedCall, inputs: Inputs) -> bool:
    """Whether calls of other lengths can be made from one that was prepared. A mask, a bias and the words of dropout
    have lengths of their own."""
    others = inputs.mask is None and inputs.bias is None and inputs.seed is None
    aligned = all(t.data_ptr() % 16 == 0 for t in inputs[:3])
    aligned = aligned and all(are_aligned(t.stride()) for t in inputs[:3])
    return others and aligned and inputs.key.shape[-3] == inputs.value.shape[-3] and hasattr(call.forward, "resized")


def _rounded_lengths(problem: Any) -> Hashable:
    """All that a plan looks at which may differ in a family."""
    return rounded_length(problem.shape.q_len), rounded_length(problem.kv.k_len), problem.window


_MOST_TEMPLATES = 4


def _keep_newest(templates: list[Any], one: Any) -> None:
    """Put a template before the others, and drop the oldest."""
    templates[:] = [one, *templates[: _MOST_TEMPLATES - 1]]


class _Attention(_SingleLevelFunction):
    """A prepared call with gradients. Of torch's two kinds of Function this is the one without torch.func's handling,
    which takes the op; `ctx` in forward: a separate setup_context would cost 20 us more."""

    @staticmethod
    def forward(ctx: Any, call: PreparedCall, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        inputs = call.inputs_of(tensors)
        # Below what tracks views: torch's CPU op returns one, of which autograd would refuse a change in place at once.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            out, lse = call.forward(inputs, True)
            if COMPARE:
                compare((out, lse), call.anew(call.arguments(inputs)).forward(inputs, True))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        if grad_out is None and grad_lse is None:
            return (None,) * (len(needed) + 1)
        call = ctx.call
        *tensors, out, lse = ctx.saved_tensors
        inputs, wanted = call.inputs_of(tensors), call.wanted(needed)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if torch.is_grad_enabled() or not ENABLED or is_watched() or not _has_memory(grad_out, grad_lse):
            backward_op = torch.ops.stream_attention.backward.default
            grads = backward_op(grad_out, grad_lse, out, lse, list(wanted), *call.arguments(inputs))
        else:
            given = inputs, out, lse, grad_out, grad_lse, wanted
            grads = call.backward(*given)
            if COMPARE and call.is_deterministic:
                compare(grads, call.anew(call.arguments(inputs)).backward(*given))
        return None, *call.gradients_of(grads, needed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise AssertionError("forward mode takes the op")


_apply: Callable[..., Any] = _Attention.apply  # type: ignore[attr-defined]


def _has_memory(grad_out: Tensor, grad_lse: Tensor | None) -> bool:
    """Whether gradients are plain tensors: no subclass, not batched by vmap, negated or a stand-in for zeros."""
    try:
        if type(grad_out) not in PLAIN_TYPES or not grad_out.data_ptr() or grad_out.is_neg():
            return False
        if grad_lse is None:
            return True
        return type(grad_lse) in PLAIN_TYPES and bool(grad_lse.data_ptr()) and not grad_lse.is_neg()
    except RuntimeError:
        return False


def labelled(name: str, compute: Callable[..., Any], *arguments: Any) -> Any:
    """Compute a call, with a label for a profiler."""
    if is_profiled():
        with torch.profiler.record_function(f"stream_attention::{name}"):
            return compute(*arguments)
    return compute(*arguments)


def compare(cached: Iterable[Tensor | None], fresh: Iterable[Tensor | None]) -> None:
    for one, other in zip(cached, fresh, strict=True):
        if one is None or other is None:
            continue
        if not torch.equal(*(t.contiguous().view(torch.uint8) for t in (one, other))):
            raise RuntimeError(
                "launch cache: a cached call and one that was prepared anew differ. Please report the call; "
                "STREAM_ATTENTION_LAUNCH_CACHE=0 computes without the cache"
            )


def prepared(arguments: tuple[Any, ...]) -> PreparedCall:
    """The call of an op with these arguments: as it was prepared before, or prepared now."""
    return kept(arguments) or prepare(arguments)


def kept(arguments: tuple[Any, ...]) -> PreparedCall | None:
    """The same, of a call that has a key, and is kept; else None."""
    inputs = Inputs._make(arguments[:_INPUTS])
    lengths, options = arguments[_INPUTS : _INPUTS + 2], arguments[_INPUTS + 2 :]
    key = key_of(inputs, lengths, options) if ENABLED else None
    if key is None:
        return None
    call = find(key, inputs, options)
    if call is None:
        call = prepare(arguments)
        keep(key, call, inputs)
    return call


def prepare(arguments: tuple[Any, ...]) -> PreparedCall:
    """Plan a call and bind its kernels."""
    problem, inputs, backend = problem_of(arguments)
    planned = plan(problem, backend)
    forward = prepare_forward(planned, inputs)
    call = PreparedCall(planned, planned.problem, forward, places_of(inputs), arguments[_INPUTS:])
    call.looks_transposed = not problem.packed and validate.looks_transposed(inputs.query, inputs.key)
    return call


_families: dict[Hashable, _Family] = {}
_order: deque[tuple[_Family, Hashable]] = deque()
"""The calls that are kept, oldest first, each by its family and its lengths."""

_lock = Lock()


def find(key: Key, inputs: Any, options: tuple[Any, ...]) -> PreparedCall | None:
    """The prepared call with a key: as it was prepared before or, where its lengths are new, made from one of its
    family; else None.

    One that was made is kept from its second use on, as in the next layer of a model. Lengths that never come back
    leave nothing behind."""
    family = _families.get(key.family)
    if family is None:
        return None
    call = family.calls.get(key.lengths)
    if call is not None:
        return call
    return family.made(key.lengths, lambda: family.resized(inputs, key.lengths, options))


def keep(key: Key, call: PreparedCall, inputs: Inputs) -> None:
    """Keep a call that was prepared, also as a template of its family."""
    family = _family(key.family)
    _add(family, key.lengths, call)
    if _is_template(call, inputs):
        with _lock:
            family.add_template(call)


def _family(key: Hashable) -> _Family:
    with _lock:
        return _families.setdefault(key, _Family(key))


def _add(family: _Family, lengths: Hashable, call: PreparedCall) -> None:
    with _lock:
        while len(_order) >= LIMIT:
            oldest, dropped = _order.popleft()
            del oldest.calls[dropped]
            if not oldest.calls and oldest is not family:
                _families.pop(oldest.key, None)
        if lengths not in family.calls:
            _order.append((family, lengths))
        family.calls[lengths] = call
        _families[family.key] = family  # which another thread may have dropped


def find_call(family: Hashable, rest: Hashable, resized: Callable[[Any], Any] | None = None) -> Any:
    """What `keep_call` kept with a key; where its lengths are new, what `resized` makes of another of its family, if
    that is possible; else None."""
    found = _families.get(family)
    if found is None:
        return None
    call = found.calls.get(rest)
    if call is not None or resized is None:
        return call
    newest = found.newest  # none yet, where another thread keeps the first
    return None if newest is None else found.made(rest, lambda: resized(newest))


def keep_call(key: Key, call: Any) -> None:
    """Keep a call that is no `PreparedCall`."""
    family = _family(key.family)
    _add(family, key.lengths, call)
    family.newest = call


def size() -> int:
    """How many calls are kept."""
    return len(_order)


def clear() -> None:
    """Forget all calls."""
    with _lock:
        _families.clear()
        _order.clear()
