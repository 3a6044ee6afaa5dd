"""Memory that nobody has written is NaN, so a kernel that forgets an element cannot pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` and its kind allocate in this block with NaN (integers: their largest value).

    Process-wide. torch does it only where deterministic algorithms are on, so they are in this block, and a call that
    leaves `deterministic=None` follows them: pass it explicitly.

    >>> with poisoned_memory():
    ...     torch.empty(2).tolist()
    [nan, nan]
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
