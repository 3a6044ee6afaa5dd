"""The FP8 pre-pass, for GPUs that are not here: what the compiler makes of it."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import SHARED_KIB, atomics, serialised
from quantize_fp8_cases import F16, Case, quantize

from stream_attention_tools.testing.offline import compiling_for, disassemble, report

KERNELS = {
    "d128": (90, Case(D=128)),
    "d256": (90, Case(D=256)),
    "d128 fp16 packed, window": (90, Case(D=128, dtype=F16, packed=((9, 9),), seen=(3, 0))),
    "d128 rotated": (90, Case(D=128, rotate=True)),
    "d256 rotated": (90, Case(D=256, rotate=True)),
    "sm_89 rotated": (89, Case(D=128, rotate=True)),
}


def launched(arch: int, case: Case) -> Any:
    with compiling_for(arch) as compiled:
        quantize(*case.inputs(), *case.offsets(), *case.longest(), case.rotate, case.left)
    (one,) = compiled  # one launch for all three
    return one


@pytest.mark.parametrize("name", KERNELS)
def test_memory_is_what_it_waits_for(name: str) -> None:
    arch, case = KERNELS[name]
    one = launched(arch, case)
    made, code = report(one), disassemble(one)
    figures = f"{name}: {made}"
    assert made.spill_bytes == 0 and not made.warnings and not atomics(made) and not serialised(made), figures
    assert made.instructions["LDL"] == made.instructions["STL"] == 0, figures
    assert made.shared_bytes <= SHARED_KIB[arch] * 1024, figures
    if not case.rotate:
        blocks = 65536 // (made.registers * 32 * made.warps)  # that a multiprocessor has room for
        assert blocks * 128 * case.D * 2 >= 128 * 1024, figures
    # Each number a thread has is read and written once, for V, K and Q, in words of 16 bytes; else there are
    # scales and offsets.
    numbers = 3 * 128 * case.D // (32 * made.warps)
    reads, writes = (re.findall(rf"\b{opcode}\.E(\S*)", code) for opcode in ("LDG", "STG"))
    assert reads.count(".128") == numbers // 8 and writes.count(".128") == numbers // 16, figures
    assert len(reads) - numbers // 8 == (4 + 2 * (case.seen is not None)) * bool(case.packed), figures
    assert len(writes) - numbers // 16 == 3, figures
    conversions = re.findall(r"\bF2FP\.SATFINITE\.E4M3\S*", code)
    assert len(conversions) == numbers // 2 and all(".F32." in conversion for conversion in conversions), figures
    products = made.instructions["HGMMA" if arch >= 90 else "HMMA"]
    assert (products > 0) == case.rotate, figures


def test_a_tensor_off_16_bytes_is_read_all_the_same() -> None:
    made = report(launched(90, Case(layout="odd")))
    assert made.spill_bytes == 0 and not made.warnings


def test_what_is_empty_launches_nothing() -> None:
    none = torch.zeros(2, 0, 4, 64, dtype=F16)
    with compiling_for(90) as compiled:
        quantize(none, none, none)
    assert not compiled
