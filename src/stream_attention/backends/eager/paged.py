"""Ragged queries on paged keys in plain torch: request by request, as decode.py computes them.

Reads offsets on the host, which on a GPU is a synchronisation.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ...base.kv_layouts import PagedKV
from ...base.problem import DecodeInputs, PagedInputs, PagedPlan, Positions, Problem
from ...base.state import EMPTY
from .decode import decode
from .tuning import EagerDecodeConfig


def paged(problem: Problem, inputs: PagedInputs, config: EagerDecodeConfig) -> tuple[Tensor, Tensor | None]:
    """Out `[Nq, Hq, Dv]` in the query's dtype and, if wanted, lse `[Hq, Nq]`. Rows of no request are 0 and -inf, or in
    an `out` that was given what they were."""
    query, key, value, cu_seqlens_q, seqused_k, table, indptr, slopes, sink, out, return_lse = inputs
    if out is None:
        out = query.new_zeros(*query.shape[:2], problem.value_dim)
    lse = query.new_full((query.shape[1], query.shape[0]), EMPTY, dtype=problem.state_dtype)
    offsets = cu_seqlens_q.tolist()
    starts = None if indptr is None else indptr.tolist()
    for request, (first, last) in enumerate(pairwise(offsets)):
        if first >= last:
            continue
        row = table[request : request + 1] if starts is None else table[starts[request] : starts[request + 1]][None]
        if not row.shape[1]:
            row = row.new_zeros(1, 1)  # it has no keys
        length = seqused_k[request : request + 1].clamp(max=row.shape[1] * problem.page)
        cache = _rows_of(key_pages=key, value_pages=value, page_table=row.int(), lengths=length)
        its_slopes = slopes if slopes is None or slopes.shape[0] == 1 else slopes[request : request + 1]
        capacity = row.shape[1] * problem.page
        one = problem.replace(
            batch=1, q_len=last - first, k_len=capacity, ragged=False, **Positions(capacity - last + first)._asdict()
        )
        given = DecodeInputs(query[None, first:last], cache, None, its_slopes, sink, None, True)
        result, its_lse = decode(one, given, config)
        assert its_lse is not None
        out[first:last] = result[0]
        lse[:, first:last] = its_lse[0]
    return out, lse if return_lse else None


class PreparedPaged(NamedTuple):
    """A call that has no work to list."""

    problem: Problem
    config: EagerDecodeConfig

    def plan(self, inputs: PagedInputs, work: Tensor | None = None) -> PagedPlan:
        return PagedPlan(inputs.seqused_k.new_empty(0) if work is None else work, None)

    def __call__(self, inputs: PagedInputs, plan: PagedPlan | None = None) -> tuple[Tensor, Tensor | None]:
        return paged(self.problem, inputs, self.config)


def _rows_of(**fields: Any) -> PagedKV:
    """A cache whose fields were checked: pages may be larger than those of a cache that is made."""
    cache = object.__new__(PagedKV)
    cache.__dict__.update(fields)
    return cache
