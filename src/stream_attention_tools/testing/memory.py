"""How much memory a call needs beyond what was there before it."""

from __future__ import annotations

import gc
from collections.abc import Callable
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
