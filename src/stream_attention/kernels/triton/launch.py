"""Launching Triton kernels with little work on the host.

Triton's own launch path binds, types and specialises every argument at each call, which costs more than a short kernel
runs. Kernels here specialise on nothing but their constexprs and on the dtypes and 16-byte alignment of their pointers
(integers have fixed types and no specialisation), so a compiled kernel is found by those and launched directly.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor


def jit(function: Any) -> Any:
    """`triton.jit` without specialising on integers: those that are annotated with their type."""
    integers = ("tl.int32", "tl.int64", "tl.uint32")
    names = [name for name, annotation in function.__annotations__.items() if annotation in integers]
    return triton.jit(function, do_not_specialize=names)


class Kernel:
    """A jit function whose compiled forms are kept by device, pointers (dtype, alignment), constants and options."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def launch(
        self,
        grid: int,
        pointers: tuple[Tensor | None, ...],
        scalars: tuple[int | float, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """Run `grid` programs on the pointers' device, in its current stream.

        The function's parameters are pointers, scalars, constants, in this order.
        """
        device = next(t.device for t in pointers if t is not None)
        kinds = tuple(None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in pointers)
        key = (device, kinds, constants, *options.values())
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(key, grid, (*pointers, *scalars, *constants), options)
        return self._launch(key, grid, (*pointers, *scalars, *constants), options)

    def _launch(self, key: tuple[Any, ...], grid: int, arguments: tuple[Any, ...], options: dict[str, int]) -> None:
        kernel = self.compiled.get(key)
        if kernel is None:
            # Compiles if need be, and launches. Nothing comes back from the interpreter or an offline compilation.
            kernel = self.function[(grid,)](*arguments, **options)
            if kernel is not None:
                self.compiled[key] = kernel
            return
        stream = torch._C._cuda_getCurrentRawStream(key[0].index)
        hooks = triton.knobs.runtime
        metadata = kernel.launch_metadata((grid, 1, 1), stream, *arguments)
        kernel.run(
            grid,
            1,
            1,
            stream,
            kernel.function,
            kernel.packed_metadata,
            metadata,
            hooks.launch_enter_hook,
            hooks.launch_exit_hook,
            *arguments,
        )
