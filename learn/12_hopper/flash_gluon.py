"""The forward of step 06 once more, in Gluon for Hopper: who copies, who multiplies and who waits is written down.

One head: q, k, v and out are [T, 64] in bf16, T a multiple of 64, nothing hidden. Grid: one program per 64 queries.

A program has two roles, which run side by side:

- `producer`, one warp: asks the TMA unit for tile after tile of K and V, into a ring of slots in shared memory.
- `consumer`, four warps (a warpgroup): multiplies by wgmma, takes the softmax, says when a slot is free again.

They meet at two mbarriers per slot. `full` turns when the announced bytes have landed, `empty` when the consumer is
done with them.

For any length, head dim and modifier: src/stream_attention/backends/hopper/forward_sm90.py.
"""

# No `from __future__ import annotations`: Gluon reads the annotations of constexprs.

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stream_attention.backends.hopper.versions import tma_load

ROWS = gl.constexpr(64)  # queries of a program: what a warpgroup multiplies at once
KEYS = gl.constexpr(64)  # of a tile
DIM = gl.constexpr(64)
SLOTS = gl.constexpr(3)  # tiles of K and V that are here or under way
LOG2E = gl.constexpr(1.4426950408889634)

ORDERS = {
    "in order": "every product is waited for before anything else is done",
    "overlap": "P V of a tile is issued with Q K of the next, and waited for after the exponentials",
    "pinned": "the same, and the wait for the next tile stands before that wait",
}


@gluon.jit
def producer(q_desc, k_desc, v_desc, q_tile, k_tiles, v_tiles, q_full, full, empty, blocks):
    """Copy Q, then every tile of K and V, as soon as its slot is empty."""
    mbarrier.expect(q_full, q_desc.block_type.nbytes)
    tma_load(q_desc, [gl.program_id(0) * ROWS, 0], q_full, q_tile)
    for use in range(blocks):
        slot = use % SLOTS
        mbarrier.wait(empty.index(slot), ((use // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [use * KEYS, 0], full.index(slot), k_tiles.index(slot))
        tma_load(v_desc, [use * KEYS, 0], full.index(slot), v_tiles.index(slot))


@gluon.jit
def consumer(out_ptr, scale, q_tile, k_tiles, v_tiles, q_full, full, empty, blocks, ORDER: gl.constexpr):
    """The online softmax. ORDER says what runs beside what, see `ORDERS`."""
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])  # how wgmma lays out its result
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)  # how it reads a factor from registers: the same way
    no_scores = gl.zeros((ROWS, KEYS), gl.float32, TILE)
    acc = gl.zeros((ROWS, DIM), gl.float32, TILE)
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, TILE))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, TILE))
    p = gl.convert_layout(no_scores.to(gl.bfloat16), WEIGHTS, assert_trivial=True)
    factor = scale * LOG2E

    mbarrier.wait(q_full, 0)
    if ORDER == "pinned":
        mbarrier.wait(full.index(0), 0)
    for use in range(blocks):
        slot = use % SLOTS
        before = gl.maximum(use - 1, 0)
        if ORDER != "pinned":
            mbarrier.wait(full.index(slot), (use // SLOTS) & 1)
        scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if ORDER == "in order":
            scores = warpgroup_mma_wait(0, deps=(scores,))
        else:  # P V of the tile before, whose slot is not released yet; in the first round P is 0
            acc = warpgroup_mma(p, v_tiles.index(before % SLOTS), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))  # all but one product are done
        new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
        weights = gl.exp2(scores * factor - new_max[:, None])
        rescale = gl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + gl.sum(weights, 1)
        row_max = new_max
        if ORDER == "pinned":  # a loop that waits: the assembler moves nothing across it
            mbarrier.wait(full.index((use + 1) % SLOTS), ((use + 1) // SLOTS) & 1, pred=use + 1 < blocks)
        if ORDER != "in order":
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(before % SLOTS), count=1, pred=use > 0)
        acc = acc * rescale[:, None]
        p = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS, assert_trivial=True)
        if ORDER == "in order":
            acc = warpgroup_mma(p, v_tiles.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(slot), count=1)
    if ORDER != "in order":
        acc = warpgroup_mma(p, v_tiles.index((blocks - 1) % SLOTS), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))

    offs_m = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    offs_d = gl.arange(0, DIM, gl.SliceLayout(0, TILE))
    gl.store(out_ptr + offs_m[:, None] * DIM + offs_d[None, :], (acc / row_sum[:, None]).to(gl.bfloat16))


@gluon.jit
def flash_kernel(q_desc, k_desc, v_desc, out_ptr, scale, blocks, ORDER: gl.constexpr):
    q_tile = gl.allocate_shared_memory(gl.bfloat16, q_desc.block_type.shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS] + k_desc.block_type.shape, k_desc.layout)  # noqa: RUF005
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [SLOTS] + v_desc.block_type.shape, v_desc.layout)  # noqa: RUF005
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    gl.warp_specialize(
        [
            (consumer, (out_ptr, scale, q_tile, k_tiles, v_tiles, q_full, full, empty, blocks, ORDER)),
            (producer, (q_desc, k_desc, v_desc, q_tile, k_tiles, v_tiles, q_full, full, empty, blocks)),
        ],
        [1],  # warps of the producer; the consumer has num_warps
        [24],  # registers of a thread of the producer; the rest goes to the consumer
    )


def launch(query: Tensor, key: Tensor, value: Tensor, out: Tensor, order: str) -> None:
    """Start the kernel; while compiling for a GPU that is not there, CPU tensors stand for pointers."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_desc = TensorDescriptor.from_tensor(query, [ROWS.value, DIM.value], layout)
    k_desc, v_desc = (TensorDescriptor.from_tensor(x, [KEYS.value, DIM.value], layout) for x in (key, value))
    grid = (query.shape[0] // ROWS.value,)
    blocks = key.shape[0] // KEYS.value
    flash_kernel[grid](q_desc, k_desc, v_desc, out, DIM.value**-0.5, blocks, order, num_warps=4, maxnreg=128)


def attention(query: Tensor, key: Tensor, value: Tensor, order: str = "pinned") -> Tensor:
    """softmax(q k^T / 8) v on a Hopper GPU."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype is not torch.bfloat16 or x.shape[1:] != (64,) or not x.shape[0] or x.shape[0] % 64:
            raise ValueError(f"{name}: expected bf16 [T, 64], T a multiple of 64; got {x.dtype} {tuple(x.shape)}")
    out = torch.empty_like(query)
    launch(query.contiguous(), key.contiguous(), value.contiguous(), out, order)
    return out
