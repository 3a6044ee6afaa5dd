"""How few queries against a cache are computed: the tile, and in how many parts a row's keys are split.

Rows are the queries of all heads that share a KV head. Nothing is known here of a row's length: parts share it on the
device, so a short row in a large cache is split as finely as a long one. Rows of a batch share the parts of all of
them by their lengths, else the longest would be the last to end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..base.problem import UNBOUNDED, Problem

INVARIANT_KEYS = 2048
"""Keys of a part of a batch-invariant call: whatever the batch, a row's sums are cut in the same places."""

MOST_ROWS = 64
"""Rows of a tile at most."""


FEW_ROWS = 64
"""Up to this many rows (queries times the heads that share a tile) a problem is few queries against many keys."""


def heads_per_tile(problem: Problem) -> int:
    """Query heads that share a tile where queries are few."""
    return 1 if problem.dropout_p else problem.group


def few_queries(problem: Problem) -> bool:
    """Whether there are too few queries to fill a GPU, so that keys are split over it."""
    are_few = problem.q_len * heads_per_tile(problem) <= FEW_ROWS and problem.k_len >= 4 * FEW_ROWS
    return are_few and not problem.packed and not problem.empty


def rows(problem: Problem) -> int:
    """Queries of all heads that share a KV head."""
    _, q_len, q_heads, kv_heads, *_ = problem.shape
    return q_heads // max(kv_heads, 1) * q_len


def batch_heads(problem: Problem) -> int:
    batch, _, _, kv_heads, *_ = problem.shape
    return batch * kv_heads


def span(problem: Problem) -> int:
    """Keys that queries see at most, of those that a row can hold."""
    k_len, left = problem.kv.k_len, problem.window.left
    return k_len if left == UNBOUNDED else min(k_len, left + problem.shape.q_len)


def block_r(problem: Problem) -> int:
    """Rows of a tile: a power of two, at least what a matrix instruction takes of its first or second factor."""
    least, most = (16, MOST_ROWS) if problem.kv.coding is None else (8, 16)
    return max(least, min(most, 1 << (rows(problem) - 1).bit_length()))


def tiles_r(problem: Problem) -> int:
    return -(-rows(problem) // block_r(problem))


FEWEST_KEYS = 256
"""Below that many a row has too few to share."""


def on_a_cache(problem: Problem, fewest_keys: int = FEWEST_KEYS) -> Problem | None:
    """A plain forward of few queries, as the call on a cache of its keys that it is; None where it is another one."""
    offset = problem.q_start - problem.k_start
    alike = (
        rows(problem) <= MOST_ROWS
        and problem.k_len >= fewest_keys
        and offset == problem.k_len - problem.q_len  # the last query is the last token
        and problem.q_stride == problem.k_stride == 1
        and problem.dtype in (torch.float16, torch.bfloat16)
    )
    more = problem.backward or problem.partial or problem.packed or problem.empty or problem.function
    if not alike or more or problem.mask or problem.bias is not None or problem.dropout_p:
        return None
    return problem.replace(layout="cache")


class DecodeConfig(NamedTuple):
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    split_keys: int = 0  # keys of a split; 0: each has its share of the row
    window_splits: int = 0  # of the splits, those that have the latest tokens of a quantised cache, which are no codes
    at_a_time: int = 0  # programs; not 0: num_splits is a mean, of which long rows have more than short ones

    def __str__(self) -> str:
        splits = f", keys in {self.num_splits} splits" if self.num_splits > 1 else ""
        each = f" of {self.split_keys}" if self.split_keys else " a row, by length" if self.at_a_time else ""
        if self.window_splits > 1:
            each += f", {self.window_splits} of them for the unquantised recent tokens"
        return f"blocks of {self.block_n} keys, {self.num_warps} warps, {self.num_stages} stages{splits}{each}"


def workspace_numbers(problem: Problem, config: object) -> int:
    """fp32 numbers in the workspace of a call (decode_tiles.py); 0 where nothing is merged."""
    if not isinstance(config, DecodeConfig) or config.num_splits == 1:
        return 0
    states = batch_heads(problem) * (config.num_splits + (config.at_a_time > 0)) * rows(problem)
    return -(-states // 4) * 4 + states * problem.value_dim


class Tile(NamedTuple):
    block_n: int
    num_warps: int
    num_stages: int
    resident: int  # programs that a processor holds at a time


SplitsOf = Callable[[Problem, Tile, int], int]
"""How many splits a problem is computed in, by its tile, of so many blocks."""


def configure(problem: Problem, num_splits: int | None, batch_invariant: bool) -> DecodeConfig:
    """The configuration of a call for the Triton kernels. For a batch-invariant one all that shapes a row's sums
    follows from the row."""
    window_splits = 0 if problem.coding is None else 1
    return _configure(problem, num_splits, batch_invariant, _tile(problem, batch_invariant), _splits, window_splits)


def configure_gluon(problem: Problem, num_splits: int | None, batch_invariant: bool) -> DecodeConfig:
    """The same for the Gluon kernel, which reads codes."""
    assert problem.coding is not None
    int4, group = problem.coding.format == "int4", problem.coding.group
    few = batch_heads(problem) * problem.k_len <= 1024 * max(1, problem.num_sms)  # programs: they wait for memory
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
    problem: Problem, num_splits: int | None, batch_invariant: bool, tile: Tile, splits_of: SplitsOf, window_splits: int
) -> DecodeConfig:
    config = DecodeConfig(*tile[:3], window_splits=window_splits)
    blocks = max(1, -(-span(problem) // tile.block_n))
    if batch_invariant:
        unit = tile.block_n if problem.coding is None else problem.coding.group  # codes are read in whole groups
        units = max(1, -(-problem.k_len // unit))  # not of the span: a workspace serves with a window and without
        keys = INVARIANT_KEYS if num_splits is None else -(-units // num_splits) * unit
        return config._replace(num_splits=max(1, -(-span(problem) // keys)) + window_splits, split_keys=keys)
    if num_splits is not None:
        return config._replace(num_splits=min(num_splits, blocks + window_splits))  # others would be empty
    splits = splits_of(problem, tile, blocks)
    if span(problem) < problem.k_len:  # no more than without a window, so that a workspace serves with and without
        splits = min(splits, splits_of(problem, tile, max(1, -(-problem.k_len // tile.block_n))))
    by_length = problem.coding is None and problem.batch > 1 and splits > 1
    at_a_time = tile.resident * max(1, problem.num_sms) if by_length else 0
    return config._replace(num_splits=splits + window_splits, at_a_time=at_a_time)


STARTING = 256
"""Keys that a program could stream in the time that it takes to start and to hand over its part."""
MOST_SPLITS = 128


def _splits(problem: Problem, tile: Tile, blocks: int) -> int:
    """As many splits as take the least time: so many rounds of programs, each of a share of the keys and a start."""
    at_a_time = tile.resident * max(1, problem.num_sms)
    programs = max(1, batch_heads(problem) * tiles_r(problem))
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


def _gluon_splits(problem: Problem, tile: Tile, blocks: int) -> int:
    """Likewise. Splits by a power of two meet in the same parts of the memory."""
    at_a_time = tile.resident * max(1, problem.num_sms)
    programs = max(1, batch_heads(problem))

    def time(splits: int) -> float:
        rounds, share = -(-programs * (splits + 1) // at_a_time), -(-blocks // splits)
        camping = 1.25 if share >= 8 and splits & (splits - 1) == 0 else 1.0
        return rounds * (share * tile.block_n * camping + STARTING) + splits * MERGING

    return min(range(1, max(1, min(MOST_SPLITS, blocks)) + 1), key=time)


def _tile(problem: Problem, batch_invariant: bool) -> Tile:
    """The best of those tried on an H200 (benchmarks/results/h200/sweeps); of others it is a guess."""
    if problem.coding is not None:
        group = problem.coding.group
        if block_r(problem) > 8:
            return Tile(min(group, 32), 4, 3, 3)
        if problem.coding.format == "int4":
            return Tile(min(group, 64), 2, 3, 6)
        return Tile(min(group, 32), 1, 4, 8)
    if problem.device.type == "cpu":  # the interpreter
        return Tile(32, 4, 1, 1)
    width = max(problem.head_dim, problem.value_dim)
    if problem.dtype is torch.float32:
        return Tile(32, 8, 2, 1) if width <= 128 else Tile(16, 8, 1, 1)
    if block_r(problem) > 16:  # rows that fill registers
        return Tile(64, 4, 2, 2) if width <= 128 else Tile(32, 8, 2, 1)
    hopper = 90 <= problem.arch < 120  # and its shared memory: others have two thirds of it or less
    if not hopper and width > 64:
        return Tile(32, 4, 3, 1) if width > 128 else Tile(64, 4, 2, 2)
    if width <= 64:
        return Tile(256, 4, 3, 1) if hopper else Tile(128, 4, 2, 2)
    if width > 128:
        return Tile(64, 4, 3, 1)
    programs = batch_heads(problem) * tiles_r(problem)
    keys = programs * span(problem) // max(1, problem.num_sms)  # per SM
    if not batch_invariant:
        if programs >= 2 * problem.num_sms and span(problem) <= 2048:
            return Tile(32, 2, 4, 4)  # many short rows: more of them at a time, as a start is a good part of each
        if keys <= 1024:
            return Tile(64, 4, 3, 1)
        if problem.page and problem.page % 128 and programs > problem.num_sms // 4:
            return Tile(64, 4, 4, 2)
    return Tile(128, 4, 3, 1)
