"""Few queries against a cache in plain torch, on any device: tile by tile of keys, with an online softmax (softmax.py).

A tile is read from the cache as it is kept, dequantised or gathered from its pages there: O(tile) memory. Rows of a
batch may have different lengths, so where a query stands is a number per row, and what it sees is asked of positions.

On a CPU torch's flash op computes a contiguous cache without a softcap, over the keys of a row and no others. Query
heads that share a KV head are rows of one product, where SDPA reads the keys once for each of them. Half precision is
widened tile by tile: the op's products of one row are slow in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...base.kv_layouts import ContiguousKV, KVCache
from ...base.problem import UNBOUNDED, DecodeInputs, Problem
from ...base.state import EMPTY, add_sink, logsumexp
from .softmax import normalised, online_softmax_step
from .torch_cpu import forward_op
from .tuning import DECODE_KEYS, EagerDecodeConfig, spans, widened_keys


class Rows(NamedTuple):
    """The rows of a batch: their queries, and what decides which keys these see. That are the keys of the row, within
    the window, and of the new ones those that the query's row of the tree names. With a tree, a query before position 0
    sees none."""

    problem: Problem
    query: Tensor  # [B, Tq, Hq, D]
    lengths: Tensor  # [B]
    tree: Tensor | None  # bool [B, Tq, Tq]
    slopes: Tensor | None  # [B or 1, Hq]
    sink: Tensor | None  # [Hq]

    def part(self, rows: slice) -> Rows:
        """Some of them."""
        tree, slopes = self.tree, self.slopes
        return self._replace(
            query=self.query[rows],
            lengths=self.lengths[rows],
            tree=None if tree is None else tree[rows],
            slopes=slopes[rows] if slopes is not None and slopes.shape[0] > 1 else slopes,
        )

    @property
    def positions(self) -> Tensor:
        """Where queries stand, `[B, Tq]`."""
        q_len = self.query.shape[1]
        return self.lengths.long()[:, None] - q_len + torch.arange(q_len, device=self.query.device)

    def visible(self, positions: Tensor, at: Tensor) -> Tensor:
        """Bool `[B, Tq, n]`: which of the keys at positions `at` the queries see."""
        (left, right), tree = self.problem.window, self.tree
        before, here = positions[:, :, None], at
        visible = here < self.lengths[:, None, None]
        if right != UNBOUNDED:
            visible = visible & (here <= before + right)
        if left != UNBOUNDED:
            visible = visible & (here >= before - left)
        if tree is not None:
            q_len = tree.shape[-1]
            new = at - (self.lengths.long()[:, None] - q_len)  # [B, n]: which of the new ones a key is
            picked = tree.gather(2, new.clamp(0, q_len - 1)[:, None].expand(-1, q_len, -1))
            visible = visible & (before >= 0) & torch.where(new[:, None] >= 0, picked, True)
        return visible.expand(*positions.shape, -1)


def decode(problem: Problem, inputs: DecodeInputs, config: EagerDecodeConfig) -> tuple[Tensor, Tensor | None]:
    """out `[B, Tq, Hq, Dv]` in the query's dtype, and lse `[B, Hq, Tq]`, fp32 (fp64 for fp64), if wanted. A workspace
    is not used."""
    query, cache, tree, slopes, sink, out, return_lse, _ = inputs
    lengths, batch = cache.lengths, query.shape[0]
    if lengths is None:
        lengths = torch.full((cache.batch,), cache.capacity, dtype=torch.int32, device=query.device)
    rows, state = Rows(problem, query, lengths.clamp(max=cache.capacity), tree, slopes, sink), None
    if isinstance(cache, ContiguousKV) and _op_can(query, cache, problem):
        state = _decode_by_op(rows, cache)
    if state is None and config.row_by_row and batch > 1:
        # Each row as if it were alone: the sums of a matrix product may depend on its shape.
        alone = (slice(b, b + 1) for b in range(batch))
        outs, lses = zip(*(_decode(rows.part(row), cache, row) for row in alone), strict=True)
        state = torch.cat(outs), torch.cat(lses)
    result, lse = state or _decode(rows, cache, slice(None))
    return result if out is None else out.copy_(result), lse if return_lse else None


def _op_can(query: Tensor, cache: ContiguousKV, problem: Problem) -> bool:
    """Whether torch's CPU flash op computes a call. It has one head dim, no softcap, no derivative in forward mode and
    no rule for vmap; and lengths have to be looked at."""
    return (
        query.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and problem.softcap == 0.0
        and cache.head_dim == cache.value_dim > 0
        and min(query.shape) > 0
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
    )


def _decode_by_op(rows: Rows, cache: ContiguousKV) -> tuple[Tensor, Tensor] | None:
    """None where a NaN may have come from a key that a query does not see."""
    query, lengths, kv_heads = rows.query, rows.lengths.tolist(), cache.kv_heads
    batch, q_len, q_heads, dim = query.shape
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    # Rows of equal lengths are computed at once, each with the bits that it has alone. Widened tiles are best small.
    together = query.dtype is wide and lengths.count(lengths[0]) == batch
    folded = query.to(wide)
    if folded.stride(3) != 1:  # the op reads a row element after element
        folded = folded.contiguous()
    if q_len == 1:
        folded = folded.reshape(batch, kv_heads, -1, dim)
    else:
        folded = folded.view(batch, q_len, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    groups = [(slice(b, b + 1), length) for b, length in enumerate(lengths)]
    groups = [(slice(None), lengths[0])] if together else groups
    states = [_rows_by_op(folded[group], rows, cache, group, length) for group, length in groups]
    out, lse = states[0] if together else (torch.cat(parts) for parts in zip(*states, strict=True))
    if (q_len > 1 or rows.tree is not None) and bool(out.sum().isnan()):
        return None
    lse = lse.reshape(batch, q_heads, q_len)
    if q_len == 1:
        out = out.reshape(batch, q_len, q_heads, dim)
    else:
        out = out.reshape(batch, q_heads, q_len, dim).transpose(1, 2).contiguous()
    if rows.sink is not None:
        out, lse = add_sink(out, lse, rows.sink)
    return out if together else out.to(query.dtype), lse


def _rows_by_op(query: Tensor, rows: Rows, cache: ContiguousKV, group: slice, length: int) -> tuple[Tensor, Tensor]:
    """Rows of one length: out `[b, Hkv, R, D]` and lse `[b, Hkv, R]` of wide queries `[b, Hkv, R, D]`. R counts the
    queries of all heads that share a KV head."""
    q_len, left, scale = rows.query.shape[1], rows.problem.left, rows.problem.scale
    begin = 0 if left == UNBOUNDED else max(0, length - q_len - left)
    step = max(length - begin, 1)
    if cache.dtype is not query.dtype:
        step = widened_keys(cache.kv_heads * cache.head_dim)
    outs, lses = [], []
    for start, stop in spans(begin, length, step):
        key, value = cache.key[group, start:stop].transpose(1, 2), cache.value[group, start:stop].transpose(1, 2)
        if cache.dtype is not query.dtype:
            key, value = key.to(query.dtype), value.to(query.dtype)
        mask, visible = _op_mask(query, rows, group, start, stop)
        out, lse = forward_op(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        if visible is not None:  # the op gives a row that sees none of the keys LSE 0
            sees = visible.any(-1)[:, None, None].expand(-1, -1, query.shape[2] // q_len, -1).flatten(2)
            lse = lse.masked_fill(~sees, EMPTY)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return torch.zeros_like(query), query.new_full(query.shape[:3], EMPTY)
    if len(outs) == 1:
        return outs[0], lses[0]
    stacked = torch.stack(lses)
    lse = logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - lse.clamp_min(torch.finfo(lse.dtype).min))
    return (torch.stack(outs) * weights.unsqueeze(-1)).sum(0), lse


def _op_mask(query: Tensor, rows: Rows, group: slice, start: int, stop: int) -> tuple[Tensor | None, Tensor | None]:
    """What the op adds to the scores of a tile, `[b, Hkv, R, n]`, dims may be 1, and what queries see, bool
    `[b, Tq, n]`; None: nothing, everything."""
    q_len = rows.query.shape[1]
    hides = rows.tree is not None or (q_len > 1 and tuple(rows.problem.window) != (UNBOUNDED, UNBOUNDED))
    if not hides and rows.slopes is None:
        return None, None
    rows, at = rows.part(group), torch.arange(start, stop, device=query.device)
    positions, per_head = rows.positions, query.shape[2] // q_len
    added = query.new_zeros(1, 1, 1, q_len, stop - start)  # [b, Hkv, group, Tq, n]
    if rows.slopes is not None:
        slopes = rows.slopes.to(query.dtype).view(-1, query.shape[1], per_head, 1, 1)
        added = slopes * -(positions[:, :, None] - at).abs()[:, None, None]
    visible = None
    if hides:
        visible = rows.visible(positions, at)
        added = added.masked_fill(~visible[:, None, None], EMPTY)
    return added.expand(-1, -1, per_head, -1, -1).flatten(2, 3), visible


def _decode(rows: Rows, cache: KVCache, of_cache: slice) -> tuple[Tensor, Tensor]:
    """Tile by tile; `of_cache` are the cache's rows that these are."""
    problem, query, device = rows.problem, rows.query, rows.query.device
    batch, q_len, q_heads, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide).unflatten(2, (cache.kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Tq, D]
    shape = q.shape[:-1]
    row_max = q.new_full(shape, -torch.inf)
    row_sum = q.new_zeros(shape)
    acc = q.new_zeros(*shape, cache.value_dim)
    positions = rows.positions
    slopes = None
    if rows.slopes is not None:
        slopes = rows.slopes.to(wide).view(-1, cache.kv_heads, q_heads // cache.kv_heads, 1, 1)
    begin, end = 0, cache.capacity
    if device.type == "cpu" and batch and not torch.compiler.is_compiling():  # elsewhere looking would synchronise
        end = min(end, int(rows.lengths.max()))
        if problem.left != UNBOUNDED:  # whole tiles before the window of every query are skipped
            begin = max(0, int(rows.lengths.min()) - q_len - problem.left) // DECODE_KEYS * DECODE_KEYS
    for start, stop in spans(begin, end, DECODE_KEYS):
        key, value = (t[of_cache] for t in cache.tile(start, stop))
        at = torch.arange(start, stop, device=device)
        visible = rows.visible(positions, at)[:, None, None]  # [B, 1, 1, Tq, n]
        some = visible.any(-2)[:, 0, 0, :, None, None]  # a key that nobody sees may hold anything
        k = torch.where(some, key.to(wide), 0.0).permute(0, 2, 3, 1)  # [B, Hkv, D, n]
        v = torch.where(some, value.to(wide), 0.0).transpose(1, 2)  # [B, Hkv, n, Dv]
        s = (q.flatten(2, 3) @ k).unflatten(2, shape[2:4]) * problem.scale
        if problem.softcap:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        if slopes is not None:
            s = s - slopes * (positions[:, :, None] - at).abs()[:, None, None]
        s = s.masked_fill(~visible, -torch.inf)
        row_max, row_sum, rescale, p = online_softmax_step(s, row_max, row_sum)
        acc = acc * rescale[..., None] + (p.flatten(2, 3) @ v).unflatten(2, shape[2:4])
    out, lse = normalised(acc, row_max, row_sum)
    out, lse = out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.flatten(1, 2)
    if rows.sink is not None:
        out, lse = add_sink(out, lse, rows.sink)
    return out.to(query.dtype), lse
