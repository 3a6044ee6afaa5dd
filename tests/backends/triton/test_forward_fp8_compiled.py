"""The portable FP8 kernel for GPUs that are not here: what the compiler makes of its table."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import RELEASE, SHARED_KIB, atomics, beyond, with_tables
from fp8_cases import BASE, CAUSAL, F16, Fp8Call
from gates import GATED_TRITON

from stream_attention.backends import BY_NAME
from stream_attention.backends.triton.fp8_tuning import TRITON
from stream_attention.base.fp8_layout import HEAD_DIMS
from stream_attention_tools.testing.fp8 import attend_to_codes
from stream_attention_tools.testing.offline import Report, compiling_for, report

LONG = replace(BASE, Tq=256, Tk=512, Hq=2, Hkv=1)
KINDS = {
    "plain": LONG,
    "causal": replace(LONG, window=CAUSAL),
    "packed, window of both sides": replace(LONG, lengths=((256, 512),), window=(100, 50)),
}
KERNELS = {  # of every architecture the kernel that needs most, and of the one that the table is for all head dims
    f"sm_{arch} d{dim} {kind}": (arch, replace(KINDS[kind], D=dim))
    for arch, dims, kind in (
        (89, (64, 128, 256), "packed, window of both sides"),
        (89, (128,), "plain"),
        (90, (128, 256), "packed, window of both sides"),
        (100, (128,), "packed, window of both sides"),
        (120, (128,), "packed, window of both sides"),
    )
    for dim in dims
} | {"sm_89 d128 causal, fp16": (89, replace(KINDS["causal"], D=128, dtype=F16))}

PRODUCTS = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA", 120: "QMMA"}
"""The matrix instruction of FP8, by architecture."""

SPILLS: dict[str, dict[str, int]] = {
    "3.6": {"sm_89 d128 packed, window of both sides": 16, "sm_120 d128 packed, window of both sides": 28},
    "3.7": {"sm_89 d128 packed, window of both sides": 28, "sm_120 d128 packed, window of both sides": 200},
    "3.8": {"sm_120 d128 packed, window of both sides": 192},
    "3.9": {
        "sm_89 d128 packed, window of both sides": 56,
        "sm_90 d256 packed, window of both sides": 8,
        "sm_120 d128 packed, window of both sides": 188,
    },
}
"""Bytes that a kernel is known to spill, stores and loads, by Triton's release; all of them outside its loops."""


def compiled(arch: int, call: Fp8Call) -> Report:
    problem, queries, keys, cu_q, cu_k = call.codes()
    with compiling_for(arch) as kernels:
        attend_to_codes(BY_NAME["triton"], problem.replace(arch=arch), queries, keys, cu_q, cu_k, TRITON[call.D])
    assert len(kernels) == 1
    return report(kernels[0])


def test_a_tile_of_queries_has_whole_blocks_and_a_block_of_keys_one_scale() -> None:
    assert tuple(TRITON) == HEAD_DIMS
    for config in TRITON.values():
        assert 128 % config.block_m == 0 and 128 % config.block_n == 0 and config.block_n % 32 == 0


def test_what_is_known_of_kernels_is_of_kernels_that_there_are() -> None:
    assert SPILLS.keys() == set(GATED_TRITON)
    assert all(spills.keys() <= KERNELS.keys() for spills in SPILLS.values())


@with_tables
@pytest.mark.parametrize("name", KERNELS)
def test_what_the_compiler_makes_of_it(name: str) -> None:
    arch, call = KERNELS[name]
    made = compiled(arch, call)
    matrix = {opcode: count for opcode, count in made.instructions.items() if "MMA" in opcode}
    assert set(matrix) == {PRODUCTS[arch]}, f"products are not in FP8 alone: {matrix}"
    assert made.shared_bytes <= SHARED_KIB[89] * 1024, f"{made.shared_bytes / 1024:g} KiB of shared memory"
    assert made.registers <= 255
    assert arch == 100 or not atomics(made), "adds in no fixed order"  # sm_100 allocates tensor memory by such
    figures = f"{made.spill_bytes} bytes of spills, {made.registers} registers"
    assert not beyond(made.spill_bytes, SPILLS[RELEASE].get(name, 0)), figures
    assert not [warning for warning in made.warnings if "(C75" in warning], "Hopper's products wait for each other"
