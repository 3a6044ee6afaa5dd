"""What a device is, looked up once."""

from __future__ import annotations

from functools import lru_cache

import torch


def arch(device: torch.device) -> int:
    """Compute capability of an NVIDIA device as one number, 90 for 9.0; 0 for any other device."""
    return _facts(device)[0] if device.type == "cuda" else 0


def num_sms(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has; 0 for any other device."""
    return _facts(device)[1] if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _facts(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    is_nvidia = torch.version.hip is None
    return (10 * properties.major + properties.minor if is_nvidia else 0), properties.multi_processor_count


def allows_tf32() -> bool:
    """Whether fp32 products may be rounded to TF32. Torch's `allow_tf32` raises where `fp32_precision` was set."""
    if torch.compiler.is_compiling():  # which cannot trace it; what is traced here is plain torch, which asks itself
        return False
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
