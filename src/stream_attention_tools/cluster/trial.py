"""One scheme tried on ranks: how long it takes, how far from one device, how much memory, how many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention.base.errors import refuse
from stream_attention.distributed.query_shard import query_sharded_attention
from stream_attention.distributed.ring import ring_attention
from stream_attention.distributed.shard import shard_sequence, unshard_sequence
from stream_attention.distributed.transport import Recorder, Strategy, Transport, VirtualRanks, all_gather
from stream_attention.distributed.ulysses import ulysses_attention
from stream_attention.ops.attention import attention

from .traffic import Scheme, Workload, sent

Tensors = tuple[Any, ...]


class ClockedRanks(VirtualRanks):
    """Virtual ranks that note how long each rank computes between two communications.

    They take turns on one device, so the sum over all is what that takes, and the sum over turns of the longest in
    each is what ranks with a device each would take if nothing had to be sent.
    """

    def __init__(self, size: int, *, recorder: Recorder | None = None) -> None:
        super().__init__(size, recorder=recorder)
        self._turns: list[list[Callable[[], float]]] = []  # by turn, by rank: milliseconds, once the device is done

    def run(self, strategies: Sequence[Strategy[Any]], device: torch.device) -> list[Any]:
        first = len(self._turns)
        return super().run([self._clocked(one, first, device) for one in strategies], device)

    def _clocked(self, strategy: Strategy[Any], turn: int, device: torch.device) -> Strategy[Any]:
        answer: Any = None
        try:
            while True:
                stop = clock(device, computes=True)
                try:
                    request = strategy.send(answer)
                except StopIteration as ended:
                    return ended.value
                finally:
                    self._note(turn, stop())
                turn += 1
                answer = yield request
        finally:
            strategy.close()

    def _note(self, turn: int, taken: Callable[[], float]) -> None:
        self._turns += [[] for _ in range(turn + 1 - len(self._turns))]
        self._turns[turn].append(taken)

    def taken_ms(self) -> tuple[float, float]:
        """Since the last time this was asked: of all ranks together, and of the longest in every turn."""
        turns = [[taken() for taken in turn] for turn in self._turns]
        self._turns.clear()
        return sum(map(sum, turns)), sum(map(max, turns))


def clock(device: torch.device, computes: bool = False) -> Callable[[], Callable[[], float]]:
    """Starts a clock; the answer stops it, and its answer reads it in milliseconds.

    What only `computes`, and waits for nobody, is timed on one CPU thread by its CPU time, which other load on the
    machine hardly changes.
    """
    if device.type != "cuda":
        now = time.process_time if computes and torch.get_num_threads() == 1 else time.perf_counter
        began = now()

        def stop() -> Callable[[], float]:
            taken = (now() - began) * 1e3
            return lambda: taken

        return stop
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()

    def stop_on_device() -> Callable[[], float]:
        last.record()

        def read() -> float:
            last.synchronize()
            return float(first.elapsed_time(last))

        return read

    return stop_on_device


class Measured(NamedTuple):
    """Milliseconds are the best of the rounds; bytes are of the rank that has or sends most."""

    single_ms: float  # on rank 0
    ranks_ms: float  # of virtual ranks, the sum of what they compute
    critical_ms: float  # of virtual ranks, what a rank would take; of real ones, the slowest rank's time
    difference: float  # largest, of outputs, and gradients where there are some
    allowed: float
    memory_bytes: int
    sent_bytes: int
    formula_bytes: int

    @property
    def right(self) -> bool:
        """Whether the results agree and the bytes are those of the formula."""
        return self.difference <= self.allowed and self.sent_bytes == self.formula_bytes


@dataclass
class Trial:
    """A scheme, a call, and the ranks that share it."""

    scheme: Scheme
    work: Workload
    transport: Transport
    device: torch.device

    def __post_init__(self) -> None:
        if self.scheme.name == "star":
            refuse("scheme", "an exact one", "'star'", "Star attention is an approximation of attention.")
        if self.work.length < 2 * self.transport.size:
            refuse("length", f"at least two rows for each of {self.transport.size} ranks", self.work.length)

    def measure(self, rounds: int = 5) -> Measured:
        """Once for the results and the bytes, once for the memory, then rounds of one device and of the ranks."""
        from ..testing.memory import peak_bytes

        work, recorder = self.work, Recorder()
        self.transport.recorder = recorder
        whole, shards = self._tensors()
        found = self._ranks(shards)()
        self.transport.recorder = None
        sent_bytes = max(self._everyones(float(recorder.bytes_sent(rank)) for rank in self.transport.ranks))
        difference, allowed = self._compared(self._single(whole)(), found)
        del found
        ranks, single = self._ranks(shards), self._single(whole)
        peak = peak_bytes(ranks, self.device) / len(self.transport.ranks)
        memory = max(self._everyones([peak + max(sum(t.nbytes for t in one) for one in zip(*shards, strict=True))]))
        rows = [self._round(single, ranks) for _ in range(rounds)]
        formula = max(
            one.forward + one.backward * work.backward for one in sent(self.scheme, work, self.transport.size)
        )
        single_ms, ranks_ms, critical_ms = (min(column) for column in zip(*rows, strict=True))
        return Measured(single_ms, ranks_ms, critical_ms, difference, allowed, int(memory), int(sent_bytes), formula)

    def _round(self, single: Callable[[], Any], ranks: Callable[[], Any]) -> tuple[float, float, float]:
        """Milliseconds of one device, of the ranks, and of the ranks had each a device."""
        alone = self._timed(single if 0 in self.transport.ranks else lambda: None)
        taken = self._timed(ranks)
        if isinstance(self.transport, ClockedRanks):
            return alone, *self.transport.taken_ms()
        taken = max(self._everyones([taken]))
        return alone, taken, taken

    def _timed(self, call: Callable[[], Any]) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if isinstance(self.transport, ClockedRanks):
            self.transport.taken_ms()
        else:
            self._everyones([0.0])  # all begin together
        stop = clock(self.device)
        call()
        return stop()()

    def _tensors(self) -> tuple[Tensors, list[list[Tensor]]]:
        """query, key, value and the gradient that arrives, whole, the same on all ranks; then the ranks' own."""
        work = self.work
        generator = torch.Generator(self.device).manual_seed(0)
        made: dict[str, Any] = {"generator": generator, "device": self.device, "dtype": work.dtype}
        heads = (work.heads, work.kv_heads, work.kv_heads, work.heads)
        whole = tuple(torch.randn(work.batch, work.length, n, work.dim, **made) for n in heads)
        if self.scheme.name == "query":
            shards = [[t.clone() for _ in self.transport.ranks] for t in whole]
        else:
            options: dict[str, Any] = {"group": self.transport, "layout": self.scheme.layout}
            shards = [self._listed(shard_sequence(t, **options)) for t in whole]
        if work.backward:
            for t in (*whole[:3], *(t for side in shards[:3] for t in side)):
                t.requires_grad_()
        return whole, shards

    def _listed(self, given: Any) -> list[Any]:
        return list(given) if isinstance(given, (list, tuple)) else [given]

    def _single(self, whole: Tensors) -> Callable[[], list[Tensor]]:
        def call() -> list[Tensor]:
            out = attention(*whole[:3], causal=self.work.causal)
            return [out, *torch.autograd.grad(out, whole[:3], whole[3])] if self.work.backward else [out]

        return call

    def _ranks(self, shards: list[list[Tensor]]) -> Callable[[], list[list[Tensor]]]:
        """The call of all ranks of this process: by kind, the results of each."""
        listed = isinstance(self.transport, VirtualRanks)
        query, key, value, arriving = (side if listed else side[0] for side in shards)
        options: dict[str, Any] = {"group": self.transport, "causal": self.work.causal}

        def attend() -> Any:
            if self.scheme.name == "query":
                return query_sharded_attention(query, key, value, **options)
            laid: dict[str, Any] = {"layout": self.scheme.layout, "length": self.work.length}
            if self.scheme.name == "ulysses":
                return ulysses_attention(query, key, value, ring_size=self.scheme.ring_size, **laid, **options)
            rotate: Any = "allgather" if self.scheme.name == "allgather" else "p2p"
            return ring_attention(query, key, value, rotate=rotate, **laid, **options)

        def call() -> list[list[Tensor]]:
            outs = self._listed(attend())
            if not self.work.backward:
                return [outs]
            leaves = [t for side in shards[:3] for t in side]
            grads = torch.autograd.grad(outs, leaves, self._listed(arriving))
            count = len(outs)
            return [outs, *(list(grads[i : i + count]) for i in range(0, len(grads), count))]

        return call

    def _compared(self, single: list[Tensor], ranks: list[list[Tensor]]) -> tuple[float, float]:
        """The largest difference, and what it may be: a few roundings of the largest number, of results and in fp32."""
        differences, largest = [], 1.0
        for alone, its in zip(single, ranks, strict=True):
            for one in its[:1] if self.scheme.name == "query" else [self._whole(its)]:
                differences.append((alone.detach().double() - one.detach().double()).abs().max().item())
            largest = max(largest, alone.detach().abs().max().item())
        roundings = 4 * torch.finfo(self.work.dtype).eps + 16 * torch.finfo(torch.float32).eps
        return max(self._everyones(differences)), roundings * largest

    def _whole(self, shards: list[Tensor]) -> Tensor:
        with torch.no_grad():
            given = shards if isinstance(self.transport, VirtualRanks) else shards[0]
            return self._listed(unshard_sequence(given, group=self.transport, layout=self.scheme.layout))[0]

    def _everyones(self, numbers: Any) -> list[float]:
        """The numbers of all processes."""
        mine = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        if isinstance(self.transport, VirtualRanks):
            return [float(n) for n in mine.tolist()]
        (rank,), size = self.transport.ranks, self.transport.size
        (found,) = self.transport.run([all_gather(rank, mine, [mine.shape] * size)], self.device)
        return [float(n) for one in found for n in one.tolist()]
