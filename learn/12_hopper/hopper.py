"""Compile the kernel of flash_gluon.py for Hopper, without a GPU, and read its machine code."""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import triton
from flash_gluon import ORDERS, attention, launch

from stream_attention_tools.testing.offline import Report, compiling_for, report

WORTH_READING = {
    "UTMALDG": "the producer asks the TMA unit for a whole tile: one instruction, no addresses in registers",
    "SYNCS.ARRIVE.TRANS64 ": "it announced how many bytes will land (expect), so that `full` can count them",
    "SYNCS.PHASECHK": "wait at an mbarrier: has its phase turned? If not, a short loop asks again",
    "SYNCS.ARRIVE.TRANS64.A1T0": "the consumer is done with a slot: one arrival at `empty`",
    "USETMAXREG.DEALLOC": "the producer's warps give registers back: 0x18 = 24 stay",
    "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8": "the consumer's warps take them: 0xe8 = 232",
    "WARPGROUP.ARRIVE": "four warps agree that their registers are ready to be multiplied",
    "HGMMA.64x64x16.F32.BF16 R[0-9]+, gdesc": "wgmma, Q K: [64, 16] times [16, 64], both from shared memory (gdesc)",
    "HGMMA.64x64x16.F32.BF16 R[0-9]+, R": "wgmma, P V: P comes from registers, where the softmax left it",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1": "wait until at most 1 group of products is still running",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0": "wait until none is",
    "MUFU.EX2": "2^x, on a unit that does 16 a clock: 64 x 64 of them keep it busy for 256 clocks",
}
EVENTS = {"HGMMA": "product", "WARPGROUP.DEPBAR": "wait", "MUFU.EX2": "exp2", "SYNCS.PHASECHK": "tile?"}


def compiled(order: str) -> Any:
    """The kernel as Triton makes it for compute capability 9.0."""
    rows = torch.zeros(256, 64, dtype=torch.bfloat16)
    with compiling_for(90) as kernels:
        launch(rows, rows, rows, torch.empty_like(rows), order)
    return kernels[0]


def machine_code(kernel: Any) -> list[str]:
    """Its instructions and labels, in order, as the disassembler writes them (SASS)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "-c", "-ndf", cubin], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(?:(\.L_x_\d+:)|\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;)", text, re.MULTILINE)
    return [label or " ".join(code.split()) for label, code in found]


def main_loop(code: list[str]) -> list[str]:
    """The shortest loop with products in it: from a label to the conditional branch back to it."""
    loops = []
    for end, line in enumerate(code):
        branch = re.fullmatch(r"@!?U?P\d BRA `\((\.L_x_\d+)\)", line)
        if branch and f"{branch[1]}:" in code[:end]:
            body = code[code.index(f"{branch[1]}:") + 1 : end + 1]
            if any("HGMMA" in one for one in body):
                loops.append(body)
    return min(loops, key=len)


def events(loop: list[str]) -> list[str]:
    """What happens in a loop, equal neighbours counted: such as ["product x4", "wait 0", "exp2 x34"]."""

    def named(loop: list[str]) -> Iterator[str]:
        for line in loop:
            for opcode, name in EVENTS.items():
                if opcode in line:
                    yield f"wait {line[-1]}" if name == "wait" else name

    counted = [(name, len(list(times))) for name, times in groupby(named(loop))]
    return [name if times == 1 else f"{name} x{times}" for name, times in counted]


def print_cost(found: Report) -> None:
    print(f"consumer + producer: {found.registers} registers a thread on average, {found.spill_bytes} bytes spilled")
    print(f"shared memory: {found.shared_bytes} bytes = 7 tiles of 8 KiB (Q, 3 of K, 3 of V) and the barriers")


def print_lines(code: list[str]) -> None:
    for pattern, meaning in WORTH_READING.items():
        line = next((line for line in code if re.search(pattern, line)), None)
        if line is not None:
            print(f"  {line}\n      {meaning}")


def run_here() -> None:
    """On a Hopper GPU, compare each order with fp64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    exact = torch.softmax(q.double() @ k.double().T / 8, dim=-1) @ v.double()
    for order in ORDERS:
        error = (attention(q, k, v, order).double() - exact).abs().max().item()
        print(f"ran here, {order}: {'right' if error < 0.01 else 'WRONG'}, largest error {error:.1e} against fp64")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="print the whole main loop of the pinned order")
    flags = parser.parse_args(argv)
    kernels = {order: compiled(order) for order in ORDERS}
    print_cost(report(kernels["pinned"]))
    code = machine_code(kernels["pinned"])
    if flags.all:
        print("\n".join(main_loop(code)))
        return
    print("\nLines worth reading, of the pinned order:")
    print_lines(code)
    print("\nOne trip round the loop, in the order of the machine code:")
    for order, kernel in kernels.items():
        print(f"  {order:9}  {' > '.join(events(main_loop(machine_code(kernel))))}")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        run_here()


if __name__ == "__main__":
    main()
