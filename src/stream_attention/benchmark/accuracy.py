"""Is a provider right on a cell? Asked before it is timed.

The output is compared with fp64 on rows drawn from the cell itself, all heads of one batch entry, so that the very
configuration that is timed is the one that is checked (`check`), or on every row (`check_all`). Gradients need every
row, so they are compared on the same features with no more rows than the reference has memory for. The bound is earned
as in the tests: 2x (gradients: 3x) the error of the same-dtype eager computation, the larger of two orders of
summation, plus the rounding of the result; for gradients also what an output rounded to the inputs' dtype does to them
through delta = rowsum(dO * O).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reference
from ..testing.inputs import Case
from .cells import Cell, Tensors, chunked, draw, shortened
from .providers import Provider

ROWS = 64
GRADIENT_ROWS = 256
SCORES = 1 << 23
"""How many scores the reference may hold at a time where everything is checked: 64 MiB in fp64, some ten times over."""


class Verdict(NamedTuple):
    error: float  # largest |result - fp64|
    allowed: float
    right: bool
    mean: float  # of |result - fp64|
    of: str  # which result: "out", "d_query", ...


class _Block(NamedTuple):
    """One part of a result beside fp64."""

    error: float  # the largest, and that of eager computations
    eager: float
    rounding: float
    total: float  # sum of the errors
    size: int


def check(provider: Provider, cell: Cell, x: Tensors) -> Verdict:
    """What the provider makes of `x`, its own inputs for this cell, beside the reference: the worst by its bound."""
    case = provider.case(cell.case)
    generator = torch.Generator().manual_seed(0)
    batch = int(torch.randint(case.B, (), generator=generator))
    rows = torch.randperm(case.Tq, generator=generator)[:ROWS]
    kv_heads = case.Hkv if case.dropout_p else min(case.Hkv, 2)  # two say as much as all, unless dropout counts them
    with torch.no_grad():
        block = _rows(_attended(provider, cell, x), case, x, batch, rows, kv_heads)
    verdicts = [_verdict("out", [block], factor=2.0)]
    if cell.direction != "forward":
        verdicts += _check_gradients(provider, shortened(case, GRADIENT_ROWS, batch=2), seed=1)
    return max(verdicts, key=lambda v: math.inf if not v.right else v.error / v.allowed if v.allowed else 0.0)


def check_all(provider: Provider, cell: Cell, x: Tensors, seed: int = 0) -> list[Verdict]:
    """Every row of the output beside the reference and, unless the cell is forward alone, every gradient."""
    case = provider.case(cell.case)
    size = max(1, SCORES // (case.Hq * case.Tk))
    blocks = []
    with torch.no_grad():
        out = _attended(provider, cell, x)
        for batch in range(case.B):
            for rows in torch.arange(case.Tq).split(size):
                blocks.append(_rows(out, case, x, batch, rows, case.Hkv))
    verdicts = [_verdict("out", blocks, factor=2.0)]
    if cell.direction != "forward":
        verdicts += _check_gradients(provider, gradient_case(case), seed)
    return verdicts


def gradient_case(case: Case) -> Case:
    """The case whose gradients `check_all` compares: this one, or as much of it as the dense reference can hold."""
    batch = min(case.B, 2)
    return shortened(case, max(GRADIENT_ROWS, math.isqrt(SCORES // (batch * case.Hq))), batch)


def _attended(provider: Provider, cell: Cell, x: Tensors) -> Tensor:
    return torch.cat([provider.attend(part) for part in chunked(x, cell.chunk)], dim=1)


def _rows(out: Tensor, case: Case, x: Tensors, batch: int, rows: Tensor, kv_heads: int) -> _Block:
    rows = rows.to(out.device)
    options = {name: _part(option, name, batch, rows) for name, option in x.options.items()}
    here = slice(batch, batch + 1)
    query, key, value = x.query[here, rows], x.key[here], x.value[here]
    if kv_heads < case.Hkv:
        heads = kv_heads * (case.Hq // case.Hkv)
        query, key, value, out = query[:, :, :heads], key[:, :, :kv_heads], value[:, :, :kv_heads], out[:, :, :heads]
        options = {name: _heads(option, name, heads) for name, option in options.items()}
    where: dict[str, Any] = {"q_positions": rows + (case.Tk - case.Tq), "q_index": rows, "batch_start": batch}
    exact = reference.attention(query, key, value, **options, **where)[0]
    eager = reference.attention(query, key, value, **options, **where, compute_dtype=case.dtype)[0]
    turned = _keys_reversed(query, key, value, options | where, case)
    return _block(out[here, rows], exact, [eager, turned])


def _keys_reversed(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], case: Case) -> Tensor:
    """The eager computation with the keys in the opposite order: another draw of its rounding."""
    back = torch.arange(case.Tk - 1, -1, -1, device=query.device)
    moved = options | {"k_positions": back, "k_index": back, "compute_dtype": case.dtype}
    for name in ("mask", "bias"):
        if name in options and options[name].shape[-1] > 1:
            moved[name] = options[name][..., back]
    return reference.attention(query, key[:, back], value[:, back], **moved)[0]


def _check_gradients(provider: Provider, case: Case, seed: int) -> list[Verdict]:
    x = draw(case, seed)

    def gradients(compute: Any, dtype: torch.dtype, *arriving: Tensor | None) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x.query, x.key, x.value)]
        ends = compute(x._replace(query=leaves[0], key=leaves[1], value=leaves[2]))
        pairs = [(end, grad) for end, grad in zip(ends, arriving, strict=False) if grad is not None]
        outputs, grads = [end for end, _ in pairs], [grad.to(end.dtype) for end, grad in pairs]
        return list(torch.autograd.grad(outputs, leaves, grads, materialize_grads=True))

    def dense(dtype: torch.dtype) -> Any:
        return lambda y: reference.attention(y.query, y.key, y.value, **y.options, compute_dtype=dtype)

    actual = gradients(lambda y: (provider.attend(y),), case.dtype, x.grad_out)
    exact = gradients(dense(torch.float64), torch.float64, x.grad_out)
    eager = gradients(dense(case.dtype), case.dtype, x.grad_out)
    out = dense(torch.float64)(x)[0].detach()
    eps = torch.finfo(torch.float32).eps
    rounded = (x.grad_out * (out.to(case.dtype) - out)).sum(-1) + eps * (x.grad_out * out).abs().sum(-1)
    noise = gradients(dense(torch.float64), torch.float64, None, rounded.mT)
    return [
        _verdict(of, [_block(a, e, [g])], factor=3.0, noise=_largest(n))
        for of, a, e, g, n in zip(("d_query", "d_key", "d_value"), actual, exact, eager, noise, strict=True)
    ]


def _block(result: Tensor, exact: Tensor, eager: list[Tensor]) -> _Block:
    errors = (result.double() - exact).abs()
    return _Block(
        _largest(errors),
        _most([_largest(draw.double() - exact) for draw in eager]),
        _largest(exact.to(result.dtype) - exact) + torch.finfo(result.dtype).eps * _largest(exact),
        float(errors.sum()),
        errors.numel(),
    )


def _verdict(of: str, blocks: Sequence[_Block], factor: float, noise: float = 0.0) -> Verdict:
    error, eager = _most([b.error for b in blocks]), _most([b.eager for b in blocks])
    allowed = factor * eager + _most([b.rounding for b in blocks]) + noise
    mean = sum(b.total for b in blocks) / sum(b.size for b in blocks)
    return Verdict(error, allowed, error <= allowed < math.inf, mean, of)


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _most(values: list[float]) -> float:
    """The largest; NaN if there is one among them."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def _part(value: Any, name: str, batch: int, rows: Tensor) -> Any:
    """An option as one batch entry and some rows see it."""
    if name in ("mask", "bias"):
        value = value[(None,) * (4 - value.dim())]
        value = value[batch : batch + 1] if value.shape[0] > 1 else value
        return value[:, :, rows] if value.shape[2] > 1 else value
    if name == "alibi_slopes" and value.dim() == 2:
        return value[batch]
    return value


def _heads(value: Any, name: str, heads: int) -> Any:
    """An option as the first heads see it."""
    if name in ("alibi_slopes", "sink"):
        return value[:heads]
    return value[:, :heads] if name in ("mask", "bias") else value
