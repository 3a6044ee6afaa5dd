"""Few queries against many keys: the decode kernel, over keys and values as they lie.

For calls of `attention` whose caller keeps a cache of its own: each step brings new tensors, one token longer. Which
calls these are, `on_a_cache` in gpu/decode_tuning.py says.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from ...base.problem import Forward, Inputs, Problem
from ...gpu.arguments import QKV_STRIDES, UNIT, qkv_strides, sample
from ...gpu.decode_call import DecodeCall
from ...gpu.decode_tuning import DecodeConfig, on_a_cache, workspace_numbers
from ...gpu.launch import Launch
from ...gpu.scratch import Outputs, Scratch
from .decode import row_arguments, rows_kernel


def prepare(problem: Problem, inputs: Inputs, config: DecodeConfig) -> Forward:
    """The forward of calls whose tensors lie as these `inputs` do, as a function of their inputs: `(out, lse)`."""
    outputs = Outputs.of(problem, inputs.query.shape[-3])
    stated = on_a_cache(problem, fewest_keys=0)  # it was planned by a length that is rounded up
    assert stated is not None, "its configuration says that it is one"
    numbers = workspace_numbers(stated, config)
    workspace = sample((numbers,), torch.float32) if numbers else None
    # Without lengths and a tree, with slopes and a sink.
    call = DecodeCall(stated, config, inputs.query, None, None, *inputs[5:7], *outputs.samples(), workspace)
    return _Forward(outputs, call, *call.bind(rows_kernel, row_arguments(call, inputs.key, inputs.value)))


class _Forward:
    """The decode kernel and, if keys are in splits, the one that merges."""

    def __init__(self, outputs: Outputs, call: DecodeCall, launch: Launch, merge: Launch | None) -> None:
        self._outputs, self._launch, self._merge = outputs, launch, merge
        self._alike = call.config, call.problem.shape, call.problem.window
        self._scratch = Scratch.of(outputs.lse, *([] if call.workspace is None else [call.workspace]))

    def __call__(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        query, key, value, _, _, slopes, sink, *_ = inputs
        out, lse = self._outputs.allocate(query, with_lse=with_lse)
        is_compiled = self._launch.is_compiled and (self._merge is None or self._merge.is_compiled)
        memory, (to_lse, *rest) = self._scratch.allocate(query, is_compiled)
        to_lse, workspace = to_lse if lse is None else lse, rest[0] if rest else None
        self._launch(query, key, value, None, None, None, slopes, sink, out, to_lse, workspace)
        if self._merge is not None:
            self._merge(workspace, None, sink, out, to_lse)
        del memory  # all that reads it is queued
        return out, lse

    def resized(self, problem: Problem, inputs: Inputs, config: Any) -> Forward | None:
        """The same call on another number of keys, as in the next step of a model that generates; None if anything
        else differs."""
        if (config, problem.shape, problem.window) != self._alike:
            return None
        strides, made = qkv_strides(inputs, False, UNIT), copy(self)
        made._launch = self._launch.replaced(f"{QKV_STRIDES} capacity", *strides, problem.kv.k_len)
        return made
