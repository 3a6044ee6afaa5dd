"""Triton basics: program ids, offsets, masks, ceiling division, broadcasting, device_print.

python learn/02_triton_basics/vec_add.py [--length 10] [--block 4]

Without a GPU it runs in Triton's interpreter, and says so.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

# triton.jit chooses between compiler and interpreter when it decorates, so this stands before the import.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """out[i] = x[i] + y[i], BLOCK elements a program. MASKED=False shows what the mask is for."""
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = (offs < n) | (not MASKED)
    x = tl.load(x_ptr + offs, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + y, mask=mask)


@triton.jit
def table_kernel(rows_ptr, cols_ptr, out_ptr, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[i, j] = rows[i] + cols[j], a tile of BLOCK_M x BLOCK_N a program."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(rows_ptr + offs_m, mask=offs_m < m)
    cols = tl.load(cols_ptr + offs_n, mask=offs_n < n)
    tile = rows[:, None] + cols[None, :]  # [BLOCK_M, 1] + [1, BLOCK_N] is [BLOCK_M, BLOCK_N]
    mask = (offs_m < m)[:, None] & (offs_n < n)[None, :]
    tl.store(out_ptr + offs_m[:, None] * n + offs_n[None, :], tile, mask=mask)


@triton.jit
def print_kernel(BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.device_print("offsets", pid * BLOCK + tl.arange(0, BLOCK))


def add(x: Tensor, y: Tensor, out: Tensor, block: int = 1024, masked: bool = True) -> None:
    """x + y into `out`. `block` is a power of two, as every size of `tl.arange` is."""
    n = x.numel()
    grid = (triton.cdiv(n, block),)
    add_kernel[grid](x, y, out, n, BLOCK=block, MASKED=masked)


def table(rows: Tensor, cols: Tensor, block: int = 16) -> Tensor:
    """Every sum of a row and a column."""
    m, n = rows.numel(), cols.numel()
    out = torch.empty(m, n, device=rows.device)
    grid = (triton.cdiv(m, block), triton.cdiv(n, block))
    table_kernel[grid](rows, cols, out, m, n, BLOCK_M=block, BLOCK_N=block)
    return out


def row(x: Tensor) -> str:
    return " ".join(f"{number:g}" for number in x.tolist())


def show_add(n: int, block: int) -> None:
    programs = triton.cdiv(n, block)
    room = programs * block  # the vectors have neighbours in memory, up to the end of the last program's block
    x, y = torch.arange(1.0, room + 1, device=DEVICE), torch.full((room,), 100.0, device=DEVICE)
    print(f"{n} elements, {block} a program: cdiv({n}, {block}) = {programs} programs")
    for pid in range(programs):
        offs = range(pid * block, pid * block + block)
        print(f"  pid {pid}: offsets {' '.join(map(str, offs))}, mask {' '.join(str(int(i < n)) for i in offs)}")
    for masked in (True, False):
        buffer = torch.full((room,), -1.0, device=DEVICE)
        add(x[:n], y[:n], buffer[:n], block, masked)
        name = "with the mask" if masked else "without it"
        print(f"  {name + ':':14} {row(buffer[:n])} | {row(buffer[n:])}")
    print("  right of the bar is memory of somebody else, who had left -1 there\n")


def show_table() -> None:
    rows, cols = torch.tensor([0.0, 10.0, 20.0], device=DEVICE), torch.arange(5.0, device=DEVICE)
    print("A column of 3 and a row of 5, broadcast into tiles of 2 x 2 by a grid of 2 x 3 programs:")
    for line in table(rows, cols, block=2):
        print(f"  {row(line)}")
    print()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=10, help="elements of the vectors; default 10")
    parser.add_argument("--block", type=int, default=4, help="elements of a program, a power of two; default 4")
    options = parser.parse_args(argv)
    if INTERPRETED:
        checking.require_interpreter()
    where = "in Triton's interpreter, on the CPU" if INTERPRETED else f"on {torch.cuda.get_device_name()}"
    print(f"Kernels run {where}.\n")
    show_add(options.length, options.block)
    show_table()
    print("device_print from 2 programs:", flush=True)
    print_kernel[(2,)](BLOCK=4)
    if not INTERPRETED:
        torch.cuda.synchronize()  # what a GPU prints arrives when somebody waits for it


if __name__ == "__main__":
    main()
