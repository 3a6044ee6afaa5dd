"""Kernels for Hopper (sm_90) in Gluon, the language of explicit layouts, TMA and warp roles inside Triton."""

from .forward_sm90 import forward, repeat

__all__ = ["forward", "repeat"]
