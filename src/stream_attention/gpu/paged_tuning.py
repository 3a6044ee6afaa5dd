"""How ragged queries on paged keys are computed: the tiles, and by how many programs keys are shared."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..base.problem import Problem

MOST_KEYS = (1 << 30) - 1
"""Of a request: kernels count them in 32 bits. A list has room for more pages than any request has."""


class PagedConfig(NamedTuple):
    block_r: int  # queries times the heads that share a KV head
    block_n: int
    num_warps: int
    num_stages: int
    programs: int  # for each KV head, that the keys of few queries are shared by; 0: as batch-invariant calls split

    def __str__(self) -> str:
        how = "by lengths" if self.programs else "in splits that no other request changes"
        return (
            f"work listed {how}, tiles of {self.block_r} rows, blocks of {self.block_n} keys, "
            f"{self.num_warps} warps, {self.num_stages} stages"
        )


ROUNDS = 2
"""Of programs that run at a time. Fewer and longer ones would end at other times, more would start more often."""


def rounded_queries(q_len: int) -> int:
    """The most queries of a request, as far as tiles depend on them."""
    return min(64, 1 << (max(q_len, 1) - 1).bit_length())


_INVARIANT_ROWS = 32
"""Of a tile of a batch-invariant call: what a few queries of a group have. A guess, not measured."""


def configure(problem: Problem, batch_invariant: bool = False) -> PagedConfig:
    """The tiles are those of decoding (gpu/decode_tuning.py), not tuned for prompts yet."""
    group, width = problem.group, max(problem.head_dim, problem.value_dim)
    limit = 16 if problem.dtype is torch.float32 else 64 if width <= 128 else 32
    most = max(16, min(limit, 1 << (group * rounded_queries(problem.q_len) - 1).bit_length()))
    if batch_invariant:  # the longest prompt may be that of another request
        return _configure(problem, min(limit, _INVARIANT_ROWS), width)._replace(programs=0)
    return _configure(problem, most, width)


def _configure(problem: Problem, most: int, width: int) -> PagedConfig:
    """A configuration of tiles of so many rows."""
    if problem.device.type == "cpu":  # the interpreter
        return PagedConfig(most, 32, 4, 1, max(1, 6 // max(problem.kv_heads, 1)))
    if problem.dtype is torch.float32:
        block_n, num_warps, num_stages, resident = (32, 8, 2, 1) if width <= 128 else (16, 8, 1, 1)
    elif most > 16:
        block_n, num_warps, num_stages, resident = (64, 4, 2, 2) if width <= 128 else (32, 4, 2, 1)
    else:
        block_n, num_warps, num_stages, resident = (64, 4, 3, 1) if width > 64 else (128, 4, 2, 2)
    programs = ROUNDS * resident * max(1, problem.num_sms) // max(1, problem.kv_heads)
    return PagedConfig(most, block_n, num_warps, num_stages, max(1, programs))
