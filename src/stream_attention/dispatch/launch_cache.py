"""One cache of prepared calls, above the dispatcher.

Checking a call, stating its problem, planning it and binding its kernels takes the host longer than a short kernel
takes a GPU, and depends on nothing but the metadata of its tensors, its options and a few global switches. These are
the key. A call whose key was seen before goes straight to its launches; with gradients inside one autograd.Function,
which finds the backward by the forward and the layout of the incoming gradient.

A call of new lengths is made from a template: a prepared call of the same family whose kernels and constexprs fit. Its
integers and descriptors are written anew, nothing else.

Where something must see an op, the call passes the dispatcher and comes back here below it: torch.compile, torch.func,
dispatch and function modes, tracing, forward-mode AD and tensor subclasses. A profiler sees the same path, labelled.

Entries hold no tensor and no address. What depends on values (offsets of a pack on a CPU) is checked in every call.

`STREAM_ATTENTION_LAUNCH_CACHE=0` turns the cache off; `=compare` also computes each call the ordinary way and raises if
a bit differs.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ..base.device import allows_tf32
from ..base.errors import refuse
from ..base.problem import Backward, Forward, Gradients, Inputs, Problem, Results, Wanted, gradient_of, resized
from . import validate
from .call_key import Key, are_aligned, is_profiled, is_watched, key_of, layout_of
from .plan import Plan, plan, rounded_length
from .prepare import prepare_backward, prepare_forward, problem_of

LIMIT = 256
"""Calls that are kept. One more drops the oldest: lengths that never come back must not pile up, and every object that
lives on is one more for the garbage collector. The first kept is the first dropped; it is made from a template again if
its family still has one, else prepared in full."""

_setting = os.environ.get("STREAM_ATTENTION_LAUNCH_CACHE", "1").lower()
if _setting not in ("1", "true", "on", "yes", "0", "false", "off", "no", "compare"):
    refuse("STREAM_ATTENTION_LAUNCH_CACHE", "1, 0 or compare", repr(_setting))
ENABLED = _setting not in ("0", "false", "off", "no")
"""Whether calls are looked up at all."""

COMPARE = _setting == "compare"
"""Whether each cached call is also computed the ordinary way, and compared bit for bit."""

_MOST_BACKWARDS = 64
"""Backwards that one call keeps: gradients come in a few layouts."""

_INPUTS = len(Inputs._fields)
_DIFFERENTIABLE = tuple(Inputs._fields.index(name) for name in Wanted._fields)
_wanted_of = itemgetter(*[1 + place for place in _DIFFERENTIABLE])


class PreparedCall:
    """How calls with one key are computed."""

    __slots__ = (
        "_backwards", "_checked", "_options", "_planned", "_problem", "_templates", "anew", "forward",
        "looks_transposed",
    )  # fmt: skip

    def __init__(
        self, planned: Plan, problem: Any, forward: Forward, options: tuple[Any, ...], anew: Any = None
    ) -> None:
        self.anew: Callable[..., PreparedCall] = anew or prepare  # prepares a call with these arguments, for `COMPARE`
        self._planned = planned  # of these lengths, or of some that share their plan
        self._problem = problem
        self.forward = forward
        self.looks_transposed = False  # whether a caller is to be warned of the layout
        self._options = options  # of the op, behind its tensors
        self._backwards: dict[Hashable, Backward] = {}
        self._templates: _Templates | None = None  # of its family; None: no call of other lengths is made from it
        self._checked: set[Hashable] = set()

    @property
    def is_deterministic(self) -> bool:
        """Whether gradients are bit-equal from run to run: on a CPU always, on a GPU if that was asked for."""
        return self._problem.device.type == "cpu" or self._problem.deterministic

    def __call__(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """`(out, lse)`, with gradients if they are on and some input wants one."""
        result: tuple[Tensor, Tensor | None] = labelled("forward", self._compute, inputs, with_lse)
        return result

    def _compute(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        if torch.is_grad_enabled():
            wanted = tuple([(t := inputs[place]) is not None and t.requires_grad for place in _DIFFERENTIABLE])
            if True in wanted:
                if wanted not in self._checked:
                    self._check_backward(inputs, wanted)
                return _apply(self, *inputs)
        result = self.forward(inputs, with_lse)
        if COMPARE:
            compare(result, self.anew(self.arguments(inputs)).forward(inputs, with_lse))
        return result

    def _check_backward(self, inputs: Inputs, wanted: Hashable) -> None:
        """Raise in the forward, not in the backward, if the named backend has no backward for this call."""
        plan(gradient_of(self._problem, inputs), self._options[-1])
        self._checked.add(wanted)

    def arguments(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """The flat arguments of the op: tensors, then options."""
        return (*tensors, *self._options)

    def backward(self, inputs: Inputs, given: Results, wanted: tuple[bool, ...]) -> Gradients:
        """The gradients that are wanted, contiguous."""
        key = _backward_key(inputs, *given, wanted)
        known = self._backwards.get(key)
        if known is None:
            known = self._prepare_backward(inputs, given, Wanted(*wanted))
            with _lock:
                while len(self._backwards) >= _MOST_BACKWARDS:
                    del self._backwards[next(iter(self._backwards))]
                self._backwards[key] = known
        gradients: Gradients = labelled("backward", known, inputs, *given)
        return gradients

    def _prepare_backward(self, inputs: Inputs, given: Results, wanted: Wanted) -> Backward:
        templates, (out, lse, grad_out, grad_lse) = self._templates, given
        read = *inputs[:3], out, grad_out
        is_plain = grad_lse is None and lse.is_contiguous() and lse.data_ptr() % 16 == 0
        of_template = [t.dtype for t in (*read, lse)] == [*[self._problem.dtype] * len(read), torch.float32]
        if not (is_plain and of_template and all(map(_is_aligned, read))):
            templates = None
        if templates is not None:
            found = templates.backward(self, inputs, given, wanted)
            if found is not None:
                return found
        problem, tensors, backend = problem_of(self.arguments(inputs))
        asked = {"lse_grad": grad_lse is not None, "row_grad": wanted.alibi_slopes or wanted.sink}
        planned = plan(problem.replace(backward=True, **asked), backend)
        made = prepare_backward(planned, tensors, given, wanted)
        if templates is not None and hasattr(made, "resized"):
            templates.add(made, planned, wanted, planned.problem.tf32)
        return made


def _backward_key(
    inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, wanted: tuple[bool, ...]
) -> Hashable:
    """What a backward depends on beside the key of its forward: how its tensors lie, and their dtypes. Hooks on saved
    tensors may return others than the forward had."""
    query, key, value = inputs[:3]
    addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr() | lse.data_ptr()
    if (addresses | grad_out.data_ptr()) % 16 or grad_lse is not None or query.dtype is torch.float32:
        layouts = [None if t is None else layout_of(t) for t in (*inputs, out, lse, grad_out, grad_lse)]
        return (wanted, allows_tf32(), *layouts)
    read = query, key, value, out, lse, grad_out
    strides, devices = [*map(Tensor.stride, read)], [*map(Tensor.get_device, read)]
    if lse.dim() == 2 and lse.is_contiguous():  # of a pack, which may have other rows
        strides[4] = ()
    if not are_aligned(strides[5]):
        strides.append(grad_out.shape)
    others = [layout_of(t) for t in inputs[3:] if t is not None]  # which ones they are, the forward's key says
    return (wanted, *[t.dtype for t in read], *strides, *devices, *others)


class _Templates:
    """Calls that were prepared, of a family, from which those of other lengths are made.

    Lengths choose the backend and its configuration, and may change a constexpr, such as whether a window hides
    anything. So templates are kept by the first two, a few for each, and found by lengths as plans round them.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem  # of one of them
        self._plans: dict[Hashable, tuple[Plan, list[Any]]] = {}  # by rounded lengths, each with its templates
        self._found: dict[Hashable, list[Any]] = {}  # calls by backend and configuration; backwards likewise

    def add(self, one: Any, planned: Plan, *kind: Hashable) -> None:
        """Put a template before the others, and drop the oldest; `kind` is what tells backwards apart."""
        templates = self._found.setdefault((planned.backend, planned.config, *kind), [])
        templates[:] = [one, *templates[: _MOST_TEMPLATES - 1]]

    def resized(self, inputs: Any, lengths: Any, options: tuple[Any, ...]) -> PreparedCall | None:
        """The call with these inputs, whose key has these lengths; None where there is no template."""
        q_len, k_len, v_rows, *strides, longest = lengths
        like = self._problem
        if k_len != v_rows or not all(map(are_aligned, strides)):
            return None
        if like.packed:
            q_len, k_len = longest
        problem = resized(like, q_len, k_len, *options[:3])
        planned, templates = self._plan(problem, options[-1])
        for template in templates:
            forward = template.forward.resized(problem, inputs, planned.config)
            if forward is not None:
                call = PreparedCall(planned, problem, forward, (*longest, *options), template.anew)
                call._templates, call._checked = self, template._checked
                if not like.packed and like.q_heads > min(q_len, validate.MOST_HEADS):
                    call.looks_transposed = validate.looks_transposed(inputs.query, inputs.key)
                return call
        return None

    def backward(self, call: PreparedCall, inputs: Inputs, given: Results, wanted: Wanted) -> Backward | None:
        """A backward made from a template, for a call of this family; None if no template fits."""
        problem = call._problem.replace(backward=True, row_grad=wanted.alibi_slopes or wanted.sink)
        if problem.dtype is torch.float32:
            problem = problem.replace(tf32=allows_tf32())
        planned, templates = self._plan(problem, call._options[-1], wanted, problem.tf32)
        for template in templates:
            found: Backward | None = template.resized(problem, inputs, planned.config, *given)
            if found is not None:
                return found
        return None

    def _plan(self, problem: Problem, backend: str, *kind: Hashable) -> tuple[Plan, list[Any]]:
        """The plan of a problem and the templates that have it; `kind` is what tells backwards apart."""
        lengths = rounded_length(problem.shape.q_len), rounded_length(problem.kv.k_len)
        differing = (*lengths, problem.window, *kind)  # all that a plan looks at which may differ in a family
        found = self._plans.get(differing)
        if found is None:
            planned = plan(problem, backend)
            with _lock:
                found = planned, self._found.setdefault((planned.backend, planned.config, *kind), [])
                while len(self._plans) >= LIMIT:
                    del self._plans[next(iter(self._plans))]
                self._plans[differing] = found
        return found


_MOST_TEMPLATES = 4


def _is_template(call: PreparedCall, inputs: Inputs) -> bool:
    """Whether calls of other lengths can be made from one that was prepared. A mask, a bias and the words of dropout
    have lengths of their own, and where there is no score results are filled."""
    if call._problem.empty or not hasattr(call.forward, "resized"):
        return False
    others = inputs.mask is None and inputs.bias is None and inputs.seed is None
    same_length = inputs.key.shape[-3] == inputs.value.shape[-3]
    return others and same_length and all(map(_is_aligned, inputs[:3]))


def _is_aligned(t: Tensor) -> bool:
    return t.data_ptr() % 16 == 0 and are_aligned(t.stride())


class _Attention(_SingleLevelFunction):
    """A prepared call with gradients. Of torch's two kinds of Function this is the one without torch.func's handling,
    which takes the op; `ctx` in forward: a separate setup_context would cost 20 us more."""

    @staticmethod
    def forward(ctx: Any, call: PreparedCall, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        inputs = Inputs._make(tensors)
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
        if grad_out is None and grad_lse is None:
            return (None,) * (1 + _INPUTS)
        call = ctx.call
        *tensors, out, lse = ctx.saved_tensors
        inputs, wanted = Inputs._make(tensors), _wanted_of(ctx.needs_input_grad)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        has_memory = layout_of(grad_out) and (grad_lse is None or layout_of(grad_lse))
        if torch.is_grad_enabled() or not ENABLED or is_watched() or not has_memory:
            backward_op = torch.ops.stream_attention.backward.default
            grads = backward_op(grad_out, grad_lse, out, lse, list(wanted), *call.arguments(inputs))
        else:
            given = out, lse, grad_out, grad_lse
            grads = call.backward(inputs, given, wanted)
            if COMPARE and call.is_deterministic:
                compare(grads, call.anew(call.arguments(inputs)).backward(inputs, given, wanted))
        query, key, value, *others = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
        return None, query, key, value, None, *others, *_NO_GRADIENTS

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise AssertionError("forward mode takes the op")


_NO_GRADIENTS = (None,) * (_INPUTS - 1 - _DIFFERENTIABLE[-1])
"""Of the inputs behind the last that may have one."""

_apply: Callable[..., Any] = _Attention.apply  # type: ignore[attr-defined]


def labelled(name: str, compute: Callable[..., Any], *arguments: Any) -> Any:
    """Compute a call, with a label for a profiler."""
    if is_profiled():
        with torch.profiler.record_function(f"stream_attention::{name}"):
            return compute(*arguments)
    return compute(*arguments)


def write(name: str, call: Any, tensors: tuple[Any, ...], written: tuple[int, ...], *prepared_with: Any) -> None:
    """Run a call that writes to those of its tensors with these places, labelled; and compare what it wrote with what
    one that is prepared anew writes if asked to."""
    if not COMPARE:
        return labelled(name, call, tensors)
    copies = tuple([t.clone() if isinstance(t, Tensor) else t for t in tensors])
    type(call).prepare(copies, *prepared_with)(copies)
    labelled(name, call, tensors)
    compare(*([given[place] for place in written] for given in (tensors, copies)))


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
    """The same for a call that has a key: looked up, or prepared and kept. None for one without a key."""
    inputs = Inputs._make(arguments[:_INPUTS])
    lengths, options = planned_lengths(arguments[_INPUTS : _INPUTS + 2]), arguments[_INPUTS + 2 :]
    key = key_of(inputs, lengths, options) if ENABLED else None
    if key is None:
        return None
    call: PreparedCall | None = find(key, inputs, key.lengths, options)
    if call is None:
        call = prepare(arguments)
        keep_prepared(key, call, inputs)
    return call


def planned_lengths(longest: Sequence[int]) -> tuple[int, int]:
    """The longest sequences of a pack, rounded up as plans round them, so that packs share a prepared call. Kernels
    read each sequence's own length: tiles behind its end return at once. (0, 0) of a dense call."""
    q_len, k_len = longest
    return rounded_length(q_len), rounded_length(k_len)


def as_planned(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op with `planned_lengths`."""
    longest = planned_lengths(arguments[_INPUTS : _INPUTS + 2])
    return *arguments[:_INPUTS], *longest, *arguments[_INPUTS + 2 :]


def prepare(arguments: tuple[Any, ...]) -> PreparedCall:
    """Plan a call and bind its kernels."""
    arguments = as_planned(arguments)
    problem, inputs, backend = problem_of(arguments)
    planned = plan(problem, backend)
    forward = prepare_forward(planned, inputs)
    call = PreparedCall(planned, planned.problem, forward, arguments[_INPUTS:])
    call.looks_transposed = not problem.packed and validate.looks_transposed(inputs.query, inputs.key)
    return call


class _Family:
    """Calls that differ in their lengths and strides alone."""

    __slots__ = ("calls", "key", "latest", "takes_any_rows", "template")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.calls: dict[Hashable, Any] = {}  # by lengths and strides
        self.template: Any = None  # whose `resized` makes calls of other lengths; None: nothing does
        self.latest: tuple[tuple[Hashable, Any], ...] = ()  # lengths and calls that it made last
        self.takes_any_rows = False  # keys of packs leave out how many rows they have (keep_prepared)


_MOST_LATEST = 4

_families: dict[Hashable, _Family] = {}
_order: deque[tuple[_Family, Hashable]] = deque()
"""The calls that are kept, oldest first, each by its family and its lengths."""

_lock = Lock()
if hasattr(os, "register_at_fork"):  # a child would wait for ever for what another thread held
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def find(key: tuple[Hashable, Any], *given: Any) -> Any:
    """The call that was kept with a key; for new lengths, one that the family's template makes of what is given; else
    None.

    The last few calls that were made are remembered, and kept at their second use, as in the next layer of a model:
    lengths that never come back do not fill the cache."""
    of, lengths = key
    family = _families.get(of)
    if family is None:
        return None
    call = family.calls.get(lengths)
    if call is None and family.takes_any_rows and lengths[1] == lengths[2]:
        lengths = lengths[3:]
        call = family.calls.get(lengths)
    if call is not None or family.template is None:
        return call
    for made_for, call in family.latest:
        if made_for == lengths:
            _add(family, lengths, call)
            return call
    call = family.template.resized(*given)
    if call is not None:
        family.latest = (lengths, call), *family.latest[: _MOST_LATEST - 1]
    return call


def keep(key: tuple[Hashable, Any], call: Any, template: Any = None, takes_any_rows: bool = False) -> None:
    """Keep a call, and what makes those of other lengths, if that is possible."""
    of, lengths = key
    with _lock:
        family = _families.setdefault(of, _Family(of))
        if template is not None:
            family.template = template
        family.takes_any_rows |= takes_any_rows
    _add(family, lengths, call)


def template_of(key: tuple[Hashable, Any]) -> Any:
    """What makes calls of other lengths of those with a key; None where nothing does."""
    family = _families.get(key[0])
    return None if family is None else family.template


def keep_prepared(key: Key, call: PreparedCall, inputs: Inputs) -> None:
    """Keep a call that was prepared, also as one of its family's templates."""
    templates, takes_any_rows = None, False
    if _is_template(call, inputs):
        takes_any_rows = getattr(call.forward, "takes_any_rows", False)
        with _lock:
            templates = call._templates = template_of(key) or _Templates(call._problem)
            templates.add(call, call._planned)
    if takes_any_rows:
        key = Key(key.family, key.lengths[3:])
    keep(key, call, templates, takes_any_rows)


def _add(family: _Family, lengths: Hashable, call: Any) -> None:
    with _lock:
        while len(_order) >= LIMIT:
            oldest, dropped = _order.popleft()
            del oldest.calls[dropped]
            if not oldest.calls and oldest is not family and _families.get(oldest.key) is oldest:
                del _families[oldest.key]
        if lengths not in family.calls:
            _order.append((family, lengths))
        family.calls[lengths] = call
        _families[family.key] = family  # which another thread may have dropped


def size() -> int:
    """How many calls are kept."""
    return len(_order)


def clear() -> None:
    """Forget all calls."""
    with _lock:
        for family in _families.values():  # which a thread may have found, and put back
            family.calls, family.template, family.latest = {}, None, ()
        _families.clear()
        _order.clear()
