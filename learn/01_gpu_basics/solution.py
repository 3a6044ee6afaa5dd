"""A solution of the exercise."""

from __future__ import annotations


def element_of(
    block: tuple[int, int], dim: tuple[int, int], thread: tuple[int, int], rows: int, cols: int
) -> int | None:
    col = block[0] * dim[0] + thread[0]
    row = block[1] * dim[1] + thread[1]
    if row >= rows or col >= cols:
        return None
    return row * cols + col
