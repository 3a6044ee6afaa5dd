"""What the kernels of the backward take alike: sizes, and constexprs by the names of their parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...base.problem import Inputs, Problem
from ...gpu.arguments import UNIT, common_sizes, row_strides
from ...gpu.launch import Sizes
from ...gpu.rows import PAD, padded_rows
from .arguments import problem_constants, tile_constants
from .tuning import Tile


def shared_sizes(problem: Problem, inputs: Inputs, grad_out: Tensor, aligned: bool, out: Tensor | None = None) -> Sizes:
    """Of the kernels by queries and by keys, what depends on lengths; that of one which reads `out` too."""
    packed, unit = problem.packed, UNIT if aligned else 1
    numbers = (padded_rows(problem, inputs.query) // PAD.value, *row_strides(grad_out, packed, unit))
    if out is None:
        return common_sizes(problem, inputs, aligned, _SHARED, numbers)
    return common_sizes(problem, inputs, aligned, _WITH_OUT, (*numbers, *row_strides(out, packed, unit)))


_SHARED = "row_tiles stride_gb stride_gm stride_gh"
_WITH_OUT = f"{_SHARED} stride_ob stride_om stride_oh"


def backward_constants(problem: Problem, inputs: Inputs, tile: Tile) -> dict[str, Any]:
    """The constexprs of the kernel of a bias, but its own."""
    return problem_constants(problem, inputs) | tile_constants(tile)
