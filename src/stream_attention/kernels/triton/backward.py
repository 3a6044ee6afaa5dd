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

import torch
from torch import Tensor

from ...problem import Gradients, Inputs, Problem, Wanted
from ...tuning.triton import BackwardConfig, Tile
from .backward_bias import bias_gradient
from .backward_key import launch_key
from .backward_query import launch_query, programs
from .dropout import dropout_words
from .rows import PAD, empty_rows
from .visibility import seen_by_mask


def backward(
    problem: Problem,
    inputs: Inputs,
    config: BackwardConfig,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """The gradients that are `wanted`, in the inputs' dtypes, or in fp32 where the problem is one of several shards."""
    others = [tile for tile in config[1:] if tile is not None]
    assert PAD.value >= config.query.block_m >= max(tile.block_m for tile in others), "rows are written by whole tiles"
    # Rows of a pack that belong to no sequence are written by no program.
    unwritten = problem.packed or 0 in (problem.batch, problem.q_len)
    room = torch.zeros_like if unwritten else torch.empty_like
    dq, dk, dv = (
        room(t, dtype=problem.out_dtype, memory_format=torch.contiguous_format) if want else None
        for t, want in zip(inputs[:3], wanted[:3], strict=True)
    )
    # Sums over rows want the exact delta, which whole rows give: no splits of the keys, and none of a shard.
    exact_delta = any(wanted[3:]) and not problem.partial
    by_queries = config.query._replace(num_splits=1) if exact_delta else config.query
    d_slopes, d_sink = (
        lse.new_zeros(programs(problem, by_queries)) if want else None for want in (wanted.alibi_slopes, wanted.sink)
    )
    rows = empty_rows(problem, inputs.query)
    words: tuple[Tensor | None, Tensor | None] = (None, None)
    if problem.batch and problem.q_len:
        seen = seen_by_mask(problem, inputs)
        words = dropout_words(problem, inputs) if problem.dropout_p else words
        saved = out, lse.contiguous(), grad_out, None if grad_lse is None else grad_lse.contiguous()
        dq_parts = _parts(dq, by_queries)
        launch_query(problem, inputs, by_queries, seen, words, *saved, rows, dq_parts, d_slopes, d_sink, exact_delta)
        _sum_parts(dq, dq_parts)
        launches = [(config.key, dk, dv)]
        if config.value is not None:
            launches = [(config.key, dk, None), (config.value, None, dv)]
        for tile, its_dk, its_dv in launches:
            if its_dk is None and its_dv is None:
                continue
            dk_parts, dv_parts = _parts(its_dk, tile), _parts(its_dv, tile)
            launch_key(problem, inputs, tile, seen, words, grad_out, rows, dk_parts, dv_parts)
            _sum_parts(its_dk, dk_parts)
            _sum_parts(its_dv, dv_parts)
    d_bias = None
    if wanted.bias:
        assert config.bias is not None
        d_bias = bias_gradient(problem, inputs, config.bias, words, grad_out, rows)
    return Gradients(
        dq,
        dk,
        dv,
        d_bias,
        _by_head(problem, d_slopes, inputs.alibi_slopes),
        _by_head(problem, d_sink, inputs.sink),
    )


def _parts(grad: Tensor | None, tile: Tile) -> Tensor | None:
    """Where a kernel writes `grad`: there, or with several splits in fp32, a part each."""
    if grad is None or tile.num_splits == 1:
        return grad
    return grad.new_empty(tile.num_splits, *grad.shape, dtype=torch.float32)


def _sum_parts(grad: Tensor | None, parts: Tensor | None) -> None:
    if grad is not None and parts is not None and parts is not grad:
        grad.copy_(parts.sum(0))


def _by_head(problem: Problem, sums: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    """Sums of the query kernel's programs, added up to the gradient of slopes `[B or 1, Hq]` or sinks `[Hq]`."""
    if sums is None or parameter is None:
        return None
    by_batch = sums.view(problem.batch, problem.q_heads, sums.numel() // max(1, problem.batch * problem.q_heads))
    dtype = problem.state_dtype if problem.partial else parameter.dtype
    return by_batch.sum(-1).sum_to_size(parameter.shape).to(dtype)
