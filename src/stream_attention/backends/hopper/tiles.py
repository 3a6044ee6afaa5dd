"""The vocabulary of the Gluon kernels: what is done to a tile, each thing written once. Scores are in log2 units."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ...gpu.arguments import UNIT as ELEMENTS_OF_A_UNIT
from . import tuning
from .versions import ADDS_IN_PAIRS

ROWS = gl.constexpr(tuning.ROWS)
KEYS = gl.constexpr(tuning.KEYS)
UNIT = gl.constexpr(ELEMENTS_OF_A_UNIT)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def run_asm(ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, operands):
    """PTX with an effect, whose result is an int32."""
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def accumulator(columns, width=16):
    """How a warpgroup holds a product of 64 rows; `width`: columns of the first factor that an instruction takes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, width])


@gluon.jit
def issue(a, b):
    """Begin the product of 64 rows and `b`, which `warpgroup_mma_wait` has."""
    COLUMNS: gl.constexpr = b.shape[1]
    nothing = gl.zeros((64, COLUMNS), gl.float32, accumulator(COLUMNS, 256 // a.dtype.primitive_bitwidth))
    return warpgroup_mma(a, b, nothing, use_acc=False, is_async=True)


@gluon.jit
def packed_rows(cu_ptr, rows):
    """First row and length of a packed sequence, held within the pack whatever the offsets say."""
    first = gl.minimum(gl.maximum(gl.load(cu_ptr).to(gl.int32), 0), rows)
    last = gl.minimum(gl.maximum(gl.load(cu_ptr + 1).to(gl.int32), first), rows)
    return first, last - first


@gluon.jit
def tanh(x, TANH: gl.constexpr):
    """gpu/tiles.py, softcap_scores, has the errors of the two ways."""
    if TANH == "unit":
        return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    else:
        decay = gl.exp2(gl.abs(x) * (-2.0 * LOG2E))
        magnitude = (1.0 - decay) / (1.0 + decay)
        return gl.where(x < 0, -magnitude, magnitude)


@gluon.jit
def log2(x):
    """One instruction, as exact as that of exp2."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def subtract_alibi(scores, slope, distance):
    """Scores less slope * |i - j|, `distance` being i less the first key of the tile.

    Columns are numbered as 8 a + b. What a lane holds of a row has every a and two b, so that 8 a is a constant of the
    instruction and nothing is converted to a float in the loop; positions up to 2^24 apart are exact.
    """
    ROWS: gl.constexpr = scores.shape[0]
    COLUMNS: gl.constexpr = scores.shape[1]
    folded = scores.reshape([ROWS, COLUMNS // 8, 8])
    layout: gl.constexpr = folded.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    a = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    b = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    i = gl.convert_layout(distance.to(gl.float32), of_rows, assert_trivial=True)
    from_b = i[:, None, None] - b.to(gl.float32)[None, None, :]
    apart = gl.abs(from_b - (a * 8).to(gl.float32)[None, :, None])
    less = folded - slope * apart
    return gl.convert_layout(less.reshape([ROWS, COLUMNS]), scores.type.layout, assert_trivial=True)


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
def broadcast_rows(tile, x):
    """Numbers of rows beside the columns of a tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def halves(x):
    """The left and the right half of a tile's columns. Nothing moves between registers."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def row_sums(p):
    """Sums of a row as eight partial sums that need no other lane; added up once, at the end."""
    rows: gl.constexpr = p.shape[0]
    columns: gl.constexpr = p.shape[1]
    if ADDS_IN_PAIRS:
        # One by one all the same: an exponential is added as soon as it is there, and none is left for the end.
        parts = (p,)
        for _ in gl.static_range(_log2_of(columns // 8)):
            parts = _halved(parts)
        sums = parts[0]
        for i in gl.static_range(1, columns // 8):
            sums += parts[i]
        return sums
    else:
        return gl.sum(p.reshape([rows, columns // 8, 8]), 1)


@gluon.constexpr_function
def _log2_of(number):
    return number.bit_length() - 1


@gluon.jit
def _halved(parts):
    """The halves of every part, in order."""
    found = ()
    for i in gl.static_range(len(parts)):
        found = found + halves(parts[i])
    return found


@gluon.jit
def opaque(x):
    """`x`, with which nothing is computed before this point of the program."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def clear_rows(tile, start, floor, limit):
    """Zero the rows of a tile before `floor` and from `limit` on, where it has any; its first row is `start`.

    p is 0 there, but they may be NaN, and 0 * NaN is NaN. Every consumer writes the same, so nobody waits.
    """
    if (start < floor) | (start + tile.shape[0] > limit):
        _clear(tile, start, floor, limit)


@gluon.jit
def clear_rows_of_slot(ring, iteration, start, floor, limit):
    """The same of the tile of a slot, which is waited for only then."""
    if (start < floor) | (start + ring.tiles.shape[2] > limit):
        ring.wait_full(iteration)
        _clear(ring.tile(iteration), start, floor, limit)


@gluon.jit
def _clear(tile, start, floor, limit):
    CHUNK: gl.constexpr = 16  # rows at a time, to need few registers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for chunk in gl.static_range(tile.shape[0] // CHUNK):
        rows = tile.slice(chunk * CHUNK, CHUNK, dim=0)
        row = start + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        rows.store(gl.where(((row >= floor) & (row < limit))[:, None], rows.load(layout), 0.0))
    fence_async_shared()
