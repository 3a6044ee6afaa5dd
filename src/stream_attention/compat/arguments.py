"""Arguments of FlashAttention's functions as those of ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Window = tuple[int, int]


def sides(window_size: Any) -> Window | None:
    """A window of ours: where both sides are unbounded none, and -1 for each that is below 0. Theirs may be tensors.

    >>> sides((-1, -1)), sides((7, -5))
    (None, (7, -1))
    """
    left, right = window_size
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        left, right = int(left), int(right)
    return None if left < 0 and right < 0 else (max(left, -1), max(right, -1))


def as_int(number: Any) -> Any:
    """A length, which models also pass as a tensor: then the host waits for it, as in the library."""
    return int(number) if isinstance(number, Tensor) else number
