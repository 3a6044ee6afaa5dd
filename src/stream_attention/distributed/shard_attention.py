"""What a rank computes by itself: its queries against a shard of the keys, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.problem import CallOptions, Inputs, Wanted, sides_of
from ..base.state import EMPTY, Saved, add_sink
from ..dispatch.plan import requested
from ..ops.attention import leading_ones
from ..ops.shards import backward_step, forward_into
from .autograd import Tensors
from .shard import Run
from .tiles import Sides, Tile, tiles


class Rows(NamedTuple):
    """A rank's queries `[B, T, Hq, D]`, their positions and their modifiers, in the form kernels read."""

    runs: Sequence[Run]
    query: Tensor
    mask: Tensor | None = None  # [1 or B, 1 or Hq, 1 or T, 1 or the keys of all ranks]
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None  # [1 or B, Hq]; packed: [1 or sequences, Hq]
    sink: Tensor | None = None  # [Hq]
    seed: Tensor | None = None


class State:
    """The state of a shard's rows over the keys merged so far: out `[B, T, Hq, Dv]`, lse `[B, Hq, T]`, fp32."""

    def __init__(self, query: Tensor, value_dim: int) -> None:
        batch, rows, heads, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        self._out = query.new_empty(batch, rows, heads, value_dim, dtype=dtype)  # undefined where the lse is -inf
        self._lse = query.new_full((batch, heads, rows), EMPTY, dtype=dtype)
        self._written: list[tuple[slice, slice]] = []  # entries of the batch and their rows

    def fold(self, entries: slice, rows: slice, inputs: Inputs, options: dict[str, Any]) -> None:
        """Merge the state of some rows over keys that were not merged yet."""
        resumes = any(
            entries == same and rows.start < done.stop and done.start < rows.stop for same, done in self._written
        )
        forward_into(inputs, self._out[entries, rows], self._lse[entries, :, rows], resumes=resumes, **options)
        self._written.append((entries, rows))

    def sums(self) -> tuple[Tensor, Tensor]:
        """`(out, lse)` in fp32."""
        at = 0
        for start, stop in (*sorted((rows.start, rows.stop) for _, rows in self._written), (self._lse.shape[-1], 0)):
            self._out[:, at : max(at, start)] = 0.0  # rows without keys
            at = max(at, stop)
        return self._out, self._lse

    def finish(
        self, sink: Tensor | None, dtype: torch.dtype, runs: Sequence[Run] | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)` as a public op returns them, after all keys; the sink is merged once, here.

        `runs` are those of packed sequences: rows outside all of them have no sink either.
        """
        out, lse = self.sums()
        if sink is None:
            return out.to(dtype), lse
        out, lse = add_sink(out, lse, sink)
        if runs is not None and sum(run.length for run in runs) < lse.shape[-1]:
            outside = torch.ones(lse.shape[-1], dtype=torch.bool, device=lse.device)
            for run in runs:
                outside[run.rows] = False
            lse = lse.masked_fill(outside, EMPTY)
        return out.to(dtype), lse


class RowGradients:
    """The gradients of a rank's rows, summed over the shards of keys in fp32; None where they are not wanted."""

    def __init__(self, rows: Rows, saved: Saved, wanted: Wanted) -> None:
        self.rows, self.saved, self.wanted = rows, saved, wanted
        dtype = torch.promote_types(rows.query.dtype, torch.float32)
        found = (rows.query, wanted.query), (rows.bias, wanted.bias), (rows.alibi_slopes, wanted.alibi_slopes)
        self.query, self.bias, self.alibi_slopes = (
            torch.zeros_like(t, dtype=dtype) if t is not None and is_wanted else None for t, is_wanted in found
        )

    def with_keys(self, dk: Tensor, dv: Tensor) -> Tensors:
        """Of query, key, value, mask, bias, alibi_slopes, sink and seed, in fp32."""
        sink = self.rows.sink
        d_sink = self.saved.sink_gradient(sink) if sink is not None and self.wanted.sink else None
        return self.query, dk, dv, None, self.bias, self.alibi_slopes, d_sink, None


def wanted_by(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *others: Tensor | None) -> Wanted:
    """The gradients that a rank with these tensors computes. Those of key and value always: other ranks may want them.
    `others` are bias, alibi_slopes, sink and seed."""
    bias, slopes, sink, _ = (t is not None and t.requires_grad for t in others)
    return Wanted(query.requires_grad, True, True, bias, slopes, sink)


class Attention(NamedTuple):
    """The options of one call, the same on all ranks.

    Where ranks divide the heads, this is part `part` of `parts`. The random stream of a head is that of `entry * heads
    + head`, so a kernel with Hq / parts heads draws those of the whole call's entry b as its entry `b * parts + part`.
    """

    sides: Sides
    dropout_p: float
    options: Mapping[str, Any]  # of every tile: keywords of `forward_into` and `backward_step`
    q_base: int = 0  # the position of query 0 of the whole call
    parts: int = 1
    part: int = 0

    @classmethod
    def of(cls, query: Tensor, options: CallOptions, q_base: int = 0) -> Attention:
        """What a public function computes with its options."""
        causal, window, softcap, scale, dropout_p, _, deterministic, _, backend, *_ = options
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        common = {"softcap": float(softcap), "scale": scale, "dropout_p": float(dropout_p), "causal": False}
        common |= {"deterministic": deterministic, "backend": requested(backend), "q_len": 0, "k_len": 0}
        return cls(sides_of(causal, window), float(dropout_p), common, q_base)

    def forward(self, state: State, rows: Rows, key: Tensor, value: Tensor, k_runs: Sequence[Run]) -> None:
        """Merge a shard of the keys into the rows' state."""
        for entries, tile in self._tiles(rows, k_runs):
            state.fold(entries, tile.rows, _inputs(entries, tile, rows, key, value), self._options(tile))

    def backward(
        self, grads: RowGradients, key: Tensor, value: Tensor, dk: Tensor, dv: Tensor, k_runs: Sequence[Run]
    ) -> None:
        """Add these rows' share of a shard's gradients to `dk` and `dv`, fp32, and the rows' own to `grads`."""
        rows, wanted = grads.rows, grads.wanted._replace(sink=False)  # which `with_keys` computes, once
        for entries, tile in self._tiles(rows, k_runs):
            inputs, saved = _inputs(entries, tile, rows, key, value), _saved(grads.saved, entries, tile.rows)
            step = backward_step(inputs, *saved, wanted=wanted, **self._options(tile))
            _add(dk[entries, tile.columns], step.key)
            _add(dv[entries, tile.columns], step.value)
            if grads.query is not None:
                _add(grads.query[entries, tile.rows], step.query)
            _add(_of_tile(grads.bias, entries, tile), step.bias)
            _add(_of_sequence(grads.alibi_slopes, inputs.query, tile), step.alibi_slopes)

    def _tiles(self, rows: Rows, k_runs: Sequence[Run]) -> Iterator[tuple[slice, Tile]]:
        """The kernel calls, each with its entries of the batch: one at a time where the kernel's are not consecutive in
        the whole call. Then they count as sequences, as those of a pack do."""
        by_position = self.dropout_p > 0 or any(t is not None for t in (rows.mask, rows.bias, rows.alibi_slopes))
        batch = rows.query.shape[0]
        for tile in tiles(rows.runs, k_runs, self.sides, self.q_base, by_position):
            if batch > 1 and self.parts > 1 and self.dropout_p:
                for b in range(batch):
                    yield slice(b, b + 1), tile._replace(sequence=b)
            else:
                yield slice(0, batch), tile

    def _options(self, tile: Tile) -> dict[str, Any]:
        batch_start = tile.sequence * self.parts + self.part if self.dropout_p else 0
        return {"positions": tile.positions, "batch_start": batch_start, "window": tile.window, **self.options}


def full_kv_forward(
    attention: Attention, rows: Rows, key: Tensor, value: Tensor, k_runs: Sequence[Run]
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of rows on a rank that has all the keys, out in the query's dtype."""
    state = State(rows.query, value.shape[-1])
    attention.forward(state, rows, key, value, k_runs)
    return state.finish(rows.sink, rows.query.dtype, rows.runs)


def full_kv_backward(
    attention: Attention, rows: Rows, key: Tensor, value: Tensor, k_runs: Sequence[Run], saved: Saved, wanted: Wanted
) -> Tensors:
    """fp32 gradients of query, key, value, mask, bias, alibi_slopes, sink and seed, where they are wanted."""
    grads = RowGradients(rows, saved, wanted)
    dk, dv = (torch.zeros_like(t, dtype=saved.lse.dtype) for t in (key, value))
    attention.backward(grads, key, value, dk, dv, k_runs)
    return grads.with_keys(dk, dv)


def _add(total: Tensor | None, part: Tensor | None) -> None:
    if total is not None:
        assert part is not None, "it was wanted"
        total += part


def _saved(saved: Saved, entries: slice, rows: slice) -> Saved:
    """Of some rows; kernels read LSEs element after element."""
    lse, grad_lse = saved.lse[entries, :, rows].contiguous(), saved.grad_lse
    grad_lse = None if grad_lse is None else grad_lse[entries, :, rows].contiguous()
    return Saved(saved.out[entries, rows], lse, saved.grad_out[entries, rows], grad_lse)


def _inputs(entries: slice, tile: Tile, rows: Rows, key: Tensor, value: Tensor) -> Inputs:
    query = rows.query[entries, tile.rows]
    return Inputs(
        query,
        key[entries, tile.columns],
        value[entries, tile.columns],
        mask=_of_tile(rows.mask, entries, tile),
        bias=_of_tile(rows.bias, entries, tile),
        alibi_slopes=_of_sequence(rows.alibi_slopes, query, tile),
        seed=rows.seed,
    )


def _of_tile(x: Tensor | None, entries: slice, tile: Tile) -> Tensor | None:
    """The part of a mask or bias, `[1 or B, .., 1 or T, 1 or the keys of all ranks]`, that a tile reads."""
    if x is None:
        return None
    x = x[entries] if x.shape[0] > 1 else x
    x = x[:, :, tile.rows] if x.shape[2] > 1 else x
    return x[..., tile.key_positions] if x.shape[3] > 1 else x


def _of_sequence(slopes: Tensor | None, query: Tensor, tile: Tile) -> Tensor | None:
    """Slopes `[1 or B or sequences, Hq]` of a tile's queries; those of its sequence where that is one of many."""
    one_of_many = slopes is not None and query.shape[0] == 1 and slopes.shape[0] > 1
    return slopes[tile.sequence : tile.sequence + 1] if slopes is not None and one_of_many else slopes


def modifiers(
    mask: Tensor | None, bias: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Those of a rank's call in the form of `Rows`."""
    slopes = leading_ones(alibi_slopes, 2)
    small = (None if t is None else t.contiguous() for t in (slopes, sink))
    return leading_ones(mask, 4), leading_ones(bias, 4), *small
