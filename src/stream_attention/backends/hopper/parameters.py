"""The parameters of a launch, in groups: sequence lengths and windows, score modifications, epilogue."""

# No `from __future__ import annotations`: aggregates check the types of their fields by these very annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from .scheduler import WorkTile
from .tiles import LOG2E, ROWS, UNIT, packed_rows, subtract_alibi, tanh
from .versions import aggregate, as_tile_of, tma_store


@aggregate
class SeqlenInfo:
    """The facts of a launch that every role reads."""

    q_heads: gl.tensor
    group: gl.tensor  # query heads per KV head
    q_len: gl.tensor
    k_len: gl.tensor
    offset: gl.tensor  # of a call without a pack
    left: gl.tensor
    right: gl.tensor
    cu_q: gl.tensor
    cu_k: gl.tensor
    q_rows: gl.tensor  # of the pack
    k_rows: gl.tensor
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    IS_PACKED: gl.constexpr
    MASKS_BLOCKS: gl.constexpr  # blocks may be partially masked; of a forward not only a warpgroup's first
    LOADS_MASKED_ROWS: gl.constexpr  # TMA loads rows that take part in nothing and that may be NaN

    @gluon.jit
    def work_tile(self, index, batch_head):
        """A tile of one head of one batch entry."""
        batch = batch_head // self.q_heads
        head = batch_head - batch * self.q_heads
        if self.IS_PACKED:
            q_first, q_len = packed_rows(self.cu_q + batch, self.q_rows)
            k_first, k_len = packed_rows(self.cu_k + batch, self.k_rows)
            return WorkTile(index, batch, head, q_first, q_len, k_first, k_len)
        else:
            zero = self.q_len * 0
            return WorkTile(index, batch, head, zero, self.q_len, zero, self.k_len)

    @gluon.jit
    def entry(self, work):
        """The batch entry of descriptors and strides: a pack is one."""
        if self.IS_PACKED:
            return work.batch * 0
        else:
            return work.batch

    @gluon.jit
    def offset_of(self, work):
        """Position of query 0 less that of key 0: the last ones of a packed sequence stand at the same place."""
        if self.IS_PACKED:
            return work.k_len - work.q_len
        else:
            return self.offset

    @gluon.jit
    def blocks(self, first, last, k_len, offset, BLOCK_N: gl.constexpr):
        """(lowest, one past the highest) block of keys that rows `first` to `last` see; at least one."""
        low = k_len * 0
        if self.HAS_LEFT:
            low = gl.maximum(first + offset - self.left, 0) // BLOCK_N
        end = k_len
        if self.HAS_RIGHT:
            end = gl.minimum(k_len, last + offset + self.right + 1)
        return low, gl.maximum((end + BLOCK_N - 1) // BLOCK_N, low + 1)

    @gluon.jit
    def own_blocks(self, index, work, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr):
        """(first row of a warpgroup in tile `index`, lowest and one past the highest block of keys that the tile sees,
        how many of them other warpgroups see and this one does not)."""
        first = index * (WARPGROUPS * ROWS)
        offset = self.offset_of(work)
        low, high = self.blocks(first, first + (WARPGROUPS * ROWS - 1), work.k_len, offset, BLOCK_N)
        row = first + WARPGROUP * ROWS
        skipped = work.k_len * 0
        if self.HAS_RIGHT:
            _, own_high = self.blocks(row, row + (ROWS - 1), work.k_len, offset, BLOCK_N)
            skipped = gl.maximum(high - own_high, 0)
        return row, low, high, skipped

    @gluon.jit
    def visible_keys(self, q_len, k_len, offset):
        """(first, one past the last) key that some query of a sequence sees."""
        floor = k_len * 0
        limit = k_len
        if self.HAS_LEFT:
            floor = gl.maximum(offset - self.left, 0)
        if self.HAS_RIGHT:
            limit = gl.minimum(limit, q_len + offset + self.right)
        return floor, limit

    @gluon.jit
    def key_range(self, first, rows, k_len, offset):
        """The keys that the rows of a warpgroup from `first` on see, which `rows` numbers."""
        limit = gl.zeros_like(rows) + k_len
        full_limit = k_len
        if self.HAS_RIGHT:
            limit = gl.minimum(limit, (first + offset + self.right + 1) + rows)
            full_limit = gl.minimum(k_len, first + offset + self.right + 1)
        floor = limit
        full_floor = k_len
        if self.HAS_LEFT:
            floor = (first + offset - self.left) + rows
            full_floor = first + (ROWS - 1) + offset - self.left
        return KeyRange(limit, floor, full_limit, full_floor, self.HAS_LEFT)


@aggregate
class KeyRange:
    """The keys that some rows see, and the range that all of them see."""

    limit: gl.tensor  # of each row: one past the last key that it sees
    floor: gl.tensor  # and the first, where there is a left edge
    full_limit: gl.tensor  # one past the last key that all rows see
    full_floor: gl.tensor
    HAS_LEFT: gl.constexpr

    @gluon.jit
    def cuts(self, start, BLOCK_N: gl.constexpr):
        """Whether some row does not see some key of the block from `start` on."""
        is_cut = start + BLOCK_N > self.full_limit
        if self.HAS_LEFT:
            is_cut = is_cut | (start < self.full_floor)
        return is_cut

    @gluon.jit
    def mask(self, scores, start, columns):
        """-inf where a row does not see a key of the block from `start` on."""
        visible = (start + columns)[None, :] < self.limit[:, None]
        if self.HAS_LEFT:
            visible = visible & ((start + columns)[None, :] >= self.floor[:, None])
        return gl.where(visible, scores, float("-inf"))

    @gluon.jit
    def mask_where_cut(self, scores, start, columns):
        """The same, for which most blocks pay one branch."""
        if self.cuts(start, scores.shape[1]):
            scores = self.mask(scores, start, columns)
        return scores


@aggregate
class ScoreMod:
    """What is done to the products q . k, and where its operands are."""

    scale: gl.tensor
    softcap: gl.tensor
    slopes: gl.tensor
    stride_ab: gl.tensor
    row_words: gl.tensor
    stride_rb: gl.tensor
    stride_rh: gl.tensor
    col_words: gl.tensor
    stride_cb: gl.tensor
    stride_ch: gl.tensor
    threshold: gl.tensor
    HAS_SOFTCAP: gl.constexpr
    HAS_ALIBI: gl.constexpr
    HAS_DROPOUT: gl.constexpr
    TANH: gl.constexpr
    SCALE_LATE: gl.constexpr  # the softmax multiplies scores by `factor`, in the instruction that subtracts the row max

    @gluon.jit
    def apply(self, qk, slope, distance):
        """The scores of a tile of products, in log2 units; by `factor` less where `SCALE_LATE`.

        `distance`: of each row from the first key of the tile.
        """
        scores = qk
        if self.HAS_SOFTCAP:
            scores = tanh(qk * (self.scale / self.softcap), self.TANH)
            if not self.SCALE_LATE:
                scores = scores * (self.softcap * LOG2E)
        elif not self.SCALE_LATE:
            scores = qk * (self.scale * LOG2E)
        if self.HAS_ALIBI:
            scores = subtract_alibi(scores, slope * LOG2E, distance)
        return scores

    @gluon.jit
    def slope(self, work, head):
        """ALiBi's, of a query head; else some number, unread."""
        slope = self.scale * 0.0
        if self.HAS_ALIBI:
            slope = gl.load(self.slopes + work.batch * self.stride_ab + head).to(gl.float32)
        return slope

    @gluon.jit
    def words_of_keys(self, work, head):
        """Where dropout's words of a sequence's keys are, for a query head."""
        words = self.col_words
        if self.HAS_DROPOUT:
            words += work.batch.to(gl.int64) * self.stride_cb + head.to(gl.int64) * self.stride_ch + work.k_first
        return words

    @gluon.jit
    def factor(self):
        """What the softmax multiplies scores with."""
        if not self.SCALE_LATE:
            return self.scale * 0.0 + 1.0
        elif self.HAS_SOFTCAP:
            return self.softcap * LOG2E
        else:
            return self.scale * LOG2E


@aggregate
class Epilogue:
    """What the sums become, and where it is written."""

    o_desc: tma.tensor_descriptor
    out: gl.tensor
    stride_ob: gl.tensor  # in units of 8 elements, so that the compiler knows rows to be aligned
    stride_om: gl.tensor
    stride_oh: gl.tensor
    lse: gl.tensor
    stride_lb: gl.tensor
    stride_lh: gl.tensor
    write_lse: gl.tensor
    sink: gl.tensor
    dropout_scale: gl.tensor
    DV: gl.constexpr
    HAS_SINK: gl.constexpr
    STATES: gl.constexpr  # warpgroups with a place for the state of other keys that they join; 0: nobody joins one

    @gluon.constexpr_function
    def borrowed(self, WARPGROUPS):
        """Slots of keys that every tile takes for states without a place of their own, one at most."""
        return WARPGROUPS - self.STATES if self.STATES > 0 else 0

    @gluon.jit
    def store_by_tma(self, out, place, entry, row, head, column=0):
        """Write a whole tile through `place`, in shared memory. The copy runs until it is waited for."""
        place = as_tile_of(self.o_desc, place)
        place.reshape([out.shape[0], out.shape[1]]).store(out.to(self.o_desc.dtype))
        fence_async_shared()
        tma_store(self.o_desc, [entry, row, head, column], place)

    @gluon.jit
    def store_from_registers(self, out, entry, row, head, rows_left, first_column: gl.constexpr = 0):
        """Write the first `rows_left` rows of a tile."""
        batch_head = gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
        column = first_column + gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
        units = entry.to(gl.int64) * self.stride_ob + head * self.stride_oh
        units += (row + batch_head).to(gl.int64) * self.stride_om
        inside = (batch_head < rows_left)[:, None] & (column < self.DV)[None, :]
        pointers = self.out + units[:, None] * UNIT + column[None, :]
        gl.store(pointers, out.to(self.out.dtype.element_ty), mask=inside)

    @gluon.jit
    def store(self, out, place, seqlen, work, row, first_column: gl.constexpr = 0):
        """Write a tile whose first row is `row`: through `place` by TMA, if that writes no rows of others."""
        entry = seqlen.entry(work)
        if seqlen.IS_PACKED:
            if row + out.shape[0] <= work.q_len:
                self.store_by_tma(out, place, entry, work.q_first + row, work.head, first_column)
            else:
                self.store_from_registers(out, entry, work.q_first + row, work.head, work.q_len - row, first_column)
        else:
            self.store_by_tma(out, place, entry, row, work.head, first_column)

    @gluon.jit
    def store_lse(self, lse, seqlen, work, row, rows):
        """Write the LSE of the rows from `row` on, which `rows` numbers."""
        entry = seqlen.entry(work)
        line = self.lse + entry.to(gl.int64) * self.stride_lb + work.head.to(gl.int64) * self.stride_lh
        gl.store(line + (work.q_first + row) + rows, lse, mask=row + rows < work.q_len)

    @gluon.jit
    def previous_lse(self, rows, entry, row, head, rows_left):
        """Of a state that is there already; that of rows beyond is empty."""
        batch_head = self.lse + entry.to(gl.int64) * self.stride_lb + head.to(gl.int64) * self.stride_lh
        return gl.load(batch_head + row + rows, mask=rows < rows_left, other=-float("inf"))

    @gluon.jit
    def previous(self, place, lse, layout: gl.constexpr):
        """The sums that are there already, from shared memory. What an empty state holds is not looked at."""
        sums = place.reshape([place.shape[1], place.shape[3]]).load(layout)
        some = gl.convert_layout(lse != -float("inf"), gl.SliceLayout(1, layout), assert_trivial=True)
        return gl.where(some[:, None], sums, 0.0)
