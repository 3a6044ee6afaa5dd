"""Step 5: attention in blocks, its bytes and its memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

# The program


def test_the_text_shows_what_the_program_prints(step: Any) -> None:
    printed, shown = step.printed("blocked"), step.outputs[0]
    # The peaks are measured: a tenth of a MB may be the interpreter's.
    pattern = r"^ +(\d+) \| +(\S+) +(\S+) +\| +(\S+) +(\S+) +\| (below 1e-5)$"
    rows, rows_shown = (re.findall(pattern, text, re.MULTILINE) for text in (printed, shown))
    assert len(rows) == 4 and [(*row[:3], row[5]) for row in rows] == [(*row[:3], row[5]) for row in rows_shown]
    for row, as_shown in zip(rows, rows_shown, strict=True):
        np.testing.assert_allclose([float(x) for x in row[3:5]], [float(x) for x in as_shown[3:5]], atol=0.15)
    assert printed.splitlines()[:3] == shown.splitlines()[:3]


@pytest.mark.parametrize(("n", "block_q"), [(256, 128), (256, 16), (200, 64)])
def test_the_bytes_are_those_of_the_formula(step: Any, n: int, block_q: int) -> None:
    program, dim = step.load("blocked"), 32
    q, k, v = np.random.default_rng(0).standard_normal((3, n, dim), dtype=np.float32)
    out, standard_bytes, _ = program.measured(program.standard_attention, q, k, v)
    blocked, blocked_bytes, _ = program.measured(program.blocked_attention, q, k, v, block_q=block_q, block_k=32)
    assert standard_bytes == 4 * (4 * n * n + 4 * n * dim)
    assert blocked_bytes == 4 * (2 * n * dim + -(-n // block_q) * 2 * n * dim)
    tensors: list[Any] = [torch.from_numpy(x)[None] for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*tensors)[0]
    for result in (out, blocked):
        torch.testing.assert_close(torch.from_numpy(result), exact)


def test_small_blocks_move_more_than_the_standard_way(step: Any) -> None:
    row = re.compile(r"^ +1024 \| +(\S+) +(\S+)", re.MULTILINE)
    small, large = (step.printed("blocked", "--lengths", "1024", "--block-q", size) for size in ("16", "128"))
    assert row.findall(small) == [("17.83", "34.08")] and row.findall(large) == [("17.83", "4.72")]


def test_memory_grows_with_the_length_alone(step: Any) -> None:
    program = step.load("blocked")
    peaks = []
    for n in (512, 1024):
        q, k, v = np.zeros((3, n, 16), dtype=np.float32)
        peaks.append(
            [program.measured(way, q, k, v)[2] for way in (program.standard_attention, program.blocked_attention)]
        )
    (standard, blocked), (standard_twice, blocked_twice) = peaks
    assert standard_twice > 3.8 * standard and blocked_twice < 1.5 * blocked < 0.1 * standard_twice


# The exercise


def test_the_checker_accepts_the_solution_and_says_what_is_missing(step: Any) -> None:
    assert step.checked("--solution") == (0, "solution.py: blocked_attention is right.\n")
    status, said = step.checked()
    assert status == 1 and "Take k[keys] and v[keys] into row_max, row_sum and acc" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("acc * rescale + weights", "acc + weights"), "two blocks of keys: out is off by"),
        (("row_sum * rescale + weights", "row_sum + weights"), "two blocks of keys: lse is off by"),
        (("np.maximum(row_max, scores.max(1, keepdims=True))", "scores.max(1, keepdims=True)"), "large scores: "),
        ((".T * scale", ".T"), "one block: out is off by"),
        (("np.exp(scores - new_max)", "np.exp(scores)"), "large scores: there is NaN in out. Subtract the running"),
        (("row_max = new_max", "row_max = scores.max(1, keepdims=True)"), "two blocks of keys: "),
        (
            ("        q_tile = q[start", "        everything = q @ k.T + 0\n        q_tile = q[start"),
            "memory: 512 queries",
        ),
    ],
    ids=["acc not rescaled", "sum not rescaled", "block's max", "no scale", "no max", "old max lost", "whole matrix"],
)
def test_the_checker_says_what_is_wrong(step: Any, change: tuple[str, str], words: str) -> None:
    assert words in step.complaints(step.mutant(change).blocked_attention)
