"""Step 6: the forward kernel, in the interpreter and compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stream_attention

interpreted = pytest.mark.usefixtures("interpreter")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # the interpreter's `range(tensor)`
    "ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning",  # wrong solutions that read padding
)
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/h200/forward.json"


# The program


@interpreted
def test_the_text_shows_what_a_reader_sees(step: Any) -> None:
    assert step.started("flash") == step.outputs[0]


@interpreted
@pytest.mark.parametrize(
    ("Tq", "Tk", "blocks"),
    [(1, 1, (16, 16)), (16, 32, (16, 16)), (33, 20, (16, 32)), (20, 33, (32, 16))],
    ids=["one of each", "whole tiles", "keys end in a tile", "queries end in a tile"],
)
def test_it_computes_attention(step: Any, Tq: int, Tk: int, blocks: tuple[int, int]) -> None:
    program = step.load("flash")
    q, k, v = torch.randn(2, Tq, 3, 16), *torch.randn(2, 2, Tk, 3, 16)
    out, lse = program.flash_attention(q, k, v, *blocks)
    expected, expected_lse = stream_attention.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@interpreted
def test_large_scores_and_strided_inputs(step: Any) -> None:
    program, generator = step.load("flash"), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 40, 16, generator=generator).transpose(2, 3)  # [B, T, H, D], heads first in memory
    out, lse = program.flash_attention(10 * q, 10 * k, v, 16, 16)
    exact_out, exact_lse = program.standard_attention(10 * q, 10 * k, v)
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-3)
    assert lse.max() > 100  # past what exp of fp32 can do


@interpreted
def test_the_error_is_said_in_powers_of_ten(step: Any) -> None:
    error, zero = step.load("flash").error, torch.zeros(1, dtype=torch.float64)
    assert [error(zero + x, zero) for x in (2e-7, 2e-4, 3.0)] == ["below 1e-6", "below 1e-3", "3"]


def test_both_products_use_the_tensor_cores(step: Any, compiler: Callable[..., list[Any]]) -> None:
    program = step.load("flash")
    q = torch.zeros(1, 128, 2, 128, dtype=torch.bfloat16)
    (kernel,) = compiler(lambda: program.flash_attention(q, q, q, 128, 64))
    shapes = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", kernel.asm["ptx"]))
    assert shapes == {"m64n64k16", "m64n128k16"}  # 64 keys wide, and 128 numbers of a value


def test_the_solution_compiles_for_a_gpu(step: Any, compiler: Callable[..., list[Any]]) -> None:
    q, lengths = torch.zeros(2, 20, 2, 16), torch.zeros(2, dtype=torch.int32)
    (kernel,) = compiler(lambda: step.load("solution").padded_attention(q, q, q, lengths))
    assert "cubin" in kernel.asm


@pytest.mark.gpu
def test_the_program_and_the_solution_on_a_gpu(step: Any) -> None:
    printed = step.started("flash")
    assert printed.startswith(f"The kernel runs on {torch.cuda.get_device_name()}.\n")
    assert re.search(r"^fp32   below 1e-[5-9], below 1e-[5-9], ", printed, re.MULTILINE)
    assert re.search(r"^fp16   below 1e-[3-9], below 1e-[5-9], ", printed, re.MULTILINE)
    assert len(re.findall(r"^ +\d+ +[\d.]+ +[\d.]+$", printed, re.MULTILINE)) == 3
    assert step.started("check", "--solution") == "solution.py: padded_attention is right.\n"


def test_the_figures_of_the_text_are_those_of_the_file(step: Any) -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", step.text, re.MULTILINE)
    cells = {cell["name"]: cell for cell in json.loads(RESULTS.read_text())["cells"]}
    assert len(rows) == 3
    for length, *shown in rows:
        cell = cells[f"d128 full {length}"]
        assert cell["problem"]["Hq"] == 16 and cell["problem"]["B"] * int(length) == 16384
        assert shown == [f"{cell['providers'][name]['median_ms']:.3f}" for name in ("triton", "sdpa flash")]


# The exercise


@interpreted
def test_the_checker_accepts_the_solution_and_says_what_is_missing(step: Any) -> None:
    assert step.checked("--solution") == (0, "solution.py: padded_attention is right.\n")
    status, said = step.checked()
    assert status == 1 and "The length is needed by the loop, its masks and the division" in said


@interpreted
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("tl.load(lengths_ptr + batch)", "k_len"),
            "inside a tile: the sequence of 5 keys has NaN in its result. Padding",
        ),
        (("tl.load(lengths_ptr + batch)", "tl.load(lengths_ptr)"), "one key: the sequence of 40 keys is off by"),
        (('        scores = tl.where(mask_n[None, :], scores, float("-inf"))\n', ""), "of 5 keys is off by"),
        (("tl.where(row_sum == 0, 1.0, row_sum)", "row_sum"), "no key: the sequence of 0 keys has NaN in its result"),
        (
            ("* stride_vt + offs_d[None, :], mask=mask_n[:, None], other=0.0)", "* stride_vt + offs_d[None, :])"),
            "0 * NaN",
        ),
    ],
    ids=["lengths not used", "one length for all", "padding has a score of 0", "0 / 0", "values not masked"],
)
def test_the_checker_says_what_is_wrong(step: Any, change: tuple[str, str], words: str) -> None:
    assert words in step.complaints(step.mutant(change).padded_attention)
