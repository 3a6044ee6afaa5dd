"""Exercise: which element of a matrix does a thread add? Fill the gap, then run

python learn/01_gpu_basics/check.py
"""

from __future__ import annotations


def element_of(
    block: tuple[int, int], dim: tuple[int, int], thread: tuple[int, int], rows: int, cols: int
) -> int | None:
    """The index of the one element that this thread adds; None where it has nothing to do.

    `block`, `dim` and `thread` are blockIdx, blockDim and threadIdx as (x, y). Blocks may be of any shape. The matrix
    lies in memory row by row. The grid covers all of it, and its last blocks may reach past both edges. The threads of
    a warp, whose x are neighbours, should read neighbours in memory.
    """
    raise NotImplementedError("Find the thread's column and row first, then ask whether both are inside.")
