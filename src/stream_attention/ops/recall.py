"""A call like one before, without the checks and choices that came out the same way before.

Checking a call, stating its problem, planning it and passing torch's dispatcher take longer on the host than a short
kernel takes on a GPU. All they look at in a plain call (no mask, bias, slopes, sink or dropout) are its facts, so one
with the facts of an earlier call goes straight to the launch which that call made. It does so only where nobody but the
kernel has a say: for gradients, autocast, torch.func, torch.compile, modes, traces and a profiler of this thread the op
must be seen. Others who watch ops (an execution trace, a kernel registered for the op later) see first calls alone;
`recall.ENABLED = False` turns repeats off.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import plan as planning
from ..backends import BY_NAME, interpreting
from .library import problem_of

Repeat = Callable[[Tensor, Tensor, Tensor, bool], Any]
"""Computes a call anew on a query, key and value of the same facts; the last says whether to return the LSE too."""

MOST = 4096
"""How many calls are remembered before all are forgotten: lengths that never come back must not pile up."""

ON_CPU = interpreting()
"""CPU tensors have launches only in Triton's interpreter."""

ENABLED = True
"""Whether calls are repeated at all."""

_known: dict[Hashable, Repeat | None] = {}
"""By the facts of a call; None where its backend cannot repeat it."""


def _watchers() -> tuple[Callable[[], Any], ...]:
    """Who might want to see the op, each false when asked unless it does."""
    return (
        torch._C._is_any_autocast_enabled,
        torch._C._functorch.peek_interpreter_stack,  # torch.func
        torch._C._len_torch_dispatch_stack,  # modes: fake tensors, flop counters, selective checkpointing
        torch._C._len_torch_function_stack,
        torch._C._get_tracing_state,  # torch.jit.trace
        torch._C._autograd._profiler_enabled,
    )


try:
    _autocast, _transforms, _dispatch_modes, _function_modes, _trace, _profiler = _watchers()
except AttributeError:  # another torch: every call takes the ordinary way
    ENABLED = False


def facts_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    window: tuple[int, int] | None,
    softcap: float,
    scale: float | None,
    deterministic: bool | None,
    backend: str,
) -> Hashable | None:
    """All that decides how a plain call is computed; None where it must take the ordinary way."""
    if (
        type(query) is not Tensor
        or type(key) is not Tensor
        or type(value) is not Tensor
        or query.is_neg()
        or key.is_neg()
        or value.is_neg()
        or type(causal) is not bool  # 1 equals True in a dict, but is refused
        or (deterministic is not None and type(deterministic) is not bool)
        or (window is not None and not _is_window(window))
        or type(softcap) is not float
        or (scale is not None and type(scale) is not float)
        or type(backend) is not str
        or query.dtype is torch.float32  # how it is multiplied depends on a global switch
        or _transforms() is not None
        or _dispatch_modes()
        or _function_modes()
        or _autocast()
        or _trace() is not None
        or _profiler()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    ):
        return None
    try:
        device, q_at, k_at, v_at = query.get_device(), query.data_ptr(), key.data_ptr(), value.data_ptr()
        facts = (
            device,
            key.get_device(),
            value.get_device(),
            query.dtype,
            key.dtype,
            value.dtype,
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            q_at % 16,
            k_at % 16,
            v_at % 16,
            causal,
            window,
            softcap,
            scale,
            torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
            backend,
            planning._forced,
        )
    except RuntimeError:  # sparse and nested tensors have no address or shape
        return None
    if not (q_at and k_at and v_at):  # nothing is there: empty, or a tensor that stands for zeros or for another
        return None
    if device >= 0 and device != torch._C._cuda_getDevice():
        return None
    return facts


def _is_window(window: object) -> bool:
    """(1.0, False) equals (1, 0) in a dict, but is refused."""
    return type(window) is tuple and len(window) == 2 and type(window[0]) is type(window[1]) is int


known = _known.get
"""The launch of an earlier call with these facts, or None."""


def remember(facts: Hashable, arguments: tuple[Any, ...], out: Tensor, lse: Tensor) -> None:
    """Keep the launch that a call with these facts made, if its backend can repeat it."""
    if facts in _known:
        return
    problem, inputs, backend = problem_of(arguments)
    planned = planning.plan(problem, backend)
    repeat = None if planned.padded_from else getattr(BY_NAME[planned.backend].load(), "repeat", None)
    if len(_known) >= MOST:
        _known.clear()
    _known[facts] = None if repeat is None else repeat(problem, inputs, planned.config, out, lse)
