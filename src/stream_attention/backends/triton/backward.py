"""The streaming backward in Triton, from the saved LSE, with every modifier: two kernels, and one for a bias.

    p_ij = exp(s_ij - lse_i)        dp_ij = dO_i . v_j        ds_ij = p_ij (dp_ij - delta_i)

1. backward_query.py, by tiles of queries: delta, dQ, and what slopes and sinks get from each row
2. backward_key.py, by tiles of keys: dK and dV
3. backward_bias.py, by tiles of the bias, where its gradient is wanted

Each program owns what it writes and sums it in registers, in one order. So there are no atomics, no workspace but two
numbers per row, and no other answer from run to run or in another order of the batch: `deterministic=True` has nothing
to add. The price is that scores are computed twice, seven products in place of five. One kernel of five, which adds dQ
atomically, was measured and is slower on an H200 (docs/performance.md).

Where programs are too few to fill the GPU (few queries, few keys, many heads on one KV head), what they stream is
split: each split writes an fp32 part of the sum, a few at most, and torch adds the parts. At the widest heads dK and dV
are a launch each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.problem import Backward, Gradients, Inputs, Problem, Wanted
from ...gpu.arguments import sample
from ...gpu.launch import Launch
from ...gpu.prepass import Prepass
from ...gpu.rows import PAD, Rows
from ...gpu.scratch import Sample, Scratch
from .backward_arguments import shared_sizes
from .backward_bias import prepare_bias_gradient
from .backward_key import bind_key
from .backward_key import programs as key_programs
from .backward_query import bind_query, programs
from .tuning import BackwardConfig, Tile


def prepare_backward(
    problem: Problem,
    inputs: Inputs,
    config: BackwardConfig,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    wanted: Wanted,
) -> Backward:
    """The backward of calls whose tensors lie as these do, as a function of inputs, out, lse and their gradients: those
    gradients that are `wanted`, in the inputs' dtypes, or in fp32 where the problem is one of several shards."""
    others = [tile for tile in config[1:] if tile is not None]
    assert PAD.value >= config.query.block_m >= max(tile.block_m for tile in others), "rows are written by whole tiles"
    made = _Results.of(problem, inputs, config, wanted)
    if not (problem.batch and problem.q_len):
        return lambda inputs, *saved: made.of_no_query(inputs)
    before, rows = Prepass.of(problem, inputs, needs_visible=True), Rows.samples(problem, inputs.query)
    saved = out, lse, grad_out, grad_lse
    (dq,), (d_slopes, d_sink) = made.samples(made.by_queries, 0), made.sum_samples()
    written = dq, d_slopes, d_sink
    query = bind_query(problem, inputs, made.by_queries, before, *saved, rows, *written, made.exact_delta)
    keys = []
    for tile, *places in made.by_keys:
        dk, dv = made.samples(tile, *places)
        keys.append(bind_key(problem, inputs, tile, before, grad_out, rows, dk, dv))
    bias = None
    if wanted.bias:
        assert config.bias is not None
        bias = prepare_bias_gradient(problem, inputs, config.bias, before, grad_out, rows)
    return _Backward(made, before, rows, query, keys, bias)


class _Results(NamedTuple):
    """What a backward writes, and by which launches."""

    problem: Problem
    wanted: Wanted
    grads: list[Sample | None]  # dq, dk and dv; None where it is not wanted
    unwritten: bool  # some are written by no program
    by_queries: Tile
    by_keys: list[tuple[Tile, int | None, int | None]]  # launches: a tile, and places of dk and dv, if it has them
    exact_delta: bool
    sums: int  # programs of the launch by queries: each leaves a sum for slopes and sinks

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, config: BackwardConfig, wanted: Wanted) -> _Results:
        # Sums over rows want the exact delta, which whole rows give: no splits of the keys, and none of a shard.
        exact_delta = any(wanted[3:]) and not problem.partial
        by_queries = config.query._replace(num_splits=1) if exact_delta else config.query
        by_keys: list[tuple[Tile, int | None, int | None]] = [(config.key, 1, 2)]
        if config.value is not None:
            by_keys = [(config.key, 1, None), (config.value, None, 2)]
        dtype = problem.out_dtype
        grads = [Sample(t.shape, dtype) if want else None for t, want in zip(inputs[:3], wanted[:3], strict=True)]
        dk, dv = (place if wanted[place] else None for place in (1, 2))
        by_keys = [(tile, dk if k is not None else None, dv if v is not None else None) for tile, k, v in by_keys]
        by_keys = [one for one in by_keys if one[1:] != (None, None)]
        unwritten = problem.empty
        sums = programs(problem, by_queries)
        return cls(problem, wanted, grads, unwritten, by_queries, by_keys, exact_delta, sums)

    def samples(self, tile: Tile, *places: int | None) -> list[Any]:
        """Of what a launch writes: gradients, or with several splits a part of each, in fp32."""
        grads = [None if place is None else self.grads[place] for place in places]
        if tile.num_splits == 1:
            return grads
        return [None if grad is None else sample((tile.num_splits, *grad.shape), torch.float32) for grad in grads]

    def sum_samples(self) -> list[Any]:
        return [sample((self.sums,), torch.float32) if want else None for want in self.wanted[4:]]

    def gradients(self, query: Tensor, by_driver: bool = False) -> list[Tensor | None]:
        if self.unwritten:
            return [None if grad is None else grad.filled(query, 0.0, by_driver) for grad in self.grads]
        return [None if grad is None else grad.empty(query) for grad in self.grads]

    def row_sums(self, query: Tensor, by_driver: bool = False) -> list[Tensor | None]:
        if not (self.wanted.alibi_slopes or self.wanted.sink):
            return [None, None]
        return [None if sums is None else sums.filled(query, 0.0, by_driver) for sums in self.sum_samples()]

    def of_no_query(self, inputs: Inputs) -> Gradients:
        d_bias = None
        if self.wanted.bias and inputs.bias is not None:
            dtype = self.problem.state_dtype if self.problem.partial else inputs.bias.dtype
            d_bias = inputs.bias.new_zeros(inputs.bias.shape, dtype=dtype)
        query = inputs.query
        return _gathered(self.problem, inputs, self.gradients(query), d_bias, self.row_sums(query))


class _Backward:
    """A launch by queries, one or two by keys, and one of the bias if its gradient is wanted."""

    def __init__(
        self,
        made: _Results,
        before: Prepass,
        rows: Rows,
        query: Launch,
        keys: list[Launch],
        bias: Callable[..., Tensor] | None,
    ) -> None:
        self._made, self._before, self._query, self._keys = made, before, query, keys
        self._bias, self._scratch = bias, Scratch.of(*rows)
        self._all = [query, *keys]

    def __call__(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        query, made = inputs.query, self._made
        is_compiled = all([launch.is_compiled for launch in self._all])  # noqa: C419
        grads, sums = made.gradients(query, is_compiled), made.row_sums(query, is_compiled)
        computed = self._before.run(inputs)
        memory, rows = self._scratch.allocate(query, is_compiled and self._bias is None)
        written = grads[:1]
        parts = _parts(query, made.by_queries, written)
        self._query(*inputs, *computed, out, lse, grad_out, grad_lse, *rows, *parts, *sums)
        if parts is not written:
            _sum_parts(written, parts)
        for launch, (tile, k_place, v_place) in zip(self._keys, made.by_keys, strict=True):
            written = [None if k_place is None else grads[1], None if v_place is None else grads[2]]
            parts = _parts(query, tile, written)
            launch(*inputs, *computed, grad_out, *rows, *parts)
            if parts is not written:
                _sum_parts(written, parts)
        d_bias = None if self._bias is None else self._bias(inputs, (*computed, grad_out, *rows))
        del memory  # all that reads it is queued
        return _gathered(made.problem, inputs, grads, d_bias, sums)

    def resized(self, problem: Problem, inputs: Inputs, config: BackwardConfig, *saved: Any) -> Backward | None:
        """The same backward of tensors of other lengths; None where other kernels compute it."""
        if self._before.steps or problem.empty:
            return None
        made = _Results.of(problem, inputs, config, self._made.wanted)
        out, _, grad_out, _ = saved
        sizes = shared_sizes(problem, inputs, grad_out, aligned=True)
        keys = [
            launch.resized(key_programs(problem, tile), sizes)
            for launch, (tile, _, _) in zip(self._keys, made.by_keys, strict=True)
        ]
        query = self._query.resized(made.sums, shared_sizes(problem, inputs, grad_out, True, out))
        if query is None or None in keys:
            return None
        found = [launch for launch in keys if launch is not None]
        return _Backward(made, self._before, Rows.samples(problem, inputs.query), query, found, None)


def _parts(query: Tensor, tile: Tile, grads: list[Tensor | None]) -> list[Tensor | None]:
    """What a launch writes: gradients, or with several splits a part of each, in fp32."""
    if tile.num_splits == 1:
        return grads
    shapes = [None if grad is None else (tile.num_splits, *grad.shape) for grad in grads]
    return [None if shape is None else query.new_empty(shape, dtype=torch.float32) for shape in shapes]


def _sum_parts(grads: list[Tensor | None], parts: list[Tensor | None]) -> None:
    for grad, part in zip(grads, parts, strict=True):
        if grad is not None and part is not None:
            grad.copy_(part.sum(0))


def _gathered(
    problem: Problem,
    inputs: Inputs,
    grads: list[Tensor | None],
    d_bias: Tensor | None,
    sums: list[Tensor | None],
) -> Gradients:
    d_slopes, d_sink = sums
    if d_slopes is not None or d_sink is not None:
        d_slopes = _by_head(problem, d_slopes, inputs.alibi_slopes)
        d_sink = _by_head(problem, d_sink, inputs.sink)
    dq, dk, dv = grads
    return Gradients(dq, dk, dv, d_bias, d_slopes, d_sink)


def _by_head(problem: Problem, sums: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Sums of the query kernel's programs, added up to the gradient of slopes `[B or 1, Hq]` or sinks `[Hq]`."""
    if sums is None or parameter is None:
        return None
    by_batch = sums.view(problem.batch, problem.q_heads, sums.numel() // max(1, problem.batch * problem.q_heads))
    dtype = problem.state_dtype if problem.partial else parameter.dtype
    return by_batch.sum(-1).sum_to_size(parameter.shape).to(dtype)
