"""Under which names Triton's cache keeps kernels: names that do not depend on what a process did before."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from triton.runtime.jit import JITCallable


def name_steadily(function: Any) -> None:
    """Let the name under which Triton's cache keeps a jit function depend on nothing but the function.

    It is a hash of the source, of that of all functions it calls, and of the constants that these read; but Triton 3.6
    takes in the constants of a callee only if that was hashed before, for another kernel of the process. Then what was
    compiled ahead, or by a process that began with other calls, is not found. So callees are hashed first, always.
    """
    if getattr(function, "hash", "") is not None:  # hashed, or another Triton's
        return
    names = function.fn.__globals__
    for value in [names.get(name) for name in _names_in(function.fn.__code__)]:
        for callee in getattr(value, "hash_attrs", [value]):  # the methods of an aggregate
            if isinstance(callee, JITCallable) and callee is not function:
                name_steadily(callee)
    _ = function.cache_key


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that a function reads, in comprehensions too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
