"""Rows to heads and back: the all-to-alls of Ulysses, and strategies inside a part of a group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .transport import AllToAll, Exchange, Start, Strategy, Wait, all_to_all, resume

T = TypeVar("T")


class Side(NamedTuple):
    """How tensors `[B, rows, heads, ...]` are divided among the ranks that exchange them."""

    heads: Sequence[slice]  # that each rank computes; where they overlap, gradients are summed
    rows: Sequence[int]  # that each rank has
    order: Tensor | None  # the row of each position in the ranks' concatenated rows; None: they are in order

    @property
    def summed(self) -> bool:
        return any(late.start < early.stop for early, late in pairwise(self.heads))

    def shape(self, t: Tensor, rows: int, heads: int) -> tuple[int, ...]:
        """Of the part of `t` with the rows of one rank and the heads of another."""
        return t.shape[0], self.rows[rows], self.heads[heads].stop - self.heads[heads].start, *t.shape[3:]


Moving = tuple[Tensor | None, Side]


def to_heads(me: int, moving: Sequence[Moving]) -> Strategy[list[Any]]:
    """From a rank's rows of all heads to all rows, in the order of positions, of the rank's heads."""
    there = [(t, side) for t, side in moving if t is not None]
    ranks = range(len(moving[0][1].heads))
    outgoing = [[t[:, :, side.heads[r]] for t, side in there] for r in ranks]
    shapes = [[side.shape(t, rows=r, heads=me) for t, side in there] for r in ranks]
    arrived = yield from _exchange(me, outgoing, shapes)
    wholes = [torch.cat(parts, 1) for parts in zip(*arrived, strict=True)]
    ordered = [w if side.order is None else w[:, side.order] for w, (_, side) in zip(wholes, there, strict=True)]
    return _with_gaps(ordered, moving)


def to_rows(me: int, moving: Sequence[Moving]) -> Strategy[list[Any]]:
    """The inverse of `to_heads`. Heads that several ranks computed are summed, in the order of ranks."""
    there = [(t, side) for t, side in moving if t is not None]
    split = [
        (t if side.order is None else torch.empty_like(t).index_copy_(1, side.order, t)).split(list(side.rows), 1)
        for t, side in there
    ]
    shapes = [[side.shape(t, rows=me, heads=r) for t, side in there] for r in range(len(moving[0][1].heads))]
    arrived = yield from _exchange(me, [list(parts) for parts in zip(*split, strict=True)], shapes)
    joined = [_joined(parts, side) for parts, (_, side) in zip(zip(*arrived, strict=True), there, strict=True)]
    return _with_gaps(joined, moving)


def within(members: Sequence[int], strategy: Strategy[T]) -> Strategy[T]:
    """A strategy of `members` of a group, who are its ranks 0, 1, ..., in the ranks of that group.

    Every rank of the group runs it among its own members at the same time, so all yield the same sequence.
    """
    answer: Any = None
    while True:
        done, yielded = resume(strategy, answer)
        if done:
            return yielded
        if isinstance(yielded, Start):
            answer = yield Start(_renamed(yielded.communication, members))
        else:
            arrived = yield yielded if isinstance(yielded, Wait) else _renamed(yielded, members)
            answer = {members.index(rank): tensor for rank, tensor in arrived.items()}


def _renamed(communication: Exchange, members: Sequence[int]) -> Exchange:
    sends, receives = (
        {members[rank]: tensor for rank, tensor in side.items()}
        for side in (communication.sends, communication.receives)
    )
    # A gather of the members is no gather of the group.
    return Exchange(sends, receives) if type(communication) is Exchange else AllToAll(sends, receives)


def _exchange(
    me: int, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
) -> Strategy[list[list[Tensor]]]:
    """Several tensors to each rank, as one message of bytes; the wide dtypes first, so that all are aligned."""
    dtypes = [t.dtype for t in outgoing[me]]
    messages = []
    for parts in outgoing:
        message = parts[0].new_empty(sum(t.nbytes for t in parts), dtype=torch.uint8)
        for place, t in zip(_places(message, dtypes, [t.shape for t in parts]), parts, strict=True):
            place.copy_(t)
        messages.append(message)
    sizes = [(sum(d.itemsize * torch.Size(s).numel() for d, s in zip(dtypes, one, strict=True)),) for one in shapes]
    arrived = yield from all_to_all(me, messages, sizes)
    return [_places(message, dtypes, one) for message, one in zip(arrived, shapes, strict=True)]


def _places(message: Tensor, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of a message as tensors, in the order in which they are given."""
    found: dict[int, Tensor] = {}
    begin = 0
    for i in sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize):
        end = begin + dtypes[i].itemsize * torch.Size(shapes[i]).numel()
        found[i] = message[begin:end].view(dtypes[i]).view(tuple(shapes[i]))
        begin = end
    return [found[i] for i in range(len(dtypes))]


def _joined(parts: tuple[Tensor, ...], side: Side) -> Tensor:
    if not side.summed:
        return torch.cat(parts, 2)
    batch, rows, _, *rest = parts[0].shape
    total = parts[0].new_zeros(batch, rows, side.heads[-1].stop, *rest)
    for part, heads in zip(parts, side.heads, strict=True):
        total[:, :, heads] += part
    return total


def _with_gaps(found: Sequence[Tensor], moving: Sequence[Moving]) -> list[Any]:
    """`found`, with None where `moving` has no tensor."""
    rest = iter(found)
    return [None if t is None else next(rest) for t, _ in moving]
