"""What an FP8 backward would lose, by kind of input: a study, no kernel does this.

`python -m benchmarks.studies.fp8_backward_error` prints it, in some minutes. Three of the five products have
e4m3 factors with the scales of base/fp8_layout.py:

    S = Q K^T        dV = P^T dO        dK = dS^T Q        in FP8, P as 2^8 p, dS with a power of two for 64 x 128 of it
    dP = dO V^T      dQ = dS K                             in bf16

lse and out are those of the forward in FP8 (backends/reference/fp8.py), and delta is dO . out. Results are rounded to
bf16; what is not said to be rounded is fp64. Sums of FP8 products are exact, or as Hopper's matrix units add them
(matrix_units.py), those over queries either to the end, or for 64 queries at a time, which are added in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stream_attention.backends.reference.fp8 import power_of_two, to_e4m3
from stream_attention.base.fp8_layout import BLOCK, LARGEST, QUERY_BLOCK, SHIFT, hadamard
from stream_attention_tools.bench.summary import markdown_table

from .matrix_units import matrix_unit_sums

LENGTH, HEADS, DIM = 512, 4, 128
SCALE = DIM**-0.5

IN_CACHE = 16
"""Rows whose terms are looked at together, of a product as matrix units have it."""

Gradients = tuple[Tensor, Tensor, Tensor]  # dQ, dK, dV


class Inputs(NamedTuple):
    """Of one head, `[T, D]` each; grad is that of the output."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor


class Kind(NamedTuple):
    """Inputs ~ N(0, 1), but for this."""

    grad_mean: float = 0.0
    value_mean: float = 0.0
    channel: float = 1.0  # a factor of one channel of Q and K
    rotate: bool = False  # Q and K before they become codes


NORMAL = Kind()
GRAD = Kind(grad_mean=1.0)
KINDS = {
    "Q, K, V, dO ~ N(0, 1)": NORMAL,
    "dO of mean 1": GRAD,
    "dO and V of mean 1": Kind(grad_mean=1.0, value_mean=1.0),
    "1 channel of Q and K times 8": Kind(channel=8.0),
    "the same, rotated": Kind(channel=8.0, rotate=True),
}


def exact_sums(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.mT


def unit_sums(a: Tensor, b: Tensor) -> Tensor:
    """By matrix units. Where scales change on the way a sum is rescaled, by powers of two, which rounds nothing."""
    return torch.cat([matrix_unit_sums(rows[None], b[None])[0] for rows in a.split(IN_CACHE)])


def two_levels(a: Tensor, b: Tensor) -> Tensor:
    """By matrix units for 64 terms at a time, and these in fp32."""
    total = torch.zeros(len(a), len(b))
    for x, y in zip(a.split(QUERY_BLOCK, 1), b.split(QUERY_BLOCK, 1), strict=True):
        total += unit_sums(x, y).float()
    return total.double()


class Form(NamedTuple):
    """Of an FP8 backward."""

    sums: Callable[[Tensor, Tensor], Tensor]  # a b^T, over queries
    e5m2: bool = False  # dS
    even: bool = False  # delta is that of an out which was divided by the sum of rounded weights
    bf16_forward: bool = False  # lse and out are its


FORMS = {
    "FP8, exact sums": Form(exact_sums),
    "dS in e5m2": Form(exact_sums, e5m2=True),
    "delta by rounded weights": Form(exact_sums, even=True),
    "after a bf16 forward": Form(exact_sums, bf16_forward=True),
    "matrix units": Form(unit_sums),
    "two levels": Form(two_levels),
}


def backward(x: Inputs, hidden: Tensor, rounded: Callable[[Tensor], Tensor]) -> Gradients:
    """As kernels in bf16 do it: out, P, dS and the results are rounded."""
    p = (x.query @ x.key.mT * SCALE).masked_fill(hidden, -math.inf).softmax(-1)
    ds = rounded(p * (x.grad @ x.value.mT - (x.grad * rounded(p @ x.value)).sum(-1, keepdim=True)))
    return rounded(ds @ x.key * SCALE), rounded(ds.mT @ x.query * SCALE), rounded(rounded(p).mT @ x.grad)


def fp8_backward(x: Inputs, hidden: Tensor, form: Form, rotate: bool = False) -> Gradients:
    turn = hadamard(DIM).double() if rotate else torch.eye(DIM).double()
    square = DIM if rotate else 1  # turn times turn is so many times the identity
    query, key = _coded(x.query @ turn, QUERY_BLOCK, DIM), _coded(x.key @ turn, BLOCK, DIM)
    value, grad = _coded(x.value, BLOCK, DIM), _coded(x.grad, BLOCK, DIM)

    scores = (exact_sums if form.sums is exact_sums else unit_sums)(query, key) * (SCALE / square)
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    top = (scores.amax(-1, keepdim=True) / math.log(2)).ceil()
    weights = torch.exp(scores - math.log(2) * top)
    out = _coded_weights(weights) @ value / (_coded_weights(weights) if form.even else weights).sum(-1, keepdim=True)
    if form.bf16_forward:
        true = (x.query @ x.key.mT * SCALE).masked_fill(hidden, -math.inf)
        lse, out = true.logsumexp(-1, keepdim=True), true.softmax(-1) @ x.value

    p = torch.exp(scores - lse)
    ds = p * (x.grad @ x.value.mT - (x.grad * _to_bf16(out)).sum(-1, keepdim=True))
    dq = _to_bf16(ds) @ x.key * SCALE
    dk = form.sums(_coded(ds, QUERY_BLOCK, BLOCK, form.e5m2).mT, query.mT) @ turn * (SCALE / square)
    return _to_bf16(dq), _to_bf16(dk), _to_bf16(form.sums(_coded_weights(p).mT, grad.mT))


class Loss(NamedTuple):
    """Of dQ, dK and dV each, the mean over heads."""

    error: list[float]  # |got - exact| by |exact|
    less: list[float]  # that a gradient is too small by, of itself: 1 - got . exact by exact . exact


def losses(kind: Kind, causal: bool, queries: int = LENGTH, keys: int = LENGTH, heads: int = HEADS) -> dict[str, Loss]:
    """By form, that in bf16 first."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1) & causal
    found = torch.zeros(1 + len(FORMS), 2, 3, dtype=torch.float64)
    for _ in range(heads):
        query, grad = torch.randn(2, queries, DIM, generator=generator)
        key, value = torch.randn(2, keys, DIM, generator=generator)
        query[:, 0] *= kind.channel
        key[:, 0] *= kind.channel
        x = Inputs(*map(_to_bf16, (query, key, value + kind.value_mean, grad + kind.grad_mean)))
        exact = backward(x, hidden, lambda y: y)
        gots = [backward(x, hidden, _to_bf16), *(fp8_backward(x, hidden, form, kind.rotate) for form in FORMS.values())]
        for i, got in enumerate(gots):
            for j, (g, e) in enumerate(zip(got, exact, strict=True)):
                found[i, 0, j] += (g - e).norm() / e.norm() / heads
                found[i, 1, j] += ((e - g) * e).sum() / e.square().sum() / heads
    return {name: Loss(*each.tolist()) for name, each in zip(("bf16", *FORMS), found, strict=True)}


def table() -> list[list[str]]:
    """Headings and rows: errors of dQ, dK and dV; then how much smaller dK and dV are than with exact sums."""
    cut = ("matrix units", "two levels")
    rows = [["dQ / dK / dV, %", "bf16", *FORMS, *(f"{name}: dK / dV smaller by" for name in cut)]]
    calls = {f"{name}{', causal' * causal}": (KINDS[name], causal) for name in KINDS for causal in (False, True)}
    found = {title: losses(*call) for title, call in calls.items()}
    for queries, keys in ((4096, 4096), (65536, 128)):
        found[f"dO of mean 1, {queries} queries, {keys} keys"] = losses(GRAD, False, queries, keys, heads=1)
    for title, forms in found.items():
        less = torch.tensor([forms[name].less for name in cut]) - torch.tensor(forms["FP8, exact sums"].less)
        cells = [" / ".join(f"{100 * one:.1f}" for one in each.error) for each in forms.values()]
        rows.append([title, *cells, *(f"{100 * dk:.2f} / {100 * dv:.2f}" for _, dk, dv in less.tolist())])
    return rows


def _coded(x: Tensor, rows: int, columns: int, e5m2: bool = False) -> Tensor:
    """What the codes of x mean, with a scale for every tile of so many rows and columns."""
    tiles = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [M / rows, rows, N / columns, columns]
    scale = power_of_two(tiles.abs().amax((1, 3), keepdim=True)).double()
    if e5m2:
        scale = scale * (LARGEST / torch.finfo(torch.float8_e5m2).max)
    codes = (tiles / scale).to(torch.float8_e5m2) if e5m2 else to_e4m3(tiles / scale)
    return (codes.double() * scale).view(x.shape)


def _coded_weights(weights: Tensor) -> Tensor:
    return to_e4m3(weights * 2.0**SHIFT).double() * 2.0**-SHIFT


def _to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


if __name__ == "__main__":
    print("\n".join(markdown_table(table())))
