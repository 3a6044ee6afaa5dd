"""The vocabulary of the Triton kernels: what is done to a tile, each thing written once.

Scores are kept in units of log2, so that every exponential is one `exp2`; `LOG2E` and `LN2` convert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .arguments import WHOLE, WIDE

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax_step(scores, factor, row_max, row_sum, GUARD: tl.constexpr):
    """Take a tile of scores, times a positive factor, into a running softmax.

    Returns the tile's probabilities p, the rescale of older sums, the new row max and the new row sum. The factor is
    applied here so that scaling and subtracting the max are one FMA. GUARD: all keys so far may be masked for a row;
    its p are 0 then, not NaN.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max) if GUARD else new_max
    p = tl.exp2(scores * factor - finite_max[:, None])
    rescale = tl.exp2(row_max - finite_max)
    return p, rescale, new_max, row_sum * rescale + tl.sum(p, 1)


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
def packed_rows(cu_ptr, rows):
    """First row and length of a packed sequence, held within the pack whatever the offsets say."""
    first = tl.minimum(tl.maximum(tl.load(cu_ptr).to(tl.int64), 0), rows)
    last = tl.minimum(tl.maximum(tl.load(cu_ptr + 1).to(tl.int64), first), rows)
    return first, (last - first).to(tl.int32)


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

    The tile lies either way up: everything else broadcasts against it. The LSE comes in log2 units, +inf for a row that
    is fully masked, whose p are 0 then. EDGE: positions may mask elements, and `inside` says which exist. What is
    masked has p = 0 and gradient 0 * (dp - delta): rows that may be NaN there are not to be read. The scale of d(qk) is
    left to their sums.
    """
    if HAS_SOFTCAP:
        capped = softcap_scores(qk * scale, softcap, TANH)
        scores = capped * LOG2E
    else:
        scores = qk * (scale * LOG2E)
    if HAS_ALIBI:
        scores -= (slopes * LOG2E) * tl.abs(q_pos - k_pos).to(tl.float32)
    if BIAS:
        scores = add_bias(scores, bias)
    exponents = scores - lse
    if EDGE:
        visible = inside
        if HAS_RIGHT:
            visible = visible & (k_pos <= q_pos + right)
        if HAS_LEFT:
            visible = visible & (k_pos >= q_pos - left)
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
