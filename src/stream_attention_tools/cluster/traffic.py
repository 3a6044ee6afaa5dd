"""How many bytes every rank sends, by scheme: exact formulas, which tests compare with what a `Recorder` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from stream_attention.base.errors import check_int, refuse
from stream_attention.distributed.shard import Layout, shard_length

SchemeName = Literal["ring", "allgather", "ulysses", "query", "star"]


def check_counts(of: object, *names: str) -> None:
    for name in names:
        check_int(name, getattr(of, name), 1, ValueError)


@dataclass(frozen=True)
class Workload:
    """One attention call over a sequence that P ranks share; values have the head dim of keys."""

    length: int
    heads: int
    kv_heads: int
    dim: int
    batch: int = 1
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16
    backward: bool = False  # a training step: the forward, and the backward too

    def __post_init__(self) -> None:
        check_counts(self, "length", "heads", "kv_heads", "dim", "batch")
        if self.heads % self.kv_heads:
            refuse("kv_heads", f"a divisor of the {self.heads} heads", self.kv_heads)
        if not self.dtype.is_floating_point:
            refuse("dtype", "a floating dtype", self.dtype)

    def __str__(self) -> str:
        shape = f"B={self.batch} T={self.length} Hq={self.heads} Hkv={self.kv_heads} D={self.dim}"
        return f"{shape} {str(self.dtype).removeprefix('torch.')} {'causal' if self.causal else 'full'}"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of a number that is still to be summed."""
        return max(4, self.itemsize)


class Scheme(NamedTuple):
    """How ranks share a call: the name of a strategy and its arguments."""

    name: SchemeName
    layout: Layout = "contiguous"
    ring_size: int = 1  # of ulysses: that many groups pass keys and values around

    def __str__(self) -> str:
        if self.name == "ulysses" and self.ring_size > 1:
            return f"ulysses x ring of {self.ring_size}"
        words = {"ring": f"ring {self.layout}", "allgather": f"all-gather {self.layout}"}
        return words.get(self.name, {"query": "query sharding", "star": "star phase 1"}.get(self.name, self.name))


class Sent(NamedTuple):
    """Bytes that a rank sends."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other: object) -> Sent:
        assert isinstance(other, Sent)
        return Sent(self.forward + other.forward, self.backward + other.backward)


class HeadShare(NamedTuple):
    """What one of the ranks computes that divide the heads."""

    queries: int
    keys: int  # KV heads that its query heads read
    kernel_keys: int  # KV heads passed to its kernels: more, where its query heads share them unevenly


def sent(scheme: Scheme, work: Workload, ranks: int) -> list[Sent]:
    """By rank, what it sends in the forward and in the backward. Every rank has at least two rows.

    >>> sent(Scheme("ring", "zigzag"), Workload(1024, heads=8, kv_heads=2, dim=64), ranks=4)[0].forward
    393216
    """
    if ranks == 1 or scheme.name == "star":
        return [Sent()] * ranks
    lengths = [shard_length(scheme.layout, work.length, ranks, rank) for rank in range(ranks)]
    if scheme.name == "query":
        return _query(work, ranks)
    if scheme.name == "ulysses":
        return _ulysses(scheme, work, lengths)
    row = work.batch * work.kv_heads * 2 * work.dim
    return _ring(lengths, row, work, in_order(scheme, work), gathered=scheme.name == "allgather")


def in_order(scheme: Scheme, work: Workload) -> bool:
    """Whether earlier ranks see nothing of later ones."""
    return work.causal and scheme.layout == "contiguous"


def head_shares(heads: int, kv_heads: int, ranks: int) -> list[HeadShare]:
    """Of each of the ranks that divide the heads among them.

    >>> head_shares(heads=8, kv_heads=2, ranks=4)[0]
    HeadShare(queries=2, keys=1, kernel_keys=1)
    """
    group = heads // kv_heads
    shares = []
    for rank in range(ranks):
        reads = [head // group for head in range(rank * heads // ranks, (rank + 1) * heads // ranks)]
        even = len({reads.count(kv) for kv in reads}) == 1
        shares.append(HeadShare(len(reads), len(set(reads)), len(set(reads)) if even else len(reads)))
    return shares


def _ring(lengths: Sequence[int], row: int, work: Workload, ordered: bool, gathered: bool = False) -> list[Sent]:
    """A shard visits all who see it, and its gradient follows; `row` is the numbers of a row of keys and values."""
    size, total = len(lengths), sum(lengths)
    before = list(accumulate(lengths, initial=0))
    found = []
    for rank, mine in enumerate(lengths):
        if gathered:
            there, back = (size - 1) * mine, total - mine
        elif ordered:  # no shard visits a rank before its owner; gradients go home from the last rank
            there, back = before[rank + 1] if rank < size - 1 else 0, before[rank]
        else:
            there, back = total - lengths[(rank + 1) % size], total - mine
        keys = there * row * work.itemsize
        found.append(Sent(keys, keys + back * row * work.wide))
    return found


def _ulysses(scheme: Scheme, work: Workload, lengths: Sequence[int]) -> list[Sent]:
    """Queries, keys and values to their heads, the output home; the gradients the same ways. Then what a ring sends."""
    ring = scheme.ring_size
    width = len(lengths) // ring
    shares = head_shares(work.heads, work.kv_heads, width)
    unit, dim = work.batch * work.itemsize, work.dim
    summed = sum(share.keys for share in shares) > work.kv_heads
    grad_unit = work.batch * (work.wide if summed else work.itemsize)
    groups = [lengths[first : first + width] for first in range(0, len(lengths), width)]
    rows = list(map(sum, groups))
    rings = {
        keys: _ring(rows, work.batch * keys * 2 * dim, work, in_order(scheme, work)) if ring > 1 else [Sent()]
        for keys in {share.kernel_keys for share in shares}
    }
    found = []
    for rank, mine in enumerate(lengths):
        r, u = divmod(rank, width)
        share, others = shares[u], rows[r] - mine
        queries, keys = work.heads - share.queries, sum(one.keys for one in shares) - share.keys
        forward = (mine * (queries + 2 * keys) + others * share.queries) * dim * unit
        backward = (mine * queries + others * share.queries) * dim * unit + others * 2 * share.keys * dim * grad_unit
        found.append(Sent(forward, backward) + rings[share.kernel_keys][r])
    return found


def _query(work: Workload, ranks: int) -> list[Sent]:
    """The output's rows to everyone; in the backward the query's gradients, and the sums of keys' and values'."""
    layout: Layout = "zigzag" if work.causal else "contiguous"
    numbers = work.batch * work.length * work.kv_heads * work.dim  # of a gradient that is summed in shares
    found = []
    for rank in range(ranks):
        mine = shard_length(layout, work.length, ranks, rank) * work.batch * work.heads * work.dim * work.itemsize
        share = numbers // ranks + (rank < numbers % ranks)
        summed = numbers - share + (ranks - 1) * share
        found.append(Sent((ranks - 1) * mine, (ranks - 1) * mine + 2 * summed * work.wide))
    return found
