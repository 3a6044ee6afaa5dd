"""Appending to a cache by a kernel, which caches call where there is one: kernels are layers above caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends.installed import runs_triton
from ..base.kv_layouts import ContiguousKV, KVCache, PagedKV, Rotary, checks
from ..base.kv_layouts.base import Cache
from ..dispatch import launch_cache
from ..dispatch.launch_cache import Key, layout_of


def append_by_kernel(kv: KVCache, key: Tensor, value: Tensor, rotary: Rotary | None) -> bool:
    """Append what was checked by the Triton kernel and return True; False where it does not support these tensors."""
    if kv.lengths is None or not isinstance(kv, (ContiguousKV, PagedKV)) or torch.compiler.is_compiling():
        return False
    tables = () if rotary is None else rotary[:2]
    given = (key, value, *kv._plain(), kv.lengths, *tables)
    if any(type(t) is not Tensor or t.is_neg() for t in given):  # fake tensors, and views that differ from memory
        return False
    if key.dtype is torch.float64 or any(table.dtype not in checks.DTYPES for table in tables):
        return False
    if not runs_triton(key.device):
        return False
    from ..gpu.append import Append

    tensors, interleaved = _tensors(kv, key, value, rotary)
    call = Append.prepare(tensors, kv.capacity, interleaved)
    if launch_cache.ENABLED and not launch_cache.is_watched():
        cache_key = _key_of(tensors, interleaved, kv.capacity)
        if cache_key is not None:
            launch_cache.keep(cache_key, call, template=call)
    call(tensors)
    return True


def cached_append(kv: Cache, key: Any, value: Any, rotary: Any) -> Callable[[], None] | None:
    """The append of tensors that lie as some did that were checked, or differ from them in the number of tokens alone;
    None where they must be checked first."""
    if not launch_cache.ENABLED or launch_cache.is_watched() or not isinstance(kv, (ContiguousKV, PagedKV)):
        return None
    if rotary is not None and (type(rotary) is not Rotary or type(rotary.interleaved) is not bool):
        return None
    tensors, interleaved = _tensors(kv, key, value, rotary)
    capacity = kv.capacity
    cache_key = _key_of(tensors, interleaved, capacity)
    if cache_key is None:
        return None
    call = launch_cache.find(cache_key, tensors, capacity)
    return None if call is None else partial(_run, call, tensors, capacity, interleaved)


def _tensors(kv: Any, key: Any, value: Any, rotary: Any) -> tuple[tuple[Any, ...], bool]:
    """Those of an append, in the order in which the kernel takes them, and whether pairs are interleaved."""
    cos, sin, interleaved = (None, None, False) if rotary is None else rotary
    stores, table = kv._plain(), getattr(kv, "page_table", None)
    return (key, value, *stores, cos, sin, table, kv.lengths), bool(interleaved)


def _key_of(tensors: tuple[Any, ...], interleaved: bool, capacity: int) -> Key | None:
    """The key of an append; None where a tensor is more than its memory, has none, or may not be written to."""
    for t in tensors:
        if t is not None and (type(t) is not Tensor or t.is_inference()):
            return None
    new, others = [layout_of(t) for t in tensors[:2]], [None if t is None else layout_of(t) for t in tensors[2:]]
    if launch_cache.NO_LAYOUT in new or launch_cache.NO_LAYOUT in others or tensors[0].dim() != 4:
        return None
    kinds = [(dtype, shape[:1], shape[2:], device, offset) for dtype, shape, _, device, offset in new]
    lengths = [(shape[1], strides) for _, shape, strides, _, _ in new]
    return Key((append_by_kernel, interleaved, capacity, *kinds, *others), (*lengths,))


def _run(call: Any, tensors: tuple[Any, ...], capacity: int, interleaved: bool) -> None:
    """Append, and compare what was written with what a call that is prepared anew writes if asked to."""
    if not launch_cache.COMPARE:
        return launch_cache.labelled("append", call, tensors)
    from ..gpu.append import Append

    copies = tuple(t if t is None else t.clone() for t in tensors)
    Append.prepare(copies, capacity, interleaved)(copies)
    launch_cache.labelled("append", call, tensors)
    launch_cache.compare(tensors[2:4], copies[2:4])
    launch_cache.compare(tensors[-1:], copies[-1:])


Cache.append_kernel, Cache.cached_append = append_by_kernel, cached_append
