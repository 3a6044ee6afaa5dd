"""The backends, in order of preference. Each says why it cannot do a problem, and how it would be configured."""

from __future__ import annotations

from ..base.fp8_layout import HEAD_DIMS as FP8_HEAD_DIMS
from ..base.problem import AUTO
from .base import Backend
from .eager import Eager
from .hopper import Hopper
from .installed import HOPPER_TRITON, SEE_INFO, interpreting, makes_fp8_codes, runs_triton, triton_release
from .reference import Reference
from .triton import Triton

__all__ = [
    "AUTO",
    "BACKENDS",
    "BY_NAME",
    "COMPILED",
    "FP8_HEAD_DIMS",
    "HOPPER_TRITON",
    "SEE_INFO",
    "Backend",
    "interpreting",
    "makes_fp8_codes",
    "runs_triton",
    "triton_release",
]

BACKENDS: tuple[Backend, ...] = (Hopper(), Triton(), Eager(), Reference())
BY_NAME = {backend.name: backend for backend in BACKENDS}
COMPILED = tuple(backend.name for backend in BACKENDS if backend.compiles)
"""The backends that compile kernels."""
