"""What a rank computes by itself: its queries against a shard of the keys, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.attention import backward_step, forward_into
from ..problem import Inputs, Wanted
from ..state import EMPTY, add_sink
from .shard import Run
from .tiles import Sides, Tile, tiles


class Rows(NamedTuple):
    """A rank's queries `[B, T, Hq, D]`, where they stand, and what belongs to them, in the form kernels read."""

    runs: Sequence[Run]
    query: Tensor
    mask: Tensor | None = None  # [1 or B, 1 or Hq, 1 or T, 1 or the keys of all ranks]
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None  # [1 or B, Hq]; packed: [1 or sequences, Hq]
    sink: Tensor | None = None  # [Hq]
    seed: Tensor | None = None


class State:
    """The state of a shard's rows over the keys folded in so far: out `[B, T, Hq, Dv]`, lse `[B, Hq, T]`, fp32."""

    def __init__(self, query: Tensor, value_dim: int) -> None:
        batch, rows, heads, _ = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        self._out = query.new_empty(batch, rows, heads, value_dim, dtype=dtype)  # of empty rows it is not looked at
        self._lse = query.new_full((batch, heads, rows), EMPTY, dtype=dtype)
        self._seen: list[slice] = []

    def fold(self, rows: slice, inputs: Inputs, options: dict[str, Any]) -> None:
        """Merge the state of some rows over keys that are not in yet."""
        resumes = any(rows.start < seen.stop and seen.start < rows.stop for seen in self._seen)
        forward_into(inputs, self._out[:, rows], self._lse[..., rows], resumes=resumes, **options)
        self._seen.append(rows)

    def sums(self) -> tuple[Tensor, Tensor]:
        """`(out, lse)` in fp32."""
        at = 0
        for rows in (*sorted(self._seen, key=lambda seen: seen.start), slice(self._lse.shape[-1], None)):
            self._out[:, at : max(at, rows.start)] = 0.0  # rows that have met no keys
            at = max(at, rows.stop or 0)
        return self._out, self._lse

    def finish(
        self, sink: Tensor | None, dtype: torch.dtype, runs: Sequence[Run] | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(out, lse)` as a public op returns them, when all keys are in; the sink joins once, here.

        `runs` are those of packed sequences: rows of none of them have no sink either.
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


class Saved(NamedTuple):
    """What a backward knows of a rank's rows: their result over all keys, and the gradients that arrive at it."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    def part(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        grad_lse = None if self.grad_lse is None else self.grad_lse[..., rows].contiguous()
        return self.out[:, rows], self.lse[..., rows].contiguous(), self.grad_out[:, rows], grad_lse


class RowGradients:
    """The gradients of a rank's rows, summed over the shards of keys in fp32; None where nobody wants them."""

    def __init__(self, rows: Rows, wanted: Wanted) -> None:
        dtype = torch.promote_types(rows.query.dtype, torch.float32)
        self.wanted = wanted._replace(sink=False)
        self.query = torch.zeros_like(rows.query, dtype=dtype) if wanted.query else None
        self.bias = torch.zeros_like(rows.bias, dtype=dtype) if rows.bias is not None and wanted.bias else None
        slopes = rows.alibi_slopes
        self.alibi_slopes = (
            torch.zeros_like(slopes, dtype=dtype) if slopes is not None and wanted.alibi_slopes else None
        )


@dataclass(frozen=True)
class Attention:
    """The options of one call, the same on all ranks."""

    sides: Sides
    softcap: float
    scale: float
    dropout_p: float
    deterministic: bool
    backend: str
    q_base: int = 0  # the position of query 0 of the whole call

    def forward(self, state: State, rows: Rows, key: Tensor, value: Tensor, k_runs: Sequence[Run]) -> None:
        """Fold a shard of the keys into the rows' state."""
        for tile in self._tiles(rows, k_runs):
            state.fold(tile.rows, _inputs(tile, rows, key, value), self._options(tile))

    def backward(
        self,
        grads: RowGradients,
        saved: Saved,
        rows: Rows,
        key: Tensor,
        value: Tensor,
        dk: Tensor,
        dv: Tensor,
        k_runs: Sequence[Run],
    ) -> None:
        """Add these rows' share of a shard's gradients to `dk` and `dv`, fp32, and the rows' own to `grads`."""
        for tile in self._tiles(rows, k_runs):
            inputs = _inputs(tile, rows, key, value)
            step = backward_step(inputs, *saved.part(tile.rows), wanted=grads.wanted, **self._options(tile))
            _add(dk[:, tile.columns], step.key)
            _add(dv[:, tile.columns], step.value)
            if grads.query is not None:
                _add(grads.query[:, tile.rows], step.query)
            if grads.bias is not None:
                _add(_of_tile(grads.bias, tile), step.bias)
            if grads.alibi_slopes is not None:
                _add(_of_sequence(grads.alibi_slopes, rows, tile), step.alibi_slopes)

    def _tiles(self, rows: Rows, k_runs: Sequence[Run]) -> list[Tile]:
        by_position = self.dropout_p > 0 or any(t is not None for t in (rows.mask, rows.bias, rows.alibi_slopes))
        return tiles(rows.runs, k_runs, self.sides, self.q_base, by_position)

    def _options(self, tile: Tile) -> dict[str, Any]:
        return {
            "positions": tile.positions,
            "batch_start": tile.sequence,
            "backend": self.backend,
            "q_len": 0,  # these two are of packed problems
            "k_len": 0,
            "causal": False,
            "window": tile.window,
            "softcap": self.softcap,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
            "deterministic": self.deterministic,
        }


def _add(total: Tensor, part: Tensor | None) -> None:
    assert part is not None, "it was wanted"
    total += part


def sink_gradient(sink: Tensor, saved: Saved) -> Tensor:
    """The sink's share of each row, exp(sink - lse), times what arrives at its logit; over this rank's rows."""
    delta = (saved.grad_out.to(saved.lse.dtype) * saved.out).sum(-1).transpose(1, 2)
    arriving = -delta if saved.grad_lse is None else saved.grad_lse - delta
    share = torch.exp(sink.to(saved.lse.dtype)[:, None] - saved.lse)
    return torch.where(saved.lse == EMPTY, 0.0, share * arriving).sum((0, 2))


def _inputs(tile: Tile, rows: Rows, key: Tensor, value: Tensor) -> Inputs:
    return Inputs(
        rows.query[:, tile.rows],
        key[:, tile.columns],
        value[:, tile.columns],
        mask=None if rows.mask is None else _of_tile(rows.mask, tile),
        bias=None if rows.bias is None else _of_tile(rows.bias, tile),
        alibi_slopes=None if rows.alibi_slopes is None else _of_sequence(rows.alibi_slopes, rows, tile),
        seed=rows.seed,
    )


def _of_tile(x: Tensor, tile: Tile) -> Tensor:
    """The part of a mask or bias, `[.., 1 or T, 1 or the keys of all ranks]`, that a tile reads."""
    x = x[:, :, tile.rows] if x.shape[2] > 1 else x
    return x[..., tile.key_positions] if x.shape[3] > 1 else x


def _of_sequence(slopes: Tensor, rows: Rows, tile: Tile) -> Tensor:
    """Slopes `[sequences, Hq]` of the one packed sequence a tile is of; those of a batch are all needed."""
    packed = rows.query.shape[0] == 1 and slopes.shape[0] > 1
    return slopes[tile.sequence : tile.sequence + 1] if packed else slopes
