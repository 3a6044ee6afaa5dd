"""Five repairs of Triton's CPU interpreter, applied when `TRITON_INTERPRET=1`.

NumPy 2.4 refuses `int(array([x]))`, which breaks `range(tensor)` with Triton 3.6; `tl.dot` on bf16 multiplies the raw
16-bit patterns as if they were integers, without a word; fp32 becomes bf16 by cutting bits off, where a GPU rounds to
nearest; it becomes e4m3 with ties away from 0, carries that get lost and no largest number (`tl.dot` on e4m3 is right);
and a comparison of two integers, broadcast, is integers again, which loads and stores of 3.9 refuse as a mask. The last
four are so with Triton 3.6 to 3.9. Each is tried on one number, and repaired where that comes out wrong.
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

    builder = interpreter.interpreter_builder

    def handle(number: Any, dtype: Any) -> Any:
        return interpreter.TensorHandle(np.array([[number]]), dtype)

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

    splat = interpreter.InterpreterBuilder.create_splat

    def splat_of_its_type(self: Any, block: Any, scalar: Any) -> Any:
        if scalar.data.dtype != np.bool_:
            return splat(self, block, scalar)
        return interpreter.TensorHandle(np.full(block.shape, scalar.data.item()), tl.int1)

    one, zero = handle(np.uint16(0x3F80), tl.bfloat16), handle(np.float32(0), tl.float32)
    almost_3, too_large = handle(np.float32(2.999), tl.float32), handle(np.float32(1000), tl.float32)
    interpreter._patch_lang_tensor = patch_tensor_and_index
    if builder.create_dot(one, one, zero, None, 0).data.item() != 1.0:
        interpreter.InterpreterBuilder.create_dot = create_dot_in_float32
    if builder.cast_impl(almost_3, tl.bfloat16).data.item() != 0x4040:
        interpreter.InterpreterBuilder.cast_impl = cast_by_rounding
    if builder.create_fp_to_fp(too_large, tl.float8e4nv, None).data.item() != 0x7E:
        interpreter.InterpreterBuilder.create_fp_to_fp = convert_by_rounding
    number = handle(np.int32(1), tl.int32)
    if builder.create_splat(tl.block_type(tl.int1, [1]), builder.create_icmpEQ(number, number)).data.dtype != np.bool_:
        interpreter.InterpreterBuilder.create_splat = splat_of_its_type
    _fixed = True
