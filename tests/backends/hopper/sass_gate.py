"""What may be said against the machine code of a Gluon kernel, read from what the disassembler writes.

Hopper's matrix instructions (wgmma, here HGMMA) run beside the warpgroup that issues them, until it waits. What really
runs beside them, and whether nobody touches an operand meanwhile, is decided by the assembler, and no test of results
says so. The maxima of a block should run beside the product P V of the block before. Its exponentials need the unit
for them, and leave room: the rescaling and the conversion of weights should stand between them and not behind, where
this warpgroup has no product running. Either costs 3 to 10 % of the speed; an operand that is written is a race.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import triton
from compile_gate import beyond

from stream_attention_tools.testing.offline import Report

SHARED_BYTES = 227 * 1024
"""Shared memory that a program may use on Hopper."""

OVERLAP = 0.9
"""Share of the maxima that a loop takes while products run, at least."""

TAIL = 40
"""Multiplications and conversions between the last exponential of an iteration and the next product, at most."""


LEAVES = {"BRA", "BRX", "EXIT", "RET"}
"""Instructions after which the next one is not run, unless they have a condition."""


class Instruction(NamedTuple):
    """One line of machine code."""

    guard: str  # "@!P0", or nothing
    opcode: str  # with all its suffixes, such as "MUFU.EX2"
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.guard} {self.opcode} {', '.join(self.operands)}".strip()

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


class Block(NamedTuple):
    """Instructions without a branch or a label between them, and the blocks that may follow."""

    code: tuple[Instruction, ...]
    after: frozenset[int]


class Iteration(NamedTuple):
    """The shortest way once through a loop: nothing is masked, and nothing has to be waited for."""

    instructions: int
    products: int  # HGMMA
    exponentials: int  # MUFU.EX2


class Spills(NamedTuple):
    """What a kernel moves to memory and back because its registers do not suffice."""

    bytes: int = 0  # written and read, in the whole program
    in_loop: int = 0  # instructions for it in an iteration, of the consumer that has most


NO_SPILLS = Spills()


def fingerprint(sass: str) -> str:
    """What tells one program from another: its instructions, without where they lie."""
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", sass, re.MULTILINE)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def ran(stem: str, by: str = "gluon") -> dict[str, Any]:
    """The machine code that the GPU tests or the benchmark of `stem`, such as forward, were run with."""
    folder = Path(__file__).parents[3]
    file = folder / f"benchmarks/results/h200/machine_code_{by}_{stem}.json"
    assert file.exists(), (
        f"{file.relative_to(folder)} is not there. After a run on the GPU, of COMMIT, it is written by "
        "`PYTHONPATH=src:tests/backends:tests/backends/triton:tests/backends/hopper python "
        f"tests/backends/{by}/test_{stem}_compiled.py COMMIT > FILE`."
    )
    found: dict[str, Any] = json.loads(file.read_text())
    return found


class NotRunYet(UserWarning):
    """A kernel compiles to other machine code than what ran on the GPU."""


def warn_if_not_run(sass: str, name: str, its: dict[str, Any]) -> None:
    """Warn if a kernel is not the machine code that ran. Another Triton than the one it ran with says nothing.

    It is no failure: gates check properties, and the fingerprint tells what is to be run on a GPU next."""
    if its["triton"] == triton.__version__ and fingerprint(sass) != its["kernels"][name]:
        warnings.warn(f"{name}: not what ran on the GPU at {its['commit']}; run it there", NotRunYet, stacklevel=2)


def as_file(commit: str, kernels: dict[str, str]) -> str:
    """What `ran` reads: the fingerprints of kernels that were run at a commit."""
    return json.dumps({"commit": commit, "triton": triton.__version__, "kernels": kernels}, indent=1)


def parse(sass: str) -> list[Block]:
    """The blocks of a program. What follows an indirect branch is not known: its targets are blocks that nobody enters.

    Calls come back, so they end no block.
    """
    codes: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            if codes[-1]:
                codes.append([])
            labels[label[1]] = len(codes) - 1
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?)\s*;", line):
            guard, opcode, operands = found.groups()
            split = tuple(operand.strip() for operand in operands.split(",")) if operands else ()
            codes[-1].append(Instruction(guard or "", opcode, split))
            if codes[-1][-1].name in LEAVES:
                codes.append([])
    last = len(codes) - 1
    return [Block(tuple(code), frozenset(_after(code, at, last, labels))) for at, code in enumerate(codes)]


def _after(code: list[Instruction], at: int, last: int, labels: dict[str, int]) -> Iterator[int]:
    """Blocks that may follow number `at` of those up to `last`."""
    end = code[-1] if code else Instruction("", "NOP", ())
    if end.name == "BRA":
        yield labels[end.operands[-1].strip("`()")]
    conditional = end.guard or (end.name == "BRA" and len(end.operands) > 1)  # BRA P2, `(.L_x_1)
    if at < last and (conditional or end.name not in LEAVES):
        yield at + 1


def product_loops(blocks: list[Block]) -> list[frozenset[int]]:
    """The innermost loops that hold matrix instructions, each as the numbers of its blocks."""
    return _innermost(blocks, frozenset(range(len(blocks))))


def _innermost(blocks: list[Block], among: frozenset[int]) -> list[frozenset[int]]:
    found = []
    for cycle in _cycles(blocks, among):
        if any(_is_product(one) for number in cycle for one in blocks[number].code):
            # Without the blocks by which it is entered, only the loops inside it are still closed.
            found += _innermost(blocks, cycle - _entries(blocks, cycle)) or [cycle]
    return found


def _entries(blocks: list[Block], loop: frozenset[int]) -> frozenset[int]:
    """Blocks of a loop that are reached from outside it; the first where none is."""
    outside = {after for number, block in enumerate(blocks) if number not in loop for after in block.after}
    return loop & outside or frozenset([min(loop)])


def _cycles(blocks: list[Block], among: frozenset[int]) -> list[frozenset[int]]:
    """The largest sets of blocks that all reach each other, in the order of the program."""
    reach = {number: _reached(blocks, number, among) for number in among}
    sets = {frozenset(other for other in reach[number] if number in reach[other]) for number in among}
    return sorted((one for one in sets if one), key=min)


def _reached(blocks: list[Block], start: int, among: frozenset[int]) -> set[int]:
    """Blocks that can be run after `start`, itself only if it comes again."""
    seen: set[int] = set()
    ahead = [start]
    while ahead:
        new = (blocks[ahead.pop()].after & among) - seen
        seen |= new
        ahead += new
    return seen


def shortest(blocks: list[Block], loop: frozenset[int]) -> list[Instruction]:
    """What a loop runs once round at least, in the order in which it runs it."""
    start = min(_entries(blocks, loop))
    ahead: list[tuple[int, tuple[int, ...]]] = [(0, (start,))]
    done: set[int] = set()
    while ahead:
        length, way = heappop(ahead)
        if len(way) > 1 and way[-1] == start:
            return [one for number in way[:-1] for one in blocks[number].code]
        if way[-1] in done and len(way) > 1:
            continue
        done.add(way[-1])
        length += len(blocks[way[-1]].code)
        for after in blocks[way[-1]].after & loop:
            heappush(ahead, (length, (*way, after)))
    raise ValueError(f"loop: expected blocks that reach each other; got {sorted(loop)}")


def measure(code: list[Instruction]) -> Iteration:
    counts = Counter(_kind(one) for one in code)
    return Iteration(len(code), counts["product"], counts["exponential"])


def overlap(code: list[Instruction]) -> float:
    """Share of the maxima of an iteration that are taken while a product runs. It may start anywhere in it."""
    running, beside = False, 0
    for repeated in (False, True):
        for kind in map(_kind, code):
            if kind in ("product", "wait for all"):
                running = kind == "product"
            beside += repeated and running and kind == "maximum"
    return beside / max(1, sum(_kind(one) == "maximum" for one in code))


def tail(code: list[Instruction]) -> int:
    """Multiplications and conversions behind the last exponential of an iteration, before the next product."""
    count = longest = 0
    for kind in map(_kind, code * 2):
        if kind == "exponential":
            count = 0
        elif kind == "product":
            longest, count = max(longest, count), -len(code)  # until the next exponential
        count += kind == "arithmetic"
    return longest


def raced(blocks: list[Block]) -> list[Instruction]:
    """Instructions that write a register which a product may still be reading, whatever way the program took there."""
    reading: list[_Reading] = [()] * len(blocks)
    found: dict[int, list[Instruction]] = {}
    ahead = set(range(len(blocks)))
    while ahead:
        number = ahead.pop()
        groups, found[number] = reading[number], []
        for one in blocks[number].code:
            if frozenset().union(*groups) & _written(one):
                found[number].append(one)
            groups = _after_instruction(groups, one)
        for after in blocks[number].after:
            joined = tuple(x | y for x, y in zip_longest(reading[after], groups, fillvalue=frozenset()))
            if joined != reading[after]:
                reading[after] = joined
                ahead.add(after)
    return [one for number in sorted(found) for one in found[number]]


_Reading = tuple[frozenset[int], ...]
"""Registers that products read: those of the group that is being issued, of the newest that was, and so on."""

GROUPS = 6
"""Groups that are told apart; more than a loop has under way."""


def _after_instruction(groups: _Reading, one: Instruction) -> _Reading:
    if _is_product(one):
        issued = (groups[0] if groups else frozenset()) | _operand(one)
        groups = (issued, *groups[1:])
        if "gsb0" in one.operands:  # the group is complete
            groups = (frozenset(), *groups)
            groups = (*groups[:GROUPS], frozenset().union(*groups[GROUPS:]))
    elif (left := _left_by_wait(one)) is not None:
        groups = groups[: left + 1]
    return groups


def _left_by_wait(one: Instruction) -> int | None:
    """How many of the newest groups a wait leaves under way; None where it is none."""
    return int(one.operands[-1], 16) if one.opcode.startswith("WARPGROUP.DEPBAR") else None


def faults(made: Report, sass: str, consumers: int, known: Spills = NO_SPILLS, tail_limit: int = TAIL) -> list[str]:
    """What is wrong with a forward of so many consumer warpgroups, in sentences."""
    blocks = parse(sass)
    found = faults_of_any(made, blocks, consumers, known)
    for code in (shortest(blocks, loop) for loop in product_loops(blocks)):
        if (share := overlap(code)) < OVERLAP:
            found.append(f"waits for its products before the maxima: {share:.0%} of them run beside one")
        if (behind := tail(code)) > tail_limit:
            found.append(f"has {behind} multiplications and conversions behind its exponentials, {tail_limit} at most")
    return found


def faults_of_any(made: Report, blocks: list[Block], consumers: int, known: Spills = NO_SPILLS) -> list[str]:
    """What is wrong with a kernel whose consumer warpgroups have one loop with products each. Spills up to those
    `known` are not; a line that is there for a kernel without any is."""
    loops = product_loops(blocks)
    found = [f"the assembler makes products wait for each other: {one}" for one in made.warnings if "(C75" in one]
    if beyond(made.spill_bytes, known.bytes):
        found.append(f"spills {made.spill_bytes} bytes where {known.bytes} are known")
    if len(loops) != consumers:
        found.append(f"has {len(loops)} loops with products for {consumers} consumers")
    for code in (shortest(blocks, loop) for loop in loops):
        spilt = [one for one in code if one.name in ("LDL", "STL")]
        if len(spilt) > known.in_loop:
            found.append(f"spills {len(spilt)} times in every iteration where {known.in_loop} are known: {spilt[0]}")
    return found + [f"writes what a product may still read: {one}" for one in raced(blocks)]


def _is_product(one: Instruction) -> bool:
    return one.name in ("HGMMA", "QGMMA")


def _kind(one: Instruction) -> str:
    if _is_product(one):
        return "product"
    if _left_by_wait(one) == 0:
        return "wait for all"
    if one.opcode == "MUFU.EX2":
        return "exponential"
    return {"FMNMX": "maximum", "FMUL": "arithmetic", "F2FP": "arithmetic"}.get(one.name, "")


def _registers(operand: str, count: int) -> frozenset[int]:
    """`count` registers from the one that is named; none of RZ, predicates, addresses and uniform registers."""
    first = re.fullmatch(r"R(\d+)(\.reuse)?", operand)
    return frozenset(range(int(first[1]), int(first[1]) + count)) if first else frozenset()


def _operand(one: Instruction) -> frozenset[int]:
    """Registers that a product reads as its first factor: 64 rows of 32 bytes, in 128 threads."""
    return _registers(one.operands[1], 4) if _is_product(one) else frozenset()


READS_FIRST = {"BRX", "JMX", "RET", "CALL", "BAR", "WARPSYNC", "NANOSLEEP", "FCHK"}
"""Instructions that write no register, although one is named first, or after a predicate."""


def _written(one: Instruction) -> frozenset[int]:
    if one.name in READS_FIRST or not one.operands:
        return frozenset()
    # A predicate written beside the result stands before it (SHFL PT, R4, ...).
    target = one.operands[1 if re.fullmatch(r"P[0-9T]", one.operands[0]) and len(one.operands) > 1 else 0]
    return _registers(target, _width(one))


def _width(one: Instruction) -> int:
    """Registers that the result takes."""
    if _is_product(one):
        columns = int(one.opcode.split(".")[1].split("x")[1])
        return columns // 2 if ".F32" in one.opcode else columns // 4
    if one.name in ("LDG", "LDS", "LDL", "LDC", "LD", "ATOMG", "ATOMS"):
        return 4 if ".128" in one.opcode else 2 if ".64" in one.opcode else 1
    if one.name == "LDSM":
        return int(one.opcode[-1])
    return 2 if ".WIDE" in one.opcode or one.opcode == "CS2R" else 1
