"""Few queries against many keys: the decode kernel, over keys and values as they lie.

What `decode_attention` does for a cache, for a call of `attention` whose keys are a cache to the one who calls: new
tensors in every step, of one more token. Which calls these are, `tuning.decode.on_a_cache` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...base.problem import Forward, Inputs, Problem
from ...gpu.arguments import sample
from ...gpu.decode_call import DecodeCall
from ...gpu.decode_tuning import DecodeConfig, on_a_cache, workspace_numbers
from ...gpu.launch import Launch
from ...gpu.scratch import Outputs
from .decode import row_arguments, row_sizes, rows_kernel


def prepare(problem: Problem, inputs: Inputs, config: DecodeConfig) -> Forward:
    """The forward of calls whose tensors lie as these `inputs` do, as a function of their inputs: `(out, lse)`."""
    outputs = Outputs.of(problem, inputs.query.shape[-3])
    call = _call(problem, inputs, config, outputs)
    return _Forward(outputs, call, *call.bind(rows_kernel, row_arguments(call, inputs.key, inputs.value)))


def _call(problem: Problem, inputs: Inputs, config: DecodeConfig, outputs: Outputs) -> DecodeCall:
    """The call on a cache that a problem is; results and workspace are samples."""
    stated = on_a_cache(problem, fewest_keys=0)  # it was planned by a length that is rounded up
    assert stated is not None, "its configuration says that it is one"
    numbers = workspace_numbers(stated, config)
    workspace = sample((numbers,), torch.float32) if numbers else None
    its = None, None, inputs.alibi_slopes, inputs.sink  # no lengths, no tree
    return DecodeCall(stated, config, inputs.query, *its, *outputs.samples(), workspace)


class _Forward:
    """The decode kernel and, if keys are in splits, the one that merges."""

    def __init__(self, outputs: Outputs, call: DecodeCall, launch: Launch, merge: Launch | None) -> None:
        self._outputs, self._launch, self._merge = outputs, launch, merge
        self._numbers = 0 if call.workspace is None else call.workspace.numel()

    def __call__(self, inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        query, slopes, sink = inputs.query, inputs.alibi_slopes, inputs.sink
        out, lse = self._outputs.allocate(query)
        workspace = query.new_empty(self._numbers, dtype=torch.float32) if self._numbers else None
        self._launch(query, inputs.key, inputs.value, None, None, None, slopes, sink, out, lse, workspace)
        if self._merge is not None:
            self._merge(workspace, sink, out, lse)
        return out, lse

    def resized(self, problem: Problem, inputs: Inputs, config: Any) -> Forward | None:
        """The same call on keys of another length; None where another kernel computes it."""
        if not isinstance(config, DecodeConfig):
            return None
        outputs = Outputs.of(problem, inputs.query.shape[-3])
        call = _call(problem, inputs, config, outputs)
        launches = call.resized(self._launch, self._merge, row_sizes(call, inputs.key, inputs.value))
        return None if launches is None else _Forward(outputs, call, *launches)
