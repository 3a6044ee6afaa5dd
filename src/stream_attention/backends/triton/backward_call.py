"""The arguments of a backward's kernels: what they read, and how they are bound."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...base.problem import Inputs, Problem
from ...base.state import Saved
from ...gpu.arguments import UNIT, common_sizes, is_aligned, row_strides
from ...gpu.launch import Kernel, Launch, Sizes
from ...gpu.prepass import Prepass
from ...gpu.rows import PAD, Rows, padded_rows
from .arguments import bind_tiles
from .tuning import BackwardConfig, Tile


class BackwardCall(NamedTuple):
    """All calls whose tensors lie as these do."""

    problem: Problem
    inputs: Inputs
    before: Prepass
    saved: Saved
    rows: Rows

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, saved: Saved, config: BackwardConfig) -> BackwardCall:
        tiles = [(tile.block_m, tile.block_n) for tile in (config.query, config.key)]
        before = Prepass.of(problem, inputs, needs_visible=True, tiles=tiles)
        return cls(problem, inputs, before, saved, Rows.samples(problem, inputs.query))

    @property
    def read(self) -> tuple[Any, ...]:
        """What kernels read besides inputs once the one by queries has run: the gradient of the output, and rows."""
        return self.saved.grad_out, *self.rows

    def bind(self, kernel: Kernel, grid: int, tile: Tile, names: str, others: tuple[Any, ...], **own: Any) -> Launch:
        """A launch of a kernel, as a function of inputs, of results of the prepass, and of `others`, tensors to which
        the parameters `names` point."""
        out, _, grad_out, _ = self.saved
        with_out = "out_ptr" in kernel.names
        sizes = self.sizes(is_aligned(*self.inputs[:3], grad_out, *([out] if with_out else [])), with_out)
        computed = self.before.samples
        return bind_tiles(kernel, grid, tile, self.problem, self.inputs, computed, names, others, sizes, **own)

    def sizes(self, aligned: bool, with_out: bool = False) -> Sizes:
        """What depends on lengths; `with_out`: of a kernel that reads the output too."""
        problem, unit = self.problem, UNIT if aligned else 1
        out, _, grad_out, _ = self.saved
        names = "row_tiles stride_gb stride_gm stride_gh"
        rows = padded_rows(problem, self.inputs.query)
        numbers: tuple[int, ...] = (rows // PAD.value, *row_strides(grad_out, problem.packed, unit))
        if with_out:
            names += " stride_ob stride_om stride_oh"
            numbers += row_strides(out, problem.packed, unit)
        return common_sizes(problem, self.inputs, aligned, names, numbers)
