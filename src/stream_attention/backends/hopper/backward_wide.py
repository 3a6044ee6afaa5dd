"""What the consumers of backward_sm90.py do at D 256, in two launches: registers hold one sum over queries at a time.

The scores are computed in both, six products in place of five. dQ goes from registers into the scratch: its chunks are
not in rows there but in the order of registers, sixteen bytes a lane. When it is complete, a warp of the second launch
finishes it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .backward_block import BOTH, CHUNK, HALF_READY, make_tile, opaque_zero, queries_with_keys, query_blocks
from .pipeline import arrive, sync
from .tiles import KEYS, accumulator, clear_rows, issue, run_asm


@gluon.jit
def _add_chunk(dq, ptr):
    """Add a chunk of sums to consecutive numbers, in the order of registers."""
    C: gl.constexpr = dq.shape[1]
    folded = dq.reshape([4, 2, 8, C // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([C * 16, 2, 2])
    a, b = gl.split(folded)
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    place = (ptr + gl.arange(0, C * 16, a0.type.layout) * 4).to(gl.int64)
    asm: gl.constexpr = "red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;"
    run_asm(asm, "=r,l,f,f,f,f", [place, a0, b0, a1, b1])


@gluon.jit
def _meet(WARPGROUP: gl.constexpr, place: gl.constexpr):
    """Wait for the other consumer. There are two places, so that nobody comes to one again before both have left it."""
    arrive(HALF_READY + 2 * WARPGROUP + place, BOTH)
    sync(HALF_READY + 2 * (1 - WARPGROUP) + place, BOTH)


@gluon.jit
def consume_for_key(WARPGROUP: gl.constexpr, part, seqlen, score_mod, channel, smem, scratch, dk_sum, dropout_scale):
    """dK and dQ."""
    queries = smem.queries
    grads = smem.grads
    BLOCK_M: gl.constexpr = queries.tiles.shape[2]
    D: gl.constexpr = queries.tiles.shape[4]
    S_TILE: gl.constexpr = accumulator(BLOCK_M)
    P_TILE: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    factor = score_mod.factor()
    q_iter = 0
    tile_iter = 0
    work = channel.receive(0)
    while work.is_valid():
        # Prologue.
        own = work.index * (2 * KEYS) + WARPGROUP * KEYS
        low, high = query_blocks(seqlen, work, BLOCK_M)
        dk = gl.zeros((KEYS, D), gl.float32, accumulator(D))
        smem.wait_keys(part, seqlen, work, tile_iter)

        # Main loop.
        for g in range(seqlen.group):
            head = work.head * seqlen.group + g
            tile = make_tile(seqlen, score_mod, work, own, head)
            at = scratch.first_row(seqlen, work, head)
            for i in range(low, high):
                row = i * BLOCK_M
                z = opaque_zero()
                q = queries.matrix(z)
                do = grads.matrix(z)
                k = smem.keys.index(z).reshape([2 * KEYS, D])
                own_k = k.slice(WARPGROUP * KEYS, KEYS, dim=0)
                own_v = smem.values.index(z).reshape([2 * KEYS, D]).slice(WARPGROUP * KEYS, KEYS, dim=0)
                d_scores = smem.d_scores.index(z)
                smem.wait_queries(part, seqlen, tile, q, do, q_iter, row)
                s_issued = issue(own_k, q.permute((1, 0)))
                grads.wait_full(q_iter)
                dp_issued = issue(own_v, do.permute((1, 0)))
                s = warpgroup_mma_wait(1, deps=(s_issued,))
                if seqlen.MASKS_BLOCKS:
                    s = tile.mask_qk(seqlen, score_mod, s, row)
                lse = smem.lses.index(0).load(gl.SliceLayout(0, S_TILE))
                p = tile.probabilities(seqlen.MASKS_BLOCKS, seqlen, score_mod, s, lse, row, factor)
                grads.wait_full(q_iter)  # once more: the assembler does not move the next wait before this one
                dp = warpgroup_mma_wait(0, deps=(dp_issued,))
                delta = smem.deltas.index(0).load(gl.SliceLayout(0, S_TILE))
                grads.release(q_iter)
                _, dp = tile.drop(score_mod, p, dp, row, dropout_scale)
                ds = tile.grad_scores(score_mod, p, dp, lse, delta, row).to(queries.tiles.dtype)
                d_own = gl.convert_layout(ds, P_TILE, assert_trivial=True)
                _meet(WARPGROUP, 0)  # both have read dS of the block before
                d_scores.slice(WARPGROUP * KEYS, KEYS, dim=0).store(ds)
                fence_async_shared()
                _meet(WARPGROUP, 1)  # both have written it
                dk_issued = warpgroup_mma(d_own, q, dk, use_acc=True, is_async=True)
                left = k.slice(2 * WARPGROUP * CHUNK, CHUNK, dim=1)
                dq_issued = issue(d_scores.permute((1, 0)), left)
                dk = warpgroup_mma_wait(1, deps=(dk_issued,))
                queries.release(q_iter)
                dq = warpgroup_mma_wait(0, deps=(dq_issued,))
                to = scratch.ptr + (at + row - scratch.skipped).to(gl.int64) * D
                right = k.slice((2 * WARPGROUP + 1) * CHUNK, CHUNK, dim=1)
                dq_issued = issue(d_scores.permute((1, 0)), right)
                _add_chunk(dq, to + 2 * WARPGROUP * CHUNK * CHUNK)
                dq = warpgroup_mma_wait(0, deps=(dq_issued,))
                _add_chunk(dq, to + (2 * WARPGROUP + 1) * CHUNK * CHUNK)
                q_iter += 1

        # Epilogue.
        next_work = channel.receive(tile_iter + 1)
        smem.wait_both_read(tile_iter)
        dk_sum.store(WARPGROUP, dk * score_mod.scale, smem.keys, seqlen, work, own)
        smem.release_keys()
        tile_iter += 1
        work = next_work


@gluon.jit
def _dropped_p(part, seqlen, score_mod, tile, s, lse, row, factor, dropout_scale):
    """P of a block, as it meets dO."""
    if seqlen.MASKS_BLOCKS:
        s = tile.mask_qk(seqlen, score_mod, s, row)
    p = tile.probabilities(seqlen.MASKS_BLOCKS, seqlen, score_mod, s, lse, row, factor)
    if score_mod.HAS_DROPOUT:
        p = gl.where(tile.keep(score_mod, p, row), p * dropout_scale, 0.0)
    return p


@gluon.jit
def consume_for_value(WARPGROUP: gl.constexpr, part, seqlen, score_mod, channel, smem, dv_sum, dropout_scale):
    """dV, in the manner of the forward: the scores of a block are computed beside P dO of the one before."""
    queries = smem.queries
    grads = smem.grads
    BLOCK_M: gl.constexpr = queries.tiles.shape[2]
    D: gl.constexpr = queries.tiles.shape[4]
    dtype: gl.constexpr = queries.tiles.dtype
    S_TILE: gl.constexpr = accumulator(BLOCK_M)
    P_TILE: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    factor = score_mod.factor()
    q_iter = 0
    tile_iter = 0
    work = channel.receive(0)
    while work.is_valid():
        own = work.index * (2 * KEYS) + WARPGROUP * KEYS
        low, high = query_blocks(seqlen, work, BLOCK_M)
        blocks = seqlen.group * (high - low)
        floor, limit = queries_with_keys(seqlen, work.q_len, work.k_len, seqlen.offset_of(work))
        dv = gl.zeros((KEYS, D), gl.float32, accumulator(D))
        smem.wait_keys(part, seqlen, work, tile_iter)
        if blocks > 0:
            # Prologue: the first block.
            i = low
            head = work.head * seqlen.group
            tile = make_tile(seqlen, score_mod, work, own, head)
            queries.wait_full(q_iter)
            q = queries.tile(q_iter)
            if seqlen.LOADS_MASKED_ROWS:
                clear_rows(q, low * BLOCK_M, floor, limit)
            own_k = smem.keys.index(opaque_zero()).reshape([2 * KEYS, D]).slice(WARPGROUP * KEYS, KEYS, dim=0)
            s_issued = issue(own_k, q.permute((1, 0)))
            s = warpgroup_mma_wait(0, deps=(s_issued,))
            lse = smem.lses.index(queries.place(q_iter)).load(gl.SliceLayout(0, S_TILE))
            p = _dropped_p(part, seqlen, score_mod, tile, s, lse, i * BLOCK_M, factor, dropout_scale)
            queries.release(q_iter)
            queries.wait_full(q_iter + 1, pred=blocks > 1)
            p_operand = gl.convert_layout(p.to(dtype), P_TILE, assert_trivial=True)
            before = i * BLOCK_M

            # Main loop.
            for j in range(1, blocks):
                i += 1
                if i == high:
                    i = low
                    head += 1
                tile = make_tile(seqlen, score_mod, work, own, head)
                own_k = smem.keys.index(opaque_zero()).reshape([2 * KEYS, D]).slice(WARPGROUP * KEYS, KEYS, dim=0)
                q = queries.tile(q_iter + 1)
                do = grads.tile(q_iter)
                if seqlen.LOADS_MASKED_ROWS:
                    clear_rows(q, i * BLOCK_M, floor, limit)
                    grads.wait_full(q_iter)
                    clear_rows(do, before, floor, limit)
                s_issued = issue(own_k, q.permute((1, 0)))
                grads.wait_full(q_iter)
                dv_issued = warpgroup_mma(p_operand, do, dv, use_acc=True, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s_issued,))
                lse = smem.lses.index(queries.place(q_iter + 1)).load(gl.SliceLayout(0, S_TILE))
                p = _dropped_p(part, seqlen, score_mod, tile, s, lse, i * BLOCK_M, factor, dropout_scale)
                queries.release(q_iter + 1)
                queries.wait_full(q_iter + 2, pred=j + 1 < blocks)
                dv = warpgroup_mma_wait(0, deps=(dv_issued,))
                grads.release(q_iter)
                p_operand = gl.convert_layout(p.to(dtype), P_TILE, assert_trivial=True)
                before = i * BLOCK_M
                q_iter += 1

            # The last product.
            grads.wait_full(q_iter)
            do = grads.tile(q_iter)
            if seqlen.LOADS_MASKED_ROWS:
                clear_rows(do, before, floor, limit)
            dv_issued = warpgroup_mma(p_operand, do, dv, use_acc=True, is_async=True)
            dv = warpgroup_mma_wait(0, deps=(dv_issued,))
            grads.release(q_iter)
            q_iter += 1

        # Epilogue.
        next_work = channel.receive(tile_iter + 1)
        smem.wait_both_read(tile_iter)
        dv_sum.store(WARPGROUP, dv, smem.keys, seqlen, work, own)
        smem.release_keys()
        tile_iter += 1
        work = next_work
