"""What the consumers of backward_sm90.py do: a block of queries against a tile of keys, and the tile's end.

Here is the shared memory of a program (`SharedStorage`), the scratch that accumulates dQ (`Scratch`), and which blocks
of queries see which tiles of keys.
"""

# No `from __future__ import annotations`: aggregates check the types of their fields by these very annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...gpu.rows import PAD as PADDED_ROWS
from .pipeline import Ring, arrive, sync
from .tiles import KEYS, LOG2E, accumulator, clear_rows, dropout_keep, halves, issue, log2, run_asm, subtract_alibi
from .versions import aggregate, as_tiles_of, computed_here, tma_store

CHUNK = gl.constexpr(64)
PAD = gl.constexpr(PADDED_ROWS.value)

# Named barriers. Triton takes 0 to 6 for the roles.
HALF_READY = gl.constexpr(8)  # + 2 w + b: warpgroup w has written its half of dS into buffer b
CHUNK_FULL = gl.constexpr(12)  # + w
CHUNK_EMPTY = gl.constexpr(14)  # + w
BOTH = gl.constexpr(256)  # threads of the two consumers
A_CONSUMER_AND_A_WARP = gl.constexpr(160)


@aggregate
class Part:
    """Which gradients a launch makes, and how."""

    CONFIG: gl.constexpr
    IS_ALL: gl.constexpr  # so chunks of dQ count the tiles of keys that were added; else a launch has added them all
    LOADS_V: gl.constexpr
    ORDERED: gl.constexpr  # chunks of dQ are added to in one order


@aggregate
class SharedStorage:
    """The shared memory of a program."""

    queries: Ring  # blocks of Q ...
    grads: Ring  # ... and of dO
    lses: gl.shared_memory_descriptor  # [slots, BLOCK_M]: land with the queries
    deltas: gl.shared_memory_descriptor  # and with the gradients
    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    d_scores: gl.shared_memory_descriptor  # [2, 128 keys, BLOCK_M]
    staging: gl.shared_memory_descriptor  # [2, CHUNK, CHUNK]: a chunk of dQ of each consumer
    landing: gl.shared_memory_descriptor  # [pieces, 8 or 16, 32]: where finished ones are read back to
    landed: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor  # flips when both consumers have read K, V and dS of a tile for the last time

    @gluon.jit
    def wait_keys(self, part, seqlen, work, tile_iter):
        """Consumer: until the tile's keys and values are there. Those that no query sees are cleared."""
        mbarrier.wait(self.kv_full, tile_iter & 1)
        if seqlen.LOADS_MASKED_ROWS:
            D: gl.constexpr = self.queries.tiles.shape[4]
            first = work.index * (2 * KEYS)
            floor, limit = seqlen.visible_keys(work.q_len, work.k_len, seqlen.offset_of(work))
            clear_rows(self.keys.index(0).reshape([2 * KEYS, D]), first, floor, limit)
            if part.LOADS_V:
                clear_rows(self.values.index(0).reshape([2 * KEYS, D]), first, floor, limit)

    @gluon.jit
    def wait_both_read(self, tile_iter):
        """Consumer: that the memory of the tile's keys and values may be written."""
        mbarrier.arrive(self.read, count=1)
        mbarrier.wait(self.read, tile_iter & 1)

    @gluon.jit
    def release_keys(self):
        """Consumer: what it wrote there has been copied."""
        tma.store_wait(pendings=0)
        mbarrier.arrive(self.kv_empty, count=1)

    @gluon.jit
    def wait_queries(self, part, seqlen, tile, q, do, q_iter, row):
        """Consumer: until a block of queries is there. Those that see no key are cleared, and their gradients."""
        self.queries.wait_full(q_iter)
        if seqlen.LOADS_MASKED_ROWS:
            self.grads.wait_full(q_iter)
            floor, limit = queries_with_keys(seqlen, tile.q_len, tile.k_len, tile.offset)
            clear_rows(q, row, floor, limit)
            clear_rows(do, row, floor, limit)

    @gluon.jit
    def leave_chunk(self, WARPGROUP: gl.constexpr, dq):
        """Consumer: leave a chunk of dQ for the reducer. Others see it from `chunk_is_written` on."""
        sync(CHUNK_EMPTY + WARPGROUP, A_CONSUMER_AND_A_WARP)
        self.staging.index(WARPGROUP).store(dq)

    @gluon.jit
    def chunk_is_written(self, WARPGROUP: gl.constexpr):
        """Consumer: after a fence."""
        arrive(CHUNK_FULL + WARPGROUP, A_CONSUMER_AND_A_WARP)

    @gluon.jit
    def wait_chunk_written(self, WARPGROUP: gl.constexpr):
        """Reducer."""
        sync(CHUNK_FULL + WARPGROUP, A_CONSUMER_AND_A_WARP)

    @gluon.jit
    def chunk_is_free(self, WARPGROUP: gl.constexpr):
        """Reducer."""
        arrive(CHUNK_EMPTY + WARPGROUP, A_CONSUMER_AND_A_WARP)


@aggregate
class Scratch:
    """Where dQ grows: chunks of 64 x 64 fp32, rows padded as in gpu/rows.py, and a counter for each chunk.

    A block of queries of D 64 is two chunks of rows, one of D 128 two of columns: one for each consumer.
    """

    desc: tma.tensor_descriptor  # [chunks * CHUNK, CHUNK]
    ptr: gl.tensor
    counts: gl.tensor
    rows: gl.tensor  # of a head
    first_batch_head: gl.tensor  # KV heads of all batch entries that another launch had before
    skipped: gl.tensor  # their rows, of which there are none here

    @gluon.jit
    def first_row(self, seqlen, work, head):
        """The first row of a head of a sequence, among those of all heads."""
        if seqlen.IS_PACKED:
            return head * self.rows + (work.q_first + work.batch * PAD) // PAD * PAD
        else:
            return (work.batch * (seqlen.q_heads * seqlen.group) + head) * self.rows

    @gluon.jit
    def chunk(self, row, w, D: gl.constexpr):
        """The number of the w-th chunk of the block at `row`."""
        return (row - self.skipped) // CHUNK * (D // CHUNK) + w

    @gluon.jit
    def count(self, chunk):
        """Reducer: one more tile of keys has been added to a chunk, as soon as its addition is done."""
        asm: gl.constexpr = (
            "{ .reg .pred p; .reg .b32 l; cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 l, %laneid; "
            "setp.eq.u32 p, l, 0; @p red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }"
        )
        run_asm(asm, "=r,l", [(self.counts + chunk).to(gl.int64)])

    @gluon.jit
    def wait_for(self, chunk, tiles):
        """Until so many tiles of keys have been added to a chunk; for what is read or added by TMA after it."""
        place = (self.counts + chunk).to(gl.int64)
        relaxed: gl.constexpr = "ld.relaxed.gpu.global.b32 $0, [$1];"
        counted = run_asm(relaxed, "=r,l", [place])
        while counted < tiles:
            counted = run_asm(relaxed, "=r,l", [place])
        # What others wrote before they counted: no fence for that, which would wait for this warp's own stores.
        run_asm("ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [place])
        run_asm("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [])


@gluon.jit
def query_blocks(seqlen, work, BLOCK_M: gl.constexpr):
    """(lowest, one past the highest) block of queries that see keys of a tile; may be none."""
    offset = seqlen.offset_of(work)
    first = work.index * (2 * KEYS)
    low = work.q_len * 0
    high = (work.q_len + BLOCK_M - 1) // BLOCK_M
    if seqlen.HAS_RIGHT:  # row i sees key j if j <= i + offset + right
        low = gl.maximum(first - offset - seqlen.right, 0) // BLOCK_M
    if seqlen.HAS_LEFT:  # and if j >= i + offset - left
        last = gl.minimum(first + (2 * KEYS - 1), work.k_len - 1) + seqlen.left - offset
        high = gl.minimum(high, gl.maximum(last + BLOCK_M, 0) // BLOCK_M)
    return low, gl.maximum(high, low)


@gluon.jit
def key_tiles(seqlen, row, work, BLOCK_M: gl.constexpr):
    """(lowest, one past the highest) tile of keys for which `query_blocks` has the block at `row`; may be none."""
    TILE: gl.constexpr = 2 * KEYS
    offset = seqlen.offset_of(work)
    low = work.k_len * 0
    high = (work.k_len + TILE - 1) // TILE
    if seqlen.HAS_RIGHT:
        high = gl.minimum(high, gl.maximum(row + (BLOCK_M + TILE - 1) + offset + seqlen.right, 0) // TILE)
    if seqlen.HAS_LEFT:
        floor = gl.maximum(row + offset - seqlen.left, 0)
        low = gl.where(floor < work.k_len, floor // TILE, high)
    return low, gl.maximum(high, low)


@gluon.jit
def opaque_zero():
    """0, which nothing is computed ahead of a loop with: descriptors of tiles that stay would fill the registers."""
    return run_asm("mov.u32 $0, 0;", "=r", [])


@gluon.jit
def mask_pairs(x, seqlen, own, row, offset, k_len, FILL: gl.constexpr):
    """`FILL` where a query does not see a key: keys from `own`, of which there are `k_len`, by queries from `row`."""
    BLOCK_M: gl.constexpr = x.shape[1]
    is_partial = own + KEYS > k_len
    if seqlen.HAS_RIGHT:
        is_partial = is_partial | (row + offset + seqlen.right < own + (KEYS - 1))
    if seqlen.HAS_LEFT:
        is_partial = is_partial | (row + (BLOCK_M - 1) + offset - seqlen.left > own)
    if is_partial:
        key = own + gl.arange(0, KEYS, gl.SliceLayout(1, x.type.layout))
        query = row + offset + gl.arange(0, BLOCK_M, gl.SliceLayout(0, x.type.layout))
        visible = (key < k_len)[:, None]
        if seqlen.HAS_RIGHT:
            visible = visible & (key[:, None] <= (query + seqlen.right)[None, :])
        if seqlen.HAS_LEFT:
            visible = visible & (key[:, None] >= (query - seqlen.left)[None, :])
        x = gl.where(visible, x, FILL)
    return x


@gluon.jit
def queries_with_keys(seqlen, q_len, k_len, offset):
    """(first, one past the last) query that sees some key."""
    floor = q_len * 0
    limit = q_len
    if seqlen.HAS_RIGHT:
        floor = gl.maximum(-offset - seqlen.right, 0)
    if seqlen.HAS_LEFT:
        limit = gl.minimum(limit, k_len + seqlen.left - offset)
    return floor, limit


@gluon.jit
def issue_dq(WARPGROUP: gl.constexpr, d_scores, keys, BY_ROWS: gl.constexpr):
    """This warpgroup's chunk of dS K: its half of the queries, or of the columns."""
    if BY_ROWS:
        mine = d_scores.slice(WARPGROUP * CHUNK, CHUNK, dim=1)
        return issue(mine.permute((1, 0)), keys)
    else:
        mine = keys.slice(WARPGROUP * CHUNK, CHUNK, dim=1)
        return issue(d_scores.permute((1, 0)), mine)


@gluon.jit
def join_halves(a, b, LAYOUT: gl.constexpr):
    joined = gl.join(a, b).permute((0, 2, 1)).reshape([a.shape[0], 2 * a.shape[1]])
    return gl.convert_layout(joined, LAYOUT, assert_trivial=True)


@gluon.jit
def of_columns(elements, x):
    """Numbers of queries, as they stand beside the columns of a tile."""
    return gl.convert_layout(elements, gl.SliceLayout(0, x.type.layout), assert_trivial=True)[None, :]


@aggregate
class Tile:
    """Where a consumer's keys are, and what belongs to their current query head."""

    own: gl.tensor  # the first of its 64 keys
    q_len: gl.tensor
    k_len: gl.tensor
    offset: gl.tensor  # position of query 0 less that of key 0
    slope: gl.tensor  # ALiBi's
    key_words: gl.tensor  # dropout's: of the head's keys ...
    query_words: gl.tensor  # ... and of its queries

    @gluon.jit
    def mask_qk(self, seqlen, score_mod, qk, row):
        """-inf where a query does not see a key, if scores are products times a positive number: one select less."""
        if score_mod.SCALE_LATE and not score_mod.HAS_SOFTCAP:
            qk = mask_pairs(qk, seqlen, self.own, row, self.offset, self.k_len, float("-inf"))
        return qk

    @gluon.jit
    def probabilities(self, IS_PARTIAL: gl.constexpr, seqlen, score_mod, qk, lse, row, factor):
        """P of a piece of products, keys by queries from `row`. The sign of distances does not matter."""
        distance = self.own - row - self.offset + gl.arange(0, KEYS, gl.SliceLayout(1, qk.type.layout))
        s = score_mod.apply(qk, self.slope, distance)
        p = gl.exp2(s * factor - of_columns(lse, s))
        if IS_PARTIAL and (score_mod.HAS_SOFTCAP or not score_mod.SCALE_LATE):
            p = mask_pairs(p, seqlen, self.own, row, self.offset, self.k_len, 0.0)
        return computed_here(p)

    @gluon.jit
    def keep(self, score_mod, p, row):
        """Which elements of a piece dropout keeps."""
        key = self.own + gl.arange(0, KEYS, gl.SliceLayout(1, p.type.layout))
        query = row + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))
        of_keys = gl.load(self.key_words + key, mask=key < self.k_len, other=0)
        of_queries = gl.load(self.query_words + query, mask=query < self.q_len, other=0)
        return dropout_keep(of_keys, of_queries, score_mod.threshold)

    @gluon.jit
    def drop(self, score_mod, p, dp, row, dropout_scale):
        """P of a piece after dropout, and its gradient before dropout."""
        kept = p
        if score_mod.HAS_DROPOUT:
            keep = self.keep(score_mod, p, row)
            kept = gl.where(keep, p * dropout_scale, 0.0)
            dp = gl.where(keep, dp * dropout_scale, 0.0)
        return kept, dp

    @gluon.jit
    def grad_scores(self, score_mod, p, dp, lse, delta, row):
        """dS of a piece, of the products where scores are capped."""
        d_scores = p * (dp - of_columns(delta, dp))
        if score_mod.HAS_SOFTCAP:
            # The cap's tanh, from p: the products are gone. Where p is 0 there is no gradient anyway.
            s = log2(p) + of_columns(lse, p)
            if score_mod.HAS_ALIBI:
                distance = self.own - row - self.offset + gl.arange(0, KEYS, gl.SliceLayout(1, p.type.layout))
                s = subtract_alibi(s, self.slope * (-LOG2E), distance)
            capped = gl.minimum(gl.maximum(s * (1.0 / (score_mod.softcap * LOG2E)), -1.0), 1.0)
            d_scores = d_scores * (1.0 - capped * capped)
        return d_scores


@gluon.jit
def make_tile(seqlen, score_mod, work, own, head):
    """The tile of keys from `own`, with what belongs to a query head."""
    slope = score_mod.slope(work, head)
    key_words = score_mod.words_of_keys(work, head)
    query_words = score_mod.row_words
    if score_mod.HAS_DROPOUT:
        at = work.batch.to(gl.int64) * score_mod.stride_rb + head.to(gl.int64) * score_mod.stride_rh
        query_words += at + work.q_first
    return Tile(own, work.q_len, work.k_len, seqlen.offset_of(work), slope, key_words, query_words)


@aggregate
class Sum:
    """Where dK or dV is written: contiguous, `[B, Tk, Hkv, D]` or packed."""

    desc: tma.tensor_descriptor  # 64 rows of a head
    ptr: gl.tensor
    heads: gl.tensor
    D: gl.constexpr

    @gluon.jit
    def store(self, WARPGROUP: gl.constexpr, sums, memory, seqlen, work, own):
        """Write 64 rows through `memory`. The copy runs until it is waited for.

        fp32, of a shard and so of no pack, has no room there, and leaves from registers; so do rows of a pack behind
        which those of another sequence lie.
        """
        FP32: gl.constexpr = self.ptr.dtype.element_ty == gl.float32
        elements = sums.to(self.ptr.dtype.element_ty)
        first = work.k_first
        if FP32:
            first = work.batch.to(gl.int64) * work.k_len
        if FP32 or (seqlen.IS_PACKED and own + KEYS > work.k_len):
            key = gl.arange(0, KEYS, gl.SliceLayout(1, sums.type.layout))
            column = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
            line = ((first + own + key).to(gl.int64) * self.heads + work.head) * self.D
            inside = (own + key < work.k_len)[:, None] & (column < self.D)[None, :]
            gl.store(self.ptr + line[:, None] + column[None, :], elements, mask=inside)
        else:
            place = as_tiles_of(self.desc, memory, 2).index(WARPGROUP)
            place.reshape([KEYS, sums.shape[1]]).store(elements)
            fence_async_shared()
            tma_store(self.desc, [seqlen.entry(work), work.k_first + own, work.head, 0], place)


@gluon.jit
def _block(
    WARPGROUP: gl.constexpr, IS_PARTIAL: gl.constexpr, part, seqlen, score_mod, smem, tile, dk, dv, q_iter, began, i,
    dropout_scale,
):  # fmt: skip
    """A block of queries: take it into dK and dV, write its dS, and leave the dQ of the block before."""
    queries = smem.queries
    grads = smem.grads
    BLOCK_M: gl.constexpr = queries.tiles.shape[2]
    D: gl.constexpr = queries.tiles.shape[4]
    dtype: gl.constexpr = queries.tiles.dtype
    HALF: gl.constexpr = BLOCK_M // 2
    S_TILE: gl.constexpr = accumulator(BLOCK_M)
    P_TILE: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    OF_HALF: gl.constexpr = gl.SliceLayout(0, accumulator(HALF))
    row = i * BLOCK_M
    factor = score_mod.factor()
    z = opaque_zero()
    slot = q_iter % queries.SLOTS
    q = queries.matrix(slot)
    do = grads.matrix(slot)
    k = smem.keys.index(z).reshape([2 * KEYS, D])
    own_k = k.slice(WARPGROUP * KEYS, KEYS, dim=0)
    own_v = smem.values.index(z).reshape([2 * KEYS, D]).slice(WARPGROUP * KEYS, KEYS, dim=0)
    lses = smem.lses.index(slot)
    deltas = smem.deltas.index(slot)

    if IS_PARTIAL:
        smem.wait_queries(part, seqlen, tile, q, do, q_iter, row)
    else:
        queries.wait_full(q_iter)
    s_issued = issue(own_k, q.permute((1, 0)))
    # Before the wait: else every exponential queues behind the other consumer's traffic in shared memory.
    if part.CONFIG.halves:
        lse_a = lses.slice(0, HALF).load(OF_HALF)
    else:
        lse = lses.load(gl.SliceLayout(0, S_TILE))
    grads.wait_full(q_iter)
    dp_issued = issue(own_v, do.permute((1, 0)))
    s = warpgroup_mma_wait(1, deps=(s_issued,))
    if IS_PARTIAL:
        s = tile.mask_qk(seqlen, score_mod, s, row)
    if part.CONFIG.halves:
        lse_b = lses.slice(HALF, HALF).load(OF_HALF)
        s_a, s_b = halves(s)
        p_a = tile.probabilities(IS_PARTIAL, seqlen, score_mod, s_a, lse_a, row, factor)
        p_b = tile.probabilities(IS_PARTIAL, seqlen, score_mod, s_b, lse_b, row + HALF, factor)
        delta_a = deltas.slice(0, HALF).load(OF_HALF)
        grads.wait_full(q_iter)  # once more: the assembler does not move the next wait before this one
        dp = warpgroup_mma_wait(0, deps=(dp_issued,))
        delta_b = deltas.slice(HALF, HALF).load(OF_HALF)
        dp_a, dp_b = halves(dp)
        kept_a, dp_a = tile.drop(score_mod, p_a, dp_a, row, dropout_scale)
        kept_b, dp_b = tile.drop(score_mod, p_b, dp_b, row + HALF, dropout_scale)
        ds_a = tile.grad_scores(score_mod, p_a, dp_a, lse_a, delta_a, row).to(dtype)
        ds_b = tile.grad_scores(score_mod, p_b, dp_b, lse_b, delta_b, row + HALF).to(dtype)
        ds = join_halves(ds_a, ds_b, S_TILE)
        if not score_mod.HAS_SOFTCAP:  # which leaves no registers for all of it
            ds = computed_here(ds)
        # After dS: P and dP make room for what becomes of them.
        kept = join_halves(kept_a.to(dtype), kept_b.to(dtype), S_TILE)
        p_operand = gl.convert_layout(kept, P_TILE, assert_trivial=True)
    else:
        p = tile.probabilities(IS_PARTIAL, seqlen, score_mod, s, lse, row, factor)
        grads.wait_full(q_iter)  # once more: the assembler does not move the next wait before this one
        dp = warpgroup_mma_wait(0, deps=(dp_issued,))
        kept, dp = tile.drop(score_mod, p, dp, row, dropout_scale)
        p_operand = gl.convert_layout(computed_here(kept.to(dtype)), P_TILE, assert_trivial=True)
        delta = deltas.load(gl.SliceLayout(0, S_TILE))
        ds = computed_here(tile.grad_scores(score_mod, p, dp, lse, delta, row).to(dtype))

    dv_issued = warpgroup_mma(p_operand, do, dv, use_acc=True, is_async=True)
    d_scores = gl.convert_layout(ds, P_TILE, assert_trivial=True)
    sync(HALF_READY + 2 * (1 - WARPGROUP) + ((q_iter + 1) & 1), BOTH)
    dq_issued = issue_dq(WARPGROUP, smem.d_scores.index((q_iter + 1) & 1), k, BLOCK_M == 2 * CHUNK)
    dk_issued = warpgroup_mma(d_scores, q, dk, use_acc=True, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_issued,))
    grads.release(q_iter)
    dq = warpgroup_mma_wait(1, deps=(dq_issued,))
    smem.d_scores.index(q_iter & 1).slice(WARPGROUP * KEYS, KEYS, dim=0).store(ds)
    if q_iter > began:
        smem.leave_chunk(WARPGROUP, dq)
    fence_async_shared()
    arrive(HALF_READY + 2 * WARPGROUP + (q_iter & 1), BOTH)
    if q_iter > began:
        smem.chunk_is_written(WARPGROUP)
    dk = warpgroup_mma_wait(0, deps=(dk_issued,))
    queries.release(q_iter)
    return dk, dv


@gluon.jit
def consume(WARPGROUP: gl.constexpr, part, seqlen, score_mod, channel, smem, dk_sum, dv_sum, dropout_scale):
    """64 keys of every tile."""
    BLOCK_M: gl.constexpr = smem.queries.tiles.shape[2]
    D: gl.constexpr = smem.queries.tiles.shape[4]
    IS_PARTIAL: gl.constexpr = seqlen.MASKS_BLOCKS and not part.CONFIG.peel
    q_iter = 0
    tile_iter = 0
    work = channel.receive(0)
    while work.is_valid():
        # Prologue.
        first = work.index * (2 * KEYS)
        own = first + WARPGROUP * KEYS
        low, high = query_blocks(seqlen, work, BLOCK_M)
        dk = gl.zeros((KEYS, D), gl.float32, accumulator(D))
        dv = gl.zeros((KEYS, D), gl.float32, accumulator(D))
        arrive(HALF_READY + 2 * WARPGROUP + ((q_iter + 1) & 1), BOTH)  # for dS of the block before the first
        smem.wait_keys(part, seqlen, work, tile_iter)
        began = q_iter

        # Main loop.
        for g in range(seqlen.group):
            tile = make_tile(seqlen, score_mod, work, own, work.head * seqlen.group + g)
            first_full = low
            if part.CONFIG.peel:  # rows from here on see all keys of the tile, if it has all
                first_full = first + (2 * KEYS - 1) - seqlen.offset_of(work) - seqlen.right + (BLOCK_M - 1)
                first_full = gl.minimum(gl.maximum(gl.maximum(first_full, 0) // BLOCK_M, low), high)
                if first + 2 * KEYS > work.k_len:
                    first_full = high
                for i in range(low, first_full):
                    dk, dv = _block(
                        WARPGROUP, True, part, seqlen, score_mod, smem, tile, dk, dv, q_iter, began, i, dropout_scale
                    )
                    q_iter += 1
            for i in range(first_full, high):
                dk, dv = _block(
                    WARPGROUP, IS_PARTIAL, part, seqlen, score_mod, smem, tile, dk, dv, q_iter, began, i, dropout_scale
                )
                q_iter += 1

        # Epilogue: dQ of the last block. Then dK and dV leave through the memory of K and V, when both consumers have
        # read it for the last time.
        sync(HALF_READY + 2 * (1 - WARPGROUP) + ((q_iter + 1) & 1), BOTH)
        if q_iter > began:
            k = smem.keys.index(opaque_zero()).reshape([2 * KEYS, D])
            dq_issued = issue_dq(WARPGROUP, smem.d_scores.index((q_iter + 1) & 1), k, BLOCK_M == 2 * CHUNK)
            dq = warpgroup_mma_wait(0, deps=(dq_issued,))
            smem.leave_chunk(WARPGROUP, dq)
            fence_async_shared()
            smem.chunk_is_written(WARPGROUP)
        next_work = channel.receive(tile_iter + 1)
        smem.wait_both_read(tile_iter)
        dk_sum.store(WARPGROUP, dk * score_mod.scale, smem.keys, seqlen, work, own)
        dv_sum.store(WARPGROUP, dv, smem.values, seqlen, work, own)
        smem.release_keys()
        tile_iter += 1
        work = next_work
