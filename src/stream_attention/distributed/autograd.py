"""Strategies with a gradient: the one autograd boundary of everything distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .transport import Strategy, Transport

Tensors = tuple[Any, ...]  # of a rank: tensors, or None where an argument is absent


def differentiable(
    transport: Transport,
    forward: Callable[..., Strategy[Tensors]],
    backward: Callable[[int, Tensors, Tensors, Tensors], Strategy[Tensors]],
    shards: Sequence[Tensors],
) -> list[Tensors]:
    """The outputs of `forward(rank, *tensors)` for each rank of this process, with `backward` as their gradient.

    `backward(rank, tensors, outputs, grads)` returns one gradient for each of a rank's tensors, or None. A gradient
    that did not arrive is None in `grads`, except that of output 0, which is then zeros. Both run on all ranks or on
    none, so gradients must be wanted on all ranks or on none. There is no second derivative.
    """
    flat = _Strategies.apply(transport, forward, backward, len(shards[0]), *(t for one in shards for t in one))
    return _by_rank(flat, len(flat) // len(shards))


class _Strategies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transport: Any, forward: Any, backward: Any, width: int, *flat: Any) -> Tensors:
        shards = _by_rank(flat, width)
        device = next(t.device for t in flat if isinstance(t, Tensor))
        runs = [forward(rank, *tensors) for rank, tensors in zip(transport.ranks, shards, strict=True)]
        outputs = tuple(t for one in transport.run(runs, device) for t in one)
        ctx.save_for_backward(*flat, *outputs)
        ctx.rest = transport, backward, width, device
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        transport, backward, width, device = ctx.rest
        count = width * len(transport.ranks)
        saved = ctx.saved_tensors
        outputs = _by_rank(saved[count:], len(grads) // len(transport.ranks))
        arrived = [
            (torch.zeros_like(outs[0]) if mine[0] is None else mine[0], *mine[1:])
            for outs, mine in zip(outputs, _by_rank(grads, len(outputs[0])), strict=True)
        ]
        rows = zip(transport.ranks, _by_rank(saved[:count], width), outputs, arrived, strict=True)
        with torch.no_grad():
            results = transport.run([backward(*row) for row in rows], device)
        found = [grad for one in results for grad in one]
        if torch.is_grad_enabled():  # create_graph=True
            found = _Gradients.apply(len(found), *found, *grads, *saved)
        return None, None, None, None, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_derivative("forward-mode derivative")


class _Gradients(torch.autograd.Function):
    """Gradients that depend on all that follows them, and say why they have none of their own."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> Tensors:
        return tuple(t if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _refuse_derivative("second derivative")


def _refuse_derivative(which: str) -> NoReturn:
    raise NotImplementedError(
        f"what ranks compute together has no {which}: what they send each other leaves the graph. Compute it on one "
        'device: attention(..., backend="reference") is differentiable any number of times, in either mode.'
    )


def _by_rank(flat: Sequence[Any], width: int) -> list[Tensors]:
    return [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]
