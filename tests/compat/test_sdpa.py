"""torch's scaled_dot_product_attention by ours, against torch's own, in fp64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.compat.eager import randn
from torch import Tensor
from torch.testing import assert_close

from stream_attention.compat.sdpa import scaled_dot_product_attention

theirs = torch.nn.functional.scaled_dot_product_attention
BOOLEAN = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(0)) > 0.4
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    # shapes of query, key and value, and options
    "plain": (((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 16)), {}),
    "causal, as many": (((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"is_causal": True}),
    "causal, fewer queries": (((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"is_causal": True}),
    "causal, fewer keys": (((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8)), {"is_causal": True}),
    "a scale": (((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"scale": 0.3}),
    "groups of heads": (((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8)), {"enable_gqa": True, "is_causal": True}),
    "a boolean mask": (((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"attn_mask": BOOLEAN}),
    "a row without keys": (((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"attn_mask": BOOLEAN & False}),
    "a mask of two dims": (((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"attn_mask": BOOLEAN[0, 0]}),
    "a float mask": (((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"attn_mask": randn(2, 4, 5, 9, seed=3)}),
    "no batch": (((4, 5, 8), (4, 9, 8), (4, 9, 8)), {"is_causal": True}),
    "no batch, groups": (((4, 5, 8), (2, 9, 8), (2, 9, 8)), {"enable_gqa": True}),
    "no heads": (((5, 8), (9, 8), (9, 8)), {"is_causal": True}),
    "more leading dims": (((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8)), {"is_causal": True}),
    "leading dims that broadcast": (((2, 3, 4, 5, 8), (1, 3, 4, 9, 8), (2, 3, 4, 9, 8)), {}),
    "a mask of leading dims": (
        ((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8)),
        {"attn_mask": randn(2, 1, 1, 5, 9, seed=3)},
    ),
    "batches that broadcast": (((3, 2, 5, 8), (1, 2, 9, 8), (3, 2, 9, 8)), {}),
    "heads that broadcast": (((2, 4, 5, 8), (2, 1, 9, 8), (2, 1, 9, 8)), {"is_causal": True}),
    "one query head": (((2, 1, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {}),
    "no keys": (((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8)), {}),
}


def tensors(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs(name: str) -> None:
    shapes, options = CASES[name]
    ours, truth = ([x.requires_grad_() for x in tensors(shapes)] for _ in range(2))
    out, wanted = scaled_dot_product_attention(*ours, **options), theirs(*truth, **options)
    assert out.shape == wanted.shape and out.dtype is wanted.dtype
    assert_close(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for one, other in zip(ours, truth, strict=True):
        assert_close(one.grad, other.grad)


def test_arguments_may_be_positional() -> None:
    q, k, v = tensors(CASES["plain"][0])
    assert_close(scaled_dot_product_attention(q, k, v, BOOLEAN, 0.0, False), theirs(q, k, v, BOOLEAN, 0.0, False))


def test_a_mask_has_a_gradient() -> None:
    q, k, v = tensors(CASES["plain"][0])
    found = []
    for compute in (scaled_dot_product_attention, theirs):
        mask = randn(1, 4, 5, 9, seed=3).requires_grad_()
        compute(q, k, v, mask).square().sum().backward()
        found.append(mask.grad)
    assert_close(*found)


def test_dropout_has_the_mean_of_none() -> None:
    torch.manual_seed(0)
    q = randn(1, 2, 64, 8)
    out = scaled_dot_product_attention(q, q, torch.ones_like(q), dropout_p=0.5)
    assert not torch.equal(out, scaled_dot_product_attention(q, q, torch.ones_like(q), dropout_p=0.5))
    assert abs(out.mean() - 1) < 6 * out[..., 0].std() / 128**0.5  # 128 rows


def test_many_heads_are_no_reason_to_warn_of_the_layout() -> None:
    q = torch.randn(300, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(scaled_dot_product_attention(q, q, q), theirs(q, q, q))


def test_a_last_dim_with_gaps() -> None:
    q, k, v = (x.mT.contiguous().mT for x in tensors(CASES["plain"][0]))
    assert_close(scaled_dot_product_attention(q, k, v), theirs(q, k, v))


def test_it_compiles_and_takes_autocasts_dtype() -> None:
    q, k, v = (x.float() for x in tensors(CASES["plain"][0]))
    compiled = torch.compile(
        lambda *x: scaled_dot_product_attention(*x, is_causal=True), backend="eager", fullgraph=True
    )
    assert_close(compiled(q, k, v), theirs(q, k, v, is_causal=True))
    with torch.autocast("cpu"):
        assert scaled_dot_product_attention(q, k, v).dtype is theirs(q, k, v).dtype is torch.bfloat16


BIASES = {"upper left": "causal_upper_left", "lower right": "causal_lower_right"}
LENGTHS = {"as many": (9, 9), "fewer queries": (5, 9), "fewer keys": (9, 5)}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", BIASES.values(), ids=BIASES)
def test_a_causal_bias_is_its_mask(name: str, lengths: tuple[int, int]) -> None:
    biases = pytest.importorskip("torch.nn.attention.bias")
    bias = getattr(biases, name)(*lengths)
    q, k, v = tensors(((2, 4, lengths[0], 8), (2, 4, lengths[1], 8), (2, 4, lengths[1], 8)))
    wanted = theirs(q, k, v, bias._materialize("cpu"))
    assert_close(scaled_dot_product_attention(q, k, v, bias), wanted)
    assert_close(scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=bias), wanted[0])
    with pytest.raises(ValueError, match=r"attn_mask: .* CausalBias should not be used with causal=True"):
        scaled_dot_product_attention(q, k, v, bias, is_causal=True)
    with pytest.raises(
        RuntimeError, match=r"^attn_mask: expected a CausalBias of 3 queries and \d keys; got \(\d, \d\)"
    ):
        scaled_dot_product_attention(q[:, :, :3], k, v, bias)


def test_a_causal_bias_compiles() -> None:
    biases = pytest.importorskip("torch.nn.attention.bias")
    q, k, v = (x.float() for x in tensors(CASES["plain"][0]))
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    for bias in (biases.causal_upper_left(5, 9), biases.causal_lower_right(5, 9)):
        assert_close(compiled(q, k, v, bias), scaled_dot_product_attention(q, k, v, bias))


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 9, 8)
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no tensor": ((1, K, K), {}, "^query: expected a torch.Tensor; got int"),
    "one dim": ((Q[0, 0, 0], K, K), {}, "^query, key and value: expected at least 2 dims"),
    "dtypes": ((Q, K.half(), K), {}, "key: expected the query's dtype"),
    "integers": ((Q.int(), K.int(), K.int()), {}, "query: expected dtype"),
    "head dims": ((Q, K[..., :4], K), {}, "as \\[B, T, H, D\\]: key: expected the query's head dim"),
    "heads": ((Q, K[:, :2], K[:, :2]), {}, r"got \[2, 4\] and \[2, 2\] and \[2, 2\]. Pass enable_gqa=True"),
    "groups": ((Q[:, :3], K[:, :2], K[:, :2]), {"enable_gqa": True}, "query: expected a multiple of the 2 KV heads"),
    "mask of ints": ((Q, K, K, torch.zeros(5, 9).int()), {}, "^attn_mask: expected dtype bool, float32 or"),
    "mask in fp64": ((Q, K, K, torch.zeros(5, 9).double()), {}, "^attn_mask: expected dtype bool"),
    "mask's shape": ((Q, K, K, torch.zeros(4, 9)), {}, "expected broadcastable to"),
    "dropout": ((Q, K, K), {"dropout_p": 1.5}, "dropout_p: expected a probability"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_call_raises_what_torch_raises(name: str) -> None:
    arguments, options, words = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError)) as torchs:
        theirs(*arguments, **options)
    with pytest.raises(torchs.type, match=words):
        scaled_dot_product_attention(*arguments, **options)


def test_values_of_another_length_are_refused() -> None:
    """torch's kernel for a CPU reads beyond them."""
    with pytest.raises(RuntimeError, match="value: expected the key's length and heads"):
        scaled_dot_product_attention(Q, K, K[:, :, :3])


def test_a_mask_beside_is_causal_is_refused_as_documented() -> None:
    """torch's kernel for a CPU takes both; its documentation, and its other kernels, refuse them."""
    with pytest.raises(RuntimeError, match=r"^attn_mask: expected None where is_causal is set"):
        scaled_dot_product_attention(Q, K, K, torch.zeros(5, 9), is_causal=True)
    with pytest.raises(TypeError, match="positional argument"):
        scaled_dot_product_attention(Q, K, K, None, 0.0, False, 0.3)
