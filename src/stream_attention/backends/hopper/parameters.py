"""The parameters of a launch, in groups: warpgroups, sequence lengths and windows, score modifications, epilogue."""

# No `from __future__ import annotations`: aggregates check the types of their fields by these very annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...gpu.arguments import UNIT as ELEMENTS_OF_A_UNIT
from .tiles import LOG2E, packed_rows, subtract_alibi, tanh
from .versions import aggregate, as_tile_of, tma_store

UNIT = gl.constexpr(ELEMENTS_OF_A_UNIT)


@aggregate
class WarpgroupConfig:
    """The consumers: GluonConfig has the words."""

    WARPGROUPS: gl.constexpr
    IN_TURN: gl.constexpr
    RESCALE_LATE: gl.constexpr
    KEYS_FIRST: gl.constexpr


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
    MASKS_BEYOND_FIRST_BLOCK: gl.constexpr  # not only a warpgroup's first block may be partially masked
    LOADS_MASKED_KV: gl.constexpr  # TMA loads rows of V that are masked for every query

    @gluon.jit
    def sequences(self, batch_head):
        """(batch entry, head, first row and length of the queries, of the keys) of a line."""
        batch = batch_head // self.q_heads
        head = batch_head - batch * self.q_heads
        if self.IS_PACKED:
            q_first, q_len = packed_rows(self.cu_q + batch, self.q_rows)
            k_first, k_len = packed_rows(self.cu_k + batch, self.k_rows)
            return batch, head, q_first, q_len, k_first, k_len
        else:
            zero = self.q_len * 0
            return batch, head, zero, self.q_len, zero, self.k_len

    @gluon.jit
    def offset_of(self, q_len, k_len):
        """Position of query 0 less that of key 0: the last ones of a packed sequence stand at the same place."""
        if self.IS_PACKED:
            return k_len - q_len
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
    BY_TMA: gl.constexpr  # through the shared memory of the queries, else from registers
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
