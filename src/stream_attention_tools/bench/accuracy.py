"""Is a provider right on a cell? Asked before it is timed.

`check` asks about the very configuration that is timed: it computes the whole cell and compares rows drawn from one
batch entry, in all query heads of a few KV heads, with fp64 (of packed sequences the first, the last, the longest and
one more): of the output and, unless the cell is forward alone, of the query's gradient, whose rows depend on nothing
but themselves. Every row has a part in the gradients of key and value, so those, and again that of the query, are
compared on the same features with no more rows than the reference has memory for. `check_all` compares every row and
head of the output, and the gradients of as much as the reference holds.

The tolerance is derived from plain PyTorch's error as in the tests: twice that of the same-dtype eager computation, the
larger of two orders of summation (gradients: three times, one order), plus the rounding of the result; for gradients
also what an output rounded to the inputs' dtype does to them through delta = rowsum(dO * O).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention.backends.reference import attention as reference

from ..testing.inputs import Case, Tensors, draw, sequences
from ..testing.tolerance import FORWARD_FACTOR, GRADIENT_FACTOR
from .providers import Provider
from .suites import Cell, chunked, shortened

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
    rms: float | None = None  # of an output: its distance from fp64 on the cell's own inputs, by the size of that


class _Block(NamedTuple):
    """One part of a result beside fp64."""

    error: float  # the largest, and that of eager computations
    eager: float
    rounding: float
    total: float  # sum of the errors
    size: int
    lost: float = 0.0  # squares of the errors on the cell's own inputs, and of what is exact there
    whole: float = 0.0


class _Part(NamedTuple):
    """Some rows of one batch entry or packed sequence, in the query heads of some KV heads."""

    batch: int
    rows: Tensor
    kv_heads: Tensor
    heads: Tensor
    case: Case  # of the whole

    @classmethod
    def of(cls, case: Case, batch: int, rows: Tensor, kv_heads: Tensor) -> _Part:
        group = case.Hq // case.Hkv
        heads = (kv_heads[:, None] * group + torch.arange(group)).flatten()
        rows, kv_heads, heads = (index.to(case.device) for index in (rows, kv_heads, heads))
        return cls(batch, rows, kv_heads, heads, case)

    def take(self, rows_and_heads: Tensor) -> Tensor:
        """Of a tensor [B, Tq, Hq, ...], packed [Nq, Hq, ...]."""
        return self._entry(rows_and_heads, self.case.lengths_q)[self.rows[:, None], self.heads][None]

    def _entry(self, tensor: Tensor, lengths: tuple[int, ...] | None) -> Tensor:
        if lengths is None:
            return tensor[self.batch]
        start = sum(lengths[: self.batch])
        return tensor[start : start + lengths[self.batch]]

    def inputs(self, x: Tensors) -> Tensors:
        """What the reference computes this part from; its options say where the part stands in the whole."""
        key, value = (self._entry(t.detach(), self.case.lengths_k)[:, self.kv_heads][None] for t in (x.key, x.value))
        options = {name: self._option(name, option) for name, option in x.options.items() if name not in x.packing}
        q_len, k_len = sequences(self.case)[self.batch]
        options |= {"q_positions": self.rows + (k_len - q_len), "q_index": self.rows}
        options |= {"batch_start": self.batch}
        return Tensors(self.take(x.query.detach()), key, value, options, self.take(x.grad_out))

    def _option(self, name: str, value: Any) -> Any:
        if name in ("mask", "bias"):
            value = value[(None,) * (4 - value.dim())]
            value = value[self.batch : self.batch + 1] if value.shape[0] > 1 else value
            value = value[:, self.heads] if value.shape[1] > 1 else value
            return value[:, :, self.rows] if value.shape[2] > 1 else value
        if name == "alibi_slopes" and value.dim() == 2:
            return value[self.batch, self.heads]
        return value[self.heads] if name in ("alibi_slopes", "sink") else value


def check(provider: Provider, cell: Cell, x: Tensors) -> Verdict:
    """What the provider makes of `x`, its own inputs for this cell, beside the reference: the worst by its bound."""
    case = provider.case(cell.case)
    parts = _drawn(case)
    out, d_query = _computed(provider, cell, x)
    with torch.no_grad():
        reference_x = provider.reference_inputs(x)
        verdicts = [
            _verdict("out", [_output(provider, out, x, reference_x, part)], factor=FORWARD_FACTOR) for part in parts
        ]
    if d_query is not None:
        for part in parts:
            few = part._replace(rows=part.rows[: _rows_held(case, len(part.heads))])
            verdicts += _gradients_beside_exact({"query": few.take(d_query)}, few.inputs(x), case.dtype)
        verdicts += _check_gradients(provider, shortened(case, GRADIENT_ROWS, batch=2), seed=1)
    return max(verdicts, key=lambda v: math.inf if not v.right else v.error / v.allowed if v.allowed else 0.0)


def _drawn(case: Case) -> list[_Part]:
    """Some rows of a batch entry in the first KV head, the last and one between; with dropout in all of them.

    Its mask counts the heads of the whole, so the reference cannot compute some of them. Packed sequences begin and end
    anywhere in a tile, so rows of several are drawn.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = int(torch.randint(case.sequences, (), generator=generator))
    lengths = [q_len for q_len, _ in sequences(case)]
    longest = max(range(len(lengths)), key=lambda n: lengths[n])
    entries = dict.fromkeys((0, len(lengths) - 1, longest, drawn)) if case.packed else (drawn,)
    rows = {entry: torch.randperm(lengths[entry], generator=generator)[:ROWS] for entry in entries}
    kv_heads = torch.arange(case.Hkv)
    if not case.dropout_p and case.Hkv > 3:
        between = 1 + int(torch.randint(case.Hkv - 2, (), generator=generator))
        kv_heads = torch.tensor([0, between, case.Hkv - 1])
    return [_Part.of(case, entry, its, kv_heads) for entry, its in rows.items()]


def _computed(provider: Provider, cell: Cell, x: Tensors) -> tuple[Tensor, Tensor | None]:
    """The output of the whole cell and, unless it is forward alone, the query's gradient."""
    if cell.direction == "forward":
        with torch.no_grad():
            return _attended(provider, cell, x), None
    leaves = [t.detach().requires_grad_() for t in (x.query, x.key, x.value)]
    out = _attended(provider, cell, x._replace(query=leaves[0], key=leaves[1], value=leaves[2]))
    return out.detach(), torch.autograd.grad(out, leaves, x.grad_out)[0]


def check_all(provider: Provider, cell: Cell, x: Tensors, seed: int = 0) -> list[Verdict]:
    """Every row of the output beside the reference and, unless the cell is forward alone, every gradient."""
    case = provider.case(cell.case)
    size, kv_heads = _rows_held(case, case.Hq), torch.arange(case.Hkv)
    blocks = []
    with torch.no_grad():
        out, reference_x = _attended(provider, cell, x), provider.reference_inputs(x)
        for batch, (q_len, _) in enumerate(sequences(case)):
            for rows in torch.arange(q_len).split(size):
                blocks.append(_output(provider, out, x, reference_x, _Part.of(case, batch, rows, kv_heads)))
    verdicts = [_verdict("out", blocks, factor=FORWARD_FACTOR)]
    if cell.direction != "forward":
        verdicts += _check_gradients(provider, gradient_case(case), seed)
    return verdicts


def gradient_case(case: Case) -> Case:
    """The case whose gradients `check_all` compares: this one, or as much of it as the dense reference can hold."""
    batch = min(case.B, 2)
    return shortened(case, max(GRADIENT_ROWS, math.isqrt(SCORES // (batch * case.Hq))), batch)


def _attended(provider: Provider, cell: Cell, x: Tensors) -> Tensor:
    return torch.cat([provider.attend(part) for part in chunked(x, cell.chunk)], dim=1)


def _rows_held(case: Case, heads: int) -> int:
    """How many rows of so many heads the reference may hold at a time."""
    return max(1, SCORES // (heads * case.Tk))


def _output(provider: Provider, out: Tensor, x: Tensors, reference_x: Tensors, part: _Part) -> _Block:
    y, result = part.inputs(reference_x), part.take(out)
    block, exact = _beside_exact(result, y, part.case.dtype, provider.tolerance_sources(y))
    meant = exact if reference_x is x else _dense(part.inputs(x), torch.float64)[0]
    return block._replace(lost=float((result - meant).square().sum()), whole=float(meant.square().sum()))


def rows_verdict(result: Tensor, x: Tensors) -> Verdict:
    """Some rows of an output, `[1, rows, heads, Dv]`, beside fp64: `x` has their queries and all keys, and
    `q_positions` among its options says where they stand."""
    return _verdict("out", [_beside_exact(result, x, x.query.dtype)[0]], factor=FORWARD_FACTOR)


def gradient_verdicts(actual: dict[str, Tensor], x: Tensors) -> list[Verdict]:
    """Gradients, by names of tensors and options, where `x.grad_out` arrives at these rows and nothing at others."""
    return _gradients_beside_exact(actual, x, x.query.dtype)


def _beside_exact(
    result: Tensor, x: Tensors, dtype: torch.dtype, sources: Sequence[Tensor] = ()
) -> tuple[_Block, Tensor]:
    """A result beside attention of `x` in fp64, which is returned too."""
    exact = _dense(x, torch.float64)[0]
    eager = [_dense(one, dtype)[0] for one in (x, _keys_reversed(x))]
    return _block(result, exact, [*eager, *sources]), exact


def _dense(x: Tensors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    compute = reference.varlen_attention if x.packed else reference.attention
    options = {name: option for name, option in x.options.items() if not name.startswith("max_seqlen")}
    return compute(x.query, x.key, x.value, **options, compute_dtype=dtype)


def _keys_reversed(x: Tensors) -> Tensors:
    """The same problem with the keys in the opposite order: another draw of the eager computation's rounding."""
    back = torch.arange(x.key.shape[1] - 1, -1, -1, device=x.key.device)
    moved = x.options | {"k_positions": back, "k_index": back}
    for name in ("mask", "bias"):
        if name in moved and moved[name].shape[-1] > 1:
            moved[name] = moved[name][..., back]
    return x._replace(key=x.key[:, back], value=x.value[:, back], options=moved)


def _check_gradients(provider: Provider, case: Case, seed: int) -> list[Verdict]:
    x = draw(case, seed)
    names = ("query", "key", "value")
    actual = _gradients(lambda y: (provider.attend(y),), x, names, case.dtype, x.grad_out)
    return _gradients_beside_exact(dict(zip(names, actual, strict=True)), x, case.dtype)


def _gradients_beside_exact(actual: dict[str, Tensor], x: Tensors, dtype: torch.dtype) -> list[Verdict]:
    """A provider's gradients of some of `x`, by their names, beside those of the reference."""

    def dense(computed_in: torch.dtype, *arriving: Tensor | None) -> list[Tensor]:
        return _gradients(lambda y: _dense(y, computed_in), x, actual, computed_in, *arriving)

    exact, eager = dense(torch.float64, x.grad_out), dense(dtype, x.grad_out)
    with torch.no_grad():
        out = _dense(x, torch.float64)[0]
    eps = torch.finfo(torch.float32).eps
    rounded = (x.grad_out * (out.to(dtype) - out)).sum(-1) + eps * (x.grad_out * out).abs().sum(-1)
    noise = dense(torch.float64, None, rounded.mT)
    return [
        _verdict(f"d_{name}", [_block(a, e, [g])], factor=GRADIENT_FACTOR, noise=_largest(n))
        for (name, a), e, g, n in zip(actual.items(), exact, eager, noise, strict=True)
    ]


def _gradients(
    compute: Callable[[Tensors], tuple[Tensor, ...]],
    x: Tensors,
    names: Iterable[str],
    dtype: torch.dtype,
    *arriving: Tensor | None,
) -> list[Tensor]:
    """Gradients of `x`'s tensors and options in `dtype`, where `arriving` comes to what `compute` returns."""
    given = x.options | x.tensors
    leaves = {name: given[name].detach().to(dtype).requires_grad_() for name in names}
    options = x.options | {name: leaf for name, leaf in leaves.items() if name in x.options}
    moved = x._replace(options=options, **{name: leaf for name, leaf in leaves.items() if name in x.tensors})
    pairs = [pair for pair in zip(compute(moved), arriving, strict=False) if pair[1] is not None]
    outputs, grads = [end for end, _ in pairs], [grad.to(end.dtype) for end, grad in pairs if grad is not None]
    return list(torch.autograd.grad(outputs, list(leaves.values()), grads, materialize_grads=True))


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
    lost, whole = (sum(squares) for squares in zip(*((b.lost, b.whole) for b in blocks), strict=True))
    return Verdict(error, allowed, error <= allowed < math.inf, mean, of, math.sqrt(lost / whole) if whole else None)


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _most(values: list[float]) -> float:
    """The largest; NaN if there is one among them."""
    return float(torch.tensor(values, dtype=torch.float64).max())
