"""Kernels for Hopper (sm_90) in Gluon, the language of explicit layouts, TMA and warp roles inside Triton."""

from .backward_sm90 import prepare_backward
from .forward_sm90 import forward_into, prepare

__all__ = ["forward_into", "prepare", "prepare_backward"]
