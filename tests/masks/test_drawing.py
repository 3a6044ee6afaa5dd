"""Drawings of masks."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stream_attention.masks import Mask, causal, documents, padding, window


def test_a_character_for_each_score() -> None:
    assert window(1, 0).plot(q_len=2, k_len=4) == ".##.\n..##"
    assert documents(lengths=[1, 2]).plot() == "#..\n.##\n.##"


def test_a_character_for_each_tile() -> None:
    assert causal().plot(q_len=6, k_len=6, tile=2) == "+..\n#+.\n##+"
    assert causal().plot(q_len=6, k_len=6, tile=(3, 2)) == "++.\n##+"


def test_a_large_mask_is_drawn_by_tiles_that_fit() -> None:
    lines = causal().plot(q_len=1000, k_len=4096).splitlines()
    assert len(lines[0]) == 64 and len(lines) == 16 and set("".join(lines)) == set("#+.")


def test_one_batch_entry_and_head_is_drawn() -> None:
    per_head = Mask(key_end=torch.tensor([[[1, 1]], [[2, 2]]], dtype=torch.int32).transpose(0, 1).contiguous())
    mask = padding([3, 1]) & per_head
    assert mask.plot(k_len=3, batch=0, head=1) == "##.\n##." and mask.plot(k_len=3, batch=1, head=1) == "#..\n#.."
    assert causal().plot(q_len=1, k_len=1, batch=7, head=7) == "#"  # all are alike


@pytest.mark.parametrize("name", ["mask.svg", "mask.png"])
def test_a_picture_is_written(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = (causal() & padding([3])).plot(tmp_path / name, q_len=4, k_len=4)
    written = (tmp_path / name).read_bytes()
    assert text.startswith("#...") and (b"<svg" in written or written.startswith(b"\x89PNG"))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"q_len": 3}, ValueError, "k_len: expected the number of keys; got None"),
        ({"q_len": 3, "k_len": 3, "batch": 2}, ValueError, "batch: expected a number below 2; got 2"),
        ({"q_len": 3, "k_len": 3, "head": -1}, ValueError, "head: expected at least 0; got -1"),
        ({"q_len": 3, "k_len": 3, "tile": 0}, ValueError, "rows: expected at least 1; got 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        padding([1, 2]).plot(**arguments)
    assert said in str(caught.value)


def test_the_drawings_of_the_page_are_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "masks.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for (_, code), (language, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        exec(code, names)
        assert language == "text" and capsys.readouterr().out == shown


def test_a_picture_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("colors", "figure", "patches"):
        monkeypatch.setitem(sys.modules, f"matplotlib.{name}", None)
    with pytest.raises(ImportError, match="plot: expected matplotlib; got none"):
        causal().plot(tmp_path / "mask.png", q_len=2, k_len=2)
    assert causal().plot(q_len=2, k_len=2) == "#.\n##"
