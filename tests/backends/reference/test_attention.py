"""The specification is checked against things that share no code with it: facts worked out by hand, loops over Python
floats, torch's own attention, and the dropout rule in Python integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from dropout_vectors import DROPOUT_VECTORS
from stream_attention.backends.reference import attention as reference

INF = math.inf
LOW_32 = 2**32 - 1


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(
    batch: int = 2, q_len: int = 5, k_len: int = 7, q_heads: int = 4, kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        randn(batch, q_len, q_heads, 8, seed=1),
        randn(batch, k_len, kv_heads, 8, seed=2),
        randn(batch, k_len, kv_heads, 6, seed=3),
    )


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=False)


def column(*values: float) -> Tensor:
    """Numbers along the sequence, as [1, T, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


# Semantics


def test_one_key_returns_its_value_and_its_score() -> None:
    out, lse = reference.attention(column(3.0), column(0.5), column(7.0))
    assert out.item() == 7.0
    assert lse.item() == 1.5


def test_equal_keys_return_the_mean_value() -> None:
    out, lse = reference.attention(column(2.0), column(1.0, 1.0), column(1.0, 5.0))
    assert_same(out.item(), 3.0)
    assert_same(lse.item(), 2.0 + math.log(2))


def test_probabilities_are_those_of_the_score_odds() -> None:
    out, _ = reference.attention(column(1.0), column(0.0, math.log(3)), column(0.0, 1.0))
    assert_same(out.item(), 0.75)


def test_a_sink_takes_its_share_and_has_no_value() -> None:
    out, lse = reference.attention(column(0.0), column(1.0), column(6.0), sink=torch.tensor([math.log(2)]))
    torch.testing.assert_close(out.item(), 2.0, rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.item(), math.log(3), rtol=1e-6, atol=0)


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    q, k, v = qkv()
    nothing = torch.full((4,), -INF, requires_grad=True)
    assert_same(reference.attention(q, k, v, causal=True, sink=nothing), reference.attention(q, k, v, causal=True))
    out, lse = reference.attention(q, k[:, :0], v[:, :0], sink=nothing)
    assert (out == 0).all() and (lse == -INF).all()
    assert (torch.autograd.grad(out.sum() + lse.sum(), nothing)[0] == 0).all()


def test_default_scale_is_inverse_root_of_head_dim_and_zero_is_a_scale() -> None:
    q, k = torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 16)
    v = torch.ones(1, 1, 1, 1)
    assert reference.attention(q, k, v)[1].item() == 4.0
    assert reference.attention(q, k, v, scale=0.5)[1].item() == 8.0
    assert reference.attention(q, k, v, scale=0.0)[1].item() == 0.0


def test_softcap_acts_on_scaled_scores_and_before_the_bias() -> None:
    _, lse = reference.attention(column(4.0), column(3.0), column(1.0), scale=0.5, softcap=2.0, bias=torch.tensor(10.0))
    assert_same(lse.item(), 2.0 * math.tanh(6.0 / 2.0) + 10.0)


def test_alibi_counts_distance_in_both_directions_from_the_aligned_position() -> None:
    # Two queries at the last two of three positions, scores all zero: the weights are 2^-|distance|.
    slopes = torch.tensor([math.log(2)], dtype=torch.float64)
    out, _ = reference.attention(column(0.0, 0.0), column(0.0, 0.0, 0.0), column(1.0, 10.0, 100.0), alibi_slopes=slopes)
    first = (0.5 * 1 + 1.0 * 10 + 0.5 * 100) / 2.0
    second = (0.25 * 1 + 0.5 * 10 + 1.0 * 100) / 1.75
    assert_same(out.flatten().tolist(), [first, second])


def seen(q_len: int, k_len: int, **kwargs: Any) -> list[str]:
    """One string per query row: x where it sees the key. Value j is a unit vector, so out is the probabilities."""
    values = torch.eye(k_len, dtype=torch.float64).view(1, k_len, 1, k_len)
    zeros_q, zeros_k = torch.zeros(1, q_len, 1, 1), torch.zeros(1, k_len, 1, 1)
    out, _ = reference.attention(zeros_q, zeros_k, values, **kwargs)
    return ["".join("x" if p > 0 else "." for p in row) for row in out[0, :, 0].tolist()]


def test_causal_is_aligned_bottom_right() -> None:
    assert seen(3, 3, causal=True) == ["x..", "xx.", "xxx"]
    assert seen(2, 4, causal=True) == ["xxx.", "xxxx"]
    assert seen(4, 2, causal=True) == ["..", "..", "x.", "xx"]


def test_window_is_measured_from_the_aligned_position_and_minus_one_is_unbounded() -> None:
    assert seen(4, 4, window=(1, 0)) == ["x...", "xx..", ".xx.", "..xx"]
    assert seen(4, 4, window=(0, 1)) == ["xx..", ".xx.", "..xx", "...x"]
    assert seen(4, 4, window=(0, 0)) == ["x...", ".x..", "..x.", "...x"]
    assert seen(4, 4, window=(-1, 1)) == ["xx..", "xxx.", "xxxx", "xxxx"]
    assert seen(4, 4, window=(1, -1)) == ["xxxx", "xxxx", ".xxx", "..xx"]
    assert seen(3, 3, window=(-1, -1)) == ["xxx", "xxx", "xxx"]
    assert seen(2, 5, window=(1, 1)) == ["..xxx", "...xx"]
    assert seen(4, 2, window=(0, 0)) == ["..", "..", "x.", ".x"]
    assert seen(3, 3, window=(1, 1), causal=True) == ["x..", "xx.", ".xx"]


def test_mask_true_means_attend_and_minus_infinity_in_the_bias_hides() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    assert seen(2, 2, mask=mask) == ["x.", ".x"]
    assert seen(2, 2, bias=torch.tensor([[0.0, -INF], [-INF, 0.0]])) == ["x.", ".x"]
    assert seen(2, 2, mask=mask, causal=True, bias=torch.tensor([-INF, 0.0])) == ["..", ".x"]


def test_explicit_positions_place_a_shard_in_the_whole() -> None:
    striped = torch.tensor([1, 3])
    assert seen(2, 2, causal=True, q_positions=striped, k_positions=torch.tensor([0, 2])) == ["x.", "xx"]
    assert seen(2, 2, causal=True, q_positions=striped, k_positions=torch.tensor([2, 3])) == ["..", "xx"]
    assert seen(2, 3, window=(1, 1), q_positions=torch.tensor([7, 8]), k_positions=torch.tensor([6, 7, 8])) == [
        "xxx",
        ".xx",
    ]


def test_a_row_that_sees_nothing_is_zero_with_lse_minus_infinity_or_its_sink() -> None:
    q, k, v = qkv(q_len=3, k_len=2)
    out, lse = reference.attention(q, k, v, causal=True)
    assert (out[:, 0] == 0).all() and (lse[:, :, 0] == -INF).all()
    assert (out[:, 1:] != 0).all() and lse[:, :, 1:].isfinite().all()
    sink = randn(4)
    out, lse = reference.attention(q, k, v, causal=True, sink=sink)
    assert (out[:, 0] == 0).all()
    assert_same(lse[:, :, 0], sink.expand(2, 4))


@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_zero_sizes(batch: int, q_len: int, k_len: int, with_sink: bool) -> None:
    inputs = [x.requires_grad_() for x in qkv(batch, q_len, k_len)]
    sink = randn(4).requires_grad_() if with_sink else None
    mask = torch.ones(batch, 1, q_len, k_len, dtype=torch.bool)
    out, lse = reference.attention(
        *inputs, causal=True, mask=mask, bias=mask.double(), sink=sink, alibi_slopes=randn(4), dropout_p=0.5, seed=0
    )
    assert out.shape == (batch, q_len, 4, 6) and lse.shape == (batch, 4, q_len)
    assert (out == 0).all()
    assert torch.equal(lse, torch.full_like(lse, -INF) if sink is None else sink[:, None].expand_as(lse))
    wanted = inputs if sink is None else [*inputs, sink]
    for x, grad in zip(wanted, torch.autograd.grad(out.sum() + lse.exp().sum(), wanted), strict=True):
        assert grad.shape == x.shape and grad.isfinite().all()


def test_results_come_in_the_compute_dtype_and_lse_in_float32_at_least() -> None:
    low = [x.bfloat16() for x in qkv()]
    for compute_dtype, lse_dtype in [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ]:
        out, lse = reference.attention(*low, sink=randn(4), alibi_slopes=randn(4), compute_dtype=compute_dtype)
        assert out.dtype == compute_dtype and lse.dtype == lse_dtype
        cu = torch.tensor([0, 5], dtype=torch.int32)
        packed = [x[0] for x in low]
        out, lse = reference.varlen_attention(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, compute_dtype=compute_dtype)
        assert out.dtype == compute_dtype and lse.dtype == lse_dtype


def test_the_same_dtype_computation_is_the_naive_torch_one() -> None:
    q, k, v = (x.bfloat16() for x in qkv(q_heads=2))
    out, lse = reference.attention(q, k, v, compute_dtype=torch.bfloat16)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) * 8**-0.5
    assert torch.equal(out, (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2))
    assert torch.equal(lse, scores.float().logsumexp(-1))
    exact, _ = reference.attention(q, k, v)
    error = (out.double() - exact).abs().max().item()
    assert 0 < error < 2**-6


def test_alibi_in_a_narrow_dtype_is_rounded_once() -> None:
    # 0.3 * 259 = 77.7, nearest to 77.5; with the slope rounded to bf16 first it is 77.9, nearest to 78.
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    _, lse = reference.attention(
        zero,
        zero,
        zero,
        alibi_slopes=torch.tensor([0.3]),
        q_positions=torch.tensor([259]),
        compute_dtype=torch.bfloat16,
    )
    assert lse.item() == -77.5


def test_a_bias_that_overflows_the_compute_dtype_gives_no_nan() -> None:
    q, k, v = (x.half().requires_grad_() for x in qkv())
    bias = torch.zeros(5, 7)
    bias[0] = torch.finfo(torch.float32).min
    bias.requires_grad_()
    out, lse = reference.attention(q, k, v, bias=bias, compute_dtype=torch.float16)
    assert (out[:, 0] == 0).all() and (lse[:, :, 0] == -INF).all()
    assert out.isfinite().all() and lse[:, :, 1:].isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum() + lse.sum(), [q, k, v, bias]))
    oracle, _ = reference.attention(q, k, v, bias=bias)
    # In float64 the row is a finite one, uniform to the last bit that matters.
    assert_same(oracle[:, 0], v.double().mean(1).repeat_interleave(2, dim=1))


def test_nan_that_a_query_sees_is_not_hidden() -> None:
    q, k, v = qkv()
    k[0, 3, 1] = math.nan
    out, lse = reference.attention(q, k, v)
    assert out[0, :, 2:].isnan().all() and lse[0, 2:].isnan().all()
    assert out[0, :, :2].isfinite().all() and out[1].isfinite().all()
    out, _ = reference.attention(q, k[:, 3:4], v[:, 3:4])
    assert out[0, :, 2:].isnan().all()


# Agreement with loops over scalars


def loops(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The formula, one Python float at a time."""
    (batch, q_len, q_heads, dim), (_, k_len, kv_heads, value_dim) = q.shape, v.shape
    left, right = options.get("window", (-1, -1))
    cap, scale = options.get("softcap", 0.0), options.get("scale", dim**-0.5)
    out = torch.zeros(batch, q_len, q_heads, value_dim, dtype=torch.float64)
    lse = torch.full((batch, q_heads, q_len), -INF, dtype=torch.float64)
    for b in range(batch):
        for h in range(q_heads):
            kv_head = h // (q_heads // kv_heads)
            for i in range(q_len):
                position = i + k_len - q_len
                weights: dict[int, float] = {}
                for j in range(k_len):
                    if options.get("causal") and j > position:
                        continue
                    if (left != -1 and j < position - left) or (right != -1 and j > position + right):
                        continue
                    if "mask" in options and not options["mask"].expand(batch, q_heads, q_len, k_len)[b, h, i, j]:
                        continue
                    score = scale * sum(q[b, i, h, d].item() * k[b, j, kv_head, d].item() for d in range(dim))
                    if cap:
                        score = cap * math.tanh(score / cap)
                    if "bias" in options:
                        score += options["bias"].expand(batch, q_heads, q_len, k_len)[b, h, i, j].item()
                    if "alibi_slopes" in options:
                        score -= options["alibi_slopes"].expand(batch, q_heads)[b, h].item() * abs(position - j)
                    weights[j] = math.exp(score)
                total = sum(weights.values())
                if "sink" in options:
                    total += math.exp(options["sink"][h].item())
                if total == 0.0:
                    continue
                lse[b, h, i] = math.log(total)
                for j, weight in weights.items():
                    dropped = "keep" in options and not options["keep"][b, h, i, j]
                    factor = 0.0 if dropped else weight / total / (1.0 - options.get("dropout_p", 0.0))
                    for d in range(value_dim):
                        out[b, i, h, d] += factor * v[b, j, kv_head, d].item()
    return out, lse


def hiding_bias(*shape: int) -> Tensor:
    bias = randn(*shape, seed=9)
    return torch.where(randn(*shape, seed=10) > 0.8, -INF, bias)


LOOP_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal_more_keys_than_queries": {"causal": True},
    "window": {"window": (2, 1)},
    "window_left_only": {"window": (1, -1)},
    "softcap": {"softcap": 0.7},
    "softcap_is_after_scale": {"softcap": 0.7, "scale": 1.3},
    "alibi_one_slope_per_head": {"alibi_slopes": randn(4).abs()},
    "alibi_per_batch_and_head": {"alibi_slopes": randn(2, 4).abs()},
    "sink": {"sink": randn(4)},
    "bias_over_keys": {"bias": randn(7)},
    "bias_per_head_with_minus_infinity": {"bias": hiding_bias(4, 5, 7)},
    "mask_over_keys_of_a_batch": {"mask": randn(2, 1, 1, 7) > 0},
    "everything": {
        "causal": True,
        "window": (4, -1),
        "mask": randn(2, 1, 5, 7, seed=8) > -0.8,
        "bias": hiding_bias(1, 4, 1, 7),
        "alibi_slopes": randn(2, 4),
        "sink": randn(4),
        "softcap": 1.5,
        "scale": -0.4,
    },
}


@pytest.mark.parametrize("options", LOOP_CASES.values(), ids=LOOP_CASES)
def test_agrees_with_scalar_loops(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    assert_same(reference.attention(q, k, v, **options), loops(q, k, v, **options))


def test_more_queries_than_keys_agrees_with_scalar_loops() -> None:
    q, k, v = qkv(q_len=6, k_len=3)
    options: dict[str, Any] = {"causal": True, "window": (1, 0), "alibi_slopes": randn(4)}
    assert_same(reference.attention(q, k, v, **options), loops(q, k, v, **options))


def test_dropout_is_applied_to_probabilities_and_not_to_their_sum() -> None:
    q, k, v = qkv()
    options = {**LOOP_CASES["everything"], "dropout_p": 0.4}
    keep = torch.tensor(
        [
            [[[python_keep(77, 0, b * 4 + h, i, j, 0.4) for j in range(7)] for i in range(5)] for h in range(4)]
            for b in range(2)
        ]
    )
    actual = reference.attention(q, k, v, seed=77, **options)
    assert_same(actual, loops(q, k, v, keep=keep, **options))
    assert torch.equal(actual[1], reference.attention(q, k, v, **LOOP_CASES["everything"])[1])


# Agreement with torch's attention


def torch_attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **kwargs).transpose(1, 2)


def test_agrees_with_torch_on_full_attention() -> None:
    q, k, v = qkv(kv_heads=4)
    assert_same(reference.attention(q, k, v)[0], torch_attention(q, k, v))
    assert_same(reference.attention(q, k, v, scale=0.3)[0], torch_attention(q, k, v, scale=0.3))


def test_agrees_with_torch_on_grouped_heads() -> None:
    q, k, v = qkv(q_heads=6, kv_heads=2)
    assert_same(reference.attention(q, k, v)[0], torch_attention(q, k, v, enable_gqa=True))


def test_agrees_with_torch_on_causal() -> None:
    q, k, v = qkv(q_len=7, kv_heads=4)
    assert_same(reference.attention(q, k, v, causal=True)[0], torch_attention(q, k, v, is_causal=True))
    q, k, v = qkv(kv_heads=4)
    lower_right = torch_attention(q, k, v, attn_mask=causal_lower_right(5, 7))
    assert_same(reference.attention(q, k, v, causal=True)[0], lower_right)


def test_agrees_with_torch_on_masks() -> None:
    q, k, v = qkv(kv_heads=4)
    mask = randn(2, 1, 5, 7) > 0
    mask[:, :, :, 0] = True
    assert_same(reference.attention(q, k, v, mask=mask)[0], torch_attention(q, k, v, attn_mask=mask))
    bias = randn(4, 5, 7)
    bias[:, :, 2] = -INF
    assert_same(reference.attention(q, k, v, bias=bias)[0], torch_attention(q, k, v, attn_mask=bias))


def test_lse_is_that_of_the_scores() -> None:
    q, k, v = qkv(kv_heads=4)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)
    assert_same(reference.attention(q, k, v)[1], scores.logsumexp(-1))


# Gradients


def everything() -> tuple[list[Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """Every feature at once on small inputs, with a row that sees nothing: differentiable inputs, and the function."""
    q_len, k_len = 3, 4
    mask = torch.ones(2, 1, q_len, k_len, dtype=torch.bool)
    mask[0, :, 1] = False
    inputs = [
        randn(2, q_len, 2, 3, seed=1),
        randn(2, k_len, 1, 3, seed=2),
        randn(2, k_len, 1, 2, seed=3),
        randn(1, 2, 1, k_len, seed=4),  # bias, broadcast
        randn(2, 2, seed=5),  # slopes
        randn(2, seed=6),  # sink
    ]
    inputs[3][0, 0, 0, 1] = -INF

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, bias, slopes, sink = inputs
        out, lse = reference.attention(
            q,
            k,
            v,
            causal=True,
            window=(2, -1),
            mask=mask,
            bias=bias,
            alibi_slopes=slopes,
            sink=sink,
            softcap=2.0,
            scale=0.9,
            dropout_p=0.3,
            seed=5,
        )
        return out, torch.where(lse == -INF, 0.0, lse)  # finite, so that differences of it exist

    return [x.requires_grad_() for x in inputs], run


@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_of_everything_together(with_sink: bool) -> None:
    (q, k, v, bias, slopes, sink), run = everything()

    def of_finite_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sink: Tensor) -> Any:
        # A difference quotient cannot step away from -inf, so the hidden key is put in here.
        hidden = torch.zeros_like(bias, dtype=torch.bool)
        hidden[0, 0, 0, 1] = True
        return run(q, k, v, torch.where(hidden, -INF, bias), slopes, sink if with_sink else None)

    finite_bias = torch.where(bias.detach() == -INF, 0.0, bias.detach()).requires_grad_()
    inputs = [q, k, v, finite_bias, slopes, sink]
    if not with_sink:
        inputs[5] = sink.detach()
    assert gradcheck(of_finite_bias, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(of_finite_bias, inputs, fast_mode=True)


def test_forward_mode_agrees_with_reverse_mode() -> None:
    inputs, run = everything()
    tangents = [randn(*x.shape, seed=20 + n) for n, x in enumerate(inputs)]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(inputs, tangents, strict=True)]
        forward = sum(forward_ad.unpack_dual(y).tangent.sum() for y in run(*duals))
    grads = torch.autograd.grad(sum(y.sum() for y in run(*inputs)), inputs)
    assert_same(forward, sum((g * t).sum() for g, t in zip(grads, tangents, strict=True)))


def test_vmap_agrees_with_a_loop() -> None:
    q, k, v = (torch.stack([x, 2 * x, -x]) for x in qkv())
    mask, sink = randn(3, 2, 1, 5, 7) > 0, randn(4)

    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return reference.attention(q, k, v, mask=mask, sink=sink, dropout_p=0.3, seed=1)

    expected = [torch.stack(xs) for xs in zip(*(one(*x) for x in zip(q, k, v, mask, strict=True)), strict=True)]
    assert_same(torch.func.vmap(one)(q, k, v, mask), tuple(expected))


def test_rows_that_see_nothing_have_zero_gradients_of_first_and_second_order() -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    bias = torch.full((5, 7), -INF, dtype=torch.float64, requires_grad=True)
    wanted = [*inputs, bias]
    out, lse = reference.attention(*inputs, bias=bias, softcap=1.0, dropout_p=0.5, seed=0)
    first = torch.autograd.grad((out * out).sum() + out.sum() + lse.exp().sum(), wanted, create_graph=True)
    assert all((g == 0).all() for g in first)
    second = torch.autograd.grad(sum((g * randn(*g.shape)).sum() for g in first), wanted)
    assert all((g == 0).all() for g in second)


def test_the_gradient_of_an_lse_of_minus_infinity_is_zero_and_that_of_a_lone_sink_is_one() -> None:
    inputs = [x.requires_grad_() for x in qkv(q_len=4, k_len=2)]
    sink = randn(4).requires_grad_()
    lse = reference.attention(*inputs, causal=True)[1]
    assert all((g == 0).all() for g in torch.autograd.grad(lse[:, :, :2].sum(), inputs[:2]))
    lse = reference.attention(*inputs, causal=True, sink=sink)[1]
    grads = torch.autograd.grad(lse[:, :, :2].sum(), [*inputs[:2], sink])
    assert (grads[0] == 0).all() and (grads[1] == 0).all()
    assert (grads[2] == 4).all()  # 2 batches, 2 rows


def test_bias_gradient_is_summed_over_broadcast_dims_in_its_own_dtype() -> None:
    q, k, v = qkv()
    full = randn(2, 4, 5, 7).requires_grad_()
    narrow = full.detach()[:1, :, :1].bfloat16().requires_grad_()
    reference.attention(q, k, v, bias=narrow)[0].square().sum().backward()
    with torch.no_grad():
        full.copy_(narrow.detach())
    reference.attention(q, k, v, bias=full)[0].square().sum().backward()
    assert narrow.grad is not None and full.grad is not None
    assert narrow.grad.dtype == torch.bfloat16 and narrow.grad.shape == (1, 4, 1, 7)
    torch.testing.assert_close(narrow.grad.double(), full.grad.sum((0, 2), keepdim=True), rtol=1e-2, atol=1e-3)


# NaN and Inf where nobody looks


def poisoned(name: str, poison: float) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """Inputs, options that hide some of their rows, and for each input a bool [B, T, H] of the rows that are hidden."""
    inputs = list(qkv())
    hidden = [torch.zeros(x.shape[:3], dtype=torch.bool) for x in inputs]
    options: dict[str, Any] = {}
    keys = torch.zeros(2, 7, 2, dtype=torch.bool)
    if name == "padding_mask":
        keys[0, 4:] = True
        keys[1, 2:] = True
        options["mask"] = ~keys[:, :, 0].view(2, 1, 1, 7)
    elif name == "mask_of_one_kv_head":
        keys[:, 3, 1] = True
        options["mask"] = ~keys.transpose(1, 2).repeat_interleave(2, dim=1).unsqueeze(2)
    elif name == "bias":
        keys[:, 5] = True
        options["bias"] = torch.where(keys[0, :, 0], -INF, 0.5)
    elif name == "window":
        keys[:, 0] = True  # query 0 stands at position 2
        options["window"] = (1, -1)
    elif name == "causal_with_keys_in_the_future":
        keys[:, 5:] = True
        options.update(causal=True, q_positions=torch.arange(5), k_positions=torch.arange(7))
    elif name == "bias_and_window_between_them":
        keys[:, :2] = True
        options["window"] = (1, -1)  # hides key 0 from all, and key 1 from all but query 0
        options["bias"] = torch.zeros(5, 7)
        options["bias"][0, 1] = -INF
    elif name == "empty_query_rows":
        hidden[0][:, 1] = True
        options["mask"] = ~hidden[0][:, :, 0].view(2, 1, 5, 1)
    elif name == "empty_query_row_of_one_head_with_a_sink":
        hidden[0][1, 2, 3] = True
        options["mask"] = ~hidden[0].transpose(1, 2).unsqueeze(3)
        options["sink"] = randn(4)
    hidden[1], hidden[2] = keys, keys
    inputs = [torch.where(rows[..., None], poison, x) for rows, x in zip(hidden, inputs, strict=True)]
    return inputs, options, hidden


POISONED = [
    "padding_mask",
    "mask_of_one_kv_head",
    "bias",
    "window",
    "causal_with_keys_in_the_future",
    "bias_and_window_between_them",
    "empty_query_rows",
    "empty_query_row_of_one_head_with_a_sink",
]


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("name", POISONED)
def test_poison_in_hidden_rows_reaches_no_output_and_no_gradient(name: str, poison: float) -> None:
    results = []
    for filling in (poison, 1.0):
        inputs, options, hidden = poisoned(name, filling)
        assert any(rows.any() for rows in hidden)
        leaves = [x.requires_grad_() for x in inputs]
        out, lse = reference.attention(*leaves, softcap=3.0, dropout_p=0.2, seed=4, **options)
        loss = (out * randn(*out.shape)).sum() + torch.where(lse == -INF, 0.0, lse).square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        for grads in (first, second):
            assert all((g[rows] == 0).all() for g, rows in zip(grads, hidden, strict=True))
        results.append([out, lse, *first, *second])
    for with_poison, without in zip(*results, strict=True):
        assert not with_poison.isnan().any()
        assert torch.equal(with_poison, without)


# Packed sequences

LENGTHS_Q, LENGTHS_K = [3, 0, 4, 2, 1], [5, 3, 2, 0, 1]


def packed(tail: int = 0, poison: float = math.nan) -> tuple[list[Tensor], dict[str, Tensor]]:
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (LENGTHS_Q, LENGTHS_K))
    n_q, n_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    tensors = [randn(n_q, 4, 8, seed=1), randn(n_k, 2, 8, seed=2), randn(n_k, 2, 6, seed=3)]
    tensors = [torch.cat([x, x.new_full((tail, *x.shape[1:]), poison)]) for x in tensors]
    return tensors, {"cu_seqlens_q": cu_q.int(), "cu_seqlens_k": cu_k.int()}


@pytest.mark.parametrize("slopes_shape", [(4,), (5, 4)])
def test_packed_sequences_are_rows_of_a_batch(slopes_shape: tuple[int, ...]) -> None:
    (q, k, v), cu = packed()
    slopes, sink = randn(*slopes_shape), randn(4)
    out, lse = reference.varlen_attention(
        q, k, v, **cu, causal=True, window=(2, 0), alibi_slopes=slopes, sink=sink, softcap=2.0, scale=0.6
    )
    for b, (n_q, n_k) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        rows = slice(sum(LENGTHS_Q[:b]), sum(LENGTHS_Q[:b]) + n_q)
        columns = slice(sum(LENGTHS_K[:b]), sum(LENGTHS_K[:b]) + n_k)
        expected_out, expected_lse = loops(
            q[None, rows],
            k[None, columns],
            v[None, columns],
            causal=True,
            window=(2, 0),
            alibi_slopes=slopes.expand(5, 4)[b],
            sink=sink,
            softcap=2.0,
            scale=0.6,
        )
        assert_same((out[rows], lse[:, rows]), (expected_out[0], expected_lse[0]))


def test_a_packed_sequence_draws_the_dropout_of_its_row_of_the_batch() -> None:
    q, k, v = qkv(batch=3, q_len=4, k_len=4)
    cu = torch.tensor([0, 4, 8, 12])
    seed = torch.tensor([11, 12])
    out, lse = reference.attention(q, k, v, dropout_p=0.5, seed=seed)
    packed_out, packed_lse = reference.varlen_attention(
        *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=cu, cu_seqlens_k=cu, dropout_p=0.5, seed=seed
    )
    assert_same(packed_out, out.flatten(0, 1))
    assert_same(packed_lse, lse.transpose(0, 1).flatten(1))


def test_rows_past_the_last_sequence_are_empty_whatever_they_hold() -> None:
    tensors, cu = packed(tail=3)
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = reference.varlen_attention(*leaves, **cu)
    assert (out[-3:] == 0).all() and (lse[:, -3:] == -INF).all()
    without, _ = packed()
    assert_same(reference.varlen_attention(*without, **cu), (out[:-3], lse[:, :-3]))
    for grad in torch.autograd.grad(out.sum() + torch.where(lse == -INF, 0.0, lse).sum(), leaves):
        assert grad.isfinite().all() and (grad[-3:] == 0).all()


def test_no_sequences_at_all() -> None:
    q, k, v = (x[0] for x in qkv())
    nothing = torch.tensor([0])
    out, lse = reference.varlen_attention(q, k, v, cu_seqlens_q=nothing, cu_seqlens_k=nothing)
    assert out.shape == (5, 4, 6) and (out == 0).all()
    assert lse.shape == (4, 5) and (lse == -INF).all()


# Properties: the parts of a whole, and their merge


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 9), max_size=4), causal=st.booleans(), with_sink=st.booleans())
def test_keys_split_anywhere_and_merged_are_the_whole(cuts: list[int], causal: bool, with_sink: bool) -> None:
    q, k, v = qkv(q_len=11, k_len=9)
    sink = randn(4) if with_sink else None
    options: dict[str, Any] = {"causal": causal, "dropout_p": 0.3, "seed": 6, "alibi_slopes": randn(4)}
    whole = reference.attention(q, k, v, sink=sink, **options)
    edges = [0, *sorted(cuts), 9]
    states = [
        reference.attention(
            q,
            k[:, start:stop],
            v[:, start:stop],
            q_positions=torch.arange(11) - 2,
            k_positions=torch.arange(start, stop),
            k_index=torch.arange(start, stop),
            **options,
        )
        for start, stop in pairwise(edges)
    ]
    if sink is not None:  # merged once, as a state of its own
        states.append((torch.zeros_like(whole[0]), sink[:, None].expand(2, 4, 11)))
    outs, lses = zip(*states, strict=True)
    assert_same(reference.merge_states(outs, lses), whole)


def test_queries_split_with_their_positions_and_indices_are_the_whole() -> None:
    q, k, v = qkv(q_len=6, k_len=6)
    options: dict[str, Any] = {"causal": True, "window": (3, -1), "alibi_slopes": randn(4), "dropout_p": 0.4, "seed": 1}
    out, lse = reference.attention(q, k, v, **options)
    for rows in (torch.tensor([0, 2, 4]), torch.tensor([1, 5, 3])):
        part = reference.attention(q[:, rows], k, v, q_positions=rows, q_index=rows, **options)
        assert_same(part, (out[:, rows], lse[:, :, rows]))
    part = reference.attention(q[1:], k[1:], v[1:], batch_start=1, **options)
    assert_same(part, (out[1:], lse[1:]))


def state(seed: int, empty_rows: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    out, lse = randn(2, 5, 4, 6, seed=seed), 5 * randn(2, 4, 5, seed=seed + 100)
    rows = list(empty_rows)
    out[:, rows] = 0.0
    lse[:, :, rows] = -INF
    return out, lse


def merge(*states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return reference.merge_states([out for out, _ in states], [lse for _, lse in states])


def test_merge_weighs_by_exp_of_lse() -> None:
    out, lse = merge((column(0.0), torch.zeros(1, 1, 1)), (column(4.0), torch.full((1, 1, 1), math.log(3))))
    torch.testing.assert_close(out.item(), 3.0, rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.item(), math.log(4), rtol=1e-6, atol=0)


def test_merge_is_associative_and_commutative_with_the_empty_state_as_identity() -> None:
    a, b, c = state(1, (0, 1)), state(2, (1, 2)), state(3, (1,))
    empty = state(4, (0, 1, 2, 3, 4))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert_same(merge(a, b, c), merge(a, merge(b, c)))
    assert_same(merge(a, b), merge(b, a))
    for identity in (merge(a, empty), merge(empty, a), merge(a)):
        assert_same(identity, a)
    for out, lse in (merge(empty, empty), merge(empty)):
        assert (out == 0).all() and (lse == -INF).all()


def test_merge_survives_extreme_lse() -> None:
    a, b = state(1), state(2)
    out, lse = merge((a[0], a[1] + 1e4), (b[0], b[1] - 1e4))
    assert_same((out, lse), (a[0], a[1] + 1e4))


def test_merge_does_not_look_at_the_out_of_an_empty_state() -> None:
    a, b = state(1, (0, 1)), state(2, (1, 2))
    garbage = a[0].clone()
    garbage[:, :2] = math.nan
    assert_same(merge((garbage, a[1]), b), merge(a, b))


def test_merge_of_packed_states() -> None:
    a, b = state(1, (0,)), state(2, (0, 3))
    out, lse = merge(a, b)
    for n in range(2):
        assert_same(merge((a[0][n], a[1][n]), (b[0][n], b[1][n])), (out[n], lse[n]))


def test_merge_gradients_with_empty_rows() -> None:
    leaves = [x[:, :2, :2, :2].clone().requires_grad_() for x in (state(1)[0], state(2)[0])]
    lses = [x[:, :2, :2].clone().requires_grad_() for x in (state(1)[1], state(2)[1])]
    hidden = [torch.zeros(2, 2, 2, dtype=torch.bool) for _ in range(2)]
    hidden[0][0] = True  # empty in one state
    hidden[0][1, 0, 0] = hidden[1][1, 0, 0] = True  # empty in both

    def run(out_a: Tensor, out_b: Tensor, lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        parts = [torch.where(rows, -INF, lse) for rows, lse in zip(hidden, (lse_a, lse_b), strict=True)]
        out, lse = reference.merge_states([out_a, out_b], parts)
        return out, torch.where(lse == -INF, 0.0, lse)

    assert gradcheck(run, [*leaves, *lses])
    assert gradgradcheck(run, [*leaves, *lses])


# Layouts


def test_strides_do_not_matter() -> None:
    q, k, v = qkv()
    expected = reference.attention(q, k, v, causal=True)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert_same(reference.attention(*heads_first, causal=True), expected)
    every_other = [torch.stack([x, torch.full_like(x, math.nan)], dim=2)[:, :, 0] for x in (q, k, v)]
    assert not every_other[0].is_contiguous()
    assert_same(reference.attention(*every_other, causal=True), expected)
    same_key_for_all = [q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)]
    assert_same(reference.attention(*same_key_for_all)[0], v[:, :1].repeat_interleave(2, dim=2).expand(2, 5, 4, 6))


# Dropout: the rule


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [product_1 // 2**32 ^ c[1] ^ k[0], product_1 % 2**32, product_0 // 2**32 ^ c[3] ^ k[1], product_0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def python_word(seed: int, offset: int, head: int, i: int, j: int) -> int:
    key = [seed % 2**32, seed // 2**32 % 2**32]
    tail = [offset % 2**32, offset // 2**32 % 2**32]
    x = python_philox([i, 2 * head % 2**32, *tail], key)[0] ^ python_philox([j, (2 * head + 1) % 2**32, *tail], key)[0]
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def python_keep(seed: int, offset: int, head: int, i: int, j: int, dropout_p: float) -> bool:
    return python_word(seed, offset, head, i, j) >= math.floor(dropout_p * 2**32)


PHILOX_KNOWN_ANSWERS = [  # Random123, kat_vectors, philox4x32 10
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([LOW_32] * 4, [LOW_32] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), PHILOX_KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert python_philox(counter, key) == answer
    tensors = [torch.tensor([x]) for x in counter], [torch.tensor([x]) for x in key]
    assert [x.item() for x in reference.philox4x32_10(tuple(tensors[0]), tuple(tensors[1]))] == answer
    assert list(reference.philox4x32_10(tuple(counter), tuple(key))) == answer


def test_mix32_known_answers() -> None:
    # A single low bit passes the first shift and makes the first product the constant itself.
    x = 0x7FEB352D ^ (0x7FEB352D >> 15)
    x = x * 0x846CA68B % 2**32
    assert reference.mix32(torch.tensor([0, 1])).tolist() == [0, x ^ (x >> 16)]


def test_there_are_sixteen_dropout_vectors_and_they_are_right() -> None:
    assert len(DROPOUT_VECTORS) == 16
    assert len({arguments for arguments, _ in DROPOUT_VECTORS}) == 16
    for arguments, word in DROPOUT_VECTORS:
        assert python_word(*arguments) == word
        assert reference.dropout_word(*arguments) == word
        assert reference.dropout_word(*(torch.tensor(x) for x in arguments)) == word


def test_the_dropout_mask_is_the_rule_at_every_element() -> None:
    seed, offset = 2**40 + 3, 2**33 + 5
    keep = reference.dropout_keep(seed, offset, 2, 3, 4, 5, 0.6, batch_start=7)
    assert keep.shape == (2, 3, 4, 5) and keep.dtype == torch.bool
    for b in range(2):
        for h in range(3):
            for i in range(4):
                for j in range(5):
                    assert keep[b, h, i, j] == python_keep(seed, offset, (7 + b) * 3 + h, i, j, 0.6)


def test_the_threshold_is_exact() -> None:
    (seed, offset, _, i, j), word = DROPOUT_VECTORS[0]
    one = {"q_index": torch.tensor([i]), "k_index": torch.tensor([j])}
    assert reference.dropout_keep(seed, offset, 1, 1, 1, 1, word / 2**32, **one).item()
    assert not reference.dropout_keep(seed, offset, 1, 1, 1, 1, (word + 1) / 2**32, **one).item()


def test_a_seed_may_be_an_int_or_a_tensor_with_its_offset() -> None:
    q, k, v = qkv()
    by_int = reference.attention(q, k, v, dropout_p=0.5, seed=9)[0]
    assert torch.equal(by_int, reference.attention(q, k, v, dropout_p=0.5, seed=torch.tensor([9, 0]))[0])
    assert not torch.equal(by_int, reference.attention(q, k, v, dropout_p=0.5, seed=torch.tensor([9, 1]))[0])
    assert not torch.equal(by_int, reference.attention(q, k, v, dropout_p=0.5, seed=torch.tensor([8, 0]))[0])


def test_no_seed_draws_one_from_torch() -> None:
    q, k, v = qkv()
    draws = []
    for manual_seed in (1, 1, 2):
        torch.manual_seed(manual_seed)
        draws.append(reference.attention(q, k, v, dropout_p=0.5)[0])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_indices_choose_rows_and_columns_of_the_whole_mask() -> None:
    whole = reference.dropout_keep(3, 1, 1, 2, 32, 32, 0.5)
    rows, columns = torch.tensor([5, 31, 0], dtype=torch.int32), torch.tensor([30, 2], dtype=torch.int32)
    part = reference.dropout_keep(3, 1, 1, 2, 3, 2, 0.5, q_index=rows, k_index=columns)
    assert torch.equal(part, whole[:, :, rows][..., columns])


# Dropout: the statistics, as deviations in units of their standard error

SIGMAS = 5.0
RATES = [0.1, 0.5, 0.9]


def keep_bits(dropout_p: float, seed: int = 1, offset: int = 0, heads: int = 1) -> Tensor:
    """1024 x 1024 keep bits per head, centred and of unit variance."""
    keep = reference.dropout_keep(seed, offset, 1, heads, 1024, 1024, dropout_p)[0]
    return (keep.double() - (1 - dropout_p)) / math.sqrt(dropout_p * (1 - dropout_p))


def sigmas(products: Tensor, dim: int | None = None) -> float:
    """The largest |mean| of independent terms of unit variance, in standard errors."""
    mean = products.mean() if dim is None else products.mean(dim)
    count = products.numel() if dim is None else products.shape[dim]
    return mean.abs().max().item() * math.sqrt(count)


def test_no_dropout_keeps_everything_and_nearly_one_keeps_nearly_nothing() -> None:
    assert reference.dropout_keep(1, 0, 1, 2, 64, 64, 0.0).all()
    assert reference.dropout_keep(1, 0, 1, 1, 256, 256, 1 - 2**-20).sum() <= 3


@pytest.mark.parametrize("dropout_p", RATES)
def test_keep_rate_over_all_and_per_row_and_column(dropout_p: float) -> None:
    x = keep_bits(dropout_p)[0]
    assert sigmas(x) < SIGMAS
    assert sigmas(x, dim=0) < SIGMAS
    assert sigmas(x, dim=1) < SIGMAS


@pytest.mark.parametrize("dropout_p", RATES)
def test_row_sums_vary_as_a_binomial_does(dropout_p: float) -> None:
    x = keep_bits(dropout_p)[0]
    for dim in (0, 1):
        square = (x.sum(dim) / math.sqrt(1024)).square()  # mean 1, variance 2
        assert sigmas((square - 1) / math.sqrt(2)) < SIGMAS


@pytest.mark.parametrize("dropout_p", RATES)
def test_pairs_of_elements_are_uncorrelated(dropout_p: float) -> None:
    x = keep_bits(dropout_p)[0]
    for step in (1, 2, 3, 4, 8, 16, 64, 512):
        assert sigmas(x[step:] * x[:-step]) < SIGMAS  # rows
        assert sigmas(x[:, step:] * x[:, :-step]) < SIGMAS  # columns
        assert sigmas(x[step:, step:] * x[:-step, :-step]) < SIGMAS  # diagonal
    upper = torch.ones(1024, 1024, dtype=torch.bool).triu(1)
    assert sigmas((x * x.T)[upper]) < SIGMAS  # (i, j) with (j, i)
    # Every pair of rows, and of columns: half a million correlations, of which the largest may be somewhat larger.
    for gram in (x @ x.T, x.T @ x):
        assert gram[upper].abs().max().item() / math.sqrt(1024) < SIGMAS + 1.5


@pytest.mark.parametrize("dropout_p", RATES)
def test_two_by_two_minors_are_uncorrelated(dropout_p: float) -> None:
    # The four words of a minor cancel under xor before they are mixed; the mixer must leave nothing of that.
    x = keep_bits(dropout_p)[0]
    generator = torch.Generator().manual_seed(0)
    i, j = (torch.randint(1024, (2**20,), generator=generator) for _ in range(2))
    i2, j2 = ((n + torch.randint(1, 1024, n.shape, generator=generator)) % 1024 for n in (i, j))
    assert sigmas(x[i, j] * x[i, j2] * x[i2, j] * x[i2, j2]) < SIGMAS
    assert sigmas(x[i, j] * x[i, j2] * x[i2, j]) < SIGMAS
    neighbours = x[:-1, :-1] * x[:-1, 1:] * x[1:, :-1] * x[1:, 1:]
    assert sigmas(neighbours) < SIGMAS
    # All 2.7e11 of them: over the columns of two rows, the sum of y_j * y_j' with j < j' is (sum(y)^2 - sum(y^2)) / 2.
    total = (((x @ x.T).square() - x.square() @ x.square().T) / 2).triu(1).sum().item()
    assert abs(total) / math.comb(1024, 2) < SIGMAS  # each has mean 0 and variance 1, and they are uncorrelated


def test_heads_batches_seeds_and_offsets_are_independent() -> None:
    first, second = keep_bits(0.5, heads=2)
    others = [second, keep_bits(0.5, seed=2)[0], keep_bits(0.5, seed=1 + 2**32)[0]]
    others += [keep_bits(0.5, offset=1)[0], keep_bits(0.5, offset=4)[0], keep_bits(0.5, offset=2**32)[0]]
    for other in others:
        assert not torch.equal(first, other)
        assert sigmas(first * other) < SIGMAS
        assert sigmas(first * other.T) < SIGMAS
    batches = reference.dropout_keep(1, 0, 3, 2, 64, 64, 0.5).flatten(0, 1)
    assert len({tuple(head.flatten().tolist()) for head in batches}) == 6


def test_the_expected_output_is_the_undropped_one() -> None:
    q, k, v = qkv(batch=1, q_len=3, k_len=6)
    exact = reference.attention(q, k, v)[0]
    # One call with the batch as the sample: every b draws its own mask.
    n = 20_000
    samples = reference.attention(*(x.expand(n, -1, -1, -1) for x in (q, k, v)), dropout_p=0.3, seed=3)[0]
    error = (samples.mean(0) - exact[0]).abs() / (samples.std(0) / math.sqrt(n))
    assert error.max().item() < SIGMAS
