"""What a launch that does not ask Triton rests on: a kernel is compiled once for all values of its numbers."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter specialises nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from quantize_fp8_cases import quantize

from stream_attention import gpu
from stream_attention.backends import triton as backend
from stream_attention.gpu import driver, launch
from stream_attention.gpu.launch import Kernel, Parameters
from stream_attention_tools.offline import launching_for

MODULES = [
    import_module(f"{package.__name__}.{found.name}")
    for package in (backend, gpu)
    for found in pkgutil.iter_modules(package.__path__)
]
MODULES_BY_NAME = {module.__name__.rpartition(".")[2]: module for module in MODULES}
FUNCTIONS = {
    value.function.__name__: value.function
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, Kernel)
}
FLOATS = {"scale", "softcap", "dropout_scale", "k_scale", "v_scale", "value_scale"}
"""Parameters that are always Python floats, of which Triton makes no difference."""


def test_every_kernel_is_found() -> None:
    names = "advance append bias decode decode_quantized fold forward_fp8 forward key list list_tiles merge"
    names += " merge_parts merge_splits paged quantize query seen_in_lists seen start_pack words write"
    assert sorted(FUNCTIONS) == [f"_{name}_kernel" for name in names.split()]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_names_say_what_a_parameter_is(function: Any) -> None:
    """A launch takes constexprs from names in capitals, and addresses from names that end in _ptr or _desc."""
    for parameter in function.params:
        assert parameter.is_constexpr == parameter.name.isupper(), parameter.name


def test_arguments_are_bound_by_the_names_of_the_parameters() -> None:
    seed, words = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, 8, dtype=torch.int32)
    kernel = MODULES_BY_NAME["dropout"]._kernel
    given = dict.fromkeys(kernel.names, 1) | {"seed_ptr": seed, "words_ptr": words, "cu_ptr": None}
    assert not kernel.bind(1, (seed, words), {}, **given).is_compiled
    with pytest.raises(AssertionError, match="stride_h"):
        kernel.bind(1, (seed, words), {}, **{name: value for name, value in given.items() if name != "stride_h"})
    with pytest.raises(AssertionError, match="distinct"):
        kernel.bind(1, (seed, seed), {}, **given)


@pytest.mark.parametrize("seconds", [0.5, 5.25])
def test_what_is_compiled_is_told_in_a_line(
    seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a first launch that took long: one that loads what was compiled before says nothing."""
    clock = iter((10.0, 10.0 + seconds))
    monkeypatch.setattr(launch.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(launch, "_parameters_of", lambda compiled: None)
    real = MODULES_BY_NAME["dropout"]._kernel.function

    class Function:
        arg_names, __module__ = real.arg_names, real.__module__

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: "compiled"

    seed, words = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, 8, dtype=torch.int32)
    kernel = Kernel(Function())
    given = dict.fromkeys(kernel.names, 1) | {"seed_ptr": seed, "words_ptr": words, "cu_ptr": None}
    kernel.bind(1, (seed, words), {}, **given)(seed, words)
    assert [found.kernel for found in kernel.compiled.values()] == ["compiled"]
    told = [record.getMessage() for record in caplog.records]
    if seconds < 1:
        assert told == []
    else:
        assert len(told) == 1 and told[0].startswith("compiled gpu.dropout in 5.2 s; Triton keeps it in ")


def test_parameters_lie_as_ptx_declares_them() -> None:
    """The driver is given them in one block, so their places must be those of the compiled kernel."""
    forms: list[Any] = []
    with launching_for(90, forms.append):
        x = torch.empty(1, 128, 1, 64, dtype=torch.float16)
        quantize(x, x, x)
    (form,) = forms
    declared = re.findall(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w)(\d+)", form.compile().asm["ptx"].partition(")")[0])
    sizes = [int(bits) // 8 for _, _, bits in declared]
    ours = Parameters(form.source.signature, ()).offsets
    assert [size for _, size in ours] == sizes and len(ours) > 20
    end = 0
    for place, size in ours:
        assert place == -(-end // size) * size
        end = place + size


def test_a_tensor_map_is_aligned_and_followed_by_shape_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "address_word", lambda: 0)
    signature = {"rows": "i32", "q_desc": "tensordesc<bf16[1, 64]>", "SIZE": "constexpr", "out_ptr": "*fp32"}
    parameters = Parameters(signature, [{"block_size": [1, 64], "swizzle": 3}], start=48)
    scratch = [(272, 8), (280, 8)]
    assert parameters.offsets == [(48, 4), (112, 128), (240, 4), (244, 4), (248, 8), (256, 8), (264, 8), *scratch]
    assert parameters.words == {"q_desc": driver.FIRST_PARAMETER + 14, "out_ptr": driver.FIRST_PARAMETER + 33}


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
from stream_attention import gpu
from stream_attention.backends import hopper, triton
from stream_attention.gpu.launch import Kernel, name_steadily
kernels = {}
for package in (hopper, triton, gpu):
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
    assert first == last and len(first.splitlines()) > 20 and "backends.hopper.forward_sm90" in first


def test_a_launch_names_its_kernel_first(monkeypatch: pytest.MonkeyPatch) -> None:
    named, steadily = [], launch.name_steadily

    def noted(function: Any) -> None:
        named.append(function.__name__)
        steadily(function)  # or this process would go on with other names

    monkeypatch.setattr(launch, "name_steadily", noted)
    with launching_for(90, lambda form: None):
        x = torch.empty(1, 128, 1, 64, dtype=torch.float16)
        quantize(x, x, x)
    assert named[0] == "_quantize_kernel"
