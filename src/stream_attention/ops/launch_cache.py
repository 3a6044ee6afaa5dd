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
from collections.abc import Callable, Hashable, Iterable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from .. import plan as planning
from .. import validate
from ..backends import AUTO
from ..plan import Plan, plan
from ..problem import UNBOUNDED, Backward, Forward, Inputs, Wanted, gradient_of, resized
from .prepare import plan_backward, prepare_backward, prepare_forward, problem_of

LIMIT = 4096
"""Calls that are kept. One more drops the oldest: lengths that never come back must not pile up."""

_setting = os.environ.get("STREAM_ATTENTION_LAUNCH_CACHE", "1").lower()
ENABLED = _setting not in ("0", "false", "off", "no")
"""Whether calls are looked up at all."""

COMPARE = _setting == "compare"
"""Whether each cached call is also computed the ordinary way, and compared bit for bit."""

_MOST_BACKWARDS = 64
"""Backwards that one call keeps: gradients come in a few layouts."""

_INPUTS = len(Inputs._fields)
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_DIFFERENTIABLE = tuple(Inputs._fields.index(name) for name in Wanted._fields)


def _watchers() -> tuple[Callable[[], Any], ...]:
    """Who must see the op, each false when asked unless it is there."""
    return (
        torch._C._functorch.peek_interpreter_stack,  # torch.func
        torch._C._len_torch_dispatch_stack,  # modes: fake tensors, flop counters, selective checkpointing
        torch._C._len_torch_function_stack,
        torch._C._get_tracing_state,  # torch.jit.trace
        torch._C._autograd._profiler_enabled,
    )


try:
    _transforms, _dispatch_modes, _function_modes, _trace, _profiler = _watchers()
except AttributeError:  # another torch: every call takes the ordinary way
    ENABLED = False


def is_watched() -> bool:
    """Whether something must see the op of a call."""
    return bool(
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _function_modes()
        or forward_ad._current_level >= 0
        or _transforms() is not None
        or _trace() is not None
    )


def options_of(
    head_dim: int,
    lengths: tuple[int, int],
    causal: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    dropout_p: Any,
    seed: Any,
    deterministic: Any,
    return_lse: Any,
    backend: Any,
) -> tuple[Any, ...] | None:
    """The arguments of an op behind its tensors; None where a call must be checked first. Types are looked at because 1
    equals True as a key, but is refused."""
    if (
        type(causal) is not bool
        or type(return_lse) is not bool
        or type(softcap) is not float
        or type(dropout_p) is not float
        or type(backend) is not str
        or (scale is not None and type(scale) is not float)
        or (deterministic is not None and type(deterministic) is not bool)
        or (seed is not None and (not dropout_p or not _is_seed(seed)))
    ):
        return None
    left = right = UNBOUNDED
    if window is not None:
        if type(window) is not tuple or len(window) != 2 or type(window[0]) is not int or type(window[1]) is not int:
            return None
        left, right = window
    if backend == AUTO:
        backend = planning._forced
    if backend == "reference":
        return None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    scale = max(head_dim, 1) ** -0.5 if scale is None else scale
    return *lengths, causal, left, right, softcap, scale, dropout_p, deterministic, backend


def _is_seed(seed: Any) -> bool:
    return type(seed) is Tensor or (type(seed) is int and -(1 << 63) <= seed < 1 << 63)


def key_of(inputs: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> Hashable | None:
    """All that decides how a call is computed: of its tensors, as the op takes them, and of its other arguments. None
    where a tensor is more than its memory, has none, or lies on another device than the current one."""
    query, key, value = inputs[:3]
    if type(query) not in PLAIN_TYPES or type(key) not in PLAIN_TYPES or type(value) not in PLAIN_TYPES:
        return None
    assert query is not None and key is not None and value is not None
    try:
        device, q_at, k_at, v_at = query.get_device(), query.data_ptr(), key.data_ptr(), value.data_ptr()
        found: tuple[Any, ...] = (
            query.dtype,
            key.dtype,
            value.dtype,
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            device,
            key.get_device(),
            value.get_device(),
            q_at % 16,
            k_at % 16,
            v_at % 16,
            options,
        )
    except RuntimeError:  # sparse and nested tensors have no address or strides
        return None
    if (
        not (q_at and k_at and v_at)  # empty, or a tensor that stands for zeros or for another
        or query.is_neg()
        or key.is_neg()
        or value.is_neg()
        or (device >= 0 and device != torch._C._cuda_getDevice())
    ):
        return None
    others = [None if t is None else _layout(t) for t in inputs[3:]]  # no `==`: of tensors that is an op
    if others != _ABSENT:
        if _NO_LAYOUT in others:
            return None
        found += (*others,)
    if query.dtype is torch.float32:
        found += (torch.backends.cuda.matmul.allow_tf32,)
    return found


_ABSENT = [None] * (_INPUTS - 3)
_NO_LAYOUT = ()


def _layout(t: Tensor) -> tuple[Any, ...]:
    """How an optional tensor lies; `_NO_LAYOUT` where it is more than its memory, or has none."""
    try:
        if type(t) not in PLAIN_TYPES or t.is_neg() or not t.data_ptr():
            return _NO_LAYOUT
        return t.dtype, t.shape, t.stride(), t.get_device(), t.data_ptr() % 16
    except RuntimeError:  # a sparse tensor
        return _NO_LAYOUT


def family_of(key: Any, inputs: tuple[Tensor | None, ...]) -> Hashable | None:
    """What calls that differ in their lengths alone have in common with the one that has this `key`; None where lengths
    are not all that may differ.

    Strides may differ too: kernels take them as numbers. They are positive and, but for the last, multiples of 8;
    memory starts on 16 bytes.
    """
    if inputs[3] is not None or inputs[4] is not None or inputs[7] is not None:
        return None  # mask, bias or dropout
    shapes = query, keys, values = key[3:6]
    if keys[-3] != values[-3] or 0 in query or 0 in keys or 0 in values:
        return None
    if key[12:15] != (0, 0, 0) or not all(map(_are_aligned, key[6:9])):
        return None
    dims = [part for shape in shapes for part in (shape[:-3], shape[-2:])]
    return (key[:3], key[9:12], key[15][2:], key[16:], *dims)


def _are_aligned(strides: tuple[int, ...]) -> bool:
    """Whether rows that begin on 16 bytes are apart, and lie on 16 bytes, element after element."""
    *others, last = strides
    return last == 1 and min(others) > 0 and not any([stride % 8 for stride in others])  # noqa: C419


class PreparedCall:
    """How calls with one key are computed."""

    __slots__ = ("_backwards", "_checked", "_options", "_planned", "_templates", "anew", "forward", "looks_transposed")

    def __init__(self, planned: Plan, forward: Forward, options: tuple[Any, ...], anew: Any = None) -> None:
        self.anew: Callable[..., PreparedCall] = anew or prepare  # prepares a call with these arguments, for `COMPARE`
        self._planned = planned
        self.forward = forward
        self.looks_transposed = False  # whether a caller is to be warned of the layout
        self._options = options  # of the op, behind its tensors
        self._backwards: dict[Hashable, Backward] = {}
        self._templates: dict[Hashable, list[Any]] = {}  # backwards of the family
        self._checked: set[Hashable] = set()

    @property
    def is_deterministic(self) -> bool:
        """Whether gradients have the same bits in every run. Those of a GPU need not, unless it was asked for."""
        return self._planned.problem.device.type == "cpu" or self._planned.problem.deterministic

    @property
    def can_resize(self) -> bool:
        return hasattr(self.forward, "resized")

    def __call__(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """`(out, lse)`, with gradients if they are on and some input wants one."""
        if _profiler():
            with torch.profiler.record_function("stream_attention::forward"):
                return self._compute(inputs, with_lse)
        return self._compute(inputs, with_lse)

    def _compute(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        if torch.is_grad_enabled():
            wanted = tuple([(t := inputs[place]) is not None and t.requires_grad for place in _DIFFERENTIABLE])
            if True in wanted:
                if wanted not in self._checked:
                    self._check_backward(inputs, wanted)
                places = tuple([place for place, t in enumerate(inputs) if t is not None])
                return _apply(self, places, *[inputs[place] for place in places])
        result = self.forward(inputs, with_lse)
        if COMPARE:
            _compare(result, self.anew(self.arguments(inputs)).forward(inputs, with_lse))
        return result

    def _check_backward(self, inputs: Inputs, wanted: Hashable) -> None:
        """Refuse now, not in the backward, where the backend that was named has none."""
        plan(gradient_of(self._planned.problem, inputs), self._options[-1])
        self._checked.add(wanted)

    def arguments(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """Those of the op."""
        return (*tensors, *self._options)

    def backward(
        self,
        inputs: Inputs,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The gradients that are wanted, contiguous, in the order of `Wanted`."""
        # Hooks on saved tensors may have laid them out anew.
        tensors = (*inputs, out, lse, grad_out, grad_lse)
        key: tuple[Any, ...] = (wanted, *[None if t is None else _layout(t) for t in tensors])
        if out.dtype is torch.float32:
            key += (torch.backends.cuda.matmul.allow_tf32,)
        known = self._backwards.get(key)
        if known is None:
            known = self._prepare_backward(inputs, out, lse, grad_out, grad_lse, Wanted(*wanted))
            with _lock:
                while len(self._backwards) >= _MOST_BACKWARDS:
                    del self._backwards[next(iter(self._backwards))]
                self._backwards[key] = known
        if _profiler():
            with torch.profiler.record_function("stream_attention::backward"):
                grads = known(inputs, out, lse, grad_out, grad_lse)
        else:
            grads = known(inputs, out, lse, grad_out, grad_lse)
        return [None if grad is None else grad.contiguous() for grad in grads]

    def _prepare_backward(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, wanted: Wanted
    ) -> Backward:
        read = (*inputs[:3], out, grad_out)
        is_aligned = all(t.data_ptr() % 16 == 0 and _are_aligned(t.stride()) for t in read)
        if not self.can_resize or grad_lse is not None or not is_aligned:
            planned, tensors = plan_backward(self.arguments(inputs), grad_lse, wanted)
            return prepare_backward(planned, tensors, out, lse, grad_out, grad_lse, wanted)
        problem = self._planned.problem.replace(backward=True, row_grad=wanted.alibi_slopes or wanted.sink)
        if problem.dtype is torch.float32:
            problem = problem.replace(tf32=torch.backends.cuda.matmul.allow_tf32)
        planned, tensors = plan(problem, self._options[-1]), inputs
        if planned.padded_from:
            return prepare_backward(planned, tensors, out, lse, grad_out, grad_lse, wanted)
        saved = out, lse, grad_out, grad_lse
        templates = self._templates.setdefault((wanted, planned.backend, planned.config, problem.tf32), [])
        for template in templates:
            found = template.resized(planned.problem, tensors, planned.config, *saved)
            if found is not None:
                return found
        found = prepare_backward(planned, tensors, *saved, wanted)
        if hasattr(found, "resized"):
            _keep_newest(templates, found)
        return found


class _Family:
    """Calls that differ in their lengths alone: what was prepared for some of them makes the others.

    Lengths choose the backend and its configuration, and may change a constexpr, such as whether a window hides
    anything. So templates are kept by the first two, a few for each.
    """

    __slots__ = ("_backwards", "_checked", "_problem", "_templates")

    def __init__(self, call: PreparedCall) -> None:
        self._problem = call._planned.problem
        self._templates: dict[Hashable, list[PreparedCall]] = {}
        self._backwards, self._checked = call._templates, call._checked

    def add(self, call: PreparedCall) -> None:
        call._templates, call._checked = self._backwards, self._checked
        _keep_newest(self._templates.setdefault((call._planned.backend, call._planned.config), []), call)

    def resized(self, inputs: Inputs, options: tuple[Any, ...]) -> PreparedCall | None:
        """The call of the family with these inputs; None where there is no template for it."""
        problem = resized(self._problem, inputs, *options[:5])
        planned = plan(problem, options[-1])
        if planned.padded_from:
            return None
        for template in self._templates.get((planned.backend, planned.config), ()):
            forward = template.forward.resized(problem, inputs, planned.config)  # type: ignore[attr-defined]
            if forward is not None:
                call = PreparedCall(planned, forward, options)
                call._templates, call._checked = self._backwards, self._checked
                call.looks_transposed = not problem.packed and validate.looks_transposed(inputs.query, inputs.key)
                return call
        return None


_MOST_TEMPLATES = 4


def _keep_newest(templates: list[Any], one: Any) -> None:
    """Put a template before the others, and drop the oldest."""
    templates[:] = [one, *templates[: _MOST_TEMPLATES - 1]]


class _Attention(_SingleLevelFunction):
    """A prepared call with gradients. Of torch's two kinds of Function this is the one without torch.func's handling,
    which takes the op; `ctx` in forward: a separate setup_context would cost 20 us more."""

    @staticmethod
    def forward(
        ctx: Any, call: PreparedCall, places: tuple[int, ...], *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        inputs = _at(places, tensors)
        # Below what tracks views: torch's CPU op returns one, of which autograd would refuse a change in place at once.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            out, lse = call.forward(inputs, True)
            if COMPARE:
                _compare((out, lse), call.anew(call.arguments(inputs)).forward(inputs, True))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, places = ctx.needs_input_grad, ctx.places
        if grad_out is None and grad_lse is None:
            return (None,) * len(needed)
        *tensors, out, lse = ctx.saved_tensors
        inputs, call = _at(places, tensors), ctx.call
        wanted = tuple([place in places and needed[2 + places.index(place)] for place in _DIFFERENTIABLE])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        plain = type(grad_out) in PLAIN_TYPES and (grad_lse is None or type(grad_lse) in PLAIN_TYPES)
        if torch.is_grad_enabled() or not plain or not ENABLED or is_watched() or not _has_memory(grad_out, grad_lse):
            backward_op = torch.ops.stream_attention.backward.default
            grads = backward_op(grad_out, grad_lse, out, lse, list(wanted), *call.arguments(inputs))
        else:
            given = inputs, out, lse, grad_out, grad_lse, wanted
            grads = call.backward(*given)
            if COMPARE and call.is_deterministic:
                _compare(grads, call.anew(call.arguments(inputs)).backward(*given))
        by_place = dict(zip(_DIFFERENTIABLE, grads, strict=True))
        results = [by_place.get(place) if need else None for place, need in zip(places, needed[2:], strict=True)]
        return None, None, *results

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise AssertionError("forward mode takes the op")


_apply: Callable[..., Any] = _Attention.apply  # type: ignore[attr-defined]


def _at(places: tuple[int, ...], tensors: Sequence[Tensor]) -> Inputs:
    """Inputs of which those at `places` are there."""
    if places == (0, 1, 2):
        return Inputs(*tensors)
    found: list[Tensor | None] = [None] * _INPUTS
    for place, tensor in zip(places, tensors, strict=True):
        found[place] = tensor
    return Inputs._make(found)


def _has_memory(*tensors: Tensor | None) -> bool:
    """Whether each is its memory and no more: not batched by vmap, negated or a stand-in for zeros."""
    try:
        return all(t is None or (t.data_ptr() and not t.is_neg()) for t in tensors)
    except RuntimeError:
        return False


def _compare(cached: Iterable[Tensor | None], fresh: Iterable[Tensor | None]) -> None:
    for one, other in zip(cached, fresh, strict=True):
        if one is not None and other is not None and not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            raise RuntimeError(
                "launch cache: a cached call and one that was prepared anew differ. Please report the call; "
                "STREAM_ATTENTION_LAUNCH_CACHE=0 computes without the cache"
            )


def prepared(arguments: tuple[Any, ...]) -> PreparedCall:
    """The call of an op with these arguments: as it was prepared before, or prepared now."""
    tensors, options = arguments[:_INPUTS], arguments[_INPUTS:]
    key = key_of(tensors, options) if ENABLED else None
    call = None if key is None else get(key)
    if call is None:
        inputs = Inputs._make(tensors)
        call = None if key is None else resize(key, inputs, options)
        if call is None:
            call = prepare(arguments)
            if key is not None:
                keep(key, call, inputs)
    return call


def prepare(arguments: tuple[Any, ...]) -> PreparedCall:
    """Plan a call and bind its kernels."""
    problem, inputs, backend = problem_of(arguments)
    planned = plan(problem, backend)
    call = PreparedCall(planned, prepare_forward(planned, inputs), arguments[_INPUTS:])
    call.looks_transposed = not problem.packed and validate.looks_transposed(inputs.query, inputs.key)
    return call


_calls: dict[Hashable, PreparedCall] = {}
_lock = Lock()

_families: dict[Hashable, _Family] = {}
_seen_once: dict[int, None] = {}
"""Hashes of keys that were made from a template once."""

get = _calls.get
"""The prepared call with a key, or None."""


def resize(key: Hashable, inputs: Inputs, options: tuple[Any, ...]) -> PreparedCall | None:
    """The call with a key that is new, if calls of its family were prepared before."""
    family = family_of(key, inputs)
    relatives = None if family is None else _families.get(family)
    call = None if relatives is None else relatives.resized(inputs, options)
    if call is not None:
        # Kept from its second time on: lengths that never come back leave nothing for the garbage collector.
        identity = hash(key)
        if identity in _seen_once:
            add(key, call)
        else:
            with _lock:
                while len(_seen_once) >= LIMIT:
                    del _seen_once[next(iter(_seen_once))]
                _seen_once[identity] = None
    return call


def keep(key: Hashable, call: PreparedCall, inputs: Inputs) -> None:
    """Keep a call that was prepared, also as the template of its family."""
    add(key, call)
    family = family_of(key, inputs) if call.can_resize else None
    if family is not None:
        with _lock:
            relatives = _families.get(family)
            if relatives is None:
                while len(_families) >= LIMIT:
                    del _families[next(iter(_families))]
                relatives = _families[family] = _Family(call)
            relatives.add(call)


def add(key: Hashable, call: PreparedCall) -> None:
    with _lock:
        while len(_calls) >= LIMIT:
            del _calls[next(iter(_calls))]
        _calls[key] = call


def size() -> int:
    """How many calls are kept."""
    return len(_calls)


def clear() -> None:
    """Forget all calls."""
    with _lock:
        _calls.clear()
        _families.clear()
        _seen_once.clear()
