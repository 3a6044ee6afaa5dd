"""What a clock times: a provider's calls on its sets of inputs, one by one, in a row, or replayed by a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..testing.inputs import Tensors
from .providers import Provider
from .providers.base import error_line
from .suites import Cell, chunked
from .timing import REPLAYED_CALLS, Call, captured

Bare = Callable[[], object]


class Timed(NamedTuple):
    """What is timed as one, and how many calls of the provider it makes."""

    call: Call
    calls: int = 1


def in_a_row(provider: Provider, alone: Sequence[Bare], count: int = 1, rotating: bool = False) -> Timed:
    """Bare calls in a row, all on the inputs of a number, or each on the next."""

    def row(n: int) -> None:
        turn = [alone[(n + k * rotating) % len(alone)] for k in range(count)]
        with provider.call_context():
            for call in turn:
                call()

    return Timed(row, count)


def graphed(provider: Provider, alone: Sequence[Bare], allowed: float) -> Timed | str:
    """Replays of a CUDA graph of the bare calls; of a peer that cannot be captured, why."""
    try:
        with provider.call_context():
            graph = captured(alone, allowed)
    except Exception as error:
        if provider.ours:
            raise
        return f"no CUDA graph of it: {error_line(error)}"
    replays = -(-REPLAYED_CALLS // len(alone))

    def replayed(n: int) -> None:
        for _ in range(replays):
            graph.replay()

    return Timed(replayed, replays * len(alone))


def one_by_one(provider: Provider, cell: Cell, sets: list[Tensors]) -> Timed:
    """A cell as a whole: all its chunks, its gradients."""
    parts = [chunked(x, cell.chunk) for x in sets]

    def forward(n: int) -> object:
        return [provider.attend(part) for part in parts[n % len(parts)]]

    def both(n: int) -> object:
        x = sets[n % len(sets)]
        return torch.autograd.grad(provider.attend(x), (x.query, x.key, x.value), x.grad_out)

    if cell.direction == "forward":
        return Timed(forward)
    if cell.direction == "forward+backward":
        return Timed(both)
    outs = [provider.attend(x) for x in sets]

    def backward(n: int) -> object:
        x = sets[n % len(sets)]
        leaves = (x.query, x.key, x.value)
        return torch.autograd.grad(outs[n % len(sets)], leaves, x.grad_out, retain_graph=True)

    return Timed(backward)
