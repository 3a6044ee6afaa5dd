"""The backward for Hopper (sm_90), in Gluon: dQ, dK and dV from one pass over the tiles of scores, five products each.

    p_ij = 2^(s_ij - lse_i)        dp_ij = dO_i . v_j        ds_ij = p_ij (dp_ij - delta_i)
    dV_j = sum_i p_ij dO_i         dK_j = scale sum_i ds_ij q_i        dQ_i = scale sum_j ds_ij k_j

A program owns 128 keys of one KV head, 64 for each of two consumer warpgroups, and streams the queries that see them,
of every query head of the group. Its tiles are transposed, keys by queries, so that P and dS are first factors from
registers for dV and dK. Those stay in registers until the end: heads of a group add up there, without atomics.
dQ is the one sum that several programs share. It grows in an fp32 scratch in global memory, in chunks of 64 x 64.

- Producer (one warp): fills rings of Q with its LSE and of dO with its delta, by TMA.
- Consumers (two warpgroups): backward_block.py. The dQ of a block is computed in the iteration after it, because it
  takes the dS of both: so they may drift apart by almost an iteration.
- Reducers (one warp for each consumer): add the chunk of dQ that a consumer left in shared memory to the scratch, by
  TMA, and count it. With `deterministic` a chunk waits for its turn: key tiles add to it from the last to the first.
- Finisher (one warp): scales, converts and stores the chunks of dQ to which every key tile has added, while the others
  compute on. That saves a launch which reads the scratch back from memory.

Waiting for another program is safe without knowing how many run at a time: all tiles are fetched, those that are waited
for were fetched before, and consumers never wait for finishers.

At D 256 there are registers for one sum over queries alone: backward_wide.py has two passes. The first adds to dQ from
registers, and warps of the second finish it. Before everything, backward_rows.py makes delta.

Grid: one program per SM, or fewer. Reads Q, K, V and dO through 4-D descriptors [B, T, H, D] with their own strides,
LSE and delta through 1-D ones; writes dK and dV by TMA or from registers, and dQ out of the scratch.
Not here: mask and bias, gradients of slopes and sinks, strided positions, and `deterministic` beyond D 128. Triton's
backward has them (`why_not`). Parity with the reference:
tests/backends/hopper/test_backward_gpu.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...base.problem import UNBOUNDED, Backward, Gradients, Inputs, Problem, Wanted
from ...base.state import Saved
from ...gpu.arguments import FAR, cdiv, named
from ...gpu.launch import Kernel, Launch, Sizes
from ...gpu.prepass import Prepass
from ...gpu.rows import padded_rows_of_pack
from ...gpu.scratch import Scratch as ScratchMemory
from ...gpu.scratch import empty_like
from ...gpu.tile_list import words_of
from .backward_block import CHUNK, Part, Scratch, SharedStorage, Sum, consume, query_blocks
from .backward_query_grad import finisher, reducer
from .backward_rows import COUNTERS, BackwardCall, as_read, bind_rows, most_of_pack, rows_sizes
from .backward_wide import consume_for_key, consume_for_value
from .launch import (
    chunks_descriptor,
    elements_descriptor,
    even_group,
    jit,
    rows_descriptor,
    score_arguments,
)
from .parameters import ScoreMod, SeqlenInfo
from .pipeline import make_ring
from .scheduler import TileList, TileScheduler, fetch_next, make_channel, resolve
from .tiles import KEYS
from .tuning import BackwardPart, GluonBackwardConfig, has_edges, has_idle_queries, loads_masked_kv, tile_widths
from .versions import BACKWARD_OPTIONS, aggregate, tma_load


@aggregate
class Sources:
    """What the producer copies from: blocks of 64 or 128 queries, tiles of 128 keys."""

    query: tma.tensor_descriptor
    key: tma.tensor_descriptor
    value: tma.tensor_descriptor
    grad: tma.tensor_descriptor
    lse: tma.tensor_descriptor
    delta: tma.tensor_descriptor


@gluon.jit
def _load_keys(part, smem, sources, entry, row, head, tile_iter):
    """The keys and values of a tile, as soon as the gradients of the one before have left their memory."""
    mbarrier.wait(smem.kv_empty, (tile_iter & 1) ^ 1)
    if part.LOADS_V:
        mbarrier.expect(smem.kv_full, sources.key.block_type.nbytes + sources.value.block_type.nbytes)
        tma_load(sources.value, [entry, row, head, 0], smem.kv_full, smem.values.index(0))
    else:
        mbarrier.expect(smem.kv_full, sources.key.block_type.nbytes)
    tma_load(sources.key, [entry, row, head, 0], smem.kv_full, smem.keys.index(0))


@gluon.jit
def _tile_of_keys(part, seqlen, scheduler, scratch, tile, tiles):
    """The tile with a number, of so many. Causal: key tile 0 is seen by most queries, and comes first."""
    if seqlen.IS_PACKED:
        return scheduler.work_tile(seqlen, tile, tiles)
    else:
        batch_head, n = scheduler.place(tile)
        if not part.ORDERED:
            n = scheduler.tiles_m - 1 - n
        return seqlen.work_tile(n, scratch.first_batch_head + batch_head)


@gluon.jit
def _producer(part, seqlen, scheduler, counter, channel, smem, scratch, sources):
    BLOCK_M: gl.constexpr = sources.query.block_type.shape[1]
    OF_QUERIES: gl.constexpr = sources.query.block_type.nbytes + sources.lse.block_type.nbytes
    AHEAD: gl.constexpr = 1 if part.ORDERED else 2  # blocks before the end: who holds a tile keeps others waiting
    OF_GRADS: gl.constexpr = sources.grad.block_type.nbytes + sources.delta.block_type.nbytes
    queries = smem.queries
    grads = smem.grads
    q_iter = 0
    tile_iter = 0
    tile = resolve(fetch_next(counter))
    tiles = scheduler.count()
    while tile < tiles:
        work = _tile_of_keys(part, seqlen, scheduler, scratch, tile, tiles)
        first = work.index * (2 * KEYS)
        pending_tile = tile
        if first < work.k_len:  # as all are: without this branch ptxas spills 28 bytes more (D 128, causal)
            channel.send(tile_iter, work)
            entry = seqlen.entry(work)
            low, high = query_blocks(seqlen, work, BLOCK_M)
            for g in range(seqlen.group):
                head = work.head * seqlen.group + g
                at = scratch.first_row(seqlen, work, head)
                for i in range(low, high):
                    row = i * BLOCK_M
                    queries.wait_empty(q_iter)
                    landing = queries.expect(q_iter, OF_QUERIES)
                    slot = queries.place(q_iter)
                    place = queries.tiles.index(slot)
                    tma_load(sources.query, [entry, work.q_first + row, head, 0], landing, place)
                    tma_load(sources.lse, [at + row], landing, smem.lses.index(slot))
                    if (g == 0) & (i == low):  # behind the first queries, which need not wait for the tile before
                        _load_keys(part, smem, sources, entry, work.k_first + first, work.head, tile_iter)
                    if (g == seqlen.group - 1) & (i == gl.maximum(high - AHEAD, low)):
                        pending_tile = fetch_next(counter)
                    grads.wait_empty(q_iter)
                    landing = grads.expect(q_iter, OF_GRADS)
                    place = grads.tiles.index(slot)
                    tma_load(sources.grad, [entry, work.q_first + row, head, 0], landing, place)
                    tma_load(sources.delta, [at + row], landing, smem.deltas.index(slot))
                    q_iter += 1
            if low == high:  # nobody sees these keys
                _load_keys(part, smem, sources, entry, work.k_first + first, work.head, tile_iter)
                pending_tile = fetch_next(counter)
            tile_iter += 1
        else:
            pending_tile = fetch_next(counter)
        tile = resolve(pending_tile)
    channel.close(tile_iter)


@jit
def _backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse_desc, delta_desc, scratch_desc,
    dq_ptr, dk_ptr, dv_ptr, scratch_ptr, counts_ptr, counter_ptr, key_list_ptr, query_list_ptr, slopes_ptr,
    row_words_ptr, col_words_ptr, cu_q_ptr, cu_k_ptr,
    batch_heads: gl.int32, tiles_n: gl.int32, group_n: gl.int32, blocks_m: gl.int32,
    kv_heads: gl.int32, group: gl.int32, q_len: gl.int32, k_len: gl.int32, offset: gl.int32,
    left: gl.int32, right: gl.int32, q_rows: gl.int32, k_rows: gl.int32,
    rows: gl.int32, first_batch_head: gl.int32, skipped: gl.int32,
    stride_ab: gl.int64, stride_rb: gl.int64, stride_rh: gl.int64, stride_cb: gl.int64, stride_ch: gl.int64,
    dropout_threshold: gl.uint32, scale, softcap, dropout_scale,
    CONFIG: gl.constexpr, PART: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, ORDERED: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_ALIBI: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_DROPOUT: gl.constexpr, IS_PACKED: gl.constexpr, MASKS_BLOCKS: gl.constexpr,
    LOADS_MASKED_ROWS: gl.constexpr, SCALE_LATE: gl.constexpr, TANH: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = PART.slots
    PLACES: gl.constexpr = CONFIG.places
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_D: gl.constexpr = q_desc.block_type.shape[3]
    IS_ALL: gl.constexpr = PART.makes == "all"
    LOADS_V: gl.constexpr = PART.makes != "value"
    queries = make_ring(q_desc, SLOTS, 1, 2)
    grads = make_ring(do_desc, SLOTS, 1, 2)
    lses = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], delta_desc.layout)
    keys = gl.allocate_shared_memory(k_desc.dtype, [1] + k_desc.block_type.shape, k_desc.layout)
    values = keys
    d_scores = keys
    if LOADS_V:
        DS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        values = gl.allocate_shared_memory(v_desc.dtype, [1] + v_desc.block_type.shape, v_desc.layout)
        d_scores = gl.allocate_shared_memory(q_desc.dtype, [2 if IS_ALL else 1, 2 * KEYS, BLOCK_M], DS)
    staging = keys
    landing = keys
    if IS_ALL:
        staging = gl.allocate_shared_memory(gl.float32, [2, CHUNK, CHUNK], scratch_desc.layout)
        landing = gl.allocate_shared_memory(gl.float32, [PLACES * 2 * CHUNK // 8, 8, 32], scratch_desc.layout)
    elif not LOADS_V:
        landing = gl.allocate_shared_memory(gl.float32, [PLACES * 2 * CHUNK // 16, 16, 32], scratch_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(read, count=2)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for w in gl.static_range(PLACES):
        mbarrier.init(landed.index(w), count=1)
    channel = make_channel(4 if IS_ALL else 2)
    smem = SharedStorage(
        queries, grads, lses, deltas, keys, values, kv_full, kv_empty, d_scores, staging, landing, landed, read
    )
    part = Part(CONFIG, IS_ALL, LOADS_V, ORDERED)
    seqlen = SeqlenInfo(
        *(kv_heads, group, q_len, k_len, offset, left, right, cu_q_ptr, cu_k_ptr, q_rows, k_rows),
        *(HAS_LEFT, HAS_RIGHT, IS_PACKED, MASKS_BLOCKS, LOADS_MASKED_ROWS),
    )
    score_mod = ScoreMod(
        *(scale, softcap, slopes_ptr, stride_ab, row_words_ptr, stride_rb, stride_rh),
        *(col_words_ptr, stride_cb, stride_ch, dropout_threshold),
        *(HAS_SOFTCAP, HAS_ALIBI, HAS_DROPOUT, TANH, SCALE_LATE),
    )
    sources = Sources(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    scratch = Scratch(scratch_desc, scratch_ptr, counts_ptr, rows, first_batch_head, skipped)
    dk_sum = Sum(dk_desc, dk_ptr, kv_heads, D)
    dv_sum = Sum(dv_desc, dv_ptr, kv_heads, DV)
    if IS_PACKED:
        by_keys = TileList(key_list_ptr, kv_heads, group_n)
        by_queries = TileList(query_list_ptr, kv_heads, group_n)
    else:
        by_keys = TileScheduler(batch_heads, tiles_n, group_n, batch_heads * tiles_n)  # type: ignore[assignment]
        by_queries = TileScheduler(batch_heads, blocks_m, group_n, batch_heads * blocks_m)  # type: ignore[assignment]
    # A tuple bound to a variable would turn its constants into tensors, so the roles are spelt here.
    if IS_ALL:
        gl.warp_specialize(
            [
                (consume, (0, part, seqlen, score_mod, channel, smem, dk_sum, dv_sum, dropout_scale)),
                (consume, (1, part, seqlen, score_mod, channel, smem, dk_sum, dv_sum, dropout_scale)),
                (_producer, (part, seqlen, by_keys, counter_ptr, channel, smem, scratch, sources)),
                (reducer, (0, part, seqlen, channel, smem, scratch, BLOCK_M, BLOCK_D)),
                (reducer, (1, part, seqlen, channel, smem, scratch, BLOCK_M, BLOCK_D)),
                (finisher, (0, 1, part, seqlen, by_queries, smem, scratch, dq_ptr, scale, BLOCK_M, BLOCK_D, D)),
            ],
            [4, 1, 1, 1, 1],
            [PART.consumer_registers] + [PART.warp_registers] * 4,
        )
    elif LOADS_V:
        gl.warp_specialize(
            [
                (consume_for_key, (0, part, seqlen, score_mod, channel, smem, scratch, dk_sum, dropout_scale)),
                (consume_for_key, (1, part, seqlen, score_mod, channel, smem, scratch, dk_sum, dropout_scale)),
                (_producer, (part, seqlen, by_keys, counter_ptr, channel, smem, scratch, sources)),
            ],
            [4, 1],
            [PART.consumer_registers, PART.warp_registers],
        )
    else:
        gl.warp_specialize(
            [
                (consume_for_value, (0, part, seqlen, score_mod, channel, smem, dv_sum, dropout_scale)),
                (consume_for_value, (1, part, seqlen, score_mod, channel, smem, dv_sum, dropout_scale)),
                (_producer, (part, seqlen, by_keys, counter_ptr + 1, channel, smem, scratch, sources)),
                (finisher, (0, 2, part, seqlen, by_queries, smem, scratch, dq_ptr, scale, BLOCK_M, BLOCK_D, D)),
                (finisher, (1, 2, part, seqlen, by_queries, smem, scratch, dq_ptr, scale, BLOCK_M, BLOCK_D, D)),
            ],
            [4, 1, 1, 1],
            [PART.consumer_registers] + [PART.warp_registers] * 3,
        )


def prepare_backward(
    problem: Problem, inputs: Inputs, config: GluonBackwardConfig, saved: Saved, wanted: Wanted
) -> Backward:
    """The backward of calls whose tensors lie as these do, as a function of inputs, out, lse and their gradients: those
    gradients of queries, keys and values that are `wanted`."""
    assert not any(wanted[3:]), "why_not has said so"
    saved, copies = as_read(saved)
    call = BackwardCall.of(problem, inputs, config, Prepass.of(problem, inputs), saved)
    launches = [
        (bind_rows(call, *share), [_bind(call, part, *share) for part in config.parts]) for share in call.shares
    ]
    return _Backward(call, launches, wanted, copies)


class _Backward:
    def __init__(
        self, call: BackwardCall, launches: list[tuple[Launch, list[Launch]]], wanted: Wanted, copies: tuple[bool, bool]
    ) -> None:
        problem, before = call.problem, call.before
        is_any = problem.packed and not before.steps  # it may have any number of rows
        self._pack = _PackSizes(problem, call.config) if is_any else None
        self._before, self._launches, self._wanted = before, launches, wanted
        self._copies, self._grads = copies, call.grads
        self._scratch = ScratchMemory.of(*call.rows, *call.workspace)
        self._all = [launch for of_rows, parts in launches for launch in (of_rows, *parts)]

    def __call__(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        if self._copies[0]:  # contiguous() would leave one as it is that starts off 16 bytes
            out = out.clone(memory_format=torch.contiguous_format)
        if self._copies[1]:
            grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        query, cu_q, cu_k = inputs.query, inputs.cu_seqlens_q, inputs.cu_seqlens_k
        is_compiled = all([launch.is_compiled for launch in self._all])  # noqa: C419
        scratch, rows_sizes, sizes = self._scratch, None, None
        if self._pack is not None:
            needed, rows_sizes, sizes = self._pack(query.shape[0], inputs.key.shape[0])
            scratch = ScratchMemory.of_sizes(needed, scratch.dtypes)
            dq, dk, dv = [empty_like(t, query, grad) for t, grad in zip(inputs[:3], self._grads, strict=True)]
        else:
            dq, dk, dv = [grad.empty(query) for grad in self._grads]
        computed = self._before.run(inputs)
        memory, pieces = scratch.allocate(query, is_compiled)
        for of_rows, parts in self._launches:
            of_rows(out, grad_out, lse, grad_lse, cu_q, cu_k, *pieces, dq, dk, dv, sizes=rows_sizes)
            for launch in parts:
                launch(*inputs, *computed, grad_out, *pieces, dq, dk, dv, sizes=sizes)
        del memory  # all that reads it is queued
        wanted = self._wanted
        return Gradients(dq if wanted.query else None, dk if wanted.key else None, dv if wanted.value else None)

    def resized(self, problem: Problem, inputs: Inputs, config: GluonBackwardConfig, *saved: Any) -> Backward | None:
        """The same backward of tensors of other lengths; None where other kernels compute it."""
        if self._before.steps or len(self._launches) > 1:
            return None
        call = BackwardCall.of(problem, inputs, config, self._before, Saved(*saved))
        if len(call.shares) > 1:
            return None
        (share,), ((of_rows, parts),) = call.shares, self._launches
        resized_rows = of_rows.resized(*rows_sizes(call, *share))
        sizes = _sizes(call, share[0])
        resized = [launch.resized(share[1], sizes) for launch in parts]
        if resized_rows is None or None in resized:
            return None
        found = [(resized_rows, [launch for launch in resized if launch is not None])]
        return _Backward(call, found, self._wanted, (False, False))  # aligned, so not copied


_SIZES = (
    "batch_heads tiles_n group_n blocks_m q_len k_len offset left right q_rows k_rows rows first_batch_head skipped"
)


def _sizes(call: BackwardCall, batch_heads: range) -> Sizes:
    """The kernel's arguments that depend on lengths."""
    problem, (query, key, value, *_) = call.problem, call.inputs
    (_, q_len, *_), (_, k_len, *_), (left, right) = problem.shape, problem.kv, problem.window
    (_, dk, dv), is_partial = call.grads, problem.partial
    padded, count, first = call.rows.lse.shape[-1], call.rows.lse.numel(), batch_heads.start
    lines, length = (problem.kv_heads, query.shape[0]) if problem.packed else (len(batch_heads), q_len)
    numbers = (
        len(batch_heads),
        cdiv(k_len, 2 * KEYS.value),
        _heads_together(problem, lines)(length),
        cdiv(q_len, call.config.block_m),
        *(q_len, k_len, problem.positions.q_start - problem.positions.k_start, min(left, FAR), min(right, FAR)),
        *(query.shape[-3], key.shape[-3], padded, first, first * problem.group * padded),
    )
    constants = {
        "HAS_LEFT": left != UNBOUNDED,
        "HAS_RIGHT": right != UNBOUNDED,
        "MASKS_BLOCKS": has_edges(problem),
        "LOADS_MASKED_ROWS": problem.packed or loads_masked_kv(problem) or has_idle_queries(problem),
    }
    described = {
        "q_desc": query,
        "k_desc": key,
        "v_desc": value,
        "do_desc": call.saved.grad_out,
        "dk_desc": key if is_partial else dk,  # fp32 is written without
        "dv_desc": value if is_partial else dv,
        "lse_desc": count,
        "delta_desc": count,
        "scratch_desc": call.workspace[0].numel() // CHUNK.value,
    }
    return Sizes(_SIZES, numbers, constants, described)


class _PackSizes:
    """What depends on how many rows a pack has."""

    def __init__(self, problem: Problem, config: GluonBackwardConfig) -> None:
        self._batch, self._heads, self._block_m = problem.batch, problem.q_heads, config.block_m
        self._width = tile_widths(problem)[0]
        self._together = _heads_together(problem, problem.kv_heads)

    def __call__(self, q_rows: int, k_rows: int) -> tuple[tuple[int, ...], Sizes, Sizes]:
        """Bytes of scratch memory, sizes of the launch by rows, and of the others."""
        padded = padded_rows_of_pack(q_rows, self._batch)
        count = self._heads * padded
        numbers = count * self._width
        tiles, blocks = most_of_pack(self._batch, self._block_m, q_rows, k_rows)
        lists = 4 * words_of(tiles), 4 * words_of(blocks)
        pieces = 4 * count, 4 * count, 4 * numbers, 4 * numbers // _CHUNK_SIZE, 4 * COUNTERS, *lists
        described = {"q_desc": q_rows, "k_desc": k_rows, "v_desc": k_rows, "do_desc": q_rows, "dk_desc": k_rows}
        described |= {"dv_desc": k_rows, "lse_desc": count, "delta_desc": count, "scratch_desc": numbers // _CHUNK}
        of_rows = q_rows, q_rows, q_rows, k_rows, padded, tiles, blocks
        rows_sizes = Sizes("stride_lh stride_eh q_rows k_rows rows most_tiles most_blocks", of_rows, {}, {})
        of_pack = q_rows, k_rows, padded, self._together(q_rows)
        return pieces, rows_sizes, Sizes("q_rows k_rows rows group_n", of_pack, {}, described)


_CHUNK: int = CHUNK.value
_CHUNK_SIZE = _CHUNK**2


def _bind(call: BackwardCall, part: BackwardPart, batch_heads: range, programs: int) -> Launch:
    """The kernel as a function of inputs, of what is computed before, of grad_out, the pieces of scratch memory, dq, dk
    and dv. Where there is no tensor, the counter stands in for it, unread."""
    problem, inputs, config, before = call[:4]
    scratch, _, counter, *_ = call.workspace
    sizes = _sizes(call, batch_heads)
    dim, value_dim = tile_widths(problem)
    boxes = {
        "q_desc": (config.block_m, dim),
        "k_desc": (2 * KEYS.value, dim),
        "v_desc": (2 * KEYS.value, value_dim),
        "do_desc": (config.block_m, value_dim),
        "dk_desc": (KEYS.value, dim),
        "dv_desc": (KEYS.value, value_dim),
    }
    described = {name: sizes.described[name] for name in boxes}
    descriptors = {name: rows_descriptor(described[name], *box) for name, box in boxes.items()}
    described |= {"lse_desc": call.rows.lse, "delta_desc": call.rows.delta, "scratch_desc": scratch}
    for name in ("lse_desc", "delta_desc"):
        descriptors[name] = elements_descriptor(sizes.described[name], config.block_m)
    descriptors["scratch_desc"] = chunks_descriptor(sizes.described["scratch_desc"], CHUNK.value)
    return _kernel.bind(
        programs,
        (*inputs, *before.samples, call.saved.grad_out, *call.rows, *call.workspace, *call.grads),
        {"num_warps": 4},
        described=described,
        **sizes.arguments() | descriptors,
        **named("dq_ptr dk_ptr dv_ptr", call.grads),
        **named("scratch_ptr counts_ptr counter_ptr key_list_ptr query_list_ptr", call.workspace),
        kv_heads=problem.kv_heads,
        CONFIG=config,
        PART=part,
        D=problem.head_dim,
        DV=problem.value_dim,
        ORDERED=problem.deterministic,
        **score_arguments(problem, inputs, before, counter),
    )


def _heads_together(problem: Problem, lines: int) -> Callable[[int], int]:
    """How many KV heads (of all batch entries) are worked on together, of `lines` in all, in groups of about the same
    size, given how many queries they have."""
    if problem.right == UNBOUNDED:
        # In one order, key tiles of a head that run at the same time wait for each other: fewer of them do.
        tiles_n = cdiv(problem.k_len, 2 * KEYS.value)
        together = (256 if problem.head_dim <= 64 else 128) // tiles_n if problem.deterministic else 1
        return lambda q_len: min(max(together, 1), lines)
    wide = max(problem.head_dim, problem.value_dim) > 128
    cached = (16 if problem.q_len > 1024 else 8) << (21 if wide else 20)  # the best of 8, 16 and 32 MB
    of_query = (problem.head_dim + problem.value_dim) * problem.dtype.itemsize * problem.group
    return lambda q_len: even_group(lines, max(1, cached // max(1, q_len * of_query)))


_kernel = Kernel(_backward_kernel, **BACKWARD_OPTIONS)
