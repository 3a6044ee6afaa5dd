"""How few queries against a cache are computed: the tile, and in how many parts a row's keys are split.

Rows are the queries of all heads that share a KV head. Nothing is known here of a row's length: parts share it on the
device, so a short row in a large cache is split as finely as a long one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..cache_views.quantized_tensor import Coding
from ..problem import UNBOUNDED, Problem

INVARIANT_KEYS = 2048
"""Keys of a part of a batch-invariant call: whatever the batch, a row's sums are cut in the same places."""

EAGER_KEYS = 1024
"""Keys at a time in plain torch."""

WIDENED_ELEMENTS = 1 << 18
"""Elements of a row's keys in half precision that are widened at once for torch's CPU flash op, 1 MiB in fp32. AMD
EPYC, one core, torch 2.13, bf16, 8 heads of 64, 8k keys, 2026-11-18, ms by keys at a time: 128 4.5, 256 3.4, 512 2.9,
1024 2.9, 2048 3.2."""

MOST_ROWS = 64
"""Rows of a tile at most."""


def widened_keys(elements: int) -> int:
    """How many keys, of so many elements each, are widened at once."""
    return max(256, WIDENED_ELEMENTS // max(elements, 1))


class DecodeProblem(NamedTuple):
    """What a call on a cache has to compute, without its tensors."""

    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    capacity: int  # keys that a row can hold
    span: int  # keys that its queries see at most, of those
    dtype: torch.dtype
    coding: Coding | None
    page: int  # tokens of a page; 0: none
    device: torch.device
    arch: int
    processors: int

    @property
    def kind(self) -> str:
        return "decode"

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of a KV head."""
        return self.group * self.q_len

    @property
    def lines(self) -> int:
        return self.batch * self.kv_heads

    @property
    def block_r(self) -> int:
        """Rows of a tile: a power of two, at least what a matrix instruction takes of its first or second factor."""
        least, most = (16, MOST_ROWS) if self.coding is None else (8, 16)
        return max(least, min(most, 1 << (self.rows - 1).bit_length()))

    @property
    def tiles_r(self) -> int:
        return -(-self.rows // self.block_r)

    @property
    def width(self) -> int:
        return max(self.head_dim, self.value_dim)

    def __str__(self) -> str:
        kind = f"pages of {self.page}" if self.page else "contiguous"
        return (
            f"B={self.batch} Tq={self.q_len} Hq={self.q_heads} Hkv={self.kv_heads} D={self.head_dim} "
            f"Dv={self.value_dim} {str(self.dtype).removeprefix('torch.')} on {self.device}, {kind}, "
            f"{'quantised to ' + self.coding.format + ', ' if self.coding else ''}up to {self.capacity} keys"
        )


def configure_eager(problem: DecodeProblem, *_: object) -> str:
    """How plain torch computes a call on a cache, in words."""
    tiles = f"plain torch, tiles of {EAGER_KEYS} keys"
    by_op = problem.device.type == "cpu" and not problem.page and problem.coding is None
    if not by_op or problem.head_dim != problem.value_dim:
        return tiles
    return f"torch's CPU flash op over the keys of each row; with a softcap {tiles}"


FEWEST_KEYS = 256
"""Below that many a row has too few to share."""


def on_a_cache(problem: Problem, fewest_keys: int = FEWEST_KEYS) -> DecodeProblem | None:
    """A plain forward of few queries, as the call on a cache of its keys that it is; None where it is another one."""
    offset = problem.q_start - problem.k_start
    alike = (
        problem.group * problem.q_len <= MOST_ROWS
        and problem.k_len >= fewest_keys
        and offset == problem.k_len - problem.q_len  # the last query is the last token
        and problem.q_stride == problem.k_stride == 1
        and problem.dtype in (torch.float16, torch.bfloat16)
    )
    more = problem.backward or problem.partial or problem.packed or problem.empty
    if not alike or more or problem.mask or problem.bias is not None or problem.dropout_p:
        return None
    return DecodeProblem(
        problem.batch,
        problem.q_len,
        problem.q_heads,
        problem.kv_heads,
        problem.head_dim,
        problem.value_dim,
        problem.k_len,
        problem.k_len if problem.left == UNBOUNDED else min(problem.k_len, problem.left + problem.q_len),
        problem.dtype,
        None,
        0,
        problem.device,
        problem.arch,
        problem.processors,
    )


class DecodeConfig(NamedTuple):
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    split_keys: int = 0  # keys of a split; 0: each has its share of the row
    window_splits: int = 0  # of the splits, those that have the latest tokens of a quantised cache, which are no codes

    def __str__(self) -> str:
        splits = f", keys in {self.num_splits} splits" if self.num_splits > 1 else ""
        each = f" of {self.split_keys}" if self.split_keys else ""
        if self.window_splits > 1:
            each += f", {self.window_splits} of them for the unquantised recent tokens"
        return f"blocks of {self.block_n} keys, {self.num_warps} warps, {self.num_stages} stages{splits}{each}"


class Tile(NamedTuple):
    block_n: int
    num_warps: int
    num_stages: int
    resident: int  # programs that a processor holds at a time


SplitsOf = Callable[[DecodeProblem, Tile, int], int]
"""How many splits a problem is computed in, by its tile, of so many blocks."""


def configure(problem: DecodeProblem, num_splits: int | None, batch_invariant: bool) -> DecodeConfig:
    """The configuration of a call for the Triton kernels. For a batch-invariant one all that shapes a row's sums
    follows from the row."""
    window_splits = 0 if problem.coding is None else 1
    return _configure(problem, num_splits, batch_invariant, _tile(problem, batch_invariant), _splits, window_splits)


def configure_gluon(problem: DecodeProblem, num_splits: int | None, batch_invariant: bool) -> DecodeConfig:
    """The same for the Gluon kernel, which reads codes."""
    assert problem.coding is not None
    int4, group = problem.coding.format == "int4", problem.coding.group
    few = problem.lines * problem.capacity <= 1024 * max(1, problem.processors)  # programs: they wait for memory
    few = few and not batch_invariant
    if problem.dtype is torch.float16:  # queries that take more registers
        tile = Tile(min(group, 32), 1, 4 if int4 or few else 2, 8)
    elif few:
        tile = Tile(min(group, 32 if int4 else 64), 1, 4 if int4 else 3, 8)
    else:
        tile = Tile(min(group, 64 if int4 else 32), 1, 2, 8)
    window_splits = 1
    if num_splits is None and (few or batch_invariant):
        window_splits = -(-problem.coding.window // WINDOW_KEYS)
    return _configure(problem, num_splits, batch_invariant, tile, _gluon_splits, window_splits)


WINDOW_KEYS = 64
"""Latest tokens of a split of the Gluon kernel, where those that have them would be the last to end."""


def _configure(
    problem: DecodeProblem,
    num_splits: int | None,
    batch_invariant: bool,
    tile: Tile,
    splits_of: SplitsOf,
    window_splits: int,
) -> DecodeConfig:
    config = DecodeConfig(*tile[:3], window_splits=window_splits)
    blocks = max(1, -(-problem.span // tile.block_n))
    if batch_invariant:
        unit = tile.block_n if problem.coding is None else problem.coding.group  # codes are read in whole groups
        units = max(1, -(-problem.capacity // unit))  # not of the span: a workspace serves with a window and without
        keys = INVARIANT_KEYS if num_splits is None else -(-units // num_splits) * unit
        return config._replace(num_splits=max(1, -(-problem.span // keys)) + window_splits, split_keys=keys)
    if num_splits is not None:
        return config._replace(num_splits=min(num_splits, blocks + window_splits))  # others would be empty
    splits = splits_of(problem, tile, blocks)
    if problem.span < problem.capacity:  # no more than without a window, so that a workspace serves with and without
        splits = min(splits, splits_of(problem, tile, max(1, -(-problem.capacity // tile.block_n))))
    return config._replace(num_splits=splits + window_splits)


STARTING = 256
"""Keys that a program could stream in the time that it takes to start and to hand over its part."""
MOST_SPLITS = 128


def _splits(problem: DecodeProblem, tile: Tile, blocks: int) -> int:
    """As many splits as take the least time: so many rounds of programs, each of a share of the keys and a start."""
    at_a_time = tile.resident * max(1, problem.processors)
    programs = max(1, problem.lines * problem.tiles_r)
    if problem.coding is not None:
        # Programs wait for each other's instructions more than for memory: almost two rounds even that out. An odd
        # number, as splits that take turns in steps of a power of two meet in the same parts of the memory.
        return max(1, min(7 * at_a_time // (4 * programs), blocks // 4)) | 1

    def time(splits: int) -> float:
        rounds = -(-programs * splits // at_a_time)
        return rounds * (-(-blocks // splits) * tile.block_n + STARTING)

    return min(range(1, max(1, min(MOST_SPLITS, blocks // 2)) + 1), key=time)


MERGING = 4
"""Keys that a program could stream in the time in which one more split is merged."""


def _gluon_splits(problem: DecodeProblem, tile: Tile, blocks: int) -> int:
    """Likewise. Splits by a power of two meet in the same parts of the memory."""
    at_a_time = tile.resident * max(1, problem.processors)
    programs = max(1, problem.lines)

    def time(splits: int) -> float:
        rounds, share = -(-programs * (splits + 1) // at_a_time), -(-blocks // splits)
        camping = 1.25 if share >= 8 and splits & (splits - 1) == 0 else 1.0
        return rounds * (share * tile.block_n * camping + STARTING) + splits * MERGING

    return min(range(1, max(1, min(MOST_SPLITS, blocks)) + 1), key=time)


def _tile(problem: DecodeProblem, batch_invariant: bool) -> Tile:
    """The best of those tried on an H200 (benchmarks/results/h200/sweeps); of others it is a guess."""
    if problem.coding is not None:
        group = problem.coding.group
        if problem.block_r > 8:
            return Tile(min(group, 32), 4, 3, 3)
        if problem.coding.format == "int4":
            return Tile(min(group, 64), 2, 3, 6)
        return Tile(min(group, 32), 1, 4, 8)
    if problem.device.type == "cpu":  # the interpreter
        return Tile(32, 4, 1, 1)
    if problem.dtype is torch.float32:
        return Tile(32, 8, 2, 1) if problem.width <= 128 else Tile(16, 8, 1, 1)
    if problem.block_r > 16:  # rows that fill registers
        return Tile(64, 4, 2, 2) if problem.width <= 128 else Tile(32, 8, 2, 1)
    hopper = 90 <= problem.arch < 120  # and its shared memory: others have two thirds of it or less
    if not hopper and problem.width > 64:
        return Tile(32, 4, 3, 1) if problem.width > 128 else Tile(64, 4, 2, 2)
    if problem.width <= 64:
        return Tile(256, 4, 3, 1) if hopper else Tile(128, 4, 2, 2)
    if problem.width > 128:
        return Tile(64, 4, 3, 1)
    programs = problem.lines * problem.tiles_r
    keys = programs * problem.span // max(1, problem.processors)  # of a processor
    if not batch_invariant:
        if programs >= 2 * problem.processors and problem.span <= 2048:
            return Tile(32, 2, 4, 4)  # many short rows: more of them at a time, as a start is a good part of each
        if keys <= 1024:
            return Tile(64, 4, 3, 1)
        if problem.page and problem.page % 128 and programs > problem.processors // 4:
            return Tile(64, 4, 4, 2)
    return Tile(128, 4, 3, 1)
