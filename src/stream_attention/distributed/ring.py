"""ring_attention(): keys and values are sent around, queries stay.

At step s, rank r computes with the shard of rank r - s while it receives the next one. A shard visits only the ranks
whose queries see some of it: it comes from the neighbour, or from its owner if the neighbour did not need it. In the
backward its fp32 gradient follows one step behind, accumulates each rank's share, and is sent back to the owner after
the shard's last visit. Each visit sends the keys and values, and in the backward as many fp32 elements: if every rank
sees every shard, (P-1)/P of all keys and values per rank, and with bf16 three times that in the backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.problem import Wanted
from ..base.state import Saved
from .autograd import Tensors, differentiable, in_dtypes_of
from .call_spec import CallSpec, Runs, prepare
from .graph_break import graph_break
from .processes import Group
from .shard import Layout, Run, by_position
from .shard_attention import RowGradients, Rows, State, full_kv_backward, full_kv_forward, wanted_by
from .tiles import Sides, sees
from .transport import AllGather, AllToAll, Exchange, Pending, Start, Strategy, Wait

Rotation = Literal["p2p", "alltoall", "allgather"]
Route = tuple[dict[int, int], dict[int, int]]
"""Which owner's shard goes to which rank, and comes from which."""


@graph_break
def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    group: Group = None,
    layout: Layout = "contiguous",
    rotate: Rotation = "p2p",
    length: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """`attention` over a sequence whose shards lie on the ranks of a group: local shards in, local shard out.

    Exact, forward and backward, with everything `attention` composes. Every rank makes the same call.

    Args:
        query, key, value: this rank's shards, as in `attention`; any lengths in contiguous layout, those of
            `shard_sequence` in the others. With `VirtualRanks` lists, one tensor per rank.
        group: a process group, a 1-D device mesh, `VirtualRanks(P)`, or None for the default group.
        layout: that of `shard_sequence`. Causal work is balanced with "zigzag" and "striped".
        rotate: "p2p" passes shards round; "alltoall" does so by collectives; "allgather" fetches all keys at once:
            one message instead of P - 1, everything sent to everyone, and memory for all keys twice on every rank.
        length: of the whole sequence, if shards are those of `shard_sequence`. Then nothing is exchanged before the
            ranks compute. None exchanges lengths and compares the ranks' calls, which synchronises with the device.
        cu_seqlens: offsets of sequences packed in the whole, the same on every rank; shards are `[N, H, D]` then.
        mask, bias: this rank's rows x the keys of all ranks in the order of the whole sequence. Dense calls only.
        alibi_slopes, sink: the same on every rank; a rank's gradient of them is that of its own rows, to be summed.
        seed: the same on every rank; must be given when there is dropout. The mask is that of one device.
        The rest: as in `attention`.

    Returns:
        This rank's `[B, Tq, Hq, Dv]`, or `(out, lse)`; with lists, lists.

    Raises:
        ValueError, TypeError: a bad argument, or ranks whose calls differ.
        CommunicationError: a rank has died or does something else.

    >>> from stream_attention.distributed import VirtualRanks, shard_sequence
    >>> group = VirtualRanks(4)
    >>> shards = [shard_sequence(x, group=group, layout="zigzag") for x in torch.randn(3, 1, 100, 2, 16)]
    >>> [out.shape[1] for out in ring_attention(*shards, group=group, layout="zigzag", causal=True)]
    [25, 25, 25, 25]
    """
    arguments = locals()  # all of them, by name
    check_rotation(rotate)
    spec = prepare("ring_attention", arguments)
    return spec.results(run_ring(spec, rotate), return_lse)


def check_rotation(rotate: Any) -> None:
    if rotate not in get_args(Rotation):
        refuse("rotate", " or ".join(map(repr, get_args(Rotation))), repr(rotate))


def run_ring(spec: CallSpec, rotate: Rotation) -> list[Tensors]:
    """(out, lse) of each rank of this process, differentiable."""
    ring = Ring(spec, rotate)
    return differentiable(spec.transport, ring.forward, ring.backward, spec.shards)


@lru_cache(maxsize=256)
def visits(q_runs: Runs, k_runs: Runs, sides: Sides) -> tuple[frozenset[int], ...]:
    """For each rank's shard, the steps at which its visits are needed: step s is at rank owner + s; 0 is always one."""
    size = len(k_runs)
    return tuple(
        frozenset(s for s in range(size) if s == 0 or sees(q_runs[(owner + s) % size], k_runs[owner], sides))
        for owner in range(size)
    )


@lru_cache(maxsize=256)
def _moves(visits: tuple[frozenset[int], ...], step: int, home: bool) -> list[tuple[int, int, int]]:
    """Whose shard moves from which rank to which: to those who use it at `step`, or `home` from there."""
    size, moves = len(visits), []
    for owner, its in enumerate(visits):
        if step in its:
            here, beside = (owner + step) % size, step + 1 if home else step - 1
            other = (owner + beside) % size if beside in its else owner
            moves.append((owner, here, other) if home else (owner, other, here))
    return moves


class Ring:
    """The two strategies of one call. Its ranks may be a part of a group: `head_exchange.within`."""

    def __init__(self, spec: CallSpec, rotate: Rotation) -> None:
        self.attention, self.q_runs, self.k_runs = spec.attention, spec.q_runs, spec.k_runs
        self.k_lengths, self.size, self.rotate = spec.k_lengths, len(spec.k_runs), rotate
        self.visits = visits(self.q_runs, self.k_runs, self.attention.sides)
        steps: Sequence[int | None] = sorted(set().union(*self.visits))[: 2 if rotate == "allgather" else None]
        self.steps = list(pairwise((*steps, None)))  # each with the one after it

    def forward(self, rank: int, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Strategy[Tensors]:
        rows = Rows(self.q_runs[rank], query, *rest)
        if self.size == 1:
            return full_kv_forward(self.attention, rows, key, value, self.k_runs[0])
        state = State(query, value.shape[-1])
        own = torch.cat((key, value), dim=-1)  # one message; kernels read views of it
        shards = {rank: own}  # by owner: those at this rank
        for _, upcoming in self.steps:
            if upcoming is not None:
                route = self.route(rank, upcoming)
                coming = yield Start(self.exchange(route, {rank: own, **shards}, own))
            for shard, runs in self.in_order(shards):
                self.attention.forward(state, rows, *_split(shard, key), runs)
            if upcoming is not None:
                shards = _by_owner(route, (yield Wait(coming)))
        return state.finish(rows.sink, query.dtype, rows.runs)

    def backward(self, rank: int, tensors: Tensors, outputs: Tensors, grads: Tensors) -> Strategy[Tensors]:
        saved, wanted = Saved(*outputs, *grads), wanted_by(*tensors)
        return in_dtypes_of(tensors, (yield from self.gradients(rank, tensors, saved, wanted)))

    def gradients(self, rank: int, tensors: Tensors, saved: Saved, wanted: Wanted) -> Strategy[Tensors]:
        """One for each of `tensors`, in fp32."""
        query, key, value, *rest = tensors
        rows = Rows(self.q_runs[rank], query, *rest)
        if self.size == 1:
            return full_kv_backward(self.attention, rows, key, value, self.k_runs[0], saved, wanted)
        row_grads = RowGradients(rows, saved, wanted)
        own = torch.cat((key, value), dim=-1)
        shards, total = {rank: own}, torch.zeros_like(own, dtype=saved.lse.dtype)
        back: Route = {}, {}
        following: Pending | None = None
        for step, upcoming in self.steps:
            if upcoming is not None:
                route = self.route(rank, upcoming)
                coming = yield Start(self.exchange(route, {rank: own, **shards}, own))
            zeros = {owner: torch.zeros_like(t, dtype=total.dtype) for owner, t in shards.items() if owner != rank}
            parts = {rank: total} | zeros
            for shard, runs in self.in_order(shards):
                sums = torch.zeros_like(shard, dtype=total.dtype) if len(shards) > 1 else parts[next(iter(shards))]
                self.attention.backward(row_grads, *_split(shard, key), *_split(sums, key), runs)
                if len(shards) > 1:
                    for owner, run, joined in by_position({owner: self.k_runs[owner] for owner in shards}):
                        parts[owner][:, run.rows] = sums[:, joined.rows]
            if following is not None:
                _add(parts, back, (yield Wait(following)))
            if step:
                back = self.route(rank, step, home=True)
                following = yield Start(self.exchange(back, parts, total))
            if upcoming is not None:
                shards = _by_owner(route, (yield Wait(coming)))
        if following is not None:
            _add({rank: total}, back, (yield Wait(following)))
        return row_grads.with_keys(*_split(total, key))

    def in_order(self, shards: Mapping[int, Tensor]) -> list[tuple[Tensor, Sequence[Run]]]:
        """The shards at this rank, if any, as one, with the runs of its rows. Several are concatenated by position: the
        keys that a query sees are adjacent then, and one kernel call."""
        if len(shards) < 2:
            return [(shard, self.k_runs[owner]) for owner, shard in shards.items()]
        places = by_position({owner: self.k_runs[owner] for owner in shards})
        pieces = [shards[owner][:, run.rows] for owner, run, _ in places]
        return [(torch.cat(pieces, dim=1), [joined for *_, joined in places])] if pieces else []

    def route(self, rank: int, step: int, home: bool = False) -> Route:
        """The route of the keys to where they are used at `step`; `home`: of the gradients computed there, on with
        their keys, or to the owner after the last visit."""
        if self.rotate == "allgather":
            others = {r: r for r in range(self.size) if r != rank}
            own = dict.fromkeys(others, rank)
            return (others, own) if home else (own, others)
        moves = _moves(self.visits, step, home)
        sends = {to: owner for owner, origin, to in moves if origin == rank}
        return sends, {origin: owner for owner, origin, to in moves if to == rank}

    def exchange(self, route: Route, shards: Mapping[int, Tensor], like: Tensor) -> Exchange:
        batch, _, *heads = like.shape
        sends = {to: shards[owner] for to, owner in route[0].items()}
        receives = {origin: like.new_empty(batch, self.k_lengths[i], *heads) for origin, i in route[1].items()}
        if self.rotate == "p2p":
            return Exchange(sends, receives)
        to_all = self.rotate == "allgather" and all(shard is like for shard in sends.values())
        return AllGather(sends, receives) if to_all else AllToAll(sends, receives)


def _split(shard: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return shard[..., : key.shape[-1]], shard[..., key.shape[-1] :]


def _by_owner(route: Route, arrived: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {owner: arrived[origin] for origin, owner in route[1].items()}


def _add(parts: Mapping[int, Tensor], route: Route, arrived: Mapping[int, Tensor]) -> None:
    """Add the received gradients to this rank's parts of them."""
    for origin, owner in route[1].items():
        parts[owner].add_(arrived[origin])
