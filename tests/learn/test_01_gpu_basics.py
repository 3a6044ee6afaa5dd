"""Step 1: the simulated grid, and the CUDA programs: compiled by nvcc where it is, run on a GPU where one is, and on
the threads of a CPU everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

SHIM = Path(__file__).with_name("cuda_on_threads.h")
PROGRAMS = ("vec_add", "matrix_add_mul")


def done(*command: str | Path) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


# The program


def test_the_text_shows_what_the_program_prints(step: Any) -> None:
    assert step.printed("grid") == step.outputs[0]


def test_every_element_has_one_thread_whatever_the_sizes(step: Any) -> None:
    for length, threads, blocks in ((1, 4, 1), (8, 4, 2), (9, 4, 3), (33, 32, 2)):
        printed = step.printed("grid", "--length", str(length), "--threads", str(threads), "--size", "5")
        assert f"{blocks} blocks, {blocks * threads - length} threads idle" in printed
        assert printed.count("all right: True") == 3
        listed = re.findall(r"block \d+: elements (.*)", printed)
        assert " ".join(listed).replace("-", "").split() == [str(i) for i in range(length)]


def test_tiles_divide_the_loads_by_their_width(step: Any) -> None:
    plain, tiled = re.findall(r"(\d+) loads", step.printed("grid", "--size", "16"))
    assert int(plain) == 2 * 16**3 == 8 * int(tiled)


def test_a_barrier_that_is_missing_shows(step: Any) -> None:
    grid = step.load("grid")
    values, out = [1.0] * 64, [0.0] * 64

    def without_barriers(*arguments: Any) -> Any:
        for _ in grid.mul_tiled(*arguments):
            pass
        yield from ()

    with pytest.raises(KeyError):  # the first thread reads what the second has not written yet
        grid.launch(without_barriers, grid.Dim(1), grid.Dim(8, 8), grid.Array(values), grid.Array(values), out, 8)


# The exercise


def test_the_checker_accepts_the_solution_and_says_what_is_missing(step: Any) -> None:
    assert step.checked("--solution") == (0, "solution.py: element_of is right.\n")
    status, said = step.checked()
    assert status == 1 and "not written yet. Find the thread's column and row first" in said


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("row >= rows or col >= cols", "row * cols + col >= rows * cols", "is added 2 times"),
        ("if row >= rows or col >= cols:\n        return None\n    ", "", "is outside: the matrix has 189"),
        ("block[1] * dim[1]", "block[1] * dim[0]", "nobody adds element"),
        ("row * cols + col\n", "col * rows + row\n", "lines of 128 bytes where 1 has it all"),
    ],
    ids=["only the end is guarded", "no guard", "height taken for width", "column by column"],
)
def test_the_checker_says_what_is_wrong(step: Any, old: str, new: str, words: str) -> None:
    assert words in step.complaints(step.mutant((old, new)).element_of)


# CUDA


def built_on_threads(step: Any, name: str, folder: Path) -> Path:
    """A CUDA program for the CPU, a thread for each thread of a block."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: g++ is not here")
    source = (step.folder / f"{name}.cu").read_text()
    source, launches = re.subn(r"(\w+)<<<(.*?)>>>\((.*)\);", r"launch(\2, [&] { \1(\3); });", source)
    assert launches == {"vec_add": 1, "matrix_add_mul": 3}[name]
    (folder / f"{name}.cpp").write_text(source)
    shutil.copy(SHIM, folder / "cuda_runtime.h")
    flags = ("-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-I", folder, "-I", step.folder)
    done("g++", *flags, "-o", folder / name, folder / f"{name}.cpp")
    return folder / name


def test_vec_add_on_a_cpu(step: Any, tmp_path: Path) -> None:
    program = built_on_threads(step, "vec_add", tmp_path)
    for length, blocks, idle in ((1, 1, 255), (512, 2, 0), (1000, 4, 24)):
        expected = f"{length} elements, {blocks} blocks of 256 threads, {idle} threads idle, 0 wrong\n"
        assert done(program, str(length)) == expected
    refused = subprocess.run([program, "0"], capture_output=True, text=True)
    assert refused.returncode == 2 and "expected 1 to 536870912; got 0" in refused.stderr


def test_matrices_on_a_cpu(step: Any, tmp_path: Path) -> None:
    printed = done(built_on_threads(step, "matrix_add_mul", tmp_path))
    assert printed == step.outputs[1].partition("\n")[2]


def test_one_command_compiles_both_without_a_warning(step: Any, tmp_path: Path) -> None:
    for tool in ("nvcc", "make"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs nvcc and make: {tool} is not here")
    done("make", "-C", step.folder, f"OUT={tmp_path}")
    for name in PROGRAMS:
        assert os.access(tmp_path / name, os.X_OK)


@pytest.mark.gpu
def test_the_programs_on_a_gpu(step: Any, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc, which is not here")
    done("make", "-C", step.folder, f"OUT={tmp_path}")
    assert done(tmp_path / "vec_add") + done(tmp_path / "matrix_add_mul") == step.outputs[1]
