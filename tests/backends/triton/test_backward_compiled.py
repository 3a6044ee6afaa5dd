"""The Triton backward for GPUs that are not here: its plans as data, and what the compiler makes of them.

`python tests/backends/triton/test_backward_compiled.py` compiles the gate with the installed Triton and prints lines
of SPILLS and SERIALISED for its release as they are.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain, product
from multiprocessing import get_context
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl
from compile_gate import (
    BF16,
    F16,
    F32,
    RELEASE,
    Compiled,
    atomics,
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
from stream_attention.backends.triton.tuning import (
    ANY,
    BACKWARD,
    INTERPRETER_BACKWARD,
    BackwardConfig,
    Row,
    Tile,
    configure,
)
from stream_attention.base.problem import UNBOUNDED, Problem, Wanted
from stream_attention.gpu.arguments import tile_width
from stream_attention.gpu.rows import PAD
from stream_attention_tools.testing.offline import Report, compiling_for, report

backward = BY_NAME["triton"].backward

TABLES = named(BACKWARD)
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {},
        {"dtype": F16},
        {"sink": True},
        {"layout": "packed"},
        {"D": 64, "left": 100},
        {"D": 128, "left": 100},
    ],
    "masked": [{"mask": True}, {"bias": BF16}, {"mask": True, "bias": F32}],
    "computed": [{"softcap": 20.0}, {"dropout_p": 0.1}, {"alibi": True}, {"D": 256, "left": 100}],
    "masked and computed": [{"bias": BF16, "softcap": 20.0}, {"mask": True, "alibi": True}],
    "float32": [{"dtype": F32}, {"dtype": F32, "mask": True}, {"dtype": F32, "dropout_p": 0.1}, {"dtype": F32, "D": 8}],
}
"""Problems that need a table of their own, by its name."""


# Plans


def backward_of(**facts: Any) -> Problem:
    """A backward that fills an H200."""
    return problem(**{"B": 16, **facts}, backward=True)


def row_of(table: tuple[Row[BackwardConfig], ...], stated: Problem) -> Row[BackwardConfig]:
    """The first row that a problem fits, read off the table without the code that chooses."""
    width, causal = max(stated.head_dim, stated.value_dim), stated.right != UNBOUNDED
    return next(row for row in table if width <= row.width and row.causal == causal and stated.k_len <= row.up_to)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_a_row_for_every_problem(name: str) -> None:
    for causal in (False, True):
        assert any(row.width == 256 and row.causal == causal and row.up_to == ANY for row in TABLES[name])
    assert len({(row.width, row.causal, row.up_to) for row in TABLES[name]}) == len(TABLES[name])
    order = [(row.width, row.up_to) for row in TABLES[name] if row.causal]
    assert order == sorted(order), "the first row that fits is taken: wider and longer ones come later"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_every_problem_takes_the_row_that_is_for_it(arch: int, kind: str) -> None:
    tables = BACKWARD[kind]
    table = tables[max(known for known in tables if known <= arch)]
    dims, lengths = (8, 64, 72, 128, 136, 256), (1, 128, 512, 1024, 1025, 2048, 4096, 4097, 16384, 1 << 20)
    for facts, dim, right, length in product(KINDS[kind], dims, (UNBOUNDED, 0), lengths):
        stated = backward_of(**{"D": dim, **facts}, right=right, Tq=length, Tk=length, arch=arch)
        assert configure(stated) == planned(row_of(table, stated), stated), stated


def test_every_kind_of_table_is_reached() -> None:
    assert KINDS.keys() == BACKWARD.keys()


def planned(row: Row[BackwardConfig], stated: Problem) -> BackwardConfig:
    """What a row means for a problem: a bias has a tile where there is one."""
    return row.config if stated.bias is not None else row.config._replace(bias=None)


def all_configs() -> list[BackwardConfig]:
    return [INTERPRETER_BACKWARD, *dict.fromkeys(row.config for table in TABLES.values() for row in table)]


@pytest.mark.parametrize("config", all_configs(), ids=str)
def test_a_kernel_reads_no_row_that_the_query_kernel_has_not_written(config: BackwardConfig) -> None:
    """It writes the LSE and delta of whole tiles of its own, and every sequence has room for whole tiles of PAD."""
    for tile in filter(None, config):
        assert tile.block_m <= config.query.block_m <= PAD.value
        for size in tile[:3]:
            assert size & (size - 1) == 0  # powers of two divide PAD and each other
        assert min(tile.block_m, tile.block_n) >= 16  # what a matrix instruction takes


@pytest.mark.parametrize(
    ("arch", "nearest"), [(80, 80), (82, 80), (86, 80), (89, 80), (90, 90), (95, 90), (103, 90), (121, 120), (200, 120)]
)
def test_an_unknown_architecture_takes_the_nearest_lower_table(arch: int, nearest: int) -> None:
    for row in BACKWARD["plain"][nearest]:
        facts = {"D": row.width, "Tk": min(row.up_to, 1 << 20), "right": 0 if row.causal else UNBOUNDED}
        stated = backward_of(arch=arch, **facts)
        assert configure(stated) == planned(row, stated)


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"mask": True}, "masked 90"),
        ({"bias": BF16}, "masked 90"),
        ({"bias": BF16, "softcap": 20.0}, "masked and computed 90"),
        ({"softcap": 20.0}, "computed 90"),
        ({"dropout_p": 0.1}, "computed 90"),
        ({"alibi": True}, "computed 90"),
        ({"dtype": F32}, "float32 90"),
        ({"dtype": F32, "mask": True}, "float32 90"),
        ({"dtype": F16, "lse_grad": True}, "plain 90"),
        ({"sink": True, "layout": "packed"}, "plain 90"),
        ({"mask": True, "arch": 86}, "masked 80"),
        ({"softcap": 20.0, "arch": 89}, "computed 80"),
    ],
    ids=str,
)
def test_what_needs_registers_has_its_own_table(facts: dict[str, Any], name: str) -> None:
    for dim in (8, 64, 72, 128, 136, 256):
        stated = backward_of(D=dim, **facts)
        assert configure(stated) == planned(row_of(TABLES[name], stated), stated)


def test_a_left_edge_needs_registers_at_the_widest_heads() -> None:
    for dim, kind in ((64, "plain"), (128, "plain"), (136, "computed"), (256, "computed")):
        stated = backward_of(D=dim, left=100, right=0)
        assert configure(stated) == planned(row_of(BACKWARD[kind][90], stated), stated)


def test_the_wider_of_the_head_dims_chooses_the_row() -> None:
    assert configure(backward_of(D=64, value_dim=256)) == configure(backward_of(D=256))
    assert configure(backward_of(D=256, value_dim=64)) == configure(backward_of(D=256))


@pytest.mark.parametrize(
    ("facts", "splits"),
    [
        ({}, (1, 1)),
        ({"B": 1}, (1, 1)),  # 512 programs for dQ, 1024 for dK and dV, and 264 wanted
        ({"B": 1, "Hq": 2, "Hkv": 2}, (4, 2)),
        ({"B": 1, "Hq": 2, "Hkv": 2, "Tq": 1}, (8, 1)),  # no queries to split
        ({"B": 1, "Hq": 2, "Hkv": 2, "Tq": 512, "Tk": 512}, (1, 1)),  # eight tiles each, at least
        ({"B": 1, "Hq": 16, "Hkv": 1}, (1, 4)),
        ({"B": 1, "Hq": 1, "Hkv": 1, "Tq": 65536, "Tk": 128}, (1, 8)),  # eight splits, at most
        ({"B": 1, "Hq": 2, "Hkv": 2, "layout": "packed"}, (1, 1)),
        ({"B": 0}, (1, 1)),
        ({"Tk": 0}, (1, 1)),
    ],
    ids=str,
)
def test_what_leaves_processors_idle_is_split(facts: dict[str, Any], splits: tuple[int, int]) -> None:
    config = configure(backward_of(**{"Hq": 16, **facts}))
    assert (config.query.num_splits, config.key.num_splits) == splits
    assert config.bias is None


def test_a_bias_has_its_tile_and_is_named_only_where_there_is_one() -> None:
    with_bias, without = configure(backward_of(bias=torch.bfloat16)), configure(backward_of())
    assert with_bias.bias.num_splits == 1 and "dBias" in str(with_bias)
    assert without.bias is None and "dBias" not in str(without)


# What the compiler makes of them


def launched(call: Compiled, wanted: Wanted | None = None) -> list[Any]:
    """The compiled kernels of a backward in which these gradients are wanted, or else all that there are."""
    inputs = call.inputs()
    stated = call.problem(inputs)
    out = torch.zeros(*inputs.query.shape[:-1], stated.value_dim, dtype=call.dtype)
    lse = torch.zeros(*inputs.query.shape[:-3], stated.q_heads, inputs.query.shape[-3])
    if "misaligned" in call.modifiers:
        out = torch.zeros(out.numel() + 1, dtype=call.dtype)[1:].view(out.shape)
    has_bias, has_slopes, has_sink = (t is not None for t in (inputs.bias, inputs.alibi_slopes, inputs.sink))
    everything = Wanted(bias=has_bias, alibi_slopes=has_slopes, sink=has_sink)
    with compiling_for(call.arch) as kernels:
        grad_lse = lse if stated.lse_grad else None
        backward(stated, inputs, configure(stated), out, lse, out, grad_lse, wanted=wanted or everything)
    return [kernel for kernel in kernels if kernel.metadata.name not in BEFORE]


BEFORE = "_seen_kernel", "_words_kernel", "_list_tiles_kernel", "_seen_in_lists_kernel"
"""The kernels of a prepass."""


def compiled(call: Compiled) -> dict[str, Report]:
    """What the compiler reports of the kernels of a call, as its configuration calls them."""
    kernels, names = launched(call), tiles_of(call)
    expected = [f"_{'key' if name == 'value' else name}_kernel" for name in names]
    assert [kernel.metadata.name for kernel in kernels] == expected
    return {name: report(kernel) for name, kernel in zip(names, kernels, strict=True)}


def tiles_of(call: Compiled) -> dict[str, Tile]:
    """The kernels that a call launches, in order, as its configuration calls them."""
    has_bias = any("bias" in modifier for modifier in call.modifiers)
    tiles = call.config()._asdict().items()
    return {name: tile for name, tile in tiles if tile is not None and (name != "bias" or has_bias)}


def table_of(kind: str, arch: int) -> tuple[Row[BackwardConfig], ...]:
    return BACKWARD[kind].get(arch, BACKWARD[kind][80])


def representatives(arch: int, kind: str, *modifiers: str, **how: Any) -> list[Compiled]:
    """Calls that take rows of a table, until every tile of every width is there; causal ones come first."""
    calls = rows_of(arch, table_of(kind, arch), modifiers=modifiers, backward=True, **how)
    found: dict[Compiled, set[Any]] = {}
    for call in sorted(calls, key=lambda call: not call.causal):
        tiles = {(call.D, *item) for item in tiles_of(call).items()}
        if not tiles <= set().union(*found.values()):
            found[call] = tiles
    return list(found)


GATED = {
    ("plain", 90): representatives(90, "plain"),
    ("plain", 80): representatives(80, "plain"),
    ("masked", 90): representatives(90, "masked", "bias"),
    ("computed", 90): representatives(90, "computed", "dropout"),
    ("masked and computed", 90): representatives(90, "masked and computed", "bias", "dropout"),
    ("masked", 80): representatives(80, "masked", "bias"),  # on 80 one table serves all that is modified
    ("float32", 90): representatives(90, "float32", "bias", dtype=F32),
    ("float32", 80): representatives(80, "float32", "bias", dtype=F32),
}
REST = [
    replace(call, backward=True)
    for call in (
        Compiled(90, 128, True, ("window",)),
        Compiled(90, 128, True, ("tf32",), dtype=F32),
        Compiled(90, 80, True, Dv=64, Hq=8),
        *(Compiled(90, dim, False, (kind,)) for dim in (64, 128) for kind in ("intervals", "intervals of keys")),
    )
]
CALLS = {str(call): call for call in (*chain(*GATED.values()), *REST)}

SPILLS: dict[str, dict[str, dict[str, int]]] = {
    "3.6": {
        "sm_90 bfloat16 d64 causal 16384": {"query": 168},
        "sm_90 bfloat16 d128 causal 2048": {"key": 40},
        "sm_90 bfloat16 d128 causal 4096": {"key": 824},
        "sm_90 bfloat16 d128 causal 16384": {"key": 312},
        "sm_90 bfloat16 d256 causal 16384": {"query": 636, "value": 220},
        "sm_90 bfloat16 d256 full 16384": {"query": 644, "key": 136},
        "sm_80 bfloat16 d64 causal 16384": {"key": 60},
        "sm_90 bfloat16 d64 causal 16384 bias": {"key": 180},
        "sm_90 bfloat16 d128 causal 16384 bias": {"query": 80, "key": 398},
        "sm_90 bfloat16 d256 causal 16384 bias": {"query": 1788, "key": 388, "value": 228, "bias": 1028},
        "sm_90 bfloat16 d64 causal 16384 dropout": {"query": 180},
        "sm_90 bfloat16 d128 causal 16384 dropout": {"query": 164, "key": 68},
        "sm_90 bfloat16 d256 causal 16384 dropout": {"query": 16, "key": 208, "value": 312},
        "sm_90 bfloat16 d128 causal 16384 bias dropout": {"key": 732},
        "sm_90 bfloat16 d256 causal 16384 bias dropout": {"query": 1352, "key": 2016, "bias": 1156},
        "sm_80 bfloat16 d128 causal 16384 bias": {"query": 172, "key": 304},
        "sm_80 bfloat16 d256 causal 16384 bias": {"bias": 976},
        "sm_90 float32 d64 causal 16384 bias": {"query": 48, "key": 972, "bias": 244},
        "sm_90 float32 d128 causal 16384 bias": {"query": 2092, "key": 3192, "bias": 200},
        "sm_80 float32 d64 causal 16384 bias": {"query": 120, "key": 12, "bias": 204},
        "sm_80 float32 d128 causal 16384 bias": {"query": 1676, "key": 1688, "bias": 112},
        "sm_90 bfloat16 d128 causal 4096 window": {"key": 1468},
        "sm_90 bfloat16 d80/64 causal 4096 8/2 heads, 128 queries": {"key": 1488},
        "sm_90 bfloat16 d64 full 4096 intervals": {"key": 28},
        "sm_90 bfloat16 d64 full 4096 intervals of keys": {"key": 84},
        "sm_90 bfloat16 d128 full 4096 intervals": {"key": 120},
        "sm_90 bfloat16 d128 full 4096 intervals of keys": {"query": 24, "key": 240},
    },
    "3.7": {
        "sm_90 bfloat16 d256 causal 16384": {"query": 572, "value": 192},
        "sm_90 bfloat16 d128 causal 16384 bias": {"query": 80, "key": 464},
        "sm_90 bfloat16 d128 causal 16384 bias dropout": {"query": 40, "key": 1068},
        "sm_80 bfloat16 d128 causal 16384 bias": {"query": 88, "key": 296},
        "sm_90 float32 d128 causal 16384 bias": {"query": 1772, "key": 3016, "bias": 200},
        "sm_80 float32 d128 causal 16384 bias": {"query": 1744, "key": 1724, "bias": 112},
        "sm_90 bfloat16 d128 causal 4096 window": {"key": 1100},
        "sm_90 bfloat16 d80/64 causal 4096 8/2 heads, 128 queries": {"key": 1360},
        "sm_90 bfloat16 d128 full 4096 intervals": {"key": 96},
        "sm_90 bfloat16 d128 full 4096 intervals of keys": {"query": 80, "key": 240},
    },
    "3.8": {
        "sm_90 bfloat16 d256 causal 16384": {"query": 824, "value": 228},
        "sm_90 bfloat16 d128 causal 16384 bias": {"query": 192, "key": 480},
        "sm_90 bfloat16 d128 causal 16384 dropout": {"key": 8},
        "sm_90 bfloat16 d128 causal 16384 bias dropout": {"key": 1052},
        "sm_80 bfloat16 d128 causal 16384 bias": {"query": 40, "key": 304},
        "sm_90 float32 d128 causal 16384 bias": {"query": 1772, "key": 2984, "bias": 976},
        "sm_80 float32 d128 causal 16384 bias": {"query": 1160, "key": 1652, "bias": 944},
        "sm_90 bfloat16 d128 causal 4096 window": {"key": 1072},
        "sm_90 bfloat16 d80/64 causal 4096 8/2 heads, 128 queries": {"key": 1504},
        "sm_90 bfloat16 d128 full 4096 intervals": {"key": 96},
        "sm_90 bfloat16 d128 full 4096 intervals of keys": {"query": 60, "key": 240},
    },
    "3.9": {
        "sm_90 bfloat16 d256 causal 16384": {"query": 488, "value": 84},
        "sm_90 bfloat16 d128 causal 16384 bias": {"query": 96, "key": 88},
        "sm_90 bfloat16 d128 causal 16384 bias dropout": {"key": 520},
        "sm_80 bfloat16 d128 causal 16384 bias": {"query": 92, "key": 308},
        "sm_90 float32 d128 causal 16384 bias": {"query": 1980, "key": 3112, "bias": 248},
        "sm_80 float32 d128 causal 16384 bias": {"query": 1160, "key": 1644, "bias": 112},
        "sm_90 bfloat16 d128 causal 4096 window": {"key": 704},
        "sm_90 bfloat16 d80/64 causal 4096 8/2 heads, 128 queries": {"key": 1668},
        "sm_90 bfloat16 d128 full 4096 intervals": {"key": 36},
        "sm_90 bfloat16 d128 full 4096 intervals of keys": {"query": 8, "key": 156},
    },
}
"""Bytes that the kernels of a call are known to spill, by Triton's release. One that spills more than its line fails,
and one that has a line and spills nothing."""

SERIALISED: dict[str, dict[str, list[str]]] = {
    "3.6": {"sm_90 bfloat16 d64 causal 16384 dropout": ["query"]},
    "3.7": {},
    "3.8": {},
    "3.9": {},
}
"""Kernels whose products are known to wait for each other. Strict: one of them that does not any more fails, too."""


def test_every_row_of_every_table_is_compiled() -> None:
    """Every tile of it, at its width. Causal rows stand for others: a right edge only adds to what a kernel holds."""
    for name, table in TABLES.items():
        calls = [call for where, calls in GATED.items() if table_of(*where) == table for call in calls]
        compiled = {(call.D, *item) for call in calls for item in tiles_of(call).items()}
        has_bias = "masked" in name or "float32" in name
        for row in table:
            kernels = {kernel for kernel in row.config._fields if kernel != "bias" or has_bias}
            tiles = {(row.width, kernel, getattr(row.config, kernel)) for kernel in kernels}
            assert {tile for tile in tiles if tile[-1] is not None} <= compiled, name


@with_tables
@pytest.mark.parametrize("name", gated(CALLS, RELEASE))
def test_the_compiler_keeps_it_in_registers_and_on_the_matrix_units(name: str) -> None:
    call = CALLS[name]
    tiles, made = tiles_of(call), compiled(call)
    figures = f"{name}: {tiles}: {made}"
    found = {kernel: faults(call, product_rows(kernel, tile), made[kernel]) for kernel, tile in tiles.items()}
    assert not any(found.values()), f"{found} {figures}"
    spills = SPILLS[RELEASE].get(name, {})
    assert not [kernel for kernel, one in made.items() if beyond(one.spill_bytes, spills.get(kernel, 0))], figures
    assert waits_of(made) == SERIALISED[RELEASE].get(name, []), figures
    if not call.modifiers and call.dtype is not F32:
        for kernel in tiles.keys() & {"key", "value"}:
            assert streams(call, kernel, tiles[kernel], made[kernel]), figures


def product_rows(kernel: str, tile: Tile) -> int:
    """Products of the kernel that writes dK and dV lie keys by queries."""
    return tile.block_n if kernel in ("key", "value") else tile.block_m


def spills_of(made: dict[str, Report]) -> dict[str, int]:
    return {kernel: one.spill_bytes for kernel, one in made.items() if one.spill_bytes}


def waits_of(made: dict[str, Report]) -> list[str]:
    return [kernel for kernel, one in made.items() if serialised(one)]


def streams(call: Compiled, kernel: str, tile: Tile, made: Report) -> bool:
    """Whether it loads K, and V where dK is wanted, once, and copies what streams by asynchronously, if in stages."""
    columns = tile_width(call.D) + (0 if kernel == "value" else tile_width(call.Dv or call.D))
    once = tile.block_n * columns * call.dtype.itemsize // (16 * 32 * tile.num_warps)  # words of 16 bytes, per thread
    if tile.num_stages == 1:
        return made.instructions["LDGSTS"] == 0 and made.instructions["LDG"] > once
    return made.instructions["LDGSTS"] > 0 and made.instructions["LDG"] == once


def test_what_is_known_of_kernels_is_of_kernels_that_there_are() -> None:
    assert SPILLS.keys() == SERIALISED.keys() == set(GATED_TRITON)
    for release in GATED_TRITON:
        assert SPILLS[release].keys() | SERIALISED[release].keys() <= set(gated(CALLS, release))


NOTHING = Wanted(query=False, key=False, value=False)


@pytest.mark.parametrize(
    ("modifiers", "wanted", "kernels"),
    [
        ((), NOTHING._replace(query=True), "query"),
        ((), NOTHING._replace(key=True), "query key"),
        ((), NOTHING._replace(value=True), "query key"),
        (("sink",), NOTHING._replace(sink=True), "query"),
        (("bias of keys",), NOTHING._replace(bias=True), "query bias"),
        (("bias of queries",), NOTHING._replace(bias=True), "query bias"),
        (("window", "alibi", "sink", "softcap"), None, "query key"),
        (("packed", "gradient of the LSE"), None, "query key"),
        (("misaligned", "splits"), None, "query key"),
    ],
    ids=str,
)
def test_what_is_wanted_compiles_and_no_more_is_launched(
    modifiers: tuple[str, ...], wanted: Wanted | None, kernels: str
) -> None:
    call = Compiled(90, 16, True, modifiers, Tq=4096, dtype=F16, backward=True)
    found = [kernel.metadata.name for kernel in launched(call, wanted)]
    assert found == [f"_{name}_kernel" for name in kernels.split()]
    assert (call.config().query.num_splits > 1) == ("splits" in modifiers) == (call.config().key.num_splits > 1)


@triton.jit
def _counting_kernel(counts_ptr):
    tl.atomic_add(counts_ptr, 1.0)


@pytest.mark.parametrize("arch", [80, 90])
def test_a_report_sees_atomics(arch: int) -> None:
    """The gate itself: what would make gradients depend on who comes first is reported as such."""
    with compiling_for(arch) as kernels:
        _counting_kernel[(1,)](torch.zeros(1))
    assert atomics(report(kernels[0]))


def _known(name: str) -> tuple[dict[str, int], list[str]]:
    made = compiled(CALLS[name])
    return spills_of(made), waits_of(made)


if __name__ == "__main__":
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        names = gated(CALLS, RELEASE)
        known = dict(zip(names, pool.map(_known, names), strict=True))
    for title, index in (("SPILLS", 0), ("SERIALISED", 1)):
        lines = [
            f"        {name!r}: {facts[index]!r},\n".replace("'", '"') for name, facts in known.items() if facts[index]
        ]
        print(f'{title}:\n    "{RELEASE}": {{{chr(10) if lines else ""}{"".join(lines)}    }},')
