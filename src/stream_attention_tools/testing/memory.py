"""How much memory a call needs beyond what was there before it, and memory that nobody has written: it is NaN, so a
kernel that forgets an element cannot pass."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .allocator import allocator_of


def peak_bytes(fn: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most bytes that torch has allocated at any moment of `fn()` beyond those when it began.

    What `fn` returns is dropped at the end. Warm up first: what is cached for ever would be counted too.

    >>> peak_bytes(lambda: torch.zeros(1000).add(1).sum()) // 1000
    8
    """
    allocator = allocator_of(device)
    gc.collect()
    if allocator.device.type == "cuda":
        torch.cuda.synchronize(allocator.device)
    allocator.open()
    before = allocator.read().allocated
    try:
        fn()
        if allocator.device.type == "cuda":
            torch.cuda.synchronize(allocator.device)
        return max(0, allocator.read().peak - before)
    finally:
        allocator.close()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its kind allocate in this block with NaN (integers: their largest value).

    Process-wide. torch does it only where deterministic algorithms are on, so they are in this block, and a call that
    leaves `deterministic=None` follows them: pass it explicitly.

    >>> with poisoned_memory():
    ...     torch.empty(2).tolist()
    [nan, nan]
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
