"""How the FP8 kernel for Hopper is configured: tables as data, and where each row comes from."""

from __future__ import annotations

from typing import NamedTuple

from ...base.problem import Problem
from .tuning import ROWS, forward_words, masks_beyond_first_block


class GluonFp8Config(NamedTuple):
    """One launch for Hopper: consumer warpgroups of 64 queries, keys per block, slots of the rings, order of work."""

    warpgroups: int
    block_n: int
    q_slots: int
    k_slots: int
    v_slots: int
    in_turn: bool  # warpgroups issue their products one after the other
    two_level: bool  # products P V of a block begin at zero and are added in fp32
    apart: bool  # P V of a block is done before Q K of the next begins, to need fewer registers
    parts: int  # in which the columns of P V are computed, to need fewer registers
    conditional_rescale: bool  # p uses the row max of the blocks before, where that is high enough
    sums_first: bool  # products are added before the next P is computed, not after: faster at D 64, not at 128
    consumer_registers: int
    producer_registers: int

    @property
    def tile(self) -> int:
        """Rows of a tile of queries."""
        return self.warpgroups * ROWS

    def __str__(self) -> str:
        sums = "blocks accumulated in fp32" if self.two_level else "accumulated by the tensor cores"
        return f"{forward_words(self)}, {sums}"

    @property
    def cache_key(self) -> str:
        """As that of GluonConfig."""
        return repr(self)


# NVIDIA H200, 2026-11-16, torch 2.11.0+cu130, Triton 3.6.0, batch * length = 16384, hidden 2048, 8k: the best of 6-14
# configurations per head dim whose blocks are added in fp32 (benchmarks/results/h200/sweeps, 14, 15 and 17). At D 256
# sums left to the matrix units would be 1.09 times as fast, and biased (docs/performance.md).
GLUON = {
    64: GluonFp8Config(3, 128, 2, 3, 3, False, True, False, 1, True, True, 160, 32),
    128: GluonFp8Config(2, 128, 2, 3, 3, False, True, False, 1, True, False, 240, 24),
    256: GluonFp8Config(2, 128, 1, 2, 2, True, True, True, 2, False, False, 240, 24),
}


# Not timed: where edges are looked for in every block, three warpgroups have too few registers for it.
GLUON_D64_CUT = GluonFp8Config(2, 128, 2, 3, 3, False, True, False, 1, True, False, 240, 24)


def configure(problem: Problem) -> GluonFp8Config:
    config = GLUON[problem.head_dim]
    return GLUON_D64_CUT if problem.head_dim == 64 and masks_beyond_first_block(problem, config.block_n) else config
