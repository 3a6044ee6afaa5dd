"""What a device is, looked up once."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

import torch


def arch(device: torch.device) -> int:
    """Compute capability of an NVIDIA device as one number, 90 for 9.0; 0 for any other device."""
    return _facts(device)[0] if device.type == "cuda" else 0


def processors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has; 0 for any other device."""
    return _facts(device)[1] if device.type == "cuda" else 0


@lru_cache(maxsize=64)
def _facts(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    is_nvidia = torch.version.hip is None
    return (10 * properties.major + properties.minor if is_nvidia else 0), properties.multi_processor_count


def cpu_name() -> str:
    """What this machine's CPU calls itself; where the system does not say, its instruction set."""
    listing = Path("/proc/cpuinfo")  # Linux
    if listing.exists():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
