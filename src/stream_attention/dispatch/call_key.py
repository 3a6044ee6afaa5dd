"""The key of a call: all that decides how it is computed, and who must see its op."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..base.device import allows_tf32
from ..base.problem import AUTO, UNBOUNDED, Inputs
from . import plan as planning

_INPUTS = len(Inputs._fields)
FAR_SIDE = 1 << 40
"""A window side beyond every position, which the ops' integers still hold."""

PLAIN_TYPES = (Tensor, torch.nn.Parameter)


# Who must see the op, each false when asked unless it is there.
_transforms = torch._C._functorch.peek_interpreter_stack  # torch.func
_dispatch_modes = torch._C._len_torch_dispatch_stack  # fake tensors, flop counters, selective checkpointing
_function_modes = torch._C._len_torch_function_stack
_trace = torch._C._get_tracing_state  # torch.jit.trace

is_profiled = torch._C._autograd._profiler_enabled
"""Whether a profiler is to see a label."""


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


def options_of(head_dim: int, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments of an op behind its tensors and lengths, of `CallOptions` or a plain tuple of them; None where a
    call must be checked first. Types are looked at because 1 equals True as a key, but is refused."""
    causal, window, softcap, scale, dropout_p, seed, deterministic, return_lse, backend, _, _ = given
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
        left, right = min(window[0], FAR_SIDE), min(window[1], FAR_SIDE)
    if backend == AUTO:
        backend = planning._forced
    if backend == "reference":
        return None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    scale = max(head_dim, 1) ** -0.5 if scale is None else scale
    return causal, left, right, softcap, scale, dropout_p, deterministic, backend


def _is_seed(seed: Any) -> bool:
    return type(seed) is Tensor or (type(seed) is int and -(1 << 63) <= seed < 1 << 63)


class Key(NamedTuple):
    """All that decides how a call is computed. Calls that differ in `lengths` alone are a family."""

    family: Hashable
    lengths: Any  # a tuple: rows and strides of query, key and value, and the longest sequences of a pack


def key_of(inputs: tuple[Tensor | None, ...], lengths: tuple[int, int], options: tuple[Any, ...]) -> Key | None:
    """The key of a call: of its tensors, as the op takes them, the longest sequences of a pack (else 0), and its other
    arguments. None where a tensor is more than its memory, has none, or the query is on a GPU that is not the current
    one."""
    query, key, value = inputs[:3]
    if type(query) not in PLAIN_TYPES or type(key) not in PLAIN_TYPES or type(value) not in PLAIN_TYPES:
        return None
    assert query is not None and key is not None and value is not None
    try:
        device, q_at, k_at, v_at = query.get_device(), query.data_ptr(), key.data_ptr(), value.data_ptr()
        *q_batch, q_rows, q_heads, dim = query.shape
        *k_batch, k_rows, k_heads, k_dim = key.shape
        *v_batch, v_rows, v_heads, v_dim = value.shape
        rows = q_rows, k_rows, v_rows, query.stride(), key.stride(), value.stride(), lengths
    except (RuntimeError, ValueError):  # sparse and nested tensors have no address or strides; too few dims
        return None
    dtypes = query.dtype, key.dtype, value.dtype
    sizes = *q_batch, q_heads, dim, *k_batch, k_heads, k_dim, *v_batch, v_heads, v_dim
    places = device, key.get_device(), value.get_device(), q_at % 16, k_at % 16, v_at % 16
    family: tuple[Any, ...] = options, dtypes, sizes, places
    if (
        not len(q_batch) == len(k_batch) == len(v_batch)  # to be refused: its sizes might be those of another call
        or not (q_at and k_at and v_at)  # empty, or a tensor that stands for zeros or for another
        or query.is_neg()
        or key.is_neg()
        or value.is_neg()
        or (device >= 0 and is_elsewhere(device))
    ):
        return None
    others = [None if t is None else layout_of(t) for t in inputs[3:]]  # no `==`: of tensors that is an op
    if others != _ABSENT:
        if NO_LAYOUT in others:
            return None
        family += (*others,)
    if query.dtype is torch.float32:
        family += (allows_tf32(),)
    return Key(family, rows)


def is_elsewhere(device: int) -> bool:
    """Whether the GPU of this number is not the current one. A torch without CUDA numbers its own devices, as MPS."""
    return hasattr(torch._C, "_cuda_getDevice") and device != torch._C._cuda_getDevice()


_ABSENT = [None] * (_INPUTS - 3)
NO_LAYOUT: tuple[()] = ()


def layout_of(t: Tensor) -> tuple[Any, ...]:
    """How a tensor lies; `NO_LAYOUT` where it is more than its memory, or has none."""
    try:
        if type(t) not in PLAIN_TYPES or t.is_neg() or not (at := t.data_ptr()):
            return NO_LAYOUT
        return t.dtype, t.shape, t.stride(), t.get_device(), at % 16
    except RuntimeError:  # a sparse tensor
        return NO_LAYOUT


@lru_cache(maxsize=4096)
def are_aligned(strides: tuple[int, ...]) -> bool:
    """Whether the last dim is contiguous and all other strides are positive multiples of 8 elements, so that rows which
    begin on 16 bytes all do. Strides of 64 GB and more do not fit the word of a tensor map that is written."""
    if strides[-1] != 1:
        return False
    return not any([stride % 8 or not 0 < stride < _FAR_STRIDE for stride in strides[:-1]])  # noqa: C419


_FAR_STRIDE = 1 << 33  # elements: 64 GB at 8 bytes each
