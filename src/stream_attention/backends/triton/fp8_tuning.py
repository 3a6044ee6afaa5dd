"""How the portable FP8 kernel is configured: a table as data, and where it comes from."""

from __future__ import annotations

from typing import NamedTuple

from ...base.problem import Problem


class TritonFp8Config(NamedTuple):
    """One launch of the portable kernel."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return (
            f"tiles of {self.block_m} queries, blocks of {self.block_n} keys, {self.num_warps} warps, "
            f"{self.num_stages} stages"
        )


# By the compiler's report alone (Triton 3.6.0, 2026-11-16): no sm_89 was there to measure on. On it and on sm_90 these
# spill nothing, causal or not, with a window, packed (tests/backends/triton/test_forward_fp8_compiled.py).
TRITON = {
    64: TritonFp8Config(64, 64, 4, 3),
    128: TritonFp8Config(128, 64, 8, 3),
    256: TritonFp8Config(64, 64, 8, 2),
}


def configure(problem: Problem) -> TritonFp8Config:
    return TRITON[problem.head_dim]
