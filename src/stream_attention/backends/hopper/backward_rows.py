"""Before the Hopper backward, in Triton: what belongs to a query row.

Delta = dO . O - dLSE and the LSE in log2 units, padded (gpu/rows.py), and a cleared scratch with its
counters. One read of O and dO, one write of the scratch: what it costs is memory traffic. Of a pack, tiles of keys and
blocks of queries are listed here too. `BackwardCall` is what all launches of a backward are bound from.

Grid: one program per (batch, head, block of rows).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

from ...base.problem import UNBOUNDED, Inputs, Problem, tma_compatible
from ...base.state import Saved
from ...gpu.arguments import FAR, UNIT, cdiv, line_strides, row_strides, sample
from ...gpu.launch import Kernel, Launch, Sizes, jit
from ...gpu.prepass import Prepass
from ...gpu.rows import PAD, Rows, padded_row
from ...gpu.tail import clear_uncomputed, most_seen
from ...gpu.tile_list import list_tiles, most_tiles, words_of
from ...gpu.tiles import LOG2E, packed_rows
from .tuning import KEYS, GluonBackwardConfig, tile_widths

CHUNK = tl.constexpr(64)

SCRATCH_BYTES = 256 << 20
"""Of the scratch in which dQ grows. Heads for which it would be larger are computed by launch after launch."""


@jit
def _prepare_kernel(
    out_ptr, grad_out_ptr, lse_ptr, grad_lse_ptr, cu_q_ptr, cu_k_ptr,
    rows_lse_ptr, rows_delta_ptr, scratch_ptr, counts_ptr, counter_ptr, key_list_ptr, query_list_ptr,
    dq_ptr, dk_ptr, dv_ptr,
    stride_ob: tl.int64, stride_om: tl.int64, stride_oh: tl.int64,
    stride_gb: tl.int64, stride_gm: tl.int64, stride_gh: tl.int64,
    stride_lb: tl.int64, stride_lh: tl.int64, stride_eb: tl.int64, stride_eh: tl.int64,
    sequences: tl.int32, heads: tl.int32, kv_heads: tl.int32, q_len: tl.int32, q_rows: tl.int32, k_rows: tl.int32,
    q_covered: tl.int32, k_covered: tl.int32, rows: tl.int32, blocks: tl.int32,
    first_head: tl.int32, first_count: tl.int32,
    most_tiles: tl.int32, most_blocks: tl.int32, most_seen: tl.int32, right: tl.int32,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    IS_PACKED: tl.constexpr, HAS_LSE_GRAD: tl.constexpr,
    KEY_TILE: tl.constexpr, QUERY_BLOCK: tl.constexpr, HAS_RIGHT: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if IS_PACKED:
        list_tiles(
            key_list_ptr, cu_q_ptr, cu_k_ptr, sequences, q_rows, k_rows, k_covered, most_tiles, most_seen, right,
            KEY_TILE, "keys", ORDERED, HAS_RIGHT,
        )  # fmt: skip
        list_tiles(
            query_list_ptr, cu_q_ptr, cu_k_ptr, sequences, q_rows, k_rows, q_covered, most_blocks, most_seen, right,
            QUERY_BLOCK, "blocks", ORDERED, HAS_RIGHT,
        )  # fmt: skip
        clear_uncomputed(dq_ptr, cu_q_ptr, sequences, q_covered, q_rows, heads * D, 0.0)
        clear_uncomputed(dk_ptr, cu_k_ptr, sequences, k_covered, k_rows, kv_heads * D, 0.0)
        clear_uncomputed(dv_ptr, cu_k_ptr, sequences, k_covered, k_rows, kv_heads * DV, 0.0)
    if pid == 0:  # of tiles, one for each launch that follows
        tl.store(counter_ptr + tl.arange(0, 2), first_count)
    block = pid % blocks
    head = (first_head + pid // blocks) % heads
    batch = ((first_head + pid // blocks) // heads).to(tl.int64)
    line = (batch * heads + head) * rows
    lse_line = batch * stride_lb + head * stride_lh
    lse_grad_line = batch * stride_eb + head * stride_eh
    out_ptr += (batch * stride_ob + head * stride_oh) * 8
    grad_out_ptr += (batch * stride_gb + head * stride_gh) * 8
    if IS_PACKED:
        first, q_len = packed_rows(cu_q_ptr + batch, q_rows)
        line = head.to(tl.int64) * rows + padded_row(first, batch)
        lse_line += first
        lse_grad_line += first
        out_ptr += first * stride_om * 8
        grad_out_ptr += first * stride_gm * 8
    if block * BLOCK_M < (q_len + PAD - 1) // PAD * PAD:
        offs = block * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tl.arange(0, BLOCK_DV)
        lse = tl.load(lse_ptr + lse_line + offs, mask=offs < q_len, other=float("-inf")) * LOG2E
        has_keys = lse != float("-inf")  # the gradient of a row that sees nothing may be NaN, and is not read
        mask = has_keys[:, None] & (cols < DV)[None, :]
        out = tl.load(out_ptr + offs[:, None] * (stride_om * 8) + cols[None, :], mask=mask, other=0.0)
        grad = tl.load(grad_out_ptr + offs[:, None] * (stride_gm * 8) + cols[None, :], mask=mask, other=0.0)
        delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
        if HAS_LSE_GRAD:
            delta -= tl.load(grad_lse_ptr + lse_grad_line + offs, mask=has_keys, other=0.0)
        lse = tl.where(has_keys, lse, float("inf"))
        tl.store(rows_lse_ptr + line + offs, lse)
        tl.store(rows_delta_ptr + line + offs, delta)
        start = line + block * BLOCK_M - first_head.to(tl.int64) * rows  # in the scratch
        tl.store(scratch_ptr + start * BLOCK_D + tl.arange(0, BLOCK_M * BLOCK_D), 0.0)
        if block * BLOCK_M % CHUNK == 0:
            chunks: tl.constexpr = BLOCK_D // CHUNK
            tl.store(counts_ptr + start // CHUNK * chunks + tl.arange(0, chunks), 0)


def as_read(saved: Saved) -> tuple[Saved, tuple[bool, bool]]:
    """What a backward reads, and whether it reads copies of out and its gradient: where TMA cannot read them."""
    out, _, grad_out, _ = saved
    copies = not tma_compatible(out), not tma_compatible(grad_out)
    if copies[0]:
        saved = saved._replace(out=sample(out.shape, out.dtype))
    if copies[1]:
        saved = saved._replace(grad_out=sample(grad_out.shape, grad_out.dtype))
    return saved, copies


class BackwardCall(NamedTuple):
    """All calls whose tensors lie as these do: what they read and write besides their inputs is samples."""

    problem: Problem
    inputs: Inputs
    config: GluonBackwardConfig
    before: Prepass
    saved: Saved  # as kernels read them
    rows: Rows
    workspace: tuple[Any, ...]  # in which dQ grows, its counts, the counters of tiles; of a pack, lists of tiles
    grads: list[Any]  # dq, dk and dv
    shares: list[tuple[range, int]]  # KV heads of all batch entries that are computed together, by how many programs

    @classmethod
    def of(
        cls, problem: Problem, inputs: Inputs, config: GluonBackwardConfig, before: Prepass, saved: Saved
    ) -> BackwardCall:
        rows = Rows.samples(problem, inputs.query)
        lines = problem.batch * problem.kv_heads
        at_once, numbers = lines, rows.lse.numel() * tile_widths(problem)[0]
        if not problem.packed:
            of_line = numbers // lines
            at_once = min(lines, max(1, SCRATCH_BYTES // (4 * of_line)))
            numbers = at_once * of_line
        shares = []
        for first in range(0, lines, at_once):
            some = range(first, min(first + at_once, lines))
            shares.append((some, min(problem.num_sms, len(some) * cdiv(problem.k_len, 2 * KEYS))))
        grads = [sample(t.shape, problem.out_dtype) for t in inputs[:3]]
        counts = sample((numbers // CHUNK.value**2,), torch.int32)
        rows_of = inputs.query.shape[0], inputs.key.shape[0]
        lists = [words_of(most) for most in most_of_pack(problem.batch, config.block_m, *rows_of)]
        counters = sample((COUNTERS,), torch.int32)
        workspace = (
            *(sample((numbers,), torch.float32), counts, counters),
            *[sample((words if problem.packed else 0,), torch.int32) for words in lists],
        )
        return cls(problem, inputs, config, before, saved, rows, workspace, grads, shares)


COUNTERS = 2
"""Of tiles: one of each kernel part."""

_KEY_TILE = 2 * KEYS


def most_of_pack(batch: int, block_m: int, q_rows: int, k_rows: int) -> tuple[int, int]:
    """How many tiles of keys and blocks of queries a pack has at most."""
    return most_tiles(k_rows, batch, _KEY_TILE), most_tiles(q_rows, batch, block_m)


def rows_sizes(call: BackwardCall, lines: range, programs: int) -> tuple[int, Sizes]:
    """The grid and the arguments that depend on lengths."""
    problem, (query, key, *_), block_m, packed = call.problem, call.inputs, call.config.block_m, call.problem.packed
    out, lse, grad_out, grad_lse = call.saved
    blocks = cdiv(problem.q_len, PAD.value) * PAD.value // _block_m(problem)
    numbers = (
        *row_strides(out, packed, UNIT),
        *row_strides(grad_out, packed, UNIT),
        *line_strides(lse, packed),
        *line_strides(grad_lse, packed),
        *(problem.q_len, query.shape[-3], key.shape[-3]),
        *(cdiv(problem.q_len, block_m) * block_m, cdiv(problem.k_len, _KEY_TILE) * _KEY_TILE),
        *(call.rows.lse.shape[-1], blocks, -programs),
        *most_of_pack(problem.batch, block_m, query.shape[0], key.shape[0]),
        *(most_seen(problem, _KEY_TILE), min(problem.right, FAR)),
    )
    constants = {"HAS_RIGHT": problem.packed and problem.right != UNBOUNDED}
    return len(lines) * problem.group * blocks, Sizes(_SIZES, numbers, constants, {})


_SIZES = (
    "stride_ob stride_om stride_oh stride_gb stride_gm stride_gh stride_lb stride_lh stride_eb stride_eh "
    "q_len q_rows k_rows q_covered k_covered rows blocks first_count most_tiles most_blocks most_seen right"
)


def _block_m(problem: Problem) -> int:
    return max(16, 4096 // tile_widths(problem)[0])


def bind_rows(call: BackwardCall, lines: range, programs: int) -> Launch:
    """For some KV heads of all batch entries: fills rows, clears the scratch and its counts, and sets the counters of
    tiles for so many `programs`. Rows of a pack's gradients that no tile computes are cleared. A function of out,
    grad_out, lse, grad_lse, cu_seqlens_q, cu_seqlens_k and what it writes.

    `out` and `grad_out` are aligned.
    """
    problem, inputs, (out, lse, grad_out, grad_lse) = call.problem, call.inputs, call.saved
    block_d, block_dv = tile_widths(problem)
    written = call.grads if problem.packed else (None, None, None)
    read = out, grad_out, lse, grad_lse, inputs.cu_seqlens_q, inputs.cu_seqlens_k
    tensors = (*read, *call.rows, *call.workspace, *written)
    grid, sizes = rows_sizes(call, lines, programs)
    return _prepare.bind(
        grid,
        tensors,
        {"num_warps": 4},
        **dict(zip(_prepare.addresses, tensors, strict=True)),
        **sizes.arguments(),
        sequences=problem.batch,
        heads=problem.q_heads,
        kv_heads=problem.kv_heads,
        first_head=lines.start * problem.group,
        D=problem.head_dim,
        DV=problem.value_dim,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=_block_m(problem),
        IS_PACKED=problem.packed,
        HAS_LSE_GRAD=grad_lse is not None,
        KEY_TILE=_KEY_TILE,
        QUERY_BLOCK=call.config.block_m,
        ORDERED=problem.packed and problem.deterministic,
    )


_prepare = Kernel(_prepare_kernel)
