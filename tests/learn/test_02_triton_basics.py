"""Step 2: the first Triton kernels, in the interpreter and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

interpreted = pytest.mark.usefixtures("interpreter")


# The program


@interpreted
def test_the_text_shows_what_a_reader_sees(step: Any) -> None:
    assert step.started("vec_add") == step.outputs[0]


@interpreted
@pytest.mark.parametrize(("length", "block", "programs"), [(1, 4, 1), (8, 4, 2), (17, 8, 3)])
def test_the_mask_is_what_keeps_the_end(step: Any, length: int, block: int, programs: int) -> None:
    printed = step.printed("vec_add", "--length", str(length), "--block", str(block))
    assert f"cdiv({length}, {block}) = {programs} programs" in printed
    (masked,) = [line for line in printed.splitlines() if "with the mask:" in line]
    (unmasked,) = [line for line in printed.splitlines() if "without it:" in line]
    right = " ".join(str(101 + i) for i in range(length))
    assert masked.split(":")[1].split("|")[0].strip() == right == unmasked.split(":")[1].split("|")[0].strip()
    assert set(masked.split("|")[1].split()) <= {"-1"} and "-1" not in unmasked.split("|")[1].split()


@interpreted
def test_it_adds_and_broadcasts(step: Any) -> None:
    program = step.load("vec_add")
    x, y, out = torch.randn(100), torch.randn(100), torch.empty(100)
    program.add(x, y, out, block=16)
    assert torch.equal(out, x + y)
    rows, cols = torch.randn(19), torch.randn(5)
    assert torch.equal(program.table(rows, cols, block=4), rows[:, None] + cols[None, :])


def test_the_kernels_compile_for_a_gpu(step: Any, compiler: Callable[..., list[Any]]) -> None:
    program, solution = step.load("vec_add"), step.load("solution")
    x = torch.zeros(100)

    def launches() -> None:
        program.add(x, x, x)
        program.add(x, x, x, masked=False)
        program.table(x, x)
        program.print_kernel[(2,)](BLOCK=4)
        solution.scale_rows(torch.zeros(9, 21), x, torch.zeros(9, 21))

    made = compiler(launches)
    assert [kernel.metadata.target.arch for kernel in made] == [90] * 5
    assert all("cubin" in kernel.asm for kernel in made)


@pytest.mark.gpu
def test_the_program_and_the_solution_on_a_gpu(step: Any) -> None:
    printed = step.started("vec_add")
    assert printed.startswith(f"Kernels run on {torch.cuda.get_device_name()}.\n")
    on_cpu, on_gpu = (text.partition("\n")[2].partition("device_print")[0] for text in (step.outputs[0], printed))
    assert on_gpu == on_cpu and printed.count("offsets") >= 3 + 8  # device_print: a line for each of 8 elements
    assert step.started("check", "--solution") == "solution.py: scale_rows is right.\n"


# The exercise


@interpreted
def test_the_checker_accepts_the_solution_and_says_what_is_missing(step: Any) -> None:
    assert step.checked("--solution") == (0, "solution.py: scale_rows is right.\n")
    status, said = step.checked()
    assert status == 1 and "Write the kernel, choose the grid" in said


@interpreted
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("& (offs_n < n)[None, :]", "& (offs_n < n + 99)[None, :]", "outside the matrix were written over"),
        ("(offs_m < m)[:, None] &", "(offs_m < m + 99)[:, None] &", "outside the matrix were written over"),
        ("triton.cdiv(n, 8)", "n // 8", "were not written"),
        ("offs_m[:, None] * stride_x", "offs_m[:, None] * n", "Which row's stride"),
        ("x * s[:, None]", "x * tl.sum(s, 0) / BLOCK_M", "which row's factor"),
    ],
    ids=["no mask of columns", "no mask of rows", "floor division", "length taken for stride", "one factor for all"],
)
def test_the_checker_says_what_is_wrong(step: Any, old: str, new: str, words: str) -> None:
    assert words in step.complaints(step.mutant((old, new)).scale_rows)
