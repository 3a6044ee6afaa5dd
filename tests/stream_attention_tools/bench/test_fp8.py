"""The suite of FP8 on stand-ins for its cells, and that the table of docs/numerics.md is what is computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention_tools.bench import providers as providers_
from stream_attention_tools.bench import results as results_
from stream_attention_tools.bench.fp8_error import errors, four_channels, normal, one_channel, table, unequal_heads
from stream_attention_tools.bench.providers.fp8 import Fp8, Fp8Kernel
from stream_attention_tools.bench.run import measure, wrong
from stream_attention_tools.bench.suites import SUITES, Cell
from stream_attention_tools.testing.inputs import Case, Tensors, packed

ROOT = Path(__file__).resolve().parents[3]
CASE = Case(B=2, Tq=160, Tk=200, Hq=4, Hkv=2, D=64, Dv=64, dtype=torch.bfloat16, causal=True)


class Coarser(Fp8):
    """With values that have lost two more bits."""

    def attend(self, x: Tensors) -> Tensor:
        return super().attend(x._replace(value=(x.value.float() * 2).round().to(x.value.dtype) / 2))


def on(backend: str) -> dict[str, Any]:
    ours = (Fp8(backend=backend), Fp8("e4m3 rotated", True, backend), Fp8Kernel(backend=backend))
    return providers_.by_name() | {one.name: one for one in ours}


# The suite


def test_the_suite_has_the_whole_call_first_and_the_kernel_beside_it() -> None:
    cells = list(SUITES["fp8"]())
    assert len(cells) == 18 and {cell.case.B * cell.case.Tq for cell in cells} == {16384}
    assert {cell.case.Hq * cell.case.D for cell in cells} == {2048}
    assert {cell.ours for cell in cells} == {("e4m3",)} and {cell.beside for cell in cells} == {
        ("e4m3 rotated", "e4m3 kernel")
    }
    assert all({"bf16", "fa3", "sdpa cudnn"} == set(cell.peers) for cell in cells)


@pytest.mark.parametrize("case", [CASE, packed(CASE, (100, 3, 140), (120, 7, 140))], ids=["dense", "packed"])
def test_each_is_right_before_it_is_timed_and_says_what_it_loses(case: Case) -> None:
    cell = Cell("stand-in", case, "forward", ("e4m3",), ("bf16",), ("e4m3 rotated", "e4m3 kernel"))
    entry = measure(cell, on("reference"), "wall", repeats=3, warmup=0)
    assert not wrong(entry) and entry["ours"] == "e4m3" and entry["fastest_peer"] == "bf16"
    for name, one in entry["providers"].items():
        assert one["rms_error"] < 0.004 if name == "bf16" else 0.03 < one["rms_error"] < 2.0**-4, name
    assert entry["providers"]["e4m3"]["ran"].startswith("reference: ")
    losses = results_.losses({"cells": [entry]})
    assert losses is not None and re.search(r"e4m3 [45]\.\d%, .*bf16 0\.2%", losses)
    assert results_.losses({"cells": [{"providers": {"bf16": entry["providers"]["bf16"]}}]}) is None


def test_who_is_coarser_than_the_specification_is_wrong() -> None:
    cell = Cell("stand-in", CASE, "forward", ("e4m3",), ())
    entry = measure(cell, on("reference") | {"e4m3": Coarser(backend="reference")}, "wall", repeats=3, warmup=0)
    assert wrong(entry) == ["e4m3"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "gluon: requires a CUDA device; got cpu"),
        ({"D": 32, "Dv": 32}, "head dims 64, 128 and 256"),
        ({"dtype": torch.float32}, "quantises float16 and bfloat16"),
        ({"sink": True}, "without sink"),
    ],
    ids=str,
)
def test_who_cannot_says_why(changed: dict[str, Any], reason: str) -> None:
    case = Case(**(vars(CASE) | changed))
    assert reason in str(providers_.by_name()["e4m3"].why_not(Cell("a cell", case, "forward", (), ())))
    assert "no backward" in str(Fp8().why_not(Cell("a cell", case, "backward", (), ())))


# What FP8 loses


def test_the_table_of_the_page_is_what_is_computed() -> None:
    page = (ROOT / "docs" / "numerics.md").read_text()
    heading, *rows = table()
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert heading in shown
    for row in rows:
        (found,) = (one for one in shown if one[0] == row[0])
        for said, computed in zip(found[1:], row[1:], strict=True):
            said_, computed_ = (float(text.rstrip("%")) for text in (said, computed))
            assert said_ == pytest.approx(computed_, rel=0.06, abs=0.06 if "%" in said else 0), (row[0], said, computed)


def test_rotation_and_scales_do_what_the_page_says() -> None:
    for kind, factor in ((four_channels, 2.0), (one_channel, 3.5)):
        relative, _ = errors(kind)
        assert relative.blocks > factor * relative.blocks_rotated
    relative, _ = errors(unequal_heads)
    assert relative.per_tensor > 2 * relative.blocks
    relative, _ = errors(normal)
    assert relative.blocks == pytest.approx(relative.blocks_rotated, rel=0.05)
