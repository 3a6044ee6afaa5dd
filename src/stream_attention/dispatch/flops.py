"""What the ops cost, for `torch.utils.flop_counter`.

Counted as torch counts SDPA: two products in the forward and five in the backward, two operations for each element of a
product, and nothing for what causal, window or a mask hide. That module imports Triton, so nothing here imports it: it
gets the formulas once it is there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_MODULE = "torch.utils.flop_counter"


def forward_flops(*arguments: Any, out_val: Any = None) -> int:
    """Of `stream_attention::forward`: Q K^T and P V."""
    scores, dim, value_dim = _scores(arguments)
    return 2 * scores * (dim + value_dim)


def backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """Of `stream_attention::backward`: Q K^T again, dO V^T, dS K, dS^T Q and P^T dO."""
    scores, dim, value_dim = _scores(arguments[5:])
    return 2 * scores * (3 * dim + 2 * value_dim)


def _scores(arguments: tuple[Any, ...]) -> tuple[int, int, int]:
    """How many scores a call has, D and Dv. Packed sequences whose offsets have no values count as the longest."""
    query, key, value = arguments[:3]
    cu_seqlens_q, cu_seqlens_k, _, _, longest_q, longest_k = arguments[8:14]
    if cu_seqlens_q is None:
        pairs = query.shape[0] * query.shape[1] * key.shape[1]
    elif all(type(offsets) is Tensor and not offsets.is_meta for offsets in (cu_seqlens_q, cu_seqlens_k)):
        pairs = int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())
    else:
        pairs = (cu_seqlens_q.shape[0] - 1) * longest_q * longest_k
    return pairs * query.shape[-2], query.shape[-1], value.shape[-1]


def register_flop_formulas() -> None:
    """Give the formulas to the registry, if it was imported, and to the counters at work, which copied it before."""
    counting = sys.modules.get(_MODULE)
    if counting is None:
        return
    formulas = {torch.ops.stream_attention.forward: forward_flops, torch.ops.stream_attention.backward: backward_flops}
    for op, formula in formulas.items():
        if op not in counting.flop_registry:
            counting.register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counting._FlopCounterMode):
            mode.counter.flop_registry = formulas | mode.counter.flop_registry  # a mapping of the user's own wins
