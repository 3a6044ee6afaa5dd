"""How the Gluon kernels for Hopper are configured: tables as data, and where each row comes from."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...base.problem import UNBOUNDED, Problem

ROWS = 64
"""Query rows of a consumer warpgroup."""

WIDTHS = {(64, 64), (128, 128), (256, 256), (256, 128)}
"""Tiles of head dims (of queries and keys, of values) that there are rows for."""


def forward_words(config: Any) -> str:
    """What `explain` says of every forward."""
    turns = " (ping-pong)" if config.in_turn else ""
    return (
        f"{config.warpgroups} warpgroups of {ROWS} queries{turns}, blocks of {config.block_n} keys, "
        f"{config.q_slots}/{config.k_slots}/{config.v_slots} stages for Q/K/V"
    )


class GluonConfig(NamedTuple):
    """One launch: consumer warpgroups of 64 queries, keys per block, slots of the rings, order of work."""

    warpgroups: int
    block_n: int
    q_slots: int
    k_slots: int
    v_slots: int
    by_tma: bool  # the output leaves through shared memory; else from registers
    in_turn: bool  # warpgroups issue their products one after the other
    rescale_late: bool  # while the next product Q K runs, where the exponentials are too few to hide it
    keys_first: bool  # are waited for at the head of the loop, and ptxas chooses where P V is
    consumer_registers: int
    producer_registers: int

    @property
    def tile(self) -> int:
        """Rows of a tile of queries."""
        return self.warpgroups * ROWS

    def __str__(self) -> str:
        return f"{forward_words(self)}, output stored {'by TMA' if self.by_tma else 'from registers'}"

    @property
    def cache_key(self) -> str:
        """By which Triton's cache tells constants of kernels apart."""
        return repr(self)


def tile_widths(problem: Problem) -> tuple[int, int]:
    """Columns of the tiles of queries and keys, and of values: powers of two from 64."""
    *_, dim, value_dim = problem.shape
    return max(64, 1 << (dim - 1).bit_length()), max(64, 1 << (value_dim - 1).bit_length())


SHORT = 1 << 33
"""Multiplications below which the host decides: at 8.6e9 the kernel runs for 30 us, about what a call costs. A guess:
the two kernels were not timed around it."""


def short(problem: Problem) -> bool:
    """Whether a call is so short that what the host does for it decides."""
    products = problem.batch * problem.q_heads * problem.q_len * problem.k_len
    return products * (problem.head_dim + problem.value_dim) < SHORT


# NVIDIA H200, 2026-11-15, torch 2.11.0+cu130, Triton 3.6.0, bf16, batch * length = 16384, hidden 2048: the best of 6-12
# configurations per head dim at 512 to 16k (benchmarks/results/h200/sweeps/, 7 and 8). Behind each its speed, as a
# multiple of the fastest of FA3, cuDNN and SDPA flash in the same run (benchmarks/results/h200/forward.json).
D64 = GluonConfig(3, 128, 2, 3, 3, True, True, False, False, 160, 32)  # x1.02-1.09 full, x1.03-1.05 causal from 2k
D64_SHORT_CAUSAL = GluonConfig(2, 128, 2, 3, 3, True, True, False, False, 240, 24)  # x1.01-1.09 up to 1k
D128 = GluonConfig(2, 128, 2, 3, 2, True, False, False, False, 240, 24)  # x1.01-1.05 full, x0.98-1.07 causal
D256 = GluonConfig(2, 64, 1, 2, 2, True, False, True, True, 232, 40)  # x0.97-1.01 full, x0.98-1.02 causal

# Not timed against others: what the compiler keeps in registers, and where it waits.
D256_MODIFIED = D256._replace(keys_first=False)
D64_DROPOUT = GluonConfig(2, 64, 2, 3, 3, True, False, False, False, 240, 24)
D128_DROPOUT = GluonConfig(2, 64, 2, 3, 3, True, False, False, False, 240, 24)
D256_DROPOUT = GluonConfig(2, 32, 1, 3, 3, True, False, True, False, 232, 40)


def masks_beyond_first_block(problem: Problem, block_n: int) -> bool:
    """Whether more than one block of keys of a warpgroup may be cut by an edge.

    The right edge of 64 rows is 64 keys wide. If it begins at a multiple of 64 keys, as blocks of 64 and 128 do, it
    stays within one block, the first.
    """
    (left, right), positions = problem.window, problem.positions
    begins = positions.q_start - positions.k_start + right
    right_in_one = not problem.packed and begins % ROWS == 0 and block_n % ROWS == 0
    return left != UNBOUNDED or (right != UNBOUNDED and not right_in_one)


def loads_masked_kv(problem: Problem) -> bool:
    """Whether there are keys that no query sees, before the window of the first or behind that of the last."""
    (left, right), positions = problem.window, problem.positions
    offset = positions.q_start - positions.k_start
    before = left != UNBOUNDED and offset - left > 0
    behind = right != UNBOUNDED and problem.q_len + offset + right < problem.k_len
    return before or behind


def configure(problem: Problem) -> GluonConfig | GluonBackwardConfig:
    """The configuration of a forward, or of a backward."""
    if problem.backward:
        return configure_backward(problem)
    dim, value_dim = tile_widths(problem)
    causal = problem.right != UNBOUNDED
    if problem.dropout_p:
        config = {64: D64_DROPOUT, 128: D128_DROPOUT, 256: D256_DROPOUT}[dim]
    elif dim == 64:
        config = D64_SHORT_CAUSAL if causal and problem.k_len <= 1024 else D64
    elif dim == 128:
        config = D128
    else:
        plain = dim == value_dim and not (problem.partial or problem.packed or problem.alibi or problem.softcap)
        config = D256 if plain and not masks_beyond_first_block(problem, D256.block_n) else D256_MODIFIED
    return config._replace(by_tma=not problem.partial)  # fp32 does not fit where the queries were


def joining(problem: Problem, config: GluonConfig) -> tuple[GluonConfig, int]:
    """The configuration of a forward that joins a state, and how many warpgroups have a place in shared memory that is
    only for their tile of it, 64 rows of fp32.

    At D 128 a second slot of queries makes room for one of two. The other takes a turn in the ring of keys, whose slots
    are as large; with three of them two blocks are loaded ahead all the same. Not timed yet.
    """
    if tile_widths(problem) == (128, 128) and config.block_n == 128:
        return config._replace(q_slots=1, k_slots=3, v_slots=2), 1
    return config, config.warpgroups


KEYS = 64
"""Keys of a consumer warpgroup of the backward; a program has two."""


class BackwardPart(NamedTuple):
    """A launch of a backward."""

    makes: str  # "all", or "key" (dK and dQ) or "value" (dV)
    slots: int  # of the rings
    consumer_registers: int
    warp_registers: int  # of the other roles


class GluonBackwardConfig(NamedTuple):
    """A backward: queries per block, launches, order of work."""

    block_m: int
    parts: tuple[BackwardPart, ...]
    places: int  # where chunks of dQ that are finished land
    halves: bool  # exponentials and dS by halves of the columns, to need fewer registers
    peel: bool  # blocks that no edge cuts have a loop of their own; they are the last ones then

    def __str__(self) -> str:
        launches = "one pass" if len(self.parts) == 1 else f"{len(self.parts)} passes"
        return f"{launches}, tiles of {2 * KEYS} keys, blocks of {self.block_m} queries"

    @property
    def cache_key(self) -> str:
        """As that of GluonConfig."""
        return repr(self)


# NVIDIA H200, 2026-11-15, torch 2.11.0+cu130, Triton 3.6.0, bf16, batch * length = 16384, hidden 2048: the best of 6-12
# configurations per head dim at 512 to 16k (benchmarks/results/h200/sweeps/9-gluon-backward.json). Modified calls were
# not timed against others.
_ONE_PASS = BackwardPart("all", 2, 240, 24)
BACKWARD_D64 = GluonBackwardConfig(128, (_ONE_PASS,), places=1, halves=True, peel=False)
BACKWARD_D64_LONG_CAUSAL = BACKWARD_D64._replace(places=2, peel=True)  # x1.01-1.02 at 16k, slower up to 4k
BACKWARD_D128 = GluonBackwardConfig(64, (_ONE_PASS,), places=2, halves=False, peel=False)
_TWO_PASSES = BackwardPart("key", 1, 240, 24), BackwardPart("value", 2, 232, 40)
BACKWARD_D256 = GluonBackwardConfig(64, _TWO_PASSES, places=2, halves=False, peel=False)


def has_edges(problem: Problem) -> bool:
    """Whether there are tiles of keys by queries of which some do not exist, or are not seen."""
    return problem.packed or problem.window != (UNBOUNDED, UNBOUNDED) or problem.k_len % (2 * KEYS) != 0


def peelable(problem: Problem) -> bool:
    """Whether, for a tile of keys, the blocks of queries that an edge cuts come first."""
    return not problem.packed and problem.left == UNBOUNDED and problem.right != UNBOUNDED


def has_idle_queries(problem: Problem) -> bool:
    """Whether there are queries that see no key."""
    (left, right), positions = problem.window, problem.positions
    offset = positions.q_start - positions.k_start
    before = right != UNBOUNDED and offset + right < 0
    behind = left != UNBOUNDED and problem.q_len - 1 + offset - left > problem.k_len - 1
    return before or behind


def configure_backward(problem: Problem) -> GluonBackwardConfig:
    """The configuration of a backward."""
    config = {64: BACKWARD_D64, 128: BACKWARD_D128, 256: BACKWARD_D256}[tile_widths(problem)[0]]
    modified = problem.alibi or problem.softcap or problem.dropout_p
    if config is BACKWARD_D64 and problem.q_len > 8192 and peelable(problem) and not modified:
        return BACKWARD_D64_LONG_CAUSAL
    return config
