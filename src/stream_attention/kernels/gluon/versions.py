"""Every difference between the Triton versions that the Gluon kernels compile with: 3.6, with which they were run, and
3.9, with which they only compile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

IS_NEWER = gl.constexpr(hasattr(tma, "async_load"))


@gluon.jit
def as_tile_of(desc, memory):
    """The same shared memory, as a tile of a descriptor."""
    if IS_NEWER:
        return memory.reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    else:
        return memory._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def kept_in_loop(number):
    """`number`, from which nothing is computed ahead of a loop: the newer compiler keeps the descriptors of 256 columns
    of queries in registers otherwise, and spills them."""
    if IS_NEWER:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
    else:
        return number
