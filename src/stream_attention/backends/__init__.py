"""The backends, in order of preference. Each says why it cannot do a problem, and how it would be configured."""

from __future__ import annotations

from .base import Backend
from .eager import Eager
from .hopper import Hopper
from .reference import Reference
from .triton import Triton

BACKENDS: tuple[Backend, ...] = (Hopper(), Triton(), Eager(), Reference())
BY_NAME = {backend.name: backend for backend in BACKENDS}
COMPILED = tuple(backend.name for backend in BACKENDS if backend.compiles)
"""The backends that compile kernels."""
