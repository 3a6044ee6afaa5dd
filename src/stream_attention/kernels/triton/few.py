"""Few queries against many keys: the decode kernel, over keys and values as they lie.

What `decode_attention` does for a cache, for a call of `attention` whose keys are a cache to the one who calls: new
tensors in every step, of one more token. Which calls these are, `tuning.decode.on_a_cache` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...cache_views import ContiguousKV
from ...problem import Inputs, Problem
from ...tuning.decode import DecodeConfig, DecodeProblem, on_a_cache
from .decode import decode, kernel_of
from .decode_call import DecodeCall, workspace_numbers
from .decode_tiles import merge_kernel


def forward(problem: Problem, inputs: Inputs, config: DecodeConfig) -> tuple[Tensor, Tensor]:
    """out `[B, Tq, Hq, Dv]` and lse `[B, Hq, Tq]`."""
    asked = None, inputs.alibi_slopes, inputs.sink, problem.left, problem.right, problem.scale, problem.softcap
    cache = ContiguousKV(inputs.key, inputs.value)
    out, lse, _ = decode(_stated(problem), config, inputs.query, cache, *asked, None, True, None)
    assert lse is not None
    return out, lse


def repeat(
    problem: Problem, inputs: Inputs, config: DecodeConfig, out: Tensor, lse: Tensor
) -> Callable[[Tensor, Tensor, Tensor, bool], Any]:
    """A plain call that was computed, as a function of a query, key and value of the same layout and of whether the LSE
    is returned too. `out` and `lse` are that call's results. Keeps none of the tensors."""
    numbers = workspace_numbers(_stated(problem), config)
    workspace = lse.new_empty(numbers) if numbers else None
    sides = problem.left, problem.right, problem.scale, problem.softcap
    call = DecodeCall(_stated(problem), config, inputs.query, None, None, None, None, *sides, out, lse, workspace)
    kernel, arguments = kernel_of(call, ContiguousKV(inputs.key, inputs.value))
    scalars = arguments.pop("scalars")
    launch = kernel.repeat(**arguments)
    merging = call.merging() if numbers else {}
    merge_scalars = merging.pop("scalars", ())
    merge = merge_kernel.repeat(**merging) if numbers else None
    out_shape, lse_shape, float32 = out.shape, lse.shape, torch.float32
    absent = (None,) * 5  # table, lengths, tree, slopes, sink

    def compute(query: Tensor, key: Tensor, value: Tensor, return_lse: bool) -> Any:
        results = forward(problem, Inputs(query, key, value), config)
        return results if return_lse else results[0]

    if launch is None:  # the interpreter
        return compute

    def compute_at_once(query: Tensor, key: Tensor, value: Tensor, return_lse: bool) -> Any:
        out = query.new_empty(out_shape)
        lse = query.new_empty(lse_shape, dtype=float32)
        results = out.data_ptr(), lse.data_ptr()
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), *absent, *results
        if merge is None:
            launch(*addresses, None, *scalars)
        else:
            parts = query.new_empty(numbers, dtype=float32)
            launch(*addresses, parts.data_ptr(), *scalars)
            merge(parts.data_ptr(), None, *results, *merge_scalars)
        return (out, lse) if return_lse else out

    return compute_at_once


def _stated(problem: Problem) -> DecodeProblem:
    stated = on_a_cache(problem)
    assert stated is not None, "its configuration says that it is one"
    return stated
