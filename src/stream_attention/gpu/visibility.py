"""Which keys any query sees under a mask or bias, and which queries see any key, in Triton.

A row that takes no part may be NaN (padding), and 0 * NaN is NaN, so the backward must not read it. Asking inside its
kernels costs a reduction over every tile and a detour of what is loaded through registers; asking here once costs one
read of the mask. (The forward asks only where its output is NaN.)

Grid: one program per (batch, head, block of keys, block of queries), over the dims that mask and bias really have.
Flags start at 0, and programs write 1s only.
"""

from __future__ import annotations

import torch
import triton.language as tl

from ..base.problem import UNBOUNDED, Inputs, Problem
from .arguments import FAR, broadcast_strides, cdiv, flag_strides, named, sample
from .bounds import entry_strides, key_interval, query_interval, within
from .launch import Kernel, jit
from .prepass import Step

BLOCK_M, BLOCK_N = 64, 128


@jit
def _seen_kernel(
    mask_ptr, bias_ptr, query_bounds_ptr, key_bounds_ptr, flags_ptr,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn: tl.int64,
    stride_bb: tl.int64, stride_bh: tl.int64, stride_bm: tl.int64, stride_bn: tl.int64,
    stride_fb: tl.int64, stride_fh: tl.int64,
    q_len: tl.int32, k_len: tl.int32, heads: tl.int32, left: tl.int32, right: tl.int32,
    q_start: tl.int32, q_stride: tl.int32, k_start: tl.int32, k_stride: tl.int32,
    bounds_batch: tl.int32, bounds_head: tl.int32,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(q_len, BLOCK_M), tl.cdiv(k_len, BLOCK_N)
    pid = tl.program_id(0)
    offs_n = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = pid // tiles_n % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    head = pid // tiles_n // tiles_m % heads
    batch = (pid // tiles_n // tiles_m // heads).to(tl.int64)
    inside = (offs_m < q_len)[:, None] & (offs_n < k_len)[None, :]
    distance = (k_start + offs_n * k_stride)[None, :] - (q_start + offs_m * q_stride)[:, None]
    if HAS_RIGHT:
        inside = inside & (distance <= right)
    if HAS_LEFT:
        inside = inside & (distance >= -left)
    anything = tl.zeros([BLOCK_N if OF_KEYS else BLOCK_M], tl.int32)
    for member in tl.static_range(GROUP):
        visible = inside
        if query_bounds_ptr is not None:
            entry = batch * bounds_batch + (head * GROUP + member) * bounds_head
            start, end, label = query_interval(query_bounds_ptr + entry * 3 * q_len, offs_m, offs_m < q_len, q_len)
            visible = visible & within((k_start + offs_n * k_stride)[None, :], start[:, None], end[:, None])
            if key_bounds_ptr is not None:
                first, last = key_interval(key_bounds_ptr + entry * 2 * k_len, offs_n, offs_n < k_len, k_len)
                visible = visible & within(label[:, None], first[None, :], last[None, :])
        if mask_ptr is not None:
            offs = batch * stride_mb + (head * GROUP + member) * stride_mh + offs_m[:, None] * stride_mm
            visible = visible & (tl.load(mask_ptr + offs + offs_n[None, :] * stride_mn, mask=inside, other=0) != 0)
        if bias_ptr is not None:
            offs = batch * stride_bb + (head * GROUP + member) * stride_bh + offs_m[:, None] * stride_bm
            bias = tl.load(bias_ptr + offs + offs_n[None, :] * stride_bn, mask=inside, other=float("-inf"))
            visible = visible & (bias != float("-inf"))
        anything = tl.maximum(anything, tl.max(visible.to(tl.int32), 0 if OF_KEYS else 1))
    flags = flags_ptr + batch * stride_fb + head * stride_fh
    if OF_KEYS:
        tl.store(flags + offs_n, anything.to(tl.int8), mask=(offs_n < k_len) & (anything > 0))
    else:
        tl.store(flags + offs_m, anything.to(tl.int8), mask=(offs_m < q_len) & (anything > 0))


def visible_steps(problem: Problem, inputs: Inputs) -> list[Step]:
    """What computes flags, int8: `[B or 1, Hkv or 1, Tk]`, 1 for keys that a query of that batch entry and KV head
    sees, and `[B or 1, Hq or 1, Tq]`, 1 for queries that see a key.

    Where neither mask nor bias has rows, keys leave positions out: a tile never reads what its positions hide.
    """
    heads, kv_heads, group = (problem.q_heads, problem.kv_heads, problem.group) if _has(inputs, 1) else (1, 1, 1)
    return [
        _step(problem, inputs, kv_heads, group, with_rows=_has(inputs, 2), of_keys=True),
        _step(problem, inputs, heads, 1, with_rows=True, of_keys=False),
    ]


def _has(inputs: Inputs, dim: int) -> bool:
    """Whether mask or bias varies along a dim of [B, Hq, Tq, Tk]."""
    bounds = inputs.query_bounds
    if bounds is not None and (dim == 2 or (dim < 2 and bounds.shape[dim] > 1)):
        return True
    return any(t is not None and t.shape[dim] > 1 for t in (inputs.mask, inputs.bias))


def _step(problem: Problem, inputs: Inputs, heads: int, group: int, with_rows: bool, of_keys: bool) -> Step:
    mask, bias = inputs.mask, inputs.bias
    batch, rows = (problem.batch if _has(inputs, 0) else 1), (problem.q_len if with_rows else 1)
    flags = sample((batch, heads, problem.k_len if of_keys else rows), torch.int8)
    launch = _kernel.bind_addresses(
        cdiv(problem.k_len, BLOCK_N) * cdiv(rows, BLOCK_M) * heads * batch,
        {"num_warps": 4},
        mask_ptr=mask,
        bias_ptr=bias,
        query_bounds_ptr=inputs.query_bounds,
        key_bounds_ptr=inputs.key_bounds,
        flags_ptr=flags,
        **named("stride_mb stride_mh stride_mm stride_mn", broadcast_strides(mask)),
        **named("stride_bb stride_bh stride_bm stride_bn", broadcast_strides(bias)),
        **named("stride_fb stride_fh", flag_strides(flags)),
        **named("q_start q_stride k_start k_stride", problem.positions[:4]),
        **named("bounds_batch bounds_head", entry_strides(problem, inputs)),
        q_len=rows,
        k_len=problem.k_len,
        heads=heads,
        left=min(problem.left, FAR),
        right=min(problem.right, FAR),
        GROUP=group,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        HAS_LEFT=with_rows and problem.left != UNBOUNDED,
        HAS_RIGHT=with_rows and problem.right != UNBOUNDED,
        OF_KEYS=of_keys,
    )
    return Step(flags, launch, ("mask", "bias", "query_bounds", "key_bounds"), starts_at_0=True)


_kernel = Kernel(_seen_kernel)
