"""How the eager backend computes a problem: one of torch's own kernels where it can, else a blocked streaming pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...base.problem import UNBOUNDED, Problem
from ...base.score_function import ScoreFunction

TILE_ELEMENTS = {"cpu": 1 << 19, "accelerator": 1 << 24}
"""Scores in flight at once. On a CPU a tile should stay in the L2/L3 caches (2 MiB in fp32); an accelerator wants few,
large launches. CPU figure measured on an AMD EPYC (AVX-512, 1 MiB L2 per core), 2026-11-15; the other is a guess."""

BLOCK_Q = 256
BLOCK_K = 512
"""Rows and columns of a tile where they fit. Same machine, one core, torch 2.13, B1 T2048 H4 D64 fp32 with causal and
ALiBi, a mask, a softcap: 128-512 by 512-1024 are within 5 % of each other, 64 rows or 256 columns cost 10-40 % more."""


MASK_ELEMENTS = 1 << 21
"""Elements of a mask that are converted at once for torch's CPU flash op, 8 MiB in fp32: 1024 queries by 2048 keys."""

MASK_ROWS = 64, 256
"""Queries of such a part: at least, and in whole multiples of, where so many fit. The op has tiles of 256 queries from
768 on, of 64 from 192 on, else of 32. AMD EPYC, one core, torch 2.13, B1 T2048 H8 D64 fp32, 2026-11-18, ms by queries
at a time: 2048 105.8, 1024 106.8, 512 112, 256 113, 128 119."""

TINY_SCALE = 1e-30
"""Scales below this may be 0 in fp32."""


TORCH_KERNELS = {
    "flash": "torch's CPU flash op",
    "cuda_flash": "torch's FlashAttention-2, as SDPA runs it",
    "cuda_efficient": "torch's memory-efficient kernel, as SDPA runs it",
}


class EagerConfig(NamedTuple):
    """`path` is one of `TORCH_KERNELS`, "blocked" (our pass over tiles) or "sequences" (each by itself).

    With "flash" the tiles, if any, are for what the op cannot take: some gradients of the LSE, a bias that wants one,
    and NaN that a mask hides.
    """

    path: str
    block_b: int = 0
    block_q: int = 0
    block_k: int = 0
    because: tuple[str, ...] = ()  # why not torch's own kernel, on a device for which it has one
    kernel: str = ""  # which that is
    score_function: ScoreFunction | None = None  # of the blocked pass

    def __str__(self) -> str:
        if self.path == "sequences":
            return "one sequence at a time, each on torch's own kernel if supported, else by the blocked pass"
        tile = f"blocked pass, tiles of {self.block_b} x {self.block_q} x {self.block_k} (batch x queries x keys)"
        if self.path in TORCH_KERNELS:
            rest = "; fallback for gradients of the LSE or a bias, and for NaN under a mask: "
            return TORCH_KERNELS[self.path] + (rest + tile if self.block_b else "")
        return f"{tile}, because {self.kernel} {', '.join(self.because)}" if self.because else tile


def configure(problem: Problem) -> EagerConfig:
    """The configuration of a problem. Packed sequences are configured one by one as they run."""
    if problem.packed:
        return EagerConfig("sequences")
    if problem.device.type == "cuda":
        reasons = why_not_cuda(problem)
        if reasons:
            return blocked(problem, reasons)
        return EagerConfig("cuda_efficient" if why_not_cuda_flash(problem) else "cuda_flash")
    reasons = why_not_flash(problem)
    if not reasons and not problem.lse_grad and not problem.mask and problem.bias is None:
        return EagerConfig("flash")
    tiles = blocked(problem, reasons)
    return tiles if reasons else tiles._replace(path="flash")


def blocked(problem: Problem, reasons: tuple[str, ...] = ("was not requested",)) -> EagerConfig:
    """The blocked pass for a dense problem, whatever the flash op could do."""
    budget = TILE_ELEMENTS["cpu" if problem.device.type == "cpu" else "accelerator"]
    block_q, block_k = min(BLOCK_Q, max(problem.q_len, 1)), min(BLOCK_K, max(problem.k_len, 1))
    # Narrow the tile before the batch: rows first (they cost nothing but loop overhead), then keys, down to 64 x 128.
    heads = max(problem.q_heads, 1)
    while heads * block_q * block_k > budget and block_q > 64:
        block_q //= 2
    while heads * block_q * block_k > budget and block_k > 128:
        block_k //= 2
    block_b = max(1, min(problem.batch, budget // (heads * block_q * block_k)))
    kernel = {"cpu": TORCH_KERNELS["flash"], "cuda": "torch's CUDA kernels"}.get(problem.device.type, "")
    return EagerConfig("blocked", block_b, block_q, block_k, reasons if kernel else (), kernel)


def spans(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Where each part of at most `size` begins and ends.

    >>> spans(1, 6, 2)
    [(1, 3), (3, 5), (5, 6)]
    """
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def mask_blocks(batch: int, q_len: int, shape: tuple[int, int, int, int]) -> tuple[int, int]:
    """Batch entries and queries of a call to torch's CPU flash op whose mask, of this shape in all, is converted.

    >>> mask_blocks(4, 2048, (4, 1, 2048, 2048)), mask_blocks(4, 2048, (4, 1, 1, 2048))
    ((1, 1024), (4, 2048))
    """
    batches, heads, rows, keys = shape
    block_b = batch if batches == 1 else min(batch, max(1, MASK_ELEMENTS // max(heads * rows * keys, 1)))
    if rows == 1 or heads * rows * keys <= MASK_ELEMENTS:
        return block_b, q_len
    least, multiple = MASK_ROWS
    most = MASK_ELEMENTS // (heads * keys)
    return block_b, min(q_len, max(least, most // multiple * multiple or most))


def why_not_flash(problem: Problem) -> tuple[str, ...]:
    """Why torch's CPU flash op cannot compute this problem; empty if it can."""
    same_positions = (problem.q_start, problem.q_stride) == (problem.k_start, problem.k_stride)
    half = problem.dtype is not problem.state_dtype
    top_left = problem.right == 0 and same_positions and problem.k_len <= problem.q_len
    reasons = (
        (problem.device.type != "cpu", "runs only on the CPU"),
        (problem.empty or problem.head_dim == 0, "divides by zero on empty inputs"),
        (problem.head_dim != problem.value_dim, "requires D = Dv"),
        (problem.left != UNBOUNDED, "does not support a window"),
        (problem.right != UNBOUNDED and not top_left, "aligns causal masks top-left"),
        (problem.scale < TINY_SCALE, "requires a positive scale"),
        (problem.bounds, "does not support masks by intervals"),
        (bool(problem.function), "does not support score functions"),
        (problem.alibi, "does not support ALiBi"),
        (problem.sink and half, "rounds the output before the sink rescales it"),
        (problem.softcap != 0.0, "does not support softcap"),
        (problem.dropout_p != 0.0, "generates its own dropout mask"),
        (problem.partial and half, "rounds partial results"),
    )
    return tuple(reason for applies, reason in reasons if applies)


def why_not_cuda(problem: Problem) -> tuple[str, ...]:
    """Why none of torch's CUDA kernels can compute this dense problem; empty if one can."""
    aligned = (problem.q_stride, problem.k_stride) == (1, 1) and (
        problem.q_start - problem.k_start == problem.k_len - problem.q_len >= 0
    )
    reasons = (
        (torch.version.hip is not None, "are tested only on NVIDIA GPUs"),
        (problem.dtype is torch.float64, "do not support float64"),
        (problem.dtype is torch.bfloat16 and problem.arch < 80, "require compute capability 8.0 for bfloat16"),
        (problem.empty or 0 in (problem.head_dim, problem.value_dim), "are not tested on empty inputs"),
        (max(problem.batch, problem.q_heads) > 65535, "support at most 65535 batch entries and heads"),
        (problem.left != UNBOUNDED or problem.right not in (UNBOUNDED, 0), "propagate NaN from keys outside a window"),
        (problem.right == 0 and not aligned, "align causal masks bottom-right, with another LSE for empty rows"),
        (problem.scale < TINY_SCALE, "require a positive scale"),
        (problem.mask, "return NaN for fully masked rows"),
        (problem.bias is not None, "return NaN for fully masked rows"),
        (problem.alibi, "do not support ALiBi"),
        (problem.sink, "do not support sinks"),
        (problem.softcap != 0.0, "do not support softcap"),
        (bool(problem.function), "do not support score functions"),
        (problem.dropout_p != 0.0, "generate their own dropout mask"),
        (problem.partial and problem.dtype is not problem.state_dtype, "round partial results"),
        (problem.lse_grad, "do not support a gradient through the LSE"),
        (problem.backward and problem.deterministic, "accumulate gradients in no fixed order"),
    )
    return tuple(reason for applies, reason in reasons if applies)


def why_not_cuda_flash(problem: Problem) -> tuple[str, ...]:
    """Why a problem that torch's CUDA kernels can compute is left to the memory-efficient one."""
    reasons = (
        (problem.dtype is torch.float32, "supports only float16 and bfloat16"),
        (problem.arch < 80, "requires compute capability 8.0"),
        (max(problem.head_dim, problem.value_dim) > 256, "supports head dims up to 256"),
        (problem.head_dim != problem.value_dim, "requires D = Dv"),
    )
    return tuple(reason for applies, reason in reasons if applies)


DECODE_KEYS = 1024
"""Keys at a time in plain torch."""

WIDENED_ELEMENTS = 1 << 18
"""Elements of a row's keys in half precision that are widened at once for torch's CPU flash op, 1 MiB in fp32. AMD
EPYC, one core, torch 2.13, bf16, 8 heads of 64, 8k keys, 2026-11-18, ms by keys at a time: 128 4.5, 256 3.4, 512 2.9,
1024 2.9, 2048 3.2."""


def widened_keys(elements: int) -> int:
    """How many keys, of so many elements each, are widened at once."""
    return max(256, WIDENED_ELEMENTS // max(elements, 1))


class EagerDecodeConfig(NamedTuple):
    """How plain torch computes a call on a cache."""

    by_op: bool  # by torch's CPU flash op where it can
    row_by_row: bool  # batch-invariant

    def __str__(self) -> str:
        tiles = f"plain torch, tiles of {DECODE_KEYS} keys"
        return f"torch's CPU flash op over the keys of each row; with a softcap {tiles}" if self.by_op else tiles


def configure_decode(problem: Problem, batch_invariant: bool) -> EagerDecodeConfig:
    by_op = problem.device.type == "cpu" and not problem.page and problem.coding is None
    return EagerDecodeConfig(by_op and problem.head_dim == problem.value_dim, batch_invariant)
