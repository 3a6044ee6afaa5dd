"""Launching Triton and Gluon kernels with little work on the host.

Triton's own launch path binds, types and specialises every argument at each call, which costs more than a short kernel
runs. Kernels here specialise on nothing but their constexprs and on the dtypes and 16-byte alignment of their pointers
(integers have fixed types and no specialisation), so a compiled kernel is found by those. Its arguments are bound by
name once. A launch then copies a block of parameters, writes the addresses of its tensors and calls the driver:

    launch = kernel.bind(grid, (query, out), {"num_warps": 4}, q_ptr=query, out_ptr=out, rows=rows, BLOCK=64)
    launch(another_query, another_out)  # tensors of the same dtypes and alignment, on the same device
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITCallable

from ..problem import distinct
from . import driver


def jit(function: Any) -> Any:
    """`triton.jit` without specialising on integers: those that are annotated with their type."""
    integers = ("tl.int32", "tl.int64", "tl.uint32")
    names = [name for name, annotation in function.__annotations__.items() if annotation in integers]
    return triton.jit(function, do_not_specialize=names)


def name_steadily(function: Any) -> None:
    """Let the name under which Triton's cache keeps a jit function depend on nothing but the function.

    It is a hash of the source, of that of all functions it calls, and of the constants that these read; but Triton 3.6
    takes in the constants of a callee only if that was hashed before, for another kernel of the process. Then what was
    compiled ahead, or by a process that began with other calls, is not found. So callees are hashed first, always.
    """
    if getattr(function, "hash", "") is not None:  # hashed, or another Triton's
        return
    code, names = function.fn.__code__, function.fn.__globals__
    for value in [names.get(name) for name in code.co_names]:
        for callee in getattr(value, "hash_attrs", [value]):  # the methods of an aggregate
            if isinstance(callee, JITCallable) and callee is not function:
                name_steadily(callee)
    _ = function.cache_key


class Kernel:
    """A jit function whose compiled forms are kept by device, pointers (dtype, alignment), constants and options.

    `compile_options` hold for every launch that does not say otherwise. Products and sums are fused: that is Triton's
    default up to 3.9, which warns, and not from 3.10 on.
    """

    def __init__(self, function: Any, **compile_options: Any) -> None:
        self.function = function
        self.names: tuple[str, ...] = tuple(function.arg_names)
        self.constants = dict.fromkeys(name for name in self.names if name.isupper())
        self.addresses = [name for name in self.names if name.endswith(("_ptr", "_desc"))]
        self.compile_options = {"enable_fp_fusion": True, **compile_options}
        self.compiled: dict[Hashable, Compiled] = {}

    def bind(
        self,
        grid: int,
        tensors: Sequence[Tensor | None],
        options: Mapping[str, Any],
        /,
        device: torch.device | None = None,
        **arguments: Any,
    ) -> Launch:
        """A launch of `grid` programs with every argument bound but `tensors`, which each launch is given anew.

        Args:
            tensors: samples of what a launch takes, in its order. An argument that is one of them, or a descriptor of
                one, follows it.
            options: the compiler's, such as num_warps.
            device: where it runs; None: where the first of `tensors` that has memory lies.
            arguments: for each of the function's parameters: one of `tensors`, a descriptor of one, None, a number or
                the value of a constexpr.
        """
        assert len(arguments) == len(self.names), set(self.names).symmetric_difference(arguments)
        return Launch(self, grid, tensors, dict(options), device, arguments)

    def bind_addresses(
        self, grid: int, options: Mapping[str, Any], /, device: torch.device | None = None, **arguments: Any
    ) -> Launch:
        """`bind`, of a kernel without descriptors: a launch is given every address, in the order of the parameters."""
        tensors = distinct(*[arguments[name] for name in self.addresses])
        arguments |= zip(self.addresses, tensors, strict=True)
        return self.bind(grid, tensors, options, device, **arguments)

    def launch(self, grid: int, options: Mapping[str, Any], /, **arguments: Any) -> None:
        """Bind and launch at once."""
        self.bind_addresses(grid, options, **arguments)(*[arguments[name] for name in self.addresses])


class Launch:
    """A kernel and its arguments, all but the tensors. Holds no tensor and no address; safe to call from any thread.

    The first call compiles, or loads what was compiled before, through Triton. So do calls where nothing is compiled:
    in the interpreter, and offline.
    """

    __slots__ = (
        "_arguments", "_block", "_changes", "_compiled", "_device", "_function", "_grid", "_kernel", "_key",
        "_launch_kernel", "_options", "_places", "_sources", "_template", "_values",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        tensors: Sequence[Tensor | None],
        options: dict[str, Any],
        device: torch.device | None,
        arguments: dict[str, Any],
    ) -> None:
        index = {id(t): place for place, t in enumerate(tensors) if t is not None}
        assert len(index) == len(tensors) - sum(t is None for t in tensors), "tensors are distinct objects"
        if device is None:
            devices = [t.device for t in tensors if t is not None]
            device = next((device for device in devices if device.type != "meta"), devices[0])
        key: list[Any] = [device, *options.values(), *[arguments[name] for name in kernel.constants]]
        sources: dict[str, int] = {}  # parameter -> the tensor of a call that it follows
        for name in kernel.addresses:
            value = arguments[name]
            if value is None:
                key.append(None)
            elif isinstance(value, Descriptor):
                sources[name] = index[id(value.base)]
                key.append((value.dtype, *value.block_shape))
                arguments[name] = value._replace(base=None)
            else:
                sources[name] = index[id(value)]
                key.append((value.dtype, value.data_ptr() % 16 == 0))
                arguments[name] = None
        self._kernel, self._grid, self._options = kernel, grid, options
        self._arguments, self._sources, self._key = arguments, sources, tuple(key)
        self._device = device.index
        self._changes: dict[str, Any] = {}  # arguments that differ from `_arguments`
        self._template: Launch | None = None  # whose arguments these are, but for `_changes`
        self._compiled: Compiled | None = None
        self._block: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether a call may be given addresses in place of tensors. Looks for what other launches have compiled."""
        if self._compiled is None:
            self._compiled = self._kernel.compiled.get(self._key)
        return self._compiled is not None

    def __call__(self, *tensors: Any) -> None:
        """Launch in the current stream of the device. A tensor may be given by its address, except in a first call."""
        if not self._grid:
            return
        if self._block is None:
            self._pack()
        if self._block is None or _enter.calls or _leave.calls:
            return self._call_triton(tensors)
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(*tensors)
        words = self._block[:]
        for word, source in self._places:
            tensor = tensors[source]
            words[word] = tensor if type(tensor) is int else tensor.data_ptr()
        driver.launch(words, self._function, _stream_of(self._device), self._launch_kernel)

    def replaced(self, grid: int | None = None, **numbers: Any) -> Launch:
        """The same launch with other numbers, such as lengths, and descriptors of other shapes. Constexprs stay."""
        other: Launch = object.__new__(Launch)
        other._kernel, other._key, other._device = self._kernel, self._key, self._device
        other._options, other._sources = self._options, self._sources
        other._grid = self._grid if grid is None else grid
        other._arguments, other._changes = self._arguments, {**self._changes, **numbers}
        other._template = self if self._template is None else self._template
        other._compiled, other._block = self._compiled, None
        return other

    def resized(self, grid: int, **arguments: Any) -> Launch | None:
        """The same launch of tensors with other lengths: what depends on them, by name. None where that changes a
        constexpr."""
        bound, constants, numbers = self._arguments, self._kernel.constants, {}
        for name, value in arguments.items():
            if name in constants:
                if value != bound[name]:
                    return None
            else:
                numbers[name] = value._replace(base=None) if type(value) is Descriptor else value
        return self.replaced(grid, **numbers)

    def _all_arguments(self) -> dict[str, Any]:
        return {**self._arguments, **self._changes}

    def _pack(self) -> None:
        """Make the block that the driver launches, where the kernel is compiled and the layout of its parameters known.
        From that of a template only what differs is written."""
        if not self.is_compiled:
            return
        assert self._compiled is not None
        kernel, parameters = self._compiled
        if parameters is None:
            return
        template = self._template
        if template is None:
            metadata = kernel.metadata
            size, threads = parameters.struct.size, 32 * metadata.num_warps
            block, self._launch_kernel = driver.block(size, threads, metadata.shared, metadata.launch_pdl)
            self._values = parameters.values(self._arguments)
            self._places = tuple((parameters.words[name], source) for name, source in self._sources.items())
            self._function = kernel.function
        else:
            if template._block is None:
                template._pack()
            block, self._launch_kernel = template._block[:], template._launch_kernel
            self._values = parameters.replaced(template._values, self._changes)
            self._places, self._function = template._places, template._function
        driver.write(block, self._grid, parameters.struct, self._values)
        self._block = block  # last: another thread launches as soon as it is there

    def _call_triton(self, tensors: Sequence[Any]) -> None:
        if self._device is not None and self._device != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self._call_triton(tensors)
        arguments = self._all_arguments()
        for name, source in self._sources.items():
            tensor, bound = tensors[source], arguments[name]
            arguments[name] = tensor if bound is None else bound.of(tensor)
        in_order = [arguments[name] for name in self._kernel.names]
        kernel = self._kernel
        if self._compiled is not None:
            return _run(self._compiled.kernel, self._grid, self._device, in_order)
        if isinstance(kernel.function, JITCallable):  # not an interpreted one
            name_steadily(kernel.function)
        # Compiles if need be, and launches. Nothing comes back from the interpreter or an offline compilation.
        found = kernel.function[(self._grid,)](*in_order, **{**kernel.compile_options, **self._options})
        if found is not None:
            kernel.compiled.setdefault(self._key, Compiled(found, _parameters_of(found)))


class Compiled(NamedTuple):
    """A kernel that Triton compiled and loaded, and how its parameters are laid out; None where Triton launches it."""

    kernel: Any
    parameters: Parameters | None


class Descriptor(NamedTuple):
    """How TMA reads a tensor: what Triton's TensorDescriptor says, checked by the driver alone."""

    base: Any
    dtype: torch.dtype
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    def of(self, base: Any) -> Any:
        """Triton's descriptor of a tensor that lies as this one does."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        base = _Address(base, self.dtype) if type(base) is int else base
        return TensorDescriptor(base, self.shape, self.strides, self.block_shape, self.layout)


class _Address(NamedTuple):
    """What Triton asks of the tensor of a descriptor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Parameters:
    """How a compiled kernel's parameters lie in memory: as in a C struct, which begins at byte `start`."""

    def __init__(self, signature: Mapping[str, str], tensor_maps: Sequence[Mapping[str, Any]], start: int = 0) -> None:
        self._start = start
        self.words: dict[str, int] = {}  # parameter -> the word of the block that holds its address
        self._fields: list[tuple[str, Any]] = []  # parameter, and for a descriptor (swizzle, box)
        self._maps: dict[str, Any] = {}
        self._places: dict[str, int] = {}  # parameter -> its first place among the values
        self.offsets: list[tuple[int, int]] = []
        self._format, self._end = "", 0
        maps = iter(tensor_maps)
        for name, kind in signature.items():
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                made = next(maps)
                box = made["block_size"]
                address_word = driver.address_word()
                assert address_word is not None
                self.words[name] = self._add("128s", 128, 64) + address_word
                for _ in box:
                    self._add("i", 4, 4)
                for _ in box:
                    self._add("q", 8, 8)
                self._maps[name] = made["swizzle"], tuple(box)
                self._fields.append((name, self._maps[name]))
                continue
            code = "Q" if kind.startswith("*") else _STRUCT_CODES[kind]
            size = struct.calcsize(f"<{code}")
            word = self._add(code, size, size)
            if kind.startswith("*"):
                self.words[name] = word
            self._fields.append((name, None))
        for _ in range(2):  # scratch memory of Triton's own, and of a profiler: not used
            self._add("Q", 8, 8)
        self.struct = struct.Struct(f"<{start}x{self._format}")

    def _add(self, code: str, size: int, alignment: int) -> int:
        """Lay out one parameter; returns its word in the block."""
        place = -(-self._end // alignment) * alignment
        self._format += "x" * (place - self._end) + code
        self._end = place + size
        self.offsets.append((self._start + place, size))
        return driver.FIRST_PARAMETER + (self._start + place) // 8

    def values(self, arguments: Mapping[str, Any]) -> list[Any]:
        """What `struct` packs, with 0 for addresses."""
        values: list[Any] = []
        for name, descriptor in self._fields:
            value = arguments[name]
            self._places[name] = len(values)
            if descriptor is not None:
                values += _described(value, *descriptor)
            else:
                values.append(0 if value is None else value)
        return [*values, 0, 0]

    def replaced(self, values: list[Any], numbers: Mapping[str, Any]) -> list[Any]:
        """Such values with others for some parameters."""
        values = values[:]
        for name, value in numbers.items():
            place = self._places[name]
            if isinstance(value, Descriptor):
                described = _described(value, *self._maps[name])
                values[place : place + len(described)] = described
            else:
                values[place] = value
        return values


def _described(descriptor: Descriptor, swizzle: int, box: tuple[int, ...]) -> list[Any]:
    shape, strides = descriptor.shape, descriptor.strides
    return [_tensor_map(descriptor.dtype, tuple(shape), tuple(strides), swizzle, box), *shape, *strides]


_STRUCT_CODES = {
    "i1": "b", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip


def _parameters_of(compiled: Any) -> Parameters | None:
    """How the parameters lie, checked against what the driver says; None where only Triton can launch the kernel."""
    metadata = compiled.metadata
    plain = not metadata.global_scratch_size and not metadata.profile_scratch_size
    plain = plain and metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    if not plain or not driver.is_available():
        return None
    signature: dict[str, str] = compiled.src.signature
    kinds = [kind for kind in signature.values() if isinstance(kind, str)]
    maps = getattr(metadata, "tensordesc_meta", None) or ()
    descriptors = sum(kind.startswith("tensordesc") for kind in kinds)
    if len(kinds) < len(signature) or descriptors != len(maps) or (maps and driver.address_word() is None):
        return None
    # Where a parameter is aligned to 64 bytes, the driver begins further on: at byte 48 on Hopper.
    offsets = driver.parameters_of(compiled.function)
    if not offsets or offsets[0][0] % 8:
        return None
    parameters = Parameters(signature, maps, start=offsets[0][0])
    return parameters if offsets == parameters.offsets else None


@lru_cache(maxsize=1024)
def _tensor_map(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], swizzle: int, box: tuple[int, ...]
) -> bytes:
    """An encoded tensor map of a tensor that lies anywhere."""
    return driver.tensor_map(1 << 20, dtype, shape, strides, box, swizzle)


def _run(kernel: Any, grid: int, device: int, arguments: Sequence[Any]) -> None:
    """Launch a compiled kernel through Triton, on the current device. Its hooks, a profiler's, are called."""
    stream = _stream_of(device)
    enter, leave = _enter, _leave
    if enter.calls or leave.calls:
        metadata = kernel.launch_metadata((grid, 1, 1), stream, *arguments)
    else:
        metadata = enter = leave = None
    kernel.run(grid, 1, 1, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave, *arguments)


_enter, _leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
