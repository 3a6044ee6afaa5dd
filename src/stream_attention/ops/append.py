"""Appending to a cache by a kernel, which caches call where there is one: kernels are layers above caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends.installed import runs_triton
from ..base.kv_layouts import ContiguousKV, PagedKV, Rotary, checks
from ..base.kv_layouts.base import Cache
from ..dispatch import call_key, launch_cache
from ..dispatch.call_key import Key, layout_of


def prepared_append(kv: Cache, key: Any, value: Any, rotary: Any, is_checked: bool) -> Callable[[], None] | None:
    """The append by the Triton kernel: of tensors that lie as some did that were checked, or differ from them in the
    number of tokens alone, or of any that `is_checked`. None where these must be checked first, or no kernel does."""
    if not isinstance(kv, (ContiguousKV, PagedKV)) or (rotary is not None and type(rotary) is not Rotary):
        return None
    cache_key, call, (tensors, interleaved) = None, None, _tensors(kv, key, value, rotary)
    if launch_cache.ENABLED and not call_key.is_watched():
        cache_key = _key_of(tensors, interleaved, kv.capacity)
        call = None if cache_key is None else launch_cache.find(cache_key, tensors, kv.capacity)
    if call is None:
        if not is_checked or not _has_kernel(tensors):
            return None
        from ..gpu.append import Append

        call = Append.prepare(tensors, kv.capacity, bool(interleaved))
        if cache_key is not None:
            launch_cache.keep(cache_key, call, template=call)
    return partial(launch_cache.write, "append", call, tensors, (2, 3, -1), kv.capacity, bool(interleaved))


def _has_kernel(tensors: tuple[Any, ...]) -> bool:
    """Whether the Triton kernel supports the tensors of an append that was checked."""
    if torch.compiler.is_compiling() or any(t is not None and (type(t) is not Tensor or t.is_neg()) for t in tensors):
        return False  # fake tensors, and views that differ from memory
    key, *_, cos, sin, _, _ = tensors
    dtypes = [t.dtype for t in (cos, sin) if t is not None]
    return key.dtype is not torch.float64 and not {*dtypes} - {*checks.DTYPES} and runs_triton(key.device)


def _tensors(kv: Any, key: Any, value: Any, rotary: Any) -> tuple[tuple[Any, ...], bool]:
    """Those of an append, in the order in which the kernel takes them, and whether pairs are interleaved."""
    cos, sin, interleaved = (None, None, False) if rotary is None else rotary
    stores, table = kv._plain(), getattr(kv, "page_table", None)
    return (key, value, *stores, cos, sin, table, kv.lengths), interleaved


def _key_of(tensors: tuple[Any, ...], interleaved: Any, capacity: int) -> Key | None:
    """The key of an append; None where a tensor is more than its memory, has none, or may not be written to."""
    if type(interleaved) is not bool:
        return None
    for t in tensors:
        if t is not None and (type(t) is not Tensor or t.is_inference()):
            return None
    new, others = [layout_of(t) for t in tensors[:2]], [None if t is None else layout_of(t) for t in tensors[2:]]
    if call_key.NO_LAYOUT in new or call_key.NO_LAYOUT in others or tensors[0].dim() != 4:
        return None
    kinds = [(dtype, shape[:1], shape[2:], device, offset) for dtype, shape, _, device, offset in new]
    lengths = [(shape[1], strides) for _, shape, strides, _, _ in new]
    return Key((prepared_append, interleaved, capacity, *kinds, *others), (*lengths,))


Cache.prepared_append = prepared_append
