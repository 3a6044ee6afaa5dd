"""CPU time of calls on one thread, for tests that compare: what else the machine does hardly changes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch


def least_cpu_time(runs: int, *functions: Callable[[], Any]) -> list[float]:
    """The least time of each in seconds, taken in turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = [math.inf] * len(functions)
    try:
        for _ in range(runs):
            for n, function in enumerate(functions):
                start = time.process_time()
                function()
                best[n] = min(best[n], time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return best
