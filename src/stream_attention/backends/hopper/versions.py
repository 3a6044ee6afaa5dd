"""Every difference between the Triton releases that the Gluon kernels run with: 3.6 to 3.9.

Functions are found by their names, so a later release that keeps them works; the assembler's options by the release.
"""

from typing import Any, dataclass_transform

import triton
from triton.backends.nvidia.compiler import CUDAOptions
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "thread_barrier", None) or gl.barrier

HAS_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from 3.9 on
REINTERPRETS_ALL = gl.constexpr(hasattr(tma, "async_load"))  # 3.8: as many bytes as there are, no fewer
COPIES_WGMMA_OPERANDS = gl.constexpr(hasattr(tma, "async_load"))  # the compiler of 3.8 and 3.9: see opaque_in_loop
ADDS_IN_PAIRS = gl.constexpr(hasattr(tma, "async_load"))  # gl.sum of 3.8 and 3.9; one by one before: see row_sums
ORDERS_LATE = gl.constexpr(hasattr(CUDAOptions, "sched4reg"))  # 3.9, with BACKWARD_OPTIONS: see computed_here


def _assembler_options() -> str | None:
    """From 3.7 on Triton asks ptxas for --regAllocOptLevel=2. The ptxas 13.4 of Triton 3.9 then spills 948 bytes in the
    backward of D 64, causal, and 264 at its own default, 4; ptxas 12.8 and 12.9 do the same at both levels. The last
    one named holds."""
    asked = triton.knobs.nvidia.ptxas_options
    if triton.__version__.startswith("3.6."):
        return asked
    return " ".join(filter(None, ["--regAllocOptLevel=4", asked]))


COMPILE_OPTIONS = {"ptx_options": _assembler_options()}

# Triton 3.9 computes the descriptors of all products at the top of a loop. The assembler has no uniform registers for
# so many: it keeps them in others, and spills. With this option LLVM computes everything shortly before it is needed.
BACKWARD_OPTIONS = COMPILE_OPTIONS | ({"sched4reg": True} if ORDERS_LATE.value else {})


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """Triton's aggregate, with a constructor that takes the annotated fields in their order: 3.6 and 3.7 write none.

    Triton caches kernels by a hash of sources, so the source of the constructor lists the fields.
    """
    kinds = cls.__annotations__

    @gluon.constexpr_function
    def __init__(self, *fields):
        for name, field in zip(kinds, fields, strict=True):
            setattr(self, name, gl.constexpr(field) if kinds[name] is gl.constexpr else field)

    __init__._unsafe_update_src(f"{__init__.src}# {', '.join(kinds)}\n")
    cls.__init__ = __init__  # type: ignore[misc]
    return _aggregate(cls)


@gluon.jit
def as_tile_of(desc, memory):
    """The same shared memory as a tile of a descriptor; the beginning of it where a tile is smaller."""
    if HAS_PUBLIC_REINTERPRET:
        return memory.reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    elif REINTERPRETS_ALL:
        TILES: gl.constexpr = memory.numel * memory.dtype.primitive_bitwidth // (8 * desc.block_type.nbytes)
        return as_tiles_of(desc, memory, TILES).index(0)
    else:
        return memory._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def as_tiles_of(desc, memory, COUNT: gl.constexpr):
    """The same shared memory, as so many tiles of a descriptor."""
    shape: gl.constexpr = [COUNT] + desc.block_type.shape
    if HAS_PUBLIC_REINTERPRET:
        return memory.reinterpret(desc.dtype, shape, desc.layout)
    else:
        return memory._reinterpret(desc.dtype, shape, desc.layout)


@gluon.jit
def computed_here(x):
    """`x`, all of which is computed before this point of the program also where LLVM computes things late."""
    if ORDERS_LATE:
        PACK: gl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    return x


@gluon.jit
def opaque_in_loop(number):
    """`number`, from which nothing is computed ahead of a loop: the newer compiler keeps the descriptors of 256 columns
    of queries in registers otherwise, and spills them."""
    if COPIES_WGMMA_OPERANDS:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
    else:
        return number


if hasattr(tma, "async_atomic_add"):  # from 3.8 on
    tma_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def tma_add(desc, coord, source, _semantic=None):
        """Add a tile in shared memory to one in global memory, atomically by element. Triton 3.6 and 3.7 can, but have
        no name for it."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, source.handle)
