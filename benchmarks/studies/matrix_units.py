"""Sums of FP8 products as the matrix units of Ada and Hopper make them."""

from __future__ import annotations

import torch
from torch import Tensor

MATRIX_UNIT_BITS = 13
"""Fraction bits of a sum of FP8 products, on Ada and Hopper."""

TERMS = 32
"""That a matrix unit adds at once."""

AT_ONCE = 1 << 23
"""Scores whose terms `matrix_unit_sums` looks at, so that it needs no more than 6 GB."""


def matrix_unit_sums(a: Tensor, b: Tensor, bits: int = MATRIX_UNIT_BITS) -> Tensor:
    """a b^T of `[H, m, K]` and `[H, n, K]`, e4m3 values times powers of two, as matrix units sum it.

    32 terms and the sum so far are cut off, towards 0, so many bits behind the largest exponent: that of the sum, and
    of a term the sum of its factors' exponents. The new sum keeps so many bits behind its first. Factors are 0 or
    between 2^-240 and 2^240; how units take the exponent of a subnormal code is not known, and makes no difference that
    was visible.
    """
    assert a.shape[::2] == b.shape[::2], f"expected [H, m, K] and [H, n, K]; got {list(a.shape)}, {list(b.shape)}"
    a, b = a.double(), b.double()
    of_a, of_b = _exponent(a), _exponent(b)
    total = a.new_zeros(*a.shape[:2], b.shape[1])
    rows = max(1, AT_ONCE // max(1, a.shape[0] * b.shape[1]))
    for row in range(0, a.shape[1], rows):
        here, part = slice(row, row + rows), total[:, row : row + rows]
        for first in range(0, a.shape[2], TERMS):
            now = slice(first, first + TERMS)
            terms = a[:, here, None, now] * b[:, None, :, now]
            largest = (of_a[:, here, None, now] + of_b[:, None, :, now]).amax(-1)
            unit = torch.exp2(torch.maximum(largest, _exponent(part)) - bits)
            part = (terms.div_(unit[..., None]).trunc_().sum(-1) + (part / unit).trunc()) * unit
            unit = torch.exp2(_exponent(part) - bits)
            part = (part / unit).trunc() * unit
        total[:, here] = part
    return total


def _exponent(x: Tensor) -> Tensor:
    """Of the first bit; that of 0 is below all others."""
    return torch.where(x == 0, -500, torch.frexp(x)[1] - 1).double()
