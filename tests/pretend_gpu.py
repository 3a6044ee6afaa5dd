"""A Hopper GPU that is not there: calls on CPU tensors take the road of a GPU, up to the driver, which runs nothing.

For what the host does of a call: its time, and the parameters it hands to the driver.

    with pretend_gpu() as launches:
        attention(query, key, value)
    launches[-1].parameters  # bytes, as the driver would have read them, but for addresses

Kernels are not compiled: a signature says where their parameters lie. Memory that a kernel would write stays as it is.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from stream_attention.base import device, problem
from stream_attention.base.kv_layouts import checks
from stream_attention.base.problem import Hardware
from stream_attention.dispatch import launch_cache, plan
from stream_attention.gpu import driver, launch
from stream_attention.ops import append, fp8, write_kv

ARCH, NUM_SMS = 90, 132


@dataclass(frozen=True)
class Launched:
    """One launch, as the driver was given it. Two are equal wherever their tensors are."""

    kernel: str
    grid: int
    parameters: bytes  # with 0 for addresses
    addresses: tuple[int, ...] = field(compare=False)
    function: int = 0  # tells forms of a kernel apart: by constexprs, dtypes, alignment and options


class _AnyDevice(int):
    """Equal to every device's number: a CPU tensor has none."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class _Driver:
    """What gpu/driver.py calls of libcuda. Tensor maps are written in the format of Hopper's hardware, where it is
    known: the address, sizes less one and strides in units of 16 bytes."""

    def __init__(self, launches: list[Launched] | None, functions: dict[int, tuple[str, list[int]]]) -> None:
        self._launches, self._functions = launches, functions

    def cuLaunchKernelEx(self, config: int, function: int, _: None, extra: int) -> int:
        if self._launches is not None:
            words = (ctypes.c_uint64 * 5).from_address(extra)
            size = ctypes.c_uint64.from_address(words[3]).value
            grid = ctypes.c_uint32.from_address(config).value
            name, addresses = self._functions[function]
            parameters = bytearray(ctypes.string_at(words[1], size))
            found = tuple(int.from_bytes(parameters[at : at + 8], "little") for at in addresses)
            for at in addresses:
                parameters[at : at + 8] = bytes(8)
            self._launches.append(Launched(name, grid, bytes(parameters), found, function))
        return 0

    def cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> int:
        return 0

    def cuTensorMapEncodeTiled(
        self,
        place: int,
        kind: int,
        rank: int,
        at: int,
        sizes: int,
        pitches: int,
        box: int,
        steps: int,
        *modes: int,
    ) -> int:
        dims = (ctypes.c_uint64 * rank).from_address(sizes)
        strides = (ctypes.c_uint64 * max(rank - 1, 1)).from_address(pitches)
        if any(stride % 16 for stride in strides[: rank - 1]):
            return 1
        boxes = (ctypes.c_uint32 * rank).from_address(box)
        fields = [dim - 1 for dim in dims] + [0] * (5 - rank)
        text = struct.pack("<QIIII5I", at, kind, rank, modes[0], modes[1], *fields)
        text += struct.pack(f"<{rank - 1}I{rank}I", *(stride >> 4 for stride in strides[: rank - 1]), *boxes)
        ctypes.memmove(place, text.ljust(128, b"\0"), 128)
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 0


class _Compiled(dict[Any, Any]):
    """Forms of a kernel, made up when they are looked for."""

    def __init__(self, kernel: launch.Kernel, functions: dict[int, tuple[str, list[int]]]) -> None:
        self._kernel, self._functions = kernel, functions

    def get(self, key: Any, default: Any = None) -> Any:
        found = super().get(key)
        if found is None:
            found = self[key] = self._made(key)
        return found

    def _made(self, key: Any) -> launch.Compiled:
        kernel = self._kernel
        pointers = dict(zip(kernel.addresses, key[len(key) - len(kernel.addresses) :], strict=True))
        signature: dict[str, str] = {}
        maps = []
        annotations = kernel.function.fn.__annotations__
        for name in kernel.names:
            if name in kernel.constants or (name in pointers and pointers[name] is None):
                signature[name] = "constexpr"
            elif name.endswith("_desc"):
                signature[name] = "tensordesc"
                maps.append({"block_size": list(pointers[name][1:]), "swizzle": 3})
            elif name in pointers:
                signature[name] = "*fp32"
            else:
                signature[name] = _KINDS.get(str(annotations.get(name)).rpartition(".")[2], "fp32")
        parameters = launch.Parameters(signature, maps, start=48 if maps else 0)
        addresses = [8 * (word - driver.FIRST_PARAMETER) for word in parameters.words.values()]
        function = 1000 + len(self._functions)
        self._functions[function] = kernel.function.fn.__name__, addresses
        metadata = SimpleNamespace(num_warps=4, shared=1024, launch_pdl=False)
        return launch.Compiled(SimpleNamespace(metadata=metadata, function=function), parameters)


_KINDS = {"int32": "i32", "int64": "i64", "uint32": "u32"}


@contextmanager
def pretend_gpu(keep_launches: bool = True) -> Iterator[list[Launched]]:
    """Within this block, calls on CPU tensors are those of a Hopper GPU. Yields the launches, in their order."""
    launches: list[Launched] = []
    functions: dict[int, tuple[str, list[int]]] = {}
    library = _Driver(launches if keep_launches else None, functions)
    kernels: dict[int, _Compiled] = {}

    def compiled(self: launch.Kernel) -> _Compiled:
        if id(self) not in kernels:
            kernels[id(self)] = _Compiled(self, functions)
        return kernels[id(self)]

    def keep(self: launch.Kernel, value: Any) -> None:
        """Of a kernel that is made within the block, and outlives it."""
        self.__dict__["compiled"] = value

    with ExitStack() as stack:
        for target, name, value in (
            (driver, "_library", lambda: library),
            (launch, "_stream_of", lambda index: 7),
            (launch.Kernel, "compiled", property(compiled, keep)),
            (torch._C, "_cuda_getDevice", lambda: _AnyDevice(0)),
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 7),
            (problem, "hardware_of", lambda _: Hardware(torch.device("cuda", 0), ARCH, NUM_SMS)),
            (fp8, "makes_fp8_codes", lambda _: True),
            (append, "runs_triton", lambda _: True),
            (write_kv, "runs_triton", lambda _: True),
            (checks, "should_validate", lambda asked, _: bool(asked)),
            (device, "arch", lambda _: ARCH),
        ):
            stack.enter_context(patch.object(target, name, value, create=True))
        driver.address_word.cache_clear()
        driver.map_words.cache_clear()
        launch_cache.clear()
        plan.forget_plans()
        try:
            yield launches
        finally:
            launch_cache.clear()
            plan.forget_plans()
    driver.address_word.cache_clear()
    driver.map_words.cache_clear()
