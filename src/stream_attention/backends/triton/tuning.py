"""Launch configurations of the Triton kernels: tables as data, one per architecture, each row with its provenance.

The first row that fits a problem is taken. Nothing is tuned at run time; `stream_attention_tools.tune` proposes rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from ...base.problem import UNBOUNDED, Problem
from ...gpu import decode_tuning as decode

ANY = 1 << 62


def _tile(block_m: int, block_n: int, warps: int, stages: int) -> str:
    counts = (f"{count} {unit}{'' if count == 1 else 's'}" for count, unit in ((warps, "warp"), (stages, "stage")))
    return f"tiles of {block_m} x {block_n}, {', '.join(counts)}"


class TritonConfig(NamedTuple):
    """One launch: the tile (queries x keys), its warps and stages, and how keys and heads are laid over programs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1  # parts of the keys that run side by side and are merged after; dense problems only
    pack_heads: bool = False  # the query heads of one KV head share a tile
    max_registers: int | None = None  # of a thread, where more would leave fewer programs on a processor

    def __str__(self) -> str:
        tile = _tile(self.block_m, self.block_n, self.num_warps, self.num_stages)
        splits = f", keys in {self.num_splits} splits" if self.num_splits > 1 else ""
        return tile + splits + (", GQA heads packed into one tile" if self.pack_heads else "")


class Tile(NamedTuple):
    """How a kernel of the backward, or the one of FP8, cuts and runs its work: queries x keys, warps and stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1  # parts of what a program streams that run side by side and are summed after; dense only

    def __str__(self) -> str:
        tile = _tile(self.block_m, self.block_n, self.num_warps, self.num_stages)
        return tile + (f", in {self.num_splits} splits" if self.num_splits > 1 else "")


class BackwardConfig(NamedTuple):
    """The launches of a backward: a kernel that writes dQ, one that writes dK and dV, and one that writes dBias."""

    query: Tile  # its block_m is at least that of the others, which read what it wrote by whole tiles
    key: Tile
    value: Tile | None = None  # dV in a launch of its own, where dK and dV together have too few registers
    bias: Tile | None = Tile(64, 64, 4, 2)  # None without one

    def __str__(self) -> str:
        keys = f"dK and dV in {self.key}" if self.value is None else f"dK in {self.key}; dV in {self.value}"
        bias = f"; dBias, if wanted, in {self.bias}" if self.bias is not None else ""
        return f"dQ in {self.query}; {keys}{bias}"


WIDE_BIAS = Tile(32, 32, 4, 1)
"""A tile of the bias at the widest heads, four operands of which fit any shared memory."""

C = TypeVar("C")


@dataclass(frozen=True)
class Row(Generic[C]):
    """A line of a table: the widest head dim and longest keys it is for, and what it sets."""

    width: int
    causal: bool  # a right edge cuts tiles
    up_to: int  # keys
    config: C


def _full_and_causal(width: int, config: C) -> tuple[Row[C], Row[C]]:
    """The two rows of a width that one configuration serves at every length."""
    return Row(width, False, ANY, config), Row(width, True, ANY, config)


# NVIDIA H200, 2026-11-15, torch 2.11.0+cu130, Triton 3.6.0, bf16, batch * length = 16384, hidden 2048: the best of
# 13-27 tiles per head dim at 512, 1k, 2k, 4k and 8k; x1.13-1.65 of SDPA flash in the same run.
SM90 = (
    Row(64, False, ANY, TritonConfig(128, 64, 4, 3)),
    Row(64, True, 512, TritonConfig(64, 32, 4, 3)),
    Row(64, True, 2048, TritonConfig(64, 64, 4, 3)),
    Row(64, True, ANY, TritonConfig(128, 64, 4, 4)),
    Row(128, False, 1024, TritonConfig(128, 32, 8, 4)),
    Row(128, False, ANY, TritonConfig(128, 128, 8, 3)),
    Row(128, True, 512, TritonConfig(64, 32, 4, 3)),
    Row(128, True, 2048, TritonConfig(64, 64, 4, 3)),
    Row(128, True, ANY, TritonConfig(128, 64, 8, 3)),
    *_full_and_causal(256, TritonConfig(128, 64, 8, 2)),
)

# A guess from the compiler's report (no spills, fits 163 KiB of shared memory); never run on such a GPU.
SM80 = (
    *_full_and_causal(64, TritonConfig(128, 64, 4, 3)),
    *_full_and_causal(128, TritonConfig(128, 64, 8, 2)),
    *_full_and_causal(256, TritonConfig(64, 32, 8, 2)),
)

# A guess: as SM80, within the 99 KiB of shared memory of these GPUs.
SM86 = (
    *_full_and_causal(64, TritonConfig(64, 64, 4, 2)),
    *_full_and_causal(128, TritonConfig(128, 32, 8, 2)),
    *_full_and_causal(256, TritonConfig(32, 32, 4, 2)),
)

# A mask or bias is one more tile to load; softcap, dropout and ALiBi are more arithmetic. All need registers. H200 as
# above, causal 2k, beside SDPA flash without the modifier: mask and bias x0.71-0.85, softcap and dropout x0.57-0.59 at
# D 64 and x0.78-0.82 at D 128; D 256 is a guess from the compiler's report. The loop that runs only where something is
# NaN would take 127-146 registers at D 64; with 128 as many programs fit a processor as without it.
SM90_MASKED = (
    *_full_and_causal(64, TritonConfig(64, 32, 4, 3, max_registers=128)),
    *_full_and_causal(128, TritonConfig(64, 64, 4, 2)),
    *_full_and_causal(256, TritonConfig(64, 64, 8, 2)),
)
SM90_COMPUTED = (
    *_full_and_causal(64, TritonConfig(64, 64, 4, 3)),
    *_full_and_causal(128, TritonConfig(64, 64, 4, 2)),
    *_full_and_causal(256, TritonConfig(128, 32, 8, 2)),
)

# A guess from the compiler's report, for every GPU but 90, and for both kinds of modifiers together.
SM80_MODIFIED = (
    *_full_and_causal(64, TritonConfig(64, 32, 4, 2)),
    *_full_and_causal(128, TritonConfig(64, 32, 4, 2)),
    *_full_and_causal(256, TritonConfig(32, 32, 4, 2)),
)

# fp32 products are as exact as fp32 rounding: each is three TF32 products, and operands take twice the registers. H200
# as above, causal 1k, of four tiles each: 43 TFLOP/s at D 64 (x1.4 of SDPA), 33 at D 128 (x0.84), with 352 bytes of
# spills, the tiles without being slower. At D 256 without matrix instructions, a guess from the compiler's report.
SM90_FLOAT32 = (
    *_full_and_causal(64, TritonConfig(128, 64, 8, 2)),
    *_full_and_causal(128, TritonConfig(128, 32, 8, 2)),
    *_full_and_causal(256, TritonConfig(32, 16, 8, 1)),
)

# Guesses from the compiler's report.
SM80_FLOAT32 = (
    *_full_and_causal(64, TritonConfig(64, 32, 4, 1)),
    *_full_and_causal(128, TritonConfig(32, 32, 8, 2)),
    *_full_and_causal(256, TritonConfig(16, 16, 4, 1)),
)

INTERPRETER = TritonConfig(16, 32, 4, 1)
"""On the CPU: small, so that small tests cross tile edges."""


TILES = (16, 32, 64, 128, 256)
"""Sides of a tile: matrix instructions want 16 at least, and `tl.arange` powers of two."""

FORCEABLE: Mapping[str, tuple[int, ...]] = {
    "block_m": TILES,
    "block_n": TILES,
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": tuple(range(1, 9)),
}
"""What a caller may set of a forward's configuration by hand. Whether a tile fits a GPU's shared memory is found out
when it is compiled for that GPU, and the compiler says so."""

FORWARD: Mapping[str, Mapping[int, tuple[Row[TritonConfig], ...]]] = {
    "plain": {80: SM80, 86: SM86, 89: SM86, 90: SM90, 100: SM90, 120: SM86},
    "masked": {80: SM80_MODIFIED, 90: SM90_MASKED, 120: SM80_MODIFIED},
    "computed": {80: SM80_MODIFIED, 90: SM90_COMPUTED, 120: SM80_MODIFIED},
    "masked and computed": {80: SM80_MODIFIED},
    "float32": {80: SM80_FLOAT32, 90: SM90_FLOAT32, 120: SM80_FLOAT32},
}
"""By architecture; the nearest at or below a GPU's own is taken. 100 and 120 are guesses: the tables of 90 and of 86,
whose shared memory they have."""

# The backward. NVIDIA H200, 2026-11-15, torch 2.11.0+cu130, Triton 3.6.0, bf16, batch * length = 16384, hidden 2048:
# the best of 8 tiles for dQ and 9-10 for dK and dV at 512, 1k, 2k, 4k and 16k; x1.20-1.45 of SDPA flash in the same
# run. At D 256 dK and dV are faster apart: 0.58-0.63 of SDPA's time at 512, 2k and 8k, together 0.66-0.76.
SM90_BACKWARD = (
    Row(64, False, ANY, BackwardConfig(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3))),
    Row(64, True, 1024, BackwardConfig(Tile(64, 32, 4, 3), Tile(32, 64, 4, 3))),
    Row(64, True, 2048, BackwardConfig(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))),
    Row(64, True, ANY, BackwardConfig(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3))),
    Row(128, False, 2048, BackwardConfig(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))),
    Row(128, False, ANY, BackwardConfig(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))),
    Row(128, True, 2048, BackwardConfig(Tile(64, 64, 4, 2), Tile(32, 64, 4, 3))),
    Row(128, True, 4096, BackwardConfig(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))),
    Row(128, True, ANY, BackwardConfig(Tile(128, 64, 8, 3), Tile(64, 128, 8, 2))),
    Row(256, False, ANY, BackwardConfig(Tile(128, 64, 8, 1), Tile(64, 128, 8, 1), Tile(32, 64, 4, 2))),
    Row(256, True, ANY, BackwardConfig(Tile(128, 64, 8, 1), Tile(32, 128, 8, 2), Tile(32, 64, 4, 2))),
)

# H200 as above, causal 2k, D 64 and 128: a mask x0.85-0.94 of SDPA flash without it, a bias x0.72-0.76 (and its own
# gradient another 0.39-0.54 of SDPA's whole backward), softcap x1.00-1.08, dropout x0.76-0.89.
SM90_BACKWARD_MASKED = (
    *_full_and_causal(64, BackwardConfig(Tile(64, 32, 4, 3), Tile(64, 64, 4, 3), None, Tile(64, 64, 4, 3))),
    *_full_and_causal(128, BackwardConfig(Tile(64, 64, 4, 2), Tile(32, 64, 4, 3), None, Tile(64, 32, 4, 2))),
    *_full_and_causal(256, BackwardConfig(Tile(128, 64, 8, 1), Tile(32, 128, 8, 2), Tile(32, 128, 8, 2), WIDE_BIAS)),
)
SM90_BACKWARD_COMPUTED = (
    *_full_and_causal(64, BackwardConfig(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3))),
    *_full_and_causal(128, BackwardConfig(Tile(64, 64, 4, 2), Tile(32, 64, 4, 3))),
    *_full_and_causal(256, BackwardConfig(Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(32, 64, 4, 2))),
)

# Guesses from the compiler's report: both kinds of modifiers together, and every GPU but 90.
SM90_BACKWARD_BOTH = (
    *_full_and_causal(64, BackwardConfig(Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), None, Tile(32, 32, 4, 2))),
    *_full_and_causal(128, BackwardConfig(Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), None, Tile(32, 32, 4, 2))),
    *_full_and_causal(256, BackwardConfig(Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(32, 64, 8, 1), WIDE_BIAS)),
)
SM80_BACKWARD = (
    *_full_and_causal(64, BackwardConfig(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))),
    *_full_and_causal(128, BackwardConfig(Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(32, 64, 4, 2))),
    *_full_and_causal(256, BackwardConfig(Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(32, 64, 8, 1))),
)
SM80_BACKWARD_MODIFIED = (
    *_full_and_causal(64, BackwardConfig(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), None, Tile(32, 32, 4, 1))),
    *_full_and_causal(128, BackwardConfig(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), None, Tile(32, 32, 4, 1))),
    *_full_and_causal(256, BackwardConfig(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), WIDE_BIAS)),
)

# fp32 products, each three TF32 products. H200 as above, causal 1k: x0.89 of SDPA at D 64, x0.81 at D 128. At D 256
# without matrix instructions: x0.12.
SM90_BACKWARD_FLOAT32 = (
    *_full_and_causal(64, BackwardConfig(Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), None, Tile(32, 32, 4, 1))),
    *_full_and_causal(128, BackwardConfig(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), None, Tile(16, 32, 4, 1))),
    *_full_and_causal(256, BackwardConfig(Tile(32, 32, 8, 1), Tile(16, 16, 4, 1), None, Tile(16, 16, 4, 1))),
)

# Guesses from the compiler's report.
SM80_BACKWARD_FLOAT32 = (
    *_full_and_causal(64, BackwardConfig(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), None, Tile(32, 32, 4, 1))),
    *_full_and_causal(128, BackwardConfig(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), None, Tile(16, 32, 4, 1))),
    *_full_and_causal(256, BackwardConfig(Tile(16, 16, 8, 1), Tile(16, 16, 4, 1), None, Tile(16, 16, 4, 1))),
)

BACKWARD: Mapping[str, Mapping[int, tuple[Row[BackwardConfig], ...]]] = {
    "plain": {80: SM80_BACKWARD, 90: SM90_BACKWARD, 120: SM80_BACKWARD},
    "masked": {80: SM80_BACKWARD_MODIFIED, 90: SM90_BACKWARD_MASKED, 120: SM80_BACKWARD_MODIFIED},
    "computed": {80: SM80_BACKWARD_MODIFIED, 90: SM90_BACKWARD_COMPUTED, 120: SM80_BACKWARD_MODIFIED},
    "masked and computed": {80: SM80_BACKWARD_MODIFIED, 90: SM90_BACKWARD_BOTH, 120: SM80_BACKWARD_MODIFIED},
    "float32": {80: SM80_BACKWARD_FLOAT32, 90: SM90_BACKWARD_FLOAT32, 120: SM80_BACKWARD_FLOAT32},
}
"""By architecture, as FORWARD."""

INTERPRETER_BACKWARD = BackwardConfig(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), None, Tile(16, 32, 4, 1))


def configure(problem: Problem) -> TritonConfig | BackwardConfig | decode.DecodeConfig:
    """The configuration of a forward, or of a backward where the problem is one. Few queries against many keys are
    computed as those of a cache are, if nothing but a cache's call knows is asked for."""
    stated = decode.on_a_cache(problem)
    if stated is not None:
        return decode.configure(stated, None, False)
    return configure_backward(problem) if problem.backward else configure_forward(problem)


def configure_forward(problem: Problem) -> TritonConfig:
    """The configuration of a forward."""
    few = None if problem.bounds else _few_queries(problem)
    if few is not None:
        return few
    if problem.device.type == "cpu":
        return INTERPRETER
    return _pick(_nearest(FORWARD[_kind(problem)], problem.arch), problem)


def configure_backward(problem: Problem) -> BackwardConfig:
    """The configuration of a backward."""
    on_cpu = problem.device.type == "cpu"
    config = INTERPRETER_BACKWARD if on_cpu else _pick(_nearest(BACKWARD[_kind(problem)], problem.arch), problem)
    if problem.bias is None:
        config = config._replace(bias=None)
    if on_cpu:
        return config
    if problem.bounds and config.value is not None:  # both walk one list
        config = config._replace(value=config.value._replace(block_m=config.key.block_m, block_n=config.key.block_n))
    return config._replace(
        query=_split_keys(problem, config.query),
        key=_split_queries(problem, config.key),
        value=config.value and _split_queries(problem, config.value),
    )


def _split_keys(problem: Problem, tile: Tile) -> Tile:
    programs = problem.batch * problem.q_heads * -(-problem.q_len // tile.block_m)
    seen = min(problem.k_len, _window(problem) + tile.block_m)
    return tile._replace(num_splits=_splits(problem, programs, seen // tile.block_n))


def _split_queries(problem: Problem, tile: Tile) -> Tile:
    programs = problem.batch * problem.kv_heads * -(-problem.k_len // tile.block_n)
    seeing = min(problem.q_len, _window(problem) + tile.block_n)
    return tile._replace(num_splits=_splits(problem, programs, seeing // tile.block_m))


def _window(problem: Problem) -> int:
    """How many keys a query sees at most."""
    sides = problem.left, problem.right
    return ANY if UNBOUNDED in sides else sum(sides) + 1


def _splits(problem: Problem, programs: int, tiles: int) -> int:
    """Splits that fill a GPU for which `programs` are too few: two programs per processor, of at least eight of the
    `tiles` each. Every split is another fp32 copy of a gradient, so there are few at most."""
    if problem.packed or problem.empty or problem.bounds:
        return 1
    return max(1, min(2 * problem.num_sms // programs, tiles // 8, 8))


def _kind(problem: Problem) -> str:
    """What needs its own tables: how much of the registers the modifiers take."""
    masked = problem.mask or problem.bias is not None
    # A left edge is a third copy of the loop, which at the widest heads costs as many registers as a modifier.
    third_loop = problem.left != UNBOUNDED and _width(problem) > 128
    computed = problem.softcap or problem.dropout_p or problem.alibi or third_loop
    if problem.dtype is torch.float32:
        return "float32"
    return " and ".join(kind for kind, has in (("masked", masked), ("computed", computed)) if has) or "plain"


def _width(problem: Problem) -> int:
    return max(problem.head_dim, problem.value_dim)


def _pick(table: tuple[Row[C], ...], problem: Problem) -> C:
    causal = problem.right != UNBOUNDED
    return next(
        row.config
        for row in table
        if _width(problem) <= row.width and causal == row.causal and problem.k_len <= row.up_to
    )


def _nearest(tables: Mapping[int, tuple[Row[C], ...]], arch: int) -> tuple[Row[C], ...]:
    return tables[max((known for known in tables if known <= arch), default=min(tables))]


def _few_queries(problem: Problem) -> TritonConfig | None:
    """Split the keys over the GPU where there are too few queries to fill it; None where there are enough."""
    if not decode.few_queries(problem):
        return None
    heads_per_tile = decode.heads_per_tile(problem)
    rows = problem.q_len * heads_per_tile
    width = _width(problem)
    block_m = max(16, 1 << (rows - 1).bit_length())
    block_n = 128 if width <= 64 else 64 if width <= 128 else 32
    num_warps, num_stages = 4, 3 if problem.arch == 90 else 2
    if problem.dtype is torch.float32:  # twice the bytes, and operands in three parts
        block_m, block_n, num_stages = (16, 32, 2) if width <= 128 else (16, 16, 1)
    elif width > 128:
        block_m = min(block_m, 32)
    programs = problem.batch * (problem.q_heads // heads_per_tile) * -(-rows // block_m)
    tiles = -(-problem.k_len // block_n)
    # Two programs per processor, each with at least two tiles to stream.
    num_splits = max(1, min(2 * problem.num_sms // programs, tiles // 2))
    return TritonConfig(block_m, block_n, num_warps, num_stages, num_splits, heads_per_tile > 1)
