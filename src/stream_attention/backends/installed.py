"""What is installed here that backends need. Plans depend on it; tests set it."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

import torch

from ..base.device import arch
from ..base.errors import refuse
from ..base.problem import Problem

HAS_TRITON = find_spec("triton") is not None
"""Looked up once: torch.compile of torch 2.11 cannot trace the search."""

HOPPER_TRITON = ("3.6", "3.7", "3.8", "3.9")
"""The Triton releases with which the Gluon kernels ran on a GPU. Gluon is experimental: newer ones are checked."""

RAN_ON = {90: "NVIDIA H200"}
"""Compute capability -> the GPU that our kernels ran on. For others the tests compile them."""

TORCH = "torch==2.15.0"
"""On Linux x86_64 an index has it with CUDA, and it asks for Triton 3.9 (seen on 2026-11-18)."""

SEE_INFO = "; run `stream-attention info`"


class Lacking(str):
    """A reason that is of the installation, not of the problem."""

    __slots__ = ()


NO_TRITON = Lacking("Triton is not installed")


def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:  # the module of another package: triton-windows, pytorch-triton-rocm
        return str(import_module("triton").__version__)


@cache
def triton_release() -> str:
    """The installed Triton's release, such as "3.6". Plans depend on it."""
    return ".".join(triton_version().split(".")[:2])


def is_newer(release: str) -> bool:
    """Whether a Triton release came after those of `HOPPER_TRITON`."""
    return _numbers(release) > _numbers(HOPPER_TRITON[-1])


def _numbers(release: str) -> list[int]:
    return [int(number) for number in release.split(".") if number.isdigit()]


def hopper_setting() -> str:
    """`STREAM_ATTENTION_HOPPER`: "auto" asks the release and the self-check, "on" and "off" decide."""
    found = os.environ.get("STREAM_ATTENTION_HOPPER", "auto").lower()
    if found not in ("auto", "on", "off"):
        refuse("STREAM_ATTENTION_HOPPER", "auto, on or off", repr(found))
    return found


def remedy(backend: str, problem: Problem) -> str | None:
    """The command that enables a backend on the GPU of a problem; None where no command does it."""
    is_hopper = backend == "gluon" and problem.arch == 90
    if problem.device.type != "cuda" or sys.platform != "linux" or not (is_hopper or backend == "triton"):
        return None
    if not HAS_TRITON:
        return f"pip install '{triton_of_torch()}'"
    return f"pip install {TORCH}" if is_hopper and triton_release() not in HOPPER_TRITON else None


def triton_of_torch() -> str:
    """The Triton that the installed torch asks for."""
    asked = (re.match(r"triton[ (]*([=<>~!][^;)]*)", one) for one in requires("torch") or ())
    return next((f"triton{one[1].strip()}" for one in asked if one), f"triton>={HOPPER_TRITON[0]}")


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
