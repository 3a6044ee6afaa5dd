"""What a consumer warpgroup of forward_fp8_sm90.py does, and how it converts P to FP8."""

# No `from __future__ import annotations`: aggregates check the types of their fields by these very annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ...base.fp8_layout import BLOCK as ROWS_OF_A_BLOCK
from ...base.fp8_layout import SHIFT as SHIFT_OF_WEIGHTS
from .pipeline import pass_turn, take_turn
from .tiles import LN2, ROWS, accumulator, broadcast_rows, issue, log2, opaque, row_sums, run_asm
from .versions import aggregate, barrier

BLOCK = gl.constexpr(ROWS_OF_A_BLOCK)
SHIFT = gl.constexpr(SHIFT_OF_WEIGHTS)
NO_KEY_MAX = gl.constexpr(-3e38)  # the row max where no key was visible
RECOMPUTE = gl.constexpr(1 << 28)  # what a message adds to the number of a tile that is computed again


@aggregate
class Fp8Scales:
    """Where the scales are."""

    query_scales: gl.tensor
    query_scales_of_head: gl.tensor  # how many
    scales: gl.tensor  # of a block's keys and of its values, as one word of 64 bits
    blocks_of_head: gl.tensor
    factor: gl.tensor  # of the softmax, in log2 units

    @gluon.jit
    def of_queries(self, head, row):
        """What products of 64 queries from `row` on are multiplied with. Behind the last one there is some number."""
        place = gl.minimum(row // ROWS, self.query_scales_of_head - 1)
        return gl.load(self.query_scales + head * self.query_scales_of_head + place) * self.factor

    @gluon.jit
    def of_keys(self, head, row):
        """(the scale of keys, the bits of that of values) of the block from `row` on."""
        word = gl.load(self.scales + head * self.blocks_of_head + row // BLOCK)
        return word.to(gl.int32).to(gl.float32, bitcast=True), (word >> 32).to(gl.int32)


@gluon.jit
def first_row(seqlen, batch, first, rows):
    """The first quantised row of a sequence: `fp8_layout.first_block`."""
    if seqlen.IS_PACKED:
        return (first // BLOCK + batch) * BLOCK
    else:
        return batch * ((rows + (BLOCK - 1)) // BLOCK * BLOCK)


# A tile overflows where a sum of p is infinite. A consumer reports it by a bit of the program's word in global memory,
# before it lets go of the tile's queries. The producer waits for that in any case, before it loads others into their
# place; then it looks, and has the tile computed again. Three tiles at most are on their way, so four bits tell them
# apart; the rest of the word counts tiles that overflowed, for tests.


@gluon.jit
def bit(tile_iter):
    """That of the `tile_iter`-th tile of a program."""
    return 1 << (tile_iter % 4)


@gluon.jit
def _report_overflow(word, tile_iter, total, exist, recompute):
    """Consumer: whether a tile overflowed, by rows that exist: others may be of the next sequence. One that was
    computed again is not reported; where it has such sums, inputs had them."""
    overflowed = (total == float("inf")) & exist & (recompute == 0)
    none = gl.zeros_like(total).to(gl.int32)
    gl.atomic_or(word + none, none + bit(tile_iter), mask=overflowed, sem="relaxed")


@gluon.jit
def overflowed_tiles(word):
    """Producer: the bits. The answer is on its way until `of_lane_0` reads it."""
    return gl.load(word, volatile=True)


@gluon.jit
def _runs(tile):
    """Columns of S as four tiles, of columns that a lane has and that follow each other in `ORDER`. Nothing moves."""
    R: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    ordered = tile.reshape([R, N // 32, 2, 2, 4, 2]).permute([0, 1, 2, 4, 3, 5])  # a b q e -> a q b e
    even, odd = gl.split(ordered.reshape([R, N // 4, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return x0, x1, x2, x3


@gluon.jit
def _row_max(s, BLOCK_D: gl.constexpr):
    """The largest of each row. By fours three of four comparisons wait for no other, where a chain waits for each:
    x1.02. At D 64, where three warpgroups have enough else to do, x0.90-0.995."""
    if BLOCK_D == 64:
        return gl.max(s, 1)
    else:
        x0, x1, x2, x3 = _runs(s)
        largest = gl.max(gl.maximum(gl.maximum(x0, x1), gl.maximum(x2, x3)), 1)
        return gl.convert_layout(largest, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def _pack_e4m3(p):
    """P as words of four e4m3 values."""
    w0, w1, w2, w3 = _runs(p)
    asm: gl.constexpr = (
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }"
    )
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [w0, w1, w2, w3], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack_e4m3(p_packed, LAYOUT: gl.constexpr):
    """The words as an operand; no instruction is left of it."""
    R: gl.constexpr = p_packed.shape[0]
    N: gl.constexpr = p_packed.shape[1] * 4
    b0 = p_packed.to(gl.int8)
    b1 = (p_packed >> 8).to(gl.int8)
    b2 = (p_packed >> 16).to(gl.int8)
    b3 = (p_packed >> 24).to(gl.int8)
    fp8 = gl.join(gl.join(b0, b2), gl.join(b1, b3)).reshape([R, N]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(fp8, LAYOUT, assert_trivial=True)


# Row maxima are integers, and their arithmetic uses the adders: the unit of exponentials, which also rounds and
# converts, is the busiest. A number beside 1.5 * 2**23 has no place for bits behind the point, and its last bits are
# those of an integer.


@gluon.jit
def _up(x):
    """An integer, as a float, that is not smaller: the next one for |x| up to 2**22."""
    asm: gl.constexpr = "{ .reg .f32 a; add.rp.f32 a, $1, 0f4B400000; sub.rn.f32 $0, a, 0f4B400000; }"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _two_to(x):
    """2**x of an integer of at most 0; 0 below -126."""
    beside = gl.maximum(x, -127.0) + (12582912.0 + 127.0)
    return (beside.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)


# Each warp decides whether a value of p may be too large. Gluon has branches by scalars only, and makes one of a tile
# through shared memory; so the vote is left in a register of PTX's own, and read from it.


@gluon.jit
def declare_vote():
    run_asm(".reg .pred too_large; mov.b32 $0, 0;", "=r", [])


@gluon.jit
def _too_large(sums):
    """Whether this warp has a sum, and so perhaps a p, of more than 448, the largest number of e4m3."""
    asm: gl.constexpr = (
        "{ .reg .pred p; .reg .f32 a, b; max.f32 a, $1, $2; max.f32 b, $3, $4; max.f32 a, a, b; "
        "setp.gt.f32 p, a, 0f43E00000; vote.sync.any.pred too_large, p, -1; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [sums], dtype=gl.int8, is_pure=False, pack=4)  # four sums to a lane
    return run_asm("selp.b32 $0, 1, 0, too_large;", "=r", []) != 0


@gluon.jit
def _raise_max(row_max, sums):
    """(a row max for which no sum is 2**SHIFT or more, the factor by which p is rescaled)."""
    largest = gl.convert_layout(gl.max(sums, 1), row_max.type.layout, assert_trivial=True)
    raised = gl.maximum((largest.to(gl.int32, bitcast=True) >> 23) - (127 + SHIFT - 1), 0)  # by the exponent
    return row_max + raised.to(gl.float32), ((127 - raised) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _issue_values(CONFIG: gl.constexpr, p_operand, v, acc, part: gl.constexpr):
    """Begin the product of P and a part of the columns of V."""
    WIDTH: gl.constexpr = v.shape[0] // CONFIG.parts
    columns = v.slice(part * WIDTH, WIDTH, 0).permute((1, 0))
    if CONFIG.two_level:
        return issue(p_operand, columns)
    else:
        return warpgroup_mma(p_operand, columns, acc[part], use_acc=True, is_async=True)


@gluon.jit
def _add_values(CONFIG: gl.constexpr, p_operand, v, acc, issued, pending, rescale):
    """Accumulate P V part by part; the product of the first part has been issued. With two levels the accumulator is
    multiplied by `pending` before the product is added in fp32, else the sum is multiplied by `rescale`."""
    PARTS: gl.constexpr = CONFIG.parts
    sums = ()
    for part in gl.static_range(PARTS):
        product = warpgroup_mma_wait(0, deps=(issued,))
        if part + 1 < PARTS:
            issued = _issue_values(CONFIG, p_operand, v, acc, part + 1)
        if CONFIG.two_level:
            added = acc[part] * broadcast_rows(product, pending) + product
        else:
            added = product * broadcast_rows(product, rescale)
        sums = sums + (added,)  # type: ignore[assignment]
    return sums


@gluon.jit
def _finished(parts):
    """Sums that are finished at this point. Else the assembler adds at the end of the loop: faster at D 128, not 64."""
    return [opaque(part) for part in parts]


@gluon.jit
def _wait_written():
    """Until what this warpgroup copied to global memory is there: it is about to be written again."""
    run_asm("cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [])


@aggregate
class State:
    """The online softmax and the accumulator, to which P V of the last block is still to be added."""

    start: gl.tensor  # the first key of that block
    unit: gl.tensor  # the bits of the scale of its values, in which the accumulator is held
    row_max: gl.tensor
    row_sum: gl.tensor  # eight partial sums
    acc: gl.tuple  # by parts of the columns
    p: gl.tensor  # of the last block, words of four values
    next_scale: gl.tensor  # of the next block's keys ...
    next_unit: gl.tensor  # ... and values
    pending: gl.tensor  # two levels: what the accumulator is still to be multiplied with


@gluon.jit
def _step(
    WARPGROUP: gl.constexpr, seqlen, fp8, pipelines, visible, q, q_factor, state, kv_iter, kv_head, begin,
    recompute, j, blocks,
):  # fmt: skip
    """Block j of `blocks`: its scores beside P V of the block before, then its P."""
    keys = pipelines.keys
    values = pipelines.values
    CONFIG: gl.constexpr = pipelines.CONFIG
    AFTER: gl.constexpr = (WARPGROUP + 1) % CONFIG.warpgroups
    BLOCK_N: gl.constexpr = keys.tiles.shape[2]
    BLOCK_D: gl.constexpr = keys.tiles.shape[3]
    S_TILE: gl.constexpr = accumulator(BLOCK_N, 32)
    P_TILE: gl.constexpr = gl.DotOperandLayout(0, state.acc[0].type.layout, 4)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_TILE))
    k = keys.tile(kv_iter + 1)
    v = values.tile(kv_iter)
    factor = q_factor * state.next_scale
    ratio = state.unit.to(gl.float32, bitcast=True) * (0x7F000000 - state.next_unit).to(gl.float32, bitcast=True)
    careful = (recompute != 0) | (state.start >= visible.full_limit)  # or else a row may have seen no key yet
    start = state.start - BLOCK_N
    next_scale, next_unit = fp8.of_keys(kv_head, begin + gl.maximum(start - BLOCK_N, 0))
    row_max = state.row_max
    row_sum = state.row_sum
    acc = state.acc
    p_packed = state.p
    if CONFIG.in_turn:
        take_turn(WARPGROUP)
    if CONFIG.apart:
        values.wait_full(kv_iter)
        p = _unpack_e4m3(p_packed, P_TILE)
        acc = _add_values(CONFIG, p, v, acc, _issue_values(CONFIG, p, v, acc, 0), state.pending, state.pending)
        values.release(kv_iter)
        keys.wait_full(kv_iter + 1)  # not earlier: ptxas then frees the sums' registers before S needs them
        s = issue(q, k.permute((1, 0)))
        if CONFIG.in_turn:
            pass_turn(AFTER)
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        s_issued = issue(q, k.permute((1, 0)))
        values.wait_full(kv_iter)
        p = _unpack_e4m3(p_packed, P_TILE)
        issued = _issue_values(CONFIG, p, v, acc, 0)
        if CONFIG.in_turn:
            pass_turn(AFTER)
        s = warpgroup_mma_wait(1, deps=(s_issued,))
    keys.release(kv_iter + 1)
    if seqlen.MASKS_BLOCKS:
        if CONFIG.apart:  # in every block: a branch would spill what it does not touch
            s = visible.mask(s, start, columns)
        else:
            s = visible.mask_where_cut(s, start, columns)
    rescale = gl.full((ROWS,), 1.0, gl.float32, gl.SliceLayout(1, S_TILE))
    CONDITIONAL: gl.constexpr = CONFIG.conditional_rescale
    if not CONDITIONAL or careful:
        new_max = gl.maximum(row_max, _up(_row_max(s, BLOCK_D) * factor))
        rescale = _two_to(row_max - new_max)
        row_sum = row_sum * broadcast_rows(row_sum, rescale)
        row_max = new_max
    if not CONFIG.apart:
        keys.wait_full(kv_iter + 2, pred=j + 1 < blocks)
        acc = _add_values(CONFIG, p, v, acc, issued, state.pending, rescale * ratio)
        values.release(kv_iter)
        if CONFIG.sums_first:
            acc = _finished(acc)
    p = gl.exp2(s * factor - (row_max - SHIFT)[:, None])
    sums = row_sums(p)
    p_packed = _pack_e4m3(p)
    if CONFIG.conditional_rescale:
        if _too_large(sums):
            row_max, rescale_again = _raise_max(row_max, sums)
            p_packed = _pack_e4m3(p * rescale_again[:, None])
            sums = sums * broadcast_rows(sums, rescale_again)
            row_sum = row_sum * broadcast_rows(row_sum, rescale_again)
            rescale = rescale * rescale_again
    row_sum = row_sum + sums
    pending = rescale * ratio
    return State(start, state.next_unit, row_max, row_sum, acc, p_packed, next_scale, next_unit, pending)


@gluon.jit
def consume(WARPGROUP: gl.constexpr, seqlen, fp8, epilogue, channel, counter, pipelines, staging):
    """Compute 64 rows of every tile."""
    queries = pipelines.queries
    keys = pipelines.keys
    values = pipelines.values
    CONFIG: gl.constexpr = pipelines.CONFIG
    AFTER: gl.constexpr = (WARPGROUP + 1) % CONFIG.warpgroups
    BLOCK_N: gl.constexpr = keys.tiles.shape[2]
    BLOCK_D: gl.constexpr = keys.tiles.shape[3]
    S_TILE: gl.constexpr = accumulator(BLOCK_N, 32)
    PARTS: gl.constexpr = CONFIG.parts
    WIDTH: gl.constexpr = BLOCK_D // PARTS
    O_TILE: gl.constexpr = accumulator(WIDTH, 32)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_TILE)

    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_TILE))
    rows = gl.arange(0, ROWS, S_ROWS)
    if CONFIG.in_turn:
        if WARPGROUP == 0:
            pass_turn(0)
    word = counter + (1 + gl.program_id(0))
    kv_iter = 0
    tile_iter = 0
    work = channel.receive(0)
    while work.is_valid():
        recompute = work.index // RECOMPUTE
        index = work.index % RECOMPUTE
        r0, low, high, skipped_blocks = seqlen.own_blocks(index, work, WARPGROUP, CONFIG.warpgroups, BLOCK_N)
        blocks = high - low - skipped_blocks
        visible = seqlen.key_range(r0, rows, work.k_len, seqlen.offset_of(work))
        kv_head = work.head // seqlen.group
        begin = first_row(seqlen, work.batch, work.k_first, work.k_len)
        q_factor = fp8.of_queries(work.head, first_row(seqlen, work.batch, work.q_first, work.q_len) + r0)
        start = (high - 1 - skipped_blocks) * BLOCK_N
        k_scale, unit = fp8.of_keys(kv_head, begin + start)

        # Prologue: the first block. There are no older sums, and no product P V beside it.
        for x in range(skipped_blocks):
            keys.skip(kv_iter + x)
        queries.wait_full(tile_iter)
        q = queries.tile(tile_iter, WARPGROUP)
        keys.wait_full(kv_iter + skipped_blocks)
        k = keys.tile(kv_iter + skipped_blocks)
        s = issue(q, k.permute((1, 0)))
        s = warpgroup_mma_wait(0, deps=(s,))
        keys.release(kv_iter + skipped_blocks)
        s = visible.mask_where_cut(s, start, columns)
        factor = q_factor * k_scale
        row_max = gl.maximum(_up(_row_max(s, BLOCK_D) * factor), NO_KEY_MAX)
        p = gl.exp2(s * factor - (row_max - SHIFT)[:, None])
        row_sum = row_sums(p)
        if not CONFIG.apart:
            keys.wait_full(kv_iter + skipped_blocks + 1, pred=blocks > 1)
        for x in range(skipped_blocks):
            values.skip(kv_iter + x)
            if CONFIG.in_turn:
                take_turn(WARPGROUP)
                pass_turn(AFTER)
        kv_iter += skipped_blocks
        acc = (gl.zeros((ROWS, WIDTH), gl.float32, O_TILE),) * PARTS
        p_packed = _pack_e4m3(p)
        next_scale, next_unit = fp8.of_keys(kv_head, begin + gl.maximum(start - BLOCK_N, 0))
        pending = gl.zeros((ROWS,), gl.float32, S_ROWS)
        state = State(start, unit, row_max, row_sum, acc, p_packed, next_scale, next_unit, pending)

        # Main loop.
        for j in range(1, blocks):
            state = _step(
                WARPGROUP, seqlen, fp8, pipelines, visible, q, q_factor, state, kv_iter, kv_head, begin,
                recompute, j, blocks,
            )  # fmt: skip
            kv_iter += 1

        # Epilogue: the last product, and where the next tile is while it runs.
        values.wait_full(kv_iter)
        v = values.tile(kv_iter)
        p_operand = _unpack_e4m3(state.p, gl.DotOperandLayout(0, O_TILE, 4))
        issued = _issue_values(CONFIG, p_operand, v, state.acc, 0)
        total = gl.convert_layout(gl.sum(state.row_sum, 1), S_ROWS, assert_trivial=True)
        if CONFIG.conditional_rescale:
            _report_overflow(word, tile_iter, total, r0 + rows < work.q_len, recompute)
            barrier()
        queries.release(tile_iter)
        next_work = channel.receive(tile_iter + 1)
        acc = _add_values(CONFIG, p_operand, v, state.acc, issued, state.pending, state.pending * 0.0 + 1.0)
        values.release(kv_iter)
        kv_iter += 1
        visible_rows = total != 0  # a NaN is seen
        inverse = state.unit.to(gl.float32, bitcast=True) / gl.where(visible_rows, total, 1.0)
        lse = gl.where(visible_rows, (state.row_max + (log2(total) - SHIFT)) * LN2, -float("inf"))
        epilogue.store_lse(lse, seqlen, work, r0, rows)
        tma.store_wait(pendings=0)  # of the tile before, long since drained
        if CONFIG.conditional_rescale:
            if recompute != 0:
                _wait_written()
        for part in gl.static_range(PARTS):
            out = acc[part] * broadcast_rows(acc[part], inverse)
            epilogue.store(out, staging.index(WARPGROUP * PARTS + part), seqlen, work, r0, part * WIDTH)
        tile_iter += 1
        work = next_work
    tma.store_wait(pendings=0)
