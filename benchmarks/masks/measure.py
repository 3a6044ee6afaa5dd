"""Compare results and gradients with fp64 on some rows, then time everybody in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention_tools.bench.accuracy import Verdict, gradient_verdicts, rows_verdict
from stream_attention_tools.bench.providers.base import error_line
from stream_attention_tools.bench.timing import Call, Clock, Latency, interleaved
from stream_attention_tools.testing.inputs import Tensors
from stream_attention_tools.testing.memory import peak_bytes

from ..workloads.measure import Wrong
from .calls import OURS, Made, Provider, make, providers, timed
from .cases import Case, Sizes

ROWS = 32
DIRECTIONS = ("forward", "backward")


class Part(NamedTuple):
    """Some rows of a batch entry, in the query heads of the first and the last KV head."""

    batch: int
    rows: Tensor
    heads: Tensor
    kv_heads: Tensor


def drawn(made: Made) -> Iterator[Part]:
    """Rows of the first and the last batch entry. No row is in both: a bias adds up its gradients over entries."""
    problem, device = made.problem, made.query.device
    group = problem.heads.query // problem.heads.kv
    kv_heads = torch.tensor(sorted({0, problem.heads.kv - 1}), device=device)
    heads = (kv_heads[:, None] * group + torch.arange(group, device=device)).flatten()
    rows = torch.linspace(0, problem.length - 1, ROWS, device=device).long().unique()
    entries = sorted({0, problem.batch - 1})
    for n, batch in enumerate(entries):
        yield Part(batch, rows[n :: len(entries)], heads, kv_heads)


def reference_inputs(made: Made, part: Part, bias: Tensor | None) -> Tensors:
    """What the reference computes a part from."""
    options: dict[str, Any] = {}
    mask, length = made.problem.mask, made.problem.length
    if mask is not None:
        keys = torch.arange(length, device=part.rows.device)
        there = part.batch, part.heads[:, None, None], part.rows[:, None], keys
        seen = mask.visible(*there, length, length)
        options["mask"] = seen.expand(len(part.heads), len(part.rows), length)[None]
    if bias is not None:
        options["bias"] = bias[:, part.heads[:, None], part.rows]
    key, value = (of_keys(tensor, part) for tensor in (made.key, made.value))
    return Tensors(of_rows(made.query, part), key, value, options, of_rows(made.grad, part))


def of_rows(tensor: Tensor, part: Part) -> Tensor:
    return tensor[part.batch, part.rows[:, None], part.heads][None]


def of_keys(tensor: Tensor, part: Part) -> Tensor:
    return tensor[part.batch, :, part.kv_heads][None]


def verdict(made: Made, one: Provider) -> Verdict:
    """The output and all gradients beside fp64, the worst by what is allowed.

    The gradient that arrives is 0 but at the rows that are drawn, so every gradient follows from these rows alone.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in one.inputs]
    out = one.attend(*leaves)
    parts = [_placed(part, one.tokens) for part in drawn(made)]
    arriving = torch.zeros_like(out)
    for part, place in zip(drawn(made), parts, strict=True):
        arriving[place.batch, place.rows[:, None], place.heads] = of_rows(made.grad, part)[0]
    query, key, value, *learned = torch.autograd.grad(out, leaves, arriving)
    if one.tokens is not None:  # the gradients of a token's copies add up
        empty = torch.zeros_like(made.key)
        key, value = (empty.index_add(1, one.tokens, grad) for grad in (key, value))
    found = []
    for part, place in zip(drawn(made), parts, strict=True):
        x = reference_inputs(made, part, one.bias)
        grads = {"query": of_rows(query, place)}
        grads |= {"key": of_keys(key, part), "value": of_keys(value, part)}
        if learned:
            grads["bias"] = learned[0][:, part.heads[:, None], part.rows]
        with torch.no_grad():
            found.append(rows_verdict(of_rows(out.detach(), place), x))
        found += gradient_verdicts(grads, x)
    return max(found, key=lambda each: (not each.right, each.error / max(each.allowed, 1e-30)))


def _placed(part: Part, tokens: Tensor | None) -> Part:
    """Where the rows are among rows of these tokens: the first of each."""
    if tokens is None:
        return part
    return part._replace(rows=(tokens == part.rows[:, None]).int().argmax(1))


def measure(
    case: Case, sizes: Sizes, device: str, fa3: Any, rounds: int, budget_s: float, now: Callable[[str], None]
) -> dict[str, Any]:
    """Everybody's error, times and memory, or why there are none.

    Raises:
        Wrong: one of ours is further from fp64 than it may be.
    """
    case.make(sizes, device)  # loads and compiles what is not timed
    problem, mask_ms = timed(lambda: case.make(sizes, device), device)
    made = make(problem, sizes.dtype, device)
    entries: dict[str, dict[str, Any]] = {}
    calls: dict[str, dict[str, Call]] = {direction: {} for direction in DIRECTIONS}
    for name, one in providers(made, fa3).items():
        now(f"{case.name}: checking {name}")
        if isinstance(one, str):
            entries[name] = {"unavailable": one}
            continue
        try:
            found = verdict(made, one)
            if not found.right:
                raise Wrong(f"{name}: {found.of}: error {found.error:.2e}, allowed {found.allowed:.2e}")
            entries[name] = {"error": found.error, "allowed": found.allowed, "of": found.of}
            entries[name] |= {"peak_bytes": peak_bytes(_both(made, one), device), "mask_bytes": one.mask_bytes}
            if one.block_mask_ms is not None:
                entries[name]["block_mask_ms"] = round(one.block_mask_ms, 3)
            calls["forward"][name], calls["backward"][name] = _alone(made, one)
        except Exception as error:
            if name in OURS:
                raise
            entries[name] = {"unavailable": error_line(error)}
    flush = torch.empty(256 << 20 if device == "cuda" else 0, dtype=torch.int8, device=device)
    clock: Clock = "events" if device == "cuda" else "cpu"
    warmup = 2 if device == "cuda" else 0  # a CPU has computed each call for its check
    for direction, its in calls.items():
        now(f"{case.name}: timing {direction} of {', '.join(its)}")
        for name, ms in interleaved(its, clock, rounds, warmup, budget_s, before=flush.zero_).items():
            latency = Latency.of(ms)
            told: dict[str, Any] = {f"{key}_ms": round(getattr(latency, key), 4) for key in ("median", "p20", "p80")}
            entries[name][direction] = told | {"rounds": latency.repeats}
    size = {"batch": problem.batch, "length": problem.length, "heads": str(problem.heads)}
    share = {"dtype": str(sizes.dtype).removeprefix("torch."), "density": problem.density, "gflop": problem.flops / 1e9}
    return {**size, **share, "mask_ms": round(mask_ms, 3), "providers": entries}


def _leaves(made: Made, one: Provider) -> tuple[list[Tensor], Tensor]:
    """Inputs that have gradients, and the gradient that arrives at the output."""
    grad = made.grad if one.tokens is None else made.grad[:, one.tokens]
    return [tensor.detach().requires_grad_() for tensor in one.inputs], grad


def _alone(made: Made, one: Provider) -> tuple[Call, Call]:
    """The forward without gradients, and the backward of a forward that was."""
    leaves, grad = _leaves(made, one)
    out = one.attend(*leaves)

    def forward(n: int) -> object:
        with torch.no_grad():
            return one.attend(*one.inputs)

    return forward, lambda n: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _both(made: Made, one: Provider) -> Callable[[], object]:
    """A forward and its backward."""
    leaves, grad = _leaves(made, one)
    return lambda: torch.autograd.grad(one.attend(*leaves), leaves, grad)


def new_length(case: Case, sizes: Sizes, device: str, tokens: int) -> dict[str, list[float]]:
    """Milliseconds of two calls, forward and backward, of so many tokens, a length that was not called before."""
    made = make(case.make(sizes._replace(length=tokens), device), sizes.dtype, device)
    found = {}
    for name, one in providers(made, "").items():
        if name in ("ours", "flex") and isinstance(one, Provider):
            both = _both(made, one)
            found[name] = [round(timed(both, device)[1], 3) for _ in range(2)]
    return found
