"""What the Triton kernels do to a tile, each step written once, in the order in which a kernel takes them.

Prologue: which tile a program has (`tile_of_program`), what its positions let it see (`visible_span`), and which
blocks of that are partially masked (`phases`). Main loop: rows are loaded (`load_rows`), products become scores
(`modify_scores`), scores that positions mask become -inf (`visible_by_position`), and the running softmax takes them
(`online_softmax_step`). Epilogue: `normalised`. The backward has `tile_gradients` in place of the softmax.

Scores are kept in units of log2, so that every exponential is one `exp2`; `LOG2E` and `LN2` convert. Scores, slopes and
positions broadcast against each other, so a tile may lie queries by keys or keys by queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import WHOLE, WIDE

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_of_program(tiles, num_splits, heads, LAST_FIRST: tl.constexpr, IS_SPLIT: tl.constexpr):
    """Tile, split, head and batch entry of this program, tiles fastest; with LAST_FIRST the last of them first."""
    pid = tl.program_id(0)
    tile = pid % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    rest = pid // tiles
    split = 0
    if IS_SPLIT:
        split = rest % num_splits
        rest = rest // num_splits
    return tile, split, rest % heads, (rest // heads).to(tl.int64)


@triton.jit
def packed_rows(cu_ptr, rows):
    """First row and length of a packed sequence, held within the pack whatever the offsets say."""
    first = tl.minimum(tl.maximum(tl.load(cu_ptr).to(tl.int64), 0), rows)
    last = tl.minimum(tl.maximum(tl.load(cu_ptr + 1).to(tl.int64), first), rows)
    return first, (last - first).to(tl.int32)


@triton.jit
def visible_span(
    first_pos, last_pos, behind, ahead, start, stride, length, HAS_BEHIND: tl.constexpr, HAS_AHEAD: tl.constexpr
):
    """Which of `length` elements, element i at position `start + i * stride`, rows of a tile see that stand at
    positions from `first_pos` to `last_pos`, each as far as `behind` and `ahead` of itself.

    Returns lo, hi, whole_lo, whole_hi: those in [lo, hi) are seen by some row, those in [whole_lo, whole_hi) by all.
    """
    lo, hi, whole_lo, whole_hi = 0, length, 0, length
    if HAS_BEHIND:
        lo = (tl.maximum(first_pos - behind - start, 0) + stride - 1) // stride
        whole_lo = (tl.maximum(last_pos - behind - start, 0) + stride - 1) // stride
    if HAS_AHEAD:
        hi = tl.minimum(length, (tl.maximum(last_pos + ahead - start, -stride) + stride) // stride)
        whole_hi = tl.minimum(length, (tl.maximum(first_pos + ahead - start, -stride) + stride) // stride)
    return lo, hi, whole_lo, whole_hi


@triton.jit
def phases(
    lo, hi, whole_lo, whole_hi, split, num_splits, BLOCK: tl.constexpr, MASKS_END: tl.constexpr, IS_SPLIT: tl.constexpr
):
    """Where the three phases of a main loop begin and end, in blocks, within this program's split of [lo, hi).

    Phase 0 has blocks that the lower edge cuts, phase 1 those that every row sees whole, which need no masking, and
    phase 2 those that the upper edge cuts. MASKS_END: as it does where there is none but the last element.
    """
    begin, end = lo // BLOCK, tl.cdiv(hi, BLOCK)
    if IS_SPLIT:
        per_split = tl.cdiv(tl.maximum(end - begin, 0), num_splits)
        begin += split.to(tl.int32) * per_split
        end = tl.minimum(end, begin + per_split)
    whole_begin = tl.minimum(tl.maximum(tl.cdiv(whole_lo, BLOCK), begin), tl.maximum(end, begin))
    whole_end = end
    if MASKS_END:
        whole_end = tl.maximum(tl.minimum(whole_hi // BLOCK, end), whole_begin)
    return begin, whole_begin, whole_end, end


@triton.jit
def load_rows(ptr, offs, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK_D] from `ptr + offs`, 0 behind the D columns that there are. MASKED: rows not `inside` are not read,
    and are 0."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    if MASKED:
        return tl.load(ptr + offs, mask=inside[:, None] & (columns < D), other=0.0)
    elif BLOCK_D != D:
        return tl.load(ptr + offs, mask=columns < D, other=0.0)
    else:
        return tl.load(ptr + offs)


@triton.jit
def store_rows(ptr, offs, tile, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] to `ptr + offs`, in the dtype of the pointer: the D columns that there are, of rows `inside`."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    tl.store(ptr + offs, tile.to(ptr.dtype.element_ty), mask=inside[:, None] & (columns < D))


@triton.jit
def load_broadcast(ptr, offs_m, offs_n, q_len, k_len, stride_m, stride_n, other, ACCESS: tl.constexpr):
    """A tile of a mask or bias. `offs_m` and `offs_n` are 2-D and say which way up it lies.

    Rows of whole wide words are never cut inside one, and the compiler sees it: the last key is a multiple of 8.
    """
    step = stride_n
    if ACCESS >= WIDE:
        step = 1
    end = k_len
    if ACCESS == WHOLE:
        end = k_len // 8 * 8
    return tl.load(ptr + offs_m * stride_m + offs_n * step, mask=(offs_m < q_len) & (offs_n < end), other=other)


@triton.jit
def modify_scores(
    qk, scale, softcap, slopes, q_pos, k_pos, bias,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, BIAS: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Scores in log2 units from qk = q . k, and what softcap made of qk."""
    capped = qk
    if HAS_SOFTCAP:
        capped = softcap_scores(qk * scale, softcap, TANH)
        scores = capped * LOG2E
    else:
        scores = qk * (scale * LOG2E)
    if HAS_ALIBI:
        scores -= (slopes * LOG2E) * tl.abs(q_pos - k_pos).to(tl.float32)
    if BIAS:
        scores = add_bias(scores, bias)
    return scores, capped


@triton.jit
def softcap_scores(scores, softcap, TANH: tl.constexpr):
    """c * tanh(s / c), as accurate as the dtype of the inputs deserves.

    TANH "unit": one instruction, relative error 2^-11, a quarter of bf16's rounding. "exp2": absolute error of an fp32
    rounding. "exact": the same relative to the result, by a series near 0 where 1 - exp cancels.
    """
    x = scores / softcap
    if TANH == "unit":
        t = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        shrunk = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        magnitude = (1.0 - shrunk) / (1.0 + shrunk)
        t = tl.where(x < 0, -magnitude, magnitude)
    if TANH == "exact":
        x2 = x * x
        series = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
        t = tl.where(tl.abs(x) < 0.25, series, t)
    return softcap * t


@triton.jit
def add_bias(scores, bias):
    """Scores in log2 units plus a bias. -inf hides, whatever the score; finite stays finite, however large."""
    largest: tl.constexpr = 2.3e38  # times log2(e) still within fp32
    wide = bias.to(tl.float32)
    wide = tl.where(wide < -largest, -largest, tl.where(wide > largest, largest, wide))
    return tl.where(bias == float("-inf"), float("-inf"), scores + wide * LOG2E)


@triton.jit
def visible_by_position(inside, q_pos, k_pos, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which elements of a tile are `inside` and within the window."""
    visible = inside
    if HAS_RIGHT:
        visible = visible & (k_pos <= q_pos + right)
    if HAS_LEFT:
        visible = visible & (k_pos >= q_pos - left)
    return visible


@triton.jit
def initial_state(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row max, row sum and accumulator of rows that have seen no key."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return row_max, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def online_softmax_step(
    scores, factor, row_max, row_sum, GUARD: tl.constexpr, AXIS: tl.constexpr = 1, RAISED: tl.constexpr = 0
):
    """Take a tile of scores, times a positive factor, into a running softmax, whose keys lie along AXIS.

    Returns the tile's probabilities p, the rescale of older sums, the new row max and the new row sum. The factor is
    applied here so that scaling and subtracting the max are one FMA. GUARD: all keys so far may be masked for a row;
    its p are 0 then, not NaN. RAISED, for FP8: each row has its factor, the row max is an integer, so that rescaling by
    it rounds nothing, and p are 2^RAISED times as large.
    """
    tile_max = tl.max(scores, AXIS) * factor
    if RAISED:
        tile_max, factor = tl.ceil(tile_max), tl.expand_dims(factor, AXIS)
    new_max = tl.maximum(row_max, tile_max)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max) if GUARD else new_max
    p = tl.exp2(scores * factor - tl.expand_dims(finite_max - RAISED, AXIS))
    rescale = tl.exp2(row_max - finite_max)
    return p, rescale, new_max, row_sum * rescale + tl.sum(p, AXIS)


@triton.jit
def normalised(acc, row_max, row_sum):
    """The state of rows, with the LSE in log2 units: 0 and -inf for one that has seen nothing."""
    seen_any = row_sum != 0  # NaN is: what a row sees shows
    out = acc / tl.where(seen_any, row_sum, 1.0)[:, None]
    return out, tl.where(seen_any, row_max + tl.log2(row_sum), float("-inf"))


@triton.jit
def dropout_keep(row_words, col_words, threshold):
    """Which elements of a tile dropout keeps: a two-multiply xor-shift mix of the row's and the column's word."""
    x = (row_words[:, None] ^ col_words[None, :]).to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x = tl.mul(x, tl.full([1, 1], 0x7FEB352D, tl.uint32), sanitize_overflow=False)
    x ^= x >> 15
    x = tl.mul(x, tl.full([1, 1], 0x846CA68B, tl.uint32), sanitize_overflow=False)
    x ^= x >> 16
    return x >= threshold


@triton.jit
def tile_gradients(
    qk, dp, lse, delta, q_pos, k_pos, inside, attend, bias, slopes, keep, scale, softcap, left, right, dropout_scale,
    EDGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """From tiles of qk = q . k and dp = dO . v: p (before dropout), d(scores), d(qk).

        p = exp(s - lse)        ds = p (dp - delta)

    The LSE comes in log2 units, +inf for a row that is fully masked, whose p are 0 then. EDGE: positions may mask
    elements, and `inside` says which exist. What is masked has p = 0 and gradient 0 * (dp - delta): rows that may be
    NaN there are not to be read. The scale of d(qk) is left to their sums.
    """
    scores, capped = modify_scores(qk, scale, softcap, slopes, q_pos, k_pos, bias, HAS_SOFTCAP, HAS_ALIBI, BIAS, TANH)
    exponents = scores - lse
    if EDGE:
        visible = visible_by_position(inside, q_pos, k_pos, left, right, HAS_LEFT, HAS_RIGHT)
        exponents = tl.where(visible, exponents, float("-inf"))
    if MASK:
        exponents = tl.where(attend != 0, exponents, float("-inf"))
    p = tl.exp2(exponents)
    if HAS_DROPOUT:
        dp = tl.where(keep, dp * dropout_scale, 0.0)
    d_scores = p * (dp - delta)
    d_qk = d_scores
    if HAS_SOFTCAP:
        slope = capped / softcap
        d_qk = d_scores * (1.0 - slope * slope)
    return p, d_scores, d_qk
