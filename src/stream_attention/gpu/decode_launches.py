"""A call on a cache, prepared: the launch that computes and the one that merges splits. Keeps no tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.kv_layouts import KVCache, QuantizedKV
from ..base.problem import DecodeInputs, Problem
from .arguments import sample
from .decode_call import DecodeCall, side_by_side
from .decode_tuning import DecodeConfig, workspace_numbers
from .launch import Kernel, Launch
from .scratch import empty

KernelOf = Callable[[DecodeCall, KVCache], tuple[Kernel, dict[str, Any]]]
"""The kernel that computes a call, or its splits, and its arguments by name."""


def prepare_decode_by(
    kernel_of: KernelOf, problem: Problem, inputs: DecodeInputs, config: DecodeConfig
) -> PreparedDecode:
    """The call on every cache that lies as this one does: out `[B, Tq, Hq, Dv]` in the query's dtype and, if wanted,
    lse `[B, Hq, Tq]`, fp32."""
    read = _pointers(inputs)
    query, *_, lengths, tree, slopes, sink = read
    out, lse, workspace = _results(problem, inputs, config)
    given = inputs.query, *inputs.cache.tensors, *inputs[2:5]
    is_copied = any(
        t is not None and t.data_ptr() != as_read.data_ptr() for t, as_read in zip(given, read, strict=True)
    )
    if out.numel() == 0:
        return PreparedDecode((out, lse, None), None, None, is_copied)
    call = DecodeCall(problem, config, query, lengths, tree, slopes, sink, out, lse, workspace)
    launch, merge = call.bind(*kernel_of(call, inputs.cache))
    return PreparedDecode((out, lse, workspace), launch, merge, is_copied)


def _results(problem: Problem, inputs: DecodeInputs, config: DecodeConfig) -> tuple[Any, Any, Any]:
    """Out, lse and workspace, samples but for a given out; None where there is none."""
    batch, q_len, q_heads, *_, value_dim = problem.shape
    out: Any = inputs.out
    if out is None:
        out = sample((batch, q_len, q_heads, value_dim), inputs.query.dtype)
    lse = sample((batch, q_heads, q_len), torch.float32) if inputs.return_lse else None
    numbers = workspace_numbers(problem, config)
    return out, lse, sample((numbers,), torch.float32) if numbers else None


class PreparedDecode:
    """The kernel that computes and, if keys are in splits, the one that merges. Keeps no tensor."""

    __slots__ = ("_is_copied", "_is_direct", "_launch", "_lse", "_merge", "_out", "_workspace")

    def __init__(
        self,
        results: tuple[Any, Any, Any],
        launch: Launch | None,
        merge: Launch | None,
        is_copied: bool,
        is_direct: bool = False,
    ) -> None:
        specs = [None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in results]
        self._out: Any = specs[0]
        self._lse, self._workspace = specs[1:]
        self._launch, self._merge = launch, merge
        self._is_copied = is_copied  # whether kernels read a copy of some tensor
        self._is_direct = is_direct  # whether the kernel is compiled and reads tensors as they lie

    def __call__(self, inputs: DecodeInputs, addresses: Sequence[int] | None = None) -> tuple[Tensor, Tensor | None]:
        query, cache, tree, slopes, sink, out, _, workspace = inputs
        if out is None:
            out = empty(query, *self._out)
        else:
            torch.autograd.graph.increment_version(out)
        lse = None if self._lse is None else empty(query, *self._lse)
        launch, merge = self._launch, self._merge
        if launch is None:
            return out, lse
        if merge is None:
            workspace = None
        elif workspace is None:
            assert self._workspace is not None
            workspace = empty(query, *self._workspace)
        lengths: Any
        if self._is_direct:
            stored = addresses or cache.tensors
            lengths = stored[-1]
            launch(query, *stored, tree, slopes, sink, out, lse, workspace)
        else:
            *read, lengths, tree, slopes, sink = _pointers(inputs)
            launch(*read, lengths, tree, slopes, sink, out, lse, workspace)
            self._is_direct = launch.is_compiled and not self._is_copied
        if merge is not None:
            merge(workspace, lengths, sink, out, lse)
        return out, lse

    def resized(self, problem: Problem, inputs: DecodeInputs, config: DecodeConfig) -> PreparedDecode | None:
        """The same call with other lengths, no tree and new results; None for a quantised cache, for a tensor that
        kernels read a copy of, or if another kernel computes it."""
        query, cache, _, slopes, sink, *_ = inputs
        if self._launch is None or self._is_copied or isinstance(cache, QuantizedKV):
            return None
        results = _results(problem, inputs, config)
        call = DecodeCall(problem, config, query, cache.lengths, None, slopes, sink, *results)
        launches = call.resized(self._launch, self._merge, call.row_sizes(*cache.tensors))
        return launches and PreparedDecode(results, *launches, False, self._is_direct)


def _pointers(inputs: DecodeInputs) -> tuple[Any, ...]:
    """Tensors in the order of the kernels' parameters, as these read them: the last dim is contiguous, and quantised
    values are int16 words."""
    query, cache, tree, slopes, sink, *_ = inputs
    query = query.resolve_neg()
    if query.stride(-1) != 1 and query.shape[-1] != 1:
        query = query.contiguous()
    *stored, table, lengths = cache.tensors
    words = [t.view(torch.int16) if t is not None and t.dtype.itemsize == 1 else t for t in stored]
    return query, *words, *[side_by_side(t) for t in (table, lengths, tree, slopes, sink)]
