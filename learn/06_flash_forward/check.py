"""Check the exercise: python learn/06_flash_forward/check.py [--solution]"""

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

CASES = {  # name: lengths of the sequences of a batch; there is room for 40 keys, and tiles have 16
    "all keys": [40, 40],
    "ends of tiles": [16, 32],
    "inside a tile": [5, 23],
    "one key": [1, 40],
    "no key": [0, 40],
}


def complaints(candidate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Iterator[str]:
    for name, lengths in CASES.items():
        generator = torch.Generator().manual_seed(sum(lengths))
        q = torch.randn(2, 20, 2, 16, generator=generator).to(DEVICE)
        k, v = torch.randn(2, 2, 40, 2, 16, generator=generator).to(DEVICE)
        exact = [_exact(q[b], k[b, :length], v[b, :length]) for b, length in enumerate(lengths)]
        for b, length in enumerate(lengths):
            k[b, length:] = v[b, length:] = torch.nan
        # Other lengths lie behind them, so that a wrong program id reads a wrong one and not memory of somebody else.
        room = torch.tensor([*lengths, 7, 11, 3, 19, 2, 5], dtype=torch.int32, device=DEVICE)
        out = candidate(q, k, v, room[: len(lengths)])
        for b, length in enumerate(lengths):
            sentence = _wrong(out[b], exact[b], length)
            if sentence:
                yield f"{name}: the sequence of {length} keys {sentence}"


def _wrong(out: Tensor, exact: Tensor, length: int) -> str:
    if length == 0 and out.isnan().any():
        return "has NaN in its result where 0 is right. What is row_sum there?"
    if out.isnan().any():
        return "has NaN in its result. Padding was read: 0 * NaN is NaN, so a weight of 0 is not enough."
    off = (out.double() - exact).abs().max().item()
    if not off < 1e-5:
        return f"is off by up to {off:.2g}. Is a key past its length hidden by -inf, and is the length its own?"
    return ""


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By definition, in fp64: `[Tq, H, D]`."""
    if not len(k):
        return torch.zeros_like(q, dtype=torch.float64)
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    return (torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, -1) @ v).transpose(0, 1)


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "padded_attention", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
