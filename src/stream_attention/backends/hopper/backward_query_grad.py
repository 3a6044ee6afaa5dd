"""How dQ leaves the consumers of backward_sm90.py: reducers add it to the scratch, finishers take it out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .backward_block import CHUNK, key_tiles, query_blocks
from .tiles import UNIT
from .versions import as_tiles_of, tma_add, tma_load


@gluon.jit
def reducer(WARPGROUP: gl.constexpr, part, seqlen, channel, smem, scratch, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """Add the chunks of dQ that a consumer leaves in shared memory to the scratch."""
    smem.chunk_is_free(WARPGROUP)
    tile_iter = 0
    work = channel.receive(0, 1)
    while work.is_valid():
        low, high = query_blocks(seqlen, work, BLOCK_M)
        for g in range(seqlen.group):
            at = scratch.first_row(seqlen, work, work.head * seqlen.group + g)
            for i in range(low, high):
                chunk = scratch.chunk(at + i * BLOCK_M, WARPGROUP, D)
                if part.ORDERED:
                    _, n_high = key_tiles(seqlen, i * BLOCK_M, work, BLOCK_M)
                    scratch.wait_for(chunk, n_high - 1 - work.index)
                smem.wait_chunk_written(WARPGROUP)
                tma_add(scratch.desc, [chunk * CHUNK, 0], smem.staging.index(WARPGROUP))
                tma.store_wait(pendings=0)  # it has been read
                smem.chunk_is_free(WARPGROUP)
                scratch.count(chunk)
        tile_iter += 1
        work = channel.receive(tile_iter, 1)


@gluon.jit
def finisher(
    FINISHER: gl.constexpr, FINISHERS: gl.constexpr, part, seqlen, scheduler, smem, scratch, dq_ptr, scale,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Take the chunks of dQ to which every key tile has added out of the scratch, with one or two places to land."""
    CHUNKS: gl.constexpr = BLOCK_M * BLOCK_D // (CHUNK * CHUNK)  # of a block: 2 or 4
    PLACES: gl.constexpr = smem.landed.shape[0] // FINISHERS
    MINE: gl.constexpr = FINISHER * PLACES
    q_heads = seqlen.q_heads * seqlen.group  # what it calls heads of queries are those of keys here
    q_iter = 0
    item = gl.program_id(0) + FINISHER * gl.num_programs(0)
    items = scheduler.count()
    while item < items:
        if seqlen.IS_PACKED:
            work = scheduler.work_tile(seqlen, item, items)
            block = work.index * BLOCK_M
        else:
            batch_head, m = scheduler.place(item)
            block = (scheduler.tiles_m - 1 - m) * BLOCK_M  # causal: the first rows are finished first
            work = seqlen.work_tile(m, scratch.first_batch_head + batch_head)
        if block < work.q_len:
            low, high = key_tiles(seqlen, block, work, BLOCK_M)
            first = work.q_first.to(gl.int64)
            if not seqlen.IS_PACKED:
                first += work.batch.to(gl.int64) * work.q_len
            for g in range(seqlen.group):
                head = work.head * seqlen.group + g
                chunk = scratch.chunk(scratch.first_row(seqlen, work, head) + block, 0, BLOCK_D)
                for pair in range(CHUNKS // PLACES):
                    for w in gl.static_range(PLACES):  # both are on their way while the first is converted
                        if part.IS_ALL:
                            scratch.wait_for(chunk + w, high - low)
                        landed = smem.landed.index(MINE + w)
                        mbarrier.expect(landed, scratch.desc.block_type.nbytes)
                        place = as_tiles_of(scratch.desc, smem.landing, FINISHERS * PLACES).index(MINE + w)
                        tma_load(scratch.desc, [(chunk + w) * CHUNK, 0], landed, place)
                    for w in range(PLACES):
                        mbarrier.wait(smem.landed.index(MINE + w), q_iter & 1)
                        row = block
                        column = work.k_len * 0
                        if BLOCK_M == 2 * CHUNK:
                            row += (pair * PLACES + w) * CHUNK
                        else:
                            column += (pair * PLACES + w) * CHUNK
                        corner = dq_ptr + ((first + row) * q_heads + head) * (D // UNIT) * UNIT + column
                        stride = q_heads * (D // UNIT)
                        if part.IS_ALL:
                            _convert_rows(smem, MINE + w, corner, work.q_len - row, D - column, stride, scale)
                        else:
                            _convert_registers(smem, MINE + w, corner, work.q_len - row, D - column, stride, scale)
                    q_iter += 1
                    chunk += PLACES
        item += FINISHERS * gl.num_programs(0)


@gluon.jit
def _convert_rows(smem, place, corner, rows_left, columns_left, stride, scale):
    """Scale, convert and store a landed chunk. TMA leaves it by halves of the columns, 8 rows of one in a piece."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    PIECES: gl.constexpr = 2 * CHUNK // 8
    of_rows = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
    of_columns = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    for piece in range(PIECES):
        elements = smem.landing.index(place * PIECES + piece).load(LAYOUT) * scale
        rows = piece % (CHUNK // 8) * 8 + of_rows
        columns = piece // (CHUNK // 8) * 32 + of_columns
        inside = (rows < rows_left)[:, None] & (columns < columns_left)[None, :]
        to = corner + (rows * stride * UNIT)[:, None] + columns[None, :]
        gl.store(to, elements.to(corner.dtype.element_ty), mask=inside)


@gluon.jit
def _convert_registers(smem, place, corner, rows_left, columns_left, stride, scale):
    """The same for a chunk in the order in which backward_wide.py added it: sixteen numbers are four times two of a
    row and two of the eighth row after it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [1, 1], [1, 0])
    PIECES: gl.constexpr = CHUNK // 8
    for piece in range(PIECES):
        elements = smem.landing.index(place * PIECES + piece).load(LAYOUT) * scale
        folded = elements.reshape([16, 2, 4, 2, 2]).permute((0, 1, 2, 4, 3))
        upper, lower = gl.split(folded)
        upper = upper.reshape([16, 2, 8])
        lower = lower.reshape([16, 2, 8])
        layout: gl.constexpr = upper.type.layout
        i = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        h = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        e = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        run = (piece % (CHUNK // 16) * 64 + piece // (CHUNK // 16) * 2) + 4 * i[:, None] + h[None, :]
        rows = run // 8 % 4 * 16 + run % 8
        columns = (run // 32 * 8)[:, :, None] + e[None, None, :]
        to = corner + (rows * stride * UNIT)[:, :, None] + columns
        inside = columns < columns_left
        gl.store(to, upper.to(corner.dtype.element_ty), mask=inside & (rows < rows_left)[:, :, None])
        to += 8 * stride * UNIT
        gl.store(to, lower.to(corner.dtype.element_ty), mask=inside & (rows + 8 < rows_left)[:, :, None])
