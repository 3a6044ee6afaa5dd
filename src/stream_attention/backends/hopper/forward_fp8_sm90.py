"""The streaming forward in FP8 for Hopper (sm_90), in Gluon: products of e4m3 values, at twice the rate.

What is computed is backends/reference/fp8.py; how quantised values lie in memory, base/fp8_layout.py. Roles, rings,
overlap and the order of tiles are those of forward_sm90.py, which explains them. Different here:

- Scales. A block of keys has a scale. Scores of a block are multiplied with it, the query's and the softmax's in the
  instruction that subtracts the row max. The accumulator is in units of the scale of the values that were added last,
  so a new block costs one multiplication of the factor by which it is rescaled anyway.
- Conditional rescale. p is 2**(score - row_max + SHIFT), scores in log2 units. The row max is a stabiliser: it need not
  be the maximum, it keeps p within what e4m3 can represent. It is an integer, so rescaling by it rounds nothing. At D
  64 and 128 it is that of the blocks before, and a block's own maximum is not computed. The sums of 16 values of p,
  which are computed anyway, show where it was too low; then each row of the warp raises it by the exponent of its
  largest sum and divides p by the same power of two. Maxima are computed for a first block, and until all rows have
  seen a key. Where p overflows even fp32, 2**120 above the row max or 2**116 for 16 of them, the sum is infinite, and
  the whole tile is computed again, with maxima.
- Two levels. The FP8 matrix units keep about 14 bits of a sum. So the product P V of a block begins at zero, and is
  added to o in fp32, by the instruction that rescales o.
- P as an operand. A lane has pairs of columns of S in its registers, and needs runs of four of P. The order of columns
  in a sum does not matter, so the lane takes what it has, and V lies in that order (`ORDER`). From one iteration to the
  next P is carried in words of four values: the compiler would take a tile of bytes apart and put it together again.

Masked keys need no care beyond their scores: values that do not exist, or that no query sees, are stored as 0.
Grid: one program per SM, or fewer. Reads quantised Q, K and V through 3-D descriptors, and their scales; writes O by
TMA, or from registers at the ends of packed sequences, and the LSE. Parity with the reference:
tests/backends/hopper/test_forward_fp8_gpu.py.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...base.problem import Problem, distinct
from ...gpu.arguments import named, sample
from ...gpu.fp8_call import Fp8Call, Fp8Kernel
from ...gpu.launch import Descriptor, Kernel, Launch, Sizes
from ...gpu.scratch import Sample
from .forward_fp8_consumer import RECOMPUTE, Fp8Scales, bit, consume, declare_vote, first_row, overflowed_tiles
from .launch import forward_sizes, jit, rows_descriptor, shared_layout
from .parameters import Epilogue, SeqlenInfo
from .pipeline import make_pipelines
from .scheduler import TileScheduler, fetch_next, make_channel, of_lane_0, resolve
from .tiles import LOG2E, ROWS
from .versions import COMPILE_OPTIONS, tma_load


@gluon.jit
def _load(ring, desc, kv_iter, head, row, column):
    """Fill a slot, as soon as it is empty."""
    ring.wait_empty(kv_iter)
    barrier = ring.expect(kv_iter, desc.block_type.nbytes)
    tma_load(desc, [head, row, column], barrier, ring.tiles.index(ring.place(kv_iter)))


@gluon.jit
def _producer(seqlen, fp8, scheduler, counter, channel, pipelines, q_desc, k_desc, v_desc):
    """Copy tile after tile, in the order in which consumers let go of slots: K0 Q K1 V0 K2 V1 ..."""
    CONFIG: gl.constexpr = pipelines.CONFIG
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    TILE_ROWS: gl.constexpr = WARPGROUPS * ROWS
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    AHEAD: gl.constexpr = 2  # blocks before the end at which the next tile is fetched
    queries = pipelines.queries
    keys = pipelines.keys
    values = pipelines.values
    kv_iter = 0
    tile_iter = 0
    tile = gl.program_id(0)
    zero = tile * 0
    word = counter + (1 + tile)
    gl.static_assert(queries.SLOTS <= 2, "three tiles on their way have a name and a bit each, four have not")
    # Each is computed for itself: names that are bound to one tensor before a loop are one variable in it.
    recompute = tile * 0  # or RECOMPUTE
    looked_at = tile * 0  # tiles of which it is known whether they overflowed
    next_tile = tile * 1  # what was fetched
    last = tile * 1  # the tiles that were loaded last
    second_last = tile * 1
    third_last = tile * 1
    while tile < scheduler.tiles:
        batch_head, m = scheduler.place(tile)
        work = seqlen.work_tile(m, batch_head)
        first = m * TILE_ROWS
        pending_tile = tile
        overflowed = zero
        if first < work.q_len:
            channel.send(tile_iter, work, recompute)
            kv_head = work.head // seqlen.group
            low, high = seqlen.blocks(first, first + (TILE_ROWS - 1), work.k_len, seqlen.offset_of(work), BLOCK_N)
            blocks = high - low
            begin = first_row(seqlen, work.batch, work.k_first, work.k_len)
            row = begin + (high - 1) * BLOCK_N  # of the last block
            _load(keys, k_desc, kv_iter, kv_head, row, 0)
            queries.wait_empty(tile_iter)  # so all tiles before this one but `SLOTS` - 1 are done
            if CONFIG.conditional_rescale:
                overflowed = overflowed_tiles(word)
            landing = queries.expect(tile_iter, WARPGROUPS * q_desc.block_type.nbytes)
            place = queries.place(tile_iter)
            q_row = first_row(seqlen, work.batch, work.q_first, work.q_len) + first
            for w in gl.static_range(WARPGROUPS):
                tma_load(q_desc, [work.head, q_row + w * ROWS, 0], landing, queries.tiles.index(place + w))
            near_end = gl.maximum(blocks - AHEAD, 1)
            for j in range(1, near_end):
                _load(keys, k_desc, kv_iter + j, kv_head, row - j * BLOCK_N, 0)
                _load(values, v_desc, kv_iter + j - 1, kv_head, 0, row - (j - 1) * BLOCK_N)
            if recompute == 0:
                pending_tile = fetch_next(counter)
            for j in range(near_end, blocks):
                _load(keys, k_desc, kv_iter + j, kv_head, row - j * BLOCK_N, 0)
                _load(values, v_desc, kv_iter + j - 1, kv_head, 0, row - (j - 1) * BLOCK_N)
            _load(values, v_desc, kv_iter + blocks - 1, kv_head, 0, begin + low * BLOCK_N)
            kv_iter += blocks
            tile_iter += 1
            third_last = second_last
            second_last = last
            last = tile
            overflowed = of_lane_0(overflowed)
        else:  # a sequence of the pack that is shorter
            pending_tile = fetch_next(counter)
        if recompute == 0:
            next_tile = resolve(pending_tile)
        tile = next_tile
        recompute = zero
        if CONFIG.conditional_rescale:
            done = tile_iter - queries.SLOTS
            if tile >= scheduler.tiles:  # nothing else is left to do: wait for all of them
                queries.wait_empty(tile_iter - 1 + queries.SLOTS)
                overflowed = of_lane_0(overflowed_tiles(word))
                done = tile_iter
            for _ in gl.static_range(queries.SLOTS + 1):
                if (looked_at < done) & (recompute == 0):
                    if (overflowed & bit(looked_at)) != 0:
                        gl.atomic_add(word, 16 - bit(looked_at), sem="relaxed")
                        older = gl.where(looked_at == tile_iter - 2, second_last, third_last)
                        tile = gl.where(looked_at == tile_iter - 1, last, older)
                        recompute = zero + RECOMPUTE
                    looked_at += 1
    channel.close(tile_iter)


@jit
def _forward_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, out_ptr, lse_ptr, query_scales_ptr, scales_ptr, cu_q_ptr, cu_k_ptr, count_ptr,
    batch_heads: gl.int32, tiles_m: gl.int32, head_group: gl.int32, tiles: gl.int32,
    q_heads: gl.int32, group: gl.int32, q_len: gl.int32, k_len: gl.int32, offset: gl.int32,
    left: gl.int32, right: gl.int32, q_rows: gl.int32, k_rows: gl.int32,
    query_scales_of_head: gl.int32, blocks_of_head: gl.int32,
    stride_ob: gl.int64, stride_om: gl.int64, stride_oh: gl.int64, stride_lb: gl.int64, stride_lh: gl.int64, scale,
    CONFIG: gl.constexpr, D: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, IS_PACKED: gl.constexpr,
    MASKS_BEYOND_FIRST_BLOCK: gl.constexpr,
):  # fmt: skip
    WARPGROUPS: gl.constexpr = CONFIG.warpgroups
    TILES: gl.constexpr = WARPGROUPS * CONFIG.parts
    pipelines = make_pipelines(CONFIG, q_desc, k_desc, v_desc)
    staging = gl.allocate_shared_memory(o_desc.dtype, [TILES] + o_desc.block_type.shape, o_desc.layout)
    channel = make_channel(WARPGROUPS)
    gl.static_assert(
        CONFIG.two_level or not CONFIG.conditional_rescale, "sums in the matrix units are rescaled before P is known"
    )
    if CONFIG.conditional_rescale:
        declare_vote()
    scheduler = TileScheduler(batch_heads, tiles_m, head_group, tiles)
    seqlen = SeqlenInfo(
        q_heads, group, q_len, k_len, offset, left, right, cu_q_ptr, cu_k_ptr, q_rows, k_rows,
        HAS_LEFT, HAS_RIGHT, IS_PACKED, MASKS_BEYOND_FIRST_BLOCK, False,
    )  # fmt: skip
    fp8 = Fp8Scales(query_scales_ptr, query_scales_of_head, scales_ptr, blocks_of_head, scale * LOG2E)
    epilogue = Epilogue(
        o_desc, out_ptr, stride_ob, stride_om, stride_oh, lse_ptr, stride_lb, stride_lh, batch_heads, lse_ptr, scale,
        D, False, 0,
    )  # fmt: skip
    # A tuple bound to a variable would turn its constants into tensors, so the roles are spelt here.
    gl.warp_specialize(
        [(consume, (w, seqlen, fp8, epilogue, channel, count_ptr, pipelines, staging)) for w in (0, 1, 2)[:WARPGROUPS]]
        + [(_producer, (seqlen, fp8, scheduler, count_ptr, channel, pipelines, q_desc, k_desc, v_desc))],
        [4] * (WARPGROUPS - 1) + [1],
        [CONFIG.consumer_registers] * (WARPGROUPS - 1) + [CONFIG.producer_registers],
    )


def bind_fp8(call: Fp8Call) -> Launch:
    """The kernel as a function of quantised queries, keys and values, scales of queries and keys, cu_seqlens, out, lse
    and the counter of tiles. Where there is no tensor, the LSE stands in for it, unread."""
    problem, queries, keys, ends, config, (out, lse, _), counter, device = call
    (grid, sizes), dim, offsets = _sizes(call), problem.head_dim, distinct(*ends)
    scales = sample(keys.scales.shape[:2], torch.int64)  # of a block's keys and of its values, as one word
    pointers = out, lse, queries.scales, scales, *offsets, counter
    return _kernel.bind(
        grid,
        (queries.query, keys.key, keys.value, queries.scales, scales, *offsets, out, lse, counter),
        {"num_warps": 4},
        device,
        described=sizes.described,
        **sizes.arguments()
        | {
            "q_desc": _codes_descriptor(queries.query, ROWS.value, dim),
            "k_desc": _codes_descriptor(keys.key, config.block_n, dim),
            "v_desc": _codes_descriptor(keys.value, dim, config.block_n),
            "o_desc": rows_descriptor(out, ROWS.value, dim // config.parts),
        },
        **named(_POINTERS, [lse if tensor is None else tensor for tensor in pointers]),
        q_heads=problem.q_heads,
        group=problem.group,
        scale=problem.scale,
        CONFIG=config,
        D=dim,
        IS_PACKED=problem.packed,
    )


def _sizes(call: Fp8Call) -> tuple[int, Sizes]:
    """The grid and the arguments that depend on lengths."""
    problem, queries, keys, _, config, outputs, *_ = call
    described = {"q_desc": queries.query, "k_desc": keys.key, "v_desc": keys.value, "o_desc": outputs.out}
    rows, strides = (queries.rows, keys.rows), outputs.strides(problem.packed)
    scales = queries.scales.shape[1], keys.scales.shape[1]
    names = "query_scales_of_head blocks_of_head"
    return forward_sizes(problem, config, rows, 32 << 20, strides, described, names, scales)


def _codes_descriptor(t: Any, rows: int, columns: int) -> Descriptor:
    """How TMA reads tiles of quantised values of one head."""
    return Descriptor(t.dtype, tuple(t.shape), t.stride(), (1, rows, columns), shared_layout(min(128, columns), 8, 3))


def _counter(problem: Problem) -> Sample:
    """From which the launch fetches its tiles, and a word for each of its programs."""
    return Sample((1 + problem.num_sms,), torch.int32)


_POINTERS = "out_ptr lse_ptr query_scales_ptr scales_ptr cu_q_ptr cu_k_ptr count_ptr"
_kernel = Kernel(_forward_fp8_kernel, **COMPILE_OPTIONS)
fp8_kernel = Fp8Kernel(bind_fp8, _sizes, _counter)
prepare_fp8 = fp8_kernel.prepare
