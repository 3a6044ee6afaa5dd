"""ulysses_attention(): every rank receives the whole sequence of some heads, computes, and sends the rows back.

One all-to-all sends rows of queries, keys and values to the ranks that compute their heads, another one sends the
output back; the backward does the same with the gradients. KV heads that several ranks' queries read are sent to each
of them, and gradients that are summed are sent in fp32.

Where there are more ranks than heads, or more than one node, such groups form a ring: rank r * U + u is the u-th of the
U ranks that exchange heads, and the r-th of the R that pass the keys and values of its heads around.

Bytes sent per rank, N rows of all P ranks, e bytes per element: (U-1)/U * N/P * (D + Dv) * (Hq + Hkv) * e, if U divides
Hkv. The ring sends more: its shards have U times the rows and 1/U of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.state import Saved
from .agreement import agreed
from .autograd import Tensors, differentiable, in_dtypes_of
from .call_spec import CallSpec, prepare, runs_between
from .graph_break import graph_break
from .head_exchange import Moving, Side, to_heads, to_rows, within
from .processes import Group, transport_of
from .ring import Ring, Rotation, check_rotation, ring_attention
from .shard import Layout, order_of, runs_of_all
from .shard_attention import wanted_by
from .transport import Strategy, Transport


@graph_break
def ulysses_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    group: Group = None,
    ring_size: int = 1,
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
    """`ring_attention` with heads divided among the ranks instead of keys passed around: the same shards in and out.

    Args:
        group: as there; a device mesh of two dims is (ring, Ulysses), which sets `ring_size`.
        ring_size: R, which divides the P ranks: a ring of R groups of U = P / R ranks, among which heads are divided.
            U is at most Hq.
        layout: that of `shard_sequence(..., group=group)` over all P ranks; not "striped" with a ring.
        rotate: of the ring, if there is one.
        alibi_slopes, sink: a rank's gradient of them is that of its own heads, to be summed over the ranks.
        dropout_p: U must divide Hq then.
        The rest: as in `ring_attention`.

    >>> from stream_attention.distributed import VirtualRanks, shard_sequence
    >>> group = VirtualRanks(4)
    >>> shards = [shard_sequence(x, group=group) for x in torch.randn(3, 1, 10, 8, 16)]
    >>> [out.shape[1] for out in ulysses_attention(*shards, group=group, causal=True)]
    [2, 3, 2, 3]
    """
    arguments = locals()  # all of them, by name
    transport, ring_size = _flat(group, ring_size)
    arguments |= {"group": transport, "ring_size": ring_size}
    check_rotation(rotate)
    if ring_size == 1 and rotate != "p2p":
        refuse("rotate", "'p2p', its default, without a ring", repr(rotate), "A ring has ring_size of at least 2.")
    if ring_size == transport.size:  # no heads to divide
        del arguments["ring_size"]
        return ring_attention(**arguments)
    if ring_size > 1 and layout == "striped":
        refuse("layout", "'contiguous' or 'zigzag' with a ring", "'striped'", "Neighbouring stripes are no stripe.")
    arguments |= {"mask given": mask is not None, "bias given": bias is not None}
    spec = prepare("ulysses_attention", arguments)
    ulysses = _Ulysses(spec, ring_size, layout, rotate, return_lse)
    shards = [ulysses.of_heads(rank, *one) for rank, one in zip(transport.ranks, spec.shards, strict=True)]
    outputs = differentiable(transport, ulysses.forward, ulysses.backward, shards)
    return spec.results([(out, lse if return_lse else out) for out, lse, *_ in outputs], return_lse)


class _Ulysses:
    """The two strategies of one call. Tensors of a rank: query, key, value, mask, bias, alibi_slopes, sink, seed."""

    def __init__(self, spec: CallSpec, ring_size: int, layout: Layout, rotate: Rotation, return_lse: bool) -> None:
        query, key, *_ = spec.shards[0]
        self.spec, self.layout, self.rotate, self.return_lse = spec, layout, rotate, return_lse
        self.width = spec.transport.size // ring_size
        self.q_heads, self.kv_heads, self.reads = _divided(query.shape[2], key.shape[2], self.width)
        if spec.attention.dropout_p and query.shape[2] % self.width:
            hint = "Each rank must compute the same number of heads, by which kernels index the dropout mask."
            refuse("dropout_p", f"0 where Hq={query.shape[2]} is not divided by {self.width} ranks", "dropout", hint)
        self.by_rows = _by_rows(spec)  # of mask and bias
        self.q_sides = self.sides(spec.q_lengths, self.q_heads, query.device)
        self.kv_sides = self.sides(spec.k_lengths, self.kv_heads, query.device)

    def forward(self, rank: int, *tensors: Any) -> Strategy[Tensors]:
        r, u = divmod(rank, self.width)
        query, key, value, mask, bias, *rest = tensors
        rows = [(query, self.q_sides[r]), (key, self.kv_sides[r]), (value, self.kv_sides[r])]
        query, key, value, *moved = yield from self.exchanged(to_heads, rank, [*rows, *self.tiles(r, mask, bias)])
        moved = [None if t is None else t.transpose(1, 2) for t in moved]
        mask, bias = (t if moving is None else moving for t, moving in zip((mask, bias), moved, strict=True))
        attended = self.ring(u).forward(r, query, *self.spread(u, key, value), mask, bias, *rest)
        out, lse = yield from within(self.ring_of(rank), attended)
        out_rows, lse_rows = yield from self.exchanged(to_rows, rank, self.outputs(r, out, lse))
        return out_rows, _by_head(lse_rows), query, key, value, *moved, out, lse

    def backward(self, rank: int, tensors: Tensors, outputs: Tensors, grads: Tensors) -> Strategy[Tensors]:
        r, u = divmod(rank, self.width)
        _, lse_rows, query, key, value, *moved, out, lse = outputs
        mask, bias = (t if moving is None else moving for t, moving in zip(tensors[3:5], moved, strict=True))
        grad_lse = torch.zeros_like(lse_rows) if self.return_lse and grads[1] is None else grads[1]
        grad_out, grad_lse = yield from self.exchanged(to_heads, rank, self.outputs(r, grads[0], grad_lse))
        parts = (query, *self.spread(u, key, value), mask, bias, *tensors[5:])
        # Everyone sends the query's gradient, whether it is wanted there or not.
        wanted = wanted_by(*tensors)._replace(query=True)
        gradients = self.ring(u).gradients(r, parts, Saved(out, lse, grad_out, _by_head(grad_lse)), wanted)
        dq, dk, dv, _, d_bias, *d_rest = yield from within(self.ring_of(rank), gradients)
        dq, dk, dv = dq.to(query.dtype), *self.gathered(u, dk, dv, key.dtype)
        rows = [(dq, self.q_sides[r]), (dk, self.kv_sides[r]), (dv, self.kv_sides[r])]
        dq, dk, dv, _, moved_bias = yield from self.exchanged(to_rows, rank, [*rows, *self.tiles(r, None, d_bias)])
        d_bias = d_bias if moved_bias is None else moved_bias.transpose(1, 2)
        return in_dtypes_of(tensors, (dq, dk, dv, None, d_bias, *d_rest))

    def of_heads(self, rank: int, *tensors: Any) -> Tensors:
        """A rank's tensors; of those that have no rows, only the heads that it computes."""
        query, key, value, mask, bias, slopes, sink, seed = tensors
        heads = self.q_heads[rank % self.width]
        mask, bias = (
            t if t is None or rows or t.shape[1] == 1 else t[:, heads]
            for t, rows in zip((mask, bias), self.by_rows, strict=True)
        )
        slopes = None if slopes is None else slopes[:, heads].contiguous()
        return query, key, value, mask, bias, slopes, None if sink is None else sink[heads].contiguous(), seed

    def exchanged(self, direction: Any, rank: int, moving: Sequence[Moving]) -> Strategy[list[Any]]:
        """`to_heads` or `to_rows` among the ranks that divide the heads."""
        first = rank - rank % self.width
        return (yield from within(range(first, first + self.width), direction(rank % self.width, moving)))

    def ring_of(self, rank: int) -> Sequence[int]:
        """The ranks that compute the same heads."""
        return range(rank % self.width, self.spec.transport.size, self.width)

    def sides(self, lengths: Sequence[int], heads: Sequence[slice], device: torch.device) -> list[Side]:
        """How the ranks of each all-to-all divide rows and heads."""
        runs, found = runs_of_all(self.layout, lengths), []
        for first in range(0, len(lengths), self.width):
            ranks = slice(first, first + self.width)
            order = None if self.layout == "contiguous" else order_of(runs[ranks], device)
            found.append(Side(heads, lengths[ranks], order))
        return found

    def tiles(self, r: int, *tiles: Tensor | None) -> list[Moving]:
        """Mask and bias `[B, H, T, Tk]` as rows and heads; None where they have no rows.

        Whether heads are broadcast follows from the whole tensor: a part with one head may be a rank's own.
        """
        side, full = self.q_sides[r], self.spec.shards[0][3:5]
        broadcast = side._replace(heads=[slice(0, 1)] * self.width)
        return [
            (t.transpose(1, 2), broadcast if whole.shape[1] == 1 else side) if rows and t is not None else (None, side)
            for t, whole, rows in zip(tiles, full, self.by_rows, strict=True)
        ]

    def outputs(self, r: int, out: Tensor, lse: Tensor | None) -> list[Moving]:
        """What a call returns, or its gradients, as rows and heads; the LSE where it is returned."""
        by_row = lse.transpose(1, 2).unsqueeze(-1) if self.return_lse and lse is not None else None
        return [(out, self.q_sides[r]), (by_row, self.q_sides[r])]

    def spread(self, u: int, *tensors: Tensor) -> list[Tensor]:
        """Keys and values, repeated for each query head where the group sizes differ."""
        reads = self.reads[u]
        return [t if reads is None else t[:, :, reads] for t in tensors]

    def gathered(self, u: int, dk: Tensor, dv: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The gradients of what was spread, in fp32 where other ranks' are added to them, else rounded."""
        reads, heads = self.reads[u], self.kv_heads[u]
        wide = torch.promote_types(dtype, torch.float32)
        grads = [dk.to(wide), dv.to(wide)]
        if reads is not None:
            index = torch.tensor(reads, device=dk.device)
            wholes = [g.new_zeros(*g.shape[:2], heads.stop - heads.start, g.shape[3]) for g in grads]
            grads = [whole.index_add_(2, index, g) for whole, g in zip(wholes, grads, strict=True)]
        return grads if self.kv_sides[0].summed else [grad.to(dtype) for grad in grads]

    def ring(self, u: int) -> Ring:
        """The call of the ranks with the u-th heads, whose shards are those of their neighbours together."""
        spec, firsts = self.spec, range(0, self.spec.transport.size, self.width)
        q_lengths, k_lengths = (
            tuple(sum(lengths[first : first + self.width]) for first in firsts)
            for lengths in (spec.q_lengths, spec.k_lengths)
        )
        attention = spec.attention._replace(parts=self.width, part=u)
        q_runs = runs_between(self.layout, q_lengths, spec.offsets, attention.q_base)
        k_runs = runs_between(self.layout, k_lengths, spec.offsets, 0)
        of_ring = replace(spec, attention=attention, q_runs=q_runs, k_runs=k_runs, k_lengths=k_lengths)
        return Ring(of_ring, self.rotate)


def _divided(q_heads: int, kv_heads: int, width: int) -> tuple[list[slice], list[slice], list[list[int] | None]]:
    """Each rank's query heads, the KV heads that they read, and the KV head of each where the group sizes differ."""
    if q_heads < width:
        hint = "Pass ring_size: fewer ranks then divide the heads."
        refuse("query", f"at least a head for each of the {width} ranks that divide them", f"Hq={q_heads}", hint)
    group = q_heads // kv_heads
    queries = [slice(begin, end) for begin, end in pairwise(u * q_heads // width for u in range(width + 1))]
    keys = [slice(s.start // group, (s.stop - 1) // group + 1) for s in queries]
    reads = [[h // group - k.start for h in range(q.start, q.stop)] for q, k in zip(queries, keys, strict=True)]
    return queries, keys, [one if len({one.count(kv) for kv in one}) > 1 else None for one in reads]


def _by_rows(spec: CallSpec) -> tuple[bool, bool]:
    """Whether mask and bias have a row per query, which is sent with it, or one row that is broadcast.

    The shape of a shard of one row is ambiguous, so the ranks compare theirs.
    """
    if all(mask is None and bias is None for _, _, _, mask, bias, *_ in spec.shards):
        return False, False
    ranks: list[Any] = []
    for query, _, _, *tiles in (one[:5] for one in spec.shards):
        lengths = [query.shape[1], *(query.shape[1] if t is None else t.shape[2] for t in tiles)]
        described = [None if t is None else (*t.shape[:2], t.dtype, t.requires_grad) for t in tiles]
        ranks.append((lengths, dict(zip(("mask", "bias"), described, strict=True))))
    table = agreed("ulysses_attention, mask and bias", spec.transport, spec.shards[0][0].device, ranks)
    queries, *counts_of = zip(*table, strict=True)
    by_rows = []
    for name, t, rows in zip(("mask", "bias"), spec.shards[0][3:5], counts_of, strict=True):
        by_rows.append(t is not None and rows == queries)
        if t is not None and rows != queries and set(rows) != {1}:
            refuse(name, "a row per query on every rank, or one row on every rank", f"{list(rows)} rows")
    return by_rows[0], by_rows[1]


def _flat(group: Group, ring_size: Any) -> tuple[Transport, int]:
    """All ranks of a group or of a mesh (ring, Ulysses), and how many there are in a ring."""
    if getattr(group, "ndim", 1) == 2:
        if ring_size not in (1, group.size(0)):
            refuse("ring_size", f"the mesh's first dim, {group.size(0)}, or none", ring_size)
        import torch.distributed as dist

        whole = group.mesh.flatten().tolist() == list(range(dist.get_world_size()))
        ring_size, group = group.size(0), None if whole else group._flatten()
    transport = transport_of(group)
    if isinstance(ring_size, bool) or not isinstance(ring_size, int) or ring_size < 1 or transport.size % ring_size:
        refuse("ring_size", f"an int that divides the {transport.size} ranks", repr(ring_size))
    return transport, ring_size


def _by_head(rows: Tensor | None) -> Tensor | None:
    """`[B, T, H, 1]` as `[B, H, T]`."""
    return None if rows is None else rows.squeeze(-1).transpose(1, 2).contiguous()
