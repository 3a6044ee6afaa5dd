"""What a device is, looked up once."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def arch(device: torch.device) -> int:
    """Compute capability of an NVIDIA device as one number, 90 for 9.0; 0 for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has; 0 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
