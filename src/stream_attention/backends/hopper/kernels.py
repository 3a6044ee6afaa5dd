"""Kernels for Hopper (sm_90) in Gluon, the language of explicit layouts, TMA and warp roles inside Triton."""

from .backward_sm90 import prepare_backward
from .forward_sm90 import prepare, prepare_into

__all__ = ["prepare", "prepare_backward", "prepare_into"]
