"""Four repairs of Triton's CPU interpreter (3.6.0), applied when `TRITON_INTERPRET=1`.

NumPy 2.4 refuses `int(array([x]))`, which breaks `range(tensor)`; `tl.dot` on bf16 multiplies the raw 16-bit patterns
as if they were integers, without a word; fp32 becomes bf16 by cutting bits off, where a GPU rounds to nearest; and it
becomes e4m3 with ties away from 0, carries that get lost and no largest number (`tl.dot` on e4m3 is right).
"""

from __future__ import annotations

from typing import Any

import triton

_fixed = False


def active() -> bool:
    """Whether kernels run in the interpreter, which takes CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def fix() -> None:
    """Repair the interpreter once, if it is in use."""
    global _fixed
    if _fixed or not active():
        return
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(
            tensor, "__bool__", lambda self: bool(self.handle.data.item()) if self.handle.data.size == 1 else True
        )

    def as_float32(handle: Any) -> Any:
        if not handle.dtype.scalar.is_bf16():
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot_in_float32(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), *rest)

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_by_rounding(self: Any, source: Any, target: Any) -> Any:
        if not (source.dtype.scalar.is_fp32() and target.scalar.is_bf16()):
            return cast(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = np.isnan(source.data)
        return interpreter.TensorHandle(np.where(nan, 0x7FC0, rounded).astype(np.uint16), target.scalar)

    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    def convert_by_rounding(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        if not (source.dtype.scalar.is_fp32() and target.scalar.is_fp8e4nv()):
            return convert(self, source, target, *rest)
        numbers = torch.from_numpy(np.array(source.data, dtype=np.float32))  # a copy, which may be written to
        codes = numbers.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(codes.numpy(), target.scalar)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_dot_in_float32
    interpreter.InterpreterBuilder.cast_impl = cast_by_rounding
    interpreter.InterpreterBuilder.create_fp_to_fp = convert_by_rounding
    _fixed = True
