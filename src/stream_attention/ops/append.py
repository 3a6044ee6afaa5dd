"""Appending to a cache by a kernel, which `cache_views` calls where there is one: kernels are layers above caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..backends import runs_triton
from ..base.kv_layouts import ContiguousKV, KVCache, PagedKV, Rotary, checks
from ..base.kv_layouts.base import Cache


def append_by_kernel(kv: KVCache, key: Tensor, value: Tensor, rotary: Rotary | None) -> bool:
    """Append by the Triton kernel and return True; False where it does not support these tensors."""
    lengths = kv.lengths
    if lengths is None or not isinstance(kv, (ContiguousKV, PagedKV)) or torch.compiler.is_compiling():
        return False
    stores, tables = kv._plain(), () if rotary is None else rotary[:2]
    tensors = (key, value, *stores, lengths, *tables)
    if any(type(t) is not Tensor or t.is_neg() for t in tensors):  # fake tensors, and views that differ from memory
        return False
    if key.dtype is torch.float64 or any(table.dtype not in checks.DTYPES for table in tables):
        return False
    launch = _launcher(stores[0].device)
    if launch is None:
        return False
    launch(key, value, *stores, getattr(kv, "page_table", None), lengths, kv.capacity, rotary)
    return True


@cache
def _launcher(device: torch.device) -> Callable[..., None] | None:
    """The launcher of the kernel on a device; None where torch operations append: without Triton, on a GPU that no
    kernel supports, or on another device."""
    if not runs_triton(device):
        return None
    from ..gpu.append import launch_append

    return launch_append


Cache.append_kernel = append_by_kernel
