"""What a consumer warpgroup of forward_sm90.py does: 64 rows of queries of every tile against its keys and values."""

# No `from __future__ import annotations`: aggregates check the types of their fields by these very annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from .parameters import KeyRange
from .pipeline import pass_turn, take_turn
from .tiles import (
    LN2,
    LOG2E,
    ROWS,
    accumulator,
    broadcast_rows,
    clear_rows_of_slot,
    dropout_keep,
    issue,
    opaque,
    row_sums,
)
from .versions import aggregate, as_tile_of, opaque_in_loop

LOWEST = gl.constexpr(-3.0e38)
"""The row max, in log2 units, of a row that has seen no key: finite, as -inf less itself would be NaN."""


@aggregate
class Rows:
    """The rows of a warpgroup in a tile: which keys they see, and what modifies their scores."""

    positions: gl.tensor  # among the keys
    visible: KeyRange
    floor: gl.tensor  # keys from here to before `limit` are seen by some query of the sequence
    limit: gl.tensor
    slope: gl.tensor  # ALiBi's
    words: gl.tensor  # dropout's: of the rows ...
    key_words: gl.tensor  # ... and where those of the keys are

    @gluon.jit
    def drop(self, score_mod, p, words):
        """p after dropout, given the words of its keys."""
        if score_mod.HAS_DROPOUT:
            p = gl.where(dropout_keep(self.words, words, score_mod.threshold), p, 0.0)
        return p


@gluon.jit
def make_rows(seqlen, score_mod, work, first, rows):
    """The rows from `first` on, which `rows` numbers."""
    offset = seqlen.offset_of(work)
    visible = seqlen.key_range(first, rows, work.k_len, offset)
    floor, limit = seqlen.visible_keys(work.q_len, work.k_len, offset)
    slope = score_mod.slope(work, work.head)
    words = rows
    if score_mod.HAS_DROPOUT:
        line = score_mod.row_words + work.batch.to(gl.int64) * score_mod.stride_rb + work.head * score_mod.stride_rh
        words = gl.load(line + (work.q_first + first) + rows, mask=first + rows < work.q_len, other=0)
    key_words = score_mod.words_of_keys(work, work.head)
    return Rows((first + offset) + rows, visible, floor, limit, slope, words, key_words)


@aggregate
class State:
    """The online softmax and the accumulator, to which P V of the last block is still to be added."""

    start: gl.tensor  # the first key of that block
    row_max: gl.tensor
    row_sum: gl.tensor  # eight partial sums
    acc: gl.tensor
    p: gl.tensor  # of the last block, as an operand
    rescale: gl.tensor  # what the accumulator is multiplied with, if that is done late


@gluon.jit
def _step(WARPGROUP: gl.constexpr, seqlen, score_mod, pipelines, rows, state, place, k_iter, kv_iter, j, blocks):
    """Block j of `blocks`: its scores beside P V of the block before, then its P."""
    keys = pipelines.keys
    values = pipelines.values
    CONFIG: gl.constexpr = pipelines.CONFIG
    BLOCK_N: gl.constexpr = keys.tiles.shape[2]
    AFTER: gl.constexpr = (WARPGROUP + 1) % CONFIG.warpgroups
    TOGETHER: gl.constexpr = keys.SLOTS > 2  # slots of K and V are released together, for one barrier less
    S_TILE: gl.constexpr = accumulator(BLOCK_N)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_TILE))
    factor = score_mod.factor()
    k = keys.tile(k_iter)
    v = values.tile(kv_iter)
    if pipelines.queries.tiles.shape[4] > 128:
        place = opaque_in_loop(place)
    q = pipelines.queries.matrix(place)
    acc = state.acc
    if CONFIG.keys_first:
        keys.wait_full(k_iter)
    if CONFIG.in_turn:
        take_turn(WARPGROUP)
    s_issued = issue(q, k.permute((1, 0)))
    if CONFIG.rescale_late:
        acc = acc * broadcast_rows(acc, opaque(state.rescale))
    values.wait_full(kv_iter)
    acc_issued = warpgroup_mma(state.p, v, acc, use_acc=True, is_async=True)
    if CONFIG.in_turn:
        pass_turn(AFTER)
    s = warpgroup_mma_wait(1, deps=(s_issued,))
    if not TOGETHER:
        keys.release(k_iter)
    start = state.start - BLOCK_N
    words = columns
    if score_mod.HAS_DROPOUT:
        words = gl.load(rows.key_words + start + columns)
    s = score_mod.apply(s, rows.slope, rows.positions - start)
    if seqlen.MASKS_BLOCKS:  # else all rows see all of every block but the first
        if rows.visible.cuts(start, BLOCK_N):
            s = rows.visible.mask(s, start, columns)
            if seqlen.LOADS_MASKED_ROWS:
                clear_rows_of_slot(values, kv_iter + 1, start, rows.floor, rows.limit)
    row_max = gl.maximum(state.row_max, gl.max(s, 1))
    max_scaled = row_max * factor
    rescale = gl.exp2(state.row_max * factor - max_scaled)
    if not CONFIG.keys_first:
        # Here, as ptxas moves no maximum behind this wait, and the next one not before it.
        keys.wait_full(k_iter + 1, pred=j + 1 < blocks)
    acc = warpgroup_mma_wait(0, deps=(acc_issued,))
    if TOGETHER:
        keys.release(k_iter)
    values.release(kv_iter)
    if not CONFIG.rescale_late:
        acc = acc * broadcast_rows(acc, rescale)
    p = gl.exp2(s * factor - max_scaled[:, None])
    row_sum = state.row_sum * broadcast_rows(state.row_sum, rescale) + row_sums(p)
    # Only now: the registers of the old P were an operand until the product was done.
    p = rows.drop(score_mod, p, words)
    p_operand = gl.convert_layout(p.to(state.p.dtype), state.p.type.layout, assert_trivial=True)
    return State(start, row_max, row_sum, acc, p_operand, rescale)


@gluon.jit
def consume(WARPGROUP: gl.constexpr, seqlen, score_mod, epilogue, channel, pipelines, states):
    """Compute 64 rows of every tile."""
    queries = pipelines.queries
    keys = pipelines.keys
    values = pipelines.values
    CONFIG: gl.constexpr = pipelines.CONFIG
    AFTER: gl.constexpr = (WARPGROUP + 1) % CONFIG.warpgroups
    BLOCK_N: gl.constexpr = keys.tiles.shape[2]
    BLOCK_DV: gl.constexpr = values.tiles.shape[4]
    S_TILE: gl.constexpr = accumulator(BLOCK_N)
    O_TILE: gl.constexpr = accumulator(BLOCK_DV)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_TILE)
    GUARD: gl.constexpr = seqlen.HAS_LEFT or seqlen.HAS_RIGHT or seqlen.IS_PACKED  # a row may see none of a first block
    DEFERRED: gl.constexpr = CONFIG.by_tma and queries.SLOTS == 2
    JOINS: gl.constexpr = epilogue.STATES > 0
    BORROWED: gl.constexpr = epilogue.borrowed(CONFIG.warpgroups)

    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_TILE))
    row = gl.arange(0, ROWS, S_ROWS)
    factor = score_mod.factor()
    if CONFIG.in_turn:
        if WARPGROUP == 0:
            pass_turn(0)
    kv_iter = 0
    tile_iter = 0
    work = channel.receive(0)
    while work.is_valid():
        r0, low, high, skipped_blocks = seqlen.own_blocks(work.index, work, WARPGROUP, CONFIG.warpgroups, BLOCK_N)
        blocks = high - low - skipped_blocks
        rows = make_rows(seqlen, score_mod, work, r0, row)
        borrowed_slots = tile_iter * BORROWED  # slots of keys used so far than of values
        previous_lse = factor
        if JOINS and not seqlen.MASKS_BLOCKS:  # which leaves no registers to wait in
            previous_lse = epilogue.previous_lse(row, work.batch, r0, work.head, work.q_len - r0)

        # Prologue: the first block. There are no older sums, and no product P V beside it.
        for x in range(skipped_blocks):
            keys.skip(kv_iter + borrowed_slots + x)
        queries.wait_full(tile_iter)
        place = queries.place(tile_iter, WARPGROUP)
        q = queries.matrix(place)
        k_iter = kv_iter + borrowed_slots + skipped_blocks
        keys.wait_full(k_iter)
        s = issue(q, keys.tile(k_iter).permute((1, 0)))
        s = warpgroup_mma_wait(0, deps=(s,))
        keys.release(k_iter)
        start = (high - 1 - skipped_blocks) * BLOCK_N
        s = score_mod.apply(s, rows.slope, rows.positions - start)
        s = rows.visible.mask_where_cut(s, start, columns)
        row_max = gl.max(s, 1)
        if GUARD:
            row_max = gl.maximum(row_max, LOWEST / gl.maximum(factor, 1.0))
        max_scaled = row_max * factor
        p = gl.exp2(s * factor - max_scaled[:, None])
        row_sum = row_sums(p)
        words = columns
        if score_mod.HAS_DROPOUT:
            words = gl.load(rows.key_words + start + columns, mask=start + columns < work.k_len, other=0)
        p = rows.drop(score_mod, p, words)
        if JOINS:
            tma.store_wait(pendings=0)  # of the tile before
            if WARPGROUP < epilogue.STATES:
                states.release(tile_iter, pred=tile_iter > 0)
            if BORROWED > 0:
                keys.wait_full(kv_iter + borrowed_slots - 1, pred=tile_iter > 0)  # for those whose state it was not
                keys.release(kv_iter + borrowed_slots - 1, pred=tile_iter > 0)
        if not CONFIG.keys_first:
            keys.wait_full(k_iter + 1, pred=blocks > 1)
        for x in range(skipped_blocks):
            values.skip(kv_iter + x)
            if CONFIG.in_turn:
                take_turn(WARPGROUP)
                pass_turn(AFTER)
        kv_iter += skipped_blocks
        if seqlen.LOADS_MASKED_ROWS:
            clear_rows_of_slot(values, kv_iter, start, rows.floor, rows.limit)
        if DEFERRED:
            tma.store_wait(pendings=0)  # of the tile before, long since drained
            queries.release(tile_iter + 1, pred=tile_iter > 0)
        acc = gl.zeros((ROWS, BLOCK_DV), gl.float32, O_TILE)
        p_operand = gl.convert_layout(p.to(queries.tiles.dtype), gl.DotOperandLayout(0, O_TILE, 2), assert_trivial=True)
        rescale = gl.full([ROWS], factor * 0.0 + 1.0, gl.float32, S_ROWS)  # no constant, for the compiler
        state = State(start, row_max, row_sum, acc, p_operand, rescale)

        # Main loop.
        for j in range(1, blocks):
            k_iter = kv_iter + borrowed_slots + 1
            state = _step(WARPGROUP, seqlen, score_mod, pipelines, rows, state, place, k_iter, kv_iter, j, blocks)
            kv_iter += 1

        # Epilogue: the last product, and where the next tile is while it runs. What the state of other keys is, too.
        acc = state.acc
        if JOINS and seqlen.MASKS_BLOCKS:
            previous_lse = epilogue.previous_lse(row, work.batch, r0, work.head, work.q_len - r0)
        if CONFIG.rescale_late:
            acc = acc * broadcast_rows(acc, opaque(state.rescale))
        if not CONFIG.by_tma:
            queries.release(tile_iter)
        values.wait_full(kv_iter)
        acc_issued = warpgroup_mma(state.p, values.tile(kv_iter), acc, use_acc=True, is_async=True)
        next_work = channel.receive(tile_iter + 1)
        if JOINS:
            if WARPGROUP < epilogue.STATES:
                states.wait_full(tile_iter)
                previous_at = states.tiles.index(WARPGROUP)
            else:
                keys.wait_full(kv_iter + borrowed_slots + 1)
                previous_at = as_tile_of(epilogue.o_desc, keys.tiles.index(keys.place(kv_iter + borrowed_slots + 1)))
            previous = epilogue.previous(previous_at, previous_lse, O_TILE)
        acc = warpgroup_mma_wait(0, deps=(acc_issued,))
        values.release(kv_iter)
        kv_iter += 1

        # The sink is one more key without a value.
        total = gl.convert_layout(gl.sum(state.row_sum, 1), S_ROWS, assert_trivial=True)
        max_scaled = state.row_max * factor
        if epilogue.HAS_SINK:
            sink = gl.load(epilogue.sink + work.head).to(gl.float32) * LOG2E
            max_scaled, rescale, weight = _join(max_scaled, sink)
            total = total * rescale + weight
            acc = acc * broadcast_rows(acc, rescale)
        share = total
        previous_share = total
        if JOINS:
            max_scaled, share, previous_share = _join(max_scaled, previous_lse * LOG2E)
            total = total * share + previous_share
        visible = total != 0  # a NaN is seen
        inverse = epilogue.dropout_scale / gl.where(visible, total, 1.0)
        if JOINS:
            inverse *= share
        out = acc * broadcast_rows(acc, inverse)
        if JOINS:
            previous_share /= gl.where(visible, total, 1.0)
            out += previous * broadcast_rows(previous, previous_share)
        if epilogue.write_lse != 0:
            lse = gl.where(visible, (max_scaled + gl.log2(total)) * LN2, -float("inf"))
            epilogue.store_lse(lse, seqlen, work, r0, row)

        # Over the queries, or the state that was joined, which are done with, and on by TMA.
        if CONFIG.by_tma:
            epilogue.store(out, queries.tiles.index(queries.place(tile_iter, WARPGROUP)), seqlen, work, r0)
        elif JOINS:
            epilogue.store_by_tma(out, previous_at, seqlen.entry(work), r0, work.head)
        else:
            epilogue.store_from_registers(out, seqlen.entry(work), work.q_first + r0, work.head, work.q_len - r0)
        if CONFIG.by_tma and not DEFERRED:
            tma.store_wait(pendings=0)
            queries.release(tile_iter)
        tile_iter += 1
        work = next_work
    if DEFERRED or JOINS:
        tma.store_wait(pendings=0)


@gluon.jit
def _join(row_max, other_max):
    """The larger of two maxima, in log2 units, and what sums beside each of them are multiplied with."""
    joined = gl.maximum(row_max, other_max)
    finite = gl.where(joined == -float("inf"), 0.0, joined)
    return joined, gl.exp2(row_max - finite), gl.exp2(other_max - finite)
