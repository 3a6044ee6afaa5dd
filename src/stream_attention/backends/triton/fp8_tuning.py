"""How the portable FP8 kernel is configured: a table as data, by head dim."""

from __future__ import annotations

from ...base.problem import Problem
from .tuning import Tile

# By the compiler's report alone (Triton 3.6.0, 2026-11-16): no sm_89 was there to measure on. On it and on sm_90 these
# spill nothing, causal or not, with a window, packed (tests/backends/triton/test_forward_fp8_compiled.py).
TRITON = {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)}


def configure(problem: Problem) -> Tile:
    return TRITON[problem.head_dim]
