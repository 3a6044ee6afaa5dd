"""Few queries against a cache in plain torch, on any device: tile by tile of keys, with a running softmax.

    m' = max(m, max_j s_j)      l' = l e^(m - m') + sum_j e^(s_j - m')      o' = o e^(m - m') + sum_j e^(s_j - m') v_j

A tile is read from the cache as it is kept, dequantised or gathered from its pages there: O(tile) memory. Rows of a
batch may have different lengths, so where a query stands is a number per row, and what it sees is asked of positions.

On a CPU torch's flash op computes a contiguous cache without a softcap, over the keys of a row and no others. Query
heads that share a KV head are rows of one product, where SDPA reads the keys once for each of them. Half precision is
widened tile by tile: the op's products of one row are slow in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...base.kv_layouts import ContiguousKV, KVCache
from ...base.problem import UNBOUNDED, DecodeInputs, Problem
from ...base.state import EMPTY, add_sink, logsumexp
from .torch_cpu import forward_op
from .tuning import DECODE_KEYS, EagerDecodeConfig, widened_keys

Tile = Callable[[int, int], tuple[Tensor, Tensor]]
"""Keys and values from a position to another."""


class Seen(NamedTuple):
    """Which keys a query sees, by position: those of its row, from `left` before it to `right` after it (None: all),
    and of the new ones those that its row of the tree names. With a tree, a query before position 0 sees none."""

    lengths: Tensor  # [B]
    left: int | None
    right: int | None
    tree: Tensor | None  # bool [B, Tq, Tq]


class Scores(NamedTuple):
    scale: float
    softcap: float
    slopes: Tensor | None  # [B or 1, Hq]
    sink: Tensor | None  # [Hq]


def decode(problem: Problem, inputs: DecodeInputs, config: EagerDecodeConfig) -> tuple[Tensor, Tensor | None]:
    """out `[B, Tq, Hq, Dv]` in the query's dtype, and lse `[B, Hq, Tq]`, fp32 (fp64 for fp64), if wanted. A workspace
    is not used."""
    query, cache, tree, slopes, sink, out, return_lse, _ = inputs
    lengths = cache.lengths
    if lengths is None:
        lengths = torch.full((cache.batch,), cache.capacity, dtype=torch.int32, device=query.device)
    left, right = (None if side == UNBOUNDED else side for side in problem.window)
    seen, batch = Seen(lengths.clamp(max=cache.capacity), left, right, tree), query.shape[0]
    scores, state = Scores(problem.scale, problem.softcap, slopes, sink), None
    if isinstance(cache, ContiguousKV) and _op_can(query, cache, scores):
        state = _decode_by_op(query, cache, seen, scores)
    if state is None and config.row_by_row and batch > 1:
        outs, lses = zip(*(_decode_row(b, query, cache, seen, scores) for b in range(batch)), strict=True)
        state = torch.cat(outs), torch.cat(lses)
    result, lse = state or _decode(query, cache.tile, cache.capacity, cache.kv_heads, cache.value_dim, seen, scores)
    return result if out is None else out.copy_(result), lse if return_lse else None


def _op_can(query: Tensor, cache: ContiguousKV, scores: Scores) -> bool:
    """Whether torch's CPU flash op computes a call. It has one head dim, no softcap, no derivative in forward mode and
    no rule for vmap; and lengths have to be looked at."""
    return (
        query.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and scores.softcap == 0.0
        and cache.head_dim == cache.value_dim > 0
        and min(query.shape) > 0
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
    )


def _decode_by_op(query: Tensor, cache: ContiguousKV, seen: Seen, scores: Scores) -> tuple[Tensor, Tensor] | None:
    """None where a NaN may have come from a key that a query does not see."""
    batch, q_len, q_heads, dim = query.shape
    lengths, kv_heads = seen.lengths.tolist(), cache.kv_heads
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
    states = [_rows_by_op(folded[group], cache, group, length, seen, scores, q_len) for group, length in groups]
    out, lse = states[0] if together else (torch.cat(parts) for parts in zip(*states, strict=True))
    if (q_len > 1 or seen.tree is not None) and bool(out.sum().isnan()):
        return None
    lse = lse.reshape(batch, q_heads, q_len)
    if q_len == 1:
        out = out.reshape(batch, q_len, q_heads, dim)
    else:
        out = out.reshape(batch, q_heads, q_len, dim).transpose(1, 2).contiguous()
    if scores.sink is not None:
        out, lse = add_sink(out, lse, scores.sink)
    return out if together else out.to(query.dtype), lse


def _rows_by_op(
    query: Tensor, cache: ContiguousKV, group: slice, length: int, seen: Seen, scores: Scores, q_len: int
) -> tuple[Tensor, Tensor]:
    """Rows of one length: out `[b, Hkv, R, D]` and lse `[b, Hkv, R]` of wide queries `[b, Hkv, R, D]`. R counts the
    queries of all heads that share a KV head."""
    begin = 0 if seen.left is None else max(0, length - q_len - seen.left)
    step = max(length - begin, 1)
    if cache.dtype is not query.dtype:
        step = widened_keys(cache.kv_heads * cache.head_dim)
    outs, lses = [], []
    for start in range(begin, length, step):
        stop = min(start + step, length)
        key, value = cache.key[group, start:stop].transpose(1, 2), cache.value[group, start:stop].transpose(1, 2)
        if cache.dtype is not query.dtype:
            key, value = key.to(query.dtype), value.to(query.dtype)
        mask, visible = _op_mask(query, group, start, stop, seen, scores, q_len)
        out, lse = forward_op(query, key, value, 0.0, False, attn_mask=mask, scale=scores.scale)
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


def _op_mask(
    query: Tensor, group: slice, start: int, stop: int, seen: Seen, scores: Scores, q_len: int
) -> tuple[Tensor | None, Tensor | None]:
    """What the op adds to the scores of a tile, `[b, Hkv, R, n]`, dims may be 1, and what queries see, bool
    `[b, Tq, n]`; None: nothing, everything."""
    hides = seen.tree is not None or (q_len > 1 and (seen.left is not None or seen.right is not None))
    if not hides and scores.slopes is None:
        return None, None
    lengths = seen.lengths[group]
    at = torch.arange(start, stop, device=query.device)
    position = lengths.long()[:, None] - q_len + torch.arange(q_len, device=query.device)  # [b, Tq]
    added = query.new_zeros(1, 1, 1, q_len, stop - start)  # [b, Hkv, group, Tq, n]
    if scores.slopes is not None:
        slopes = scores.slopes[group] if scores.slopes.shape[0] > 1 else scores.slopes
        slopes = slopes.to(query.dtype).view(-1, query.shape[1], query.shape[2] // q_len, 1, 1)
        added = slopes * -(position[:, :, None] - at).abs()[:, None, None]
    visible = None
    if hides:
        tree = None if seen.tree is None else seen.tree[group]
        visible = _visible(seen._replace(lengths=lengths, tree=tree), position, at)
        added = added.masked_fill(~visible[:, None, None], EMPTY)
    per_head = query.shape[2] // q_len
    return added.expand(-1, -1, per_head, -1, -1).flatten(2, 3), visible


def _decode_row(b: int, query: Tensor, cache: KVCache, seen: Seen, scores: Scores) -> tuple[Tensor, Tensor]:
    """Row b as if it were alone: the sums of a matrix product may depend on its shape."""
    row = slice(b, b + 1)

    def tile(start: int, stop: int) -> tuple[Tensor, Tensor]:
        key, value = cache.tile(start, stop)
        return key[row], value[row]

    of_row = seen._replace(lengths=seen.lengths[row], tree=None if seen.tree is None else seen.tree[row])
    if scores.slopes is not None and scores.slopes.shape[0] > 1:
        scores = scores._replace(slopes=scores.slopes[row])
    return _decode(query[row], tile, cache.capacity, cache.kv_heads, cache.value_dim, of_row, scores)


def _decode(
    query: Tensor, tile: Tile, capacity: int, kv_heads: int, value_dim: int, seen: Seen, scores: Scores
) -> tuple[Tensor, Tensor]:
    batch, q_len, q_heads, _ = query.shape
    device = query.device
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Tq, D]
    shape = q.shape[:-1]
    row_max = q.new_full(shape, -torch.inf)
    row_sum = q.new_zeros(shape)
    sums = q.new_zeros(*shape, value_dim)
    position = seen.lengths.long()[:, None] - q_len + torch.arange(q_len, device=device)  # [B, Tq]
    slopes = None
    if scores.slopes is not None:
        slopes = scores.slopes.to(wide).view(-1, kv_heads, q_heads // kv_heads, 1, 1)
    begin, end = 0, capacity
    if device.type == "cpu" and batch and not torch.compiler.is_compiling():  # elsewhere looking would synchronise
        end = min(end, int(seen.lengths.max()))
        if seen.left is not None:  # whole tiles before the window of every query are skipped
            begin = max(0, int(seen.lengths.min()) - q_len - seen.left) // DECODE_KEYS * DECODE_KEYS
    for start in range(begin, end, DECODE_KEYS):
        stop = min(start + DECODE_KEYS, end)
        key, value = tile(start, stop)
        at = torch.arange(start, stop, device=device)
        visible = _visible(seen, position, at)[:, None, None]  # [B, 1, 1, Tq, n]
        some = visible.any(-2)[:, 0, 0, :, None, None]  # a key that nobody sees may hold anything
        k = torch.where(some, key.to(wide), 0.0).permute(0, 2, 3, 1)  # [B, Hkv, D, n]
        v = torch.where(some, value.to(wide), 0.0).transpose(1, 2)  # [B, Hkv, n, Dv]
        s = (q.flatten(2, 3) @ k).unflatten(2, shape[2:4]) * scores.scale
        if scores.softcap:
            s = scores.softcap * torch.tanh(s / scores.softcap)
        if slopes is not None:
            s = s - slopes * (position[:, :, None] - at).abs()[:, None, None]
        s = s.masked_fill(~visible, -torch.inf)
        row_max, finite, shrink = _rescaled(row_max, s.amax(-1))
        p = torch.exp(s - finite[..., None])
        row_sum = row_sum * shrink + p.sum(-1)
        sums = sums * shrink[..., None] + (p.flatten(2, 3) @ v).unflatten(2, shape[2:4])
    if scores.sink is not None:
        sink = scores.sink.to(wide).view(kv_heads, -1, 1)
        row_max, finite, shrink = _rescaled(row_max, sink)
        row_sum = row_sum * shrink + torch.exp(sink - finite)
        sums = sums * shrink[..., None]
    empty = row_sum == 0  # NaN is not: what a query sees shows
    out = torch.where(empty[..., None], 0.0, sums / row_sum[..., None])
    lse = torch.where(empty, -torch.inf, row_max + torch.log(row_sum))
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype), lse.flatten(1, 2)


def _rescaled(row_max: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new row max, the same with 0 for -inf, and what sums so far are multiplied with."""
    new_max = torch.maximum(row_max, seen)
    finite = torch.where(new_max == -torch.inf, 0.0, new_max)
    return new_max, finite, torch.exp(row_max - finite)


def _visible(seen: Seen, position: Tensor, at: Tensor) -> Tensor:
    """Bool [B, Tq, n]: which of the keys at positions `at` the queries at `position` see."""
    before, here = position[:, :, None], at
    visible = here < seen.lengths[:, None, None]
    if seen.right is not None:
        visible = visible & (here <= before + seen.right)
    if seen.left is not None:
        visible = visible & (here >= before - seen.left)
    if seen.tree is not None:
        q_len = seen.tree.shape[-1]
        new = at - (seen.lengths.long()[:, None] - q_len)  # [B, n]: which of the new ones a key is
        picked = seen.tree.gather(2, new.clamp(0, q_len - 1)[:, None].expand(-1, q_len, -1))
        visible = visible & (before >= 0) & torch.where(new[:, None] >= 0, picked, True)
    return visible.expand(*position.shape, -1)
