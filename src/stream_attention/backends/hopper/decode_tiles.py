"""The vocabulary of decoding in Gluon. A program is one warp, with up to eight rows: the queries of all heads that
share a KV head, head by head.

Scores are [rows, keys], of which instructions compute 16 rows and the upper eight are kept, and outputs are [channels,
rows]: what a lane holds of the weights is then what it needs of them as the second factor, and nothing moves between
lanes. How parts are left, and what the launch is, is told in gpu/decode_tiles.py and decode_call.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .tiles import LOG2E, tanh

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
FIRST = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
SECOND = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))


@gluon.jit
def wait_for_kernels_ahead():
    """As in gpu/decode_tiles.py."""
    asm: gl.constexpr = "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


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


@gluon.jit
def modify(
    qk, scale, softcap, slopes, q_pos, k_pos,
    SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, TANH: gl.constexpr,
):  # fmt: skip
    """Scores in log2 units from q . k, a scale per row."""
    if SOFTCAP:
        scores = tanh(qk * (scale / softcap), TANH) * (softcap * LOG2E)
    else:
        scores = qk * (scale * LOG2E)
    if ALIBI:
        scores -= slopes * LOG2E * gl.abs(q_pos - k_pos).to(gl.float32)
    return scores


@gluon.jit
def hide(
    scores, inside, q_pos, k_pos, left, right, tree_rows, first_new, mask_r,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_TREE: gl.constexpr,
):  # fmt: skip
    """As gpu/decode_tiles.py, hide_scores."""
    visible = inside
    if HAS_RIGHT:
        visible = visible & (k_pos <= q_pos + right)
    if HAS_LEFT:
        visible = visible & (k_pos >= q_pos - left)
    if HAS_TREE:
        new = k_pos - first_new
        there = mask_r & inside & (new >= 0)
        visible = visible & mask_r & (q_pos >= 0) & (gl.load(tree_rows + new, mask=there, other=1) != 0)
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def query(q_ptr, stride_qm, stride_qh, kv_head, q_len, first, GROUP: gl.constexpr, WIDTH: gl.constexpr):
    """Columns of the rows' queries from `first` on, as a first factor: sixteen rows, those that are none 0."""
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, FIRST))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, FIRST))
    at = q_ptr + ((kv_head * GROUP + r // q_len) * stride_qh + r % q_len * stride_qm)[:, None] + (first + c)[None, :]
    return gl.load(at, mask=((r < 8) & (r < GROUP * q_len))[:, None], other=0.0)


@gluon.jit
def row_parameters(
    length, q_len, slopes_ptr, tree_ptr, stride_rm,
    GROUP: gl.constexpr, HAS_ALIBI: gl.constexpr, HAS_TREE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Against scores: which rows exist, where they stand, their slopes, and their lines of the tree."""
    r = gl.arange(0, 8, layout=ROWS)
    mask_r = (r < GROUP * q_len)[:, None]
    q_pos = (length - q_len + r % q_len)[:, None]
    slopes = 0.0
    if HAS_ALIBI:
        slopes = gl.load(slopes_ptr + r // q_len, mask=r < GROUP * q_len, other=0.0).to(gl.float32)[:, None]
    tree_rows = q_pos
    if HAS_TREE:
        tree_rows = tree_ptr + (r % q_len * stride_rm)[:, None]
    return mask_r, q_pos, slopes, tree_rows


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


@gluon.jit
def store_partial(acc, row_max, row_sum, workspace_ptr, outs_ptr, at, rows, first, DV: gl.constexpr, LSE: gl.constexpr):
    """Leave outputs [channels, rows] of the channels from `first` on, and LSEs, as a part."""
    visible = row_sum != 0  # NaN is: what a row sees shows
    r = gl.arange(0, 8, layout=gl.SliceLayout(0, MMA))
    c = first + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, MMA))
    out = acc / by_row(gl.where(visible, row_sum, 1.0))
    gl.store(outs_ptr + (at + r)[None, :] * DV + c[:, None], out, mask=(r < rows)[None, :])
    if LSE:
        lse = gl.where(visible, row_max + gl.log2(row_sum), float("-inf"))
        r = gl.arange(0, 8, layout=row_sum.type.layout)
        gl.store(workspace_ptr + at + r, lse, mask=r < rows)
