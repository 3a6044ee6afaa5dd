"""Attention in plain torch, on any device, in O(N) memory: the CPU path, and the fallback everywhere else.

Two ways, chosen by the plan (backends/eager/tuning.py): torch's own CPU flash op, or a blocked streaming pass that does
everything. The pass walks tiles of scores with an online softmax (softmax.py), and the backward recomputes each tile
from the saved LSE: p = exp(s - lse), ds = p * (dp - delta).

A tile has two shapes over one memory: `[B, Hq, m, n]`, in which the modifiers are written, and `[B*Hkv, group*m, n]`,
in which the products run, so K and V are never expanded for GQA. What is hidden is exactly 0 in p and ds, and rows of
K, V, Q and dO that a tile hides altogether are zeroed before a product, as 0 * NaN is NaN: padding may hold anything.

The passes over a tile are chosen for what torch vectorises on a CPU (AMD EPYC, AVX-512, one core, a tile of 2 MiB,
2026-11-15): exp2 takes 0.2 ms whatever it is given, exp 0.4 ms and up to 15 ms where results are 0 or denormal; minima
take 0.05 ms, masked_fill 1.3 ms; amax of bytes 0.005 ms, any and all 0.1 ms; tanh 1.4 to 1.9 ms, a polynomial 0.45 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.problem import UNBOUNDED, Backward, Forward, Gradients, Inputs, Problem, Wanted
from ...base.state import EMPTY, Saved, add_sink
from . import torch_cpu, torch_cuda
from .dropout import dropout_words, keep
from .softmax import exp_, normalised, online_softmax_step
from .torch_cpu import any_of, tile_of
from .tuning import EagerConfig, configure, spans


def prepare(problem: Problem, inputs: Inputs, config: EagerConfig) -> Forward:
    """The forward of calls whose tensors lie as these `inputs` do, as a function of their inputs."""
    return lambda inputs, with_lse: forward(problem, inputs, config)


def prepare_backward(problem: Problem, inputs: Inputs, config: EagerConfig, saved: Saved, wanted: Wanted) -> Backward:
    """The backward of such calls, as a function of inputs, out, lse and their gradients."""
    return lambda inputs, *saved: backward(problem, inputs, config, Saved(*saved), wanted)


def forward(problem: Problem, inputs: Inputs, config: EagerConfig) -> tuple[Tensor, Tensor]:
    """out `[B, Tq, Hq, Dv]` and lse `[B, Hq, Tq]`; packed: `[Nq, Hq, Dv]` and `[Hq, Nq]`."""
    if problem.q_heads == 0:
        *lead, rows, heads, _ = inputs.query.shape
        out = inputs.query.new_empty(*lead, rows, heads, problem.value_dim, dtype=problem.out_dtype)
        return out, inputs.query.new_empty(*lead, heads, rows, dtype=problem.state_dtype)
    if problem.packed:
        return _packed_forward(problem, inputs)
    if config.path == "blocked":
        return _blocked_forward(problem, inputs, config)
    if config.path != "flash":
        return torch_cuda.forward(problem, inputs, config.path)
    state = torch_cpu.forward(problem, inputs)
    return _blocked_forward(problem, inputs, config) if state is None else state


def backward(problem: Problem, inputs: Inputs, config: EagerConfig, saved: Saved, wanted: Wanted) -> Gradients:
    """The gradients that are `wanted`, in the inputs' dtypes. What is summed is summed in the LSE's dtype."""
    if problem.q_heads == 0:
        return _zeros(inputs, wanted)
    if problem.packed:
        return _packed_backward(problem, inputs, saved, wanted)
    if config.path == "blocked":
        return _blocked_backward(problem, inputs, config, saved, wanted)
    if config.path != "flash":
        return torch_cuda.backward(problem, inputs, config.path, saved.out, saved.lse, saved.grad_out)
    if wanted.bias and not problem.partial:  # the LSE of the scores that the pass recomputes; a shard's is its row's
        out, lse = _blocked_forward(problem, inputs, config)
        saved = saved._replace(out=out, lse=lse)
    grads = None if wanted.bias else _flash_backward(problem, inputs, config, saved, wanted)
    return _blocked_backward(problem, inputs, config, saved, wanted) if grads is None else grads


def _flash_backward(
    problem: Problem, inputs: Inputs, config: EagerConfig, saved: Saved, wanted: Wanted
) -> Gradients | None:
    """By torch's CPU flash op; None where it let a NaN through a mask."""
    d_sink = None
    if inputs.sink is not None and wanted.sink:
        d_sink = saved.sink_gradient(inputs.sink).to(inputs.sink.dtype)
    out, lse, grad_out, grad_lse = saved
    carried: Tensor | None = out
    if grad_lse is not None and grad_lse.any():
        carried = torch_cpu.less_lse_gradient(out, grad_out, grad_lse)
    grads = torch_cpu.backward(problem, inputs, out if carried is None else carried, lse, grad_out)
    if grads is not None and carried is None and (wanted.query or wanted.key):
        # dV does not depend on the gradient of the LSE: it is the flash op's either way, and has the same bits.
        of_tiles = _blocked_backward(problem, inputs, config, saved, wanted._replace(value=False))
        grads = of_tiles._replace(value=grads.value)
    return grads if grads is None else grads._replace(sink=d_sink)


def _sequences(problem: Problem, inputs: Inputs) -> Iterator[tuple[Problem, Inputs, slice, slice]]:
    """Each packed sequence as a dense problem of batch 1, and where its queries and keys lie in the pack."""
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
    q_offsets, k_offsets = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for offsets, rows in ((q_offsets, inputs.query.shape[0]), (k_offsets, inputs.key.shape[0])):
        if offsets != sorted(offsets) or offsets[0] < 0 or offsets[-1] > rows:  # a compiled call comes here unchecked
            raise ValueError(f"cu_seqlens: expected to rise from 0 to at most the {rows} packed rows; got {offsets}")
    for b in range(problem.batch):
        q_rows, k_rows = slice(q_offsets[b], q_offsets[b + 1]), slice(k_offsets[b], k_offsets[b + 1])
        q_len, k_len = q_rows.stop - q_rows.start, k_rows.stop - k_rows.start
        slopes = inputs.alibi_slopes
        ahead = k_len - q_len
        one = problem.replace(
            batch=1, batch_start=b, layout="dense", q_len=q_len, k_len=k_len, q_start=ahead, q_base=ahead
        )
        slopes = slopes[b : b + 1] if slopes is not None and slopes.shape[0] > 1 else slopes
        tensors = inputs.query[None, q_rows], inputs.key[None, k_rows], inputs.value[None, k_rows]
        its = Inputs(*tensors, alibi_slopes=slopes, sink=inputs.sink, seed=inputs.seed)
        yield one, its, q_rows, k_rows


def _packed_forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    rows, heads, _ = inputs.query.shape
    out = inputs.query.new_zeros(rows, heads, problem.value_dim, dtype=problem.out_dtype)
    lse = inputs.query.new_full((heads, rows), EMPTY, dtype=problem.state_dtype)
    for one, its_inputs, q_rows, _ in _sequences(problem, inputs):
        its_out, its_lse = forward(one, its_inputs, configure(one))
        out[q_rows], lse[:, q_rows] = its_out[0], its_lse[0]
    return out, lse


def _packed_backward(problem: Problem, inputs: Inputs, saved: Saved, wanted: Wanted) -> Gradients:
    out, lse, grad_out, grad_lse = saved
    grads = _zeros(inputs, wanted, summed=lse.dtype)
    for b, (one, its_inputs, q_rows, k_rows) in enumerate(_sequences(problem, inputs)):
        its_grad_lse = None if grad_lse is None else grad_lse[None, :, q_rows]
        its_saved = Saved(out[None, q_rows], lse[None, :, q_rows], grad_out[None, q_rows], its_grad_lse)
        if wanted.alibi_slopes or wanted.sink:  # summed over the sequences: not to be rounded in each
            one = one.replace(partial=True)
        its = backward(one, its_inputs, configure(one), its_saved, wanted)
        for whole, grad, its_rows in zip(grads, its, (q_rows, k_rows, k_rows), strict=False):
            if whole is not None and grad is not None:
                whole[its_rows] = grad[0]
        if grads.alibi_slopes is not None and its.alibi_slopes is not None:
            grads.alibi_slopes[b if grads.alibi_slopes.shape[0] > 1 else 0] += its.alibi_slopes[0]
        if grads.sink is not None and its.sink is not None:
            grads.sink.add_(its.sink)
    return _in_dtype_of(inputs, grads)


def _blocked_forward(problem: Problem, inputs: Inputs, config: EagerConfig) -> tuple[Tensor, Tensor]:
    problem, inputs, _ = _without_masked_keys(problem, inputs)
    query = inputs.query
    out = query.new_empty(*query.shape[:-1], problem.value_dim, dtype=problem.out_dtype)
    lse = query.new_empty(problem.batch, problem.q_heads, problem.q_len, dtype=problem.state_dtype)
    for tiles in _batches(problem, inputs, config):
        for rows in tiles.row_blocks():
            q = tiles.rows_of(tiles.q, rows)  # [B*Hkv, group*m, D]
            row_max = q.new_full(q.shape[:2], EMPTY)
            row_sum = q.new_zeros(q.shape[:2])
            acc = q.new_zeros(*q.shape[:2], problem.value_dim)
            for cols in tiles.col_blocks(rows):
                tile = tiles.score(q, rows, cols)
                row_max, row_sum, rescale, p = online_softmax_step(tile.scores, row_max, row_sum)
                if problem.dropout_p:
                    p.mul_(tiles.keep(rows, cols))
                acc.mul_(rescale.unsqueeze(-1)).baddbmm_(p, tiles.zero_masked_keys(tiles.v[:, cols], tile))
            folded = normalised(acc, row_max, row_sum, 1.0 - problem.dropout_p)
            its_out, its_lse = (tiles.unfold(x) for x in folded)
            its_out = its_out.transpose(1, 2)
            if inputs.sink is not None:
                its_out, its_lse = add_sink(its_out, its_lse, inputs.sink)
            out[tiles.batch, rows] = its_out.to(out.dtype)
            lse[tiles.batch, :, rows] = its_lse
    return out, lse


TANH = 0.5, (-0.33333143895797124, 0.13325878947405695, -0.053045493615031435, 0.017241490181203578)
"""tanh(x) = x (1 + c0 u + c1 u^2 + c2 u^3 + c3 u^4) with u = x^2 for |x| up to the first, to 1.5e-8 of it (minimax)."""


def _tanh_(x: Tensor) -> Tensor:
    """tanh in place, of a tensor without gaps. In fp32 on a CPU by a polynomial where all elements are small, as scores
    over a softcap mostly are, for 256 KiB at a time, which with two like it stay in the L2 cache."""
    limit, (first, *others, last) = TANH
    if x.device.type != "cpu" or x.dtype is not torch.float32:
        return x.tanh_()
    least, most = x.aminmax()
    if not (-limit <= least and most <= limit):  # NaN is neither
        return x.tanh_()
    scratch = x.new_empty(2, min(x.numel(), 1 << 16))
    for part in x.view(-1).split(scratch.shape[1]):
        square, series = scratch[:, : part.numel()]
        torch.mul(part, part, out=square)
        torch.mul(square, last, out=series)
        for coefficient in (*reversed(others), first):
            series.add_(coefficient).mul_(square)
        part.addcmul_(part, series)
    return x


def _blocked_backward(problem: Problem, inputs: Inputs, config: EagerConfig, saved: Saved, wanted: Wanted) -> Gradients:
    """Gradients from the saved LSE and delta."""
    delta, lse = saved.delta, saved.lse
    grads = _zeros(inputs, wanted, problem.out_dtype, lse.dtype)
    dq, dk, dv, d_bias, d_slopes, _ = grads
    keep_scale = 1.0 / (1.0 - problem.dropout_p)
    problem, inputs, keys = _without_masked_keys(problem, inputs)
    bias_sum = d_bias[..., keys] if d_bias is not None and d_bias.shape[3] > 1 else d_bias
    function = config.score_function

    for tiles in _batches(problem, inputs, config):
        dk_sum, dv_sum = torch.zeros_like(tiles.k), torch.zeros_like(tiles.v)
        folded_grad = tiles.fold_queries(saved.grad_out)
        for rows in tiles.row_blocks():
            q, g = tiles.rows_of(tiles.q, rows), tiles.rows_of(folded_grad, rows)
            row_lse = tiles.fold_rows(lse, rows).clamp_min(torch.finfo(lse.dtype).min)
            row_delta = tiles.fold_rows(delta, rows).masked_fill(row_lse.isnan(), 0.0)  # p is NaN or 0 there
            dq_sum = torch.zeros_like(q)
            for cols in tiles.col_blocks(rows):
                tile = tiles.score(q, rows, cols, with_slope=True)
                k, v = (tiles.zero_masked_keys(x[:, cols], tile) for x in (tiles.k, tiles.v))
                visible_q, visible_g = tiles.zero_masked_queries(q, tile), tiles.zero_masked_queries(g, tile)
                p = tiles.probabilities(tile, row_lse)
                dp = torch.bmm(visible_g, v.transpose(1, 2))
                kept = p
                if problem.dropout_p:
                    factor = tiles.keep(rows, cols).to(p.dtype).mul_(keep_scale)
                    kept, dp = p * factor, dp.mul_(factor)
                if dv is not None:
                    dv_sum[:, cols].baddbmm_(kept.transpose(1, 2), visible_g)
                ds = dp.sub_(tiles.zero_masked_queries(row_delta, tile)).mul_(p)
                if bias_sum is not None:
                    _add_reduced(tiles.tile_of(bias_sum, rows, cols), tiles.unfold(ds))
                if d_slopes is not None:
                    by_head = -(tiles.unfold(ds) * tiles.distance(rows, cols)).sum((2, 3))
                    _add_reduced(tiles.batch_of(d_slopes), by_head)
                if function is not None:
                    ds = tiles.through_function(ds, tile, rows, cols, function.gradients)
                if tile.softcap_slope is not None:
                    ds.mul_(tile.softcap_slope)
                if dq is not None:
                    dq_sum.baddbmm_(ds, k)
                if dk is not None:
                    dk_sum[:, cols].baddbmm_(ds.transpose(1, 2), visible_q)
            if dq is not None:
                dq[tiles.batch, rows] = tiles.unfold(dq_sum.mul_(problem.scale)).transpose(1, 2).to(dq.dtype)
        for grad, total in ((dk, dk_sum), (dv, dv_sum)):
            if grad is not None:
                grad[tiles.batch, keys] = total.unflatten(0, (-1, problem.kv_heads)).transpose(1, 2).to(grad.dtype)
    if inputs.sink is not None and wanted.sink:
        grads = grads._replace(sink=saved.sink_gradient(inputs.sink))
    return grads if problem.partial else _in_dtype_of(inputs, grads)


def key_mass(
    problem: Problem, inputs: Inputs, config: EagerConfig, lse: Tensor, row_weights: Tensor | None, per_query_head: bool
) -> Tensor:
    """sum_i w_i exp(s_ij - lse_i) of each key j, over all rows i that share it: `[B, Hkv, Tk]`, or `[B, Hq, Tk]`.

    `row_weights` are like lse, `[B, Hq, Tq]`; a row of weight 0 is not looked at, whatever it or its bias holds. Of the
    value only its place in `inputs` is used.
    """
    heads = problem.q_heads if per_query_head else problem.kv_heads
    mass = lse.new_zeros(problem.batch, heads, problem.k_len)
    if problem.q_heads == 0:
        return mass
    problem, inputs, keys = _without_masked_keys(problem, inputs)
    of_visible = mass[..., keys]
    for tiles in _batches(problem, inputs, config):
        for rows in tiles.row_blocks():
            q = tiles.rows_of(tiles.q, rows)
            row_lse = tiles.fold_rows(lse, rows).clamp_min(torch.finfo(lse.dtype).min)
            counted = None
            if row_weights is not None:
                counted = tiles.fold_rows(row_weights, rows)
                q, row_lse = q.masked_fill(counted == 0, 0.0), row_lse.masked_fill(counted == 0, torch.inf)
            for cols in tiles.col_blocks(rows):
                p = tiles.probabilities(tiles.score(q, rows, cols), row_lse)
                if counted is not None:
                    p.mul_(counted)
                    if problem.bias is not None:  # which may be NaN in a row of weight 0, and 0 * NaN is NaN
                        p.masked_fill_(counted == 0, 0.0)
                by_head = p.view(q.shape[0] // problem.kv_heads, heads, -1, p.shape[-1])
                of_visible[tiles.batch, :, cols] += by_head.sum(2)
    return mass


def _add_reduced(target: Tensor, tile: Tensor) -> None:
    """Add `tile` to `target`, summed over the dims in which `target` is broadcast."""
    dims = [d for d in range(tile.dim()) if target.shape[d] == 1 and tile.shape[d] != 1]
    target.add_(tile.sum(dims, keepdim=True) if dims else tile)


def _zeros(
    inputs: Inputs, wanted: Wanted, dtype: torch.dtype | None = None, summed: torch.dtype | None = None
) -> Gradients:
    """Zeros for the gradients that are wanted: of query, key and value in one dtype, of what is summed over rows in
    another. None: that of the input."""
    found = zip(_differentiable(inputs), wanted, (dtype,) * 3 + (summed,) * 3, strict=True)
    return Gradients(*(torch.zeros_like(t, dtype=its) if t is not None and want else None for t, want, its in found))


def _in_dtype_of(inputs: Inputs, grads: Gradients) -> Gradients:
    pairs = zip(grads, _differentiable(inputs), strict=True)
    return Gradients(*(g if g is None or t is None else g.to(t.dtype) for g, t in pairs))


def _differentiable(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return inputs.query, inputs.key, inputs.value, inputs.bias, inputs.alibi_slopes, inputs.sink


class _Tile(NamedTuple):
    scores: Tensor  # [B*Hkv, group*m, n], -inf where hidden
    visible: Tensor | None  # bool, broadcastable to [B, Hq, m, n]; None: everything is
    masked_keys: Tensor | None  # bool [B, Hkv, n], dims may be 1: keys no query of the tile sees; None: there is none
    masked_queries: Tensor | None  # bool [B, Hq, m], likewise: queries that see no key of the tile
    softcap_slope: Tensor | None  # derivative of the cap, like scores
    before_function: Tensor | None = None  # [B, Hq, m, n]: scores that a score function was given


def _visible_keys(problem: Problem, rows: slice) -> slice:
    """The keys that some of these rows can see by position."""
    p = problem
    first_row, last_row = p.q_start + rows.start * p.q_stride, p.q_start + (rows.stop - 1) * p.q_stride
    start, stop = 0, p.k_len
    if p.left != UNBOUNDED:
        start = max(start, -(-(first_row - p.left - p.k_start) // p.k_stride))
    if p.right != UNBOUNDED:
        stop = min(stop, (last_row + p.right - p.k_start) // p.k_stride + 1)
    return slice(start, max(start, stop))


def _without_masked_keys(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs, slice]:
    """The same problem without keys before and after those that are visible by position, and where these are.

    A query against a long cache with a window costs what it sees: nothing has the size of the cache. Positions are
    explicit, so nothing else changes.
    """
    keys = _visible_keys(problem, slice(0, problem.q_len))
    if keys == slice(0, problem.k_len):
        return problem, inputs, keys
    count = keys.stop - keys.start
    narrowed = problem.replace(k_len=count, k_start=problem.k_start + keys.start * problem.k_stride)
    mask, bias = (x if x is None or x.shape[3] == 1 else x[..., keys] for x in (inputs.mask, inputs.bias))
    bounds = inputs.key_bounds if inputs.key_bounds is None else inputs.key_bounds[..., keys]
    its = inputs._replace(key=inputs.key[:, keys], value=inputs.value[:, keys], mask=mask, bias=bias, key_bounds=bounds)
    return narrowed, its, keys


def _batches(problem: Problem, inputs: Inputs, config: EagerConfig) -> Iterator[_Tiles]:
    for span in spans(0, problem.batch, config.block_b):
        yield _Tiles(problem, inputs, config, slice(*span))


class _Tiles:
    """A few batch entries in the form the products want: fp32 (fp64), heads first, query heads folded into rows."""

    def __init__(self, problem: Problem, inputs: Inputs, config: EagerConfig, batch: slice) -> None:
        self.problem, self.inputs, self.config, self.batch = problem, inputs, config, batch
        device = problem.device
        self.q = self.fold_queries(inputs.query) * problem.scale
        self.k, self.v = self._fold_keys(inputs.key), self._fold_keys(inputs.value)
        rows, cols = min(config.block_q, problem.q_len), min(config.block_k, problem.k_len)
        # Made once: fresh pages cost as much as a pass.
        self.scores = self.q.new_empty(self.k.shape[0] * problem.group * rows * cols)
        self.q_positions = problem.q_start + problem.q_stride * torch.arange(problem.q_len, device=device)
        self.k_positions = problem.k_start + problem.k_stride * torch.arange(problem.k_len, device=device)
        if inputs.seed is not None and problem.dropout_p:
            stream = (problem.batch_start + batch.start) * problem.q_heads
            streams = (batch.stop - batch.start) * problem.q_heads
            self.row_words = dropout_words(
                inputs.seed, stream, streams, self.q_positions - problem.q_base, columns=False
            )
            self.col_words = dropout_words(inputs.seed, stream, streams, self.k_positions, columns=True)

    def fold_queries(self, x: Tensor) -> Tensor:
        """`[B, Tq, Hq, d]` to `[B*Hkv, group, Tq, d]`."""
        x = x[self.batch].to(self.problem.state_dtype).transpose(1, 2)
        return x.reshape(x.shape[0] * self.problem.kv_heads, self.problem.group, *x.shape[2:])

    def _fold_keys(self, x: Tensor) -> Tensor:
        """`[B, Tk, Hkv, d]` to `[B*Hkv, Tk, d]`."""
        return x[self.batch].to(self.problem.state_dtype).transpose(1, 2).flatten(0, 1)

    def rows_of(self, folded: Tensor, rows: slice) -> Tensor:
        """A block of rows, `[B*Hkv, group*m, d]`."""
        return folded[:, :, rows].flatten(1, 2)

    def fold_rows(self, x: Tensor, rows: slice) -> Tensor:
        """A block of `[B, Hq, Tq]` along the rows of a tile: `[B*Hkv, group*m, 1]`."""
        block = x[self.batch, :, rows]
        return block.reshape(self.k.shape[0], -1, 1)

    def unfold(self, x: Tensor) -> Tensor:
        """`[B*Hkv, group*m, ...]` to `[B, Hq, m, ...]`, a view."""
        p = self.problem
        return x.view(x.shape[0] // p.kv_heads, p.q_heads, x.shape[1] // p.group, *x.shape[2:])

    def row_blocks(self) -> Iterator[slice]:
        return (slice(*span) for span in spans(0, self.problem.q_len, self.config.block_q))

    def col_blocks(self, rows: slice) -> Iterator[slice]:
        """The blocks of keys that some row of the block can see by position, and on a CPU also by intervals; other
        tiles are never visited."""
        p, keys = self.problem, _visible_keys(self.problem, rows)
        start, stop = keys.start, keys.stop
        looks = self.inputs.query_bounds is not None and p.device.type == "cpu"  # elsewhere that would synchronise
        if looks:
            first, last = self._seen_span(rows)
            start = max(start, -((p.k_start - first) // p.k_stride))
            stop = min(stop, -((p.k_start - last) // p.k_stride))
        for span in spans(start, stop, self.config.block_k):
            if not looks or self._is_seen(rows, slice(*span)):
                yield slice(*span)

    def _seen_span(self, rows: slice) -> tuple[int, int]:
        """The first position that some interval of the rows has, and the one behind the last."""
        start, end, _ = self._intervals_of_queries(rows)
        there = start < end
        if not there.any():
            return 0, 0
        return int(start[there].min()), int(end[there].max())

    def _is_seen(self, rows: slice, cols: slice) -> bool:
        """Whether some key may be seen by one of the rows, by the interval that the key has."""
        if self.inputs.key_bounds is None:
            return True
        first, last = self._intervals_of_keys(cols)
        _, _, label = self._intervals_of_queries(rows)
        return bool(((first <= label.amax(2, True)) & (last > label.amin(2, True)) & (first < last)).any())

    def _intervals_of_queries(self, rows: slice) -> list[Tensor]:
        """Start, end and label, `[B, Hq, m]` each."""
        assert self.inputs.query_bounds is not None
        return [*self.batch_of(self.inputs.query_bounds)[..., rows].unbind(2)]

    def _intervals_of_keys(self, cols: slice) -> list[Tensor]:
        """First and last label that sees a key, `[B, Hq, n]` each."""
        assert self.inputs.key_bounds is not None
        return [*self.batch_of(self.inputs.key_bounds)[..., cols].unbind(2)]

    def score(self, q: Tensor, rows: slice, cols: slice, with_slope: bool = False) -> _Tile:
        """The scores of a tile: q arrives scaled; then softcap, bias, ALiBi, and -inf where hidden."""
        p = self.problem
        visible = self._visible(rows, cols)
        tile = _Tile(q, visible, *self._masked_rows(visible), None)
        keys = self.zero_masked_keys(self.k[:, cols], tile)
        shape = *q.shape[:2], keys.shape[1]
        folded = self.scores[: math.prod(shape)].view(shape)
        torch.bmm(self.zero_masked_queries(q, tile), keys.transpose(1, 2), out=folded)
        scores, slope = self.unfold(folded), None
        if p.softcap:
            _tanh_(folded.div_(p.softcap))
            slope = 1.0 - folded * folded if with_slope else None
            folded.mul_(p.softcap)
        if self.config.score_function is not None:
            before = scores.clone() if with_slope else scores
            scores.copy_(self.config.score_function(before, visible, *self._indices(rows, cols)))
            masks = scores == EMPTY  # as a mask does
            if self._some_on_host(masks):
                visible = ~masks
                tile = _Tile(q, visible, *self._masked_rows(visible), None)
            tile = tile._replace(before_function=before)
        if self.inputs.bias is not None:
            bias = self.tile_of(self.inputs.bias, rows, cols)
            if bias.dtype.itemsize > scores.dtype.itemsize:  # huge is not -inf
                bias = bias.clamp(torch.finfo(scores.dtype).min, torch.finfo(scores.dtype).max)
            scores.add_(bias)
        if self.inputs.alibi_slopes is not None:
            slopes = self.batch_of(self.inputs.alibi_slopes).to(scores.dtype)
            scores.addcmul_(slopes[:, :, None, None], self.distance(rows, cols), value=-1.0)
        if visible is not None:
            self._hide(scores, visible)
        return tile._replace(scores=folded, softcap_slope=slope)

    def _indices(self, rows: slice, cols: slice) -> tuple[Tensor, ...]:
        """Batch entries, heads, queries and keys of a tile, each as it counts in the whole call."""
        p, device = self.problem, self.problem.device
        entries = torch.arange(self.batch.start, self.batch.stop, device=device) + p.batch_start
        heads = torch.arange(p.q_heads, device=device)
        found = entries, heads, self.q_positions[rows] - p.q_base, self.k_positions[cols]
        return tuple(index.to(torch.int32) for index in found)

    def through_function(self, ds: Tensor, tile: _Tile, rows: slice, cols: slice, sums: list[Tensor]) -> Tensor:
        """The gradient of the scores that a score function was given, from that of those that it returned, folded. What
        the tensors get that it reads is added to `sums`."""
        function, before = self.config.score_function, tile.before_function
        assert function is not None and before is not None
        with torch.enable_grad():
            given = before.detach().requires_grad_()
            made = function(given, tile.visible, *self._indices(rows, cols))
            read = [given, *function.captured]
            d_given, *others = torch.autograd.grad(
                made, read, self.unfold(ds), allow_unused=True, materialize_grads=True
            )
        for total, grad in zip(sums, others, strict=True):
            total += grad
        return d_given.reshape(ds.shape)

    def _hide(self, scores: Tensor, visible: Tensor) -> None:
        """-inf where not visible, whatever stood there."""
        if self.problem.device.type == "cpu":
            highest = visible.to(scores.dtype).sub_(0.5).mul_(torch.inf)  # -inf where hidden, else inf
            torch.minimum(scores, highest, out=scores)
            if not torch.isnan(scores.amax()):  # a minimum lets NaN through
                return
        scores.masked_fill_(~visible, EMPTY)

    def probabilities(self, tile: _Tile, row_lse: Tensor) -> Tensor:
        """exp(score - LSE), in place of the scores; 0 where hidden, also in a row whose LSE is NaN."""
        p = exp_(tile.scores.sub_(row_lse))
        if tile.visible is not None and self._some_on_host(row_lse.isnan()):
            self.unfold(p).masked_fill_(~tile.visible, 0.0)
        return p

    def distance(self, rows: slice, cols: slice) -> Tensor:
        """How far apart a query and a key stand, `[m, n]`."""
        gap = self.q_positions[rows].unsqueeze(1) - self.k_positions[cols]
        return gap.abs_().to(self.problem.state_dtype)

    def keep(self, rows: slice, cols: slice) -> Tensor:
        """Which elements dropout keeps, folded like scores."""
        kept = keep(self.row_words[:, rows].unsqueeze(2), self.col_words[:, cols].unsqueeze(1), self.problem.dropout_p)
        return kept.view(self.k.shape[0], -1, kept.shape[-1])

    def batch_of(self, x: Tensor) -> Tensor:
        return x[self.batch] if x.shape[0] > 1 else x

    def tile_of(self, x: Tensor, rows: slice, cols: slice) -> Tensor:
        """The tile of a tensor broadcastable to `[B, Hq, Tq, Tk]`; broadcast dims stay 1."""
        return tile_of(x, self.batch, rows, cols)

    def _visible(self, rows: slice, cols: slice) -> Tensor | None:
        p, flags = self.problem, []
        q_pos, k_pos = self.q_positions[rows].unsqueeze(1), self.k_positions[cols]
        first_row, last_row = p.q_start + rows.start * p.q_stride, p.q_start + (rows.stop - 1) * p.q_stride
        first_key, last_key = p.k_start + cols.start * p.k_stride, p.k_start + (cols.stop - 1) * p.k_stride
        if p.right != UNBOUNDED and last_key > first_row + p.right:
            flags.append((k_pos <= q_pos + p.right)[None, None])
        if p.left != UNBOUNDED and first_key < last_row - p.left:
            flags.append((k_pos >= q_pos - p.left)[None, None])
        if self.inputs.query_bounds is not None:
            start, end, label = (one.unsqueeze(3) for one in self._intervals_of_queries(rows))
            flags.append((k_pos >= start) & (k_pos < end))
            if self.inputs.key_bounds is not None:
                first, last = (one.unsqueeze(2) for one in self._intervals_of_keys(cols))
                flags.append((label >= first) & (label < last))
        if self.inputs.mask is not None:
            flags.append(self.tile_of(self.inputs.mask, rows, cols))
        if self.inputs.bias is not None:
            bias = self.tile_of(self.inputs.bias, rows, cols)
            flags.append(~(bias < torch.finfo(bias.dtype).min))  # -inf alone hides; NaN does not
        visible = reduce(torch.bitwise_and, flags) if flags else None
        return visible if visible is None or self._some_on_host(~visible) else None

    def _masked_rows(self, visible: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Keys that no query sees and queries that see no key, by a tile's `visible`; None where there is none."""
        if visible is None:
            return None, None
        by_group = visible
        if visible.shape[1] > 1:
            by_group = any_of(visible.unflatten(1, (self.problem.kv_heads, self.problem.group)), 2)
        keys, queries = ~any_of(by_group, 2), ~any_of(visible, 3)
        return keys if self._some_on_host(keys) else None, queries if self._some_on_host(queries) else None

    def zero_masked_keys(self, x: Tensor, tile: _Tile) -> Tensor:
        """Rows `[B*Hkv, n, d]` of K or V with those zeroed that no query of the tile sees."""
        if tile.masked_keys is None:
            return x
        heads_first = x.unflatten(0, (-1, self.problem.kv_heads))
        return heads_first.masked_fill(tile.masked_keys.unsqueeze(-1), 0.0).flatten(0, 1)

    def zero_masked_queries(self, x: Tensor, tile: _Tile) -> Tensor:
        """Rows `[B*Hkv, group*m, d]` of Q or dO with those zeroed that see no key of the tile."""
        if tile.masked_queries is None:
            return x
        return self.unfold(x).masked_fill(tile.masked_queries.unsqueeze(-1), 0.0).view_as(x)

    def _some_on_host(self, flags: Tensor) -> bool:
        """Whether a flag may be set; where asking would be a synchronisation, on an accelerator, one may be."""
        return self.problem.device.type != "cpu" or bool(any_of(flags.flatten(), 0))
