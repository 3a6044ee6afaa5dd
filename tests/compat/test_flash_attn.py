"""FlashAttention-2's functions against attention written out, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compat.eager import attend, randn, visible
from torch import Tensor
from torch.testing import assert_close

from stream_attention.compat import flash_attn
from stream_attention.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, aligned bottom-right": {"causal": True},
    "a scale": {"softmax_scale": 0.3},
    "a window": {"window_size": (3, 2)},
    "a window on one side": {"window_size": (-1, 1)},
    "sides below -1 are unbounded too": {"window_size": (-5, -7)},
    "causal and a window, as transformers passes it": {"causal": True, "window_size": (3, 3)},
    "a softcap": {"softcap": 2.0},
    "a softcap below 0 is none": {"softcap": -1.0},
    "slopes": {"alibi_slopes": SLOPES, "causal": True},
    "slopes of rows": {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES])},
    "deterministic": {"deterministic": True},
}
LENGTHS = {"as many": (9, 9), "fewer queries": (4, 9), "fewer keys, so that rows see none": (9, 4)}


def expected(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    seen = visible(q.shape[1], k.shape[1], given.get("causal", False), given.get("window_size", (-1, -1)))
    options = {"scale": given.get("softmax_scale"), "softcap": given.get("softcap", 0.0)}
    return attend(q, k, v, seen, **options, slopes=given.get("alibi_slopes"))


def tensors(q_len: int, k_len: int, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return randn(2, q_len, 4, 8), randn(2, k_len, kv_heads, 8, seed=1), randn(2, k_len, kv_heads, 8, seed=2)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_the_dense_call(given: dict[str, Any], lengths: tuple[int, int]) -> None:
    q, k, v = tensors(*lengths)
    wanted, lse = expected(q, k, v, given)
    assert_close(flash_attn_func(q, k, v, **given), wanted)
    out, found, probs = flash_attn_func(q, k, v, **given, return_attn_probs=True)
    assert_close(out, wanted)
    assert_close(found.double(), lse.masked_fill(lse == -torch.inf, torch.inf))
    assert probs.shape == (0,) and probs.dtype is q.dtype


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_the_packed_call(given: dict[str, Any]) -> None:
    q, k, v = randn(10, 4, 8), randn(12, 2, 8, seed=1), randn(12, 2, 8, seed=2)
    q_offsets, k_offsets = torch.tensor([[0, 3, 10], [0, 5, 12]], dtype=torch.int32)
    out, lse, probs = flash_attn_varlen_func(q, k, v, q_offsets, k_offsets, 7, 7, **given, return_attn_probs=True)
    assert lse.shape == (4, 10) and probs.shape == (0,)
    for row, (rows, keys) in enumerate(((slice(0, 3), slice(0, 5)), (slice(3, 10), slice(5, 12)))):
        slopes = given.get("alibi_slopes")
        own = given if slopes is None or slopes.dim() == 1 else given | {"alibi_slopes": slopes[row]}
        wanted, its_lse = expected(q[None, rows], k[None, keys], v[None, keys], own)
        assert_close(out[rows], wanted[0])
        assert_close(lse[:, rows].double(), its_lse[0])


def test_keys_in_pages_and_a_gradient_that_is_not_taken() -> None:
    """The library computes such a call, and its backward is of none."""
    q, pages = randn(5, 4, 8).requires_grad_(), randn(6, 4, 2, 8, seed=1)
    q_offsets, k_offsets = torch.tensor([[0, 5], [0, 7]], dtype=torch.int32)
    options = {"block_table": torch.tensor([[4, 1]], dtype=torch.int32)}
    out = flash_attn_varlen_func(q, pages, pages, q_offsets, k_offsets, 5, 7, **options)
    wanted = flash_attn_varlen_func(q.detach(), pages, pages, q_offsets, k_offsets, 5, 7, **options)
    assert torch.equal(out, wanted) and out.requires_grad
    with pytest.raises(NotImplementedError, match=r"^block_table: expected None where a gradient is taken"):
        out.sum().backward()


def test_arguments_may_be_positional() -> None:
    q, k, v = tensors(5, 9)
    found = flash_attn_func(q, k, v, 0.0, 0.3, True, (4, -1), 2.0, SLOPES, False, True)
    given = {"softmax_scale": 0.3, "causal": True, "window_size": (4, -1), "softcap": 2.0, "alibi_slopes": SLOPES}
    assert_close(found[0], expected(q, k, v, given)[0])


def test_packed_tensors_are_views_with_one_gradient() -> None:
    qkv = randn(2, 9, 3, 4, 8).requires_grad_()
    flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
    q, k, v = qkv.detach().unbind(2)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    attend(q, k, v, visible(9, 9, True))[0].sum().backward()
    assert_close(qkv.grad, torch.stack([q.grad, k.grad, v.grad], 2))
    q, kv = randn(2, 4, 4, 8), randn(2, 9, 2, 2, 8)
    assert_close(flash_attn_kvpacked_func(q, kv, causal=True), attend(q, *kv.unbind(2), visible(4, 9, True))[0])


def test_packed_tensors_of_sequences() -> None:
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    qkv, q, kv = randn(10, 3, 4, 8), randn(10, 4, 8), randn(10, 2, 2, 8)
    wanted = flash_attn_varlen_func(*qkv.unbind(1), offsets, offsets, 7, 7, causal=True)
    assert_close(flash_attn_varlen_qkvpacked_func(qkv, offsets, 7, causal=True), wanted)
    wanted = flash_attn_varlen_func(q, *kv.unbind(1), offsets, offsets, 7, 7, causal=True)
    assert_close(flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 7, 7, causal=True), wanted)


def test_keys_in_pages() -> None:
    """The table of `flash_attn_varlen_func`, with lengths in `cu_seqlens_k`."""
    q, pages, values = randn(10, 4, 8), randn(6, 4, 2, 8, seed=1), randn(6, 4, 2, 8, seed=2)
    q_offsets, k_offsets = torch.tensor([[0, 3, 10], [0, 5, 12]], dtype=torch.int32)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    options = {"causal": True, "block_table": table, "return_attn_probs": True}
    out, lse, _ = flash_attn_varlen_func(q, pages, values, q_offsets, k_offsets, 7, 7, **options)
    for row, (rows, length) in enumerate(((slice(0, 3), 5), (slice(3, 10), 7))):
        keys, its_values = (x[table[row].long()].flatten(0, 1)[None, :length] for x in (pages, values))
        wanted, its_lse = expected(q[None, rows], keys, its_values, {"causal": True})
        assert_close(out[rows], wanted[0])
        assert_close(lse[:, rows].double(), its_lse[0])


# Gradients


def test_gradients_of_dense_and_packed_calls() -> None:
    wanted = [x.requires_grad_() for x in tensors(7, 7)]
    attend(*wanted, visible(7, 7, True, (3, -1)))[0].square().sum().backward()
    dense = [x.requires_grad_() for x in tensors(7, 7)]
    flash_attn_func(*dense, causal=True, window_size=(3, -1)).square().sum().backward()
    packed = [x.requires_grad_() for x in tensors(7, 7)]
    offsets = torch.tensor([0, 7, 14], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in packed]
    found = flash_attn_varlen_func(*rows, offsets, offsets, 7, 7, causal=True, window_size=(3, -1))
    found.square().sum().backward()
    for truth, one, other in zip(wanted, dense, packed, strict=True):
        assert_close(one.grad, truth.grad)
        assert_close(other.grad, truth.grad)


def test_dropout_has_the_mean_of_none() -> None:
    torch.manual_seed(0)
    q, k, v = randn(1, 64, 2, 8), randn(1, 64, 2, 8, seed=1), torch.ones(1, 64, 2, 8, dtype=torch.float64)
    out = flash_attn_func(q, k, v, 0.5)
    assert not torch.equal(out, flash_attn_func(q, k, v, 0.5))
    assert abs(out.mean() - 1) < 6 * out[..., 0].std() / 128**0.5  # 128 rows


# Layouts


def test_a_last_dim_with_gaps_is_copied_as_in_the_library() -> None:
    q, k, v = (x.mT.contiguous().mT for x in tensors(5, 9))
    assert q.stride(-1) != 1
    assert_close(flash_attn_func(q, k, v), expected(q, k, v, {})[0])


def test_lengths_may_be_tensors_as_transformers_passes_them() -> None:
    q, offsets = randn(10, 4, 8), torch.tensor([0, 3, 10], dtype=torch.int32)
    longest = offsets.diff().max()
    found = flash_attn_varlen_func(q, q, q, offsets, offsets, longest, longest)
    assert_close(found, flash_attn_varlen_func(q, q, q, offsets, offsets, 7, 7))


def test_the_sides_of_a_window_may_be_tensors_as_in_the_library() -> None:
    q, k, v = tensors(5, 9)
    window, wanted = torch.tensor([3, 2]), flash_attn_func(q, k, v, window_size=(3, 2))
    assert_close(flash_attn_func(q, k, v, window_size=window), wanted)
    assert_close(flash_attn_func(q, k, v, window_size=tuple(window)), wanted)
    assert_close(flash_attn_with_kvcache(q, k.clone(), v.clone(), window_size=window), wanted)


def test_it_compiles() -> None:
    q, k, v = (x.float() for x in tensors(5, 9))
    compiled = torch.compile(lambda q, k, v: flash_attn_func(q, k, v, causal=True), backend="eager", fullgraph=True)
    assert_close(compiled(q, k, v), flash_attn_func(q, k, v, causal=True))


# Refusals


Q = torch.zeros(2, 5, 4, 8)
ROWS, OFFSETS = torch.zeros(10, 4, 8), torch.tensor([0, 3, 10], dtype=torch.int32)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": (lambda: flash_attn_func(Q[0], Q, Q), RuntimeError, r"^q: expected shape"),
    "head dim": (lambda: flash_attn_func(Q, Q[..., :4], Q), RuntimeError, r"^k: expected the query's head dim D=8"),
    "heads": (lambda: flash_attn_func(Q, Q[:, :, :3], Q[:, :, :3]), RuntimeError, r"^q: expected a multiple"),
    "dtypes": (lambda: flash_attn_func(Q, Q.half(), Q), RuntimeError, r"^k: expected the query's dtype"),
    "integers": (lambda: flash_attn_func(Q.int(), Q.int(), Q.int()), RuntimeError, r"^q: expected dtype float16"),
    "dropout": (lambda: flash_attn_func(Q, Q, Q, 1.0), RuntimeError, r"^dropout_p: expected a probability"),
    "scale": (lambda: flash_attn_func(Q, Q, Q, 0.0, "1"), RuntimeError, r"^softmax_scale: expected a number"),
    "slopes": (lambda: flash_attn_func(Q, Q, Q, alibi_slopes=SLOPES[:3]), RuntimeError, r"^alibi_slopes: expected"),
    "probabilities": (
        lambda: flash_attn_func(Q, Q, Q, 0.1, return_attn_probs=True),
        NotImplementedError,
        r"^return_attn_probs: expected False with dropout; got True",
    ),
    "qkv": (lambda: flash_attn_qkvpacked_func(Q), RuntimeError, r"^qkv: expected shape \[B, T, 3, H, D\]"),
    "kv": (lambda: flash_attn_kvpacked_func(Q, Q[:, :, None]), RuntimeError, r"^kv: expected shape \[B, T, 2, H, D\]"),
    "packed qkv": (
        lambda: flash_attn_varlen_qkvpacked_func(Q, OFFSETS, 7),
        RuntimeError,
        r"^qkv: expected shape \[N, 3, H, D\]",
    ),
    "offsets": (
        lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, OFFSETS + 1, OFFSETS, 7, 7),
        RuntimeError,
        "^cu_seqlens_q: expected 0 as the first value",
    ),
    "longest": (
        lambda: flash_attn_varlen_func(ROWS, ROWS, ROWS, OFFSETS, OFFSETS, 6, 7),
        RuntimeError,
        "^max_seqlen_q: expected at least the longest sequence, 7",
    ),
    "dropout with pages": (
        lambda: flash_attn_varlen_func(ROWS, Q, Q, OFFSETS, OFFSETS, 7, 7, 0.1, block_table=OFFSETS[None]),
        NotImplementedError,
        "^dropout_p: expected 0 with a block_table",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_call_raises_what_the_library_raises(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_an_argument_too_many_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'causl'"):
        flash_attn_func(Q, Q, Q, causl=True)
    assert flash_attn.__version__ == "2.8.3+stream.attention"
