"""Strategies with a gradient: the one autograd boundary of `distributed`."""

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
    that autograd does not pass is None in `grads`, except that of output 0, which is then zeros. Both run on all ranks
    or on none, so gradients must be wanted on all ranks or on none. There is no second derivative.
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
        incoming = [
            (torch.zeros_like(outs[0]) if own[0] is None else own[0], *own[1:])
            for outs, own in zip(outputs, _by_rank(grads, len(outputs[0])), strict=True)
        ]
        rows = zip(transport.ranks, _by_rank(saved[:count], width), outputs, incoming, strict=True)
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
    """The identity of gradients; a second derivative through it raises and says why there is none."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> Tensors:
        return tuple(t if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _refuse_derivative("second derivative")


def _refuse_derivative(which: str) -> NoReturn:
    raise NotImplementedError(
        f"attention over several ranks has no {which}: communication leaves the autograd graph. Compute it on one "
        'device: attention(..., backend="reference") is differentiable any number of times, in either mode.'
    )


def in_dtypes_of(tensors: Tensors, grads: Sequence[Tensor | None]) -> Tensors:
    """Gradients in the dtypes of the tensors that they are of."""
    return tuple(None if grad is None else grad.to(t.dtype) for grad, t in zip(grads, tensors, strict=True))


def _by_rank(flat: Sequence[Any], width: int) -> list[Tensors]:
    return [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]
