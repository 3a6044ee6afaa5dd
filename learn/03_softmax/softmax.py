"""Softmax, where it overflows, and the shift that repairs it.

python learn/03_softmax/softmax.py [--dim 64]
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def naive_softmax(x: Tensor) -> Tensor:
    """As the formula has it."""
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def safe_softmax(x: Tensor) -> Tensor:
    """The same weights: exp(x - m) / sum exp(x - m), for any m. With the row's maximum the largest exponential is 1."""
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def logsumexp(x: Tensor) -> Tensor:
    """log(sum exp x), which softmax is made of: weights are exp(x - logsumexp(x))."""
    m = x.amax(-1, keepdim=True)
    return (m + torch.log(torch.exp(x - m).sum(-1, keepdim=True))).squeeze(-1)


def largest_exponent(dtype: torch.dtype) -> float:
    """The largest x, to two decimals, whose exp(x) is finite in this dtype."""
    x = math.floor(math.log(torch.finfo(dtype).max) * 100) / 100
    assert torch.exp(torch.tensor(x, dtype=torch.float64)).to(dtype).isfinite()
    return x


def numbers(x: Tensor) -> str:
    return " ".join(f"{number:7.4f}" for number in x.tolist())


def show_limits() -> None:
    print("dtype   largest number   exp(x) is finite up to   exp(x) is not 0 down to")
    for name, dtype in DTYPES.items():
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps / 2  # half of the smallest subnormal: what is below is rounded to 0
        print(
            f"{name}  {info.max:15.3g}  {largest_exponent(dtype):22.2f}  {math.ceil(10 * math.log(least)) / 10:24.1f}"
        )
    print()


def show_rows() -> None:
    rows = {
        "small scores": [1.0, 2.0, 3.0],
        "the same plus 12": [13.0, 14.0, 15.0],
        "the same plus 90": [91.0, 92.0, 93.0],
        "the same minus 200": [-199.0, -198.0, -197.0],
    }
    print(f"{'scores':20} {'':5}  {'naive':24} safe")
    for name, scores in rows.items():
        for dtype_name in ("fp16", "fp32"):
            x = torch.tensor(scores, dtype=DTYPES[dtype_name])
            print(f"{name:20} {dtype_name:5} {numbers(naive_softmax(x))}  {numbers(safe_softmax(x))}")
    print()


def show_sums() -> None:
    print("Equal scores: every exponential is 1, and the sum is the number of keys.")
    for keys in (2048, 4096, 65536):
        ones = np.exp(np.zeros(keys, dtype=np.float16))
        one_by_one = np.add.accumulate(ones)[-1]  # fp16 has 11 bits: 2048 + 1 is 2048
        with np.errstate(over="ignore"):
            at_once = np.float16(ones.sum(dtype=np.float32))
        print(f"  {keys:5} keys: added one by one in fp16 {one_by_one:4.0f}, in fp32 and rounded once {at_once:4.0f}")
    print()


def show_scores(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4096, dim, generator=generator)
    raw = (q * k).sum(-1)
    scaled = raw / dim**0.5
    for name, x in (("q · k", raw), (f"q · k / {dim}^0.5", scaled)):
        print(f"  {name:14} standard deviation {x.std().item():5.2f}, largest {x.max().item():6.2f}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=64, help="head dim of the random queries and keys; default 64")
    options = parser.parse_args(argv)
    show_limits()
    show_rows()
    show_sums()
    print(f"Scores of 4096 random queries and keys of {options.dim} numbers:")
    show_scores(options.dim)


if __name__ == "__main__":
    main()
