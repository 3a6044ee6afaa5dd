"""What a consumer warpgroup of forward_sm90.py does: 64 rows of queries of every tile against its keys and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...tuning.gluon import ROWS as ROWS_OF_A_WARPGROUP
from .pipeline import pass_turn, take_turn
from .tiles import LN2, LOG2E, clear_unseen, dropout_keep, from_here, hide, row_sums
from .versions import as_tile_of, kept_in_loop

ROWS = gl.constexpr(ROWS_OF_A_WARPGROUP)


@gluon.jit
def consume(WARPGROUP: gl.constexpr, crew, call, scores, result, mail, queries, keys, values, states):
    """Compute 64 rows of every tile."""
    TILE_ROWS: gl.constexpr = crew.WARPGROUPS * ROWS
    AFTER: gl.constexpr = (WARPGROUP + 1) % crew.WARPGROUPS
    BLOCK_N: gl.constexpr = keys.tiles.shape[2]
    BLOCK_D: gl.constexpr = keys.tiles.shape[4]
    BLOCK_DV: gl.constexpr = values.tiles.shape[4]
    dtype: gl.constexpr = queries.tiles.dtype
    S_TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    P_TILE: gl.constexpr = gl.DotOperandLayout(0, O_TILE, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_TILE)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_TILE)
    GUARD: gl.constexpr = call.HAS_LEFT or call.HAS_RIGHT or call.IS_PACKED  # a row may see nothing in a first block
    DEFERRED: gl.constexpr = result.BY_TMA and queries.SLOTS == 2
    JOINS: gl.constexpr = result.STATES > 0
    BORROWED: gl.constexpr = result.borrowed(crew.WARPGROUPS)
    TOGETHER: gl.constexpr = keys.SLOTS > 2  # slots of K and V are released together, for one barrier less

    no_scores = gl.zeros((ROWS, BLOCK_N), gl.float32, S_TILE)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_TILE))
    rows = gl.arange(0, ROWS, S_ROWS)
    factor = scores.factor()
    if crew.IN_TURN:
        if WARPGROUP == 0:
            pass_turn(0)
    use = 0
    taken = 0
    m, batch, head, q_first, q_len, k_first, k_len = mail.receive(0)
    while m >= 0:
        # Where am I.
        first = m * TILE_ROWS
        offset = call.offset_of(q_len, k_len)
        low, high = call.blocks(first, first + (TILE_ROWS - 1), k_len, offset, BLOCK_N)
        r0 = first + WARPGROUP * ROWS
        skip = k_len * 0  # blocks that other warpgroups see and this one does not
        if call.HAS_RIGHT:
            _, own_high = call.blocks(r0, r0 + (ROWS - 1), k_len, offset, BLOCK_N)
            skip = gl.maximum(high - own_high, 0)
        blocks = high - low - skip
        limit = gl.full([ROWS], 0, gl.int32, S_ROWS) + k_len
        safe_limit = k_len
        if call.HAS_RIGHT:
            limit = gl.minimum(limit, (r0 + offset + call.right + 1) + rows)
            safe_limit = gl.minimum(k_len, r0 + offset + call.right + 1)
        floor = limit
        safe_floor = k_len
        if call.HAS_LEFT:
            floor = (r0 + offset - call.left) + rows
            safe_floor = r0 + (ROWS - 1) + offset - call.left
        call_floor = k_len * 0  # keys from here to before `call_limit` are seen by some query of the call
        call_limit = k_len
        if call.HAS_LEFT:
            call_floor = gl.maximum(offset - call.left, 0)
        if call.HAS_RIGHT:
            call_limit = gl.minimum(k_len, q_len + offset + call.right)
        slope = factor
        if scores.HAS_ALIBI:
            slope = gl.load(scores.slopes + batch * scores.stride_ab + head).to(gl.float32)
        row_words = rows
        col_words_ptr = scores.col_words
        if scores.HAS_DROPOUT:
            words = scores.row_words + batch.to(gl.int64) * scores.stride_rb + head * scores.stride_rh
            row_words = gl.load(words + (q_first + r0) + rows, mask=r0 + rows < q_len, other=0)
            col_words_ptr += batch.to(gl.int64) * scores.stride_cb + head * scores.stride_ch + k_first
        q_pos = (r0 + offset) + rows
        more = taken * BORROWED  # slots of keys used so far than of values
        held_lse = factor
        if JOINS and not call.MANY_CUTS:  # which leaves no registers to wait in
            held_lse = result.held_lse(rows, batch, r0, head, q_len - r0)

        # The first block: no older sums, and no product P V beside it.
        for x in range(skip):
            keys.wait_full(use + more + x)
            keys.release(use + more + x)
        queries.wait_full(taken)
        q = queries.tiles.index((taken % queries.SLOTS) * crew.WARPGROUPS + WARPGROUP).reshape([ROWS, BLOCK_D])
        keys.wait_full(use + more + skip)
        k = keys.tiles.index((use + more + skip) % keys.SLOTS).reshape([BLOCK_N, BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        keys.release(use + more + skip)
        start = (high - 1 - skip) * BLOCK_N
        s = scores.of(s, slope, q_pos - start)
        cut = start + BLOCK_N > safe_limit
        if call.HAS_LEFT:
            cut = cut | (start < safe_floor)
        if cut:
            s = hide(s, start + columns, floor, limit, call.HAS_LEFT)
        row_max = gl.max(s, 1)
        top = row_max * factor
        if GUARD:
            top = gl.where(row_max == -float("inf"), 0.0, top)
        weights = gl.exp2(s * factor - top[:, None])
        row_sum = row_sums(weights)
        if scores.HAS_DROPOUT:
            words = gl.load(col_words_ptr + start + columns, mask=start + columns < k_len, other=0)
            weights = gl.where(dropout_keep(row_words, words, scores.threshold), weights, 0.0)
        if JOINS:
            tma.store_wait(pendings=0)  # of the tile before
            if WARPGROUP < result.STATES:
                states.release(taken, pred=taken > 0)
            if BORROWED > 0:
                keys.wait_full(use + more - 1, pred=taken > 0)  # for those whose state it was not
                keys.release(use + more - 1, pred=taken > 0)
        if not crew.KEYS_FIRST:
            keys.wait_full(use + more + skip + 1, pred=blocks > 1)
        for x in range(skip):
            values.wait_full(use + x)
            values.release(use + x)
            if crew.IN_TURN:
                take_turn(WARPGROUP)
                pass_turn(AFTER)
        use += skip
        if call.UNSEEN:
            clear_unseen(values, use, start, call_floor, call_limit)
        if DEFERRED:
            tma.store_wait(pendings=0)  # of the tile before, long since drained
            queries.release(taken + 1, pred=taken > 0)
        acc = gl.zeros((ROWS, BLOCK_DV), gl.float32, O_TILE)
        p = gl.convert_layout(weights.to(dtype), P_TILE, assert_trivial=True)

        # Stream.
        shrink = gl.full([ROWS], factor * 0.0 + 1.0, gl.float32, S_ROWS)  # no constant, for the compiler
        for j in range(1, blocks):
            k = keys.tiles.index((use + more + 1) % keys.SLOTS).reshape([BLOCK_N, BLOCK_D])
            v = values.tiles.index(use % values.SLOTS).reshape([BLOCK_N, BLOCK_DV])
            if BLOCK_D > 128:
                slot = kept_in_loop((taken % queries.SLOTS) * crew.WARPGROUPS + WARPGROUP)
                q = queries.tiles.index(slot).reshape([ROWS, BLOCK_D])
            if crew.KEYS_FIRST:
                keys.wait_full(use + more + 1)
            if crew.IN_TURN:
                take_turn(WARPGROUP)
            s_issued = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            if crew.RESCALE_LATE:
                acc = acc * gl.convert_layout(from_here(shrink), O_ROWS, assert_trivial=True)[:, None]
            values.wait_full(use)
            acc_issued = warpgroup_mma(p, v, acc, use_acc=True, is_async=True)
            if crew.IN_TURN:
                pass_turn(AFTER)
            s = warpgroup_mma_wait(1, deps=(s_issued,))
            if not TOGETHER:
                keys.release(use + more + 1)
            start -= BLOCK_N
            if scores.HAS_DROPOUT:
                words = gl.load(col_words_ptr + start + columns)
            s = scores.of(s, slope, q_pos - start)
            if call.MANY_CUTS:
                cut = start + BLOCK_N > safe_limit
                if call.HAS_LEFT:
                    cut = cut | (start < safe_floor)
                if cut:
                    s = hide(s, start + columns, floor, limit, call.HAS_LEFT)
            if call.UNSEEN:
                clear_unseen(values, use + 1, start, call_floor, call_limit)
            new_max = gl.maximum(row_max, gl.max(s, 1))
            top = new_max * factor
            if call.MANY_CUTS:
                top = gl.where(new_max == -float("inf"), 0.0, top)
            shrink = gl.exp2(row_max * factor - top)
            row_max = new_max
            if not crew.KEYS_FIRST:
                # Here, as ptxas moves no maximum behind this wait, and the next one not before it.
                keys.wait_full(use + more + 2, pred=j + 1 < blocks)
            acc = warpgroup_mma_wait(0, deps=(acc_issued,))
            if TOGETHER:
                keys.release(use + more + 1)
            values.release(use)
            if not crew.RESCALE_LATE:
                acc = acc * gl.convert_layout(shrink, O_ROWS, assert_trivial=True)[:, None]
            weights = gl.exp2(s * factor - top[:, None])
            shrink_sums = gl.convert_layout(shrink, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)
            row_sum = row_sum * shrink_sums[:, None] + row_sums(weights)
            if scores.HAS_DROPOUT:
                weights = gl.where(dropout_keep(row_words, words, scores.threshold), weights, 0.0)
            # Only now: the registers of the old weights were an operand until the product was done.
            p = gl.convert_layout(weights.to(dtype), P_TILE, assert_trivial=True)
            use += 1

        # The last product, and where the next tile is while it runs. What the state of other keys is, too.
        if JOINS and call.MANY_CUTS:
            held_lse = result.held_lse(rows, batch, r0, head, q_len - r0)
        if crew.RESCALE_LATE:
            acc = acc * gl.convert_layout(from_here(shrink), O_ROWS, assert_trivial=True)[:, None]
        if not result.BY_TMA:
            queries.release(taken)
        values.wait_full(use)
        v = values.tiles.index(use % values.SLOTS).reshape([BLOCK_N, BLOCK_DV])
        acc_issued = warpgroup_mma(p, v, acc, use_acc=True, is_async=True)
        next_m, next_batch, next_head, next_q, next_q_len, next_k, next_k_len = mail.receive(taken + 1)
        if JOINS:
            if WARPGROUP < result.STATES:
                states.wait_full(taken)
                held_at = states.tiles.index(WARPGROUP)
            else:
                keys.wait_full(use + more + 1)
                held_at = as_tile_of(result.o_desc, keys.tiles.index((use + more + 1) % keys.SLOTS))
            held = result.held(held_at, held_lse, O_TILE)
        acc = warpgroup_mma_wait(0, deps=(acc_issued,))
        values.release(use)
        use += 1

        # Finish: the sink is one more key without a value.
        total = gl.convert_layout(gl.sum(row_sum, 1), S_ROWS, assert_trivial=True)
        top = row_max * factor
        if result.HAS_SINK:
            sink = gl.load(result.sink + head).to(gl.float32) * LOG2E
            new_top = gl.maximum(top, sink)
            finite = gl.where(new_top == -float("inf"), 0.0, new_top)
            shrink = gl.exp2(top - finite)
            total = total * shrink + gl.exp2(sink - finite)
            acc = acc * gl.convert_layout(shrink, O_ROWS, assert_trivial=True)[:, None]
            top = new_top
        share = total
        held_share = total
        if JOINS:
            new_top = gl.maximum(top, held_lse * LOG2E)
            finite = gl.where(new_top == -float("inf"), 0.0, new_top)
            share = gl.exp2(top - finite)
            held_share = gl.exp2(held_lse * LOG2E - finite)
            total = total * share + held_share
            top = new_top
        seen = total != 0  # a NaN is seen
        inverse = result.dropout_scale / gl.where(seen, total, 1.0)
        if JOINS:
            inverse *= share
        out = acc * gl.convert_layout(inverse, O_ROWS, assert_trivial=True)[:, None]
        if JOINS:
            held_share /= gl.where(seen, total, 1.0)
            out += held * gl.convert_layout(held_share, O_ROWS, assert_trivial=True)[:, None]
        entry = batch
        if call.IS_PACKED:
            entry = batch * 0
        if result.write_lse != 0:
            lse = gl.where(seen, (top + gl.log2(total)) * LN2, -float("inf"))
            lse_row = result.lse + entry.to(gl.int64) * result.stride_lb + head.to(gl.int64) * result.stride_lh
            gl.store(lse_row + (q_first + r0) + rows, lse, mask=r0 + rows < q_len)

        # Store: over the queries, or the state that was joined, which are done with, and on by TMA, if that writes no
        # rows of others.
        if result.BY_TMA:
            place = queries.tiles.index((taken % queries.SLOTS) * crew.WARPGROUPS + WARPGROUP)
            if call.IS_PACKED:
                if r0 + ROWS <= q_len:
                    result.store_by_tma(out, place, entry, q_first + r0, head)
                else:
                    result.store_from_registers(out, entry, q_first + r0, head, q_len - r0)
            else:
                result.store_by_tma(out, place, entry, r0, head)
        elif JOINS:
            result.store_by_tma(out, held_at, entry, r0, head)
        else:
            result.store_from_registers(out, entry, q_first + r0, head, q_len - r0)
        if result.BY_TMA and not DEFERRED:
            tma.store_wait(pendings=0)
            queries.release(taken)
        taken += 1
        m = next_m
        batch = next_batch
        head = next_head
        q_first = next_q
        q_len = next_q_len
        k_first = next_k
        k_len = next_k_len
    if DEFERRED or JOINS:
        tma.store_wait(pendings=0)
