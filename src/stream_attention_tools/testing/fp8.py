"""FP8 kernels on values that were quantised before: a call without its quantisation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stream_attention.backends.base import Backend, load
from stream_attention.backends.reference import fp8 as reference
from stream_attention.base.fp8_layout import KeyCodes, QueryCodes
from stream_attention.base.problem import Problem
from stream_attention.gpu.scratch import Outputs


def attend_to_codes(
    backend: Backend, problem: Problem, queries: QueryCodes, keys: KeyCodes, *ends_and_config: Any
) -> tuple[Tensor, Tensor]:
    """`(out, lse)`, given quantised values, cu_seqlens of queries and keys, and the backend's configuration."""
    *ends, config = ends_and_config
    kernel = getattr(load(backend.fp8_kernels), "fp8_kernel", None)
    if kernel is None:
        return reference.attention(problem, queries, keys, *ends)
    out, lse = Outputs.of(problem, queries.rows).allocate(queries.scales)
    if not problem.empty:
        from stream_attention.gpu.fp8_call import Fp8Call
        from stream_attention.gpu.quantize_fp8 import codes_in_order

        counter, outputs = kernel.counter(problem).empty(out).zero_(), Outputs(out, lse, False)
        call = Fp8Call(problem, queries, keys, tuple(ends), config, outputs, counter, out.device)
        kernel.bind(call)(*codes_in_order(queries, keys), *ends, out, lse, counter)
    return out, lse
