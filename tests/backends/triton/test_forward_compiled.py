"""The Triton forward for GPUs that are not here: its plans as data, and what the compiler makes of them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from compile_gate import (
    BF16,
    F16,
    F32,
    RELEASE,
    Compiled,
    beyond,
    faults,
    gated,
    named,
    problem,
    rows_of,
    serialised,
    with_tables,
)
from gates import GATED_TRITON

from stream_attention.backends import BY_NAME
from stream_attention.backends.triton.tuning import ANY, FORWARD, TritonConfig, configure
from stream_attention.base.problem import UNBOUNDED
from stream_attention.gpu.merge import bind_merge, launch_fold
from stream_attention.gpu.prepass import Prepass
from stream_attention_tools.testing.offline import Report, compiling_for, report

forward = BY_NAME["triton"].forward

PLAIN, MASKED, COMPUTED, FLOAT32 = (FORWARD[kind] for kind in ("plain", "masked", "computed", "float32"))
TABLES = named(FORWARD)


# Plans


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("right", [UNBOUNDED, 0], ids=["full", "causal"])
def test_long_queries_take_a_row_of_the_table_and_no_splits(dim: int, right: int, length: int) -> None:
    heads = 2048 // dim
    config = configure(problem(B=16384 // length, Tq=length, Tk=length, Hq=heads, Hkv=heads, D=dim, right=right))
    assert config.num_splits == 1 and not config.pack_heads
    assert config in {row.config for row in PLAIN[90] if row.width == dim and row.causal == (right == 0)}


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "dim", "keys", "splits"),
    [
        (1, 32, 8, 128, 8192, 33),  # 264 programs wanted, 8 without splits
        (1, 32, 8, 128, 131072, 33),
        (8, 32, 8, 128, 8192, 4),
        (8, 32, 8, 128, 32768, 4),
        (64, 32, 8, 128, 8192, 1),  # enough programs without
        (64, 32, 8, 128, 1024, 1),
        (1, 32, 32, 128, 16384, 8),
        (16, 64, 8, 128, 16384, 2),
        (8, 16, 2, 64, 32768, 16),
        (16, 8, 1, 256, 16384, 16),
        (1, 8, 8, 128, 256, 2),  # two tiles each, at least
    ],
    ids=str,
)
def test_one_query_splits_the_keys_and_packs_the_heads(
    batch: int, heads: int, kv_heads: int, dim: int, keys: int, splits: int
) -> None:
    config = configure(problem(B=batch, Tq=1, Tk=keys, Hq=heads, Hkv=kv_heads, D=dim))
    assert config.num_splits == splits
    assert config.pack_heads == (heads > kv_heads)
    assert config.block_m == 16
    assert splits * 2 * config.block_n <= keys


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"Tq": 8, "Hq": 8, "Hkv": 1}, (64, True)),
        ({"Tq": 9, "Hq": 8, "Hkv": 1}, None),  # 72 rows
        ({"Tq": 20}, (32, False)),
        ({"Tq": 64}, (64, False)),
        ({"Tq": 65}, None),
        ({"Tq": 1, "Hq": 8, "Hkv": 1, "dropout_p": 0.1}, (16, False)),  # rows of a tile share their column words
        ({"Tq": 1, "Tk": 255}, None),  # too few keys to share
        ({"Tq": 1, "layout": "packed"}, None),
        ({"Tq": 64, "dtype": F32}, (16, False)),
    ],
    ids=str,
)
def test_few_queries(facts: dict[str, Any], expected: tuple[int, bool] | None) -> None:
    config = configure(problem(**{"B": 1, "Tk": 8192, **facts}))
    if expected is None:
        assert config.num_splits == 1 and not config.pack_heads
    else:
        assert (config.block_m, config.pack_heads) == expected
        assert config.num_splits > 1


def test_packed_sequences_are_never_split() -> None:
    for q_len in (1, 16, 4096):
        config = configure(problem(B=1, Tq=q_len, Tk=100_000, Hq=32, Hkv=8, layout="packed"))
        assert config.num_splits == 1


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [
        (80, 80),
        (82, 80),
        (86, 86),
        (87, 86),
        (89, 89),
        (90, 90),
        (95, 90),
        (100, 100),
        (103, 100),
        (121, 120),
        (200, 120),
    ],
)
def test_an_unknown_architecture_takes_the_nearest_lower_table(arch: int, nearest: int) -> None:
    assert nearest in PLAIN
    for row in PLAIN[nearest]:
        facts = {"arch": arch, "D": row.width, "Tk": min(row.up_to, 8192), "right": 0 if row.causal else UNBOUNDED}
        assert configure(problem(**facts)) == row.config


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_a_row_for_every_problem(name: str) -> None:
    for causal in (False, True):
        assert any(row.width == 256 and row.causal == causal and row.up_to == ANY for row in TABLES[name])
    for row in TABLES[name]:
        assert row.config.num_splits == 1 and not row.config.pack_heads


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"mask": True}, "masked 90"),
        ({"bias": BF16}, "masked 90"),
        ({"bias": BF16, "softcap": 20.0}, "masked and computed 80"),
        ({"softcap": 20.0}, "computed 90"),
        ({"dropout_p": 0.1}, "computed 90"),
        ({"alibi": True}, "computed 90"),
        ({"dtype": F32}, "float32 90"),
        ({"dtype": F32, "mask": True}, "float32 90"),
        ({"dtype": F32, "arch": 86}, "float32 80"),
        ({"dtype": F16}, "plain 90"),
        ({"mask": True, "arch": 86}, "masked 80"),
        ({"softcap": 20.0, "arch": 89}, "computed 80"),
    ],
    ids=str,
)
def test_what_needs_registers_has_its_own_table(facts: dict[str, Any], name: str) -> None:
    for dim in (8, 64, 72, 128, 136, 256):
        rows = (row for row in TABLES[name] if dim <= row.width and not row.causal and row.up_to >= 4096)
        assert configure(problem(D=dim, **facts)) == next(rows).config


def test_the_wider_of_the_head_dims_chooses_the_row() -> None:
    assert configure(problem(D=64, value_dim=256)) == configure(problem(D=256))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"dtype": torch.float64}, "does not support float64"),
        ({"value_dim": 264}, "supports head dims from 1 to 256; got D=128, Dv=264"),
        ({"D": 264}, "supports head dims from 1 to 256; got D=264, Dv=264"),
        ({"q_start": 2**30}, "supports positions below 2**30; got 1073745919"),
        ({"arch": 75}, "requires compute capability 8.0 or newer; got 7.5"),
        (
            {"device": torch.device("cpu"), "arch": 0},
            "requires a CUDA device; got cpu (for tests, set TRITON_INTERPRET=1 before importing Triton)",
        ),
        ({"device": torch.device("mps"), "arch": 0}, "requires a CUDA device; got mps"),
    ],
    ids=str,
)
def test_why_not(facts: dict[str, Any], sentence: str) -> None:
    assert BY_NAME["triton"].why_not(problem(**facts)) == (sentence,)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "facts", [{}, {"D": 20}, {"D": 256}, {"layout": "packed"}, {"arch": 80}, {"arch": 120}], ids=str
)
def test_it_can(facts: dict[str, Any], backward: bool) -> None:
    assert BY_NAME["triton"].why_not(problem(**facts, backward=backward)) == ()


# What the compiler makes of them


def compiled(kernel: Compiled) -> Report:
    """What the compiler reports of the forward kernel itself; helpers launched beside it are tested below."""
    inputs = kernel.inputs()
    with compiling_for(kernel.arch) as launched:
        forward(kernel.problem(inputs), inputs, kernel.config())
    (itself,) = (one for one in launched if one.metadata.name == "_forward_kernel")
    return report(itself)


ALL = ("window", "mask", "bias", "alibi", "sink", "softcap", "dropout")
PLAIN_ROWS = [
    *rows_of(90, PLAIN[90]),
    *(row for row in rows_of(80, PLAIN[80]) if row.causal),
    *(row for row in rows_of(86, PLAIN[86]) if row.causal and row.D != 128),
    *(row for row in rows_of(89, PLAIN[89]) if row.causal and row.D == 128),
]
MASKED_ROWS = [
    *(replace(row, modifiers=("mask",) if row.causal else ("bias",)) for row in rows_of(90, MASKED[90])),
    *(replace(row, modifiers=("bias",)) for row in rows_of(80, MASKED[80]) if row.causal),
]
COMPUTED_ROWS = [
    *(replace(row, modifiers=("dropout",) if row.causal else ("softcap",)) for row in rows_of(90, COMPUTED[90])),
    *(replace(row, modifiers=("dropout",)) for row in rows_of(80, COMPUTED[80]) if row.causal),
]
FLOAT32_ROWS = [
    *(row for row in rows_of(90, FLOAT32[90], dtype=F32) if row.causal),
    *(row for row in rows_of(80, FLOAT32[80], dtype=F32) if row.causal and row.D != 256),
    *(row for row in rows_of(86, FLOAT32[80], dtype=F32) if row.causal and row.D == 256),
]
REST = [
    *(Compiled(90, dim, True, (modifier,)) for dim in (64, 128, 256) for modifier in ("window", "alibi")),
    *(Compiled(90, dim, False, (kind,)) for dim in (64, 128, 256) for kind in ("intervals", "intervals of keys")),
    Compiled(80, 128, False, ("intervals of keys",)),
    Compiled(90, 128, False, ("alibi",)),
    Compiled(80, 128, True, ("alibi", "window")),
    Compiled(90, 128, True, ALL),
    Compiled(80, 64, True, ALL),
    Compiled(90, 128, True, ("tf32",), dtype=F32),
    Compiled(90, 128, True, ("packed", "sink"), dtype=F16),
    Compiled(90, 64, True, ("misaligned",), Tk=1024),
    Compiled(90, 80, True),
    Compiled(90, 128, True, Dv=64),
    Compiled(90, 64, Tq=64),
    Compiled(90, 128, Tq=1, Hq=8, Hkv=1),
    Compiled(90, 256, Tq=8, Hq=8, Hkv=1),
    Compiled(90, 256, Tq=1, dtype=F32),
    Compiled(80, 256, Tq=64),
    Compiled(80, 256, Tq=1, dtype=F32),
    Compiled(86, 128, Tq=8, Hq=8, Hkv=1),
    Compiled(86, 256, Tq=1),
]
KERNELS = {str(kernel): kernel for kernel in (*PLAIN_ROWS, *MASKED_ROWS, *COMPUTED_ROWS, *FLOAT32_ROWS, *REST)}

SPILLS: dict[str, dict[str, int]] = {
    "3.6": {
        "sm_90 float32 d128 causal 16384": 352,  # measured: the tiles that spill nothing are slower; see the table
        "sm_90 bfloat16 d128 causal 4096 window mask bias alibi sink softcap dropout": 72,  # outside its loops
        "sm_90 bfloat16 d256 causal 16384 mask": 96,  # outside its loops
        "sm_90 bfloat16 d256 causal 16384 dropout": 16,
        "sm_80 float32 d256 full 4096 2/2 heads, 1 queries": 16,
        "sm_90 bfloat16 d128 full 4096 intervals of keys": 336,  # in the loop that streams a tile with masked NaN again
        "sm_90 bfloat16 d256 full 4096 intervals of keys": 184,
    },
    "3.7": {
        "sm_90 float32 d128 causal 16384": 352,
        "sm_90 bfloat16 d128 causal 16384 mask": 56,  # outside its loops
        "sm_90 bfloat16 d128 causal 4096 window mask bias alibi sink softcap dropout": 40,  # outside its loops
        "sm_80 bfloat16 d128 causal 16384 bias": 16,  # in the loop that streams a tile with masked NaN again
        "sm_90 bfloat16 d128 full 4096 intervals of keys": 344,
    },
    "3.8": {
        "sm_80 bfloat16 d128 causal 16384": 8,
        "sm_90 float32 d128 causal 16384": 380,
        "sm_90 bfloat16 d128 causal 4096 window mask bias alibi sink softcap dropout": 24,  # outside its loops
        "sm_80 bfloat16 d64 causal 4096 window mask bias alibi sink softcap dropout": 8,  # outside its loops
        "sm_90 bfloat16 d128 full 4096 intervals": 32,
        "sm_90 bfloat16 d128 full 4096 intervals of keys": 440,
    },
    "3.9": {
        "sm_90 bfloat16 d256 full 16384": 16,
        "sm_80 bfloat16 d128 causal 16384": 8,
        "sm_90 float32 d64 causal 16384": 64,
        "sm_90 float32 d128 causal 16384": 232,
        "sm_90 float32 d256 causal 16384": 8,
        "sm_90 bfloat16 d128 causal 16384 mask": 24,  # outside its loops
        "sm_80 bfloat16 d64 causal 4096 window mask bias alibi sink softcap dropout": 24,  # outside its loops
        "sm_90 bfloat16 d128 full 4096 intervals": 32,
        "sm_90 bfloat16 d128 full 4096 intervals of keys": 456,
    },
}
"""Bytes that a kernel is known to spill, by Triton's release. One that spills more than its line fails, and one that
has a line and spills nothing."""

SERIALISED: dict[str, set[str]] = {
    "3.6": {"sm_90 bfloat16 d64 causal 16384 mask"},
    "3.7": set(),
    "3.8": set(),
    "3.9": set(),
}
"""Kernels whose products wait for each other, and which are faster all the same: 190 against 175 TFLOP/s on the H200
for the best tile without the warning (2026-11-15, causal 2k, mask)."""


def test_every_row_of_every_table_is_compiled() -> None:
    """Of two rows that differ in `causal` alone, one: a right edge only adds to what a kernel holds."""

    def on(kernels: list[Compiled], *archs: int) -> list[Compiled]:
        return [kernel for kernel in kernels if kernel.arch in archs]

    gated = {
        PLAIN[80]: on(PLAIN_ROWS, 80),
        PLAIN[86]: on(PLAIN_ROWS, 86, 89),
        PLAIN[90]: on(PLAIN_ROWS, 90),
        FLOAT32[80]: on(FLOAT32_ROWS, 80, 86),
        FLOAT32[90]: on(FLOAT32_ROWS, 90),
    }
    for tables, kernels in ((MASKED, MASKED_ROWS), (COMPUTED, COMPUTED_ROWS)):
        for arch in (80, 90):  # on 80 one table serves both
            gated[tables[arch]] = gated.get(tables[arch], []) + on(kernels, arch)
    for name, table in TABLES.items():
        found = {(kernel.D, kernel.config()) for kernel in gated[table]}
        assert found == {(row.width, row.config) for row in table}, name


@with_tables
@pytest.mark.parametrize("name", gated(KERNELS, RELEASE))
def test_the_compiler_keeps_it_in_registers_and_on_the_matrix_units(name: str) -> None:
    kernel = KERNELS[name]
    config, made = kernel.config(), compiled(kernel)
    figures = f"{name}: {config}: {made}"
    assert not faults(kernel, config.block_m, made), figures
    assert not beyond(made.spill_bytes, SPILLS[RELEASE].get(name, 0)), figures
    assert serialised(made) == (name in SERIALISED[RELEASE]), figures
    if kernel.dtype is not F32:
        assert (made.instructions["LDGSTS"] > 0) != ("misaligned" in kernel.modifiers), figures


def test_what_is_known_of_kernels_is_of_kernels_that_there_are() -> None:
    assert SPILLS.keys() == SERIALISED.keys() == BESIDE.keys() == set(GATED_TRITON)
    for release in GATED_TRITON:
        assert SPILLS[release].keys() | SERIALISED[release] <= set(gated(KERNELS, release))


BESIDE: dict[str, dict[str, int]] = {"3.6": {}, "3.7": {}, "3.8": {"_seen_kernel": 56}, "3.9": {"_seen_kernel": 336}}
"""Bytes that the kernels beside it are known to spill, at most, by Triton's release."""


@with_tables
@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_beside_it_compile(arch: int) -> None:
    kernel = Compiled(arch, 64, causal=True, modifiers=("dropout", "mask", "bias"), Tq=64, Hq=4)
    inputs = kernel.inputs()
    stated = kernel.problem(inputs)
    outs, lses = torch.zeros(3, 1, 64, 4, 64), torch.zeros(3, 1, 4, 64)
    with compiling_for(arch) as launched:
        Prepass.of(stated, inputs, needs_visible=True).run(inputs)
        merged = outs, lses, torch.zeros(4), torch.zeros(1, 64, 4, 64, dtype=BF16), lses[0]
        bind_merge(outs.device, *merged)(*merged)
    names = [one.metadata.name for one in launched]
    assert names == ["_seen_kernel", "_seen_kernel", "_words_kernel", "_words_kernel", "_merge_kernel"]
    for one in launched:
        made = report(one)
        known = BESIDE[RELEASE].get(one.metadata.name, 0)
        assert made.spill_bytes <= known and not made.warnings, f"{one.metadata.name}: {made}"


def test_a_report_sees_what_spills() -> None:
    """The gate itself: tiles far too large for the register file are reported as such."""
    kernel = Compiled(80, 128, True)
    inputs = kernel.inputs()
    with compiling_for(80) as launched:
        forward(kernel.problem(inputs), inputs, TritonConfig(128, 64, 4, 2))
    assert report(launched[0]).spill_bytes > 0


def test_folding_a_state_moves_16_bytes_at_a_time() -> None:
    out, lse = torch.zeros(1, 4096, 32, 128), torch.zeros(1, 32, 4096)
    rows = slice(0, 2048)
    with compiling_for(90) as kernels:
        launch_fold(out[:, rows], lse[..., rows], out[:, rows].clone(), lse[..., rows].clone())
    found = report(kernels[0])
    assert found.spill_bytes == 0 and found.registers <= 64
    assert found.instructions["STG"] <= 8, "16 rows of 128 are 4 of 16 bytes to a thread, and an LSE"
