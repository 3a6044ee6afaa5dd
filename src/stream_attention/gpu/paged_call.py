"""A call of ragged queries on paged keys, prepared: the launch that lists the work, the one that computes and the one
that merges splits. Keeps no tensor."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.problem import UNBOUNDED, PagedInputs, PagedPlan, Problem
from ..base.state import EMPTY
from .arguments import FAR, UNIT, is_aligned, named, row_strides, sample, scale_of, slope_stride, tanh, tile_width
from .launch import Kernel, Launch, Sizes
from .paged_tuning import MOST_KEYS, PagedConfig
from .scratch import empty
from .work_list import HEADER, WORDS, most_items, most_states


class PreparedPaged:
    """Of calls that lie as some `inputs` did, with any number of queries and requests, and of listed pages."""

    def __init__(
        self,
        problem: Problem,
        inputs: PagedInputs,
        config: PagedConfig,
        list_work: Kernel,
        compute: Kernel,
        merge: Kernel,
    ) -> None:
        self._config, self._group, self._kv_heads = config, problem.group, problem.kv_heads
        self._value_dim, self._page, self._left = problem.value_dim, problem.page, problem.left
        self._state_numbers = problem.kv_heads * config.block_r * (1 + problem.value_dim)  # of an item
        self._launches = self._bind(problem, inputs, list_work, compute, merge)
        self._resized: dict[tuple[int, ...], tuple[Launch, Launch, Launch]] = {}

    def plan(self, inputs: PagedInputs, work: Tensor | None = None) -> PagedPlan:
        """List the work of a step, into `work` if it is given."""
        words = HEADER + WORDS * self._items(inputs)
        if work is None:
            work = empty(inputs.query, (words,), (1,), torch.int32)
        elif work.dtype is not torch.int32 or work.dim() != 1 or not work.is_contiguous() or work.numel() < words:
            expected = f"a contiguous int32 tensor of at least {words} elements"
            refuse("out", expected, f"{work.dtype} of shape {list(work.shape)}", "Pass the plan of a larger step.")
        if inputs.query.shape[0] and inputs.seqused_k.shape[0]:
            self._sized(inputs)[0](work, inputs.cu_seqlens_q, inputs.seqused_k)
        return PagedPlan(work, self._made_for(inputs))

    def __call__(self, inputs: PagedInputs, plan: PagedPlan | None = None) -> tuple[Tensor, Tensor | None]:
        """Out `[Nq, Hq, Dv]` in the query's dtype and, if wanted, lse `[Hq, Nq]`, fp32."""
        (
            query, key, value, cu_seqlens_q, seqused_k, table, indptr, slopes, sink, causal, tree, tree_offsets,
            k_scale, v_scale, out, with_lse,
        ) = inputs  # fmt: skip
        rows, heads, _ = query.shape
        dim, is_new = self._value_dim, out is None
        if plan is not None and plan.made_for != self._made_for(inputs):
            hint = "Call paged_plan with these tensors and this window."
            refuse("plan", f"one made for tiles and sizes {self._made_for(inputs)}", plan.made_for, hint)
        if out is None:
            out = empty(query, (rows, heads, dim), (heads * dim, dim, 1), query.dtype)
        else:
            torch.autograd.graph.increment_version(out)
        lse = empty(query, (heads, rows), (rows, 1), torch.float32) if with_lse else None
        if not rows or not seqused_k.shape[0]:
            return out.zero_() if is_new else out, None if lse is None else lse.fill_(EMPTY)
        _, compute, merge = self._sized(inputs)
        work = (plan or self.plan(inputs)).work
        numbers = most_states(seqused_k.shape[0], self._config.programs) * self._state_numbers
        states = empty(query, (numbers,), (1,), torch.float32)
        compute(
            query, key, value, table, indptr, work, slopes, sink, causal, tree, tree_offsets, k_scale, v_scale,
            out, lse, states,
        )  # fmt: skip
        merge(work, states, cu_seqlens_q, sink, out, lse)
        return out, lse

    def _made_for(self, inputs: PagedInputs) -> tuple[Any, ...]:
        """What a plan depends on beside the values of offsets and lengths."""
        sizes = inputs.query.shape[0], inputs.seqused_k.shape[0], self._most_keys(inputs)
        return (*self._config, self._group, self._left, *sizes)

    def _most_keys(self, inputs: PagedInputs) -> int:
        """What the pages of a request can hold; of a list, all of them."""
        return min(inputs.page_table.shape[-1] * self._page, MOST_KEYS)

    def _trees_of(self, inputs: PagedInputs) -> int:
        """Elements of the masks of trees."""
        return 0 if inputs.tree_mask is None else inputs.tree_mask.shape[0]

    def _items(self, inputs: PagedInputs) -> int:
        config = self._config
        rows, requests = inputs.query.shape[0], inputs.seqused_k.shape[0]
        return most_items(rows, requests, self._group, config.block_r, config.programs)

    def _sized(self, inputs: PagedInputs) -> tuple[Launch, Launch, Launch]:
        """The launches of a call with so many queries and requests."""
        rows, requests, entries = inputs.query.shape[0], inputs.seqused_k.shape[0], inputs.page_table.shape[-1]
        key = rows, requests, entries, self._trees_of(inputs)
        found = self._resized.get(key)
        if found is None:
            with _lock:
                while len(self._resized) >= _MOST_KEPT:
                    del self._resized[next(iter(self._resized))]
            items = self._items(inputs)
            grid, list_work, compute, merge = items * self._kv_heads, *self._launches
            listed = Sizes(
                "requests rows most_keys most_items", (requests, rows, self._most_keys(inputs), items), {}, {}
            )
            states, trees = most_states(requests, self._config.programs), key[-1]
            launches = (
                list_work.resized(_PROGRAMS, listed),
                compute.resized(
                    grid, Sizes("rows entries most_states most_trees", (rows, entries, states, trees), {}, {})
                ),
                merge.resized(grid, Sizes("rows requests most_states", (rows, requests, states), {}, {})),
            )
            assert launches[0] is not None and launches[1] is not None and launches[2] is not None
            with _lock:
                found = self._resized[key] = launches  # type: ignore[assignment]
        assert found is not None
        return found

    def _bind(
        self, problem: Problem, inputs: PagedInputs, list_work: Kernel, compute: Kernel, merge: Kernel
    ) -> tuple[Launch, Launch, Launch]:
        config, (left, right) = self._config, problem.window
        query, key, value, cu_seqlens_q, seqused_k, table, indptr, slopes, sink, *_, given, with_lse = inputs
        rows, requests, kv_heads, dim = query.shape[0], seqused_k.shape[0], problem.kv_heads, problem.value_dim
        out: Any = sample((rows, problem.q_heads, dim), query.dtype) if given is None else given
        lse = sample((problem.q_heads, rows), torch.float32) if with_lse else None
        work, states = sample((HEADER,), torch.int32), sample((self._state_numbers,), torch.float32)
        k_scale, v_scale = inputs.k_scale, inputs.v_scale
        tiles: dict[str, Any] = {"GROUP": problem.group, "BLOCK_R": config.block_r}
        values: dict[str, Any] = {"DV": dim, "BLOCK_DV": tile_width(dim)}
        aligned = is_aligned(query, key, value)
        unit = UNIT if aligned else 1
        by_row, by_head, _ = out.stride()
        of_out: dict[str, Any] = {"stride_om": by_row, "stride_oh": by_head, "rows": rows, "kv_heads": kv_heads}
        of_out["most_states"] = most_states(requests, config.programs)
        listing = list_work.bind_addresses(
            _PROGRAMS,
            {"num_warps": 4},
            query.device,
            list_ptr=work,
            cu_q_ptr=cu_seqlens_q,
            lengths_ptr=seqused_k,
            requests=requests,
            rows=rows,
            most_keys=self._most_keys(inputs),
            left=min(left, FAR),
            programs=config.programs,
            most_items=0,
            **tiles,
            BLOCK_N=config.block_n,
            HAS_LEFT=left != UNBOUNDED,
        )
        computing = compute.bind_addresses(
            0,
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
            query.device,
            q_ptr=query,
            k_ptr=key,
            v_ptr=value,
            table_ptr=table,
            indptr_ptr=indptr,
            list_ptr=work,
            slopes_ptr=slopes,
            sink_ptr=sink,
            causal_ptr=inputs.causal,
            tree_ptr=inputs.tree_mask,
            tree_offsets_ptr=inputs.tree_offsets,
            k_scale_ptr=k_scale,
            v_scale_ptr=v_scale,
            out_ptr=out,
            lse_ptr=lse,
            states_ptr=states,
            **named("stride_qm stride_qh", [stride // unit for stride in query.stride()[:2]]),
            **named("stride_kb stride_kn stride_kh", row_strides(key, False, unit)),
            **named("stride_vb stride_vn stride_vh", row_strides(value, False, unit)),
            stride_tb=0 if indptr is not None else table.stride(0),
            stride_ab=slope_stride(slopes),
            **named("stride_ksb stride_ksh", _scale_strides(k_scale)),
            **named("stride_vsb stride_vsh", _scale_strides(v_scale)),
            **of_out,
            pages=key.shape[0],
            most_trees=self._trees_of(inputs),
            entries=table.shape[-1],
            left=min(left, FAR),
            right=FAR if right == UNBOUNDED else min(right, FAR),
            scale=scale_of(problem),
            softcap=problem.softcap,
            value_scale=problem.value_scale,
            **tiles,
            **values,
            D=problem.head_dim,
            BLOCK_D=tile_width(problem.head_dim),
            BLOCK_N=config.block_n,
            PAGE=problem.page,
            ALIGNED=aligned,
            HAS_LEFT=left != UNBOUNDED,
            HAS_RIGHT=right != UNBOUNDED or problem.causal_by_request,
            IS_CAUSAL=problem.causal_by_request,
            HAS_SOFTCAP=problem.softcap != 0.0,
            PRECISION="ieee" if problem.dtype is torch.float32 else "tf32",
            TANH=tanh(problem),
        )
        merging = merge.bind_addresses(
            0,
            {"num_warps": 4},
            query.device,
            list_ptr=work,
            states_ptr=states,
            cu_q_ptr=cu_seqlens_q,
            sink_ptr=sink,
            out_ptr=out,
            lse_ptr=lse,
            **of_out,
            requests=requests,
            **tiles,
            **values,
            CLEARS=given is None,
        )
        return listing, computing, merging


def _scale_strides(scale: Tensor | None) -> tuple[int, int]:
    """Strides of scales `[B or 1, Hkv or 1]`."""
    if scale is None:
        return 0, 0
    by_request, by_head = (0 if size == 1 else stride for size, stride in zip(scale.shape, scale.stride(), strict=True))
    return by_request, by_head


_PROGRAMS = 256
"""That list the work, and share the requests."""

_lock = Lock()
_MOST_KEPT = 64
"""Numbers of queries and requests for which launches are kept."""
