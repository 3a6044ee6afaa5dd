"""The vocabulary of decoding in Gluon. A program is one warp, with up to eight rows: the queries of all heads that
share a KV head, head by head.

Scores are [rows, keys], of which instructions compute 16 rows and the upper eight are kept, and outputs are [channels,
rows]: what a lane holds of the weights is then what it needs of them as the second factor, and nothing moves between
lanes. How parts are left, and what the launch is, is told in gpu/decode_tiles.py and decode_call.py.
"""

# No `from __future__ import annotations`: aggregates check the types of their fields by these very annotations.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .tiles import LOG2E, run_asm, tanh
from .versions import aggregate

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
FIRST = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
SECOND = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))


@gluon.jit
def wait_for_kernels_ahead():
    """As in gpu/decode_tiles.py."""
    run_asm("griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [])


@gluon.jit
def upper(x):
    """The upper eight rows of sixteen."""
    first, _ = gl.split(x.reshape([2, 8, x.shape[1]]).permute((1, 2, 0)))
    return first


@gluon.jit
def by_row(x):
    """[rows], as scores have them, against outputs."""
    return gl.convert_layout(x, gl.SliceLayout(0, MMA))[None, :]


@gluon.constexpr_function
def swizzled(width):
    """Rows of `width` numbers of 16 bits, 16 bytes of which eight rows are read at a time from different banks."""
    per_phase = max(1, 64 // width)
    return gl.SwizzledSharedLayout(8, per_phase, 8 // per_phase, [1, 0])


@gluon.constexpr_function
def copied(width):
    """How lanes copy such rows, 16 bytes each."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [1, 1], [1, 0])


@aggregate
class Rows:
    """The rows of a program: where their queries are, what modifies and hides their scores, and where their part is
    left."""

    queries: gl.tensor  # of the batch entry
    stride_qm: gl.tensor
    stride_qh: gl.tensor
    kv_head: gl.tensor
    q_len: gl.tensor
    length: gl.tensor  # of the cache, whose last tokens are those of the queries
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    slopes: gl.tensor  # ALiBi's, of the heads that share the KV head
    tree: gl.tensor  # of the batch entry
    stride_rm: gl.tensor
    lses: gl.tensor  # of all parts ...
    outs: gl.tensor
    at: gl.tensor  # ... and the first of this one
    GROUP: gl.constexpr
    DV: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_TREE: gl.constexpr
    HAS_ALIBI: gl.constexpr
    HAS_SOFTCAP: gl.constexpr
    TANH: gl.constexpr

    @gluon.jit
    def load(self, first, WIDTH: gl.constexpr):
        """Columns of the queries from `first` on, as a first factor: sixteen rows, those that are none 0."""
        r = gl.arange(0, 16, layout=gl.SliceLayout(1, FIRST))
        c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, FIRST))
        of_rows = (self.kv_head * self.GROUP + r // self.q_len) * self.stride_qh + r % self.q_len * self.stride_qm
        at = self.queries + of_rows[:, None] + (first + c)[None, :]
        return gl.load(at, mask=((r < 8) & (r < self.GROUP * self.q_len))[:, None], other=0.0)

    @gluon.jit
    def store_partial(self, acc, row_max, row_sum, first, LSE: gl.constexpr):
        """Leave outputs [channels, rows] of the channels from `first` on, and LSEs, as a part."""
        rows = self.GROUP * self.q_len
        visible = row_sum != 0  # NaN is: what a row sees shows
        r = gl.arange(0, 8, layout=gl.SliceLayout(0, MMA))
        c = first + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, MMA))
        out = acc / by_row(gl.where(visible, row_sum, 1.0))
        gl.store(self.outs + (self.at + r)[None, :] * self.DV + c[:, None], out, mask=(r < rows)[None, :])
        if LSE:
            lse = gl.where(visible, row_max + gl.log2(row_sum), float("-inf"))
            r = gl.arange(0, 8, layout=row_sum.type.layout)
            gl.store(self.lses + self.at + r, lse, mask=r < rows)


@aggregate
class ScoreRows:
    """Rows as they lie beside a tile of scores."""

    rows: Rows
    exist: gl.tensor
    positions: gl.tensor
    slopes: gl.tensor
    tree: gl.tensor  # the line of each row

    @gluon.jit
    def modify(self, qk, scale, k_pos):
        """Scores in log2 units from q . k, a scale per row."""
        rows = self.rows
        if rows.HAS_SOFTCAP:
            scores = tanh(qk * (scale / rows.softcap), rows.TANH) * (rows.softcap * LOG2E)
        else:
            scores = qk * (scale * LOG2E)
        if rows.HAS_ALIBI:
            scores -= self.slopes * LOG2E * gl.abs(self.positions - k_pos).to(gl.float32)
        return scores

    @gluon.jit
    def hide(self, scores, inside, k_pos):
        """As gpu/decode_tiles.py, hide_scores."""
        rows = self.rows
        visible = inside
        if rows.HAS_RIGHT:
            visible = visible & (k_pos <= self.positions + rows.right)
        if rows.HAS_LEFT:
            visible = visible & (k_pos >= self.positions - rows.left)
        if rows.HAS_TREE:
            new = k_pos - (rows.length - rows.q_len)
            there = self.exist & inside & (new >= 0)
            seen = gl.load(self.tree + new, mask=there, other=1) != 0
            visible = visible & self.exist & (self.positions >= 0) & seen
        return gl.where(visible, scores, float("-inf"))


@gluon.jit
def beside_scores(rows, LAYOUT: gl.constexpr):
    """Which rows exist, where they stand, their slopes, and their lines of the tree."""
    r = gl.arange(0, 8, layout=LAYOUT)
    exist = (r < rows.GROUP * rows.q_len)[:, None]
    positions = (rows.length - rows.q_len + r % rows.q_len)[:, None]
    slopes = rows.scale
    if rows.HAS_ALIBI:
        slopes = gl.load(rows.slopes + r // rows.q_len, mask=r < rows.GROUP * rows.q_len, other=0.0)
        slopes = slopes.to(gl.float32)[:, None]
    tree = positions
    if rows.HAS_TREE:
        tree = rows.tree + (r % rows.q_len * rows.stride_rm)[:, None]
    return ScoreRows(rows, exist, positions, slopes, tree)


@gluon.jit
def softmax_step(scores, lift, row_max, row_sum, GUARD: gl.constexpr):
    """A step of the online softmax. A weight is relative to the largest score so far plus its tile's `lift`. GUARD: a
    row may have seen nothing."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) + lift)
    finite = new_max
    if GUARD:
        finite = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(scores - finite[:, None])
    rescale = gl.exp2(row_max - finite)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)
