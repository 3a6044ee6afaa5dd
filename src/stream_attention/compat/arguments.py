"""Arguments of FlashAttention's functions as those of ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Window = tuple[int, int]


def sides(window_size: Window) -> Window | None:
    """A window of ours: where both sides are unbounded none, and -1 for each that is below 0.

    >>> sides((-1, -1)), sides((7, -5))
    (None, (7, -1))
    """
    left, right = as_int(window_size[0]), as_int(window_size[1])
    return None if left < 0 and right < 0 else (max(left, -1), max(right, -1))


def as_int(number: Any) -> Any:
    """A length, or a side of a window, which may be a tensor as in the library: then the host waits for it."""
    return int(number) if isinstance(number, Tensor) else number
