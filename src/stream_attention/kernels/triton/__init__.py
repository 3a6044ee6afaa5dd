"""Portable GPU kernels in Triton, for sm_80 and newer, and for any machine under `TRITON_INTERPRET=1`."""

from __future__ import annotations

from . import interpreter
from .backward import backward
from .forward import forward, repeat

__all__ = ["backward", "forward", "repeat"]

interpreter.fix()
