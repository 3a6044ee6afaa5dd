"""The functions are thin, in calls of Python functions: unlike microseconds, they are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stream_attention import attention, varlen_attention
from stream_attention.compat import attn_bias, flash_attn, flash_attn_interface, sdpa, xformers

Q, ROWS, OFFSETS = torch.randn(1, 2, 1, 8), torch.randn(4, 1, 8), torch.tensor([0, 1, 4], dtype=torch.int32)
PACK = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "max_seqlen_q": 3, "max_seqlen_k": 3}
BIAS = attn_bias.LowerTriangularMask()
HEADS_FIRST = Q.transpose(1, 2)
THIN: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    # a call, the same of ours, and how many functions more it calls
    "flash_attn_func": (lambda: flash_attn.flash_attn_func(Q, Q, Q, causal=True), lambda: dense(), 3),
    "of FlashAttention-3": (lambda: flash_attn_interface.flash_attn_func(Q, Q, Q, causal=True), lambda: dense(), 3),
    "flash_attn_varlen_func": (
        lambda: flash_attn.flash_attn_varlen_func(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 3, 3),
        lambda: varlen_attention(ROWS, ROWS, ROWS, **PACK),
        5,
    ),
    "scaled_dot_product_attention": (
        lambda: sdpa.scaled_dot_product_attention(HEADS_FIRST, HEADS_FIRST, HEADS_FIRST, is_causal=True),
        lambda: dense(),
        5,
    ),
    "memory_efficient_attention": (lambda: xformers.memory_efficient_attention(Q, Q, Q, BIAS), lambda: dense(), 5),
}


def dense() -> Any:
    return attention(Q, Q, Q, causal=True)


def functions_called(call: Callable[[], Any]) -> int:
    """Python functions, of a call that was made before."""
    for _ in range(3):
        call()
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(names)


@pytest.mark.parametrize("name", THIN)
def test_a_repeated_call_calls_few_functions_more(name: str) -> None:
    theirs, ours, more = THIN[name]
    with torch.no_grad():
        extra = functions_called(theirs) - functions_called(ours)
    assert 1 <= extra <= more
