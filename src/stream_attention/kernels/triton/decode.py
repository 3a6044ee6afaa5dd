"""Few queries against a cache of 16- or 32-bit numbers in Triton, contiguous or paged: parts of the keys side by side.

Grid: one program per (KV head, split of the keys, tile of rows, batch entry), heads first: those of a token lie side by
side in memory. The rows of a tile are the queries of all heads that share a KV head, so that keys and values are read
once for all of them. A program streams its keys with the online softmax of forward.py.

A row's length and its pages are read on the device, so nothing here waits for them. Blocks that reach beyond the last
key read that one again, and nothing that nobody sees: it may be NaN.

Not here: quantised caches (decode_codes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...cache_views import KVCache, PagedKV, QuantizedKV
from ...gpu.launch import Kernel, Launch, jit
from ...gpu.scratch import empty
from ...problem import DecodeInputs, Inputs, Problem
from ...tuning.decode import DecodeConfig, workspace_numbers
from .arguments import UNIT, is_aligned, qkv_strides, sample, tile_width
from .decode_call import DecodeCall, side_by_side
from .decode_codes import codes_arguments, codes_kernel
from .decode_tiles import (
    first_seen,
    hide_scores,
    keys_of_split,
    leave_lse,
    leave_out,
    merge_kernel,
    modify_scores,
    normalised,
    wait_for_kernels_ahead,
)
from .tiles import online_softmax_step


@jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    tree_ptr,
    slopes_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    workspace_ptr,
    stride_qb: tl.int64,
    stride_qm: tl.int64,
    stride_qh: tl.int64,
    stride_kb: tl.int64,
    stride_kn: tl.int64,
    stride_kh: tl.int64,
    stride_vb: tl.int64,
    stride_vn: tl.int64,
    stride_vh: tl.int64,
    stride_tb: tl.int64,
    stride_rb: tl.int64,
    stride_rm: tl.int64,
    stride_ab: tl.int64,
    stride_ob: tl.int64,
    stride_om: tl.int64,
    stride_oh: tl.int64,
    stride_od: tl.int64,
    batch: tl.int32,
    kv_heads: tl.int32,
    capacity: tl.int32,
    pages: tl.int32,
    q_len: tl.int32,
    num_splits: tl.int32,
    split_keys: tl.int32,
    left: tl.int32,
    right: tl.int32,
    scale,
    softcap,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    if ALIGNED:
        stride_qb, stride_qm, stride_qh = stride_qb * 8, stride_qm * 8, stride_qh * 8
        stride_kb, stride_kn, stride_kh = stride_kb * 8, stride_kn * 8, stride_kh * 8
        stride_vb, stride_vn, stride_vh = stride_vb * 8, stride_vn * 8, stride_vh * 8
    if EARLY:
        wait_for_kernels_ahead()
    HAS_TREE: tl.constexpr = tree_ptr is not None
    HAS_ALIBI: tl.constexpr = slopes_ptr is not None

    # Where am I.
    tiles_r = tl.cdiv(GROUP * q_len, BLOCK_R)
    pid = tl.program_id(0)
    kv_head = pid % kv_heads
    split = pid // kv_heads % num_splits
    tile_r = pid // kv_heads // num_splits % tiles_r
    b = (pid // kv_heads // num_splits // tiles_r).to(tl.int64)
    length = capacity
    if lengths_ptr is not None:
        length = tl.minimum(tl.load(lengths_ptr + b), capacity)
    offs_r = tile_r * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = offs_r < GROUP * q_len
    head, t = kv_head * GROUP + offs_r // q_len, offs_r % q_len
    down = (length - q_len + t)[:, None]  # where the queries stand
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_rows = q_ptr + b * stride_qb + t * stride_qm + head * stride_qh

    first = first_seen(length, q_len, left, HAS_LEFT)
    begin, end, step = keys_of_split(first, length, split, num_splits, split_keys, BLOCK_N, PAGE == 0)
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    if PAGE == 0:
        k_ptr += b * stride_kb
        v_ptr += b * stride_vb
    else:
        table_ptr += b * stride_tb
        # A block's pages are looked up an iteration ahead.
        page = tl.load(table_ptr + tl.maximum(tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1), 0) // PAGE)
    q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_r[:, None] & (offs_d < D)[None, :], other=0.0)
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + b * stride_ab + head, mask=mask_r, other=0.0).to(tl.float32)[:, None]
    tree_rows = q_rows
    if HAS_TREE:
        tree_rows = (tree_ptr + b * stride_rb + t * stride_rm)[:, None]

    row_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for start in range(begin, end, step):
        k_pos = start + tl.arange(0, BLOCK_N)
        inside = k_pos < end
        token = tl.minimum(k_pos, end - 1)
        if PAGE == 0:
            k_rows, v_rows = token * stride_kn, token * stride_vn
        else:
            exists = (page >= 0) & (page < pages)
            place = tl.where(exists, page, 0).to(tl.int64)
            slot = token % PAGE
            k_rows = place * stride_kb + slot * stride_kn
            v_rows = place * stride_vb + slot * stride_vn
            page = tl.load(table_ptr + tl.minimum(k_pos + step, end - 1) // PAGE)
        if BLOCK_D == D:
            k = tl.load(k_ptr + k_rows[:, None] + offs_d[None, :])
        else:
            k = tl.load(k_ptr + k_rows[:, None] + offs_d[None, :], mask=(offs_d < D)[None, :], other=0.0)
        if BLOCK_DV == DV:
            v = tl.load(v_ptr + v_rows[:, None] + offs_dv[None, :])
        else:
            v = tl.load(v_ptr + v_rows[:, None] + offs_dv[None, :], mask=(offs_dv < DV)[None, :], other=0.0)
        if PRECISION == "ieee" and BLOCK_D > 64:
            # Sums of 64 products, added up: 256 one after the other are off by more than torch's, which adds in a tree.
            parts: tl.constexpr = BLOCK_D // 64
            folded_q = q.reshape(BLOCK_R, parts, 64).permute(1, 0, 2)
            folded_k = k.reshape(BLOCK_N, parts, 64).permute(1, 2, 0)
            products = tl.sum(tl.dot(folded_q, folded_k, input_precision=PRECISION), 0)
        else:
            products = tl.dot(q, k.T, input_precision=PRECISION)
        across = k_pos[None, :]
        scores = modify_scores(products, scale, softcap, slopes, down, across, HAS_SOFTCAP, HAS_ALIBI, TANH)
        if PAGE != 0:
            scores = tl.where(exists[None, :], scores, float("nan"))
        scores = hide_scores(
            scores, inside[None, :], down, across, left, right, tree_rows, length - q_len, mask_r[:, None],
            HAS_LEFT, HAS_RIGHT, HAS_TREE,
        )  # fmt: skip
        if HAS_TREE:  # a new token that nobody sees may hold anything
            v = tl.where((tl.max(scores, 0) != float("-inf"))[:, None], v, 0.0)
        weights, shrink, row_max, row_sum = online_softmax_step(scores, 1.0, row_max, row_sum, GUARD=True)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)

    out, lse = normalised(acc, row_max, row_sum)
    leave_out(
        out, lse, 0, DV, out_ptr, sink_ptr, workspace_ptr, stride_ob, stride_om, stride_oh, stride_od,
        batch, kv_heads, q_len, num_splits, split, b, kv_head, offs_r, GROUP, DV, BLOCK_DV, IS_SPLIT,
    )  # fmt: skip
    leave_lse(
        lse, lse_ptr, sink_ptr, workspace_ptr, kv_heads, q_len, num_splits, split, b, kv_head, offs_r, GROUP, IS_SPLIT
    )


KernelOf = Callable[[DecodeCall, KVCache], tuple[Kernel, dict[str, Any]]]
"""The kernel that computes a call, or its splits, and its arguments by name."""


def prepare_decode(
    problem: Problem, inputs: DecodeInputs, config: DecodeConfig, *, kernel_of: KernelOf | None = None
) -> _Decode:
    """The call on every cache that lies as this one does: out `[B, Tq, Hq, Dv]` in the query's dtype and, if wanted,
    lse `[B, Hq, Tq]`, fp32."""
    read = _pointers(inputs)
    query, *_, lengths, tree, slopes, sink = read
    batch, q_len, q_heads, _ = query.shape
    out = inputs.out
    if out is None:
        out = sample((batch, q_len, q_heads, problem.value_dim), query.dtype)
    lse = sample((batch, q_heads, q_len), torch.float32) if inputs.return_lse else None
    numbers = workspace_numbers(problem, config)
    workspace = sample((numbers,), torch.float32) if numbers else None
    given = inputs.query, *inputs.cache.tensors, *inputs[2:5]
    is_copied = any(
        t is not None and t.data_ptr() != as_read.data_ptr() for t, as_read in zip(given, read, strict=True)
    )
    if out.numel() == 0:
        return _Decode((out, lse, None), None, None, is_copied)
    asked = lengths, tree, slopes, sink, *problem.window, problem.scale, problem.softcap
    call = DecodeCall(problem, config, query, *asked, out, lse, workspace)
    kernel, arguments = (kernel_of or _kernel_of)(call, inputs.cache)
    launch = kernel.bind_addresses(call.grid, call.options, **arguments)
    merge = None if workspace is None else call.bind_merge(merge_kernel)
    return _Decode((out, lse, workspace), launch, merge, is_copied)


class _Decode:
    """The kernel that computes and, if keys are in splits, the one that merges. Keeps no tensor."""

    __slots__ = ("_is_copied", "_is_direct", "_launch", "_lse", "_merge", "_out", "_workspace")

    def __init__(
        self, results: tuple[Any, Any, Any], launch: Launch | None, merge: Launch | None, is_copied: bool
    ) -> None:
        specs = [None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in results]
        self._out: Any = specs[0]
        self._lse, self._workspace = specs[1:]
        self._launch, self._merge = launch, merge
        self._is_copied = is_copied  # whether kernels read a copy of some tensor
        self._is_direct = False  # whether the kernel is compiled and reads tensors as they lie

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
        if self._is_direct:
            launch(query, *(addresses or cache.tensors), tree, slopes, sink, out, lse, workspace)
        else:
            *read, sink = _pointers(inputs)
            launch(*read, sink, out, lse, workspace)
            self._is_direct = launch.is_compiled and not self._is_copied
        if merge is not None:
            merge(workspace, sink, out, lse)
        return out, lse


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


def _kernel_of(call: DecodeCall, cache: KVCache) -> tuple[Kernel, dict[str, Any]]:
    if isinstance(cache, QuantizedKV):
        return codes_kernel, codes_arguments(call, cache)
    if isinstance(cache, PagedKV):
        return rows_kernel, row_arguments(call, cache.key_pages, cache.value_pages, side_by_side(cache.page_table))
    return rows_kernel, row_arguments(call, cache.key, cache.value)


def row_arguments(call: DecodeCall, key: Tensor, value: Tensor, table: Tensor | None = None) -> dict[str, Any]:
    """Arguments of the kernel for keys and values `[B, T, Hkv, D]` or, with a table, `[pages, page, Hkv, D]`."""
    return {
        **call.arguments(table),
        "k_ptr": key,
        "v_ptr": value,
        **row_sizes(call, key, value),
        "BLOCK_D": tile_width(call.problem.head_dim),
        "PRECISION": "ieee" if call.query.dtype is torch.float32 else "tf32",
    }


def row_sizes(call: DecodeCall, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Those of `row_arguments` that depend on lengths."""
    aligned = is_aligned(call.query, key, value)
    return {
        **call.sizes(key.shape[0]),
        **qkv_strides(Inputs(call.query, key, value), False, UNIT if aligned else 1),
        "ALIGNED": aligned,
    }


rows_kernel = Kernel(_decode_kernel)
