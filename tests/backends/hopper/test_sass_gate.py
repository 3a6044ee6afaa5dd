"""The gate for machine code: what it reads from a few lines, and from a real kernel that races."""

from __future__ import annotations

import os
from collections import Counter

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter; run without TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

import torch
import triton
from sass_gate import (
    Iteration,
    Spills,
    faults,
    fingerprint,
    measure,
    overlap,
    parse,
    product_loops,
    raced,
    shortest,
    tail,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from stream_attention_tools.testing.offline import Report, compiling_for, disassemble, report

# On a few lines


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
MAX, EXP, PACK = "FMNMX R30, R24, R25, !PT", "MUFU.EX2 R24, R25", "F2FP.BF16.F32.PACK_AB R152, R25, R24"
SCALE = "FMUL R88, R88, R3"
ADD, MASK = "FADD R30, R31, R32", "FSEL R24, R24, -INF , P0"
TRY = "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR26+0x30190], R206"
BODY = (QK, PV, WAIT_ONE, MAX, WAIT_ALL, EXP, SCALE, EXP, PACK)
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
        ((QK, PV, WAIT_ONE, MAX, MAX, WAIT_ALL), 1.0),
        ((QK, PV, WAIT_ONE, WAIT_ALL, MAX, MAX), 0.0),  # the wait is hoisted
        ((QK, PV, WAIT_ONE, MAX, WAIT_ALL, MAX), 0.5),
        ((MAX, MAX, WAIT_ALL, QK, PV, WAIT_ONE), 1.0),  # the loop starts elsewhere
        ((MAX, WAIT_ALL, QK, PV, WAIT_ALL, MAX), 0.0),
        ((QK, PV, WAIT_ALL), 0.0),
        ((QK, WAIT_ALL, EXP, PV, MAX, WAIT_ALL), 1.0),
    ],
)
def test_the_share_of_maxima_beside_products(body: tuple[str, ...], share: float) -> None:
    assert overlap(list(parse(program(*body))[0].code)) == share


@pytest.mark.parametrize(
    ("body", "behind"),
    [
        ((QK, PV, WAIT_ONE, MAX, WAIT_ALL, EXP, SCALE, PACK, EXP), 0),
        ((QK, PV, WAIT_ONE, MAX, WAIT_ALL, EXP, EXP, SCALE, PACK), 2),
        ((SCALE, PACK, QK, PV, WAIT_ONE, MAX, WAIT_ALL, EXP), 2),  # the loop starts elsewhere
        ((SCALE, QK, SCALE, PV, WAIT_ONE, SCALE, WAIT_ALL, EXP, PACK), 2),  # beside a product is not behind
        ((QK, PV, WAIT_ALL, SCALE), 0),  # no exponential
    ],
)
def test_what_stands_behind_the_last_exponential(body: tuple[str, ...], behind: int) -> None:
    assert tail(list(parse(program(*body))[0].code)) == behind


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


def test_a_wait_for_all_but_the_newest_frees_what_the_older_read() -> None:
    other = PV.replace("R152", "R160")
    assert raced(parse(program(PV, other, WAIT_ONE, PACK, WAIT_ALL))) == []
    assert len(raced(parse(program(other, PV, WAIT_ONE, PACK, WAIT_ALL)))) == 1
    assert (
        len(raced(parse(program(PV.replace(", gsb0", ""), other, WAIT_ONE, PACK)))) == 1
    )  # one group, still under way
    assert len(raced(parse(program("L1:", PACK, other, PV, WAIT_ONE, go(1, "@P0"), WAIT_ALL)))) == 1


def test_a_race_is_seen_across_branches_and_into_the_next_iteration() -> None:
    into_next = program("L1:", PACK, PV, go(1, "@P0"), WAIT_ALL)
    over_branch = program(PV, go(1, "@P0"), WAIT_ALL, "L1:", PACK, WAIT_ALL)
    read_again = program(PV.replace("R152", "R152.reuse"), PACK)
    waited = program(PV, WAIT_ALL, go(1, "@P0"), ADD, "L1:", PACK)
    assert [len(raced(parse(one))) for one in (into_next, over_branch, read_again, waited)] == [1, 1, 1, 0]


def test_a_good_kernel_has_no_faults() -> None:
    assert faults(REPORT, KERNEL, 1) == []


def test_spills_that_are_known_are_no_faults_until_there_are_more_or_none() -> None:
    spills = program("L1:", QK, PV, MAX, WAIT_ALL, EXP, "LDL R3, [R1]", "STL [R1], R3", go(1, "@P0"))
    made = REPORT._replace(spill_bytes=40)
    assert faults(made, spills, 1, Spills(40, 2)) == faults(made, spills, 1, Spills(48, 3)) == []
    assert faults(made, spills, 1, Spills(36, 2)) == ["spills 40 bytes where 36 are known"]
    assert faults(made, spills, 1, Spills(40, 1)) == [
        "spills 2 times in every iteration where 1 are known: LDL R3, [R1]"
    ]
    assert faults(REPORT, KERNEL, 1, Spills(40)) == ["spills 0 bytes where 40 are known"]


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
            program("L1:", QK, PV, WAIT_ALL, MAX, EXP, PACK, go(1, "@P0")),
            "waits for its products before the maxima: 0% of them run beside one",
        ),
        (
            REPORT,
            program("L1:", QK, PV, MAX, WAIT_ALL, EXP, *[SCALE] * 41, go(1, "@P0")),
            "has 41 multiplications and conversions behind its exponentials, 40 at most",
        ),
        (
            REPORT,
            program("L1:", QK, PV, MAX, WAIT_ALL, EXP, "LDL.LU R3, [R1+0x8]", go(1, "@P0")),
            "spills 1 times in every iteration where 0 are known: LDL.LU R3, [R1+0x8]",
        ),
        (
            REPORT,
            program("L1:", QK, PV, MAX, PACK, WAIT_ALL, EXP, go(1, "@P0")),
            "writes what a product may still read: F2FP.BF16.F32.PACK_AB R152, R25, R24",
        ),
    ],
    ids=["spills", "serialised", "no loop", "too many loops", "no overlap", "a tail", "spills in the loop", "race"],
)
def test_each_fault_is_said(made: Report, sass: str, sentence: str) -> None:
    assert faults(made, sass, 1) == [sentence]


# On a real kernel


@gluon.jit
def _products_kernel(left_ptr, out_ptr, n, OUTSTANDING: gl.constexpr):
    """A sum of products whose first factors are loaded while up to `OUTSTANDING` products still read the last one."""
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    right = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    rows = gl.arange(0, 64, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, 64, gl.SliceLayout(0, TILE))
    offs = rows[:, None] * 64 + columns[None, :]
    left = gl.convert_layout(gl.load(left_ptr + offs), LEFT, assert_trivial=True)
    zero = gl.zeros((64, 64), gl.float32, TILE)
    acc = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(OUTSTANDING, deps=(acc,))
    for i in range(1, n):
        left = gl.convert_layout(gl.load(left_ptr + i * 4096 + offs), LEFT, assert_trivial=True)
        acc = warpgroup_mma(left, right, acc, use_acc=True, is_async=True)
        acc = warpgroup_mma_wait(OUTSTANDING, deps=(acc,))
    gl.store(out_ptr + offs, warpgroup_mma_wait(0, deps=(acc,)))


@pytest.mark.parametrize(
    ("outstanding", "races"),
    [(0, False), (1, True)],
    ids=lambda value: f"{value} by Triton {triton.__version__}",
)
def test_a_kernel_that_does_not_wait_before_it_writes_an_operand_is_seen_to_race(outstanding: int, races: bool) -> None:
    with compiling_for(90) as launched:
        left, out = torch.zeros(8, 64, 64, dtype=torch.bfloat16), torch.zeros(64, 64)
        _products_kernel[(1,)](left, out, 8, outstanding, num_warps=4)
    writes = raced(parse(disassemble(launched[0])))
    assert bool(writes) == races, writes
    assert any(one.name == "LDG" for one in writes) == races
    assert not report(launched[0]).warnings  # the assembler does not say so
