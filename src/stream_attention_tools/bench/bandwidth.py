"""How fast a device reads: what decoding cannot be faster than, measured in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .providers.base import installed
from .timing import Call, Clock, Latency, captured, interleaved

BYTES = {"cuda": 2 << 30, "cpu": 16 << 20}


def read_bandwidth(device: str, clock: Clock) -> dict[str, Any]:
    """TB/s at which a large buffer is read: by the fastest of several ways to add it up, and by each."""
    buffer = torch.randn(BYTES[device] // 2, device=device, dtype=torch.bfloat16)
    calls: dict[str, Call] = {name: _timed(way, clock) for name, way in _ways(buffer).items()}
    samples = interleaved(calls, clock, repeats=20, warmup=3)
    ways = {name: buffer.nbytes / Latency.of(its).median / 1e9 for name, its in samples.items()}
    fastest = max(ways, key=ways.__getitem__)
    return {"tb_per_s": ways[fastest], "way": fastest, "bytes": buffer.nbytes, "ways": ways}


def _ways(buffer: Tensor) -> dict[str, Callable[[], Tensor]]:
    wide = buffer.view(torch.float32)
    ways: dict[str, Callable[[], Tensor]] = {
        "torch.sum of bf16": lambda: buffer.sum(dtype=torch.float32),
        "torch.sum of fp32": lambda: wide.sum(),
    }
    if buffer.is_cuda and installed("triton"):
        from .read_kernel import read

        ways["a Triton sum of bf16"] = lambda: read(buffer)
    return ways


def _timed(way: Callable[[], Tensor], clock: Clock) -> Call:
    if clock != "graph":
        return lambda n: way()
    graph = captured([way], allowed=float("inf"))
    return lambda n: graph.replay()
