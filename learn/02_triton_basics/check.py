"""Check the exercise: python learn/02_triton_basics/check.py [--solution]"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checking

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
MARGIN = 64  # rows and columns of memory around the result, past every tile's edge
UNTOUCHED = -12345.0

CASES = {"one tile": (4, 8), "whole tiles": (8, 24), "edges in the last tiles": (9, 21), "fewer than a tile": (3, 5)}


def complaints(candidate: Callable[[Tensor, Tensor, Tensor], None]) -> Iterator[str]:
    for name, (m, n) in CASES.items():
        generator = torch.Generator().manual_seed(m * n)
        # Both are views into larger tensors, with different strides, so that a wrong address is still one of ours.
        x_room = torch.randn(m + 2 * MARGIN, n + MARGIN, generator=generator).to(DEVICE)
        out_room = torch.full((m + 2 * MARGIN, n + 2 * MARGIN), UNTOUCHED, device=DEVICE)
        x, out = x_room[MARGIN : MARGIN + m, :n], out_room[MARGIN : MARGIN + m, :n]
        s = torch.randn(m + MARGIN, generator=generator).to(DEVICE)[:m]
        candidate(x, s, out)
        sentence = _wrong(out_room, out, x * s[:, None])
        if sentence:
            yield f"{name} ({m} x {n}): {sentence}"


def _wrong(room: Tensor, out: Tensor, expected: Tensor) -> str:
    m, n = out.shape
    left = (out == UNTOUCHED).nonzero()
    if len(left):
        hint = "Is the grid large enough, and does row i begin at i * stride_out?"
        return f"{len(left)} of {m * n} elements were not written, first {left[0].tolist()}. {hint}"
    if not torch.equal(out, expected):
        i, j = (out != expected).nonzero()[0].tolist()
        got, wanted = out[i, j].item(), expected[i, j].item()
        return f"element [{i}, {j}] is {got:g} where {wanted:g} is right. Which row's stride, and which row's factor?"
    outside = room != UNTOUCHED
    outside[MARGIN : MARGIN + m, :n] = False
    if outside.any():
        return f"{int(outside.sum())} numbers outside the matrix were written over. Does the mask have both edges?"
    return ""


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "scale_rows", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
