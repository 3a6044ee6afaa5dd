"""The CUDA driver through ctypes: launches a compiled kernel from one block of memory, whatever Triton release made it.

The block holds everything `cuLaunchKernelEx` reads: the launch configuration, one launch attribute, the list by which
the driver finds the parameters, and the parameters themselves, laid out as the C ABI lays out a struct. A launch copies
a template of it and writes addresses and the stream, so nothing is shared between launches:

    word 0     the list: (BUFFER_POINTER, address of word 24, BUFFER_SIZE, address of word 5, END)
    word 5     size of the parameters in bytes
    word 6     CUlaunchConfig: grid, block, shared memory, stream (word 10), attributes (word 11), their count
    word 13    CUlaunchAttribute: programmatic stream serialisation, if the kernel uses it
    word 24    the parameters
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

FIRST_PARAMETER = 24
"""The word at which the parameters begin."""

_GRID, _STREAM, _ATTRIBUTES = 6, 10, 11
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2
_INVALID_CONTEXT = 201
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_BYTES, _PREFER_SHARED = 8, 1
_SHARED_BYTES_UNASKED = 48 << 10
_TENSOR_MAP_BYTES = 128
_TENSOR_MAP_TYPES = {
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
"""CUtensorMapDataType."""

_L2_PROMOTION_128B = 2


@cache
def _library() -> Any:
    """The driver's library; None where there is none, or one without what is used here (before CUDA 12.4)."""
    if torch.version.hip is not None:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        library.cuLaunchKernelEx.argtypes = [pointer, pointer, pointer, pointer]
        library.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
        library.cuMemsetD32Async.argtypes = [pointer, number, ctypes.c_size_t, pointer]
        library.cuTensorMapEncodeTiled.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
        library.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
        library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
        library.cuFuncSetCacheConfig.argtypes = [pointer, ctypes.c_int]
        library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
        library.cuGetErrorString.argtypes = [number, pointer]
    except (OSError, AttributeError):
        return None
    return library


def is_available() -> bool:
    return _library() is not None


def check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({code})")


def block(size: int, threads: int, shared_bytes: int, is_programmatic: bool) -> tuple[array[int], Callable[..., int]]:
    """Room for the launches of a kernel whose parameters take `size` bytes, and the function that launches it."""
    header = struct.pack("<5QQ", _BUFFER_POINTER, 0, _BUFFER_SIZE, 0, 0, size)
    header += struct.pack("<7I4xQQI4x", 1, 1, 1, threads, 1, 1, shared_bytes, 0, 0, 1 if is_programmatic else 0)
    header += struct.pack("<I4xI", _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    return array("Q", header.ljust(8 * FIRST_PARAMETER + -(-size // 8) * 8, b"\0")), _library().cuLaunchKernelEx


def write_grid(words: array[int], grid: int) -> None:
    """Set how many programs a block launches."""
    words[_GRID] = grid | 1 << 32


def launch(words: array[int], function: int, stream: int, launch_kernel: Callable[..., int]) -> None:
    """Launch a copy of a template in which the parameters were written."""
    base = words.buffer_info()[0]
    words[1] = base + 8 * FIRST_PARAMETER
    words[3] = base + 8 * 5
    words[_STREAM] = stream
    words[_ATTRIBUTES] = base + 8 * 13
    code = launch_kernel(base + 8 * 6, function, None, base)
    if code:
        check(_again(code, launch_kernel, base + 8 * 6, function, None, base))


def fill_words(address: int, value: int, count: int, stream: int) -> None:
    """Set `count` 32-bit words on the device."""
    fill = _library().cuMemsetD32Async
    check(_again(fill(address, value, count, stream), fill, address, value, count, stream))


def _again(code: int, call: Callable[..., int], *arguments: Any) -> int:
    """The code of a call that returned `code`: it is made once more in a thread that has not used CUDA before, after
    the runtime has made the device's context its current one."""
    if code != _INVALID_CONTEXT:
        return code
    torch.cuda.synchronize()
    return call(*arguments)


def load(image: bytes, name: str, shared_bytes: int) -> int | None:
    """A kernel of some machine code, loaded on the current device; None where the driver refuses it."""
    library, module, function = _library(), ctypes.c_void_p(), ctypes.c_void_p()
    if library is None:
        return None
    image_to = ctypes.byref(module), image
    code = _again(library.cuModuleLoadData(*image_to), library.cuModuleLoadData, *image_to)
    if code or library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()):
        return None
    if shared_bytes > _SHARED_BYTES_UNASKED and (
        library.cuFuncSetCacheConfig(function, _PREFER_SHARED)
        or library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
    ):
        return None
    return function.value


def parameters_of(function: int) -> list[tuple[int, int]]:
    """Offset and size in bytes of each parameter of a loaded kernel."""
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    query = _library().cuFuncGetParamInfo
    while query(function, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append((offset.value, size.value))
    return found


def tensor_map(
    address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> bytes:
    """An encoded CUtensorMap: how TMA reads boxes of a tensor. Out of bounds reads give 0."""
    rank = len(shape)
    # One block of memory: the map, which the driver wants on 64 bytes, then what it reads. ctypes arrays take 10 us.
    pitches = [dtype.itemsize * stride for stride in reversed(strides[:-1])]
    words = array("Q", bytes(_TENSOR_MAP_BYTES + 64))
    words.extend((*reversed(shape), *pitches))
    words.frombytes(struct.pack(f"<{2 * rank}I", *reversed(box), *[1] * rank))
    base = words.buffer_info()[0]
    place, dims = -(-base // 64) * 64, base + _TENSOR_MAP_BYTES + 64
    boxes = dims + 8 * (2 * rank - 1)
    sizes = dims, dims + 8 * rank, boxes, boxes + 4 * rank
    encode = _library().cuTensorMapEncodeTiled
    check(encode(place, _TENSOR_MAP_TYPES[dtype], rank, address, *sizes, 0, swizzle, _L2_PROMOTION_128B, 0))
    return ctypes.string_at(place, _TENSOR_MAP_BYTES)


class MapWords(NamedTuple):
    """Which 32-bit words of an encoded tensor map hold its sizes, less one, and its strides, in units of 16 bytes; both
    in the order of the tensor's dims, strides without the last."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@cache
def map_words(rank: int) -> MapWords | None:
    """Where the sizes and strides of a tensor map lie, found by encoding maps that differ in one of them, and tried on
    one that differs in all; None if they are not words of their own. To encode a map takes the driver 3 us."""
    shape, strides = [8 + dim for dim in range(rank)], [1 << 12 + 4 * (rank - dim) for dim in range(rank - 1)] + [1]
    box = [1] * (rank - 1) + [8]

    def words(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
        return struct.unpack("<32I", tensor_map(1 << 20, torch.float32, shape, strides, box, 0))

    def place(values: Sequence[int], dim: int, other: int, of: Callable[[int], int], at: int) -> int | None:
        changed = [shape, strides]
        changed[at] = [*values[:dim], other, *values[dim + 1 :]]
        pairs = list(enumerate(zip(words(shape, strides), words(*changed), strict=True)))
        differ = [(word, pair) for word, pair in pairs if pair[0] != pair[1]]
        if len(differ) != 1 or differ[0][1] != (of(values[dim]), of(other)):
            return None
        return differ[0][0]

    sizes = [place(shape, dim, 70_000 + dim, lambda size: size - 1, 0) for dim in range(rank)]
    pitches = [place(strides, dim, (5 << 20) + 4 * dim, lambda stride: stride >> 2, 1) for dim in range(rank - 1)]
    if None in sizes or None in pitches:
        return None
    found = MapWords(tuple(sizes), tuple(pitches))  # type: ignore[arg-type]
    others = [100_001 + dim for dim in range(rank)], [(3 << 20) + 12 * dim for dim in range(rank - 1)] + [1]
    written = list(words(shape, strides))
    for word, size in zip(found.sizes, others[0], strict=True):
        written[word] = size - 1
    for word, stride in zip(found.strides, others[1], strict=False):
        written[word] = stride >> 2
    return found if tuple(written) == words(*others) else None


@cache
def address_word() -> int | None:
    """Which word of an encoded tensor map is the address, found by encoding two; None if it is not one whole word."""
    first, second = 1 << 20, (1 << 40) + (1 << 21)
    maps = [struct.unpack("<16Q", tensor_map(at, torch.float32, [64], [1], [64], 0)) for at in (first, second)]
    differ = [place for place, (one, other) in enumerate(zip(*maps, strict=True)) if one != other]
    if len(differ) != 1 or (maps[0][differ[0]], maps[1][differ[0]]) != (first, second):
        return None
    return differ[0]
