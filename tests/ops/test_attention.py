"""attention(): what it means, that it agrees with the reference within what is earned, and what it refuses."""

from __future__ import annotations

import inspect
import math
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import random_case, why_not

from stream_attention import (
    FusedOnlineAttention,
    attention,
    explain,
    force_backend,
    merge_states,
    varlen_attention,
)
from stream_attention.backends.reference import attention as reference
from stream_attention.dispatch.plan import forget_plans
from stream_attention.ops import attention as attention_module
from stream_attention_tools.testing import Case, Report, check_case, make

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (F16, BF16, F32, F64)
NAN, INF = math.nan, math.inf


def check(case: Case, backend: str) -> Report:
    reasons = why_not(case, backend)
    if reasons:
        pytest.skip(f"{backend}: {' '.join(reasons)}")
    return check_case(case, backend)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def qkv(
    B: int = 2, Tq: int = 6, Tk: int = 8, Hq: int = 4, Hkv: int = 2, D: int = 8, dtype: torch.dtype = F32
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, Tq, Hq, D), (B, Tk, Hkv, D), (B, Tk, Hkv, D))
    query, key, value = (normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes))
    return query, key, value


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


def weights(backend: str, q_len: int = 3, k_len: int = 4, **options: Any) -> Tensor:
    """The attention weights [Tq, Tk] of equal scores: the output, where the values are the unit vectors."""
    query, key = torch.zeros(1, q_len, 1, 8), torch.zeros(1, k_len, 1, 8)
    value = torch.eye(k_len).view(1, k_len, 1, k_len)
    return attention(query, key, value, backend=backend, **options)[0, :, 0]


# What it means


def test_one_key_gives_its_value_and_its_score(backend: str) -> None:
    query, key = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2), torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)
    out, lse = attention(query, key, torch.full((1, 1, 1, 2), 7.0), scale=0.5, return_lse=True, backend=backend)
    assert out.tolist() == [[[[7.0, 7.0]]]]
    torch.testing.assert_close(lse, torch.tensor([[[5.5]]]))


def test_weights_are_the_odds_of_the_scores(backend: str) -> None:
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, math.log(3.0)]).view(1, 2, 1, 1)
    value = torch.tensor([0.0, 8.0]).view(1, 2, 1, 1)
    out, lse = attention(query, key, value, return_lse=True, backend=backend)
    torch.testing.assert_close(out.flatten(), torch.tensor([6.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(4.0)]))


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, ["1111", "1111", "1111"]),
        ({"causal": True}, ["1100", "1110", "1111"]),
        ({"window": (1, 0)}, ["1100", "0110", "0011"]),
        ({"window": (0, 1)}, ["0110", "0011", "0001"]),
        ({"window": (-1, 0)}, ["1100", "1110", "1111"]),
        ({"window": (0, -1)}, ["0111", "0011", "0001"]),
        ({"window": (1, 1), "causal": True}, ["1100", "0110", "0011"]),
        ({"mask": torch.tensor([True, False, True, True])}, ["1011", "1011", "1011"]),
        ({"mask": torch.tensor([[True], [False], [True]])}, ["1111", "0000", "1111"]),
        ({"bias": torch.tensor([0.0, -INF, 0.0, 0.0]), "causal": True}, ["1000", "1010", "1011"]),
    ],
    ids=str,
)
def test_which_keys_a_query_sees(backend: str, options: dict[str, Any], seen: list[str]) -> None:
    expected = torch.tensor([[float(c) for c in row] for row in seen])
    torch.testing.assert_close(weights(backend, **options), expected / expected.sum(-1, keepdim=True).clamp_min(1))


def test_causal_with_more_queries_than_keys_leaves_the_first_rows_empty(backend: str) -> None:
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.5, 0.5]])
    torch.testing.assert_close(weights(backend, q_len=4, k_len=2, causal=True), expected)


def test_alibi_is_minus_slope_times_distance_from_the_aligned_position(backend: str) -> None:
    found = weights(backend, q_len=2, k_len=3, alibi_slopes=torch.tensor([math.log(2.0)]))
    expected = torch.tensor([[0.5, 1.0, 0.5], [0.25, 0.5, 1.0]])
    torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True))


def test_a_sink_takes_its_share_and_has_no_value(backend: str) -> None:
    found = weights(backend, q_len=1, k_len=2, sink=torch.tensor([math.log(2.0)]))
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.25]]))


def test_a_sink_of_minus_infinity_is_no_sink(backend: str) -> None:
    query, key, value = qkv()
    without = attention(query, key, value, return_lse=True, backend=backend)
    with_sink = attention(query, key, value, sink=torch.full((4,), -INF), return_lse=True, backend=backend)
    torch.testing.assert_close(with_sink, without)


def test_softcap_comes_after_the_scale_and_before_the_bias(backend: str) -> None:
    query, key, value = torch.full((1, 1, 1, 1), 4.0), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    bias = torch.full((1, 1), 10.0)
    _, lse = attention(query, key, value, scale=0.5, softcap=3.0, bias=bias, return_lse=True, backend=backend)
    torch.testing.assert_close(lse.item(), 3.0 * math.tanh(2.0 / 3.0) + 10.0, rtol=1e-6, atol=0)


def test_the_default_scale_is_one_over_the_root_of_the_head_dim(backend: str) -> None:
    query, key, value = qkv(D=16)
    explicit = attention(query, key, value, scale=0.25, backend=backend)
    assert torch.equal(attention(query, key, value, backend=backend), explicit)


@pytest.mark.parametrize("causal", [False, True])
def test_a_scale_of_zero_is_the_mean_of_what_is_seen(backend: str, causal: bool) -> None:
    query, key, value = qkv(Tq=5, Tk=5, Hkv=4)
    counts = torch.arange(1, 6.0).view(1, 5, 1, 1) if causal else 5.0
    sums = value.cumsum(1) if causal else value.sum(1, keepdim=True).expand_as(value)
    out = attention(query, key, value, scale=0.0, causal=causal, backend=backend)
    torch.testing.assert_close(out, sums / counts)


@pytest.mark.parametrize("causal", [False, True])
def test_a_negative_scale_negates_the_query(backend: str, causal: bool) -> None:
    query, key, value = qkv(Tq=5, Tk=5)
    negated = attention(-query, key, value, scale=0.3, causal=causal, backend=backend)
    torch.testing.assert_close(attention(query, key, value, scale=-0.3, causal=causal, backend=backend), negated)


def test_a_query_head_reads_the_kv_head_of_its_group(backend: str) -> None:
    query, key, value = qkv(Hq=6, Hkv=2)
    out = attention(query, key, value, backend=backend)
    for head in range(6):
        one = attention(*(t[:, :, h : h + 1] for t, h in ((query, head), (key, head // 3), (value, head // 3))))
        torch.testing.assert_close(out[:, :, head : head + 1], one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_has_the_dtype_of_the_query_and_lse_is_fp32_or_fp64(backend: str, dtype: torch.dtype) -> None:
    case = Case(B=2, Tq=3, Hq=4, dtype=dtype)
    if why_not(case, backend):
        pytest.skip(" ".join(why_not(case, backend)))
    query, key, value, _ = make(case)
    out, lse = attention(query, key, value, return_lse=True, backend=backend)
    assert (out.dtype, out.shape) == (dtype, (2, 3, 4, 16))
    assert (lse.dtype, lse.shape) == (F64 if dtype is F64 else F32, (2, 4, 3))


def test_it_is_what_torch_computes(backend: str) -> None:
    query, key, value = qkv(Tq=6, Tk=9)
    mask = normal(2, 1, 6, 9) > -1
    for options, theirs in (
        ({}, {}),
        ({"causal": True}, {"attn_mask": causal_lower_right(6, 9)}),
        ({"mask": mask}, {"attn_mask": mask}),
        ({"bias": normal(6, 9)}, {"attn_mask": normal(6, 9)}),
    ):
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        expected = F.scaled_dot_product_attention(*heads_first, **theirs, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(attention(query, key, value, **options, backend=backend), expected)


# Agreement with the reference: forward and every gradient, within what is earned

SHAPE = Case(B=2, Tq=24, Tk=40, Hq=4, Hkv=2, D=16, Dv=16, seed=7)
CASES: dict[str, Case] = {
    "plain": replace(SHAPE),
    "square, where torch's flash op serves": replace(SHAPE, Tq=33, Tk=33),
    "square causal, where torch's flash op serves": replace(SHAPE, Tq=33, Tk=33, causal=True),
    "causal with a longer cache": replace(SHAPE, causal=True),
    "causal with more queries than keys": replace(SHAPE, Tq=40, Tk=24, causal=True),
    "one query": replace(SHAPE, Tq=1, causal=True),
    "one key": replace(SHAPE, Tk=1),
    "one of everything": Case(B=1, Tq=1, Tk=1, Hq=1, Hkv=1, D=1, Dv=1),
    "more rows and columns than a tile": Case(B=1, Tq=300, Tk=600, Hq=2, Hkv=1, D=8, Dv=8, causal=True, sink=True),
    "more batch entries than a tile": Case(B=9, Tq=100, Tk=100, Hq=8, Hkv=8, D=4, Dv=4, window=(20, 20), alibi="BH"),
    "odd head dim": replace(SHAPE, D=13, Dv=13),
    "large head dim": replace(SHAPE, D=256, Dv=256),
    "values wider than keys": replace(SHAPE, D=8, Dv=24),
    "values narrower than keys": replace(SHAPE, D=24, Dv=8, causal=True),
    "mqa": replace(SHAPE, Hq=6, Hkv=1, bias=(2, 6, 24, 40)),
    "gqa": replace(SHAPE, Hq=6, Hkv=3, mask=(1, 6, 24, 40), dropout_p=0.2),
    "window": replace(SHAPE, window=(5, 3)),
    "window open to the left": replace(SHAPE, window=(-1, 3)),
    "window open to the right": replace(SHAPE, window=(5, -1)),
    "causal window": replace(SHAPE, window=(5, 3), causal=True),
    "window past the end of the keys": replace(SHAPE, window=(100, 100)),
    "window that only sees itself": replace(SHAPE, window=(0, 0)),
    "key padding mask": replace(SHAPE, mask=(2, 1, 1, 40)),
    "query mask": replace(SHAPE, mask=(2, 1, 24, 1)),
    "mask per head": replace(SHAPE, mask=(1, 4, 1, 40)),
    "full mask": replace(SHAPE, mask=(2, 4, 24, 40)),
    "mask without batch and heads": replace(SHAPE, mask=(24, 40)),
    "mask of one flag": replace(SHAPE, mask=(1,)),
    "bias that hides": replace(SHAPE, bias=(2, 4, 24, 40), bias_hides=True),
    "fp32 parameters beside narrow inputs": replace(SHAPE, bias=(1, 4, 24, 40), alibi="H", sink=True, aux_dtype=F32),
    "alibi": replace(SHAPE, alibi="H"),
    "alibi per batch entry": replace(SHAPE, alibi="BH", causal=True),
    "sink": replace(SHAPE, sink=True),
    "sink with empty rows": replace(SHAPE, sink=True, mask=(2, 1, 24, 40), lse_grad=True),
    "softcap": replace(SHAPE, softcap=2.0),
    "softcap with mask": replace(SHAPE, softcap=2.0, mask=(2, 1, 24, 40), lse_grad=True),
    "scale of zero": replace(SHAPE, scale=0.0, bias=(24, 40)),
    "scale of zero, square causal": replace(SHAPE, Tk=24, scale=0.0, causal=True),
    "negative scale": replace(SHAPE, scale=-0.3, sink=True),
    "negative scale, square causal": replace(SHAPE, Tk=24, scale=-0.3, causal=True),
    "dropout": replace(SHAPE, dropout_p=0.3),
    "heavy dropout": replace(SHAPE, dropout_p=0.9, causal=True),
    "gradient through the lse": replace(SHAPE, Tk=24, causal=True, lse_grad=True),
    "deterministic": replace(SHAPE, bias=(1, 4, 1, 40), alibi="H", deterministic=True),
    "everything at once": replace(
        SHAPE, causal=True, window=(30, 2), mask=(2, 1, 24, 40), bias=(1, 4, 24, 40), bias_hides=True, alibi="BH",
        sink=True, softcap=3.0, scale=0.4, dropout_p=0.2, lse_grad=True, Dv=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(backend: str, name: str, dtype: torch.dtype) -> None:
    check(replace(CASES[name], dtype=dtype), backend)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_can_be_named_as_a_backend(name: str) -> None:
    check_case(CASES[name], "reference")


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False))
def test_agrees_with_the_reference_on_random_problems(backend: str, rng: random.Random) -> None:
    case = random_case(rng, dtypes=DTYPES, head_dims=(4, 16), max_length=40, packed=False)
    if not why_not(case, backend):
        check_case(case, backend)


def test_a_row_masked_by_the_most_negative_number_is_the_mean_and_disturbs_no_other(backend: str) -> None:
    """As models do that mask padding with finfo.min: no key of such a row is hidden, all are equally far away."""
    tensors = qkv(B=1)
    bias = torch.zeros(6, 8)
    bias[2] = torch.finfo(F32).min
    padded, plain = leaves(*tensors), leaves(*tensors)
    out = attention(*padded, bias=bias, backend=backend)
    expected = tensors[2].mean(1).repeat_interleave(2, dim=1)  # [B, Hq, D]
    torch.testing.assert_close(out[:, 2], expected)
    rows = [0, 1, 3, 4, 5]
    out[:, rows].square().sum().backward()
    attention(*plain, backend=backend)[:, rows].square().sum().backward()
    for with_row, without in zip(padded, plain, strict=True):
        torch.testing.assert_close(with_row.grad, without.grad)


# Gradients


@pytest.mark.parametrize(
    "shape",
    [(2, 4, 24, 40), (1, 4, 24, 40), (2, 1, 24, 40), (2, 4, 1, 40), (2, 4, 24, 1), (1, 1, 1, 1), (4, 24, 40), (24, 40),
     (1, 40), (24, 1), (40,), (1,), ()],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("aux_dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_bias_gradient_of_every_broadcast_shape_in_the_dtype_of_the_bias(
    backend: str, shape: tuple[int, ...], aux_dtype: torch.dtype
) -> None:
    check(replace(SHAPE, bias=shape, aux_dtype=aux_dtype, causal=True, dropout_p=0.1), backend)


def test_gradcheck_of_everything_with_the_lse() -> None:
    query, key, value = leaves(*qkv(B=2, Tq=3, Tk=4, Hq=4, Hkv=2, D=3, dtype=F64))
    bias, slopes, sink = leaves(normal(1, 4, 3, 4, dtype=F64), normal(2, 4, dtype=F64).abs(), normal(4, dtype=F64))
    mask = torch.ones(2, 1, 3, 4, dtype=torch.bool)
    mask[0, 0, 1] = False
    hidden = torch.zeros(3, 4, dtype=F64)
    hidden[2, 1] = -INF

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, bias, slopes, sink = tensors
        return attention(
            query, key, value, causal=True, window=(2, 2), mask=mask, bias=bias + hidden, alibi_slopes=slopes,
            sink=sink, softcap=2.0, scale=0.7, dropout_p=0.3, seed=3, return_lse=True, backend="eager",
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, (query, key, value, bias, slopes, sink))


def test_gradcheck_of_the_flash_path() -> None:
    tensors = leaves(*qkv(B=1, Tq=4, Tk=4, Hq=2, Hkv=2, D=3, dtype=F64))
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, causal=True, backend="eager"), tensors)


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "alibi_slopes", "sink"])
@pytest.mark.parametrize("plain", [True, False], ids=["flash", "blocked"])
def test_one_gradient_alone_equals_the_one_among_all(backend: str, wanted: str, plain: bool) -> None:
    tensors = dict(zip(("query", "key", "value"), qkv(Tk=6, Hkv=4), strict=True))
    if plain and wanted not in tensors:
        pytest.skip("the flash path has no such input")
    if not plain:
        tensors |= {"bias": normal(6, 6), "alibi_slopes": normal(4).abs(), "sink": normal(4)}
    every = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    attention(**every, backend=backend).square().sum().backward()
    alone = tensors | {wanted: tensors[wanted].clone().requires_grad_()}
    attention(**alone, backend=backend).square().sum().backward()
    assert torch.equal(alone[wanted].grad, every[wanted].grad)


def test_a_gradient_through_the_lse_alone(backend: str) -> None:
    query, key, value = leaves(*qkv(dtype=F64))
    _, lse = attention(query, key, value, return_lse=True, backend="eager")
    found = torch.autograd.grad(lse.sum(), (query, key, value))
    expected = torch.autograd.grad(reference.attention(query, key, value)[1].sum(), (query, key), retain_graph=True)
    torch.testing.assert_close(found[:2], expected)
    assert not found[2].any()


def _lse_gradients(lse: Tensor) -> dict[str, Tensor]:
    """Gradients of an LSE by name, "none" excepted."""
    some = normal(*lse.shape, seed=5, dtype=lse.dtype)
    return {"zero": torch.zeros_like(lse), "some": some, "partly zero": some.relu(), "huge": 1e6 * some}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize("dout", ["dense", "zero rows", "zero"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"Hkv": 1}, {"Tq": 40}, {"softcap": 2.0}, {"D": 1, "Dv": 1}, {"lengths": (3, 0, 40, 24)}],
    ids=str,
)
def test_a_gradient_of_the_lse_leaves_the_bits_of_dv_alone(
    dtype: torch.dtype, dout: str, options: dict[str, Any]
) -> None:
    """dV does not depend on it, and one of 0 changes nothing at all."""
    lengths = options.get("lengths")
    packed: dict[str, Any] = {"lengths_q": lengths, "lengths_k": lengths, "tail": 3} if lengths else {}
    sizes = {"Tq": 67, "Tk": 67, "Hq": 4, "Hkv": 2} | {n: x for n, x in options.items() if n != "lengths"} | packed
    case = Case(B=2, **({"D": 16, "Dv": 16, "dtype": dtype} | sizes))
    query, key, value, named = make(case)
    tensors = leaves(query, key, value)
    op = varlen_attention if lengths else attention
    out, lse = op(*tensors, **named, return_lse=True, backend="eager")
    grad_out = normal(*out.shape, seed=4, dtype=dtype)
    grad_out = grad_out * {"dense": 1.0, "zero": 0.0}.get(dout, 1.0)
    if dout == "zero rows":
        grad_out[..., ::3, :, :] = 0.0
    plain = torch.autograd.grad(out, tensors, grad_out, retain_graph=True)
    assert plain[2].any() == (dout != "zero")
    for name, grad_lse in _lse_gradients(lse).items():
        grads = torch.autograd.grad((out, lse), tensors, (grad_out, grad_lse), retain_graph=True)
        assert torch.equal(grads[2], plain[2]), f"dV, a gradient of the LSE that is {name}"
        for which in (0, 1):
            assert torch.equal(grads[which], plain[which]) == (name == "zero"), f"{'QK'[which]}, {name}"


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6])
def test_a_gradient_of_the_lse_is_exact_beside_a_small_one_of_the_output(dtype: torch.dtype, size: float) -> None:
    query, key, value = leaves(*qkv(Tq=40, Tk=40, dtype=dtype))
    out, lse = attention(query, key, value, causal=True, return_lse=True, backend="eager")
    grads = normal(*out.shape, seed=4, dtype=dtype) * size, normal(*lse.shape, seed=5, dtype=lse.dtype)
    found = torch.autograd.grad((out, lse), (query, key), grads)

    def dense(work: torch.dtype) -> tuple[Tensor, ...]:
        tensors = leaves(*(t.to(work) for t in (query, key, value)))
        outputs = reference.attention(*tensors, causal=True, compute_dtype=work)
        arriving = [grad.to(x.dtype) for grad, x in zip(grads, outputs, strict=True)]
        return torch.autograd.grad(outputs, tensors[:2], arriving)

    for ours, truth, plain in zip(found, dense(F64), dense(dtype), strict=True):
        allowed = 3 * (plain - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
        assert (ours - truth).abs().max() <= allowed


def test_an_expanded_gradient_is_taken(backend: str) -> None:
    tensors = leaves(*qkv())
    attention(*tensors, backend=backend).sum().backward()  # its gradient has stride 0 everywhere
    ones = leaves(*tensors)
    out = attention(*ones, backend=backend)
    out.backward(torch.ones_like(out))
    for expanded, plain in zip(tensors, ones, strict=True):
        torch.testing.assert_close(expanded.grad, plain.grad)


def test_a_second_derivative_is_refused_in_words(backend: str) -> None:
    query, key, value = leaves(*qkv())
    (grad,) = torch.autograd.grad(attention(query, key, value, backend=backend).sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivative.*reference"):
        grad.sum().backward()


# Properties


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 12), max_size=4), options=st.sampled_from(["plain", "bias", "mask", "softcap"]))
def test_keys_split_anywhere_and_merged_are_the_whole(backend: str, cuts: list[int], options: str) -> None:
    query, key, value = qkv(Tk=12)
    bias, mask = normal(6, 12), normal(2, 1, 6, 12) > 0
    edges = sorted({0, 12, *cuts})
    every = {
        "plain": lambda s: {},
        "bias": lambda s: {"bias": bias[:, s]},
        "mask": lambda s: {"mask": mask[..., s]},
        "softcap": lambda s: {"softcap": 2.0},
    }
    its_options: Callable[[slice], dict[str, Any]] = every[options]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    states = [
        attention(query, key[:, s], value[:, s], **its_options(s), return_lse=True, backend=backend) for s in parts
    ]
    whole = attention(query, key, value, **its_options(slice(None)), return_lse=True, backend=backend)
    torch.testing.assert_close(merge_states(*zip(*states, strict=True)), whole)


@settings(max_examples=30)
@given(first=st.integers(0, 10), length=st.integers(1, 11), window=st.sampled_from([None, (3, 1), (-1, 2)]))
def test_a_chunk_of_queries_is_those_rows_of_the_whole(backend: str, first: int, length: int, window: Any) -> None:
    query, key, value = qkv(Tq=11, Tk=14)
    last = min(first + length, 11)
    slopes = normal(4).abs()
    whole = attention(query, key, value, causal=True, window=window, alibi_slopes=slopes, backend=backend)
    seen = 14 - (11 - last)  # the chunk's last row is then aligned with the last key that it may see
    chunk = attention(
        query[:, first:last], key[:, :seen], value[:, :seen], causal=True, window=window, alibi_slopes=slopes,
        backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(chunk, whole[:, first:last])


@settings(max_examples=15)
@given(order=st.permutations(range(4)))
def test_permuting_the_batch_permutes_the_output(backend: str, order: list[int]) -> None:
    query, key, value = qkv(B=4)
    mask, bias, slopes = normal(4, 1, 1, 8) > -1, normal(4, 1, 6, 8), normal(4, 4).abs()
    straight = attention(query, key, value, mask=mask, bias=bias, alibi_slopes=slopes, backend=backend)
    permuted = attention(
        query[order], key[order], value[order], mask=mask[order], bias=bias[order], alibi_slopes=slopes[order],
        backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(permuted, straight[order])


def test_permuting_keys_with_their_mask_and_bias_changes_nothing(backend: str) -> None:
    query, key, value = qkv()
    mask, bias = normal(2, 4, 6, 8) > -1, normal(6, 8)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    straight = attention(query, key, value, mask=mask, bias=bias, return_lse=True, backend=backend)
    permuted = attention(
        query, key[:, order], value[:, order], mask=mask[..., order], bias=bias[:, order], return_lse=True,
        backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(permuted, straight)


@pytest.mark.parametrize("plain", [True, False], ids=["flash", "blocked"])
def test_a_shift_of_all_scores_only_moves_the_lse(backend: str, plain: bool) -> None:
    query, key, value = qkv(dtype=F64)
    out, lse = attention(query, key, value, return_lse=True, backend="eager", softcap=0.0 if plain else 50.0)
    options = {"softcap": 0.0 if plain else 50.0, "bias": torch.full((1,), 1000.0, dtype=F64)}
    shifted, moved = attention(query, key, value, return_lse=True, backend="eager", **options)
    torch.testing.assert_close(shifted, out)
    torch.testing.assert_close(moved, lse + 1000)


# Layouts


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["heads_first", "qkv_packed", "strided", "offset", "expanded"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"Tk": 24, "causal": True},
        {"mask": (2, 1, 24, 40), "bias": (1, 4, 24, 40), "dropout_p": 0.1},
        {"Dv": 8, "sink": True},
    ],
    ids=["plain", "square causal", "mask and bias", "narrow values"],
)
def test_layouts(backend: str, layout: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    check(replace(SHAPE, layout=layout, dtype=dtype, **options), backend)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_flow_to_one_packed_projection(backend: str, causal: bool) -> None:
    packed = normal(2, 6, 3, 4, 8).requires_grad_()
    apart = packed.detach().clone().requires_grad_()
    attention(*packed.unbind(2), causal=causal, backend=backend).square().sum().backward()
    attention(*(t.contiguous() for t in apart.unbind(2)), causal=causal, backend=backend).square().sum().backward()
    torch.testing.assert_close(packed.grad, apart.grad)


def test_a_mask_that_is_expanded_or_transposed(backend: str) -> None:
    query, key, value = qkv(Tk=6)
    mask = normal(6, 6) > -0.5
    expected = attention(query, key, value, mask=mask.mT.contiguous(), backend=backend)
    assert torch.equal(attention(query, key, value, mask=mask.mT, backend=backend), expected)
    assert torch.equal(attention(query, key, value, mask=mask.mT.expand(2, 4, 6, 6), backend=backend), expected)


# Zero sizes and empty rows


@pytest.mark.parametrize(
    "sizes",
    [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (2, 0, 0), (0, 3, 0)],
    ids=lambda s: "B{} Tq{} Tk{}".format(*s),
)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "sink": True}, {"window": (2, 1), "alibi": "BH", "softcap": 3.0}, {"dropout_p": 0.5}],
    ids=["plain", "causal sink", "window alibi softcap", "dropout"],
)
def test_zero_sizes(backend: str, sizes: tuple[int, int, int], options: dict[str, Any]) -> None:
    batch, q_len, k_len = sizes
    case = Case(B=batch, Tq=q_len, Tk=k_len, Hq=4, Hkv=2, D=8, Dv=8, lse_grad=True, **options)
    full = (batch, 4, q_len, k_len)
    for modifiers in ({}, {"mask": full, "bias": (1, 4, 1, 1)}, {"mask": (1, 1), "bias": full}):
        check(replace(case, **modifiers), backend)


NO_HEADS = {
    "no heads": {"Hq": 0, "Hkv": 0},
    "no query heads": {"Hq": 0},
    "D 0": {"D": 0},
    "Dv 0": {"Dv": 0},
    "D and Dv 0": {"D": 0, "Dv": 0},
    "nothing": {"Hq": 0, "Hkv": 0, "D": 0, "Dv": 0},
}


@pytest.mark.parametrize("named", ["auto", "eager", "reference"])
@pytest.mark.parametrize("name", NO_HEADS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "sink": True},
        {"window": (2, 1), "alibi": "BH", "softcap": 3.0, "dtype": BF16},
        {"dropout_p": 0.5, "scale": 0.7, "dtype": F64},
        {"mask": (2, 1, 5, 7), "bias": (2, 1, 1, 7), "bias_hides": True},
    ],
    ids=["plain", "causal sink", "window alibi softcap", "dropout", "mask bias"],
)
def test_no_heads_and_head_dims_of_zero(named: str, name: str, options: dict[str, Any]) -> None:
    """Scores of no dims are 0, so that a row is the mean of the values that it sees."""
    shape = {"B": 2, "Tq": 5, "Tk": 7, "Hq": 4, "Hkv": 2, "D": 8, "Dv": 8} | NO_HEADS[name]
    for lse_grad in (False, True):
        check_case(Case(**shape, **options, lse_grad=lse_grad), named)
    if "mask" not in options:
        check_case(Case(**(shape | {"Tq": 7}), **options), named)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", NO_HEADS)
def test_no_heads_and_head_dims_of_zero_are_those_of_torch(name: str, causal: bool) -> None:
    heads = {"Hq": 4, "Hkv": 2, "D": 8, "Dv": 8} | NO_HEADS[name]
    query, key = normal(2, 6, heads["Hq"], heads["D"]), normal(2, 6, heads["Hkv"], heads["D"], seed=1)
    tensors = leaves(query, key, normal(2, 6, heads["Hkv"], heads["Dv"], seed=2))
    out = attention(*tensors, causal=causal)
    theirs = leaves(*tensors)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU flash op of torch 2.11 ends the process here
        expected = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in theirs), is_causal=causal, enable_gqa=heads["Hkv"] > 0
        ).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), tensors)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), theirs))


def _empty_rows() -> dict[str, tuple[dict[str, Any], list[int]]]:
    """How a row may come to see nothing, of six rows and four keys, and which rows then do."""
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[[1, 4]] = False
    bias = torch.zeros(6, 4)
    bias[3] = -INF
    return {
        "mask": ({"mask": mask}, [1, 4]),
        "mask of a column": ({"mask": mask[:, :1]}, [1, 4]),
        "bias": ({"bias": bias}, [3]),
        "causal with more queries than keys": ({"causal": True}, [0, 1]),
        "window before the first key": ({"window": (-1, 0)}, [0, 1]),
        "mask and bias together": (
            {"mask": torch.tensor([True, True, False, False]), "bias": _left_half_hidden()},
            [2],
        ),
        "everything": ({"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}, [0, 1, 2, 3, 4, 5]),
    }


def _left_half_hidden() -> Tensor:
    bias = torch.zeros(6, 4)
    bias[2, :2] = -INF
    return bias


@pytest.mark.parametrize("extra", ["plain", "sink", "softcap", "dropout", "alibi"])
@pytest.mark.parametrize("name", _empty_rows())
def test_rows_that_see_nothing(backend: str, name: str, extra: str) -> None:
    options, rows = _empty_rows()[name]
    query, key, value, sink, slopes = leaves(*qkv(Tk=4), normal(4), normal(4).abs())
    extras: dict[str, dict[str, Any]] = {
        "plain": {},
        "sink": {"sink": sink},
        "softcap": {"softcap": 1.5},
        "dropout": {"dropout_p": 0.4, "seed": 5},
        "alibi": {"alibi_slopes": slopes},
    }
    out, lse = attention(query, key, value, **options, **extras[extra], return_lse=True, backend=backend)
    assert not out[:, rows].any()
    expected = sink.detach()[None, :, None].expand(2, 4, len(rows)) if extra == "sink" else torch.full((2, 4, 1), -INF)
    assert torch.equal(lse[:, :, rows], expected.expand(2, 4, len(rows)))
    seen = [row for row in range(6) if row not in rows]
    assert out[:, seen].abs().sum(-1).gt(0).all() or extra == "dropout"
    torch.autograd.backward((out, lse), (normal(*out.shape), normal(*lse.shape)))
    assert not query.grad[:, rows].any()
    for tensor in (query, key, value):
        assert tensor.grad.isfinite().all()
    if name == "everything":
        assert not key.grad.any() and not value.grad.any()
    if extra == "sink" and name == "everything":
        torch.testing.assert_close(sink.grad, normal(*lse.shape).sum((0, 2)))


# NaN and infinity in what nobody sees


def _hidden() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Options, and which entries of key and value (and of query) they hide from the whole call: B=2, Tq=6, Tk=8."""
    padding = torch.arange(8) < torch.tensor([[5], [8]])  # the first batch entry has five keys, the second all
    padded = (torch.zeros(2, 8, dtype=torch.bool) | ~padding)[:, :, None].expand(2, 8, 2)
    bias = torch.zeros(8)
    bias[2] = -INF
    one_key = torch.zeros(2, 8, 2, dtype=torch.bool)
    one_key[:, 2] = True
    far_keys = torch.zeros(2, 8, 2, dtype=torch.bool)
    far_keys[:, 0] = True  # queries stand at 2 to 7
    no_rows = torch.zeros(2, 6, 4, dtype=torch.bool)
    row_mask = torch.ones(1, 1, 6, 1, dtype=torch.bool)
    row_mask[:, :, 3] = False
    one_row = no_rows.clone()
    one_row[:, 3] = True
    head_mask = torch.ones(1, 4, 1, 8, dtype=torch.bool)
    head_mask[:, 2:, :, 6] = False  # both query heads of the second KV head
    one_kv_head = torch.zeros(2, 8, 2, dtype=torch.bool)
    one_kv_head[:, 6, 1] = True
    return {
        "key padding": ({"mask": padding[:, None, None]}, {"key": padded, "query": no_rows}),
        "a key that a bias of -inf hides": ({"bias": bias}, {"key": one_key, "query": no_rows}),
        "a key out of every window": ({"window": (1, 0)}, {"key": far_keys, "query": no_rows}),
        "a query that a mask hides": ({"mask": row_mask}, {"key": torch.zeros_like(padded), "query": one_row}),
        "a key hidden from all heads of its group": ({"mask": head_mask}, {"key": one_kv_head, "query": no_rows}),
        "padding of queries and keys": (
            {"mask": padding[:, None, None] & row_mask},
            {"key": padded, "query": one_row},
        ),
    }


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("extra", ["plain", "softcap", "dropout", "alibi and sink", "bias", "causal"])
@pytest.mark.parametrize("name", _hidden())
def test_poison_that_nobody_sees_reaches_nothing(backend: str, name: str, extra: str, poison: float) -> None:
    options, hidden = _hidden()[name]
    extras: dict[str, dict[str, Any]] = {
        "plain": {},
        "softcap": {"softcap": 1.5},
        "dropout": {"dropout_p": 0.3, "seed": 1},
        "alibi and sink": {"alibi_slopes": normal(4).abs(), "sink": normal(4)},
        "bias": {"bias": normal(2, 4, 6, 8)},
        "causal": {"causal": True},
    }
    more = extras[extra]
    if extra == "bias" and "bias" in options:
        more = {"bias": normal(2, 4, 6, 8) + options["bias"]}
    _same_as_without_poison(backend, options | more, qkv(), hidden["query"], hidden["key"], poison)


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_poison_in_queries_before_the_first_key_reaches_nothing(backend: str, poison: float, softcap: float) -> None:
    rows = torch.zeros(2, 6, 4, dtype=torch.bool)
    rows[:, :2] = True  # causal with six queries and four keys
    keys = torch.zeros(2, 4, 2, dtype=torch.bool)
    _same_as_without_poison(backend, {"causal": True, "softcap": softcap}, qkv(Tk=4), rows, keys, poison)


def _same_as_without_poison(
    backend: str, options: dict[str, Any], tensors: tuple[Tensor, ...], rows: Tensor, keys: Tensor, poison: float
) -> None:
    results = []
    for filler in (0.0, poison):
        query, key, value = leaves(*tensors)
        with torch.no_grad():
            query[rows] = filler
            key[keys] = filler
            value[keys] = filler
        its = {
            name: t.clone().requires_grad_() if name in ("bias", "sink", "alibi_slopes") else t
            for name, t in options.items()
        }
        out, lse = attention(query, key, value, **its, return_lse=True, backend=backend)
        torch.autograd.backward((out, lse), (normal(*out.shape, seed=8), normal(*lse.shape, seed=9)))
        every = {"query": query, "key": key, "value": value} | its
        grads = {name: t.grad for name, t in every.items() if isinstance(t, Tensor) and t.requires_grad}
        results.append({"out": out.detach(), "lse": lse.detach()} | grads)
    clean, poisoned = results
    for name in clean:
        assert not poisoned[name].isnan().any(), f"NaN in {name}"
        torch.testing.assert_close(poisoned[name], clean[name], msg=lambda text, name=name: f"{name}: {text}")
    assert not poisoned["query"][rows].any()
    assert not poisoned["key"][keys].any() and not poisoned["value"][keys].any()


def test_nan_that_a_query_sees_is_not_swallowed(backend: str) -> None:
    query, key, value = qkv(Tk=6)
    key[0, 3] = NAN
    out = attention(query, key, value, causal=True, backend=backend)
    assert out[0, 3:].isnan().all() and out[1].isfinite().all()


def test_a_nan_in_a_bias_hides_nothing(backend: str) -> None:
    """Only -inf hides. A NaN is a score like any other, and the row that sees it has no answer."""
    query, key, value = leaves(*qkv())
    for bias in leaves(torch.full((6, 8), NAN), torch.full((1, 1, 1, 1), NAN), torch.full((8,), NAN)):
        out, lse = attention(query, key, value, bias=bias, return_lse=True, backend=backend)
        assert out.isnan().all() and lse.isnan().all()
        grads = torch.autograd.grad(out, (query, key, value, bias), normal(*out.shape))
        assert all(grad.isnan().all() for grad in grads)
    one = torch.zeros(2, 1, 6, 8)
    one[1, 0, 3, 2], one[0, 0, 1, 4], one[0, 0, 1, 5] = NAN, NAN, -INF
    rows = torch.zeros(2, 6, dtype=torch.bool)
    rows[1, 3] = rows[0, 1] = True
    out, lse = attention(query, key, value, bias=one, return_lse=True, backend=backend)
    assert torch.equal(out.isnan(), rows[:, :, None, None].expand_as(out))
    assert torch.equal(lse.isnan(), rows[:, None].expand_as(lse))


@pytest.mark.parametrize("name", ["causal", "window", "mask", "padding"])
def test_a_nan_in_a_bias_where_a_key_is_hidden_reaches_nothing(backend: str, name: str) -> None:
    ahead = torch.arange(2, 8)[:, None] - torch.arange(8)  # six queries, eight keys
    mask, padding = normal(6, 8) > 0, torch.arange(8) < torch.tensor([[5], [8]])
    hides: dict[str, tuple[dict[str, Any], Tensor]] = {
        "causal": ({"causal": True}, ahead < 0),
        "window": ({"window": (2, 1)}, (ahead > 2) | (ahead < -1)),
        "mask": ({"mask": mask}, ~mask),
        "padding": ({"mask": padding[:, None, None]}, ~padding[:, None, None]),
    }
    options, hidden = hides[name]
    clean = normal(2, 4, 6, 8)
    results = []
    for bias in leaves(clean, clean.masked_fill(hidden, NAN)):
        query, key, value = leaves(*qkv())
        out, lse = attention(query, key, value, **options, bias=bias, return_lse=True, backend=backend)
        torch.autograd.backward((out, lse), (normal(*out.shape, seed=8), normal(*lse.shape, seed=9)))
        results.append((out, lse, query.grad, key.grad, value.grad, bias.grad))
    for plain, poisoned in zip(*results, strict=True):
        assert torch.equal(plain, poisoned)
    assert not results[0][-1][hidden.expand(2, 4, 6, 8)].any()


def test_a_nan_in_a_mapped_bias_stays_in_its_call(backend: str) -> None:
    query, key, value = qkv()
    biases = torch.zeros(3, 6, 8)
    biases[1] = NAN
    out = torch.vmap(lambda bias: attention(query, key, value, bias=bias, backend=backend))(biases)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


# Dropout


@pytest.mark.parametrize("seed", [0, 11, -5, 2**63 - 1])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.97])
def test_dropout_draws_the_mask_of_the_rule_bit_for_bit(backend: str, seed: int, dropout_p: float) -> None:
    query, key = torch.zeros(2, 6, 4, 8), torch.zeros(2, 9, 2, 8)
    value = torch.eye(9).view(1, 9, 1, 9).expand(2, 9, 2, 9)
    out = attention(query, key, value, dropout_p=dropout_p, seed=seed, backend=backend)
    kept = reference.dropout_keep(seed, 0, 2, 4, 6, 9, dropout_p)  # [B, Hq, Tq, Tk]
    assert torch.equal(out.transpose(1, 2) != 0, kept)
    torch.testing.assert_close(out.transpose(1, 2), kept / (9 * (1 - dropout_p)))


def test_a_seed_replays_and_another_differs(backend: str) -> None:
    def run(**options: Any) -> Tensor:
        return attention(*qkv(), dropout_p=0.5, backend=backend, **options)

    assert torch.equal(run(seed=4), run(seed=4))
    assert torch.equal(run(seed=4), run(seed=torch.tensor([4, 0])))
    assert torch.equal(run(seed=torch.tensor([4, 9])), run(seed=torch.tensor([4, 9])))
    assert not torch.equal(run(seed=4), run(seed=5))
    assert not torch.equal(run(seed=torch.tensor([4, 0])), run(seed=torch.tensor([4, 1])))


def test_no_seed_draws_one_per_call_that_manual_seed_reproduces(backend: str) -> None:
    def run() -> Tensor:
        return attention(*qkv(), dropout_p=0.5, backend=backend)

    torch.manual_seed(3)
    first, second = run(), run()
    torch.manual_seed(3)
    assert torch.equal(run(), first) and torch.equal(run(), second)
    assert not torch.equal(first, second)


def test_without_dropout_the_generator_is_left_alone(backend: str) -> None:
    before = torch.get_rng_state()
    attention(*qkv(), backend=backend)
    attention(*qkv(), dropout_p=0.5, seed=1, backend=backend)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_backward_replays_the_mask_of_its_forward_even_if_the_seed_was_drawn(backend: str) -> None:
    query, key, value = torch.zeros(1, 4, 1, 8), torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 6)
    value.requires_grad_()
    with torch.no_grad():
        value += torch.eye(6).view(1, 6, 1, 6)
    out = attention(query, key, value, dropout_p=0.5, backend=backend)
    out.sum().backward()
    torch.testing.assert_close(value.grad[0, :, 0, 0], out.detach()[0, :, 0].sum(0))  # by column: kept weights


def test_dropout_leaves_the_lse_alone(backend: str) -> None:
    _, dropped = attention(*qkv(), dropout_p=0.5, seed=1, return_lse=True, backend=backend)
    query, key, value = qkv()
    none = torch.zeros(query.shape[2])  # keeps the call on the kernel that computes dropout
    _, whole = attention(query, key, value, alibi_slopes=none, return_lse=True, backend=backend)
    assert torch.equal(dropped, whole)


# Determinism


@pytest.mark.parametrize(
    "case",
    [replace(SHAPE, Tk=24, causal=True), CASES["everything at once"], replace(CASES["mqa"], dtype=BF16)],
    ids=["flash", "everything", "mqa"],
)
def test_deterministic_is_bit_equal_over_runs(backend: str, case: Case) -> None:
    def run() -> list[Tensor]:
        query, key, value, options = make(replace(case, deterministic=True))
        tensors = {"query": query, "key": key, "value": value}
        tensors |= {name: options.pop(name) for name in ("bias", "alibi_slopes", "sink") if name in options}
        its = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        out, lse = attention(**its, **options, return_lse=True, backend=backend)
        out.square().sum().backward()
        return [out, lse, *(tensor.grad for tensor in its.values())]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def test_deterministic_none_follows_torch(backend: str) -> None:
    expected = attention(*qkv(), deterministic=True, backend=backend)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(attention(*qkv(), backend=backend), expected)
    finally:
        torch.use_deterministic_algorithms(False)


# Autocast


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["blocked", "flash"])
def test_autocast_computes_in_its_dtype_as_sdpa_does(backend: str, dtype: torch.dtype, causal: bool) -> None:
    query, key, value = leaves(*qkv(Tk=6, dtype=dtype))
    options: dict[str, Any] = {"causal": True} if causal else {"bias": normal(6, 6), "sink": normal(4)}
    with torch.autocast("cpu", dtype=BF16):
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        theirs = F.scaled_dot_product_attention(*heads_first, enable_gqa=True)
        out, lse = attention(query, key, value, **options, return_lse=True, backend=backend)
    assert out.dtype is theirs.dtype is BF16
    assert lse.dtype is F32
    plain = attention(*(t.detach().to(BF16) for t in (query, key, value)), **options, backend=backend)
    assert torch.equal(out, plain)
    out.square().sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad.dtype is dtype and tensor.grad.isfinite().all() and tensor.grad.any()


def test_autocast_leaves_fp64_alone() -> None:
    with torch.autocast("cpu", dtype=BF16):
        assert attention(*qkv(dtype=F64), backend="eager").dtype is F64


# Refusals: a bad call, the exception, and words of the message

Q, K, V = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8), torch.zeros(2, 7, 2, 8)
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": Q[0]}, ValueError, r"query: expected shape \[B, Tq, Hq, D\]; got \[5, 4, 8\]"),
    ({"key": K[None]}, ValueError, r"key: expected shape \[B, Tk, Hkv, D\]"),
    ({"value": V[..., 0]}, ValueError, r"value: expected shape \[B, Tk, Hkv, Dv\]"),
    ({"query": Q[:1]}, ValueError, r"key and value: expected the query's batch size B=1; got key B=2"),
    ({"value": V[:1]}, ValueError, "batch size"),
    ({"value": V[:, :6]}, ValueError, "value: expected the key's length and heads"),
    ({"value": V[:, :, :1]}, ValueError, "value: expected the key's length and heads"),
    ({"key": K[..., :7]}, ValueError, "key: expected the query's head dim D=8"),
    ({"query": Q[:, :, :3]}, ValueError, r"query: .* multiple of the 2 KV heads as Hq; got \[2, 5, 3, 8\] with key"),
    ({"key": K[:, :, :0], "value": V[:, :, :0]}, ValueError, r"query: expected no heads, .*; got .* with key"),
    ({"value": V[:, :, :0]}, ValueError, "value: expected the key's length and heads"),
    ({"query": Q[..., :0]}, ValueError, "key: expected the query's head dim D=0"),
    ({"query": Q.int()}, TypeError, "query: expected dtype float16, bfloat16, float32 or float64; got torch.int32"),
    ({"query": Q.to(torch.complex64)}, TypeError, "query: expected dtype"),
    ({"query": Q.to(torch.float8_e4m3fn)}, TypeError, "query: expected dtype"),
    ({"key": K.half()}, TypeError, "key: expected the query's dtype torch.float32; got torch.float16"),
    ({"value": V.double()}, TypeError, "value: expected the query's dtype"),
    ({"query": None}, TypeError, "query: expected a torch.Tensor; got NoneType"),
    ({"key": [1.0]}, TypeError, "key: expected a torch.Tensor; got list"),
    ({"query": Q.numpy()}, TypeError, "query: expected a torch.Tensor; got ndarray"),
    ({"key": K.to("meta")}, ValueError, "key: expected the query's device cpu; got meta"),
    ({"mask": torch.ones(7, dtype=torch.bool, device="meta")}, ValueError, "mask: expected the query's device"),
    ({"query": Q.to_sparse()}, TypeError, "query: expected a strided tensor"),
    ({"key": torch.nested.nested_tensor([Q[0], Q[0, :2]], layout=torch.jagged)}, TypeError, "varlen_attention"),
    ({"query": Q.mT.contiguous().mT}, ValueError, r"query: expected a contiguous last dim.*\.contiguous\(\)"),
    ({"value": torch.zeros(2, 7, 2, 16)[..., ::2]}, ValueError, "value: expected a contiguous last dim"),
    ({"mask": torch.zeros(5, 7)}, TypeError, r"mask: expected dtype torch.bool \(True = attend\).*`bias`"),
    ({"mask": torch.zeros(5, 7, dtype=torch.uint8)}, TypeError, "mask: expected dtype torch.bool"),
    ({"mask": torch.ones(7, 5, dtype=torch.bool)}, ValueError, r"mask: expected broadcastable to .* = \[2, 4, 5, 7\]"),
    ({"mask": torch.ones(2, 2, 5, 7, dtype=torch.bool)}, ValueError, "mask: expected broadcastable"),
    ({"mask": torch.ones(1, 2, 4, 5, 7, dtype=torch.bool)}, ValueError, "mask: expected broadcastable"),
    ({"mask": True}, TypeError, "mask: expected a torch.Tensor; got bool"),
    ({"bias": torch.zeros(5, 7, dtype=torch.bool)}, TypeError, r"bias: expected a floating dtype.*`mask`"),
    ({"bias": torch.zeros(5, 7, dtype=torch.int64)}, TypeError, "bias: expected a floating dtype"),
    ({"bias": torch.zeros(5, 6)}, ValueError, "bias: expected broadcastable"),
    ({"bias": torch.zeros(3, 1, 5, 7)}, ValueError, "bias: expected broadcastable"),
    ({"bias": 1.0}, TypeError, "bias: expected a torch.Tensor; got float"),
    ({"alibi_slopes": torch.zeros(2)}, ValueError, r"alibi_slopes: expected shape \[Hq=4\] or \[B=2, Hq=4\]"),
    ({"alibi_slopes": torch.zeros(1, 4)}, ValueError, "alibi_slopes: expected shape"),
    ({"alibi_slopes": torch.zeros(4, dtype=torch.int32)}, TypeError, "alibi_slopes: expected a floating dtype"),
    ({"alibi_slopes": [0.5] * 4}, TypeError, "alibi_slopes: expected a torch.Tensor"),
    ({"sink": torch.zeros(2)}, ValueError, r"sink: expected shape \[Hq=4\]; got \[2\]"),
    ({"sink": torch.zeros(2, 4)}, ValueError, "sink: expected shape"),
    ({"sink": torch.zeros(4, dtype=torch.bool)}, TypeError, "sink: expected a floating dtype"),
    ({"sink": 0.0}, TypeError, "sink: expected a torch.Tensor"),
    ({"window": (1, -2)}, ValueError, r"window: expected sides of at least -1 .*; got \(1, -2\)"),
    ({"window": (-3, 0)}, ValueError, "window: expected sides of at least -1"),
    ({"window": 4}, TypeError, "window: expected a tuple of two ints"),
    ({"window": [1, 2]}, TypeError, "window: expected a tuple of two ints"),
    ({"window": (1, 2, 3)}, TypeError, "window: expected a tuple of two ints"),
    ({"window": (1.0, 2)}, TypeError, "window: expected a tuple of two ints"),
    ({"window": (True, 1)}, TypeError, "window: expected a tuple of two ints"),
    ({"softcap": -1.0}, ValueError, "softcap: expected 0 .* or a positive number; got -1.0"),
    ({"softcap": NAN}, ValueError, "softcap: expected a finite number"),
    ({"softcap": INF}, ValueError, "softcap: expected a finite number"),
    ({"softcap": None}, TypeError, "softcap: expected a number"),
    ({"softcap": 1e39}, ValueError, r"softcap: .* from 1.2e-38 to 2.3e\+38, .*; got 1e\+39. For no cap, pass 0"),
    ({"softcap": 1e-50}, ValueError, "softcap: expected 0 .* or from 1.2e-38 .*; got 1e-50"),
    ({"softcap": 1e-40}, ValueError, "softcap: expected 0 .* fp32 can represent it"),
    ({"softcap": 1e-30, "scale": 1e9}, ValueError, "softcap: .* from 4.34783e-30 to"),
    ({"softcap": 10**40}, ValueError, "softcap: expected 0 .* fp32 can represent it"),
    ({"scale": 1.7e308}, ValueError, r"scale: expected at most 2.3e\+38 .*; got 1.7e\+308"),
    ({"scale": -1e39}, ValueError, "scale: expected at most .* fp32 can represent it"),
    ({"scale": 10**40}, ValueError, "scale: expected at most .* fp32 can represent it"),
    ({"query": Q.double(), "key": K.double(), "value": V.double(), "scale": 1e39}, ValueError, "scale: .* fp32 can"),
    ({"scale": NAN}, ValueError, "scale: expected a finite number; got nan"),
    ({"scale": INF}, ValueError, "scale: expected a finite number"),
    ({"scale": "1"}, TypeError, "scale: expected a number"),
    ({"scale": torch.ones(())}, TypeError, "scale: expected a number; got torch.float32 tensor"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p: expected a probability in \[0, 1\); got 1.0"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p: expected a probability"),
    ({"dropout_p": NAN}, ValueError, "dropout_p: expected a finite number"),
    ({"dropout_p": True}, TypeError, "dropout_p: expected a number"),
    ({"dropout_p": 0.5, "seed": 1.5}, TypeError, "seed: expected an int, an int64 tensor"),
    ({"dropout_p": 0.5, "seed": True}, TypeError, "seed: expected an int"),
    ({"dropout_p": 0.5, "seed": 2**63}, ValueError, "seed: expected a 64-bit int"),
    ({"dropout_p": 0.5, "seed": torch.tensor(3)}, TypeError, r"seed: .*shape \[2\].*got torch.int64 tensor"),
    ({"dropout_p": 0.5, "seed": torch.tensor([3, 4], dtype=torch.int32)}, TypeError, "seed: .*int64 tensor"),
    ({"seed": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "seed: expected the query's device"),
    ({"seed": "7"}, TypeError, "seed: expected an int"),
    ({"causal": 1}, TypeError, "causal: expected a bool; got 1"),
    ({"causal": None}, TypeError, "causal: expected a bool"),
    ({"return_lse": 1}, TypeError, "return_lse: expected a bool"),
    ({"deterministic": 1}, TypeError, "deterministic: expected a bool, or None"),
    ({"backend": "cuda"}, ValueError, "backend: expected one of 'auto', .*'eager'.*; got 'cuda'"),
    ({"backend": None}, ValueError, "backend: expected one of"),
    ({"is_causal": True}, TypeError, "is_causal"),
]  # fmt: skip


def _brief(bad: dict[str, Any]) -> str:
    words = (
        f"{name}={f'{v.dtype} {list(v.shape)}' if isinstance(v, Tensor) and not v.is_nested else type(v).__name__}"
        if isinstance(v, Tensor) or hasattr(v, "dtype")
        else f"{name}={v}"
        for name, v in bad.items()
    )
    return ", ".join(words).replace("torch.", "")


@pytest.mark.parametrize(("bad", "error", "words"), REFUSALS, ids=[_brief(bad) for bad, _, _ in REFUSALS])
def test_refuses(bad: dict[str, Any], error: type[Exception], words: str) -> None:
    inputs = {name: tensor.clone().fill_(1.0) for name, tensor in (("query", Q), ("key", K), ("value", V))} | bad
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, Tensor) and t.device.type == "cpu"}
    generator = torch.get_rng_state()
    with pytest.raises(error, match=words) as caught:
        attention(**inputs)
    assert caught.type is error
    assert torch.equal(torch.get_rng_state(), generator)
    for name, tensor in before.items():
        if tensor.layout is torch.strided and not tensor.is_nested:
            assert torch.equal(tensor, inputs[name])


def test_what_is_optional_is_by_keyword_only() -> None:
    words = r"attention\(\) takes 3 positional arguments, query, key, value; got 4. .* by name, as in causal=True"
    with pytest.raises(TypeError, match=words):
        attention(Q, K, V, True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"got 5. The others are passed by name: causal, window, mask, bias, "):
        attention(Q, K, V, None, 0.0)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("is_causal", "attention(): `is_causal` is called `causal` here (aligned bottom-right)"),
        ("attn_mask", "`attn_mask` is called `mask` here (boolean, True = attend) or `bias` here (floating, added"),
        ("attention_mask", "`attention_mask` is called `mask` here (boolean, True = attend; padding"),
        ("softmax_scale", "`softmax_scale` is called `scale` here"),
        ("sm_scale", "`sm_scale` is called `scale` here"),
        ("window_size", "`window_size` is called `window` here (a tuple (left, right)"),
        ("dropout", "`dropout` is called `dropout_p` here"),
        ("return_attn_probs", "`return_attn_probs` is called `return_lse` here"),
        ("enable_gqa", "leave `enable_gqa` out: Hq may be any multiple of Hkv here"),
        ("key_padding_mask", "is called `mask` here (boolean, True = attend: ~key_padding_mask[:, None, None])"),
        ("cache_seqlens", "`cache_seqlens` are the lengths of a cache here: ContiguousKV(key, value, lengths)"),
        ("casual", "attention() got an unexpected keyword argument 'casual'"),
    ],
)
def test_keywords_of_others_are_refused_with_their_name_here(keyword: str, words: str) -> None:
    for call in (attention, explain):
        with pytest.raises(TypeError, match=re.escape(words)):
            call(Q, K, V, **{keyword: True})


def test_arguments_of_packed_sequences_name_their_function() -> None:
    words = re.escape("attention(): `cu_seqlens_q` is an argument of varlen_attention, for packed sequences")
    with pytest.raises(TypeError, match=words):
        attention(Q, K, V, cu_seqlens_q=torch.tensor([0, 2]))  # type: ignore[call-overload]


def test_the_signature_shows_no_place_for_them() -> None:
    parameters = inspect.signature(attention).parameters
    assert list(parameters)[:4] == ["query", "key", "value", "causal"]
    assert {p.kind for p in parameters.values()} == {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }


# A layout that looks wrong


@pytest.fixture
def not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_warned_of_layout", False)


def heads_first(*sizes: int, **options: Any) -> Tensor:
    """`[B, H, T, D]` as projections leave it: a view of `[B, T, H, D]`."""
    batch, heads, length, dim = sizes
    return torch.zeros(batch, length, heads, dim, **options).transpose(1, 2)


SLIPS = {
    "a contiguous copy, more lengths than there are heads": [torch.zeros(1, 2, 257, 8)] * 3,
    "a view of [B, T, H, D]": [heads_first(2, 4, 32, 8)] * 3,
    "a view, fewer KV heads": [heads_first(2, 4, 32, 8), heads_first(2, 2, 32, 8), heads_first(2, 2, 32, 8)],
    "a view, one KV head": [heads_first(2, 4, 32, 8), heads_first(2, 1, 32, 8), heads_first(2, 1, 32, 8)],
}
RIGHT = {
    "256 heads": [torch.zeros(1, 64, 256, 8)] * 3,
    "300 heads that share keys": [torch.zeros(1, 2, 300, 8), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)],
    "a short call, contiguous": [torch.zeros(1, 4, 32, 8)] * 3,
    "a short call, a view of [B, H, T, D]": [heads_first(1, 5, 32, 8)] * 3,
    "a long call, a view of [B, H, T, D]": [heads_first(1, 100, 8, 8)] * 3,
    "one query": [heads_first(1, 1, 32, 8)] * 3,
    "few queries of a cache": [heads_first(1, 2, 32, 8), heads_first(1, 100, 32, 8), heads_first(1, 100, 32, 8)],
}


@pytest.mark.usefixtures("not_warned")
@pytest.mark.parametrize("name", SLIPS)
def test_a_layout_that_looks_transposed_is_warned_of_once(name: str) -> None:
    query = SLIPS[name][0]
    words = rf"attention: query {re.escape(str(list(query.shape)))} looks like \[B, H, T, D\]; .*x.transpose\(1, 2\)"
    with pytest.warns(UserWarning, match=words) as caught:
        attention(*SLIPS[name])
    assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*SLIPS[name])


@pytest.mark.usefixtures("not_warned")
@pytest.mark.parametrize("name", RIGHT)
def test_a_layout_that_may_be_right_is_not_warned_of(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*RIGHT[name])


@pytest.mark.usefixtures("not_warned")
def test_our_own_callers_and_compiled_calls_are_not_warned_of() -> None:
    tensors = SLIPS["a view of [B, T, H, D]"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FusedOnlineAttention(32, 8)(*tensors)
        torch.compile(attention, backend="eager", fullgraph=True)(*tensors)
    with pytest.warns(UserWarning, match="looks like"):  # none of them used the warning up
        attention(*tensors)


@pytest.mark.parametrize("number", [1, 0, 2])
def test_ints_are_numbers(number: int) -> None:
    query, key, value = qkv()
    expected = attention(query, key, value, scale=float(number), softcap=float(number))
    assert torch.equal(attention(query, key, value, scale=number, softcap=number), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.3e38}, {"softcap": 1.2e-38}, {"softcap": 1e-29, "scale": 1e9}, {"scale": 1e-300}, {"scale": -1e-45}],
    ids=str,
)
def test_numbers_at_the_ends_of_what_is_taken_mean_what_they_say(dtype: torch.dtype, options: dict[str, float]) -> None:
    query, key, value = leaves(*qkv(dtype=dtype))
    with torch.no_grad():
        query[:, 2] = 0.0  # 0 divided by a cap that is 0, or times a scale that is infinite, would be NaN
    out = attention(query, key, value, **options, backend="eager")
    torch.testing.assert_close(out, attention(query, key, value, **options, backend="reference"))
    assert not any(grad.isnan().any() for grad in torch.autograd.grad(out.sum(), (query, key, value)))


# Threads


def test_many_threads_and_many_problems_share_the_plan_cache(backend: str) -> None:
    rng = random.Random(5)
    cases = [random_case(rng, dtypes=(BF16, F32), head_dims=(4, 8), max_length=24, packed=False) for _ in range(60)]
    cases = [case for case in cases if 0 not in (case.B, case.Tq, case.Tk) and not (case.scale or 1) <= 0]
    cases = [case for case in cases if not why_not(case, backend)]

    def run(case: Case) -> list[Tensor]:
        query, key, value, options = make(case)
        query, key, value = leaves(query, key, value)
        out, lse = attention(query, key, value, **options, return_lse=True, backend=backend)
        grads = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
        return [out, lse, *grads]

    serial = [run(case) for case in cases]

    def shuffled(thread: int) -> list[tuple[int, list[Tensor]]]:
        order = random.Random(thread).sample(range(len(cases)), len(cases))
        return [(n, run(cases[n])) for n in order]

    forget_plans()
    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(shuffled, range(8)):
            for n, result in results:
                for ours, alone in zip(result, serial[n], strict=True):
                    torch.testing.assert_close(
                        ours, alone, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=n: f"{cases[n]}: {m}"
                    )


def test_a_forced_backend_is_that_of_auto_calls_only(backend: str) -> None:
    query, key, value = leaves(*qkv())
    with force_backend("reference"):
        assert "Attention" not in type(attention(query, key, value).grad_fn).__name__
        assert "Attention" in type(attention(query, key, value, backend=backend).grad_fn).__name__
    assert "Attention" in type(attention(query, key, value).grad_fn).__name__


@pytest.mark.parametrize("feature", ["sink", "mask", "bias"])
def test_a_nan_stays_with_those_who_see_it(feature: str) -> None:
    """A minimum used to hide scores, and let NaN through to queries that may not see the key."""
    query, key, value = torch.randn(3, 1, 4, 1, 8)
    key[:, 3] = float("nan")
    features = {
        "sink": {"sink": torch.zeros(1)},
        "mask": {"mask": torch.ones(4, 4, dtype=torch.bool)},
        "bias": {"bias": torch.zeros(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("nan"))},
    }
    out = attention(query, key, value, causal=True, **features[feature])
    assert out[0, :3].isfinite().all() and out[0, 3].isnan().all()


def test_explain_draws_no_random_numbers_and_asks_for_no_gradient_nobody_wants(capsys: Any) -> None:
    query, key, value = (torch.randn(1, 4, 1, 8, requires_grad=True) for _ in range(3))
    state = torch.get_rng_state()
    explain(query, key, value, dropout_p=0.5)
    assert torch.equal(state, torch.get_rng_state())
    assert "backward" in capsys.readouterr().out
    with torch.no_grad():
        explain(query, key, value)
    assert "backward" not in capsys.readouterr().out


@pytest.mark.parametrize("window", [(2**63 - 1, 0), (0, 2**70)])
def test_a_window_beyond_every_integer_hides_nothing(window: tuple[int, int]) -> None:
    query, key, value = torch.randn(3, 1, 6, 1, 8)
    unbounded = tuple(-1 if side > 6 else side for side in window)
    torch.testing.assert_close(
        attention(query, key, value, window=window), attention(query, key, value, window=unbounded)
    )


SWITCHED = """
import torch
from stream_attention import attention
torch.backends.{switch}.fp32_precision = "tf32"
query = torch.randn(1, 8, 2, 16, requires_grad=True)
for _ in range(2):
    attention(query, query, query, causal=True).sum().backward()
assert query.grad.isfinite().all()
"""


@pytest.mark.parametrize("switch", ["cuda.matmul", "cuda"])
def test_calls_in_fp32_run_where_tf32_was_allowed_by_the_newer_switch(switch: str) -> None:
    """Reading torch's older switch raises then. In a process of its own: the switches cannot be undone."""
    done = subprocess.run([sys.executable, "-c", SWITCHED.format(switch=switch)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
