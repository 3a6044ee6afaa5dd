"""The Gluon forward for a Hopper that is not here: its plans as data, and what the compiler makes of them."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

import triton

from stream_attention.backends import TESTED_TRITON

if triton.__version__.split(".")[:2] != TESTED_TRITON.split("."):
    pytest.skip(f"the tables are of Triton {TESTED_TRITON}, not {triton.__version__}", allow_module_level=True)

from compile_gate import F16, Compiled, problem
from sass_gate import (
    Iteration,
    disassemble,
    faults,
    fingerprint,
    measure,
    overlap,
    parse,
    product_loops,
    raced,
    shortest,
)

from stream_attention.kernels.gluon import forward
from stream_attention.problem import Inputs, Problem
from stream_attention.testing.offline import Report, compiling_for, report
from stream_attention.tuning import gluon as tuning
from stream_attention.tuning.gluon import ROWS, WIDTHS, GluonConfig, configure, tile_widths

SHARED_BYTES = 227 * 1024
BARRIER_BYTES = 1024
"""Room beside the rings: barriers, the numbers of tiles, and what a reduction passes between warps."""


TABLE: dict[str, GluonConfig] = {name: row for name, row in vars(tuning).items() if isinstance(row, GluonConfig)}


# Plans

FEATURES: list[dict[str, Any]] = [
    {},
    {"right": 0},
    {"left": 100, "right": 0},
    {"softcap": 20.0},
    {"alibi": True},
    {"sink": True},
    {"dropout_p": 0.1},
    {"packed": True},
    {"partial": True},
    {"dtype": F16},
    {"right": 0, "k_len": 1024},
    {"right": 0, "k_len": 1024, "partial": True},
    {"packed": True, "dropout_p": 0.1},
]
DIMS = [(40, 40), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (256, 72)]
PROBLEMS = [problem(D=dim, value_dim=value_dim, **facts) for (dim, value_dim), facts in product(DIMS, FEATURES)]


def launch_registers(config: GluonConfig) -> int:
    """What every thread starts with: an equal share, in eights; the producer's warp has three idle ones beside it."""
    return 65536 // (128 * (config.warpgroups + 1)) // 8 * 8


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"D": 40}, "D64"),
        ({"D": 64}, "D64"),
        ({"D": 64, "right": 0, "k_len": 1025}, "D64"),
        ({"D": 64, "right": 0, "k_len": 1024}, "D64_SHORT_CAUSAL"),
        ({"D": 64, "k_len": 1024}, "D64"),
        ({"D": 64, "dropout_p": 0.1}, "D64_DROPOUT"),
        ({"D": 72}, "D128"),
        ({"D": 128, "right": 0}, "D128"),
        ({"D": 128, "softcap": 20.0}, "D128"),
        ({"D": 128, "dropout_p": 0.1}, "D128_DROPOUT"),
        ({"D": 136, "right": 0}, "D256"),
        ({"D": 256, "right": 0}, "D256"),
        ({"D": 256, "left": 100, "right": 100}, "D256"),
        ({"D": 256}, "D256_FULL"),
        ({"D": 256, "dropout_p": 0.1}, "D256_DROPOUT"),
    ],
    ids=str,
)
def test_the_head_dim_and_what_is_computed_choose_the_row(facts: dict[str, Any], name: str) -> None:
    assert configure(problem(value_dim=facts["D"], **facts)) == TABLE[name]


@pytest.mark.parametrize(
    ("facts", "by_tma"),
    [
        ({}, True),
        ({"packed": True}, False),  # rows after a sequence are those of the next
        ({"partial": True}, False),  # fp32 is twice as wide as the queries
        ({"D": 192}, False),  # a tile of outputs does not fill the slot of its queries
        ({"D": 192, "value_dim": 192}, True),
    ],
    ids=str,
)
def test_only_whole_tiles_as_wide_as_the_queries_leave_by_tma(facts: dict[str, Any], by_tma: bool) -> None:
    assert configure(problem(**{"value_dim": 128, **facts})).by_tma == by_tma


def test_packed_sequences_are_taken_in_dynamic_order() -> None:
    assert all(configure(problem(D=dim, value_dim=dim, packed=True)).dynamic for dim in (64, 128, 256))


def test_no_row_of_the_table_is_out_of_reach() -> None:
    assert set(TABLE.values()) == {config for config in map(configure, PROBLEMS) if config.by_tma}


def test_there_is_a_configuration_for_every_pair_of_widths() -> None:
    assert {tile_widths(stated) for stated in PROBLEMS} == WIDTHS


@pytest.mark.parametrize("stated", PROBLEMS, ids=str)
def test_the_rings_fit_into_shared_memory(stated: Problem) -> None:
    config = configure(stated)
    dim, value_dim = tile_widths(stated)
    queries = config.q_slots * config.warpgroups * ROWS * dim
    keys, values = config.k_slots * config.block_n * dim, config.v_slots * config.block_n * value_dim
    assert 2 * (queries + keys + values) <= SHARED_BYTES - BARRIER_BYTES


@pytest.mark.parametrize("stated", PROBLEMS, ids=str)
def test_the_registers_that_roles_ask_for_are_there(stated: Problem) -> None:
    """A warpgroup waits for registers until others give them back: one that asks for more than there are hangs."""
    config = configure(stated)
    asked = config.warpgroups * config.consumer_registers + config.producer_registers
    assert asked <= (config.warpgroups + 1) * launch_registers(config) <= 65536 // 128
    for registers in (config.consumer_registers, config.producer_registers):
        assert 24 <= registers <= 240 and registers % 8 == 0


# What the compiler makes of them

PLAIN = [
    *(Compiled(90, dim, causal) for dim in (64, 128, 256) for causal in (False, True)),
    Compiled(90, 64, True, Tk=1024),
]
MODIFIED = [
    *(Compiled(90, dim, True, (modifier,)) for dim in (64, 128, 256) for modifier in ("window", "alibi", "dropout")),
    *(Compiled(90, dim, False, ("softcap",)) for dim in (64, 128, 256)),
    Compiled(90, 128, False, ("sink",), dtype=F16),
]
FROM_REGISTERS = [
    *(Compiled(90, dim, True, ("packed",)) for dim in (64, 128, 256)),
    *(
        Compiled(90, dim, True, ("packed", "window", "alibi", "sink", "softcap", "dropout"), dtype=F16)
        for dim in (64, 128, 256)
    ),
    Compiled(90, 64, True, ("partial",), Tk=1024),
    Compiled(90, 256, False, ("partial",)),
    Compiled(90, 192, True, Dv=128),
]
KERNELS = {str(kernel): kernel for kernel in (*PLAIN, *MODIFIED, *FROM_REGISTERS)}

SPILLS = {
    "sm_90 bfloat16 d256 causal 4096 window": 92,
    "sm_90 bfloat16 d256 causal 4096 packed": 44,
    "sm_90 float16 d256 causal 4096 packed window alibi sink softcap dropout": 80,
}
"""Bytes that a kernel is known to spill once per tile. Strict: one that spills more or less than its line fails."""

ITERATIONS = {
    "sm_90 bfloat16 d64 full 4096": Iteration(416, 12, 66),
    "sm_90 bfloat16 d64 causal 4096": Iteration(423, 12, 66),
    "sm_90 bfloat16 d64 causal 1024": Iteration(422, 12, 66),
    "sm_90 bfloat16 d128 full 4096": Iteration(458, 16, 66),
    "sm_90 bfloat16 d128 causal 4096": Iteration(478, 16, 66),
    "sm_90 bfloat16 d256 full 4096": Iteration(415, 20, 34),
    "sm_90 bfloat16 d256 causal 4096": Iteration(425, 20, 34),
}
"""The longest of the consumers' loops over keys, once round where nothing is masked."""

MARGIN = 8
"""Instructions by which an iteration may differ from its line: slots and barriers elsewhere shift it by a few."""


RAN = json.loads((Path(__file__).parents[3] / "benchmarks/results/h200/machine_code_gluon_forward.json").read_text())
"""The machine code that the GPU tests and the benchmark were run with. After another such run, of COMMIT, the file is
written by `PYTHONPATH=src:tests/kernels/triton:tests/kernels/gluon python THIS_FILE COMMIT > FILE`."""


def stated(kernel: Compiled, inputs: Inputs) -> Problem:
    return kernel.problem(inputs)._replace(partial="partial" in kernel.modifiers)


def compiled(kernel: Compiled) -> tuple[GluonConfig, Report, str]:
    """The configuration of the forward, what the compiler reports of it, and its machine code."""
    inputs = kernel.inputs()
    config = configure(stated(kernel, inputs))
    with compiling_for(kernel.arch) as launched:
        forward(stated(kernel, inputs), inputs, config)
    (itself,) = (one for one in launched if one.metadata.name == "_forward_kernel")
    return config, report(itself), disassemble(itself)


def test_every_configuration_is_compiled() -> None:
    gated = {configure(stated(kernel, kernel.inputs())) for kernel in KERNELS.values()}
    assert {configure(one) for one in PROBLEMS} <= gated


@pytest.mark.parametrize("name", KERNELS)
def test_the_machine_code_is_as_it_should_be(name: str) -> None:
    config, made, sass = compiled(KERNELS[name])
    figures = f"{name}: {config}: {made}"
    assert not faults(made, sass, config.warpgroups, SPILLS.get(name, 0)), figures
    assert made.shared_bytes <= SHARED_BYTES, figures
    assert made.registers == launch_registers(config), figures
    assert not made.instructions["HMMA"], figures
    assert fingerprint(sass) == RAN["kernels"][name], (
        f"{name}: not what ran on the GPU at {RAN['commit']}; run it there"
    )
    if KERNELS[name] in PLAIN:
        blocks = parse(sass)
        longest = max(measure(shortest(blocks, loop)) for loop in product_loops(blocks))
        known = ITERATIONS[name]
        assert longest[1:] == known[1:], longest
        assert abs(longest.instructions - known.instructions) <= MARGIN, longest


def test_what_is_known_of_kernels_is_of_kernels_that_there_are() -> None:
    assert SPILLS.keys() <= KERNELS.keys() == RAN["kernels"].keys()
    assert ITERATIONS.keys() == {str(kernel) for kernel in PLAIN}


# The gate itself, on a few lines


def program(*lines: str) -> str:
    """Lines as the disassembler writes them; those that end with a colon are labels."""
    return "\n".join(
        f".L_x_{line[1:]}" if line.endswith(":") else f"        /*{16 * at:04x}*/                   {line} ;"
        for at, line in enumerate(lines)
    )


def go(label: int, condition: str = "") -> str:
    return f"{condition} BRA `(.L_x_{label})".strip()


QK = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0"
PV = "HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR16].tnspB, R88, gsb0"
WAIT_ONE, WAIT_ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
EXP, PACK = "MUFU.EX2 R24, R25", "F2FP.BF16.F32.PACK_AB R152, R25, R24"
ADD, MASK = "FADD R30, R31, R32", "FSEL R24, R24, -INF , P0"
TRY = "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR26+0x30190], R206"
BODY = (QK, PV, WAIT_ONE, EXP, EXP, WAIT_ALL, PACK)
KERNEL = program(
    "L1:", ADD, QK, WAIT_ALL,  # a tile
    "L2:", *BODY[:3], TRY, go(5, "@!P2"),  # a block of keys
    "L3:", go(4, "@P3"), *[MASK] * 1000,
    "L4:", *BODY[3:], go(2, "@P1"),
    PV, WAIT_ALL, go(1, "@P0"), "EXIT",
    "L5:", TRY, go(5, "@!P2"), go(3),
    "L6:", ADD, go(6, "@P0"), "EXIT",  # the producer
)  # fmt: skip
REPORT = Report(168, 0, 197088, 4, Counter(), ())


def test_a_fingerprint_is_of_the_instructions_and_not_of_their_places() -> None:
    assert fingerprint(program(ADD, EXP)) == fingerprint(program("L1:", ADD, EXP))
    assert len({fingerprint(program(*lines)) for lines in ((ADD, EXP), (EXP, ADD), (ADD,), (ADD, EXP, EXP))}) == 4


def test_a_line_is_a_guard_an_opcode_and_operands() -> None:
    (only,) = parse(program("@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR12+0x30180], RZ"))
    (one,) = only.code
    assert one == ("@!P1", "SYNCS.ARRIVE.TRANS64.A1T0", ("RZ", "[UR12+0x30180]", "RZ"))
    assert one.name == "SYNCS" and str(one) == "@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR12+0x30180], RZ"
    assert parse(program("WARPGROUP.ARRIVE"))[0].code[0].operands == ()


@pytest.mark.parametrize(
    ("last", "after"),
    [
        (ADD, {1}),
        (go(2), {2}),
        (go(2, "@!P0"), {1, 2}),
        ("BRA P2, `(.L_x_2)", {1, 2}),
        ("BRX R8 -0x270", set()),
        ("EXIT", set()),
        ("@P0 EXIT", {1}),
        ("CALL.REL.NOINC `(.L_x_2)", {1}),
    ],
)
def test_what_follows_a_block(last: str, after: set[int]) -> None:
    blocks = parse(program(ADD, last, "L1:", ADD, "L2:", ADD))
    assert [len(block.code) for block in blocks] == [2, 1, 1]
    assert [block.after for block in blocks] == [after, {2}, set()]


def test_the_loop_with_products_is_the_innermost_however_long_with_its_branches_and_spins() -> None:
    blocks = parse(KERNEL)
    (loop,) = product_loops(blocks)
    inside = Counter(one.name for number in loop for one in blocks[number].code)
    assert (inside["HGMMA"], inside["FSEL"], inside["SYNCS"], inside["FADD"]) == (2, 1000, 2, 0)


def test_loops_that_do_not_hold_each_other_are_all_found() -> None:
    blocks = parse(program("L1:", *BODY, go(1, "@P0"), "L2:", *BODY, go(2, "@P0"), "L3:", ADD, go(3, "@P0"), "EXIT"))
    assert product_loops(blocks) == [{0}, {1}]
    assert product_loops(parse(program(*BODY, "L1:", ADD, go(1, "@P0")))) == []


def test_an_iteration_is_the_shortest_way_round() -> None:
    blocks = parse(KERNEL)
    (loop,) = product_loops(blocks)
    code = shortest(blocks, loop)
    assert [one.opcode for one in code[:3]] == [line.split()[0] for line in BODY[:3]]  # as it runs, from the entry
    assert measure(code) == Iteration(len(BODY) + 4, 2, 2)
    entered_late = parse(program(go(2), "L1:", EXP, WAIT_ALL, "L2:", QK, PV, go(1, "@P0"), "EXIT"))
    (loop,) = product_loops(entered_late)
    assert [one.name for one in shortest(entered_late, loop)] == ["HGMMA", "HGMMA", "BRA", "MUFU", "WARPGROUP"]


@pytest.mark.parametrize(
    ("body", "share"),
    [
        ((QK, PV, WAIT_ONE, EXP, EXP, WAIT_ALL), 1.0),
        ((QK, PV, WAIT_ONE, WAIT_ALL, EXP, EXP), 0.0),  # the wait is hoisted
        ((QK, PV, WAIT_ONE, EXP, WAIT_ALL, EXP), 0.5),
        ((EXP, EXP, WAIT_ALL, QK, PV, WAIT_ONE), 1.0),  # the loop starts elsewhere
        ((EXP, WAIT_ALL, QK, PV, WAIT_ALL, EXP), 0.0),
        ((QK, PV, WAIT_ALL), 0.0),
        ((QK, WAIT_ALL, "MUFU.TANH R24, R25", PV, EXP, WAIT_ALL), 1.0),
    ],
)
def test_the_share_of_exponentials_beside_products(body: tuple[str, ...], share: float) -> None:
    assert overlap(list(parse(program(*body))[0].code)) == share


@pytest.mark.parametrize(
    "write",
    [
        PACK,
        "@P0 MOV R155, R3",
        "SHFL.BFLY PT, R153, R3, 0x1, 0x1f",
        "LDS.128 R149, [R3]",
        "LDL.64 R151, [R1]",
        "IMAD.WIDE R151, R3, R4, R5",
        "CS2R R151, SRZ",
        "LDSM.16.M88.2 R151, [R3]",
        "HGMMA.64x64x16.F32.BF16 R124, gdesc[UR8], RZ, !UPT",
    ],
)
def test_a_write_to_what_a_product_reads_is_a_race(write: str) -> None:
    assert len(raced(parse(program(QK, PV, WAIT_ONE, write, WAIT_ALL)))) == 1
    assert raced(parse(program(write, QK, PV, WAIT_ONE, WAIT_ALL, write))) == []


@pytest.mark.parametrize(
    "other",
    [
        "FADD R151, R152, R153",
        "MOV R156, R152",
        "LDS.128 R148, [R152]",
        "STS.128 [R152], R152",
        "ISETP.GE.AND P0, PT, R152, R153, PT",
        "FCHK P0, R152, R153",
        "R2UR UR4, R152",
        "BAR.SYNC.DEFER_BLOCKING R152, 0x80",
        "HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR16].tnspB, R88",
        "HGMMA.64x64x16.F32.BF16 R120, gdesc[UR8], RZ, !UPT",
    ],
)
def test_what_only_reads_or_writes_beside_it_is_none(other: str) -> None:
    assert raced(parse(program(PV, other, WAIT_ALL))) == []


def test_a_race_is_seen_across_branches_and_into_the_next_iteration() -> None:
    into_next = program("L1:", PACK, PV, go(1, "@P0"), WAIT_ALL)
    over_branch = program(PV, go(1, "@P0"), WAIT_ALL, "L1:", PACK, WAIT_ALL)
    read_again = program(PV.replace("R152", "R152.reuse"), PACK)
    waited = program(PV, WAIT_ALL, go(1, "@P0"), ADD, "L1:", PACK)
    assert [len(raced(parse(one))) for one in (into_next, over_branch, read_again, waited)] == [1, 1, 1, 0]


def test_a_good_kernel_has_no_faults() -> None:
    assert faults(REPORT, KERNEL, 1) == []
    assert faults(REPORT._replace(spill_bytes=40), KERNEL, 1, spill_bytes=40) == []


@pytest.mark.parametrize(
    ("made", "sass", "sentence"),
    [
        (REPORT._replace(spill_bytes=40), KERNEL, "spills 40 bytes where 0 are known"),
        (
            REPORT._replace(warnings=("(C7511) Potential Performance Loss: wgmma.mma_async ...",)),
            KERNEL,
            "the assembler makes products wait for each other: (C7511) Potential Performance Loss: wgmma.mma_async ...",
        ),
        (REPORT, program(*BODY, "EXIT"), "has 0 loops with products for 1 consumers"),
        (REPORT, KERNEL + "\n" + program("L9:", *BODY, go(9, "@P0")), "has 2 loops with products for 1 consumers"),
        (
            REPORT,
            program("L1:", QK, PV, WAIT_ALL, EXP, PACK, go(1, "@P0")),
            "waits for its products before the exponentials: 0% of them run beside one",
        ),
        (
            REPORT,
            program("L1:", QK, PV, EXP, WAIT_ALL, "LDL.LU R3, [R1+0x8]", go(1, "@P0")),
            "spills in every iteration: LDL.LU R3, [R1+0x8]",
        ),
        (
            REPORT,
            program("L1:", QK, PV, EXP, PACK, WAIT_ALL, go(1, "@P0")),
            "writes what a product may still read: F2FP.BF16.F32.PACK_AB R152, R25, R24",
        ),
    ],
    ids=["spills", "serialised", "no loop", "too many loops", "no overlap", "spills in the loop", "race"],
)
def test_each_fault_is_said(made: Report, sass: str, sentence: str) -> None:
    assert faults(made, sass, 1) == [sentence]


if __name__ == "__main__":
    found = {name: fingerprint(compiled(kernel)[2]) for name, kernel in KERNELS.items()}
    print(json.dumps({"commit": sys.argv[1], "triton": triton.__version__, "kernels": found}, indent=1))
