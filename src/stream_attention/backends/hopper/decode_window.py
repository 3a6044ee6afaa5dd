"""The part of decode_quantized.py that is over the latest tokens, which a quantised cache keeps as they came."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .decode_tiles import (
    FIRST,
    MMA,
    SECOND,
    by_row,
    copied,
    hide,
    modify,
    query,
    row_parameters,
    softmax_step,
    store_partial,
    swizzled,
    upper,
)
from .versions import barrier, copy_async

WINDOW_N = gl.constexpr(32)
"""Latest tokens at a time."""


@gluon.jit
def window_part(
    q_ptr, stride_qm, stride_qh, k_ptr, stride_kn, v_ptr, stride_vn, slopes_ptr, tree_ptr, stride_rm,
    workspace_ptr, outs_ptr, at, kv_head, q_len, length, begin, end, slots, left, right, scale, softcap,
    GROUP: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_TREE: gl.constexpr, HAS_ALIBI: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, TANH: gl.constexpr,
):  # fmt: skip
    """The part of a share of the latest tokens, as they came: position n in slot n % slots."""
    BLOCK_N: gl.constexpr = WINDOW_N
    ROWS: gl.constexpr = gl.SliceLayout(1, upper(gl.zeros([16, BLOCK_N], gl.float32, MMA)).type.layout)
    KEYS: gl.constexpr = gl.SliceLayout(0, ROWS.parent)
    q = query(q_ptr, stride_qm, stride_qh, kv_head, q_len, 0, GROUP, D)
    mask_r, q_pos, slopes, tree_rows = row_parameters(
        length, q_len, slopes_ptr, tree_ptr, stride_rm, GROUP, HAS_ALIBI, HAS_TREE, ROWS
    )  # fmt: skip
    keys = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [BLOCK_N, D], swizzled(D))
    values = gl.allocate_shared_memory(v_ptr.dtype.element_ty, [BLOCK_N, DV], swizzled(DV))
    row_max = gl.full([8], float("-inf"), gl.float32, ROWS)
    row_sum = gl.zeros([8], gl.float32, ROWS)
    acc = gl.zeros([DV, 8], gl.float32, MMA)
    for start in range(begin, end, BLOCK_N):
        barrier()
        _copy_slots(k_ptr, stride_kn, start, length, slots, keys)
        _copy_slots(v_ptr, stride_vn, start, length, slots, values)
        async_copy.commit_group()
        async_copy.wait_group(0)
        barrier()
        qk = mma_v2(q, keys.permute((1, 0)).load(SECOND), gl.zeros([16, BLOCK_N], gl.float32, MMA))
        k_pos = (start + gl.arange(0, BLOCK_N, layout=KEYS))[None, :]
        scores = modify(upper(qk), scale, softcap, slopes, q_pos, k_pos, HAS_SOFTCAP, HAS_ALIBI, TANH)
        scores = hide(
            scores, k_pos < end, q_pos, k_pos, left, right, tree_rows, length - q_len, mask_r,
            HAS_LEFT, HAS_RIGHT, HAS_TREE,
        )  # fmt: skip
        p, rescale, row_max, row_sum = softmax_step(scores, 0.0, row_max, row_sum, True)
        p_operand = gl.convert_layout(p.to(q.dtype).permute((1, 0)), SECOND, assert_trivial=True)
        visible = gl.convert_layout(gl.max(scores, 0), gl.SliceLayout(0, FIRST)) != float("-inf")
        v = gl.where(visible[None, :], values.permute((1, 0)).load(FIRST), 0.0)
        acc = mma_v2(v, p_operand, acc * by_row(rescale))
    store_partial(acc, row_max, row_sum, workspace_ptr, outs_ptr, at, GROUP * q_len, 0, DV, True)


@gluon.jit
def _copy_slots(ptr, stride, start, length, slots, to):
    """Begin to copy the tokens from `start` on; those past the end are the last one."""
    layout: gl.constexpr = copied(to.shape[1])
    n = start + gl.arange(0, to.shape[0], layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, to.shape[1], layout=gl.SliceLayout(0, layout))
    slot = gl.minimum(n, length - 1) % slots
    copy_async(to, ptr + (slot * stride)[:, None] + c[None, :])
