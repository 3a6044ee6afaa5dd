"""What a launch that does not ask Triton rests on: a kernel is compiled once for all values of its numbers."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter specialises nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from stream_attention.kernels import triton as kernels
from stream_attention.kernels.offline import launching_for
from stream_attention.kernels.triton import launch, quantize_fp8
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


NAMES = """
import pkgutil, sys
from importlib import import_module
from stream_attention.kernels import gluon, triton
from stream_attention.kernels.triton.launch import Kernel, name_steadily
kernels = {}
for package in (gluon, triton):
    for found in pkgutil.iter_modules(package.__path__):
        for name, value in vars(import_module(f"{package.__name__}.{found.name}")).items():
            if isinstance(value, Kernel):
                kernels[f"{package.__name__}.{found.name}.{name}"] = value.function
for name in sorted(kernels)[:: int(sys.argv[1])]:
    name_steadily(kernels[name])
for name in sorted(kernels):
    print(name, kernels[name].cache_key)
"""


def test_which_kernel_comes_first_does_not_rename_the_others() -> None:
    """Of Triton's own names 14 depend on that."""
    first, last = (
        subprocess.run([sys.executable, "-c", NAMES, step], capture_output=True, text=True, check=True).stdout
        for step in ("1", "-1")
    )
    assert first == last and len(first.splitlines()) > 20 and "kernels.gluon.forward_sm90" in first


def test_a_launch_names_its_kernel_first(monkeypatch: pytest.MonkeyPatch) -> None:
    named, steadily = [], launch.name_steadily

    def noted(function: Any) -> None:
        named.append(function.__name__)
        steadily(function)  # or this process would go on with other names

    monkeypatch.setattr(launch, "name_steadily", noted)
    with launching_for(90, lambda form: None):
        quantize_fp8.quantize_queries(torch.empty(1, 128, 1, 64, dtype=torch.float16))
    assert named[0] == "_quantize_kernel"
