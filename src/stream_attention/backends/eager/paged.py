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
    query, out = inputs.query, inputs.out
    if out is None:
        out = query.new_zeros(*query.shape[:2], problem.value_dim)
    lse = query.new_full((query.shape[1], query.shape[0]), EMPTY, dtype=problem.state_dtype)
    offsets = inputs.cu_seqlens_q.tolist()
    starts = None if inputs.kv_indptr is None else inputs.kv_indptr.tolist()
    trees = None if inputs.tree_offsets is None else inputs.tree_offsets.tolist()
    causal = None if inputs.causal is None else inputs.causal.tolist()
    for request, (first, last) in enumerate(pairwise(offsets)):
        if first >= last:
            continue
        table = inputs.page_table
        row = table[request : request + 1] if starts is None else table[starts[request] : starts[request + 1]][None]
        if not row.shape[1]:
            row = row.new_zeros(1, 1)  # it has no keys
        capacity = row.shape[1] * problem.page
        length = inputs.seqused_k[request : request + 1].clamp(max=capacity)
        cache = _rows_of(
            key_pages=inputs.key_pages, value_pages=inputs.value_pages, page_table=row.int(), lengths=length
        )
        tree = None
        if trees is not None and inputs.tree_mask is not None:
            elements = inputs.tree_mask[max(trees[request], 0) : max(trees[request + 1], 0)]
            if elements.numel() == trees[request + 1] - trees[request] == (last - first) ** 2:  # as kernels look at it
                tree = elements.view(1, last - first, last - first)
        is_causal = problem.causal_by_request if causal is None else bool(causal[request])
        one = problem.replace(
            batch=1, q_len=last - first, k_len=capacity, ragged=False, e4m3=False,
            right=0 if is_causal and tree is None else problem.right,
            **Positions(capacity - last + first)._asdict(),
        )  # fmt: skip
        its_query, its_slopes = query[None, first:last], _of_request(inputs.alibi_slopes, request)
        if problem.e4m3:  # products with scales are rounded once, at the end
            its_query = its_query.to(problem.state_dtype)
            if inputs.k_scale is not None:
                its_query = its_query * _by_query_head(inputs.k_scale, request, problem)
        result, its_lse = decode(
            one, DecodeInputs(its_query, cache, tree, its_slopes, inputs.sink, return_lse=True), config
        )
        assert its_lse is not None
        if problem.e4m3:
            result = result * problem.value_scale
            if inputs.v_scale is not None:
                result = result * _by_query_head(inputs.v_scale, request, problem)
        out[first:last] = result[0]
        lse[:, first:last] = its_lse[0]
    return out, lse if inputs.return_lse else None


def _of_request(each: Tensor | None, request: int) -> Tensor | None:
    """Its line of a tensor `[B or 1, H]`."""
    return each if each is None or each.shape[0] == 1 else each[request : request + 1]


def _by_query_head(scale: Tensor, request: int, problem: Problem) -> Tensor:
    """`[Hq, 1]` of scales `[B or 1, Hkv or 1]`."""
    own = scale[min(request, scale.shape[0] - 1)].expand(problem.kv_heads)
    return own.to(problem.state_dtype).repeat_interleave(problem.group)[:, None]


class PreparedPaged(NamedTuple):
    """A call that has no work to list."""

    problem: Problem
    config: EagerDecodeConfig

    def plan(self, inputs: PagedInputs, work: Tensor | None = None) -> PagedPlan:
        return PagedPlan(inputs.seqused_k.new_empty(0) if work is None else work, ())

    def __call__(self, inputs: PagedInputs, plan: PagedPlan | None = None) -> tuple[Tensor, Tensor | None]:
        return paged(self.problem, inputs, self.config)


def _rows_of(**fields: Any) -> PagedKV:
    """A cache whose fields were checked: pages may be larger than those of a cache that is made."""
    cache = object.__new__(PagedKV)
    cache.__dict__.update(fields)
    return cache
