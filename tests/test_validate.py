"""Checks of options, by every function that takes them: one check serves them all."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attention.kernels import flash_attention
from stream_attention import (
    attention,
    attention_fp8,
    attention_mass,
    decode_attention,
    explain,
    explain_decode,
    explain_fp8,
    quantize_fp8,
    varlen_attention,
)
from stream_attention.base.kv_layouts import ContiguousKV
from stream_attention.core.fused_online_attention import FusedOnlineAttention
from stream_attention.distributed import (
    query_sharded_attention,
    ring_attention,
    star_context_attention,
    tree_decode_attention,
    ulysses_attention,
)

X = torch.ones(1, 8, 2, 64)
OFFSETS = {"cu_seqlens_q": torch.tensor([0, 8]), "cu_seqlens_k": torch.tensor([0, 8])}
CACHE, CODES = ContiguousKV(X, X), quantize_fp8(X.half(), X.half())

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "attention": (attention, (X, X, X), {}),
    "attention in fp8": (attention, (X.half(), X.half(), X.half()), {"precision": "fp8", "backend": "reference"}),
    "attention by the reference": (attention, (X, X, X), {"backend": "reference"}),
    "attention in fp64": (attention, (X.double(), X.double(), X.double()), {}),
    "attention_mass": (attention_mass, (X, X), {}),
    "varlen_attention": (varlen_attention, (X[0], X[0], X[0]), OFFSETS),
    "decode_attention": (decode_attention, (X[:, :1], CACHE), {}),
    "attention_fp8": (attention_fp8, (X.half(), CODES), {"backend": "reference"}),
    "explain": (explain, (X, X, X), {}),
    "explain of a pack": (explain, (X[0], X[0], X[0]), OFFSETS),
    "explain_decode": (explain_decode, (X[:, :1], CACHE), {}),
    "explain_fp8": (explain_fp8, (X.half(), CODES), {}),
    "flash_attention": (flash_attention, (X[0, :, 0], X[0, :, 0], X[0, :, 0]), {}),
    "ring_attention": (ring_attention, (X, X, X), {}),
    "ulysses_attention": (ulysses_attention, (X, X, X), {}),
    "query_sharded_attention": (query_sharded_attention, (X, X, X), {}),
    "star_context_attention": (star_context_attention, (X, X, X), {"block_size": 4, "length": 8}),
    "tree_decode_attention": (tree_decode_attention, (X[:, :1], CACHE), {}),
    "FusedOnlineAttention": (
        lambda x, scale=None: FusedOnlineAttention(2, 64, scale=scale, dtype=x.dtype)(x, x, x),
        (X,),
        {},
    ),
}

NO_SOFTCAP = ("attention_fp8", "explain_fp8", "flash_attention", "FusedOnlineAttention")


@pytest.mark.parametrize(
    ("name", "option", "number"),
    [(name, "scale", number) for name in CALLS for number in (1e39, -1.7e308)]
    + [(name, "softcap", number) for name in CALLS if name not in NO_SOFTCAP for number in (1e39, 1e-50)],
)
def test_a_number_that_fp32_does_not_hold_is_refused(name: str, option: str, number: float) -> None:
    function, arguments, options = CALLS[name]
    words = rf"{option}: expected .*fp32 can represent it.*; got {re.escape(str(number))}"
    with pytest.raises(ValueError, match=f"^{words}"):
        function(*arguments, **options, **{option: number})


@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention", "query_sharded_attention"])
@pytest.mark.parametrize("shape", [(1, 8, 0, 64), (1, 8, 2, 0)], ids=["no heads", "D 0"])
def test_ranks_share_at_least_one_head_of_one_dim(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"query: expected at least one head and one head dim; got \[1, 8, "):
        CALLS[name][0](*(torch.ones(shape) for _ in range(3)))


def test_codes_of_fp8_have_at_least_one_head() -> None:
    with pytest.raises(ValueError, match='query: expected at least one head with precision="fp8"'):
        attention(*(torch.ones(1, 8, 0, 64).half() for _ in range(3)), precision="fp8", backend="reference")
