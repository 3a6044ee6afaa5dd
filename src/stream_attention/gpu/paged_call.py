"""A call of ragged queries on paged keys, prepared: the launch that lists the work, the one that computes and the one
that merges splits. Keeps no tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.problem import UNBOUNDED, PagedInputs, Problem
from ..base.state import EMPTY
from .arguments import FAR, UNIT, is_aligned, named, row_strides, sample, scale_of, slope_stride, tanh, tile_width
from .launch import Kernel, Launch
from .scratch import Scratch, empty
from .work_list import HEADER, WORDS, most_items, most_states


class PagedConfig(NamedTuple):
    block_r: int  # queries times the heads that share a KV head
    block_n: int
    num_warps: int
    num_stages: int
    programs: int  # for each KV head, that the keys of few queries are shared by

    def __str__(self) -> str:
        return (
            f"work listed by lengths, tiles of {self.block_r} rows, blocks of {self.block_n} keys, "
            f"{self.num_warps} warps, {self.num_stages} stages"
        )


ROUNDS = 2
"""Of programs that run at a time. Fewer and longer ones would end at other times, more would start more often."""


def configure(problem: Problem) -> PagedConfig:
    """The tiles are those of decoding (gpu/decode_tuning.py), not tuned for prompts yet."""
    group, width = problem.group, max(problem.head_dim, problem.value_dim)
    limit = 16 if problem.dtype is torch.float32 else 64 if width <= 128 else 32
    most = max(16, min(limit, 1 << (group * max(problem.q_len, 1) - 1).bit_length()))
    if problem.device.type == "cpu":  # the interpreter
        return PagedConfig(most, 32, 4, 1, max(1, 6 // max(problem.kv_heads, 1)))
    if problem.dtype is torch.float32:
        block_n, num_warps, num_stages, resident = (32, 8, 2, 1) if width <= 128 else (16, 8, 1, 1)
    elif most > 16:
        block_n, num_warps, num_stages, resident = (64, 4, 2, 2) if width <= 128 else (32, 4, 2, 1)
    else:
        block_n, num_warps, num_stages, resident = (64, 4, 3, 1) if width > 64 else (128, 4, 2, 2)
    programs = ROUNDS * resident * max(1, problem.num_sms) // max(1, problem.kv_heads)
    return PagedConfig(most, block_n, num_warps, num_stages, max(1, programs))


class PreparedPaged:
    """Of calls that lie as some `inputs` did, with any number of queries."""

    def __init__(
        self, problem: Problem, inputs: PagedInputs, config: PagedConfig, plan: Kernel, compute: Kernel, merge: Kernel
    ) -> None:
        self._problem, self._config = problem, config
        self._kernels = plan, compute, merge
        self._by_rows: dict[int, tuple[Launch, Launch, Launch, Scratch]] = {}

    def __call__(self, inputs: PagedInputs) -> tuple[Tensor, Tensor | None]:
        """Out `[Nq, Hq, Dv]` in the query's dtype and, if wanted, lse `[Hq, Nq]`, fp32."""
        query, out = inputs.query, inputs.out
        rows, heads, _ = query.shape
        dim = self._problem.value_dim
        if out is None:
            out = empty(query, (rows, heads, dim), (heads * dim, dim, 1), query.dtype)
        else:
            torch.autograd.graph.increment_version(out)
        lse = empty(query, (heads, rows), (rows, 1), torch.float32) if inputs.return_lse else None
        if not rows:
            return out, lse
        if not self._problem.batch:
            out = out if inputs.out is not None else out.zero_()
            return out, None if lse is None else lse.fill_(EMPTY)
        found = self._by_rows.get(rows)
        if found is None:
            if len(self._by_rows) >= _MOST_KEPT:
                del self._by_rows[next(iter(self._by_rows))]
            found = self._by_rows[rows] = self._bind(inputs, out, lse)
        plan, compute, merge, scratch = found
        is_compiled = plan.is_compiled and compute.is_compiled and merge.is_compiled
        memory, (items, states) = scratch.allocate(query, is_compiled)
        _, key, value, cu_seqlens_q, seqused_k, table, indptr, slopes, sink, *_ = inputs
        plan(items, cu_seqlens_q, seqused_k, out, lse)
        compute(query, key, value, table, indptr, items, slopes, sink, out, lse, states)
        merge(items, states, sink, out, lse)
        del memory  # all that reads it is queued
        return out, lse

    def _bind(self, inputs: PagedInputs, out: Tensor, lse: Tensor | None) -> tuple[Launch, Launch, Launch, Scratch]:
        problem, config = self._problem, self._config
        query, key, value, cu_seqlens_q, seqused_k, table, indptr, slopes, sink, given, _ = inputs
        rows, kv_heads, (left, right) = query.shape[0], problem.kv_heads, problem.window
        items = most_items(rows, problem.batch, problem.group, config.block_r, config.programs)
        parts = most_states(config.programs)
        numbers = parts * kv_heads * config.block_r
        listed = sample((HEADER + WORDS * items,), torch.int32)
        states = sample((numbers * (1 + problem.value_dim),), torch.float32)
        scratch = Scratch.of(listed, states)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        tiles: dict[str, Any] = {"GROUP": problem.group, "DV": problem.value_dim, "BLOCK_R": config.block_r}
        blocks: dict[str, Any] = {"BLOCK_DV": tile_width(problem.value_dim), "BLOCK_D": tile_width(problem.head_dim)}
        aligned = is_aligned(query, key, value)
        unit = UNIT if aligned else 1
        of_out = named("stride_om stride_oh", out.stride()[:2])
        plan_kernel, paged_kernel, merge_kernel = self._kernels
        plan = plan_kernel.bind_addresses(
            min(max(problem.batch, 1), _PROGRAMS),
            {"num_warps": 4},
            list_ptr=listed,
            cu_q_ptr=cu_seqlens_q,
            lengths_ptr=seqused_k,
            out_ptr=out,
            lse_ptr=lse,
            requests=problem.batch,
            rows=rows,
            heads=problem.q_heads,
            most_keys=problem.k_len,
            left=min(left, FAR),
            programs=config.programs,
            most_items=items,
            **tiles,
            BLOCK_N=config.block_n,
            HAS_LEFT=left != UNBOUNDED,
            CLEARS=given is None,
        )
        compute = paged_kernel.bind_addresses(
            items * kv_heads,
            options,
            q_ptr=query,
            k_ptr=key,
            v_ptr=value,
            table_ptr=table,
            indptr_ptr=indptr,
            list_ptr=listed,
            slopes_ptr=slopes,
            sink_ptr=sink,
            out_ptr=out,
            lse_ptr=lse,
            states_ptr=states,
            **named("stride_qm stride_qh", [stride // unit for stride in query.stride()[:2]]),
            **named("stride_kb stride_kn stride_kh", row_strides(key, False, unit)),
            **named("stride_vb stride_vn stride_vh", row_strides(value, False, unit)),
            stride_tb=0 if indptr is not None else table.stride(0),
            stride_ab=slope_stride(slopes),
            **of_out,
            rows=rows,
            kv_heads=kv_heads,
            pages=key.shape[0],
            entries=table.shape[0],
            most_states=parts,
            left=min(left, FAR),
            right=min(right, FAR),
            scale=scale_of(problem),
            softcap=problem.softcap,
            **tiles,
            **blocks,
            D=problem.head_dim,
            BLOCK_N=config.block_n,
            PAGE=problem.page,
            ALIGNED=aligned,
            HAS_LEFT=left != UNBOUNDED,
            HAS_RIGHT=right != UNBOUNDED,
            HAS_SOFTCAP=problem.softcap != 0.0,
            PRECISION="ieee" if problem.dtype is torch.float32 else "tf32",
            TANH=tanh(problem),
        )
        merge = merge_kernel.bind_addresses(
            items * kv_heads,
            {"num_warps": 4},
            query.device,
            list_ptr=listed,
            states_ptr=states,
            sink_ptr=sink,
            out_ptr=out,
            lse_ptr=lse,
            **of_out,
            rows=rows,
            kv_heads=kv_heads,
            most_states=parts,
            **tiles,
            BLOCK_DV=blocks["BLOCK_DV"],
        )
        return plan, compute, merge, scratch


_PROGRAMS = 1024
_MOST_KEPT = 64
"""Numbers of queries for which launches are kept bound."""
