"""flash_attention(Q, K, V) on 2-D tensors, as the first prototype's documentation shows it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attention as package
from flash_attention.kernels import flash_attention


def qkv(q_len: int = 5, k_len: int = 12, dim: int = 8, value_dim: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((q_len, dim), (k_len, dim), (k_len, value_dim))
    return [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]


def by_hand(Q: Tensor, K: Tensor, V: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
    scores = Q @ K.mT * (Q.shape[1] ** -0.5 if scale is None else scale)
    if causal:
        ahead = torch.ones(scores.shape, dtype=torch.bool, device=Q.device).triu(1 + K.shape[0] - Q.shape[0])
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores.softmax(-1) @ V


def test_the_documented_example() -> None:
    d_model, global_seq_len, local_seq_len = 128, 1024, 16
    Q = torch.randn(local_seq_len, d_model)
    K = torch.randn(global_seq_len, d_model)
    V = torch.randn(global_seq_len, d_model)
    O = flash_attention(Q, K, V)  # noqa: E741
    assert O.shape == Q.shape and O.dtype is torch.float32
    torch.testing.assert_close(O, by_hand(Q, K, V))
    assert package.flash_attention is flash_attention


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.0}, {"scale": 0.7, "causal": True}], ids=str)
@pytest.mark.parametrize("sizes", [(5, 12), (12, 12), (1, 12), (5, 12, 8, 3), (3, 7, 5, 5)], ids=str)
def test_it_is_attention_of_local_queries_over_global_keys(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    tensors = [t.requires_grad_() for t in qkv(*sizes)]
    out, expected = flash_attention(*tensors, **options), by_hand(*tensors, **options)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(expected)
    for got, wanted in zip(
        *(torch.autograd.grad((o * weights).sum(), tensors, allow_unused=True) for o in (out, expected)), strict=True
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(16, 1024, 128, 128), (512, 512, 64, 64), (300, 1000, 64, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_it_is_as_exact_as_plain_torch(dtype: torch.dtype, sizes: tuple[int, ...], causal: bool) -> None:
    pytest.importorskip("triton")
    from gpu_tools import assert_earned, with_gradients

    tensors = [t.to("cuda", dtype) for t in qkv(*sizes)]
    got = with_gradients(partial(flash_attention, causal=causal), *tensors)
    assert got[0].is_cuda
    assert_earned(got, partial(with_gradients, partial(by_hand, causal=causal)), *tensors)


def test_columns_of_a_larger_matrix_are_read_where_they_lie() -> None:
    joined = torch.cat(qkv(6, 6), 1)
    assert torch.equal(flash_attention(*joined.chunk(3, 1)), flash_attention(*qkv(6, 6)))


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ([t[None] for t in qkv()], ValueError, r"Q: expected two dims .*; got \[1, 5, 8\]. Batches and heads"),
        ([qkv()[0], *qkv(dim=4)[1:]], ValueError, "key: expected the query's head dim"),
        ([[1.0], *qkv()[1:]], TypeError, "Q: expected a torch.Tensor; got list"),
        ([*qkv()[:2], qkv(k_len=3)[2]], ValueError, "value: expected the key's length"),
    ],
)
def test_bad_calls_are_refused(tensors: list[Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flash_attention(*tensors)


def test_a_group_without_leave_to_use_it_is_refused() -> None:
    """tests/distributed/test_query_shard.py has processes."""
    with pytest.raises(ValueError, match="process_group: expected None without enable_distributed=True; got str"):
        flash_attention(*qkv(), process_group="world")
    assert torch.equal(flash_attention(*qkv(), enable_distributed=True), flash_attention(*qkv()))
