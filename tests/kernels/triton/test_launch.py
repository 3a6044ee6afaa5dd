"""What a launch that does not ask Triton rests on: a kernel is compiled once for all values of its numbers."""

from __future__ import annotations

import os
import pkgutil
from importlib import import_module
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter specialises nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from stream_attention.kernels import triton as kernels
from stream_attention.kernels.triton.launch import Kernel

MODULES = [import_module(f"{kernels.__name__}.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)]
FUNCTIONS = {
    value.function.__name__: value.function
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, Kernel)
}
FLOATS = {"scale", "softcap", "dropout_scale"}
"""Parameters that are always Python floats, of which Triton makes no difference."""


def test_every_kernel_is_found() -> None:
    names = "advance append bias codes decode fold forward_fp8 forward key merge merge_parts quantize query seen"
    names = [*names.split(), "words"]
    assert sorted(FUNCTIONS) == [f"_{name}_kernel" for name in names]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_integers_have_fixed_types_and_no_specialisation(function: Any) -> None:
    """Triton compiles apart for multiples of 16, and without a type for 1; a kernel that is found again by its pointers
    and constants must rely on neither."""
    numbers = [
        p for p in function.params if not p.is_constexpr and not p.name.endswith("_ptr") and p.name not in FLOATS
    ]
    assert [p.name for p in numbers if not p.annotation_type or not p.do_not_specialize] == []
