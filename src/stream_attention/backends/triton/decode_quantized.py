"""Few queries against a quantised cache in Triton: fp8, int8 or int4 values are dequantised to fp16 in registers.

The grid is that of decode.py, with one split more: it has the latest tokens, which lie in the window as they came.

Tiles lie on their side, keys by rows: the matrix instruction takes 16 of its first factor by 8 of its second, and there
are rarely more than 8 rows. A tile of codes is read as words of 16 bits (base/kv_layouts/quantized_tensor.py), because
matrix instructions take their operands from shared memory in units of those. Word w of a token holds channel w of each
of n planes, D/n channels wide: n is 2, or 4 for int4. A plane is a factor of its own product, so no code ever moves
between lanes. Two words in a register make n pairs of neighbours, channels of a key or tokens of a value, which share
instructions down to the product:

    number = (code - middle) * scale + zero     (int8: without a zero; fp8: code * scale)

The difference is exact: 1024 + code is a number of fp16 whose lowest bits are the code. Numbers are fp16 whatever the
cache's dtype, and so are queries, divided by a power of two, and weights: at least as exact as bf16, and scales that
are fp16 keep them in range.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...base.kv_layouts import QuantizedKV
from ...gpu.arguments import UNIT, is_aligned, named, row_strides, tile_width
from ...gpu.decode_call import DecodeCall, quantized_arguments, scale_rows
from ...gpu.decode_tiles import (
    first_visible,
    hide_scores,
    keys_of_split,
    leave_state,
    queries_of_rows,
    rows_of_program,
    wait_for_kernels_ahead,
)
from ...gpu.interpreter import active as interpreting
from ...gpu.launch import Kernel, jit
from ...gpu.tiles import modify_scores, normalised, online_softmax_step

_INT4 = tl.constexpr("""{
.reg .b32 w;
shr.u32 w, $4, 8;
lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $1, $4, 0x00F000F0, 0x64006400, 0xEA;
lop3.b32 $2, w, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $3, w, 0x00F000F0, 0x64006400, 0xEA;
mov.b32 w, 0xE408E408;
add.rn.f16x2 $0, $0, w;
add.rn.f16x2 $2, $2, w;
{ .reg .b32 m, a;
mov.b32 m, 0x2C002C00;
mov.b32 a, 0xD480D480;
fma.rn.f16x2 $1, $1, m, a;
fma.rn.f16x2 $3, $3, m, a; }
fma.rn.f16x2 $0, $0, $5, $9;
fma.rn.f16x2 $1, $1, $6, $10;
fma.rn.f16x2 $2, $2, $7, $11;
fma.rn.f16x2 $3, $3, $8, $12; }""")
"""Two words, four scales, four zeros to four pairs: 1024 + code - 1032, or (1024 + 16 code) / 16 - 72, is code - 8."""

_INT8 = tl.constexpr("""{
.reg .b32 c;
mov.b32 c, 0x64646464;
prmt.b32 $0, $2, c, 0x4240;
prmt.b32 $1, $2, c, 0x4341;
mov.b32 c, 0xE480E480;
add.rn.f16x2 $0, $0, c;
add.rn.f16x2 $1, $1, c;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $4; }""")
"""Two words and two scales to two pairs: 1024 + code - 1152 is code - 128."""

_FP8 = tl.constexpr("""{
.reg .b32 c;
.reg .b16 a, b;
prmt.b32 c, $2, $2, 0x3120;
mov.b32 {a, b}, c;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
mul.rn.f16x2 $0, $0, $3;
mul.rn.f16x2 $1, $1, $4; }""")
"""Two words and two scales to two pairs."""


@triton.jit
def _append(planes, plane):
    return planes + (plane,)


@triton.jit
def _dequantised(words, scales, zeros, FORMAT: tl.constexpr, INTERPRETED: tl.constexpr):
    """The values of words, a plane each, fp16. Scales and zeros, of each plane one, broadcast against them."""
    if INTERPRETED:
        numbers = ()
        for plane in tl.static_range(4 if FORMAT == "int4" else 2):
            if FORMAT == "int4":
                code = ((words >> 4 * plane) & 15) - 8
            elif FORMAT == "int8":
                code = ((words >> 8 * plane) & 255) - 128
            else:
                code = ((words >> 8 * plane) & 255).to(tl.int8).to(tl.float8e4nv, bitcast=True)
            number = code.to(tl.float32) * scales[plane].to(tl.float32)  # rounded once, with the zero
            numbers = _append(numbers, (number + (zeros[plane] if FORMAT == "int4" else 0.0)).to(tl.float16))
        return numbers
    elif FORMAT == "int4":
        return tl.inline_asm_elementwise(
            _INT4,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            (words,) + scales + zeros,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _INT8 if FORMAT == "int8" else _FP8,
            "=&r,=&r,r,r,r",
            (words,) + scales,
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _load(ptr, inside, MASKED: tl.constexpr):
    return tl.load(ptr, mask=inside, other=0) if MASKED else tl.load(ptr)


@triton.jit
def _read_scales(scale_ptr, zero_ptr, first, offs, inside, MASKED: tl.constexpr):
    """Scales and zeros from `first` on; where there are no zeros, scales twice."""
    scale = _load(scale_ptr + first + offs, inside, MASKED)
    zero = scale
    if zero_ptr is not None:
        zero = _load(zero_ptr + first + offs, inside, MASKED)
    return scale, zero


@triton.jit
def _scales_of_keys(
    scale_ptr, zero_ptr, token, stride_s,
    PLANES: tl.constexpr, W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    TOKENS: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Those of the planes of the keys from `token` on, against words [BLOCK_N, BLOCK_W]: of channels, a row, or of
    tokens, a column. `stride_s` lies between blocks of TOKENS tokens, or between groups of TOKENS channels."""
    scales, zeros = (), ()
    for plane in tl.static_range(PLANES):
        if PER_CHANNEL:
            w = tl.arange(0, BLOCK_W)
            first = (token // TOKENS) * stride_s + plane * W
            scale, zero = _read_scales(scale_ptr, zero_ptr, first, w, w < W, BLOCK_W != W)
            scales, zeros = _append(scales, scale[None, :]), _append(zeros, zero[None, :])
        else:
            first = (plane * W // TOKENS) * stride_s + token
            scale, zero = _read_scales(scale_ptr, zero_ptr, first, tl.arange(0, BLOCK_N), True, False)
            scales, zeros = _append(scales, scale[:, None]), _append(zeros, zero[:, None])
    return scales, zeros


@triton.jit
def _pairs(ptr, BLOCK_N: tl.constexpr):
    """fp16 numbers side by side, [1, BLOCK_N], read two at a time."""
    both = tl.load(ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, BLOCK_N // 2))
    low, high = (both & 0xFFFF).to(tl.int16), (both >> 16).to(tl.int16)
    return tl.join(low, high).reshape(BLOCK_N).to(tl.float16, bitcast=True)[None, :]


@triton.jit
def _scales_of_values(
    scale_ptr, zero_ptr, token, stride_s, masked,
    PLANES: tl.constexpr, W: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Those of the planes of the values from `token` on, against words [BLOCK_WV, BLOCK_N]: a row. The first `masked`
    are 0, because they are masked."""
    scales, zeros = (), ()
    for plane in tl.static_range(PLANES):
        first = (plane * W // TOKENS) * stride_s + token
        if HAS_LEFT:
            n = tl.arange(0, BLOCK_N)
            scale, zero = _read_scales(scale_ptr, zero_ptr, first, n, n >= masked, HAS_LEFT)
            scales, zeros = _append(scales, scale[None, :]), _append(zeros, zero[None, :])
        else:
            scale = _pairs(scale_ptr + first, BLOCK_N)
            zero = scale if zero_ptr is None else _pairs(zero_ptr + first, BLOCK_N)
            scales, zeros = _append(scales, scale), _append(zeros, zero)
    return scales, zeros


@triton.jit
def _zeros(planes, BLOCK_WV: tl.constexpr, BLOCK_R: tl.constexpr):
    return [tl.zeros([BLOCK_WV, BLOCK_R], tl.float32) for plane in planes]


@triton.jit
def _planes_of_query(q_rows, mask_r, PLANES: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """[BLOCK_W, rows] each."""
    w = tl.arange(0, BLOCK_W)
    planes = ()
    for plane in tl.static_range(PLANES):
        at = q_rows[None, :] + (plane * W + w)[:, None]
        planes = _append(planes, tl.load(at, mask=mask_r[None, :] & (w < W)[:, None], other=0.0))
    return planes


@triton.jit
def _peak(planes, PLANES: tl.constexpr):
    """The largest magnitude of each row."""
    peak = tl.max(tl.abs(planes[0].to(tl.float32)), 0)
    for plane in tl.static_range(1, PLANES):
        peak = tl.maximum(peak, tl.max(tl.abs(planes[plane].to(tl.float32)), 0))
    return peak


@jit
def _decode_quantized_kernel(
    q_ptr, k_ptr, k_scale_ptr, k_zero_ptr, v_ptr, v_scale_ptr, v_zero_ptr, k_window_ptr, v_window_ptr,
    table_ptr, lengths_ptr, tree_ptr, slopes_ptr, sink_ptr, out_ptr, lse_ptr, workspace_ptr,
    residual: tl.int32, slots: tl.int32,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    stride_ksb: tl.int64, stride_kss: tl.int64, stride_ksh: tl.int64,
    stride_vsb: tl.int64, stride_vss: tl.int64, stride_vsh: tl.int64,
    stride_kwb: tl.int64, stride_kwn: tl.int64, stride_kwh: tl.int64,
    stride_vwb: tl.int64, stride_vwn: tl.int64, stride_vwh: tl.int64,
    stride_tb: tl.int64, stride_rb: tl.int64, stride_rm: tl.int64, stride_ab: tl.int64,
    stride_ob: tl.int64, stride_om: tl.int64, stride_oh: tl.int64, stride_od: tl.int64,
    batch: tl.int32, kv_heads: tl.int32, capacity: tl.int32, pages: tl.int32, q_len: tl.int32,
    num_splits: tl.int32, split_keys: tl.int32,
    left: tl.int32, right: tl.int32, scale, softcap,
    FORMAT: tl.constexpr, TOKENS: tl.constexpr, PER_CHANNEL: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_WV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, ALL_VISIBLE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr, EARLY: tl.constexpr, TANH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if ALIGNED:
        stride_qb, stride_qm, stride_qh = stride_qb * 8, stride_qm * 8, stride_qh * 8
        stride_kb, stride_kn, stride_kh = stride_kb * 8, stride_kn * 8, stride_kh * 8
        stride_vb, stride_vn, stride_vh = stride_vb * 8, stride_vn * 8, stride_vh * 8
        stride_kwb, stride_kwn, stride_kwh = stride_kwb * 8, stride_kwn * 8, stride_kwh * 8
        stride_vwb, stride_vwn, stride_vwh = stride_vwb * 8, stride_vwn * 8, stride_vwh * 8
        stride_ksb, stride_kss, stride_ksh = stride_ksb * 8, stride_kss * 8, stride_ksh * 8
        stride_vsb, stride_vss, stride_vsh = stride_vsb * 8, stride_vss * 8, stride_vsh * 8
    if EARLY:
        wait_for_kernels_ahead()
    HAS_TREE: tl.constexpr = tree_ptr is not None
    HAS_ALIBI: tl.constexpr = slopes_ptr is not None
    PLANES: tl.constexpr = 4 if FORMAT == "int4" else 2
    WINDOW_N: tl.constexpr = 32
    W: tl.constexpr = D // PLANES
    WV: tl.constexpr = DV // PLANES

    # Where am I.
    kv_head, split, b, offs_r = rows_of_program(kv_heads, num_splits, q_len, GROUP, BLOCK_R)
    length = tl.minimum(tl.load(lengths_ptr + b), capacity)
    coded = tl.maximum(length - residual, 0) // TOKENS * TOKENS
    mask_r, head, t = queries_of_rows(offs_r, kv_head, q_len, GROUP)
    across = (length - q_len + t)[None, :]  # where the queries stand
    q_rows = q_ptr + b * stride_qb + t * stride_qm + head * stride_qh
    slopes = 0.0
    if HAS_ALIBI:
        slopes = tl.load(slopes_ptr + b * stride_ab + head, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    tree_rows = q_rows
    if HAS_TREE:
        tree_rows = (tree_ptr + b * stride_rb + t * stride_rm)[None, :]
    q = _planes_of_query(q_rows, mask_r, PLANES, W, BLOCK_W)
    # Queries in fp16, at most 1, so that no product overflows.
    peak = _peak(q, PLANES)
    power = tl.where(peak > 1e-30, tl.exp2(tl.ceil(tl.log2(peak))), 1.0)
    row_scale = (scale * power)[None, :]
    factor = 1.0 / power
    q_half = [(part.to(tl.float32) * factor[None, :]).to(tl.float16) for part in q]

    first = first_visible(length, q_len, left, HAS_LEFT)
    of_codes = tl.maximum(num_splits - 1, 1)
    begin, end, step = keys_of_split(first // TOKENS * TOKENS, coded, split, of_codes, split_keys, BLOCK_N, PAGE == 0)
    if split == of_codes:
        end = begin  # the split of the window has no quantised values
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    k_scales, v_scales = kv_head * stride_ksh, kv_head * stride_vsh
    if PAGE == 0:
        k_ptr += b * stride_kb
        v_ptr += b * stride_vb
        k_scales += b * stride_ksb
        v_scales += b * stride_vsb
    else:
        table_ptr += b * stride_tb
    k_scale_ptr += k_scales
    v_scale_ptr += v_scales
    if k_zero_ptr is not None:
        k_zero_ptr += k_scales
        v_zero_ptr += v_scales

    row_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    acc = _zeros(q, BLOCK_WV, BLOCK_R)
    offs_w, offs_wv = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_WV)
    masking = left, right, tree_rows, length - q_len, mask_r[None, :]  # arguments of hide_scores
    for start in range(begin, end, step):
        start = tl.multiple_of(start, BLOCK_N)
        k_pos = start + tl.arange(0, BLOCK_N)
        visible = k_pos >= first
        at_k, at_v, at_ks, at_vs = b * 0, b * 0, b * 0, b * 0
        token = start
        exists = True
        if PAGE != 0:
            page = tl.load(table_ptr + start // PAGE)
            exists = (page >= 0) & (page < pages)
            place = tl.where(exists, page, 0).to(tl.int64)
            token = tl.multiple_of(start % PAGE, BLOCK_N)
            at_k, at_v, at_ks, at_vs = place * stride_kb, place * stride_vb, place * stride_ksb, place * stride_vsb
        rows = token + tl.arange(0, BLOCK_N)
        k_at = k_ptr + at_k + (rows * stride_kn)[:, None] + offs_w[None, :]
        v_at = v_ptr + at_v + (rows * stride_vn)[None, :] + offs_wv[:, None]
        k_words = _load(k_at, visible[:, None] & (offs_w < W)[None, :], HAS_LEFT or BLOCK_W != W)
        v_words = _load(v_at, visible[None, :] & (offs_wv < WV)[:, None], HAS_LEFT or BLOCK_WV != WV)
        ks_ptr, vs_ptr = k_scale_ptr + at_ks, v_scale_ptr + at_vs
        kz_ptr, vz_ptr = k_zero_ptr, v_zero_ptr
        if k_zero_ptr is not None:
            kz_ptr, vz_ptr = k_zero_ptr + at_ks, v_zero_ptr + at_vs
        scales, zeros = _scales_of_keys(
            ks_ptr, kz_ptr, token, stride_kss, PLANES, W, BLOCK_N, BLOCK_W, TOKENS, PER_CHANNEL
        )
        k = _dequantised(k_words, scales, zeros, FORMAT, INTERPRETED)
        qk = tl.dot(k[0], q_half[0])
        for plane in tl.static_range(1, PLANES):
            qk = tl.dot(k[plane], q_half[plane], qk)
        down = k_pos[:, None]
        scores, _ = modify_scores(qk, row_scale, softcap, slopes, across, down, 0.0, HAS_SOFTCAP, HAS_ALIBI, 0, TANH)
        if PAGE != 0:
            scores = tl.where(exists, scores, float("nan"))
        if not ALL_VISIBLE:
            scores = hide_scores(scores, visible[:, None], across, down, *masking, HAS_LEFT, HAS_RIGHT, HAS_TREE)
        p, rescale, row_max, row_sum = online_softmax_step(scores, 1.0, row_max, row_sum, GUARD=True, AXIS=0)
        p_half = p.to(tl.float16)
        scales, zeros = _scales_of_values(
            vs_ptr, vz_ptr, token, stride_vss, first - start, PLANES, WV, BLOCK_N, TOKENS, HAS_LEFT
        )
        v = _dequantised(v_words, scales, zeros, FORMAT, INTERPRETED)
        if HAS_TREE and not ALL_VISIBLE:
            seen = (tl.max(scores, 1) != float("-inf"))[None, :]
        summed = ()
        for plane in tl.static_range(PLANES):
            v_plane = v[plane]
            if HAS_TREE and not ALL_VISIBLE:  # a new token that is masked for every row may be NaN
                v_plane = tl.where(seen, v_plane, 0.0)
            summed = _append(summed, tl.dot(v_plane, p_half, acc[plane] * rescale[None, :]))
        acc = summed

    # The latest tokens, as they came: position n in slot n % slots.
    if split == num_splits - 1:
        k_window_ptr += b * stride_kwb + kv_head * stride_kwh
        v_window_ptr += b * stride_vwb + kv_head * stride_vwh
        for start in tl.range(tl.maximum(coded, first), length, WINDOW_N, num_stages=1):
            k_pos = start + tl.arange(0, WINDOW_N)
            inside = k_pos < length
            slot = tl.minimum(k_pos, length - 1) % slots
            mask_k, mask_v = (offs_w < W)[None, :], (offs_wv < WV)[None, :]
            k_at = k_window_ptr + (slot * stride_kwn)[:, None] + offs_w[None, :]
            v_at = v_window_ptr + (slot * stride_vwn)[:, None] + offs_wv[None, :]
            qk = tl.dot(tl.load(k_at, mask=mask_k, other=0.0), q[0])
            for plane in tl.static_range(1, PLANES):
                qk = tl.dot(tl.load(k_at + plane * W, mask=mask_k, other=0.0), q[plane], qk)
            down = k_pos[:, None]
            scores, _ = modify_scores(qk, scale, softcap, slopes, across, down, 0.0, HAS_SOFTCAP, HAS_ALIBI, 0, TANH)
            scores = hide_scores(scores, inside[:, None], across, down, *masking, HAS_LEFT, HAS_RIGHT, HAS_TREE)
            if HAS_TREE:
                mask_v = mask_v & (tl.max(scores, 1) != float("-inf"))[:, None]
            p, rescale, row_max, row_sum = online_softmax_step(scores, 1.0, row_max, row_sum, GUARD=True, AXIS=0)
            summed = ()
            for plane in tl.static_range(PLANES):
                v = tl.load(v_at + plane * WV, mask=mask_v, other=0.0).T
                summed = _append(summed, tl.dot(v, p.to(v.dtype), acc[plane] * rescale[None, :]))
            acc = summed

    for plane in tl.static_range(PLANES):
        out, lse = normalised(acc[plane].T, row_max, row_sum)
        leave_state(
            out, lse, plane * WV, WV, out_ptr, lse_ptr, sink_ptr, workspace_ptr,
            stride_ob, stride_om, stride_oh, stride_od,
            kv_heads, q_len, (b * kv_heads + kv_head) * num_splits + split, batch * kv_heads * num_splits,
            b, kv_head, offs_r, GROUP, DV, BLOCK_WV, IS_SPLIT,
        )  # fmt: skip


def quantized_kernel_arguments(call: DecodeCall, cache: QuantizedKV) -> dict[str, Any]:
    """The kernel's arguments, by name."""
    coding = cache.coding
    planes = 4 if coding.format == "int4" else 2
    arguments = quantized_arguments(call, cache)
    key, value, windows = arguments["k_ptr"], arguments["v_ptr"], (cache.key_window, cache.value_window)
    rows = scale_rows(cache.key), scale_rows(cache.value)
    aligned = is_aligned(call.query, key, value, *windows, *(t for pair in rows for t in pair))
    unit = UNIT if aligned else 1
    return arguments | {
        **named("stride_qb stride_qm stride_qh", row_strides(call.query, False, unit)),
        **named("stride_kb stride_kn stride_kh", row_strides(key, False, unit)),
        **named("stride_vb stride_vn stride_vh", row_strides(value, False, unit)),
        **named("stride_ksb stride_kss stride_ksh", row_strides(rows[0][0], False, unit)),
        **named("stride_vsb stride_vss stride_vsh", row_strides(rows[1][0], False, unit)),
        **named("stride_kwb stride_kwn stride_kwh", row_strides(windows[0], False, unit)),
        **named("stride_vwb stride_vwn stride_vwh", row_strides(windows[1], False, unit)),
        "PER_CHANNEL": coding.keys_per_channel,
        "BLOCK_W": tile_width(call.problem.head_dim // planes),
        "BLOCK_WV": tile_width(call.problem.value_dim // planes),
        "ALIGNED": aligned,
        "INTERPRETED": interpreting(),
    }


quantized_kernel = Kernel(_decode_quantized_kernel)
