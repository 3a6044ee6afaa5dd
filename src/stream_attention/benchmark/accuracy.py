"""Is a provider right on a cell? Asked before it is timed.

The output is compared with fp64 on rows drawn from the cell itself, all heads of one batch entry, so that the very
configuration that is timed is the one that is checked. Gradients need every row, so they are compared on the same
features with at most 256 rows. The bound is earned as in the tests: 2x (gradients: 3x) the error of the same-dtype
eager computation, the larger of two orders of summation, plus the rounding of the result; for gradients also what an
output rounded to the inputs' dtype does to them through delta = rowsum(dO * O).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import reference
from ..testing.inputs import Case
from .cells import Cell, Tensors, draw, shortened
from .providers import Provider

ROWS = 64
GRADIENT_ROWS = 256


class Verdict(NamedTuple):
    error: float  # largest |result - fp64|, of the result that is worst by its bound
    allowed: float
    right: bool


def check(provider: Provider, cell: Cell, x: Tensors) -> Verdict:
    """Compare what the provider makes of `x`, its own inputs for this cell, with the reference."""
    with torch.no_grad():
        verdicts = [_check_rows(provider.attend(x), provider.case(cell.case), x)]
    if cell.direction != "forward":
        verdicts += _check_gradients(provider, provider.case(cell.case))
    return max(verdicts, key=lambda v: math.inf if not v.right else v.error / v.allowed if v.allowed else 0.0)


def _check_rows(out: Tensor, case: Case, x: Tensors) -> Verdict:
    generator = torch.Generator().manual_seed(0)
    batch = int(torch.randint(case.B, (), generator=generator))
    rows = torch.randperm(case.Tq, generator=generator)[:ROWS].to(out.device)
    positions = rows + (case.Tk - case.Tq)
    options = {name: _part(option, name, batch, rows) for name, option in x.options.items()}
    here = slice(batch, batch + 1)
    query, key, value = x.query[here, rows], x.key[here], x.value[here]
    if not case.dropout_p:  # a few heads say as much as all, unless the dropout mask counts them
        kv_heads = min(case.Hkv, 2)
        heads = kv_heads * (case.Hq // case.Hkv)
        query, key, value, out = query[:, :, :heads], key[:, :, :kv_heads], value[:, :, :kv_heads], out[:, :, :heads]
        options = {name: _heads(option, name, heads) for name, option in options.items()}
    where: dict[str, Any] = {"q_positions": positions, "q_index": rows, "batch_start": batch}
    exact = reference.attention(query, key, value, **options, **where)[0]
    eager = reference.attention(query, key, value, **options, **where, compute_dtype=case.dtype)[0]
    turned = _keys_reversed(query, key, value, options | where, case)
    return _verdict(out[here, rows], exact, [eager, turned], factor=2.0)


def _keys_reversed(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], case: Case) -> Tensor:
    """The eager computation with the keys in the opposite order: another draw of its rounding."""
    back = torch.arange(case.Tk - 1, -1, -1, device=query.device)
    moved = options | {"k_positions": back, "k_index": back, "compute_dtype": case.dtype}
    for name in ("mask", "bias"):
        if name in options and options[name].shape[-1] > 1:
            moved[name] = options[name][..., back]
    return reference.attention(query, key[:, back], value[:, back], **moved)[0]


def _check_gradients(provider: Provider, case: Case) -> list[Verdict]:
    x = draw(shortened(case, GRADIENT_ROWS, batch=2), seed=1)

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
        _verdict(a, e, [g], factor=3.0, noise=float(n.abs().max()))
        for a, e, g, n in zip(actual, exact, eager, noise, strict=True)
    ]


def _verdict(result: Tensor, exact: Tensor, eager: list[Tensor], factor: float, noise: float = 0.0) -> Verdict:
    rounding = _largest(exact.to(result.dtype) - exact) + torch.finfo(result.dtype).eps * _largest(exact)
    allowed = factor * max(_largest(draw.double() - exact) for draw in eager) + rounding + noise
    error = _largest(result.double() - exact)
    return Verdict(error, allowed, error <= allowed < math.inf)


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


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
