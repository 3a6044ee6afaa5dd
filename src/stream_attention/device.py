"""What a device is, looked up once."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, such as (9, 0)."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
