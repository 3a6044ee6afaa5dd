"""How a call on a cache is told to the decode kernels: what they have in common of arguments, results and workspace."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...problem import UNBOUNDED
from ...tuning.decode import DecodeConfig, DecodeProblem
from .arguments import FAR, in_fp32, slope_stride, tanh, tile_width


class DecodeCall(NamedTuple):
    """One call: its problem and its tensors, but for the cache."""

    problem: DecodeProblem
    config: DecodeConfig
    query: Tensor
    lengths: Tensor | None
    tree: Tensor | None
    slopes: Tensor | None  # [B or 1, Hq]
    sink: Tensor | None
    left: int
    right: int
    scale: float
    softcap: float
    out: Tensor
    lse: Tensor | None
    workspace: Tensor | None  # None: one split

    @property
    def early(self) -> bool:
        """Whether kernels are launched before those ahead of them end (decode_tiles.py)."""
        return self.problem.arch >= 90

    @property
    def options(self) -> dict[str, Any]:
        """Triton's, of the kernel that computes."""
        config = self.config
        options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return options | {"launch_pdl": True} if self.early else options

    @property
    def grid(self) -> int:
        return self.problem.lines * self.config.num_splits * self.problem.tiles_r

    def pointers(self, table: Tensor | None) -> tuple[Tensor | None, ...]:
        """From table_ptr to workspace_ptr."""
        results = self.out, self.lse, self.workspace
        return (table, self.lengths, self.tree, self.slopes, self.sink, *results)

    def scalars(self, table: Tensor | None, pages: int) -> tuple[int | float, ...]:
        """From stride_tb to softcap."""
        problem, config = self.problem, self.config
        return (
            0 if table is None else table.stride(0),
            *((0, 0) if self.tree is None else self.tree.stride()[:2]),
            slope_stride(self.slopes),
            *self.out.stride(),
            problem.batch,
            problem.kv_heads,
            problem.capacity,
            pages,
            problem.q_len,
            config.num_splits,
            config.split_keys,
            min(self.left, FAR),
            min(self.right, FAR),
            in_fp32(self.scale),
            self.softcap,
        )

    def constants(self) -> tuple[Any, ...]:
        """From GROUP to TANH."""
        problem, config = self.problem, self.config
        return (
            problem.group,  # GROUP
            problem.head_dim,  # D
            problem.value_dim,  # DV
            tile_width(problem.value_dim),  # BLOCK_DV
            problem.block_r,  # BLOCK_R
            config.block_n,  # BLOCK_N
            problem.page,  # PAGE
            self.left != UNBOUNDED,  # HAS_LEFT
            self.right != UNBOUNDED,  # HAS_RIGHT
            self.softcap != 0.0,  # HAS_SOFTCAP
            config.num_splits > 1,  # IS_SPLIT
            self.early,  # EARLY
            tanh(problem),  # TANH
        )

    def merging(self) -> dict[str, Any]:
        """What `Kernel.launch` takes for the kernel that merges."""
        problem = self.problem
        width = tile_width(problem.value_dim)
        options: dict[str, Any] = {"num_warps": 4, "launch_pdl": True} if self.early else {"num_warps": 4}
        return {
            "grid": problem.lines * problem.rows,
            "pointers": (self.workspace, self.sink, self.out, self.lse),
            "scalars": (*self.out.stride(), problem.batch, problem.kv_heads, problem.q_len, self.config.num_splits),
            "constants": (problem.group, problem.value_dim, width, min(32, 4096 // width), self.early),
            **options,
        }


def side_by_side(t: Tensor | None) -> Tensor | None:
    """A tensor whose last dim is contiguous: itself, if it is."""
    return t if t is None or t.shape[-1] == 1 or t.stride(-1) == 1 else t.contiguous()


def workspace_numbers(problem: DecodeProblem, config: DecodeConfig) -> int:
    """fp32 numbers in the workspace of a call (decode_tiles.py); 0 where nothing is merged."""
    if config.num_splits == 1:
        return 0
    states = problem.lines * config.num_splits * problem.rows
    return -(-states // 4) * 4 + states * problem.value_dim
