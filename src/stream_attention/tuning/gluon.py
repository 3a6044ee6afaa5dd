"""How the Gluon kernels for Hopper are configured: tables as data, and where each row comes from."""

from __future__ import annotations

from typing import NamedTuple

from ..problem import UNBOUNDED, Problem

ROWS = 64
"""Query rows of a consumer warpgroup."""

WIDTHS = {(64, 64), (128, 128), (256, 256), (256, 128)}
"""Tiles of head dims (of queries and keys, of values) that there are rows for."""


class GluonConfig(NamedTuple):
    """One launch: consumer warpgroups of 64 queries, keys per block, slots of the rings, order and epilogue."""

    warpgroups: int
    block_n: int
    q_slots: int
    k_slots: int
    v_slots: int
    dynamic: bool  # the next tile comes from a counter; else every program has its own
    by_tma: bool  # the output leaves through shared memory; else from registers
    consumer_registers: int
    producer_registers: int

    def __str__(self) -> str:
        order = "dynamic" if self.dynamic else "static"
        store = "TMA" if self.by_tma else "registers"
        return (
            f"{self.warpgroups} warpgroups of {ROWS} queries, blocks of {self.block_n} keys, "
            f"{self.q_slots}/{self.k_slots}/{self.v_slots} slots of Q/K/V, {order} order, stored by {store}"
        )


def tile_widths(problem: Problem) -> tuple[int, int]:
    """Columns of the tiles of queries and keys, and of values: powers of two from 64."""
    dim, value_dim = (max(64, 1 << (d - 1).bit_length()) for d in (problem.head_dim, problem.value_dim))
    return dim, value_dim


SHORT = 1 << 33
"""Multiplications below which the host decides: at 8.6e9 the kernel runs for 30 us, about what a call costs."""


def short(problem: Problem) -> bool:
    """Whether a call is so short that what the host does for it decides."""
    products = problem.batch * problem.q_heads * problem.q_len * problem.k_len
    return products * (problem.head_dim + problem.value_dim) < SHORT


# NVIDIA H200, 2026-11-15, torch 2.11.0+cu130, Triton 3.6.0, bf16, batch * length = 16384, hidden 2048: the best of 6-9
# configurations per head dim at 512 to 16k (benchmarks/results/h200/sweeps/7-gluon-forward.json), as a multiple of the
# fastest of FA3 and cuDNN in the same run.
D64 = GluonConfig(3, 128, 2, 3, 3, True, True, 160, 32)  # x0.96-1.03 full, x0.93-0.95 causal from 2k
D64_SHORT_CAUSAL = GluonConfig(2, 128, 2, 3, 3, True, True, 240, 24)  # x0.95-0.97 up to 1k, D64 x0.87-0.88
D128 = GluonConfig(2, 128, 2, 3, 2, True, True, 240, 24)  # x0.97-1.04 full, x0.91-0.98 causal
D256 = GluonConfig(2, 64, 1, 2, 2, True, True, 232, 40)  # x0.85-1.02 causal
D256_FULL = D256._replace(dynamic=False)  # x0.93-1.00; D256 1 % less

# Not timed yet: what the compiler keeps in registers.
D64_DROPOUT = GluonConfig(2, 64, 2, 3, 3, True, True, 240, 24)
D128_DROPOUT = GluonConfig(2, 64, 2, 3, 3, True, True, 240, 24)
D256_DROPOUT = GluonConfig(2, 32, 1, 3, 3, True, True, 232, 40)


def configure(problem: Problem) -> GluonConfig:
    """The configuration of a forward."""
    dim, value_dim = tile_widths(problem)
    causal = problem.right != UNBOUNDED
    if problem.dropout_p:
        config = {64: D64_DROPOUT, 128: D128_DROPOUT, 256: D256_DROPOUT}[dim]
    elif dim == 64:
        config = D64_SHORT_CAUSAL if causal and problem.k_len <= 1024 else D64
    elif dim == 128:
        config = D128
    else:
        config = D256 if causal else D256_FULL
    # TMA writes whole tiles in the dtype and width of the queries; sequences of a pack end inside a tile.
    by_tma = not (problem.packed or problem.partial or dim != value_dim)
    return config._replace(by_tma=by_tma, dynamic=config.dynamic or problem.packed)
