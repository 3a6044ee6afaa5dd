"""Launching Triton kernels with little work on the host.

Triton's own launch path binds, types and specialises every argument at each call, which costs more than a short kernel
runs. Kernels here specialise on nothing but their constexprs and on the dtypes and 16-byte alignment of their pointers
(integers have fixed types and no specialisation), so a compiled kernel is found by those and launched directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITCallable


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
        self.compile_options = {"enable_fp_fusion": True, **compile_options}
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def launch(
        self,
        grid: int,
        pointers: tuple[Tensor | None, ...],
        scalars: tuple[int | float, ...],
        constants: tuple[Any, ...],
        descriptors: tuple[Any, ...] = (),
        **options: int,
    ) -> None:
        """Run `grid` programs on the pointers' device, in its current stream.

        The function's parameters are descriptors, pointers, scalars, constants, in this order.
        """
        key = self._key(descriptors, pointers, constants, options)
        device, kernel = key[0], self.compiled.get(key)
        arguments = (*descriptors, *pointers, *scalars, *constants)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(key, kernel, grid, arguments, options)
        return self._launch(key, kernel, grid, arguments, options)

    def _launch(
        self, key: tuple[Any, ...], kernel: Any, grid: int, arguments: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        if kernel is not None:
            return _run(kernel, grid, key[0].index, arguments)
        if isinstance(self.function, JITCallable):  # not an interpreted one
            name_steadily(self.function)
        # Compiles if need be, and launches. Nothing comes back from the interpreter or an offline compilation.
        kernel = self.function[(grid,)](*arguments, **{**self.compile_options, **options})
        if kernel is not None:
            self.compiled[key] = kernel

    def repeat(
        self,
        grid: int,
        pointers: tuple[Tensor | None, ...],
        constants: tuple[Any, ...],
        descriptors: tuple[Any, ...] = (),
        **options: int,
    ) -> Callable[..., None] | None:
        """A launch that was made, as a function of descriptors, addresses (None where there was no tensor) and scalars.

        The addresses are of tensors with the same dtypes and alignment, on the same device, and that is the current
        one. None where launches leave nothing compiled behind.
        """
        key = self._key(descriptors, pointers, constants, options)
        kernel = self.compiled.get(key)
        return None if kernel is None else _repeat(kernel, grid, key[0].index, constants)

    @staticmethod
    def _key(
        descriptors: tuple[Any, ...],
        pointers: tuple[Tensor | None, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
    ) -> Any:
        device = next(t.device for t in pointers if t is not None)
        kinds = tuple(None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in pointers)
        blocks = tuple((d.base.dtype, *d.block_shape) for d in descriptors)
        return (device, blocks, kinds, constants, *options.values())


def _run(kernel: Any, grid: int, device: int, arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel on the current device. Triton's hooks, a profiler's, are called if there are any."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook
    if enter.calls or leave.calls:
        metadata = kernel.launch_metadata((grid, 1, 1), stream, *arguments)
    else:
        metadata = enter = leave = None
    kernel.run(grid, 1, 1, stream, kernel.function, kernel.packed_metadata, metadata, enter, leave, *arguments)


def _repeat(kernel: Any, grid: int, device: int, constants: tuple[Any, ...]) -> Callable[..., None]:
    launcher, stream_of = kernel.run, torch._C._cuda_getCurrentRawStream
    known = _VERSION == (3, 6) and type(launcher).__name__ == "CudaLauncher"
    if not known or launcher.global_scratch_size or launcher.profile_scratch_size:
        return lambda *arguments: _run(kernel, grid, device, (*arguments, *constants))
    # What the launcher of Triton 3.6 does for a kernel without scratch memory, all but the launch itself done here.
    launch, function, metadata = launcher.launch, kernel.function, kernel.packed_metadata
    kind = launcher.launch_cooperative_grid, launcher.launch_pdl
    enter, leave = _hooks.launch_enter_hook, _hooks.launch_exit_hook

    def at_once(*arguments: Any) -> None:
        if enter.calls or leave.calls:
            return _run(kernel, grid, device, (*arguments, *constants))
        stream = stream_of(device)
        launch(grid, 1, 1, stream, function, *kind, None, None, metadata, None, None, None, *arguments, *constants)

    return at_once


_hooks = triton.knobs.runtime
_VERSION = tuple(int(number) for number in triton.__version__.split(".")[:2])
