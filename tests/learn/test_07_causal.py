from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .outputs import results, shown

interpreted = pytest.mark.usefixtures("interpreter")


@interpreted
def test_the_program_prints_what_the_text_shows(step: Any) -> None:
    assert step.printed("causal") == shown(step.text, "python learn/07_causal/causal.py")


@interpreted
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (70, 200), (33, 31), (1, 100), (100, 1)])
def test_three_ways_one_answer_and_never_more_tiles(step: Any, queries: int, keys: int) -> None:
    causal = step.load("causal")
    q, k, v = torch.randn(queries, 16), *torch.randn(2, keys, 16)
    counts = []
    for way in causal.WAYS:
        out, read, masked = causal.causal_attention(q, k, v, way, block=32)
        torch.testing.assert_close(out.double(), causal.reference(q, k, v), atol=1e-5, rtol=0)
        counts.append((read, masked))
    everything, skipped, edge = counts
    assert everything[0] >= skipped[0] == edge[0] and skipped[1] >= edge[1]


def test_the_kernels_compile_for_a_gpu(step: Any, compiler: Callable[..., list[Any]]) -> None:
    causal = step.load("causal")
    q = torch.zeros(64, 32)
    made = compiler(lambda: [causal.causal_attention(q, q, q, way, 32) for way in causal.WAYS])
    assert len(made) == 3 and all("cubin" in kernel.asm for kernel in made)


@pytest.mark.gpu
def test_the_program_on_a_gpu(step: Any) -> None:
    printed = step.started("causal")
    assert printed.count("right") == 3 and "interpreter" not in printed


def test_the_text_has_the_counts_and_the_cost_of_a_mask_right(step: Any) -> None:
    assert 128 * 129 // 2 == 8256 and "8,256 of 16,384" in step.text.replace("\n", " ")
    cells = {cell["name"]: cell["providers"] for cell in results("modifiers")["cells"]}
    ratio = cells["mask"]["triton"]["median_ms"] / cells["mask"]["plain triton"]["median_ms"]
    assert f"takes {ratio:.2f} times as long" in " ".join(step.text.split())


def test_the_solution_passes_and_the_gap_is_named(step: Any) -> None:
    assert step.checked("--solution")[0] == 0
    status, said = step.checked()
    assert status == 1 and "not written yet" in said


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def no_window(first: int, last: int, left: int, k_len: int, n: int) -> tuple[int, int, int, int]:
    end = ceil(min(last + 1, k_len), n)
    return 0, 0, min((first + 1) // n, end), end


def by_the_wrong_query(first: int, last: int, left: int, k_len: int, n: int) -> tuple[int, int, int, int]:
    begin, end = max(first - left, 0) // n, ceil(min(last + 1, k_len), n)
    return begin, begin, max(begin, min(last + 1, k_len) // n), end


def past_the_end(first: int, last: int, left: int, k_len: int, n: int) -> tuple[int, int, int, int]:
    begin, end = max(first - left, 0) // n, ceil(last + 1, n)
    whole = min(ceil(max(last - left, 0), n), end)
    return begin, whole, max(whole, (first + 1) // n), end


def all_masked(first: int, last: int, left: int, k_len: int, n: int) -> tuple[int, int, int, int]:
    begin, end = max(first - left, 0) // n, ceil(min(last + 1, k_len), n)
    return begin, begin, begin, end


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (no_window, "and you read it: right, but slow"),
        (by_the_wrong_query, "not seen whole, and you do not mask it"),
        (past_the_end, "and you read it"),
        (all_masked, "and you mask it: right, but slow"),
    ],
)
def test_plausible_mistakes_are_found(step: Any, wrong: Any, word: str) -> None:
    assert word in step.complaints(wrong)
