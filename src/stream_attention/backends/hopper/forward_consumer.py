"""What a consumer warpgroup of forward_sm90.py does: 64 rows of queries of every tile against its keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .pipeline import pass_turn, take_turn
from .tiles import LN2, LOG2E, clear_masked_values, dropout_keep, mask_scores, opaque, row_sums
from .tuning import ROWS as ROWS_OF_A_WARPGROUP
from .versions import as_tile_of, opaque_in_loop

ROWS = gl.constexpr(ROWS_OF_A_WARPGROUP)


@gluon.jit
def consume(WARPGROUP: gl.constexpr, config, seqlen, score_mod, epilogue, channel, queries, keys, values, states):
    """Compute 64 rows of every tile."""
    TILE_ROWS: gl.constexpr = config.WARPGROUPS * ROWS
    AFTER: gl.constexpr = (WARPGROUP + 1) % config.WARPGROUPS
    BLOCK_N: gl.constexpr = keys.tiles.shape[2]
    BLOCK_D: gl.constexpr = keys.tiles.shape[4]
    BLOCK_DV: gl.constexpr = values.tiles.shape[4]
    dtype: gl.constexpr = queries.tiles.dtype
    S_TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    P_TILE: gl.constexpr = gl.DotOperandLayout(0, O_TILE, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_TILE)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_TILE)
    GUARD: gl.constexpr = (
        seqlen.HAS_LEFT or seqlen.HAS_RIGHT or seqlen.IS_PACKED
    )  # a first block may be fully masked for a row
    DEFERRED: gl.constexpr = epilogue.BY_TMA and queries.SLOTS == 2
    JOINS: gl.constexpr = epilogue.STATES > 0
    BORROWED: gl.constexpr = epilogue.borrowed(config.WARPGROUPS)
    TOGETHER: gl.constexpr = keys.SLOTS > 2  # slots of K and V are released together, for one barrier less

    no_scores = gl.zeros((ROWS, BLOCK_N), gl.float32, S_TILE)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_TILE))
    rows = gl.arange(0, ROWS, S_ROWS)
    factor = score_mod.factor()
    if config.IN_TURN:
        if WARPGROUP == 0:
            pass_turn(0)
    kv_iter = 0
    tile_iter = 0
    m, batch, head, q_first, q_len, k_first, k_len = channel.receive(0)
    while m >= 0:
        # Where am I.
        first = m * TILE_ROWS
        offset = seqlen.offset_of(q_len, k_len)
        low, high = seqlen.blocks(first, first + (TILE_ROWS - 1), k_len, offset, BLOCK_N)
        r0 = first + WARPGROUP * ROWS
        skipped_blocks = k_len * 0  # blocks that other warpgroups see and this one does not
        if seqlen.HAS_RIGHT:
            _, own_high = seqlen.blocks(r0, r0 + (ROWS - 1), k_len, offset, BLOCK_N)
            skipped_blocks = gl.maximum(high - own_high, 0)
        blocks = high - low - skipped_blocks
        limit = gl.full([ROWS], 0, gl.int32, S_ROWS) + k_len
        safe_limit = k_len
        if seqlen.HAS_RIGHT:
            limit = gl.minimum(limit, (r0 + offset + seqlen.right + 1) + rows)
            safe_limit = gl.minimum(k_len, r0 + offset + seqlen.right + 1)
        floor = limit
        safe_floor = k_len
        if seqlen.HAS_LEFT:
            floor = (r0 + offset - seqlen.left) + rows
            safe_floor = r0 + (ROWS - 1) + offset - seqlen.left
        visible_floor = k_len * 0  # keys from here to before `visible_limit` are seen by some query of the call
        visible_limit = k_len
        if seqlen.HAS_LEFT:
            visible_floor = gl.maximum(offset - seqlen.left, 0)
        if seqlen.HAS_RIGHT:
            visible_limit = gl.minimum(k_len, q_len + offset + seqlen.right)
        slope = factor
        if score_mod.HAS_ALIBI:
            slope = gl.load(score_mod.slopes + batch * score_mod.stride_ab + head).to(gl.float32)
        row_words = rows
        col_words_ptr = score_mod.col_words
        if score_mod.HAS_DROPOUT:
            words = score_mod.row_words + batch.to(gl.int64) * score_mod.stride_rb + head * score_mod.stride_rh
            row_words = gl.load(words + (q_first + r0) + rows, mask=r0 + rows < q_len, other=0)
            col_words_ptr += batch.to(gl.int64) * score_mod.stride_cb + head * score_mod.stride_ch + k_first
        q_pos = (r0 + offset) + rows
        borrowed_slots = tile_iter * BORROWED  # slots of keys used so far than of values
        previous_lse = factor
        if JOINS and not seqlen.MASKS_BEYOND_FIRST_BLOCK:  # which leaves no registers to wait in
            previous_lse = epilogue.previous_lse(rows, batch, r0, head, q_len - r0)

        # The first block: no older sums, and no product P V beside it.
        for x in range(skipped_blocks):
            keys.wait_full(kv_iter + borrowed_slots + x)
            keys.release(kv_iter + borrowed_slots + x)
        queries.wait_full(tile_iter)
        q = queries.tiles.index((tile_iter % queries.SLOTS) * config.WARPGROUPS + WARPGROUP).reshape([ROWS, BLOCK_D])
        keys.wait_full(kv_iter + borrowed_slots + skipped_blocks)
        k = keys.tiles.index((kv_iter + borrowed_slots + skipped_blocks) % keys.SLOTS).reshape([BLOCK_N, BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        keys.release(kv_iter + borrowed_slots + skipped_blocks)
        start = (high - 1 - skipped_blocks) * BLOCK_N
        s = score_mod.apply(s, slope, q_pos - start)
        is_partial = start + BLOCK_N > safe_limit
        if seqlen.HAS_LEFT:
            is_partial = is_partial | (start < safe_floor)
        if is_partial:
            s = mask_scores(s, start + columns, floor, limit, seqlen.HAS_LEFT)
        row_max = gl.max(s, 1)
        max_scaled = row_max * factor
        if GUARD:
            max_scaled = gl.where(row_max == -float("inf"), 0.0, max_scaled)
        p = gl.exp2(s * factor - max_scaled[:, None])
        row_sum = row_sums(p)
        if score_mod.HAS_DROPOUT:
            words = gl.load(col_words_ptr + start + columns, mask=start + columns < k_len, other=0)
            p = gl.where(dropout_keep(row_words, words, score_mod.threshold), p, 0.0)
        if JOINS:
            tma.store_wait(pendings=0)  # of the tile before
            if WARPGROUP < epilogue.STATES:
                states.release(tile_iter, pred=tile_iter > 0)
            if BORROWED > 0:
                keys.wait_full(kv_iter + borrowed_slots - 1, pred=tile_iter > 0)  # for those whose state it was not
                keys.release(kv_iter + borrowed_slots - 1, pred=tile_iter > 0)
        if not config.KEYS_FIRST:
            keys.wait_full(kv_iter + borrowed_slots + skipped_blocks + 1, pred=blocks > 1)
        for x in range(skipped_blocks):
            values.wait_full(kv_iter + x)
            values.release(kv_iter + x)
            if config.IN_TURN:
                take_turn(WARPGROUP)
                pass_turn(AFTER)
        kv_iter += skipped_blocks
        if seqlen.LOADS_MASKED_KV:
            clear_masked_values(values, kv_iter, start, visible_floor, visible_limit)
        if DEFERRED:
            tma.store_wait(pendings=0)  # of the tile before, long since drained
            queries.release(tile_iter + 1, pred=tile_iter > 0)
        acc = gl.zeros((ROWS, BLOCK_DV), gl.float32, O_TILE)
        p_operand = gl.convert_layout(p.to(dtype), P_TILE, assert_trivial=True)

        # Stream.
        rescale = gl.full([ROWS], factor * 0.0 + 1.0, gl.float32, S_ROWS)  # no constant, for the compiler
        for j in range(1, blocks):
            k = keys.tiles.index((kv_iter + borrowed_slots + 1) % keys.SLOTS).reshape([BLOCK_N, BLOCK_D])
            v = values.tiles.index(kv_iter % values.SLOTS).reshape([BLOCK_N, BLOCK_DV])
            if BLOCK_D > 128:
                slot = opaque_in_loop((tile_iter % queries.SLOTS) * config.WARPGROUPS + WARPGROUP)
                q = queries.tiles.index(slot).reshape([ROWS, BLOCK_D])
            if config.KEYS_FIRST:
                keys.wait_full(kv_iter + borrowed_slots + 1)
            if config.IN_TURN:
                take_turn(WARPGROUP)
            s_issued = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            if config.RESCALE_LATE:
                acc = acc * gl.convert_layout(opaque(rescale), O_ROWS, assert_trivial=True)[:, None]
            values.wait_full(kv_iter)
            acc_issued = warpgroup_mma(p_operand, v, acc, use_acc=True, is_async=True)
            if config.IN_TURN:
                pass_turn(AFTER)
            s = warpgroup_mma_wait(1, deps=(s_issued,))
            if not TOGETHER:
                keys.release(kv_iter + borrowed_slots + 1)
            start -= BLOCK_N
            if score_mod.HAS_DROPOUT:
                words = gl.load(col_words_ptr + start + columns)
            s = score_mod.apply(s, slope, q_pos - start)
            if seqlen.MASKS_BEYOND_FIRST_BLOCK:
                is_partial = start + BLOCK_N > safe_limit
                if seqlen.HAS_LEFT:
                    is_partial = is_partial | (start < safe_floor)
                if is_partial:
                    s = mask_scores(s, start + columns, floor, limit, seqlen.HAS_LEFT)
            if seqlen.LOADS_MASKED_KV:
                clear_masked_values(values, kv_iter + 1, start, visible_floor, visible_limit)
            new_max = gl.maximum(row_max, gl.max(s, 1))
            max_scaled = new_max * factor
            if seqlen.MASKS_BEYOND_FIRST_BLOCK:
                max_scaled = gl.where(new_max == -float("inf"), 0.0, max_scaled)
            rescale = gl.exp2(row_max * factor - max_scaled)
            row_max = new_max
            if not config.KEYS_FIRST:
                # Here, as ptxas moves no maximum behind this wait, and the next one not before it.
                keys.wait_full(kv_iter + borrowed_slots + 2, pred=j + 1 < blocks)
            acc = warpgroup_mma_wait(0, deps=(acc_issued,))
            if TOGETHER:
                keys.release(kv_iter + borrowed_slots + 1)
            values.release(kv_iter)
            if not config.RESCALE_LATE:
                acc = acc * gl.convert_layout(rescale, O_ROWS, assert_trivial=True)[:, None]
            p = gl.exp2(s * factor - max_scaled[:, None])
            rescale_sums = gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)
            row_sum = row_sum * rescale_sums[:, None] + row_sums(p)
            if score_mod.HAS_DROPOUT:
                p = gl.where(dropout_keep(row_words, words, score_mod.threshold), p, 0.0)
            # Only now: the registers of the old weights were an operand until the product was done.
            p_operand = gl.convert_layout(p.to(dtype), P_TILE, assert_trivial=True)
            kv_iter += 1

        # The last product, and where the next tile is while it runs. What the state of other keys is, too.
        if JOINS and seqlen.MASKS_BEYOND_FIRST_BLOCK:
            previous_lse = epilogue.previous_lse(rows, batch, r0, head, q_len - r0)
        if config.RESCALE_LATE:
            acc = acc * gl.convert_layout(opaque(rescale), O_ROWS, assert_trivial=True)[:, None]
        if not epilogue.BY_TMA:
            queries.release(tile_iter)
        values.wait_full(kv_iter)
        v = values.tiles.index(kv_iter % values.SLOTS).reshape([BLOCK_N, BLOCK_DV])
        acc_issued = warpgroup_mma(p_operand, v, acc, use_acc=True, is_async=True)
        next_m, next_batch, next_head, next_q, next_q_len, next_k, next_k_len = channel.receive(tile_iter + 1)
        if JOINS:
            if WARPGROUP < epilogue.STATES:
                states.wait_full(tile_iter)
                previous_at = states.tiles.index(WARPGROUP)
            else:
                keys.wait_full(kv_iter + borrowed_slots + 1)
                previous_at = as_tile_of(epilogue.o_desc, keys.tiles.index((kv_iter + borrowed_slots + 1) % keys.SLOTS))
            previous = epilogue.previous(previous_at, previous_lse, O_TILE)
        acc = warpgroup_mma_wait(0, deps=(acc_issued,))
        values.release(kv_iter)
        kv_iter += 1

        # Finish: the sink is one more key without a value.
        total = gl.convert_layout(gl.sum(row_sum, 1), S_ROWS, assert_trivial=True)
        max_scaled = row_max * factor
        if epilogue.HAS_SINK:
            sink = gl.load(epilogue.sink + head).to(gl.float32) * LOG2E
            new_max_scaled = gl.maximum(max_scaled, sink)
            finite = gl.where(new_max_scaled == -float("inf"), 0.0, new_max_scaled)
            rescale = gl.exp2(max_scaled - finite)
            total = total * rescale + gl.exp2(sink - finite)
            acc = acc * gl.convert_layout(rescale, O_ROWS, assert_trivial=True)[:, None]
            max_scaled = new_max_scaled
        share = total
        previous_share = total
        if JOINS:
            new_max_scaled = gl.maximum(max_scaled, previous_lse * LOG2E)
            finite = gl.where(new_max_scaled == -float("inf"), 0.0, new_max_scaled)
            share = gl.exp2(max_scaled - finite)
            previous_share = gl.exp2(previous_lse * LOG2E - finite)
            total = total * share + previous_share
            max_scaled = new_max_scaled
        visible = total != 0  # a NaN is seen
        inverse = epilogue.dropout_scale / gl.where(visible, total, 1.0)
        if JOINS:
            inverse *= share
        out = acc * gl.convert_layout(inverse, O_ROWS, assert_trivial=True)[:, None]
        if JOINS:
            previous_share /= gl.where(visible, total, 1.0)
            out += previous * gl.convert_layout(previous_share, O_ROWS, assert_trivial=True)[:, None]
        entry = batch
        if seqlen.IS_PACKED:
            entry = batch * 0
        if epilogue.write_lse != 0:
            lse = gl.where(visible, (max_scaled + gl.log2(total)) * LN2, -float("inf"))
            lse_row = epilogue.lse + entry.to(gl.int64) * epilogue.stride_lb + head.to(gl.int64) * epilogue.stride_lh
            gl.store(lse_row + (q_first + r0) + rows, lse, mask=r0 + rows < q_len)

        # Store: over the queries, or the state that was joined, which are done with, and on by TMA, if that writes no
        # rows of others.
        if epilogue.BY_TMA:
            place = queries.tiles.index((tile_iter % queries.SLOTS) * config.WARPGROUPS + WARPGROUP)
            if seqlen.IS_PACKED:
                if r0 + ROWS <= q_len:
                    epilogue.store_by_tma(out, place, entry, q_first + r0, head)
                else:
                    epilogue.store_from_registers(out, entry, q_first + r0, head, q_len - r0)
            else:
                epilogue.store_by_tma(out, place, entry, r0, head)
        elif JOINS:
            epilogue.store_by_tma(out, previous_at, entry, r0, head)
        else:
            epilogue.store_from_registers(out, entry, q_first + r0, head, q_len - r0)
        if epilogue.BY_TMA and not DEFERRED:
            tma.store_wait(pendings=0)
            queries.release(tile_iter)
        tile_iter += 1
        m = next_m
        batch = next_batch
        head = next_head
        q_first = next_q
        q_len = next_q_len
        k_first = next_k
        k_len = next_k_len
    if DEFERRED or JOINS:
        tma.store_wait(pendings=0)
