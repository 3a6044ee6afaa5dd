"""A seed that all ranks have."""

from __future__ import annotations

from torch import Tensor

from .transport import Transport, all_gather


def common_seed(transport: Transport, mine: Tensor) -> Tensor:
    """Rank 0's (seed, offset), int64, on every rank; nothing waits for a device."""
    runs = [all_gather(rank, mine, [mine.shape] * transport.size) for rank in transport.ranks]
    return transport.run(runs, mine.device)[0][0]
