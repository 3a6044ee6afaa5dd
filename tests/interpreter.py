"""Triton's interpreter with less of its own bookkeeping, which is most of what an interpreted kernel takes.

What a kernel computes and what is refused stay as they are: this leaves out what is computed and thrown away, does once
what is done again at every step, and remembers what depends on a shape or a dtype alone. Each change is made to
functions whose source is known, that of Triton 3.6.0 to 3.9.0; where another release has another, it is left out.
"""

from __future__ import annotations

import hashlib
import inspect
from builtins import tuple as plain_tuple
from collections.abc import Callable
from typing import Any

KNOWN = {
    "TritonSemantic.binary_op_sanitize_overflow_impl": ("bdd7f3e24aa645ab", "1ad65a10738d191c"),
    "_patch_lang": ("e5beeba74ada4829",),
    "_LangPatchScope": ("1b26f629cd7367a8",),
    "_get_np_dtype": ("8f20d41e3207891a",),
    "block_type.__init__": ("403f4b016ec5c2c3",),
    "tensor.__init__": ("d9b043b5c9897657",),
}
"""Digests of the functions that are changed, or that a change relies on."""


def quicken() -> None:
    """To be called once, in a process with `TRITON_INTERPRET=1`."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if known(TritonSemantic.binary_op_sanitize_overflow_impl):
        TritonSemantic.binary_op_sanitize_overflow_impl = _overflow(TritonSemantic.binary_op_sanitize_overflow_impl)
    if known(interpreter._patch_lang, interpreter._LangPatchScope):
        interpreter._patch_lang = _patched_once(interpreter)
    if known(interpreter._get_np_dtype):
        interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    if known(core.block_type.__init__, core.tensor.__init__):
        _remember_shapes(core)


def known(*functions: Callable[..., Any]) -> bool:
    """Whether all of these are as in a release that was looked at."""
    return all(digest(function) in KNOWN.get(function.__qualname__, ()) for function in functions)


def digest(function: Callable[..., Any]) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def _overflow(check: Any) -> Any:
    """Every sum and product of integers is done once more in 64 bits, for an assertion that only `debug` makes."""

    def check_if_asserted(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            check(self, *args)

    return check_if_asserted


def _patched_once(interpreter: Any) -> Any:
    """A kernel's launch puts the interpreter's functions into `tl` and takes them out when it ends.

    Each call of a jit function within would put them there again, which takes longer than most such functions.
    """
    patch, tl = interpreter._patch_lang, interpreter.tl
    in_place: set[Any] = set()
    modules_of: dict[Any, frozenset[Any]] = {}

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            in_place.clear()
            super().restore()

    def patch_once(fn: Any) -> Any:
        if fn not in modules_of:
            found = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            modules_of[fn] = frozenset(found)
        if modules_of[fn] and modules_of[fn] <= in_place:
            return interpreter._LangPatchScope()  # with nothing to take out
        scope = Scope()
        scope._changes = patch(fn)._changes
        in_place.update(modules_of[fn])
        return scope

    return patch_once


def _by_name(np_dtype: Any) -> Any:
    """It builds a table of all dtypes for every answer. Types are equal when their names are."""
    found: dict[str, Any] = {}

    def remembered(its_type: Any) -> Any:
        if its_type.name not in found:
            found[its_type.name] = np_dtype(its_type)
        return found[its_type.name]

    return remembered


def _remember_shapes(core: Any) -> None:
    """Nobody writes to a shape, so tensors and types of one shape may share it."""
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, Any] = {}
    tensors: dict[Any, Any] = {}

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = plain_tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key in types and all(type(size) is int for size in key):
            self.element_ty = element_ty
            self.shape, self.numel, name = types[key]
            self.name = f"<{name}, {element_ty}>"
        else:
            make_type(self, element_ty, shape)  # and refuses what is no shape
            types[key] = self.shape, self.numel, str(self.shape)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        key = plain_tuple(type.shape) if type.is_block() else ()
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[key]

    core.block_type.__init__ = type_init
    core.tensor.__init__ = tensor_init
