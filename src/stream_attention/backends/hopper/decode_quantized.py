"""One to eight rows of queries against a quantised cache in Gluon: values are multiplied as they are stored.

backends/triton/decode_quantized.py, which does everything else, dequantises every value: 13 instructions for eight of
int4. Here it is five, because scales are applied to what there is less of:

    q . k_n = sum_c (q_c s_c) u_nc - middle sum_c q_c s_c + sum_c q_c z_c        a scale and zero per channel c
    o_c     = sum_n (p_n s_n) u_nc - middle sum_n p_n s_n + sum_n p_n z_n        a scale and zero per token n

A code u that is cut out of its word is an fp16 number already, a subnormal one: bits 0 to 3 of a half stand for
u 2^-24, bits 4 to 7 for u 2^-20, and matrix instructions take subnormals at full speed. Sums over a code's middle, and
over zeros, are matrix products too, with a factor whose columns, or rows, are all alike.

q s is rounded to fp16. Of keys whose mean is not their middle, that error is the same for all, and a query in fp16
deserves better: the rest of the product, which one more instruction has exactly, is multiplied too.

p s must fit fp16: weights are taken relative to the largest score plus the largest log2 s of its tile, so that none is
above 1, and none above 2^14 before it is scaled. q s is within fp16 because q is divided by its row's peak, and scales
are at most what codes of fp16 numbers have.

The last splits have the latest tokens, which lie in the window as they came. A program waits for every block of them.

Grid: one program, a warp, per (KV head, split, batch entry). Reads queries, quantised values with their scales and
zeros, the window and the lengths; writes a partial result to the workspace, which gpu/decode_tiles.py merges. Parity
with the reference: tests/backends/triton/test_decode_gpu.py.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ...base.kv_layouts import KVCache, QuantizedKV
from ...gpu.arguments import UNIT, named, row_strides
from ...gpu.decode_call import DecodeCall, quantized_arguments, scale_rows
from ...gpu.decode_launches import prepare_decode_by
from ...gpu.launch import Kernel
from .decode_tiles import (
    FIRST,
    MMA,
    SECOND,
    Rows,
    beside_scores,
    by_row,
    copied,
    softmax_step,
    swizzled,
    upper,
    wait_for_kernels_ahead,
)
from .decode_window import WINDOW_N, window_part
from .launch import jit
from .tiles import log2
from .versions import COMPILE_OPTIONS, aggregate, barrier, copy_async

_INT4 = gl.constexpr("""{
.reg .b32 w;
shr.u32 w, $4, 8;
and.b32 $0, $4, 0x000F000F;
and.b32 $1, $4, 0x00F000F0;
and.b32 $2, w, 0x000F000F;
and.b32 $3, w, 0x00F000F0; }""")
_INT8 = gl.constexpr("""{
.reg .b32 z;
mov.b32 z, 0;
prmt.b32 $0, $2, z, 0x4240;
prmt.b32 $1, $2, z, 0x4341; }""")
_FP8 = gl.constexpr("""{
.reg .b32 c;
.reg .b16 a, b;
prmt.b32 c, $2, $2, 0x3120;
mov.b32 {a, b}, c;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b; }""")

_LINE = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))

_TINY = gl.constexpr(2.0**-14)
"""A scale below this counts as this much where weights are held below 1."""


@gluon.jit
def _planes(words, FORMAT: gl.constexpr):
    """The codes of words, by planes: int4 in units of 2^-24 and 2^-20 in turn, int8 in units of 2^-24, fp8 as it is."""
    PLANES: gl.constexpr = 4 if FORMAT == "int4" else 2
    asm: gl.constexpr = _INT4 if FORMAT == "int4" else (_INT8 if FORMAT == "int8" else _FP8)
    places: gl.constexpr = "=&r," * PLANES + "r"
    return gl.inline_asm_elementwise(asm, places, [words], dtype=(gl.float16,) * PLANES, is_pure=True, pack=2)


@gluon.jit
def _no_tensors():
    return ()


@gluon.jit
def _pairwise(ASM: gl.constexpr, x, y):
    """An instruction on pairs of fp16."""
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [x, y], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _times(x, y):
    return _pairwise("mul.rn.f16x2 $0, $1, $2;", x, y)


@gluon.jit
def _rest(x, y, product):
    """What x y was rounded by, exactly."""
    asm: gl.constexpr = "{ .reg .b32 n; neg.f16x2 n, $3; fma.rn.f16x2 $0, $1, $2, n; }"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [x, y, product], dtype=gl.float16, is_pure=True, pack=2)


@gluon.constexpr_function
def _times_sixteen(format, plane):
    """How much more the codes of a plane count than those of the first: 16 for the odd ones of int4."""
    return 16.0 if format == "int4" and plane % 2 else 1.0


@gluon.jit
def _copy_rows(ptr, to):
    """Begin to copy rows that lie one after another."""
    layout: gl.constexpr = copied(to.shape[1])
    n = gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, layout))
    copy_async(to, ptr + (n * to.shape[1])[:, None] + c[None, :])


@gluon.jit
def _copy_line(ptr, to):
    copy_async(to, ptr + gl.arange(0, to.shape[0], layout=_LINE))


@gluon.jit
def _first_eight(x, LAYOUT: gl.constexpr):
    """Of sixteen numbers."""
    first, _ = gl.split(x.reshape([2, 8]).permute((1, 0)))
    return gl.convert_layout(first, LAYOUT)


@jit
def _codes_kernel(
    q_ptr, k_ptr, k_scale_ptr, k_zero_ptr, v_ptr, v_scale_ptr, v_zero_ptr, k_window_ptr, v_window_ptr,
    table_ptr, lengths_ptr, tree_ptr, slopes_ptr, sink_ptr, out_ptr, lse_ptr, workspace_ptr,
    residual: gl.int32, slots: gl.int32, window_splits: gl.int32,
    stride_qb: gl.int64, stride_qm: gl.int64, stride_qh: gl.int64,
    stride_kb: gl.int64, stride_kh: gl.int64, stride_vb: gl.int64, stride_vh: gl.int64,
    stride_ksb: gl.int64, stride_kss: gl.int64, stride_ksh: gl.int64,
    stride_vsb: gl.int64, stride_vss: gl.int64, stride_vsh: gl.int64,
    stride_kwb: gl.int64, stride_kwn: gl.int64, stride_kwh: gl.int64,
    stride_vwb: gl.int64, stride_vwn: gl.int64, stride_vwh: gl.int64,
    stride_tb: gl.int64, stride_rb: gl.int64, stride_rm: gl.int64, stride_ab: gl.int64,
    stride_ob: gl.int64, stride_om: gl.int64, stride_oh: gl.int64, stride_od: gl.int64,
    batch: gl.int32, kv_heads: gl.int32, capacity: gl.int32, pages: gl.int32, q_len: gl.int32,
    num_splits: gl.int32, split_keys: gl.int32, left: gl.int32, right: gl.int32, scale, softcap,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_R: gl.constexpr,
    BLOCK_N: gl.constexpr, PAGE: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, IS_SPLIT: gl.constexpr, EARLY: gl.constexpr, TANH: gl.constexpr,
    FORMAT: gl.constexpr, TOKENS: gl.constexpr, ALL_VISIBLE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Arguments: those of the kernel in backends/triton/decode_quantized.py. A program always writes a partial result:
    the kernel that merges reads the sink and writes the output."""
    wait_for_kernels_ahead()
    HAS_TREE: gl.constexpr = tree_ptr is not None
    HAS_ALIBI: gl.constexpr = slopes_ptr is not None
    pid = gl.program_id(0)
    kv_head = pid % kv_heads
    split = pid // kv_heads % num_splits
    b = (pid // kv_heads // num_splits).to(gl.int64)
    length = gl.minimum(gl.load(lengths_ptr + b), capacity)
    quantized_len = gl.maximum(length - residual, 0) // TOKENS * TOKENS
    first = 0
    if HAS_LEFT:
        first = gl.maximum(length - q_len - left, 0)
    lines = GROUP * q_len
    q_ptr += b * stride_qb
    at = ((b * kv_heads + kv_head) * num_splits + split) * lines
    outs_ptr = workspace_ptr + gl.cdiv((b * 0 + batch) * kv_heads * num_splits * lines, 4) * 4
    slopes_row, tree_row = lengths_ptr, lengths_ptr  # stand in, unread
    if HAS_ALIBI:
        slopes_row = slopes_ptr + b * stride_ab + kv_head * GROUP
    if HAS_TREE:
        tree_row = tree_ptr + b * stride_rb
    rows = Rows(
        q_ptr, stride_qm, stride_qh, kv_head, q_len, length, left, right, scale, softcap, slopes_row, tree_row,
        stride_rm, workspace_ptr, outs_ptr, at,
        GROUP, DV, HAS_LEFT, HAS_RIGHT, HAS_TREE, HAS_ALIBI, HAS_SOFTCAP, TANH,
    )  # fmt: skip
    quantized_splits = num_splits - window_splits
    if split >= quantized_splits:
        split_len = gl.cdiv(gl.cdiv(slots, window_splits), WINDOW_N) * WINDOW_N
        begin = gl.maximum(quantized_len, first) + (split - quantized_splits) * split_len
        window_part(
            rows, k_window_ptr + b * (stride_kwb * 8) + kv_head * (stride_kwh * 8), stride_kwn * 8,
            v_window_ptr + b * (stride_vwb * 8) + kv_head * (stride_vwh * 8), stride_vwn * 8,
            begin, gl.minimum(begin + split_len, length), slots, D,
        )  # fmt: skip
    else:
        # A share of the codes, in one run.
        begin = first // TOKENS * TOKENS
        split_len = split_keys
        if split_len == 0:
            split_len = gl.cdiv(gl.cdiv(quantized_len - begin, BLOCK_N), quantized_splits) * BLOCK_N
        begin += split * split_len
        end = gl.minimum(begin + split_len, quantized_len)
        key_at = kv_head * (stride_kh * 8)
        value_at = kv_head * (stride_vh * 8)
        key_scale_at = kv_head * (stride_ksh * 8)
        value_scale_at = kv_head * (stride_vsh * 8)
        table_row = lengths_ptr  # stands in, unread
        if PAGE == 0:
            key_at += b * (stride_kb * 8)
            value_at += b * (stride_vb * 8)
            key_scale_at += b * (stride_ksb * 8)
            value_scale_at += b * (stride_vsb * 8)
        else:
            table_row = table_ptr + b * stride_tb
        k_zeros, v_zeros = k_scale_ptr, v_scale_ptr  # stand in, unread
        if FORMAT == "int4":
            k_zeros, v_zeros = k_zero_ptr + key_scale_at, v_zero_ptr + value_scale_at
        keys = Codes(k_ptr + key_at, k_scale_ptr + key_scale_at, k_zeros, stride_kss * 8)
        values = Codes(v_ptr + value_at, v_scale_ptr + value_scale_at, v_zeros, stride_vss * 8)
        table = Pages(table_row, pages, stride_kb * 8, stride_vb * 8, stride_ksb * 8, stride_vsb * 8)
        quantized_part(
            rows, keys, values, table, begin, end, first, D, BLOCK_N, PAGE, FORMAT, TOKENS, ALL_VISIBLE, STAGES
        )


@aggregate
class Codes:
    """The keys or the values of a KV head: where they are, with their scales and zeros."""

    codes: gl.tensor
    scales: gl.tensor
    zeros: gl.tensor  # of int4
    stride_s: gl.tensor  # of scales, over blocks of tokens or groups of channels


@aggregate
class Pages:
    """Where the pages of a cache are; unread where it has none."""

    table: gl.tensor  # of the batch entry
    count: gl.tensor
    stride_k: gl.tensor  # of keys, values and their scales, over pages
    stride_v: gl.tensor
    stride_ks: gl.tensor
    stride_vs: gl.tensor


@gluon.jit
def _copy_block(
    keys, values, pages, begin, i, count, page, missing, slot, key_slots, value_slots,
    PAGE: gl.constexpr, FORMAT: gl.constexpr, TOKENS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Begin to copy block i of a share, which lies in a page, into the slot before `slot`: (the page of the next block,
    `missing` with a bit for this one)."""
    STAGES: gl.constexpr = key_slots[0].shape[0]
    BLOCK_N: gl.constexpr = key_slots[0].shape[1]
    k_codes, k_scales, k_zeros = keys.codes, keys.scales, keys.zeros
    v_codes, v_scales, v_zeros = values.codes, values.scales, values.zeros
    if PAGE != 0:
        exists = (page >= 0) & (page < pages.count)
        missing += 1 - exists.to(gl.int32)
        place = gl.where(exists, page, 0)
        page = gl.load(pages.table + (begin + (i + 1) * BLOCK_N) // PAGE, mask=i + 1 < count, other=0)
    token = begin + i * BLOCK_N
    to = gl.where(slot == 0, STAGES - 1, slot - 1)
    if PAGE != 0:
        token = token % PAGE
        k_codes += place * pages.stride_k
        v_codes += place * pages.stride_v
        k_scales += place * pages.stride_ks
        v_scales += place * pages.stride_vs
        k_zeros += place * pages.stride_ks
        v_zeros += place * pages.stride_vs
    token = token // BLOCK_N * BLOCK_N  # as it is, which the compiler does not know: copies are of 16 bytes then
    _copy_rows(k_codes + token.to(gl.int64) * key_slots[0].shape[2], key_slots[0].index(to))
    _copy_line(k_scales + (token // TOKENS) * keys.stride_s, key_slots[1].index(to))
    if FORMAT == "int4":
        _copy_line(k_zeros + (token // TOKENS) * keys.stride_s, key_slots[2].index(to))
    for g in gl.static_range(GROUPS):
        memory = value_slots[1].index(to).slice(g * BLOCK_N, BLOCK_N)
        _copy_line(v_scales + g * values.stride_s + token, memory)
        if FORMAT == "int4":
            memory = value_slots[2].index(to).slice(g * BLOCK_N, BLOCK_N)
            _copy_line(v_zeros + g * values.stride_s + token, memory)
    _copy_rows(v_codes + token.to(gl.int64) * value_slots[0].shape[2], value_slots[0].index(to))
    return page, missing


@gluon.jit
def quantized_part(
    rows, keys, values, pages, begin, end, first, D: gl.constexpr, BLOCK_N: gl.constexpr, PAGE: gl.constexpr,
    FORMAT: gl.constexpr, TOKENS: gl.constexpr, ALL_VISIBLE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The part of a share of the codes, from `begin` to `end`."""
    PLANES: gl.constexpr = 4 if FORMAT == "int4" else 2
    DV: gl.constexpr = rows.DV
    W: gl.constexpr = D // PLANES
    WV: gl.constexpr = DV // PLANES
    GROUPS: gl.constexpr = DV // TOKENS if DV > TOKENS else 1  # of channels that share a value's scale
    WITH_REST: gl.constexpr = rows.queries.dtype.element_ty == gl.float16
    UNIT_OF_CODES: gl.constexpr = 1.0 if FORMAT == "fp8" else 2.0**24
    MIDDLE: gl.constexpr = 8.0 if FORMAT == "int4" else 128.0
    PEAK: gl.constexpr = 4.0 if FORMAT == "int4" else (64.0 if FORMAT == "int8" else 256.0)
    ROWS: gl.constexpr = gl.SliceLayout(1, upper(gl.zeros([16, BLOCK_N], gl.float32, MMA)).type.layout)
    KEYS: gl.constexpr = gl.SliceLayout(0, ROWS.parent)
    OF_FIRST: gl.constexpr = gl.SliceLayout(0, FIRST)  # what lies along the sum of a first factor, or a second
    OF_SECOND: gl.constexpr = gl.SliceLayout(1, SECOND)

    key_codes = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, W], swizzled(W))
    value_codes = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, WV], swizzled(WV))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    key_scales = gl.allocate_shared_memory(gl.float16, [STAGES, D], plain)
    value_scales = gl.allocate_shared_memory(gl.float16, [STAGES, GROUPS * BLOCK_N], plain)
    key_zeros, value_zeros = key_scales, value_scales
    if FORMAT == "int4":
        key_zeros = gl.allocate_shared_memory(gl.float16, [STAGES, D], plain)
        value_zeros = gl.allocate_shared_memory(gl.float16, [STAGES, GROUPS * BLOCK_N], plain)
    key_slots = key_codes, key_scales, key_zeros
    value_slots = value_codes, value_scales, value_zeros

    # Blocks are on their way STAGES - 1 ahead, and the pages in which they lie are known one ahead of that.
    count = gl.maximum(gl.cdiv(end - begin, BLOCK_N), 0)
    page = 0
    missing = 0  # bit n: the block that was asked for n ago lies in no page
    if PAGE != 0:
        page = gl.load(pages.table + begin // PAGE, mask=count > 0, other=0)
    for i in gl.static_range(STAGES - 1):
        missing = missing << 1
        if i < count:
            page, missing = _copy_block(
                keys, values, pages, begin, i, count, page, missing, i + 1, key_slots, value_slots,
                PAGE, FORMAT, TOKENS, GROUPS,
            )  # fmt: skip
        async_copy.commit_group()

    # Queries in fp16, at most PEAK; of odd planes of int4 a sixteenth, as their codes count sixteen times as much.
    peak = gl.zeros([16], gl.float32, gl.SliceLayout(1, FIRST))
    for plane in gl.static_range(PLANES):
        q = rows.load(plane * W, W)
        peak = gl.maximum(peak, gl.max(gl.abs(q.to(gl.float32)), 1))
    power = gl.where(peak > 1e-30, gl.exp2(gl.ceil(gl.log2(peak))), 1.0)
    queries = _no_tensors()
    for plane in gl.static_range(PLANES):
        q = rows.load(plane * W, W).to(gl.float32)
        q = (q * (PEAK / _times_sixteen(FORMAT, plane) / power)[:, None]).to(gl.float16)
        queries = queries + (q,)
    row_scale = _first_eight(power, ROWS) * (rows.scale / PEAK)
    beside = beside_scores(rows, ROWS)

    none = gl.zeros([16, 8], gl.float32, MMA)
    row_max = gl.full([8], float("-inf"), gl.float32, ROWS)
    row_sum = gl.zeros([8], gl.float32, ROWS)
    acc = (gl.zeros([WV, 8], gl.float32, MMA),) * PLANES
    middles = (none,) * GROUPS  # of values, by groups: rows that are all alike
    zeros = (none,) * GROUPS
    slot = 0
    for i in range(count):
        async_copy.wait_group(STAGES - 2)
        barrier()
        start = begin + i * BLOCK_N
        ahead = i + STAGES - 1
        missing = missing << 1
        if ahead < count:
            page, missing = _copy_block(
                keys, values, pages, begin, ahead, count, page, missing, slot, key_slots, value_slots,
                PAGE, FORMAT, TOKENS, GROUPS,
            )  # fmt: skip
        async_copy.commit_group()

        # Scores.
        planes = _planes(key_codes.index(slot).permute((1, 0)).load(SECOND), FORMAT)
        qk = gl.zeros([16, BLOCK_N], gl.float32, MMA)
        middle = none
        even = none
        odd = none
        for plane in gl.static_range(PLANES):
            scales = key_scales.index(slot).slice(plane * W, W).load(OF_FIRST)
            scales = scales[None, :].broadcast_to([16, W])
            scaled = _times(queries[plane], scales)
            constant = gl.full([W, 8], MIDDLE * _times_sixteen(FORMAT, plane), gl.float16, SECOND)
            if WITH_REST:
                rest = _rest(queries[plane], scales, scaled)
                qk = mma_v2(rest, planes[plane], qk)
                if FORMAT != "fp8":
                    middle = mma_v2(rest, constant, middle)
            qk = mma_v2(scaled, planes[plane], qk)
            if FORMAT != "fp8":
                middle = mma_v2(scaled, constant, middle)
            if FORMAT == "int4":
                zero = key_zeros.index(slot).slice(plane * W, W).load(OF_SECOND)[:, None].broadcast_to([W, 8])
                if plane % 2 == 1:
                    odd = mma_v2(queries[plane], zero, odd)
                else:
                    even = mma_v2(queries[plane], zero, even)
        qk = upper(qk) * UNIT_OF_CODES
        if FORMAT != "fp8":
            above = gl.max(upper(middle - even - 16.0 * odd), 1)  # all alike
            qk -= gl.convert_layout(above, ROWS)[:, None]
        k_pos = (start + gl.arange(0, BLOCK_N, layout=KEYS))[None, :]
        scores = beside.modify(qk, row_scale[:, None], k_pos)
        if PAGE != 0:
            scores = gl.where((missing >> (STAGES - 1)) & 1 == 0, scores, float("nan"))
        if not ALL_VISIBLE:
            scores = beside.hide(scores, k_pos >= first, k_pos)

        # Weights, and how much the values' scales add to them.
        of_values = _no_tensors()
        for g in gl.static_range(GROUPS):
            of_group = value_scales.index(slot).slice(g * BLOCK_N, BLOCK_N).load(OF_SECOND)
            if not ALL_VISIBLE:  # what nobody sees may hold anything
                visible = gl.convert_layout(gl.max(scores, 0), OF_SECOND) != float("-inf")
                of_group = gl.where(visible, of_group, 0.0)
            of_values = of_values + (of_group,)
        largest = of_values[0]
        for g in gl.static_range(1, GROUPS):
            largest = _pairwise("max.f16x2 $0, $1, $2;", largest, of_values[g])
        lift = log2(gl.maximum(gl.max(largest, 0).to(gl.float32), _TINY))
        p, rescale, row_max, row_sum = softmax_step(scores, lift, row_max, row_sum, not ALL_VISIBLE)
        p_operand = gl.convert_layout(p.to(gl.float16).permute((1, 0)), SECOND, assert_trivial=True)
        rescale_rows = by_row(rescale)

        # Outputs.
        planes = _planes(value_codes.index(slot).permute((1, 0)).load(FIRST), FORMAT)
        sums = _no_tensors()
        middles_now = _no_tensors()
        zeros_now = _no_tensors()
        for g in gl.static_range(GROUPS):
            scaled = _times(p_operand, of_values[g][:, None].broadcast_to([BLOCK_N, 8]))
            for plane in gl.static_range(g * PLANES // GROUPS, (g + 1) * PLANES // GROUPS):
                v = planes[plane]
                if FORMAT == "fp8" and not ALL_VISIBLE:
                    visible = gl.convert_layout(gl.max(scores, 0), OF_FIRST) != float("-inf")
                    v = gl.where(visible[None, :], v, 0.0)
                sums = sums + (mma_v2(v, scaled, acc[plane] * rescale_rows),)
            if FORMAT != "fp8":
                constant = gl.full([16, BLOCK_N], MIDDLE, gl.float16, FIRST)
                middles_now = middles_now + (mma_v2(constant, scaled, middles[g] * rescale_rows),)
            if FORMAT == "int4":
                zero = value_zeros.index(slot).slice(g * BLOCK_N, BLOCK_N).load(OF_FIRST)
                if not ALL_VISIBLE:
                    visible = gl.convert_layout(gl.max(scores, 0), OF_FIRST) != float("-inf")
                    zero = gl.where(visible, zero, 0.0)
                zero = zero[None, :].broadcast_to([16, BLOCK_N])
                zeros_now = zeros_now + (mma_v2(zero, p_operand, zeros[g] * rescale_rows),)
        acc = sums
        if FORMAT != "fp8":
            middles = middles_now
        if FORMAT == "int4":
            zeros = zeros_now
        slot = gl.where(slot + 1 == STAGES, 0, slot + 1)

    for plane in gl.static_range(PLANES):
        total = acc[plane] * (UNIT_OF_CODES / _times_sixteen(FORMAT, plane))
        if FORMAT != "fp8":
            below = zeros[plane * GROUPS // PLANES] - middles[plane * GROUPS // PLANES]
            total += gl.max(below, 0)[None, :]  # all alike
        rows.store_partial(total, row_max, row_sum, plane * WV, plane == 0)


def prepare_decode(*arguments: Any) -> Any:
    """The call on every quantised cache that lies as this one does."""
    return prepare_decode_by(_kernel_of, *arguments)


def _kernel_of(call: DecodeCall, cache: KVCache) -> tuple[Kernel, dict[str, Any]]:
    assert isinstance(cache, QuantizedKV)
    arguments = quantized_arguments(call, cache)
    key, value = arguments["k_ptr"], arguments["v_ptr"]
    scales = scale_rows(cache.key)[0], scale_rows(cache.value)[0]
    return codes_kernel, arguments | {
        "window_splits": call.config.window_splits,
        **named("stride_qb stride_qm stride_qh", row_strides(call.query, False, 1)),
        **named("stride_kb stride_kh", row_strides(key, False, UNIT)[::2]),
        **named("stride_vb stride_vh", row_strides(value, False, UNIT)[::2]),
        **named("stride_ksb stride_kss stride_ksh", row_strides(scales[0], False, UNIT)),
        **named("stride_vsb stride_vss stride_vsh", row_strides(scales[1], False, UNIT)),
        **named("stride_kwb stride_kwn stride_kwh", row_strides(cache.key_window, False, UNIT)),
        **named("stride_vwb stride_vwn stride_vwh", row_strides(cache.value_window, False, UNIT)),
        "STAGES": call.config.num_stages,
    }


codes_kernel = Kernel(_codes_kernel, **COMPILE_OPTIONS)
