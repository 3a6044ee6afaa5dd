"""Every difference between the Triton versions that the Gluon kernels compile with: 3.6, with which they were run, and
3.9, with which they only compile."""

from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
