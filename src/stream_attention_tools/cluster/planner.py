"""How long a step of attention takes on a cluster, by scheme: predicted from one GPU's speed and the links between.

A prediction is a list of phases, in each of which a rank computes and sends at once, so that a phase takes the longer
of the two. What is computed are the tiles that the strategies ask kernels for, at measured speed (`speed`); what is
sent are the bytes that tests compare with what is sent (`traffic`). The rest is assumed, and `ASSUMPTIONS` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stream_attention.base.errors import refuse
from stream_attention.base.problem import sides_of
from stream_attention.distributed.shard import Layout, Run, by_position, runs_of
from stream_attention.distributed.star import star_rows
from stream_attention.distributed.tiles import EVERYTHING, Sides, tiles

from .speed import ADDED, FOLDED, MERGED, Curve, Direction, Speed, Tile
from .traffic import HeadShare, Scheme, Workload, check_counts, head_shares, sent

ASSUMPTIONS = (
    "ranks are numbered node by node, every GPU has its own network card, and links carry full speed both ways",
    "a phase takes the longer of computing and sending, a message its latency and its bytes by the bandwidth of the "
    "slowest link that some rank uses in it",
    "sending takes nothing from the kernels beside it: no multiprocessors, no memory bandwidth",
    "a collective of P ranks takes log2(P) latencies; an all-gather enters a node once, through all its cards",
    "kernels are as fast as in a whole call of as many keys, slower in proportion where their blocks do not fill the "
    "GPU; states are merged and gradients added at memory bandwidth; a call takes the host a fixed time",
    "memory is that of one call's tensors, without the model's",
)


@dataclass(frozen=True)
class Cluster:
    """Ranks, one per GPU, in nodes. Bandwidths are bytes per second, per GPU and direction; latencies are seconds."""

    ranks: int
    gpus_per_node: int = 8
    nvlink: float = 400e9
    network: float = 50e9
    nvlink_latency: float = 10e-6
    network_latency: float = 20e-6

    def __post_init__(self) -> None:
        check_counts(self, "ranks", "gpus_per_node")
        for name in ("nvlink", "network"):
            if not 0 < getattr(self, name) < math.inf:
                refuse(name, "a positive number of bytes per second", getattr(self, name))
        for name in ("nvlink_latency", "network_latency"):
            if not 0 <= getattr(self, name) < math.inf:
                refuse(name, "a number of seconds of at least 0", getattr(self, name))
        if self.ranks > self.gpus_per_node and self.ranks % self.gpus_per_node:
            refuse("ranks", f"whole nodes of {self.gpus_per_node} GPUs, or less than one", self.ranks)

    @property
    def one_node(self) -> bool:
        return self.ranks <= self.gpus_per_node

    def hop_s(self, size: float) -> float:
        """From every rank to the next one; on several nodes some of these are in another."""
        if self.one_node:
            return self.nvlink_latency + size / self.nvlink
        return self.network_latency + size / min(self.network, self.nvlink)

    def all_to_all_s(self, width: int, size: float) -> float:
        """`size` bytes from every rank to each of the others among `width` neighbours."""
        near = min(width, self.gpus_per_node)
        return self._collective_s(width, (near - 1) * size, (width - near) * size)

    def all_gather_s(self, size: float) -> float:
        """`size` bytes of every rank to all."""
        far = 0.0 if self.one_node else (self.ranks - self.gpus_per_node) / self.gpus_per_node * size
        return self._collective_s(self.ranks, (self.ranks - 1) * size, far)

    def _collective_s(self, width: int, near: float, far: float) -> float:
        latency = self.network_latency if far else self.nvlink_latency
        return math.ceil(math.log2(width)) * latency + max(near / self.nvlink, far / self.network)


class Phase(NamedTuple):
    """A part of a step, so many times in a row."""

    what: str
    compute_s: float = 0.0
    send_s: float = 0.0
    times: int = 1

    @property
    def seconds(self) -> float:
        return self.times * max(self.compute_s, self.send_s)


@dataclass(frozen=True)
class Prediction:
    """One scheme: what the busiest rank does and needs."""

    scheme: Scheme
    phases: tuple[Phase, ...]
    kernel_s: float  # of its computing, what the host does not hold up
    work_s: float  # computing of all ranks together
    sent_bytes: int  # by the rank that sends most
    memory_bytes: float
    exact: bool = True
    sharded: bool = True  # a rank has its shard of the sequence, and not all of it

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def compute_s(self) -> float:
        return _computing(self.phases)

    @property
    def waiting_s(self) -> float:
        """Of the time, that in which nothing is computed."""
        return self.seconds - self.compute_s


def schemes(work: Workload, cluster: Cluster) -> list[Scheme]:
    """Those that `why_not` has no reason against, with every two-dimensional one."""
    layouts: tuple[Layout, ...] = ("contiguous", "zigzag") if work.causal else ("contiguous",)
    found = [Scheme("ring", layout) for layout in layouts] + [Scheme("allgather", layout) for layout in layouts]
    rings = [size for size in range(1, max(2, cluster.ranks)) if cluster.ranks % size == 0]
    found += [Scheme("ulysses", layouts[-1] if size > 1 else "contiguous", size) for size in rings]
    found += [Scheme("query"), Scheme("star")]
    return [scheme for scheme in found if why_not(scheme, work, cluster) is None]


def why_not(scheme: Scheme, work: Workload, cluster: Cluster) -> str | None:
    """Why a scheme cannot do this, in a sentence."""
    ranks = cluster.ranks
    if work.length < 2 * ranks:
        return f"{work.length} rows are less than two for each of {ranks} ranks"
    if scheme.name == "ulysses":
        if ranks % scheme.ring_size:
            return f"a ring of {scheme.ring_size} does not divide {ranks} ranks"
        if ranks // scheme.ring_size > work.heads:
            return f"{work.heads} heads cannot be divided among {ranks // scheme.ring_size} ranks"
    if scheme.name == "star":
        if not work.causal:
            return "star attention encodes a causal context"
        if work.backward:
            return "star attention has no backward"
    return None


def predict(scheme: Scheme, work: Workload, cluster: Cluster, speed: Speed) -> Prediction:
    """What a scheme takes on a cluster of GPUs of this speed."""
    reason = why_not(scheme, work, cluster)
    if reason is not None:
        refuse("scheme", "one that can do this", str(scheme), f"Here {reason}.")
    if scheme.name == "ulysses" and scheme.ring_size == cluster.ranks > 1:
        scheme = Scheme("ring", scheme.layout)  # no heads to divide
    return _Model(scheme, work, cluster, speed).prediction()


def predict_all(work: Workload, cluster: Cluster, speed: Speed) -> list[Prediction]:
    """All schemes, the fastest first; of the two-dimensional ones the fastest that fits."""
    found = [predict(scheme, work, cluster, speed) for scheme in schemes(work, cluster)]
    flat = [one for one in found if one.scheme.ring_size == 1]
    deep = [one for one in found if one.scheme.ring_size > 1]
    deep.sort(key=lambda one: (one.memory_bytes > speed.memory_bytes, one.seconds))
    return sorted([*flat, *deep[:1]], key=lambda one: one.seconds)


def one_gpu_s(work: Workload, speed: Speed) -> float:
    """One GPU alone, the sequence whole, whether it would fit or not."""
    whole = visible_tiles((Run(0, work.length, 0),), (Run(0, work.length, 0),), sides_of(work.causal, None))
    call: Any = {"dtype": work.dtype, "dim": work.dim, "batch": work.batch, "heads": work.heads}
    return sum(speed.kernel_s(direction, tile, **call) for direction in _directions(work) for tile in whole)


class Advice(NamedTuple):
    chosen: Prediction
    reason: str


def recommend(predictions: Sequence[Prediction], speed: Speed) -> Advice:
    """The fastest exact scheme over a sharded sequence that fits; within 1 % of that, the one that sends least."""
    asked = [one for one in predictions if one.exact and one.sharded]
    if not asked:
        refuse("predictions", "some of exact schemes over a sharded sequence", "none")
    fit = [one for one in asked if one.memory_bytes <= speed.memory_bytes] or asked
    best = min(one.seconds for one in fit)
    chosen = min((one for one in fit if one.seconds <= 1.01 * best), key=lambda one: one.sent_bytes)
    words = [_bound(chosen)]
    rivals = sorted((one for one in fit if one is not chosen), key=lambda one: one.seconds)
    if rivals:
        words.append(_rival(rivals[0], chosen))
    too_large = [str(one.scheme) for one in asked if one.memory_bytes > speed.memory_bytes]
    if too_large:
        words.append(f"more memory than the GPU has: {', '.join(too_large)}")
    return Advice(chosen, "; ".join(words))


def _rival(one: Prediction, chosen: Prediction) -> str:
    computes, waits = (
        f"{abs(ms):.3g} ms {'more' if ms > 0 else 'less'}"
        for ms in (1e3 * (one.compute_s - chosen.compute_s), 1e3 * (one.waiting_s - chosen.waiting_s))
    )
    longer = one.seconds / chosen.seconds
    return f"of the others {one.scheme} takes {longer:.3g}x as long: it computes {computes} and waits {waits}"


def _bound(one: Prediction) -> str:
    late = 1 - one.kernel_s / one.compute_s
    if late > 0.1:
        return f"{late:.0%} of its computing time is the host's, whose calls are too small for the GPU"
    if not one.sent_bytes:
        return "nothing is sent"
    share = one.waiting_s / one.seconds
    if share < 0.02:
        return "sending overlaps with computing"
    what = max(one.phases, key=lambda phase: phase.times * max(0.0, phase.send_s - phase.compute_s)).what
    return f"{share:.0%} of its time waits for what is sent, most of it to {what}"


def assumptions(work: Workload, speed: Speed) -> list[str]:
    """What a prediction takes for granted."""
    stands = [
        speed.stands_for(Curve(direction, work.dtype, causal, work.dim))
        for direction in _directions(work)
        for causal in {work.causal, False}
    ]
    return [*ASSUMPTIONS, *dict.fromkeys(one for one in stands if one is not None)]


class _Model:
    """One scheme on one cluster, rank by rank where they differ, by a rank that stands for all where they do not."""

    def __init__(self, scheme: Scheme, work: Workload, cluster: Cluster, speed: Speed) -> None:
        self.scheme, self.work, self.cluster, self.speed = scheme, work, cluster, speed
        self.sides = sides_of(work.causal, None)
        self.ranks = cluster.ranks
        self.rows = -(-work.length // self.ranks)  # of a shard
        self.all_heads = HeadShare(work.heads, work.kv_heads, work.kv_heads)
        self.key_numbers = work.batch * self.rows * work.kv_heads * 2 * work.dim
        self.row_numbers = work.batch * self.rows * work.heads * work.dim

    def prediction(self) -> Prediction:
        phases, work_s = self.phases()
        at_once = replace(self.speed, host_s=0.0)
        kernels, _ = _Model(self.scheme, self.work, self.cluster, at_once).phases()
        bytes_of = (one.forward + self.work.backward * one.backward for one in sent(self.scheme, self.work, self.ranks))
        exact, sharded = self.scheme.name != "star", self.scheme.name != "query"
        needs = max(bytes_of), self.memory_bytes()
        return Prediction(self.scheme, phases, _computing(kernels), work_s, *needs, exact, sharded)

    def phases(self) -> tuple[tuple[Phase, ...], float]:
        """The phases of the busiest rank, and the computing of all ranks together."""
        made = getattr(self, self.scheme.name)
        found: list[Phase] = []
        work_s = 0.0
        for direction in _directions(self.work):
            phases, seconds = made(direction)
            found += [phase for phase in phases if phase.times and (phase.compute_s or phase.send_s)]
            work_s += seconds
        return tuple(found), work_s

    def ring(self, direction: Direction) -> tuple[list[Phase], float]:
        return self.around(direction, self.ranks, self.rows, self.all_heads)

    def around(self, direction: Direction, size: int, rows: int, share: HeadShare) -> tuple[list[Phase], float]:
        """A ring of `size`, whose shards have so many rows."""
        own, other, work_s = self.pairs(direction, size, rows, share)
        if size == 1:
            return [Phase(f"compute, {direction}", own)], work_s
        numbers = self.work.batch * rows * share.kernel_keys * 2 * self.work.dim
        keys, grads = numbers * self.work.itemsize, numbers * self.work.wide
        there, back = self.cluster.hop_s(keys), self.cluster.hop_s(grads)
        what = f"pass keys and values on, {direction}"
        if direction == "forward":
            return [Phase(what, own, there), Phase(what, other, there, size - 2), Phase(what, other)], work_s
        steps = [Phase(what, own, there), Phase(what, other, there if size > 2 else 0.0)]
        if size > 2:  # gradients follow one step behind
            steps += [Phase(what, other, self.cluster.hop_s(keys + grads), size - 3), Phase(what, other, back)]
        return [*steps, Phase("bring the last gradients home", 0.0, back)], work_s

    def allgather(self, direction: Direction) -> tuple[list[Phase], float]:
        own, _, work_s = self.pairs(direction, self.ranks, self.rows, self.all_heads)
        if self.ranks == 1:
            return [Phase(f"compute, {direction}", own)], work_s
        first, last = (self.with_others(direction, rank) for rank in (0, self.ranks - 1))
        work_s = self.ranks * (own + (first + last) / 2)  # in between they are too
        gather = self.cluster.all_gather_s(self.key_numbers * self.work.itemsize)
        phases = [
            Phase(f"gather all keys and values, {direction}", own, gather),
            Phase(f"compute, {direction}", max(first, last)),
        ]
        if direction == "backward":
            home = self.cluster.all_to_all_s(self.ranks, self.key_numbers * self.work.wide)
            phases.append(Phase("bring gradients home", 0.0, home))
        return phases, work_s

    def with_others(self, direction: Direction, rank: int) -> float:
        """Seconds of a rank with the shards of all others, laid out by position."""
        length, layout = self.rows * self.ranks, self.scheme.layout
        shards = {one: runs_of(layout, length, self.ranks, one) for one in range(self.ranks)}
        mine = shards.pop(rank)
        others = [laid for *_, laid in by_position(shards)]
        return self.compute_s(direction, visible_tiles(mine, others, self.sides), self.all_heads, 0)

    def ulysses(self, direction: Direction) -> tuple[list[Phase], float]:
        ring = self.scheme.ring_size
        width = self.ranks // ring
        shares = head_shares(self.work.heads, self.work.kv_heads, width)
        busiest = max(shares, key=lambda one: (one.queries, one.kernel_keys))
        counted = {share: shares.count(share) for share in shares}
        phases, _ = self.around(direction, ring, self.rows * width, busiest)
        work_s = sum(n * self.around(direction, ring, self.rows * width, share)[1] for share, n in counted.items())
        if width == 1:
            return phases, work_s
        unit = self.work.batch * self.rows * self.work.dim
        queries, keys = unit * busiest.queries * self.work.itemsize, unit * 2 * busiest.keys
        if direction == "forward":
            summed = False
            first, last = "exchange rows for heads", "bring rows home"
        else:
            summed = sum(share.keys for share in shares) > self.work.kv_heads
            first, last = "exchange gradients of rows for heads", "bring gradients home"
        size = queries + keys * (self.work.wide if summed else self.work.itemsize)
        sizes = [size, queries] if direction == "forward" else [queries, size]
        there, home = (self.cluster.all_to_all_s(width, one) for one in sizes)
        return [Phase(first, 0.0, there), *phases, Phase(last, 0.0, home)], work_s

    def query(self, direction: Direction) -> tuple[list[Phase], float]:
        layout: Layout = "zigzag" if self.work.causal else "contiguous"
        rows = runs_of(layout, self.work.length, self.ranks, self.ranks // 2)
        found = visible_tiles(rows, (Run(0, self.work.length, 0),), self.sides)
        compute = self.compute_s(direction, found, self.all_heads, self.rows)
        phases = [Phase(f"compute, {direction}", compute)]
        if self.ranks > 1:
            gather = self.cluster.all_gather_s(self.row_numbers * self.work.itemsize)
            phases.append(Phase(f"gather rows, {direction}", 0.0, gather))
        if self.ranks > 1 and direction == "backward":
            share = self.key_numbers * self.work.wide
            summed = self.cluster.all_to_all_s(self.ranks, share) + self.cluster.all_gather_s(share)
            phases.append(Phase("sum gradients of keys and values", 0.0, summed))
        return phases, self.ranks * compute

    def star(self, direction: Direction) -> tuple[list[Phase], float]:
        """One block per rank, and an anchor of a block."""
        runs = star_rows(self.work.length, self.rows, self.rows, self.ranks, min(1, self.ranks - 1))
        found: list[Tile] = []
        for run in runs:
            found += visible_tiles((run,), (run,) if run.start == 0 else (runs[0], run), self.sides)
        compute = self.compute_s(direction, found, self.all_heads, sum(run.length for run in runs))
        return [Phase("compute, forward", compute)], self.ranks * compute

    def pairs(self, direction: Direction, size: int, rows: int, share: HeadShare) -> tuple[float, float, float]:
        """Seconds of a rank with its own shard, with another's at most, and of all ranks with all shards."""
        middle = size // 2
        shards = {rank: runs_of(self.scheme.layout, rows * size, size, rank) for rank in {middle, max(0, middle - 1)}}

        def between(rank: int, owner: int, fresh: int = 0) -> float:
            return self.compute_s(direction, visible_tiles(shards[rank], shards[owner], self.sides), share, fresh)

        own = between(middle, middle, rows)
        if size == 1:
            return own, 0.0, own
        later, earlier = between(middle, middle - 1), between(middle - 1, middle)
        return own, max(later, earlier), size * own + size * (size - 1) / 2 * (later + earlier)

    def compute_s(self, direction: Direction, found: Iterable[Tile], share: HeadShare, fresh: int) -> float:
        """Seconds of tiles with what is done to their results; the first `fresh` rows are of states that begin here."""
        work, speed = self.work, self.speed
        per_row, per_key = work.batch * share.queries * work.dim, work.batch * share.kernel_keys * 2 * work.dim
        call: Any = {"dtype": work.dtype, "dim": work.dim, "batch": work.batch, "heads": share.queries}
        total = speed.memory_s(FOLDED, fresh * per_row)  # zeros at first, and rounded at the end
        for tile in found:
            kernel = speed.kernel_s(direction, tile, **call)
            if direction == "forward":
                first = min(fresh, tile.rows)
                fresh -= first
                after = speed.memory_s(FOLDED, first * per_row) + speed.memory_s(MERGED, (tile.rows - first) * per_row)
            else:
                after = speed.memory_s(ADDED, tile.rows * per_row + tile.keys * per_key)
            total += max(kernel + after, speed.host_s)
        return total

    def memory_bytes(self) -> float:
        """The most that a rank holds at a time: its inputs and outputs, what it was sent, states and gradients."""
        work, name = self.work, self.scheme.name
        # A rank has a shard of rows and keys; or all of them, and computes a shard; or a copy of the anchor too.
        rows, keys = (self.ranks * n if name == "query" else n for n in (self.row_numbers, self.key_numbers))
        state = self.row_numbers
        if name == "star":
            rows, keys, state = 2 * rows, 2 * keys, 2 * state
        buffers = {"ring": 3 * keys, "allgather": 2 * self.ranks * keys}.get(name, 0)  # copied, computed with, coming
        summed = {"ring": 4 * keys, "allgather": (3 * self.ranks + 1) * keys}.get(name, 3 * keys)  # going and coming
        if name == "ulysses":  # moved, and in messages
            buffers = 3 * (rows + keys) + (3 * keys if self.scheme.ring_size > 1 else 0)
        forward = (2 * rows + keys + buffers) * work.itemsize + 5 * state * work.wide  # of a state, four in its merge
        if not work.backward:
            return forward
        buffers += 3 * (rows + keys) if name == "ulysses" else 0
        backward = (3 * rows + keys + buffers) * work.itemsize + (2 * state + summed) * work.wide
        return max(forward, backward)


def _computing(phases: Iterable[Phase]) -> float:
    return sum(phase.times * phase.compute_s for phase in phases)


def _directions(work: Workload) -> tuple[Direction, ...]:
    return ("forward", "backward") if work.backward else ("forward",)


def visible_tiles(q_runs: Sequence[Run], k_runs: Sequence[Run], sides: Sides) -> list[Tile]:
    """The calls of kernels for rows and keys, with how many pairs see each other; no window on the left."""
    found = []
    for tile in tiles(q_runs, k_runs, sides, 0, False):
        rows, keys = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
        visible = rows * keys
        if tile.window != EVERYTHING:  # row i sees the first `begin` + i + 1 columns
            begin = tile.positions.q_start
            none = min(rows, max(0, -begin))
            some = max(0, min(rows, keys - begin) - none)
            visible = some * (begin + none + 1) + some * (some - 1) // 2 + (rows - none - some) * keys
        found.append(Tile(rows, keys, visible))
    return found
