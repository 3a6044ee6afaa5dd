"""The tolerance, derived from plain PyTorch's error: a kernel may be as wrong as that in the same dtype, times a small
factor, and no more.

For every result, with `exact` the reference in fp64,

    max |result - exact|  <=  factor * max |eager - exact|  +  noise

`eager` is the reference computed in the dtype of the inputs, its gradients by autograd; the factor is 2 for outputs and
3 for gradients. Its error is one draw of rounding noise, and a lucky draw would make a harsh bound, so the largest of a
few draws counts: the same computation with queries, keys and head dims in another order, which changes every rounding
and no meaning. `noise` is what no streaming kernel can avoid, measured on this very case:

- the exact result is rounded to the dtype it is returned in, and so is one operation on it;
- the softmax is known by its LSE, rounded to fp32 (fp64): a row's probabilities are off by eps * (1 + |lse|), as are
  its output, where states are merged, and its share of every gradient;
- sum_j p_ij dp_ij is known as delta_i = sum_d dO_id O_id, from an output that was off as above and rounded when it was
  returned, and is subtracted from dp_ij, a sum that rounds too. An error of delta acts exactly as a gradient of the
  LSE does.

A gradient is linear in what arrives at the outputs, so the fp64 reference itself says what the last two do to it.
There is no argument that loosens any of this, and NaN is never within a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stream_attention.backends.reference import attention as reference
from stream_attention.base.errors import UnsupportedProblem
from stream_attention.masks import Mask

from .inputs import Case, make, run
from .memory import poisoned_memory

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
DRAWS = 4
"""Eager computations whose largest error is the measure."""


@dataclass(frozen=True)
class Report:
    """Errors against fp64, and what was allowed, by name of the result: "out", "lse", "d_query", ..."""

    case: Case
    backend: str
    errors: dict[str, float]
    bounds: dict[str, float]
    config: Any = None

    @property
    def worst(self) -> float:
        """The largest error as a share of its bound: at most 1 where the report passed."""
        return max((e / b for name, e in self.errors.items() if (b := self.bounds[name]) > 0), default=0.0)

    def __str__(self) -> str:
        lines = [f"  {name:14} {self.errors[name]:.3e} of {self.bounds[name]:.3e} allowed" for name in self.errors]
        return "\n".join([_repro(self.case, self.backend, self.config), *lines])


def check_case(case: Case, backend: str = "auto", config: Any = None) -> Report:
    """Run a case on a backend and compare the output, the LSE and every gradient with the fp64 reference.

    `config` forces a configuration of a named backend's forward, for cases without a backward.

    Memory is poisoned while the backend runs, and its inputs must come out as they went in.

    Raises:
        AssertionError: something is wrong by more than it may be; the message begins with the line that reproduces it.
        UnsupportedProblem: the backend cannot do the case; `why_not` says so beforehand.

    >>> check_case(Case(B=2, Tq=8, Tk=24, causal=True, sink=True)).worst <= 1
    True
    """
    repro = _repro(case, backend, config)
    tensors, options = _tensors_and_options(case)
    grads = _output_gradients(case, tensors["query"], tensors["value"])

    try:
        with poisoned_memory():
            actual = _results(case, tensors, grads, lambda x: run(case, x, options, backend, config))
    except UnsupportedProblem:
        raise
    except Exception as error:
        raise AssertionError(f"{repro}\nraised {type(error).__name__}: {error}") from error
    fresh_tensors, fresh_options = _tensors_and_options(case)
    for name, fresh in (fresh_tensors | fresh_options).items():
        if isinstance(fresh, Tensor):
            assert torch.equal((tensors | options)[name], fresh), f"{repro}\n{name} was written to"

    wide_tensors = {name: tensor.double() for name, tensor in tensors.items()}
    wide_grads = grads[0].double(), None if grads[1] is None else grads[1].double()
    exact = _results(case, wide_tensors, wide_grads, partial(_exact, case, options=options))
    noise = _noise(case, exact, wide_tensors, wide_grads, options)
    with _full_precision_products():
        draws = [_results(case, tensors, grads, partial(_eager, case, options=options, draw=n)) for n in range(DRAWS)]

    dtypes = {"out": case.dtype, "lse": torch.promote_types(case.dtype, torch.float32)}
    dtypes |= {f"d_{name}": tensor.dtype for name, tensor in tensors.items()}
    errors: dict[str, float] = {}
    bounds: dict[str, float] = {}
    for name, truth in exact.items():
        result, eager = actual[name], [draw[name] for draw in draws]
        assert result.shape == truth.shape, f"{repro}\n{name} has shape {list(result.shape)}, not {list(truth.shape)}"
        assert result.dtype is dtypes[name], f"{repro}\n{name} has dtype {result.dtype}, not {dtypes[name]}"
        if name == "lse":
            visible = truth != -torch.inf
            assert torch.equal(result != -torch.inf, visible), f"{repro}\nlse is -inf for other rows than it should be"
            truth, result, eager = truth[visible], result[visible], [draw[visible] for draw in eager]
        factor = GRADIENT_FACTOR if name.startswith("d_") else FORWARD_FACTOR
        carried = _largest(noise[name])
        rounded = _error(truth.to(result.dtype), truth) + torch.finfo(result.dtype).eps * (_largest(truth) + carried)
        errors[name] = _error(result, truth)
        bounds[name] = factor * max(_error(draw, truth) for draw in eager) + carried + rounded
    report = Report(case, backend, errors, bounds, config)
    wrong = [name for name in errors if not errors[name] <= bounds[name] < math.inf]
    assert not wrong, f"{report}\nwrong by more than the tolerance: {', '.join(wrong)}"
    return report


def _repro(case: Case, backend: str, config: Any) -> str:
    return f"check_case({case!r}, {backend!r}{f', {config!r}' if config is not None else ''})"


def _tensors_and_options(case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inputs of a case: those that have a gradient, and the rest."""
    query, key, value, options = make(case)
    tensors = {"query": query, "key": key, "value": value}
    others = ("bias", "alibi_slopes", "sink") if case.row_grad else ("bias",)
    return tensors | {name: options.pop(name) for name in others if name in options}, options


def _output_gradients(case: Case, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Random gradients of out and, if the case has one, of the LSE."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    *lead, rows, heads, _ = query.shape
    grad_out = torch.randn(*lead, rows, heads, value.shape[-1], generator=generator)
    grad_lse = torch.randn(*lead, heads, rows, generator=generator)
    lse_dtype = torch.promote_types(case.dtype, torch.float32)
    return grad_out.to(case.device, case.dtype), grad_lse.to(case.device, lse_dtype) if case.lse_grad else None


def _results(
    case: Case,
    tensors: dict[str, Tensor],
    grads: tuple[Tensor | None, Tensor | None],
    compute: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    """What `compute` returns, and the gradients of `tensors` if gradients `grads` arrive at it."""
    leaves = {name: tensor.detach().requires_grad_(case.backward) for name, tensor in tensors.items()}
    outputs = compute(leaves)
    results = {"out": outputs[0].detach(), "lse": outputs[1].detach()}
    if case.backward:
        paired = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        ends, arriving = zip(*paired, strict=True)
        found = (
            torch.autograd.grad(ends, tuple(leaves.values()), arriving, materialize_grads=True)
            if outputs[0].requires_grad
            else [torch.zeros_like(leaf) for leaf in leaves.values()]  # not one sequence: nothing depends on anything
        )
        results |= {f"d_{name}": grad for name, grad in zip(leaves, found, strict=True)}
    return results


def _for_reference(tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Any]:
    ours = ("deterministic", "max_seqlen_q", "max_seqlen_k")
    taken = {name: option for name, option in options.items() if name not in ours}
    if isinstance(mask := options.get("mask"), Mask):
        taken["mask"] = mask.as_dense(q_len=tensors["query"].shape[1], k_len=tensors["key"].shape[1])
    return taken | tensors


def _exact(case: Case, tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    compute = reference.varlen_attention if case.packed else reference.attention
    return compute(**_for_reference(tensors, options))


def _noise(
    case: Case,
    exact: dict[str, Tensor],
    tensors: dict[str, Tensor],
    grads: tuple[Tensor, Tensor | None],
    options: dict[str, Any],
) -> dict[str, Tensor]:
    """What no streaming kernel can avoid, by result, before the result itself is rounded; see the top of this file."""
    out, lse = exact["out"], torch.where(exact["lse"] == -torch.inf, 0.0, exact["lse"])
    state_dtype = torch.promote_types(case.dtype, torch.float32)
    off = torch.finfo(state_dtype).eps * (1 + lse.abs())  # of a row's probabilities, relative
    carried = {"out": out * off.mT[..., None], "lse": off}
    if case.backward:
        grad_out, grad_lse = grads
        of_delta = _largest_by_row([(grad_out * error).sum(-1).mT for error in _rounding_errors(case, out, off)])
        terms = (grad_out * out).abs().sum(-1).mT + (0.0 if grad_lse is None else grad_lse.abs())
        of_delta = of_delta + torch.copysign(2 * torch.finfo(state_dtype).eps * terms, of_delta)  # delta and dp
        off_grads = grad_out * off.mT[..., None], of_delta + (0.0 if grad_lse is None else grad_lse * off)
        generator = torch.Generator().manual_seed(case.seed)
        for draw in range(DRAWS):  # the measured signs, then random ones: what cancels in one draw does not in another
            signs = torch.randint(0 if draw else 1, 2, lse.shape, generator=generator).to(out) * 2 - 1
            arriving = off_grads[0] * signs.mT[..., None], off_grads[1] * signs
            for name, x in _results(case, tensors, arriving, partial(_exact, case, options=options)).items():
                if name not in ("out", "lse"):
                    carried[name] = torch.maximum(carried.get(name, x.abs()), x.abs())
    return carried


def _rounding_errors(case: Case, out: Tensor, off: Tensor) -> list[Tensor]:
    """What rounding an output to its dtype does to it, also where the LSE's own error tips it over a tie.

    Ties are no rarity: with one key and dropout of 0.9 an output is ten times a bf16 number, and one in twelve is one.
    """
    tipped = (out * (1 + side * off.mT[..., None]) for side in (0, 1, -1))
    return [value.to(case.dtype).double() - out for value in tipped]


def _largest_by_row(errors: list[Tensor]) -> Tensor:
    stacked = torch.stack(errors)
    return stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]


def _eager(case: Case, tensors: dict[str, Tensor], options: dict[str, Any], draw: int) -> tuple[Tensor, Tensor]:
    """The reference in the dtype of the inputs, everything in an order that `draw` decides; 0 leaves it as it is."""
    arguments = _for_reference(tensors, options)
    if not case.packed:
        return _eager_in_order(case, arguments, draw)
    starts_q, starts_k = (arguments.pop(name).tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    query, value = arguments["query"], arguments["value"]
    slopes = arguments.get("alibi_slopes")
    outs, lses = [], []
    for b in range(case.sequences):
        rows, columns = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        its = {"query": query[None, rows], "key": arguments["key"][None, columns], "value": value[None, columns]}
        its |= {"batch_start": b, "alibi_slopes": slopes[b] if slopes is not None and slopes.dim() == 2 else slopes}
        out, lse = _eager_in_order(case, arguments | its, draw)
        outs.append(out[0])
        lses.append(lse[0])
    lse_dtype = torch.promote_types(case.dtype, torch.float32)
    tail = query.shape[0] - starts_q[-1]
    outs.append(query.new_zeros(tail, case.Hq, case.Dv))
    lses.append(query.new_full((case.Hq, tail), -torch.inf, dtype=lse_dtype))
    return torch.cat(outs), torch.cat(lses, dim=-1)


def _eager_in_order(case: Case, arguments: dict[str, Any], draw: int) -> tuple[Tensor, Tensor]:
    if draw == 0:
        return reference.attention(**arguments, compute_dtype=case.dtype)
    generator = torch.Generator().manual_seed(draw)
    q_len, k_len = arguments["query"].shape[1], arguments["key"].shape[1]
    rows, columns, dims, value_dims = (
        torch.randperm(n, generator=generator).to(case.device) for n in (q_len, k_len, case.D, case.Dv)
    )
    moved = arguments | {"q_positions": rows + (k_len - q_len), "q_index": rows}
    moved |= {"k_positions": columns, "k_index": columns}
    moved["query"] = arguments["query"][:, rows][..., dims]
    moved["key"] = arguments["key"][:, columns][..., dims]
    moved["value"] = arguments["value"][:, columns][..., value_dims]
    for name in ("mask", "bias"):
        tile = arguments.get(name)
        if tile is not None:
            tile = tile[..., columns] if tile.dim() >= 1 and tile.shape[-1] == k_len else tile
            moved[name] = tile[..., rows, :] if tile.dim() >= 2 and tile.shape[-2] == q_len else tile
    out, lse = reference.attention(**moved, compute_dtype=case.dtype)
    back = torch.argsort(rows)
    return out[:, back][..., torch.argsort(value_dims)], lse[..., back]


@contextmanager
def _full_precision_products() -> Iterator[None]:
    """No TF32 in what a bound is derived from."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _error(result: Tensor, truth: Tensor) -> float:
    return _largest(result.double() - truth.double())


def _largest(x: Tensor) -> float:
    """max |x|; NaN if any is."""
    return x.abs().max().item() if x.numel() else 0.0
