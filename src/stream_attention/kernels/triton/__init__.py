"""Portable GPU kernels in Triton, for sm_80 and newer, and for any machine under `TRITON_INTERPRET=1`."""

from __future__ import annotations

from typing import Any

from ...problem import Inputs, Problem
from ...tuning.decode import DecodeConfig
from . import few, interpreter
from . import forward as tiles
from .backward import backward

__all__ = ["backward", "forward", "repeat"]

interpreter.fix()


def forward(problem: Problem, inputs: Inputs, config: Any) -> Any:
    """`(out, lse)`: of tiles of queries, or of few."""
    return (few if isinstance(config, DecodeConfig) else tiles).forward(problem, inputs, config)


def repeat(problem: Problem, inputs: Inputs, config: Any, *results: Any) -> Any:
    """A plain call that was computed, as a function of tensors of the same layout."""
    return (few if isinstance(config, DecodeConfig) else tiles).repeat(problem, inputs, config, *results)
