"""What a rank computes by itself: its queries against a shard of the keys, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self._written: list[slice] = []

    def fold(self, rows: slice, inputs: Inputs, options: dict[str, Any]) -> None:
        """Merge the state of some rows over keys that were not merged yet."""
        resumes = any(rows.start < done.stop and done.start < rows.stop for done in self._written)
        forward_into(inputs, self._out[:, rows], self._lse[..., rows], resumes=resumes, **options)
        self._written.append(rows)

    def sums(self) -> tuple[Tensor, Tensor]:
        """`(out, lse)` in fp32."""
        at = 0
        for rows in (*sorted(self._written, key=lambda done: done.start), slice(self._lse.shape[-1], None)):
            self._out[:, at : max(at, rows.start)] = 0.0  # rows without keys
            at = max(at, rows.stop or 0)
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
    """The gradients of a rank's rows, summed over the shards of keys in fp32; None where they are not wanted.

    `tensors` are a rank's query, key, value, mask, bias, alibi_slopes, sink and seed.
    """

    def __init__(self, rows: Rows, saved: Saved, tensors: Tensors) -> None:
        self.rows, self.saved = rows, saved
        wanted = [t is not None and t.requires_grad for t in (tensors[0], *tensors[4:6])]
        self.wanted = Wanted(wanted[0], True, True, *wanted[1:])  # other ranks may want those of keys and values
        dtype = torch.promote_types(rows.query.dtype, torch.float32)
        self.query, self.bias, self.alibi_slopes = (
            torch.zeros_like(t, dtype=dtype) if t is not None and is_wanted else None
            for t, is_wanted in zip((rows.query, rows.bias, rows.alibi_slopes), wanted, strict=True)
        )

    def with_keys(self, dk: Tensor, dv: Tensor) -> Tensors:
        """In fp32, one for each of `tensors`."""
        sink = self.rows.sink
        d_sink = self.saved.sink_gradient(sink) if sink is not None and sink.requires_grad else None
        return self.query, dk, dv, None, self.bias, self.alibi_slopes, d_sink, None


class Attention(NamedTuple):
    """The options of one call, the same on all ranks."""

    sides: Sides
    dropout_p: float
    options: Mapping[str, Any]  # of every tile: keywords of `forward_into` and `backward_step`
    q_base: int = 0  # the position of query 0 of the whole call

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
        for tile in self._tiles(rows, k_runs):
            state.fold(tile.rows, _inputs(tile, rows, key, value), self._options(tile))

    def backward(
        self, grads: RowGradients, key: Tensor, value: Tensor, dk: Tensor, dv: Tensor, k_runs: Sequence[Run]
    ) -> None:
        """Add these rows' share of a shard's gradients to `dk` and `dv`, fp32, and the rows' own to `grads`."""
        rows, saved = grads.rows, grads.saved
        for tile in self._tiles(rows, k_runs):
            inputs = _inputs(tile, rows, key, value)
            step = backward_step(inputs, *_part(saved, tile.rows), wanted=grads.wanted, **self._options(tile))
            _add(dk[:, tile.columns], step.key)
            _add(dv[:, tile.columns], step.value)
            if grads.query is not None:
                _add(grads.query[:, tile.rows], step.query)
            _add(_of_tile(grads.bias, tile), step.bias)
            _add(_of_sequence(grads.alibi_slopes, rows, tile), step.alibi_slopes)

    def _tiles(self, rows: Rows, k_runs: Sequence[Run]) -> list[Tile]:
        by_position = self.dropout_p > 0 or any(t is not None for t in (rows.mask, rows.bias, rows.alibi_slopes))
        return tiles(rows.runs, k_runs, self.sides, self.q_base, by_position)

    def _options(self, tile: Tile) -> dict[str, Any]:
        return {"positions": tile.positions, "batch_start": tile.sequence, "window": tile.window, **self.options}


def _add(total: Tensor | None, part: Tensor | None) -> None:
    if total is not None:
        assert part is not None, "it was wanted"
        total += part


def _part(saved: Saved, rows: slice) -> Saved:
    grad_lse = None if saved.grad_lse is None else saved.grad_lse[..., rows].contiguous()
    return Saved(saved.out[:, rows], saved.lse[..., rows].contiguous(), saved.grad_out[:, rows], grad_lse)


def _inputs(tile: Tile, rows: Rows, key: Tensor, value: Tensor) -> Inputs:
    return Inputs(
        rows.query[:, tile.rows],
        key[:, tile.columns],
        value[:, tile.columns],
        mask=_of_tile(rows.mask, tile),
        bias=_of_tile(rows.bias, tile),
        alibi_slopes=_of_sequence(rows.alibi_slopes, rows, tile),
        seed=rows.seed,
    )


def _of_tile(x: Tensor | None, tile: Tile) -> Tensor | None:
    """The part of a mask or bias, `[.., 1 or T, 1 or the keys of all ranks]`, that a tile reads."""
    if x is None:
        return None
    x = x[:, :, tile.rows] if x.shape[2] > 1 else x
    return x[..., tile.key_positions] if x.shape[3] > 1 else x


def _of_sequence(slopes: Tensor | None, rows: Rows, tile: Tile) -> Tensor | None:
    """Slopes `[sequences, Hq]` of a tile's packed sequence; all of them where the batch is not packed."""
    packed = slopes is not None and rows.query.shape[0] == 1 and slopes.shape[0] > 1
    return slopes[tile.sequence : tile.sequence + 1] if slopes is not None and packed else slopes


def modifiers(
    mask: Tensor | None, bias: Tensor | None, alibi_slopes: Tensor | None, sink: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Those of a rank's call in the form of `Rows`."""
    slopes = leading_ones(alibi_slopes, 2)
    small = (None if t is None else t.contiguous() for t in (slopes, sink))
    return leading_ones(mask, 4), leading_ones(bias, 4), *small
