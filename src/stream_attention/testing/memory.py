"""How much memory a call needs beyond what was there before it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(fn: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most bytes that torch held at any moment of `fn()` beyond those held when it began.

    What `fn` returns is dropped at the end. Warm up first: what is cached for ever would be counted too.

    >>> peak_bytes(lambda: torch.zeros(1000).add(1).sum()) // 1000
    8
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise ValueError(f"device: expected cpu or cuda; got {device}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when the profiler starts first; else it chatters on stderr
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        fn()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
