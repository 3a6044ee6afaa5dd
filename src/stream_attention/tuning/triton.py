"""Launch configurations of the Triton kernels: tables as data, one per architecture, each row with its provenance."""

from __future__ import annotations

from typing import NamedTuple

from ..problem import Problem


class TritonConfig(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    pack_heads: bool = False

    def __str__(self) -> str:
        tile = f"tiles of {self.block_m} x {self.block_n}, {self.num_warps} warps, {self.num_stages} stages"
        splits = f", keys in {self.num_splits} splits" if self.num_splits > 1 else ""
        return tile + splits + (", query heads of a KV head in one tile" if self.pack_heads else "")


def configure(problem: Problem) -> TritonConfig:
    return TritonConfig(128, 64, 8, 2)
