"""FlashAttention-3's functions against attention written out, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compat.eager import attend, randn, visible
from torch.testing import assert_close

from stream_attention.compat import flash_attn_interface
from stream_attention.compat.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "a scale": {"softmax_scale": 0.3},
    "a window": {"window_size": (3, 2)},
    "a softcap": {"softcap": 2.0},
    "what tunes its kernels": {"num_splits": 4, "pack_gqa": True, "sm_margin": 8},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_the_dense_call(given: dict[str, Any]) -> None:
    q, k, v = randn(2, 9, 4, 8), randn(2, 4, 2, 8, seed=1), randn(2, 4, 2, 16, seed=2)
    seen = visible(9, 4, given.get("causal", False), given.get("window_size", (-1, -1)))
    options = {"scale": given.get("softmax_scale"), "softcap": given.get("softcap", 0.0)}
    wanted, lse = attend(q, k, v, seen, **options)
    assert_close(flash_attn_func(q, k, v, **given), wanted)
    out, found = flash_attn_func(q, k, v, **given, return_attn_probs=True)
    assert_close(out, wanted)
    assert_close(found.double(), lse)  # -inf in rows without keys, where FlashAttention-2 has inf


@pytest.mark.parametrize("heads", [4, 2])
def test_packed_tensors(heads: int) -> None:
    qkv = randn(2, 9, 4 + 2 * heads, 8)
    q, k, v = qkv.split([4, heads, heads], 2)
    wanted = attend(q, k, v, visible(9, 9, True))[0]
    assert_close(flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4), wanted)
    if heads == 4:
        assert_close(flash_attn_qkvpacked_func(qkv.unflatten(2, (3, 4)), causal=True), wanted)


@pytest.mark.parametrize("used_q", [None, (2, 7), (0, 4)], ids=str)
@pytest.mark.parametrize("used_k", [None, (5, 3), (1, 0)], ids=str)
def test_sequences_of_which_a_part_is_used(used_q: tuple[int, int] | None, used_k: tuple[int, int] | None) -> None:
    tensors = [randn(11, 4, 8), randn(13, 2, 8, seed=1), randn(13, 2, 8, seed=2)]  # a row behind the last sequence
    ours = [x.clone().requires_grad_() for x in tensors]
    truth = [x.clone().requires_grad_() for x in tensors]
    q_offsets, k_offsets = torch.tensor([[0, 3, 10], [0, 5, 12]], dtype=torch.int32)
    used = [None if one is None else torch.tensor(one, dtype=torch.int32) for one in (used_q, used_k)]
    options: dict[str, Any] = {"causal": True, "return_attn_probs": True}
    out, lse = flash_attn_varlen_func(*ours, q_offsets, k_offsets, 7, 7, *used, **options)
    wanted, wanted_lse = torch.zeros(11, 4, 8).double(), torch.full((4, 11), -torch.inf).double()
    for row, (q_start, k_start) in enumerate(((0, 0), (3, 5))):
        q_len = (3, 7)[row] if used_q is None else used_q[row]
        k_len = (5, 7)[row] if used_k is None else used_k[row]
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        one, its_lse = attend(truth[0][None, rows], *(x[None, keys] for x in truth[1:]), visible(q_len, k_len, True))
        wanted[rows], wanted_lse[:, rows] = one[0], its_lse[0]
    assert_close(out, wanted)
    assert_close(lse.double(), wanted_lse)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for mine, theirs in zip(ours, truth, strict=True):
        assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_splits_are_combined(dtype: torch.dtype | None) -> None:
    q, k, v = (x.float() for x in (randn(2, 5, 4, 8), randn(2, 12, 4, 8, seed=1), randn(2, 12, 4, 8, seed=2)))
    parts = [
        flash_attn_func(q, x, y, return_attn_probs=True) for x, y in zip(k.split(4, 1), v.split(4, 1), strict=True)
    ]
    outs, lses = (torch.stack(list(one)) for one in zip(*parts, strict=True))
    out, lse = flash_attn_combine(outs, lses.mT, out_dtype=dtype)
    wanted, wanted_lse = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.dtype is (dtype or torch.float32) and lse.shape == (2, 5, 4)
    assert_close(out, wanted.to(out.dtype))
    assert_close(lse, wanted_lse.mT)
    room = torch.empty_like(out)
    assert flash_attn_combine(outs, lses.mT, room, dtype)[0] is room
    assert torch.equal(room, out)


def test_what_the_scheduler_would_be_told_is_accepted_and_changes_nothing() -> None:
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    metadata = get_scheduler_metadata(2, 1, 8, 4, 2, 8, lengths, page_size=4, causal=True)
    q, cache = randn(2, 1, 4, 8), randn(2, 8, 2, 8)
    plain = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths)
    given = {"scheduler_metadata": metadata, "pack_gqa": True, "sm_margin": 4}
    assert metadata.dtype is torch.int32
    assert torch.equal(plain, flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, **given))


Q = torch.zeros(2, 5, 4, 8)
ROWS, OFFSETS = torch.zeros(10, 4, 8), torch.tensor([0, 3, 10], dtype=torch.int32)
PARTS = torch.zeros(3, 2, 5, 4, 8)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "qv": (lambda: flash_attn_func(Q, Q, Q, qv=Q), NotImplementedError, "^qv: expected its default; got a tensor"),
    "descale": (
        lambda: flash_attn_func(Q, Q, Q, k_descale=torch.ones(2, 4)),
        NotImplementedError,
        "^k_descale: expected its default; got a tensor",
    ),
    "chunks": (
        lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 7, 7, attention_chunk=4),
        NotImplementedError,
        "^attention_chunk: expected its default; got 4",
    ),
    "chunks of a cache": (
        lambda: flash_attn_with_kvcache(Q, Q, Q, attention_chunk=4),
        NotImplementedError,
        "^attention_chunk",
    ),
    "shape": (lambda: flash_attn_func(Q[0], Q, Q), RuntimeError, "^q: expected shape"),
    "qkv": (lambda: flash_attn_qkvpacked_func(Q), AssertionError, r"^qkv: expected \[B, T, 3, H, D\], or"),
    "odd heads": (lambda: flash_attn_qkvpacked_func(Q, num_heads_q=3), AssertionError, "^qkv: expected"),
    "used": (
        lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 7, 7, OFFSETS),
        RuntimeError,
        r"^seqused_q: expected int32 of shape \[2\]; got torch.int32 of shape \[3\]",
    ),
    "used, int64": (
        lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 7, 7, None, OFFSETS[1:].long()),
        RuntimeError,
        "^seqused_k: expected int32",
    ),
    "parts": (lambda: flash_attn_combine(PARTS, PARTS[..., :2]), RuntimeError, r"\[splits, B, Tq, Hq, Dv\]"),
    "their dtype": (
        lambda: flash_attn_combine(PARTS.half(), PARTS[..., 0]),
        RuntimeError,
        "^out_partial: expected dtype torch.float32",
    ),
    "out": (
        lambda: flash_attn_combine(PARTS, PARTS[..., 0], PARTS[0].half()),
        RuntimeError,
        "^out: expected torch.float32 of shape",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_call_raises_what_the_library_raises(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_the_version_says_who_it_is() -> None:
    assert flash_attn_interface.__version__ == "3.0.0+stream.attention"
