"""The vocabulary of the Gluon kernels: what is done to a tile, each thing written once. Scores are in log2 units."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def packed_rows(cu_ptr, rows):
    """First row and length of a packed sequence, held within the pack whatever the offsets say."""
    first = gl.minimum(gl.maximum(gl.load(cu_ptr).to(gl.int32), 0), rows)
    last = gl.minimum(gl.maximum(gl.load(cu_ptr + 1).to(gl.int32), first), rows)
    return first, last - first


@gluon.jit
def softcap_scores(scores, softcap, TANH: gl.constexpr):
    """c * tanh(s / c): tiles.softcap_scores has the errors of the two ways."""
    x = scores / softcap
    if TANH == "unit":
        t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    else:
        shrunk = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
        magnitude = (1.0 - shrunk) / (1.0 + shrunk)
        t = gl.where(x < 0, -magnitude, magnitude)
    return softcap * t


@gluon.jit
def dropout_keep(row_words, col_words, threshold):
    """Which elements of a tile dropout keeps, as tiles.dropout_keep."""
    x = (row_words[:, None] ^ col_words[None, :]).to(gl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = x * gl.full_like(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * gl.full_like(x, 0x846CA68B)
    x = x ^ (x >> 16)
    return x >= threshold


@gluon.jit
def hide(scores, k_pos, floor, limit, HAS_LEFT: gl.constexpr):
    """-inf where a row does not see a key: keys from `floor` to before `limit` are seen."""
    visible = k_pos[None, :] < limit[:, None]
    if HAS_LEFT:
        visible = visible & (k_pos[None, :] >= floor[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def row_sums(weights):
    """Sums of a row as eight partial sums that need no other lane; added up once, at the end."""
    rows: gl.constexpr = weights.shape[0]
    columns: gl.constexpr = weights.shape[1]
    return gl.sum(weights.reshape([rows, columns // 8, 8]), 1)


@gluon.jit
def clear_unseen(values, use, start, floor, limit):
    """Zero the rows of a block of V that no query sees, where it has any: their weight is 0, but 0 * NaN is NaN.

    Keys from `floor` to before `limit` are seen by some query. Every consumer writes the same, so nobody waits.
    """
    BLOCK_N: gl.constexpr = values.tiles.shape[2]
    BLOCK_DV: gl.constexpr = values.tiles.shape[4]
    CHUNK: gl.constexpr = 16  # rows at a time, to need few registers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if (start < floor) | (start + BLOCK_N > limit):
        values.wait_full(use)
        tile = values.tiles.index(use % values.SLOTS).reshape([BLOCK_N, BLOCK_DV])
        for chunk in gl.static_range(BLOCK_N // CHUNK):
            part = tile.slice(chunk * CHUNK, CHUNK, 0)
            row = start + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
            part.store(gl.where(((row >= floor) & (row < limit))[:, None], part.load(layout), 0.0))
        fence_async_shared()


@gluon.constexpr_function
def _wide_layout(rows, columns, step):
    """The accumulator's layout with 8 consecutive columns per lane, for stores of 16 bytes, in two steps of one lane
    bit each: Triton shuffles within a warp for one such transposition and goes through shared memory for two."""
    registers = [[0, 1], [0, 2], [8, 0], [0, 16]] if step == 1 else [[0, 1], [0, 2], [0, 4], [8, 0]]
    column = 32
    while column < columns:
        registers.append([0, column])
        column *= 2
    lanes = [[0, 8], [0, 4] if step == 1 else [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [rows, columns])


@gluon.jit
def store_rows(out, base, stride, rows_left, DV: gl.constexpr):
    """Write rows from registers: the first `rows_left` of them, `DV` columns."""
    rows: gl.constexpr = out.shape[0]
    columns: gl.constexpr = out.shape[1]
    if out.dtype.primitive_bitwidth == 16:
        out = gl.convert_layout(out, _wide_layout(rows, columns, 1))
        out = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [out], dtype=out.dtype, is_pure=False, pack=2)
        out = gl.convert_layout(out, _wide_layout(rows, columns, 2))
    row = gl.arange(0, rows, gl.SliceLayout(1, out.type.layout))
    column = gl.arange(0, columns, gl.SliceLayout(0, out.type.layout))
    offsets = row.to(gl.int64)[:, None] * stride + column[None, :]
    inside = (row < rows_left)[:, None] & (column < DV)[None, :]
    gl.store(base + offsets, out, mask=inside)
