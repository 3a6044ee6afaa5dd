"""Portable GPU kernels in Triton, for sm_80 and newer, and for any machine under `TRITON_INTERPRET=1`."""

from __future__ import annotations

from typing import Any

from ...base.problem import Forward, Inputs, Problem
from ...gpu.decode_tuning import DecodeConfig
from . import few
from . import forward as tiles
from .backward import prepare_backward

__all__ = ["prepare", "prepare_backward"]


def prepare(problem: Problem, inputs: Inputs, config: Any) -> Forward:
    """A forward as a function of its inputs: by tiles of queries, or for few of them."""
    return (few if isinstance(config, DecodeConfig) else tiles).prepare(problem, inputs, config)
