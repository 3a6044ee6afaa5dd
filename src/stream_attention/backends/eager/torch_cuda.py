"""torch's own CUDA kernels, the ones behind SDPA: for what no kernel of ours computes on a GPU.

Two ops, chosen by the plan (tuning.py): FlashAttention-2, for fp16 and bf16 up to D 256 on a GPU without Triton,
and the memory-efficient kernel, for wider heads, fp32 and older GPUs. Both take `[B, T, H, D]`, align causal
bottom-right and return the LSE, natural log. Both read 16 bytes at a time: other head dims are padded, and tensors that
lie otherwise are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...base.problem import Gradients, Inputs, Problem, aligned, padded_to

BOTTOM_RIGHT = 2
"""`custom_mask_type` of the memory-efficient kernel: 0 masks nothing, 1 is causal top-left, 2 causal bottom-right."""

LSE_ROWS = 32
"""The memory-efficient kernel pads the rows of its LSE to a multiple of this."""


def forward(problem: Problem, inputs: Inputs, path: str) -> tuple[Tensor, Tensor]:
    """out `[B, Tq, Hq, Dv]` and lse `[B, Hq, Tq]` of a dense problem."""
    query, key, value = _inputs(problem, inputs, path)
    causal = problem.right == 0
    if path == "cuda_flash":
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, None, None, problem.q_len, problem.k_len, 0.0, causal, False, scale=problem.scale
        )
    else:
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            query, key, value, None, None, None, problem.q_len, problem.k_len, 0.0, BOTTOM_RIGHT * causal, True,
            scale=problem.scale,
        )  # fmt: skip
    return out[..., : problem.value_dim].contiguous(), lse[..., : problem.q_len].contiguous()


def backward(problem: Problem, inputs: Inputs, path: str, out: Tensor, lse: Tensor, grad_out: Tensor) -> Gradients:
    """The gradients of query, key and value."""
    query, key, value = _inputs(problem, inputs, path)
    out, grad_out = (_in_16_bytes(t) for t in (out, grad_out))
    lse = lse.contiguous()  # of a packed sequence it is a slice, which the ops would misread
    causal, lengths = problem.right == 0, (problem.q_len, problem.k_len)
    if path == "cuda_flash":
        unused = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)  # the state of a dropout that is not there
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out, query, key, value, out, lse, None, None, *lengths, 0.0, causal, *unused, scale=problem.scale
        )
    else:
        lse = pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=torch.inf)
        seed = query.new_empty((), dtype=torch.int64)
        dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
            grad_out, query, key, value, None, out, None, None, *lengths, lse, 0.0, seed, seed,
            BOTTOM_RIGHT * causal, False, scale=problem.scale,
        )  # fmt: skip
        if problem.group > 1:
            dk, dv = (grad.unflatten(2, (-1, problem.group)).sum(3) for grad in (dk, dv))
    return Gradients(dq[..., : problem.head_dim], dk[..., : problem.head_dim], dv[..., : problem.value_dim])


def _inputs(problem: Problem, inputs: Inputs, path: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as the ops read them."""
    query, key, value = (_in_16_bytes(t) for t in inputs[:3])
    if path == "cuda_efficient" and problem.group > 1:  # it has no GQA
        key, value = (t.repeat_interleave(problem.group, dim=2) for t in (key, value))
    return query, key, value


def _in_16_bytes(t: Tensor) -> Tensor:
    """`t` with its last dim padded to whole 16 bytes, and every row on 16 bytes."""
    unit = 16 // t.element_size()
    t = padded_to(t, -(-t.shape[-1] // unit) * unit)
    return t if aligned(t) else t.clone(memory_format=torch.contiguous_format)
