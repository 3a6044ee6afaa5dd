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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...base.problem import Backward, Gradients, Inputs, Problem, Wanted
from ...base.state import Saved
from ...gpu.arguments import sample
from ...gpu.launch import Launch, Sizes
from ...gpu.prepass import Prepass
from ...gpu.rows import PAD, Rows, padded_rows
from ...gpu.scratch import Sample, Scratch, empty_like
from .backward_bias import prepare_bias_gradient
from .backward_call import BackwardCall
from .backward_key import bind_key
from .backward_key import programs as key_programs
from .backward_query import bind_query, programs
from .tuning import BackwardConfig, Tile


def prepare_backward(
    problem: Problem, inputs: Inputs, config: BackwardConfig, saved: Saved, wanted: Wanted
) -> Backward:
    """The backward of calls whose tensors lie as these do, as a function of inputs, out, lse and their gradients: those
    gradients that are `wanted`, in the inputs' dtypes, or in fp32 where the problem is one of several shards."""
    others = [tile for tile in config[1:] if tile is not None]
    assert PAD.value >= config.query.block_m >= max(tile.block_m for tile in others), "rows are written by whole tiles"
    made, call = _Results.of(problem, inputs, config, wanted), BackwardCall.of(problem, inputs, saved, config)
    bias = None
    if wanted.bias:
        assert config.bias is not None
        bias = prepare_bias_gradient(call, config.bias)
    if not (problem.batch and problem.q_len):
        return lambda inputs, *saved: made.of_no_query(inputs, bias)
    (dq,), (d_slopes, d_sink) = made.by_queries.samples(made.grads), made.sums
    query = bind_query(call, made.by_queries.tile, dq, d_slopes, d_sink, made.exact_delta)
    keys = [bind_key(call, one.tile, *one.samples(made.grads)) for one in made.by_keys]
    return _Backward(made, call.before, call.rows, query, keys, bias)


class _Pass(NamedTuple):
    """A launch: its tile, and which of dq, dk and dv it writes, None for those that are not wanted."""

    tile: Tile
    places: tuple[int | None, ...]

    def written(self, grads: Sequence[Any]) -> list[Any]:
        return [None if place is None else grads[place] for place in self.places]

    def samples(self, grads: Sequence[Any]) -> list[Any]:
        """Of what it writes: gradients, or with several splits a part of each, in fp32."""
        written, splits = self.written(grads), self.tile.num_splits
        if splits == 1:
            return written
        return [None if grad is None else sample((splits, *grad.shape), torch.float32) for grad in written]

    def run(
        self, launch: Launch, read: Sequence[Any], grads: Sequence[Any], sums: Sequence[Any], sizes: Sizes | None
    ) -> None:
        """Write gradients and sums. Parts of gradients are added up."""
        if self.tile.num_splits == 1:
            launch(*read, *self.written(grads), *sums, sizes=sizes)
            return
        parts = [part and part.empty(read[0]) for part in self.samples(grads)]
        launch(*read, *parts, *sums, sizes=sizes)
        for grad, part in zip(self.written(grads), parts, strict=True):
            if part is not None:
                grad.copy_(part.sum(0))


class _Results(NamedTuple):
    """What a backward writes, and by which launches."""

    problem: Problem
    wanted: Wanted
    grads: list[Sample | None]  # dq, dk and dv; None where it is not wanted
    by_queries: _Pass
    by_keys: list[_Pass]
    exact_delta: bool
    sums: list[Any]  # samples of what programs by queries leave for slopes and for sinks: a number each

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs, config: BackwardConfig, wanted: Wanted) -> _Results:
        # Sums over rows want the exact delta, which whole rows give: no splits of the keys, and none of a shard.
        exact_delta = any(wanted[3:]) and not problem.partial
        by_queries = config.query._replace(num_splits=1) if exact_delta else config.query
        dq, dk, dv = (place if wanted[place] else None for place in range(3))
        by_keys = [_Pass(config.key, (dk, dv))]
        if config.value is not None:
            by_keys = [_Pass(config.key, (dk, None)), _Pass(config.value, (None, dv))]
        by_keys = [one for one in by_keys if one.places != (None, None)]
        pairs = zip(inputs[:3], wanted[:3], strict=True)
        grads = [Sample(t.shape, problem.out_dtype) if want else None for t, want in pairs]
        count = programs(problem, by_queries)
        sums = [sample((count,), torch.float32) if want else None for want in wanted[4:]]
        return cls(problem, wanted, grads, _Pass(by_queries, (dq,)), by_keys, exact_delta, sums)

    @property
    def is_whole(self) -> bool:
        """Whether no launch writes parts of gradients, which are added up."""
        return all(one.tile.num_splits == 1 for one in (self.by_queries, *self.by_keys))

    def allocate(self, inputs: Inputs, by_driver: bool = False) -> tuple[list[Any], list[Any]]:
        """Gradients and sums. Where the problem is empty some gradients are written by no program."""
        query = inputs.query
        if self.problem.empty:
            grads = [grad and grad.filled(query, 0.0, by_driver) for grad in self.grads]
        elif self.problem.packed:
            grads = [grad and empty_like(t, query, grad) for t, grad in zip(inputs[:3], self.grads, strict=True)]
        else:
            grads = [grad and grad.empty(query) for grad in self.grads]
        return grads, [sums and sums.filled(query, 0.0, by_driver) for sums in self.sums]

    def of_no_query(self, inputs: Inputs, bias: Callable[..., Tensor] | None) -> Gradients:
        grads, sums = self.allocate(inputs)
        return self.gathered(inputs, grads, None if bias is None else bias(inputs, ()), sums)

    def gathered(self, inputs: Inputs, grads: list[Any], d_bias: Tensor | None, sums: list[Any]) -> Gradients:
        parameters = inputs.alibi_slopes, inputs.sink
        by_head = [_by_head(self.problem, *pair) for pair in zip(sums, parameters, strict=True)]
        return Gradients._make([*grads, d_bias, *by_head])


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
        self._takes_any_rows = made.problem.packed and bias is None and not before.steps and made.is_whole

    def __call__(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        query, made, problem = inputs.query, self._made, self._made.problem
        is_compiled = all([launch.is_compiled for launch in self._all])  # noqa: C419
        scratch, sizes = self._scratch, None
        if self._takes_any_rows:
            rows_padded = padded_rows(problem, query)
            numbers = query.shape[0], inputs.key.shape[0], rows_padded // PAD.value
            sizes = Sizes("q_rows k_rows row_tiles", numbers, {}, {})
            scratch = Scratch.of_sizes((4 * problem.q_heads * rows_padded,) * 2, scratch.dtypes)
        grads, sums = made.allocate(inputs, is_compiled)
        computed = self._before.run(inputs)
        memory, rows = scratch.allocate(query, is_compiled and self._bias is None)
        read = *inputs, *computed, out, lse, grad_out, grad_lse, *rows
        made.by_queries.run(self._query, read, grads, sums, sizes)
        read = *inputs, *computed, grad_out, *rows
        for launch, one in zip(self._keys, made.by_keys, strict=True):
            one.run(launch, read, grads, (), sizes)
        d_bias = None if self._bias is None else self._bias(inputs, (*computed, grad_out, *rows))
        del memory  # all that reads it is queued
        return made.gathered(inputs, grads, d_bias, sums)

    def resized(self, problem: Problem, inputs: Inputs, config: BackwardConfig, *saved: Any) -> Backward | None:
        """The same backward of tensors of other lengths; None where other kernels compute it."""
        if self._before.steps or problem.empty:
            return None
        made = _Results.of(problem, inputs, config, self._made.wanted)
        call = BackwardCall(problem, inputs, self._before, Saved(*saved), Rows.samples(problem, inputs.query))
        sizes = call.sizes(aligned=True)
        pairs = zip(self._keys, made.by_keys, strict=True)
        keys = [launch.resized(key_programs(problem, one.tile), sizes) for launch, one in pairs]
        query = self._query.resized(programs(problem, made.by_queries.tile), call.sizes(aligned=True, with_out=True))
        if query is None or None in keys:
            return None
        found = [launch for launch in keys if launch is not None]
        return _Backward(made, self._before, call.rows, query, found, None)


def _by_head(problem: Problem, sums: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Sums of the query kernel's programs, added up to the gradient of slopes `[B or 1, Hq]` or sinks `[Hq]`."""
    if sums is None or parameter is None:
        return None
    by_batch = sums.view(problem.batch, problem.q_heads, sums.numel() // max(1, problem.batch * problem.q_heads))
    dtype = problem.state_dtype if problem.partial else parameter.dtype
    return by_batch.sum(-1).sum_to_size(parameter.shape).to(dtype)
