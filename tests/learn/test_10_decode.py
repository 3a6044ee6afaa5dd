from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .outputs import shown

interpreted = pytest.mark.usefixtures("interpreter")


@interpreted
def test_the_program_prints_what_the_text_shows(step: Any) -> None:
    assert step.printed("decode") == shown(step.text, "python learn/10_decode/decode.py")


@interpreted
@pytest.mark.parametrize(("keys", "splits", "heads"), [(1, 1, 2), (5, 8, 2), (70, 3, 6), (128, 4, 2)])
def test_splits_do_not_change_the_answer(step: Any, keys: int, splits: int, heads: int) -> None:
    decode = step.load("decode")
    q, (k, v) = torch.randn(heads, 16), torch.randn(2, keys, 2, 16)
    out = decode.decode(q, k, v, splits, block=16)
    torch.testing.assert_close(out.double(), decode.reference(q, k, v), atol=1e-5, rtol=0)


def test_the_kernels_compile_for_a_gpu(step: Any, compiler: Callable[..., list[Any]]) -> None:
    program, q, k = step.load("decode"), torch.zeros(8, 64), torch.zeros(100, 2, 64)
    made = compiler(lambda: program.decode(q, k, k, 4, 32))
    assert [kernel.metadata.name for kernel in made] == ["split_kernel", "merge_kernel"]


@pytest.mark.gpu
def test_the_program_on_a_gpu(step: Any) -> None:
    printed = step.started("decode")
    assert printed.count("right") == 5 and "interpreter" not in printed


def test_the_numbers_by_hand(step: Any) -> None:
    weight = math.exp(0 - 2)
    assert round((10 + weight * 4) / (1 + weight), 2) == 9.28 and "= 9.28" in step.text


def test_the_solution_passes_and_the_gap_is_named(step: Any) -> None:
    assert step.checked("--solution")[0] == 0
    status, said = step.checked()
    assert status == 1 and "not written yet" in said


def rest_dropped(keys: int, splits: int, block: int) -> list[tuple[int, int]]:
    step = keys // splits // block * block
    return [(split * step, (split + 1) * step) for split in range(splits)]


def in_keys_not_tiles(keys: int, splits: int, block: int) -> list[tuple[int, int]]:
    step = -(-keys // splits)
    return [(min(split * step, keys), min((split + 1) * step, keys)) for split in range(splits)]


def past_the_end(keys: int, splits: int, block: int) -> list[tuple[int, int]]:
    step = -(-(-(-keys // block)) // splits) * block  # noqa: B002
    return [(split * step, (split + 1) * step) for split in range(splits)]


def rest_to_the_last(keys: int, splits: int, block: int) -> list[tuple[int, int]]:
    step = max(1, keys // block // splits) * block
    begins = [min(split * step, keys) for split in range(splits)]
    return list(zip(begins, [*begins[1:], keys], strict=True))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (rest_dropped, "are read by nobody"),
        (in_keys_not_tiles, "in the middle of a tile"),
        (past_the_end, "behind the last key"),
        (rest_to_the_last, "everybody waits for it"),
        (lambda keys, splits, block: [(0, keys)], "one for each program"),
    ],
)
def test_plausible_mistakes_are_found(step: Any, wrong: Any, word: str) -> None:
    assert word in step.complaints(wrong)
