"""The code blocks of the documentation run as pasted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import stream_attention

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/api.md")


def blocks() -> list[tuple[str, str]]:
    """Python blocks of the pages, but for those that show a signature ("..." or "*" among the arguments)."""
    found = []
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            if "*," not in code and "..." not in code and "merge_states(outs, lses)" not in code:
                found.append((page, code))
    return found


def test_there_are_blocks() -> None:
    assert {page for page, _ in blocks()} == set(PAGES)


@pytest.mark.parametrize(("page", "code"), blocks(), ids=lambda text: text.strip().splitlines()[0][:40])
def test_a_block_runs(page: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = torch.randn(3, 1, 300, 4, 64)
    names = {name: getattr(stream_attention, name) for name in stream_attention.__all__}
    exec(code, {"torch": torch, "q": q, "k": k, "v": v, **names})
