from __future__ import annotations

import re
from typing import Any

import pytest

from .outputs import shown

triton = pytest.importorskip("triton")


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="the text shows what Triton 3.6 makes")
def test_the_program_prints_what_the_text_shows(step: Any) -> None:
    assert step.printed("tuning") == shown(step.text, "python learn/09_tuning/tuning.py")


def test_the_tiles_are_among_those_that_were_measured(step: Any) -> None:
    tuning = step.load("tuning")
    speeds = tuning.sweep(4096)
    assert {tuple(tuning.config_of(name)[:4]) for name in tuning.TILES} <= speeds.keys()
    assert len(speeds) == 24
    assert f"{min(speeds.values()):.0f} to {max(speeds.values()):.0f} TFLOP/s" in step.text


def test_shared_memory_by_arithmetic_is_what_the_page_shows_of_the_compiler(step: Any) -> None:
    tuning = step.load("tuning")
    for name in tuning.TILES:
        (row,) = re.findall(rf"^{name} .*?(\d+) KiB", step.text, re.MULTILINE)
        assert tuning.shared_bytes(tuning.config_of(name)) == int(row) * 1024


def test_the_solution_passes_and_the_gap_is_named(step: Any) -> None:
    assert step.checked("--solution")[0] == 0
    status, said = step.checked()
    assert status == 1 and "not written yet" in said


def not_rounded(registers: int, warps: int, shared_bytes: int) -> int:
    return min(65536 // (registers * 32 * warps), 228 * 1024 // (shared_bytes + 1024), 64 // warps, 32)


def nothing_for_the_system(registers: int, warps: int, shared_bytes: int) -> int:
    of_a_warp = -(-registers // 8) * 8 * 32
    return min(65536 // (of_a_warp * warps), 228 * 1024 // max(shared_bytes, 1), 64 // warps, 32)


def registers_alone(registers: int, warps: int, shared_bytes: int) -> int:
    return 65536 // (-(-registers // 8) * 8 * 32 * warps)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (not_rounded, "170 registers are handed out as 176"),
        (nothing_for_the_system, "the system takes 1 KiB of each"),
        (registers_alone, "32 programs are the most there may be"),
    ],
)
def test_plausible_mistakes_are_found(step: Any, wrong: Any, word: str) -> None:
    assert word in step.complaints(wrong)
