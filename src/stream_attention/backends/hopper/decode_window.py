"""The part of decode_quantized.py that is over the latest tokens, which a quantised cache keeps as they came."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .decode_tiles import FIRST, MMA, SECOND, beside_scores, by_row, copied, softmax_step, swizzled, upper
from .versions import barrier, copy_async

WINDOW_N = gl.constexpr(32)
"""Latest tokens at a time."""


@gluon.jit
def window_part(rows, k_ptr, stride_kn, v_ptr, stride_vn, begin, end, slots, D: gl.constexpr):
    """The part of a share of the latest tokens, as they came: position n in slot n % slots."""
    BLOCK_N: gl.constexpr = WINDOW_N
    DV: gl.constexpr = rows.DV
    ROWS: gl.constexpr = gl.SliceLayout(1, upper(gl.zeros([16, BLOCK_N], gl.float32, MMA)).type.layout)
    KEYS: gl.constexpr = gl.SliceLayout(0, ROWS.parent)
    q = rows.load(0, D)
    beside = beside_scores(rows, ROWS)
    keys = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [BLOCK_N, D], swizzled(D))
    values = gl.allocate_shared_memory(v_ptr.dtype.element_ty, [BLOCK_N, DV], swizzled(DV))
    row_max = gl.full([8], float("-inf"), gl.float32, ROWS)
    row_sum = gl.zeros([8], gl.float32, ROWS)
    acc = gl.zeros([DV, 8], gl.float32, MMA)
    for start in range(begin, end, BLOCK_N):
        barrier()
        _copy_slots(k_ptr, stride_kn, start, rows.length, slots, keys)
        _copy_slots(v_ptr, stride_vn, start, rows.length, slots, values)
        async_copy.commit_group()
        async_copy.wait_group(0)
        barrier()
        qk = mma_v2(q, keys.permute((1, 0)).load(SECOND), gl.zeros([16, BLOCK_N], gl.float32, MMA))
        k_pos = (start + gl.arange(0, BLOCK_N, layout=KEYS))[None, :]
        scores = beside.hide(beside.modify(upper(qk), rows.scale, k_pos), k_pos < end, k_pos)
        p, rescale, row_max, row_sum = softmax_step(scores, 0.0, row_max, row_sum, True)
        p_operand = gl.convert_layout(p.to(q.dtype).permute((1, 0)), SECOND, assert_trivial=True)
        visible = gl.convert_layout(gl.max(scores, 0), gl.SliceLayout(0, FIRST)) != float("-inf")
        v = gl.where(visible[None, :], values.permute((1, 0)).load(FIRST), 0.0)
        acc = mma_v2(v, p_operand, acc * by_row(rescale))
    rows.store_partial(acc, row_max, row_sum, 0, True)


@gluon.jit
def _copy_slots(ptr, stride, start, length, slots, to):
    """Begin to copy the tokens from `start` on; those past the end are the last one."""
    layout: gl.constexpr = copied(to.shape[1])
    n = start + gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, layout))
    slot = gl.minimum(n, length - 1) % slots
    copy_async(to, ptr + (slot * stride)[:, None] + c[None, :])
