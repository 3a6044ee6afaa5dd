"""Kernels for Hopper (sm_90) in Gluon, the language of explicit layouts, TMA and warp roles inside Triton."""

from .backward_sm90 import backward
from .forward_sm90 import forward, forward_into, repeat

__all__ = ["backward", "forward", "forward_into", "repeat"]
