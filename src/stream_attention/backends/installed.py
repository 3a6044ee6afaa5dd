"""What is installed here that backends need. Plans depend on it; tests set it."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from ..base.device import arch

HAS_TRITON = find_spec("triton") is not None
"""Looked up once: torch.compile of torch 2.11 cannot trace the search."""

HOPPER_TRITON = ("3.6", "3.7", "3.8", "3.9")
"""The Triton releases with which the Gluon kernels ran on a GPU. Gluon is experimental: others may differ."""

SEE_INFO = "; run `stream-attention info`"


@cache
def triton_release() -> str:
    """The installed Triton's release, such as "3.6". Plans depend on it."""
    try:
        found = version("triton")
    except PackageNotFoundError:  # the module of another package: triton-windows, pytorch-triton-rocm
        found = str(import_module("triton").__version__)
    return ".".join(found.split(".")[:2])


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")  # as Triton reads it


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: a GPU that they are for, or a CPU under the interpreter."""
    if not HAS_TRITON:
        return False
    if device.type == "cuda":
        return not 0 < arch(device) < 80
    return device.type == "cpu" and interpreting()


def makes_fp8_codes(device: torch.device) -> bool:
    """Whether a kernel makes codes of FP8 on a device; elsewhere torch does."""
    return device.type == "cuda" and arch(device) >= 89 and HAS_TRITON
