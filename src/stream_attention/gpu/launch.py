"""Launching Triton and Gluon kernels with little work on the host.

Triton's own launch path binds, types and specialises every argument at each call, which costs more than a short kernel
runs. Kernels here specialise on nothing but their constexprs, on which pointers are there, and on the dtypes and
16-byte alignment of those (integers have fixed types and no specialisation), so a compiled kernel is found by that. Its
arguments are bound by name once. A launch then copies a block of parameters, writes the addresses of its tensors and
calls the driver:

    launch = kernel.bind(grid, (query, out), {"num_warps": 4}, q_ptr=query, out_ptr=out, rows=rows, BLOCK=64)
    launch(another_query, another_out)  # tensors of the same dtypes and alignment, on the same device
"""

from __future__ import annotations

import logging
import struct
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITCallable

from ..base.problem import distinct
from . import driver, interpreter, prebuilt
from .kernel_names import name_steadily as name_steadily

interpreter.fix()  # here, where every kernel comes by

_log = logging.getLogger("stream_attention")
_LONG_S = 1.0
"""Seconds in which a first launch only loads what was compiled before; one that takes longer is told of."""


def jit(function: Any) -> Any:
    """`triton.jit` without specialising on integers: those that are annotated with their type."""
    integers = ("tl.int32", "tl.int64", "tl.uint32")
    names = [name for name, annotation in function.__annotations__.items() if annotation in integers]
    return triton.jit(function, do_not_specialize=names)


class Kernel:
    """A jit function whose compiled forms are kept by device, pointers (dtype, alignment), constants and options.

    `compile_options` hold for every launch that does not say otherwise. Products and sums are fused: that is Triton's
    default up to 3.9, which warns, and not from 3.10 on.
    """

    def __init__(self, function: Any, **compile_options: Any) -> None:
        self.function = function
        self.names: tuple[str, ...] = tuple(function.arg_names)
        self.constants = frozenset(name for name in self.names if name.isupper())
        self.addresses = [name for name in self.names if name.endswith(("_ptr", "_desc"))]
        self.compile_options = {"enable_fp_fusion": True, **compile_options}
        self.compiled: dict[Hashable, Compiled] = {}
        self._not_prebuilt: set[Hashable] = set()

    def bind(
        self,
        grid: int,
        tensors: Sequence[Tensor | None],
        options: Mapping[str, Any],
        /,
        device: torch.device | None = None,
        described: Mapping[str, Tensor] = MappingProxyType({}),
        **arguments: Any,
    ) -> Launch:
        """A launch of `grid` programs with every argument bound but `tensors`, which each launch is given anew.

        Args:
            tensors: samples of what a launch takes, in its order. An argument that is one of them follows it.
            options: the compiler's, such as num_warps.
            device: where it runs; None: where the first of `tensors` that has memory lies.
            described: which of `tensors` each descriptor describes.
            arguments: for each of the function's parameters: one of `tensors`, a descriptor, None, a number or the
                value of a constexpr.
        """
        assert len(arguments) == len(self.names), set(self.names).symmetric_difference(arguments)
        return Launch(_Binding(self, tensors, dict(options), device, described, arguments), grid)

    def bind_addresses(
        self, grid: int, options: Mapping[str, Any], /, device: torch.device | None = None, **arguments: Any
    ) -> Launch:
        """`bind`, of a kernel without descriptors: a launch takes one tensor for each pointer, in their order."""
        tensors = distinct(*[arguments[name] for name in self.addresses])
        arguments |= zip(self.addresses, tensors, strict=True)
        return self.bind(grid, tensors, options, device, **arguments)

    def find(self, key: tuple[Any, ...]) -> Compiled | None:
        """The compiled form for launches with a key: one that was compiled, or came with the wheel; else None."""
        found = self.compiled.get(key)
        if found is None and key not in self._not_prebuilt:
            loaded = prebuilt.find(self, key)
            parameters = None if loaded is None else _parameters_of(loaded)
            if parameters is None:  # only Triton can launch it, or it did not come along
                self._not_prebuilt.add(key)
            else:
                found = self.compiled.setdefault(key, Compiled(loaded, parameters))
        return found

    def launch(self, grid: int, options: Mapping[str, Any], /, **arguments: Any) -> None:
        """Bind and launch at once."""
        self.bind_addresses(grid, options, **arguments)(*[arguments[name] for name in self.addresses])


class _Binding:
    """A kernel and its arguments, all but the tensors: what a launch and those of other lengths share."""

    __slots__ = (
        "arguments", "block", "compiled", "device", "dtypes", "function", "kernel", "key", "launch_kernel", "options",
        "places", "sources",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        tensors: Sequence[Tensor | None],
        options: dict[str, Any],
        device: torch.device | None,
        described: Mapping[str, Tensor],
        arguments: dict[str, Any],
    ) -> None:
        index = {id(t): place for place, t in enumerate(tensors) if t is not None}
        assert len(index) == len(tensors) - sum(t is None for t in tensors), "tensors are distinct objects"
        if device is None:
            devices = [t.device for t in tensors if t is not None]
            device = next((device for device in devices if device.type != "meta"), devices[0])
        key: list[Any] = [
            device,
            *options.values(),
            *[arguments[name] for name in kernel.names if name in kernel.constants],
        ]
        sources: dict[str, int] = {}  # parameter -> the tensor of a call that it follows
        self.dtypes: dict[str, torch.dtype] = {}
        for name in kernel.addresses:
            value = arguments[name]
            if value is None:
                key.append(None)
            elif isinstance(value, Descriptor):
                sources[name] = index[id(described[name])]
                key.append((value.dtype, *value.block_shape))
            else:
                sources[name] = index[id(value)]
                key.append((value.dtype, value.data_ptr() % 16 == 0))
                arguments[name], self.dtypes[name] = None, value.dtype
        self.kernel, self.options, self.arguments, self.sources = kernel, options, arguments, sources
        self.key, self.device = tuple(key), device.index
        self.compiled: Compiled | None = None
        self.block: Any = None

    def is_compiled(self) -> bool:
        """Looks for what other launches have compiled, and for what came with the wheel."""
        if self.compiled is None:
            self.compiled = self.kernel.find(self.key)
        return self.compiled is not None

    @property
    def is_prebuilt(self) -> bool:
        """Whether its machine code came with the wheel: Triton has no kernel to call its hooks with."""
        return self.compiled is not None and isinstance(self.compiled.kernel, prebuilt.Loaded)

    def block_with(self, all_sizes: Sequence[Sizes]) -> Any:
        """A copy of the block that the driver launches, with these sizes; None where the kernel is not compiled yet, or
        only Triton can launch it."""
        if not self.is_compiled():
            return None
        assert self.compiled is not None
        kernel, parameters = self.compiled
        if parameters is None:
            return None
        if self.block is None:
            metadata = kernel.metadata
            size, threads = parameters.struct.size, 32 * metadata.num_warps
            block, self.launch_kernel = driver.block(size, threads, metadata.shared, metadata.launch_pdl)
            parameters.write_all(block, self.arguments)
            self.places = tuple((parameters.words[name], source) for name, source in self.sources.items())
            self.function = kernel.function
            self.block = block  # last: another thread goes on as soon as it is there
        block = self.block[:]
        for sizes in all_sizes:
            self.write(block, sizes)
        return block

    def write(self, block: Any, sizes: Sizes) -> None:
        """Write sizes into a block of a compiled kernel."""
        assert self.compiled is not None and self.compiled.parameters is not None
        self.compiled.parameters.write(block, sizes.names, sizes.numbers)
        if sizes.described:
            self.compiled.parameters.resize(block, sizes.described, self.arguments)

    def call_triton(self, grid: int, all_sizes: Sequence[Sizes], tensors: Sequence[Any]) -> None:
        """Launch through Triton, which compiles if need be. Of several sizes, the later ones overwrite the former."""
        if self.device is not None and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.call_triton(grid, all_sizes, tensors)
        kernel = self.kernel
        arguments = dict(self.arguments)
        for sizes in all_sizes:
            arguments |= named(sizes.names, sizes.numbers)
        for name, source in self.sources.items():
            tensor, bound = tensors[source], self.arguments[name]
            for sizes in all_sizes:
                if name in sizes.described:
                    bound = bound.resized(sizes.described[name])
            if bound is None and type(tensor) is not int and tensor.dtype is not self.dtypes[name]:
                tensor = tensor.view(-1).view(self.dtypes[name])  # as words of several FP8 codes
            arguments[name] = tensor if bound is None else bound.of(tensor)
        in_order = [arguments[name] for name in kernel.names]
        if self.compiled is not None:
            return _run(self.compiled.kernel, grid, self.device, in_order)
        if isinstance(kernel.function, JITCallable):  # not an interpreted one
            name_steadily(kernel.function)
        # Nothing comes back from the interpreter or an offline compilation.
        begun = time.monotonic()
        found = kernel.function[(grid,)](*in_order, **{**kernel.compile_options, **self.options})
        if found is not None:
            seconds, name = time.monotonic() - begun, kernel.function.__module__.removeprefix("stream_attention.")
            if seconds >= _LONG_S:
                _log.warning("compiled %s in %.1f s; Triton keeps it in %s", name, seconds, triton.knobs.cache.dir)
            kernel.compiled.setdefault(self.key, Compiled(found, _parameters_of(found)))


class Launch:
    """A kernel and its arguments, all but the tensors. Holds no tensor and no address; safe to call from any thread.

    The first call compiles, or loads what was compiled before, through Triton. So do calls where nothing is compiled:
    in the interpreter, and offline.
    """

    __slots__ = ("_binding", "_block", "_grid", "_sizes")

    def __init__(self, binding: _Binding, grid: int, sizes: tuple[Sizes, ...] = ()) -> None:
        self._binding, self._grid = binding, grid
        self._sizes = sizes  # in place of what was bound
        self._block: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether a call may be given addresses in place of tensors."""
        return self._binding.compiled is not None or self._binding.is_compiled()

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's."""
        return self._binding.options

    def __call__(self, *tensors: Any, sizes: Sizes | None = None) -> None:
        """Launch in the current stream of the device. A tensor may be given by its address where the launch
        `is_compiled`. `sizes` are of this launch alone, and change no constexpr."""
        binding = self._binding
        if not self._grid:
            return
        if self._block is None:
            block = binding.block_with(self._sizes)
            if block is not None:
                driver.write_grid(block, self._grid)
                self._block = block
        if self._block is None or ((_enter.calls or _leave.calls) and not binding.is_prebuilt):
            all_sizes = self._sizes if sizes is None else (*self._sizes, sizes)
            return binding.call_triton(self._grid, all_sizes, tensors)
        if torch._C._cuda_getDevice() != binding.device:
            with torch.cuda.device(binding.device):
                return self(*tensors, sizes=sizes)
        words = self._block[:]
        if sizes is not None:
            binding.write(words, sizes)
        for word, source in binding.places:
            tensor = tensors[source]
            words[word] = tensor if type(tensor) is int else tensor.data_ptr()
        driver.launch(words, binding.function, _stream_of(binding.device), binding.launch_kernel)

    def resized(self, grid: int, sizes: Sizes) -> Launch | None:
        """The same launch of tensors with other lengths; None where they change a constexpr. Integers that were
        `replaced` are those that were bound again."""
        bound = self._binding.arguments
        for name, value in sizes.constants.items():
            if bound[name] != value:
                return None
        names, numbers, constants, described = sizes
        if described:  # by tensors, which a launch must not hold
            described = {name: t if type(t) is int else (t.shape, t.stride()) for name, t in described.items()}
        return Launch(self._binding, grid, (Sizes(names, numbers, constants, described),))

    def replaced(self, names: str, *numbers: int) -> Launch:
        """The same launch with other integers, by their names, separated by spaces."""
        return Launch(self._binding, self._grid, (*self._sizes, Sizes(names, numbers, {}, {})))


class Sizes(NamedTuple):
    """The arguments of a kernel that depend on how its tensors lie: lengths and strides, the window, and flags."""

    names: str  # of numbers, separated by spaces
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    described: dict[str, Any]  # descriptors: by tensors, or as `Descriptor.resized` takes them

    def arguments(self) -> dict[str, Any]:
        """By their names."""
        return named(self.names, self.numbers) | self.constants | self.described


def named(names: str, values: Iterable[Any]) -> dict[str, Any]:
    """Values by the names of kernel parameters, which are separated by spaces."""
    return dict(zip(_split(names), values, strict=True))


@cache
def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split())


class Compiled(NamedTuple):
    """A kernel that Triton compiled and loaded, and how its parameters are laid out; None where Triton launches it."""

    kernel: Any
    parameters: Parameters | None


class Descriptor(NamedTuple):
    """How TMA reads a tensor: what Triton's TensorDescriptor says, checked by the driver alone."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any

    def of(self, base: Any) -> Any:
        """Triton's descriptor of a tensor that lies as this one does."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        base = _Address(base, self.dtype) if type(base) is int else base
        return TensorDescriptor(base, [*self.shape], [*self.strides], [*self.block_shape], self.layout)

    def resized(self, size: Any) -> Descriptor:
        """That of another size: how many rows, as a number, or of rows `[..., T, H, D]`, shape and strides of a tensor
        that has them. Strides of dims of size 1 stay as they are. One of three dims has those of the tensor."""
        if type(size) is int:
            place = rows_dim(len(self.shape))
            return self._replace(shape=(*self.shape[:place], size, *self.shape[place + 1 :]))
        its_shape, its_strides = size
        if len(self.shape) == 3:
            return self._replace(shape=tuple(its_shape), strides=its_strides)
        batch, _, heads, dim = self.shape
        strides = list(self.strides)
        for place in range(3):
            if place == 1 or self.shape[place] > 1:
                strides[place] = its_strides[place - 4]
        return self._replace(shape=(batch, its_shape[-3], heads, dim), strides=tuple(strides))


def rows_dim(dims: int) -> int:
    """The row dim of a descriptor: 1 of `[B, T, H, D]`, as which a pack is read with B = 1, else 0."""
    return 1 if dims == 4 else 0


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
        self._integers: dict[str, tuple[int, str]] = {}  # parameter -> its first byte in the block, and code of struct
        self._maps: dict[str, _MapField] = {}
        self._rows: dict[str, tuple[int, int]] = {}  # descriptor -> `_words_of_rows`
        self._runs: dict[str, list[_Run]] = {}  # by the names of integers that are written together
        self._order: list[str] = []
        self.offsets: list[tuple[int, int]] = []
        self._format, self._end = "", 0
        maps = iter(tensor_maps)
        for name, kind in signature.items():
            if kind == "constexpr":
                continue
            self._order.append(name)
            if kind.startswith("tensordesc"):
                made = next(maps)
                box = tuple(made["block_size"])
                address_word = driver.address_word()
                assert address_word is not None
                at = self._add("128s", 128, 64)
                self.words[name] = at // 8 + address_word
                shape, *_ = [self._add("i", 4, 4) for _ in box]
                strides, *_ = [self._add("q", 8, 8) for _ in box]
                self._maps[name] = _MapField(made["swizzle"], box, at, shape, strides)
                continue
            code = "Q" if kind.startswith("*") else _STRUCT_CODES[kind]
            size = struct.calcsize(f"<{code}")
            at = self._add(code, size, size)
            if kind.startswith("*"):
                self.words[name] = at // 8
            else:
                self._integers[name] = at, code
        for _ in range(2):  # scratch memory of Triton's own, and of a profiler: not used
            self._add("Q", 8, 8)
        self.struct = struct.Struct(f"<{start}x{self._format}")

    def _add(self, code: str, size: int, alignment: int) -> int:
        """Lay out one parameter; returns its first byte in the block."""
        place = -(-self._end // alignment) * alignment
        self._format += "x" * (place - self._end) + code
        self._end = place + size
        self.offsets.append((self._start + place, size))
        return 8 * driver.FIRST_PARAMETER + self._start + place

    def write_all(self, block: array[int], arguments: Mapping[str, Any]) -> None:
        """Write every parameter to a block, with 0 for addresses."""
        values: list[Any] = []
        for name in self._order:
            value, field = arguments[name], self._maps.get(name)
            if field is not None:
                values += [field.encoded(value), *value.shape, *value.strides]
            else:
                values.append(0 if value is None else value)
        self.struct.pack_into(block, 8 * driver.FIRST_PARAMETER, *values, 0, 0)

    def write(self, block: array[int], names: str, numbers: Sequence[float]) -> None:
        """Overwrite integers of a block that `write_all` filled, by their names, separated by spaces."""
        runs = self._runs.get(names)
        if runs is None:
            runs = self._runs[names] = self._runs_of(_split(names))
        for at, pack_into, places in runs:
            pack_into(block, at, *numbers if places is None else places(numbers))

    def _runs_of(self, names: Sequence[str]) -> list[_Run]:
        """How integers are written: those that lie one behind the other at once, which takes a third of the time."""
        by_byte = sorted((*self._integers[name], place) for place, name in enumerate(names))
        groups: list[list[tuple[int, str, int]]] = []
        end = -1
        for field in by_byte:
            at, code, _ = field
            if at != end:
                groups.append([])
            groups[-1].append(field)
            end = at + struct.calcsize(f"<{code}")
        runs = []
        for group in groups:
            places = [place for _, _, place in group]
            form = struct.Struct("<" + "".join(code for _, code, _ in group))
            whole = places == list(range(len(names)))
            getter = None if whole else _getter(places)
            runs.append(_Run(group[0][0], form.pack_into, getter))
        return runs

    def resize(self, block: array[int], described: Mapping[str, Any], bound: Mapping[str, Any]) -> None:
        """Write the sizes of descriptors."""
        halves, rows = _halves_of(block), self._rows
        for name, size in described.items():
            if type(size) is int:
                in_shape, in_map = rows.get(name) or self._words_of_rows(name)
                halves[in_shape], halves[in_map] = size, size - 1
            else:
                self._maps[name].resize(block, halves, bound[name], size)

    def _words_of_rows(self, name: str) -> tuple[int, int]:
        """The 32-bit words of a block that hold a descriptor's rows, and its rows less one."""
        field = self._maps[name]
        place = rows_dim(len(field.box))
        self._rows[name] = found = field.shape_at // 4 + place, field.at // 4 + field.words.sizes[place]
        return found


class _Run(NamedTuple):
    """Integers that lie one behind the other: the first byte, what packs them, and what picks them of all numbers."""

    at: int
    pack_into: Callable[..., None]
    places: Callable[[Sequence[float]], Sequence[float]] | None


def _getter(places: Sequence[int]) -> Callable[[Sequence[float]], Sequence[float]]:
    """What picks the numbers at some places, also where that is one."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)


def _halves_of(block: array[int]) -> memoryview:
    """The 32-bit words of a block: to write them by index takes a quarter of struct's time."""
    return memoryview(block).cast("B").cast("I")


class _MapField(NamedTuple):
    """A descriptor among the parameters: how its tensor map is encoded, and the bytes of the block at which lie the map
    and, behind it, the shape and strides."""

    swizzle: int
    box: tuple[int, ...]
    at: int
    shape_at: int
    strides_at: int

    @property
    def words(self) -> driver.MapWords:
        """Of the map. A kernel whose maps have none is launched by Triton."""
        words = driver.map_words(len(self.box))
        assert words is not None
        return words

    def encoded(self, descriptor: Descriptor) -> bytes:
        """The tensor map, of a tensor that lies anywhere."""
        dtype, shape, strides = descriptor[:3]
        return driver.tensor_map(1 << 20, dtype, shape, strides, self.box, self.swizzle)

    def resize(self, block: array[int], halves: memoryview, bound: Descriptor, size: Any) -> None:
        """Write what `bound.resized(size)` changes; `bound` is the descriptor that the block has."""
        words, (lengths, strides) = self.words, size
        map_at, shape_at, strides_at = self.at // 4, self.shape_at // 4, self.strides_at // 8
        dtype, shape, old_strides = bound[:3]
        if len(shape) == 3:
            for place, (length, stride) in enumerate(zip(lengths, strides, strict=True)):
                halves[shape_at + place], block[strides_at + place] = length, stride
                halves[map_at + words.sizes[place]] = length - 1
                if place < 2:
                    halves[map_at + words.strides[place]] = stride * dtype.itemsize >> 4
            return
        halves[shape_at + 1] = length = lengths[-3]
        halves[map_at + words.sizes[1]] = length - 1
        for place, old in enumerate(old_strides[:3]):
            if (place == 1 or shape[place] > 1) and (stride := strides[place - 4]) != old:
                block[strides_at + place] = stride
                halves[map_at + words.strides[place]] = stride * dtype.itemsize >> 4


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
    if any(driver.map_words(len(made["block_size"])) is None for made in maps):
        return None
    # Where a parameter is aligned to 64 bytes, the driver begins further on: at byte 48 on Hopper.
    offsets = driver.parameters_of(compiled.function)
    if not offsets or offsets[0][0] % 8:
        return None
    parameters = Parameters(signature, maps, start=offsets[0][0])
    return parameters if offsets == parameters.offsets else None


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
