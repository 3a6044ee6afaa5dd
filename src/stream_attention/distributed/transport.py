"""What ranks send each other, and what carries it.

A strategy is a generator. It yields a communication and is sent what arrived:

    arrived = yield Exchange(sends, receives)               # done when it resumes
    pending = yield Start(Exchange(sends, receives))        # under way while the strategy computes
    arrived = yield Wait(pending)

Between `Start` and `Wait` the strategy leaves both sides' buffers alone. A transport runs strategies: `Processes`
(processes.py) one per process on torch.distributed; `VirtualRanks` all of them in one process, on one device, in
lockstep and without threads. So a strategy runs unchanged on a cluster and in a unit test, with the same kernels.

Every rank yields the same sequence of communications, whatever it has to send: a rank that skipped one would leave the
others waiting. Ranks are those of the group, from 0, never those of the world.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..base.errors import check_int

T = TypeVar("T")


class CommunicationError(RuntimeError):
    """A communication failed: a rank has died, or ranks make different calls. The message says what to do."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """From rank to rank: `sends[r]` goes to rank r, and what rank r sends here fills `receives[r]`, of its shape.

    Only the named pairs communicate. A rank sends nothing to itself. The answer is `receives`.
    """

    sends: Mapping[int, Tensor]
    receives: Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class AllToAll(Exchange):
    """An exchange as one collective of the whole group, for networks on which that is faster, or P2P is missing."""


@dataclass(frozen=True, eq=False)
class AllGather(Exchange):
    """An exchange in which one tensor goes to everyone; `all_gather` makes it."""


@dataclass(frozen=True, eq=False)
class Agreement(AllGather):
    """A few elements by which ranks compare their calls; `agree` makes it."""


class Pending(NamedTuple):
    """A communication under way; `work` is the transport's own."""

    communication: Exchange
    work: Any = None


class Start(NamedTuple):
    """Begin a communication; the answer is its `Pending`."""

    communication: Exchange


class Wait(NamedTuple):
    """Finish a communication; the answer is what arrived."""

    pending: Pending


Strategy: TypeAlias = Generator[Exchange | Start | Wait, Any, T]


def all_gather(
    rank: int, tensor: Tensor, shapes: Sequence[Sequence[int]], kind: type[AllGather] = AllGather
) -> Strategy[list[Tensor]]:
    """Everyone's tensors, in the order of ranks; `shapes` are those of all ranks, and need not be equal."""
    return (yield from _collective(kind, rank, [tensor] * len(shapes), shapes))


def all_to_all(rank: int, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Strategy[list[Tensor]]:
    """`parts[r]` goes to rank r; the result is what the ranks send here, of `shapes`, one's own among them."""
    return (yield from _collective(AllToAll, rank, parts, shapes))


def _collective(
    kind: type[Exchange], rank: int, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> Strategy[list[Tensor]]:
    own = parts[rank]
    if len(parts) == 1:
        return [own]
    others = [r for r in range(len(parts)) if r != rank]
    receives = {r: own.new_empty(tuple(shapes[r])) for r in others}
    arrived = yield kind({r: parts[r] for r in others}, receives)
    return [own if r == rank else arrived[r] for r in range(len(parts))]


def reduce_scatter(rank: int, parts: Sequence[Tensor]) -> Strategy[Tensor]:
    """The sum of all ranks' `parts[rank]`, added in the order of ranks: the same bits on every run and transport."""
    arrived = yield from all_to_all(rank, parts, [parts[rank].shape] * len(parts))
    total = arrived[0].clone()
    for part in arrived[1:]:
        total += part
    return total


class Entry(NamedTuple):
    """One communication as a rank saw it: its kind, and the bytes by the other rank."""

    kind: str
    sent: dict[int, int]
    received: dict[int, int]


@dataclass
class Recorder:
    """Lists what the ranks of this process send, in order, so that tests can compare ranks and count bytes."""

    entries: dict[int, list[Entry]] = field(default_factory=dict)

    def note(self, rank: int, communication: Exchange) -> None:
        sent, received = (
            {r: t.nbytes for r, t in side.items()} for side in (communication.sends, communication.receives)
        )
        self.entries.setdefault(rank, []).append(Entry(type(communication).__name__, sent, received))

    def kinds(self, rank: int) -> list[str]:
        return [entry.kind for entry in self.entries.get(rank, [])]

    def bytes_sent(self, rank: int) -> int:
        """Without those of agreements, which have a few elements each."""
        entries = (entry for entry in self.entries.get(rank, []) if entry.kind != Agreement.__name__)
        return sum(sum(entry.sent.values()) for entry in entries)


class Transport(ABC):
    """Runs strategies, one for each of `ranks`, which are those of this process among the `size` of the group."""

    size: int
    ranks: tuple[int, ...]
    recorder: Recorder | None = None

    @abstractmethod
    def run(self, strategies: Sequence[Strategy[T]], device: torch.device) -> list[T]:
        """What the strategies return. Tensors that are sent are on `device`."""

    def note(self, rank: int, communication: Exchange) -> None:
        assert rank not in communication.sends and rank not in communication.receives, "a rank sends itself nothing"
        if self.recorder is not None:
            self.recorder.note(rank, communication)


class VirtualRanks(Transport):
    """`size` ranks in this process, in lockstep: for tests, for teaching, and to measure kernels without a network.

    What was sent arrives when it is waited for and not before, so a strategy that touches a buffer too early is wrong
    here as it would be on a network; one whose ranks do not match is refused where real ranks would hang.

    >>> VirtualRanks(4).ranks
    (0, 1, 2, 3)
    """

    def __init__(self, size: int, *, recorder: Recorder | None = None) -> None:
        self.size = check_int("size", size, 1, ValueError)
        self.ranks = tuple(range(size))
        self.recorder = recorder

    def run(self, strategies: Sequence[Strategy[T]], device: torch.device) -> list[T]:
        answers: list[Any] = [None] * self.size
        try:
            while True:
                turns = [resume(one, answer) for one, answer in zip(strategies, answers, strict=True)]
                if all(done for done, _ in turns):
                    return [result for _, result in turns]
                answers = self._answer([None if done else yielded for done, yielded in turns])
        finally:
            for strategy in strategies:
                strategy.close()

    def _answer(self, requests: list[Any]) -> list[Any]:
        first = requests[0]
        communications = [_communication(request) for request in requests]
        for rank, (request, communication) in enumerate(zip(requests, communications, strict=True)):
            if type(request) is not type(first) or type(communication) is not type(communications[0]):
                raise CommunicationError(
                    f"rank 0 asks for {_name(first)} where rank {rank} asks for {_name(request)}: real ranks would "
                    "wait for each other until the timeout. Every rank must yield the same sequence."
                )
            if not isinstance(request, Wait):
                self.note(rank, communication)
        if isinstance(first, Start):
            return [Pending(communication) for communication in communications]
        _deliver(communications)
        return [communication.receives for communication in communications]


def unwrap_ranks(results: Sequence[Any], listed: bool, return_lse: bool = False) -> Any:
    """Results of this process's ranks as the caller passed its tensors: as lists, or those of the one rank."""
    if not listed:
        return results[0]
    return tuple(map(list, zip(*results, strict=True))) if return_lse else list(results)


def resume(strategy: Strategy[T], answer: Any) -> tuple[bool, Any]:
    """Whether a strategy has returned, and its result; else the communication that it yields."""
    try:
        return False, strategy.send(answer)
    except StopIteration as stop:
        return True, stop.value


def _communication(request: Any) -> Any:
    if isinstance(request, Wait):
        return request.pending.communication
    return request.communication if isinstance(request, Start) else request


def _name(request: Any) -> str:
    if request is None:
        return "nothing more"
    inner = _communication(request)
    return type(inner).__name__ if inner is request else f"{type(request).__name__}({type(inner).__name__})"


def _deliver(communications: Sequence[Exchange]) -> None:
    for rank, communication in enumerate(communications):
        for other in {*communication.receives, *(r for r, c in enumerate(communications) if rank in c.sends)}:
            sent, buffer = communications[other].sends.get(rank), communication.receives.get(other)
            if sent is None or buffer is None or sent.shape != buffer.shape or sent.dtype is not buffer.dtype:
                raise CommunicationError(
                    f"rank {other} sends {_describe(sent)} where rank {rank} expects {_describe(buffer)}"
                )
            buffer.copy_(sent)


def _describe(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
