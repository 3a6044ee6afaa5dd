"""ulysses_attention(): every rank gets the whole sequence of some heads, computes, and gives the rows back.

One all-to-all takes rows of queries, keys and values from where they are to where their heads are computed, another one
brings the output home; the backward goes the same ways with the gradients. KV heads that several ranks' queries read go
to each of them, and what is summed travels in fp32.

Where there are more ranks than heads, or more than one node, a ring of such groups does it: rank r * U + u is the u-th
of the U ranks that exchange heads, and the r-th of the R that pass the keys and values of its heads around.

Bytes sent per rank, N rows of all P ranks, e bytes per number: (U-1)/U * N/P * (D + Dv) * (Hq + Hkv) * e, if U divides
Hkv. Then come those of the ring, whose shards have U times the rows and 1/U of the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import refuse
from .agreement import agree
from .autograd import Tensors, differentiable
from .call_spec import Request, prepare
from .call_spec import runs_between as runs_between
from .full_kv import whole_backward, whole_forward
from .graph_break import graph_break
from .head_exchange import Moving, Side, to_heads, to_rows, within
from .processes import Group, transport_of
from .ring import Ring, Rotation, ring_attention
from .shard import Layout, offsets_of, positions_of, runs_of_all
from .shard_attention import Rows, Saved
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
        layout: how `shard_sequence(..., group=group)` laid it out over all P ranks; not "striped" with a ring.
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
    transport, ring_size = _flat(group, ring_size)
    shared: dict[str, Any] = {
        "group": transport,
        "layout": layout,
        "length": length,
        "cu_seqlens": cu_seqlens,
        "causal": causal,
        "window": window,
        "mask": mask,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "sink": sink,
        "softcap": softcap,
        "scale": scale,
        "dropout_p": dropout_p,
        "seed": seed,
        "deterministic": deterministic,
        "return_lse": return_lse,
        "backend": backend,
    }
    if rotate not in get_args(Rotation):
        refuse("rotate", " or ".join(map(repr, get_args(Rotation))), repr(rotate))
    if ring_size == 1 and rotate != "p2p":
        refuse("rotate", "'p2p', its default, without a ring", repr(rotate), "A ring has ring_size of at least 2.")
    if ring_size == transport.size:  # no heads to divide
        return ring_attention(query, key, value, rotate=rotate, **shared)
    if ring_size > 1 and layout == "striped":
        refuse("layout", "'contiguous' or 'zigzag' with a ring", "'striped'", "Neighbouring stripes are no stripe.")
    request = prepare(
        "ulysses_attention",
        query,
        key,
        value,
        **shared,
        facts={
            "ring_size": ring_size,
            "rotate": rotate,
            "mask given": mask is not None,
            "bias given": bias is not None,
        },
    )
    offsets = None if cu_seqlens is None else tuple(offsets_of(cu_seqlens))
    ulysses = _Ulysses(request, ring_size, layout, offsets, rotate, return_lse)
    shards = [ulysses.of_heads(rank, *one) for rank, one in zip(transport.ranks, request.shards, strict=True)]
    outputs = differentiable(transport, ulysses.forward, ulysses.backward, shards)
    return request.results([(out, lse if return_lse else out) for out, lse, *_ in outputs], return_lse)


class _Ulysses:
    """The two strategies of one call. Tensors of a rank: query, key, value, mask, bias, alibi_slopes, sink, seed."""

    def __init__(
        self,
        request: Request,
        ring_size: int,
        layout: Layout,
        offsets: tuple[int, ...] | None,
        rotate: Rotation,
        return_lse: bool,
    ) -> None:
        query, key, *_ = request.shards[0]
        self.request, self.layout, self.offsets = request, layout, offsets
        self.rotate, self.return_lse = rotate, return_lse
        self.width = request.transport.size // ring_size
        self.q_heads, self.kv_heads, self.reads = _divided(query.shape[2], key.shape[2], self.width)
        if request.attention.dropout_p and query.shape[2] % self.width:
            hint = "Masks are by head, and kernels count heads in steps of those that they are given."
            refuse("dropout_p", f"0 where Hq={query.shape[2]} is not divided by {self.width} ranks", "dropout", hint)
        self.q_lengths, self.k_lengths = _q_lengths(request), request.k_lengths
        self.by_rows = _by_rows(request)  # of mask and bias
        self.q_sides = self.sides(self.q_lengths, self.q_heads, query.device)
        self.kv_sides = self.sides(self.k_lengths, self.kv_heads, query.device)

    def forward(self, rank: int, *tensors: Any) -> Strategy[Tensors]:
        r, u = divmod(rank, self.width)
        query, key, value, mask, bias, *rest = tensors
        rows = [(query, self.q_sides[r]), (key, self.kv_sides[r]), (value, self.kv_sides[r])]
        query, key, value, *moved = yield from self.heads_of(rank, [*rows, *self.tiles(r, mask, bias)])
        moved = [None if t is None else t.transpose(1, 2) for t in moved]
        mask, bias = (t if moving is None else moving for t, moving in zip((mask, bias), moved, strict=True))
        pieces = []
        for b, piece in self.pieces((query, *self.spread(u, key, value), mask, bias, *rest)):
            pieces.append((yield from self.attended(rank, b, piece)))
        out, lse = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        out_rows, lse_rows = yield from self.rows_of(rank, self.outputs(r, out, lse))
        return out_rows, _by_head(lse_rows), query, key, value, *moved, out, lse

    def backward(self, rank: int, tensors: Tensors, outputs: Tensors, grads: Tensors) -> Strategy[Tensors]:
        r, u = divmod(rank, self.width)
        _, lse_rows, query, key, value, *moved, out, lse = outputs
        mask, bias = (t if moving is None else moving for t, moving in zip(tensors[3:5], moved, strict=True))
        grad_lse = torch.zeros_like(lse_rows) if self.return_lse and grads[1] is None else grads[1]
        grad_out, grad_lse = yield from self.heads_of(rank, self.outputs(r, grads[0], grad_lse))
        inputs = (query, *self.spread(u, key, value), mask, bias, *tensors[5:])
        pieces = []
        for b, piece in self.pieces((*inputs, out, lse, grad_out, _by_head(grad_lse))):
            # Everyone sends the query's gradient, whether it is wanted there or not.
            wanted = tuple(_wanted(*one) for one in zip(piece[1:8], tensors[1:], strict=True))
            wanted = (piece[0].detach().requires_grad_(), *wanted)
            pieces.append((yield from self.gradients(rank, b, wanted, Saved(*piece[8:]))))
        dq, dk, dv, _, d_bias, *d_rest = (_joined(*one) for one in zip(inputs, zip(*pieces, strict=True), strict=True))
        dq, dk, dv = dq.to(query.dtype), *self.gathered(u, dk, dv, key.dtype)
        rows = [(dq, self.q_sides[r]), (dk, self.kv_sides[r]), (dv, self.kv_sides[r])]
        dq, dk, dv, _, moved_bias = yield from self.rows_of(rank, [*rows, *self.tiles(r, None, d_bias)])
        d_bias = d_bias if moved_bias is None else moved_bias.transpose(1, 2)
        found = (dq, dk, dv, None, d_bias, *d_rest)
        return tuple(None if grad is None else grad.to(t.dtype) for grad, t in zip(found, tensors, strict=True))

    def attended(self, rank: int, b: int, tensors: Tensors) -> Strategy[Tensors]:
        """`(out, lse)` of the heads of a rank: of the rows of its neighbours, over all keys."""
        ring = self.ring(rank % self.width, b)
        if len(ring.k_runs) > 1:
            forward = Ring(ring, self.rotate).forward(rank // self.width, *tensors)
            return (yield from within(self.ring_of(rank), forward))
        query, key, value, *rest = tensors
        return whole_forward(ring.attention, Rows(ring.q_runs[0], query, *rest), key, value, ring.k_runs[0])

    def gradients(self, rank: int, b: int, tensors: Tensors, saved: Saved) -> Strategy[Tensors]:
        ring = self.ring(rank % self.width, b)
        if len(ring.k_runs) > 1:
            outputs, grads = (saved.out, saved.lse), (saved.grad_out, saved.grad_lse)
            gradients = Ring(ring, self.rotate).gradients(rank // self.width, tensors, outputs, grads)
            return (yield from within(self.ring_of(rank), gradients))
        query, key, value, *rest = tensors
        rows = Rows(ring.q_runs[0], query, *rest)
        return whole_backward(ring.attention, rows, key, value, ring.k_runs[0], saved, tensors)

    def of_heads(self, rank: int, *tensors: Any) -> Tensors:
        """A rank's tensors; of those that have no rows, only the heads that it computes."""
        query, key, value, mask, bias, slopes, sink, seed = tensors
        heads = self.q_heads[rank % self.width]
        mask, bias = (
            t if t is None or rows or t.shape[1] == 1 else t[:, heads]
            for t, rows in zip((mask, bias), self.by_rows, strict=True)
        )
        slopes = None if slopes is None else slopes[:, heads].contiguous()
        if slopes is not None and slopes.shape[0] > 1 and self.request.packed and seed is not None:
            slopes = slopes.repeat_interleave(self.width, 0)  # `Run.sequence` is their index, and see `ring`
        return query, key, value, mask, bias, slopes, None if sink is None else sink[heads].contiguous(), seed

    def heads_of(self, rank: int, moving: Sequence[Moving]) -> Strategy[list[Any]]:
        return (yield from within(self.neighbours(rank), to_heads(rank % self.width, moving)))

    def rows_of(self, rank: int, moving: Sequence[Moving]) -> Strategy[list[Any]]:
        return (yield from within(self.neighbours(rank), to_rows(rank % self.width, moving)))

    def neighbours(self, rank: int) -> Sequence[int]:
        """The ranks among which heads are divided."""
        first = rank - rank % self.width
        return range(first, first + self.width)

    def ring_of(self, rank: int) -> Sequence[int]:
        """The ranks that compute the same heads."""
        return range(rank % self.width, self.request.transport.size, self.width)

    def sides(self, lengths: Sequence[int], heads: Sequence[slice], device: torch.device) -> list[Side]:
        """How the ranks of each all-to-all divide rows and heads."""
        positions = [positions_of(runs, device) for runs in runs_of_all(self.layout, lengths)]
        found = []
        for first in range(0, len(lengths), self.width):
            ranks = slice(first, first + self.width)
            order = None if self.layout == "contiguous" else torch.argsort(torch.cat(positions[ranks]))
            found.append(Side(heads, lengths[ranks], order))
        return found

    def tiles(self, r: int, *tiles: Tensor | None) -> list[Moving]:
        """Mask and bias `[B, H, T, Tk]` as rows and heads; None where they have no rows.

        A whole of one head is for all ranks; a part of one head may be a rank's own.
        """
        side, wholes = self.q_sides[r], self.request.shards[0][3:5]
        one = side._replace(heads=[slice(0, 1)] * self.width)
        return [
            (t.transpose(1, 2), one if whole.shape[1] == 1 else side) if rows and t is not None else (None, side)
            for t, whole, rows in zip(tiles, wholes, self.by_rows, strict=True)
        ]

    def outputs(self, r: int, out: Tensor, lse: Tensor | None) -> list[Moving]:
        """What a call returns, or its gradients, as rows and heads; the LSE where it is asked for."""
        asked = lse.transpose(1, 2).unsqueeze(-1) if self.return_lse and lse is not None else None
        return [(out, self.q_sides[r]), (asked, self.q_sides[r])]

    def spread(self, u: int, *tensors: Tensor) -> list[Tensor]:
        """Keys and values, with a head for each query head where these do not share them evenly."""
        reads = self.reads[u]
        return [t if reads is None else t[:, :, reads] for t in tensors]

    def gathered(self, u: int, dk: Tensor, dv: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The gradients of what was spread, in fp32 where other ranks' are going to be added, else rounded."""
        reads, heads = self.reads[u], self.kv_heads[u]
        wide = torch.promote_types(dtype, torch.float32)
        grads = [dk.to(wide), dv.to(wide)]
        if reads is not None:
            index = torch.tensor(reads, device=dk.device)
            wholes = [g.new_zeros(*g.shape[:2], heads.stop - heads.start, g.shape[3]) for g in grads]
            grads = [whole.index_add_(2, index, g) for whole, g in zip(wholes, grads, strict=True)]
        return grads if self.kv_sides[0].summed else [grad.to(dtype) for grad in grads]

    def pieces(self, tensors: Tensors) -> Iterator[tuple[int, Tensors]]:
        """The calls of kernels: one, or with dropout one for each entry of the batch, and its index."""
        batch = tensors[0].shape[0]
        if batch <= 1 or not self.request.attention.dropout_p:
            yield 0, tensors
            return
        for b in range(batch):
            yield b, tuple(t[b : b + 1] if t is not None and _batched(t, batch) else t for t in tensors)

    def ring(self, u: int, b: int) -> Request:
        """The call of the ranks with the u-th heads, for entry b of the batch, as their kernels see it.

        The random stream of a head is that of `batch entry * heads + head`. A kernel with Hq/U heads, the first one
        u * Hq/U, has the streams of entry b if it takes that for entry b * U + u.
        """
        firsts = range(0, len(self.q_lengths), self.width)
        q_lengths, k_lengths = (
            tuple(sum(lengths[first : first + self.width]) for first in firsts)
            for lengths in (self.q_lengths, self.k_lengths)
        )
        attention = self.request.attention
        q_runs = runs_between(self.layout, q_lengths, self.offsets, attention.q_base)
        k_runs = runs_between(self.layout, k_lengths, self.offsets, 0)
        if attention.dropout_p:
            q_runs, k_runs = (
                tuple(tuple(run._replace(sequence=(b + run.sequence) * self.width + u) for run in one) for one in runs)
                for runs in (q_runs, k_runs)
            )
        return replace(self.request, q_runs=q_runs, k_runs=k_runs, k_lengths=k_lengths)


def _divided(q_heads: int, kv_heads: int, width: int) -> tuple[list[slice], list[slice], list[list[int] | None]]:
    """Each rank's query heads, the KV heads that they read, and which of those each one reads, where that is uneven."""
    if q_heads < width:
        hint = "Fewer ranks can divide the heads if rings do the rest: ring_size."
        refuse("query", f"at least a head for each of the {width} ranks that divide them", f"Hq={q_heads}", hint)
    group = q_heads // kv_heads
    queries = [slice(begin, end) for begin, end in pairwise(u * q_heads // width for u in range(width + 1))]
    keys = [slice(s.start // group, (s.stop - 1) // group + 1) for s in queries]
    reads = [[h // group - k.start for h in range(q.start, q.stop)] for q, k in zip(queries, keys, strict=True)]
    return queries, keys, [one if len({one.count(kv) for kv in one}) > 1 else None for one in reads]


def _by_rows(request: Request) -> tuple[bool, bool]:
    """Whether mask and bias have rows of their own, which travel, or one for all rows of all ranks.

    A shard of one row does not say; together the ranks do.
    """
    if all(mask is None and bias is None for _, _, _, mask, bias, *_ in request.shards):
        return False, False
    transport, device = request.transport, request.shards[0][0].device
    strategies = []
    for rank, (query, _, _, *tiles) in zip(transport.ranks, request.shards, strict=True):
        pair = tiles[:2]
        counts = [query.shape[1] if t is None else t.shape[2] for t in pair]
        facts = {
            name: None if t is None else (t.shape[0], t.shape[1], t.dtype, t.requires_grad)
            for name, t in zip(("mask", "bias"), pair, strict=True)
        }
        lengths = [query.shape[1], *counts]
        strategies.append(agree("ulysses_attention, mask and bias", rank, transport.size, device, lengths, facts))
    table = transport.run(strategies, device)[0]
    given = [t is not None for t in request.shards[0][3:5]]
    own = [all(row[0] == row[1 + i] for row in table) for i in range(2)]
    for i, name in enumerate(("mask", "bias")):
        if given[i] and not own[i] and any(row[1 + i] != 1 for row in table):
            rows = [row[1 + i] for row in table]
            refuse(name, "rows of its own on every rank, or one row on every rank", f"{rows} rows")
    return given[0] and own[0], given[1] and own[1]


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


def _wanted(part: Tensor | None, whole: Tensor | None) -> Tensor | None:
    """A part of a tensor that wants a gradient if the whole does: slices made in a backward do not say."""
    if part is None or whole is None or not part.is_floating_point():
        return part
    return part.detach().requires_grad_(whole.requires_grad)


def _batched(t: Tensor, batch: int) -> bool:
    """Whether dim 0 is the batch: not in a sink or a seed, nor where one entry is for all."""
    return t.dim() > 1 and t.shape[0] == batch


def _joined(whole: Tensor | None, parts: Sequence[Tensor | None]) -> Any:
    """Gradients of the entries of a batch as those of the batch; of what they share, their sum."""
    found = [part for part in parts if part is not None]
    if whole is None or not found:
        return None
    return torch.cat(found) if _batched(whole, len(found)) else torch.stack(found).sum(0)


def _by_head(rows: Tensor | None) -> Tensor | None:
    """`[B, T, H, 1]` as `[B, H, T]`."""
    return None if rows is None else rows.squeeze(-1).transpose(1, 2).contiguous()


def _q_lengths(request: Request) -> tuple[int, ...]:
    if request.packed:
        return request.k_lengths
    return tuple(sum(run.length for run in runs) for runs in request.q_runs)
