"""What was broken in the library these modules replace, one test per finding, so that it stays mended.

The numbers are those of the list of findings: 1 the quick start, 2 the backward, 3 ragged lengths, 4 dropout, 5 the
cache, 10 the meaning of masks, 11 the LSE and the scale; then the invented figures, what could not run at all, and the
bar that was derived from them.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stream_attention import FlashAttentionV3, FusedOnlineAttention, StreamAttention, StreamAttentionConfig, attention
from stream_attention_tools.bench.suites import flops
from stream_attention_tools.testing import Case


def qkv(
    q_len: int,
    k_len: int | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 16,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    k_len, kv_heads = q_len if k_len is None else k_len, kv_heads or heads
    sizes = ((q_len, heads), (k_len, kv_heads), (k_len, kv_heads))
    tensors = [torch.randn(1, *size, dim, generator=generator, dtype=torch.float64) for size in sizes]
    return [t.to(dtype).requires_grad_(grad) for t in tensors]


def fused(heads: int = 2, dim: int = 16, **options: Any) -> FusedOnlineAttention:
    return FusedOnlineAttention(heads, dim, **options)


# 4.1 Wrong results and crashes


def test_1_the_quick_start_runs() -> None:
    config = StreamAttentionConfig(num_heads=4, head_dim=16, tile_size_q=128, tile_size_k=64, use_qkv_projections=True)
    attend = StreamAttention(config).cuda() if torch.cuda.is_available() else StreamAttention(config)
    dtype = torch.float16 if torch.cuda.is_available() else torch.float32
    x = torch.randn(2, 24, config.num_heads * config.head_dim, device=attend.attention.device, dtype=dtype)
    with torch.no_grad():
        y = attend(x)
    assert y.shape == x.shape and y.dtype is dtype
    q = torch.randn(2, 24, config.num_heads, config.head_dim, device=x.device, dtype=x.dtype)
    k, v = torch.randn_like(q), torch.randn_like(q)
    with torch.no_grad():
        assert attend(q, k, v, causal=True).shape == q.shape


@pytest.mark.parametrize("causal", [True, False])
def test_2_the_backward_is_right_over_many_tiles_of_keys(causal: bool) -> None:
    tensors = qkv(700, grad=True)  # 512 keys is the largest tile there is
    out = fused()(*tensors, causal=causal)
    expected = attention(*tensors, causal=causal, backend="reference")
    weights = torch.randn_like(out)
    pairs = (torch.autograd.grad((o * weights).sum(), tensors) for o in (out, expected))
    for got, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("length", [1, 15, 50, 63, 65, 513])
def test_3_lengths_that_are_no_multiple_of_a_tile_are_right(length: int) -> None:
    tensors = qkv(length)
    torch.testing.assert_close(fused()(*tensors, causal=False), attention(*tensors, causal=False, backend="reference"))


def test_4_dropout_scales_what_it_keeps_and_leaves_the_denominator() -> None:
    query, key, _ = qkv(64)
    ones = torch.ones_like(query)
    attend = fused()
    attend.set_deterministic(True, 1)
    out, lse = attend(query, key, ones, causal=False, dropout_p=0.5, return_lse=True)
    _, without = attend(query, key, ones, causal=False, dropout_p=0.0, return_lse=True)
    torch.testing.assert_close(lse, without)
    assert out.std() > 0.05, "dropped weights must be missing from the sum"
    assert abs(out.mean() - 1) < 0.1, "and made up for by the others"


def test_4_the_dropout_of_the_config_is_applied_and_has_a_gradient_on_the_same_mask() -> None:
    attend = StreamAttention(StreamAttentionConfig(num_heads=2, head_dim=8, dropout=0.5, use_qkv_projections=False))
    attend.attention.set_deterministic(True, 1)
    value = torch.eye(8, dtype=torch.float64)[None, :, None].expand(1, 8, 2, 8).contiguous().requires_grad_()
    query = torch.zeros(1, 8, 2, 8, dtype=torch.float64)
    out = attend(query, query, value, causal=False)
    dropped = (out == 0).double()  # [1, Tq, H, Tk]
    assert 0 < dropped.mean() < 1
    (grad,) = torch.autograd.grad(out.sum(), value)
    kept = (1 - dropped).sum(1) / 8 * 2  # over the queries: 1 / Tk each, doubled
    torch.testing.assert_close(grad[0], kept[0].T[..., None].expand(8, 2, 8))


def test_5_a_new_query_sees_its_whole_cache() -> None:
    query, key, value = qkv(1, 16)
    out = fused()(query, key, value, causal=True)
    assert torch.equal(out, fused()(query, key, value, causal=False))
    assert not torch.allclose(out, value[:, :1])


def test_5_slices_of_larger_tensors_are_taken() -> None:
    query, key, value = (t[:, 3:9] for t in qkv(12))
    packed = torch.randn(1, 6, 3, 2, 16)
    assert torch.equal(fused()(query, key, value), fused()(*(t.contiguous() for t in (query, key, value))))
    assert torch.equal(fused()(*packed.unbind(2)), fused()(*(t.contiguous() for t in packed.unbind(2))))


def test_10_true_means_attend_in_every_class() -> None:
    tensors = qkv(8)
    mask = torch.tensor([[False] * 3 + [True] * 5])
    seen = [t[:, 3:] if index else t for index, t in enumerate(tensors)]
    expected = attention(*seen)
    options = {"attention_mask": mask, "causal": False}
    module = StreamAttention(StreamAttentionConfig(num_heads=2, head_dim=16))
    for attend in (fused(), FlashAttentionV3(), module):
        torch.testing.assert_close(attend(*tensors, **options), expected)
        torch.testing.assert_close(attend(*tensors, attention_mask=mask.int(), causal=False), expected)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_10_an_additive_mask_is_added_whatever_its_sign(sign: float) -> None:
    tensors = qkv(8)
    bias = sign * torch.rand(1, 8, 8, dtype=torch.float64)
    scores = torch.einsum("bqhd,bkhd->bhqk", *tensors[:2]) / 4 + bias[:, None]
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), tensors[2])
    torch.testing.assert_close(fused()(*tensors, attention_mask=bias, causal=False), expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_11_the_lse_is_returned_on_every_path(grad: bool, dropout_p: float) -> None:
    query, key, value = qkv(8, grad=grad, dtype=torch.float32)
    _, lse = fused()(query, key, value, causal=False, return_lse=True, dropout_p=dropout_p)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.9])
def test_11_the_scale_is_honoured_on_every_path(grad: bool, scale: float) -> None:
    tensors = qkv(8, grad=grad)
    scores = torch.einsum("bqhd,bkhd->bhqk", *tensors[:2]) * scale
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), tensors[2])
    torch.testing.assert_close(fused(scale=scale)(*tensors, causal=False), expected)


# 4.2 Invented figures


class SlowSoftmax(TorchDispatchMode):
    """Softmax takes five milliseconds longer. The streaming pass does not call it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._softmax:
            time.sleep(0.005)
        return func(*args, **(kwargs or {}))


def test_standard_attention_is_timed_by_itself() -> None:
    attend = StreamAttention(StreamAttentionConfig(num_heads=2, head_dim=8))
    with SlowSoftmax():
        figures = attend.benchmark_speedup([8])[8]
    assert figures["standard_time_ms"] >= 5
    assert figures["stream_time_ms"] < figures["standard_time_ms"]


def test_the_baseline_does_not_say_flash_attention_3_for_sdpa() -> None:
    figures = FlashAttentionV3(StreamAttentionConfig(num_heads=2, head_dim=8)).benchmark(8, warmup=0, iterations=1)
    assert "FlashAttention-3" in figures["kernel"] or figures["kernel"].startswith("SDPA ")
    if not torch.cuda.is_available():
        assert figures["kernel"] == "SDPA CPU"


def test_ours_and_the_baseline_count_the_same_flops_and_bytes() -> None:
    config = StreamAttentionConfig(num_heads=2, head_dim=8)
    ours, theirs = (
        one.benchmark(16, warmup=0, iterations=1) for one in (FusedOnlineAttention(2, 8), FlashAttentionV3(config))
    )
    for rate in ("tflops", "bandwidth_gb_s"):
        assert ours[rate] * ours["time_ms"] == pytest.approx(theirs[rate] * theirs["time_ms"])


# 4.3 What could not run at all


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("dim", [1, 20, 96])
def test_grouped_heads_and_any_head_dim(kv_heads: int, dim: int) -> None:
    tensors = qkv(9, heads=6, kv_heads=kv_heads, dim=dim)
    repeated = [t.repeat_interleave(6 // t.shape[2], 2) for t in tensors]
    torch.testing.assert_close(fused(6, dim)(*tensors), fused(6, dim)(*repeated))


# 4.5 The bar


BAR = [
    pytest.param(*case, id=f"causal={case[0]} lengths={case[1]} mask={case[2]} alibi={case[3]} kv_heads={case[4]}")
    for case in product((True, False), ((33, 33), (7, 33), (33, 7)), (False, True), (False, True), (2, 1))
]


@pytest.mark.parametrize(("causal", "lengths", "masked", "alibi", "kv_heads"), BAR)
def test_forward_and_backward_agree_with_the_reference_over_all_combinations(
    causal: bool, lengths: tuple[int, int], masked: bool, alibi: bool, kv_heads: int
) -> None:
    tensors = qkv(*lengths, kv_heads=kv_heads, grad=True)
    mask = torch.rand(1, *lengths, generator=torch.Generator().manual_seed(1)) < 0.5 if masked else None
    slopes = torch.tensor([0.5, 0.1], dtype=torch.float64) if alibi else None
    attend = fused()
    attend.set_deterministic(True, 5)
    out, lse = attend(*tensors, causal=causal, return_lse=True, attention_mask=mask, dropout_p=0.3, alibi_slopes=slopes)
    expected, expected_lse = attention(
        *tensors,
        causal=causal,
        mask=None if mask is None else mask[:, None],
        alibi_slopes=slopes,
        dropout_p=0.3,
        seed=5,
        return_lse=True,
        backend="reference",
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    weights = torch.randn_like(out)
    pairs = (torch.autograd.grad((o * weights).sum(), tensors) for o in (out, expected))
    for got, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_row_that_sees_nothing_is_0_with_an_lse_of_minus_infinity() -> None:
    tensors = qkv(4, grad=True)
    mask = torch.tensor([[[True] * 4, [False] * 4, [True] * 4, [True] * 4]])
    out, lse = fused()(*tensors, causal=False, attention_mask=mask, return_lse=True)
    assert not out[:, 1].any() and (lse[..., 1] == -torch.inf).all() and lse[..., 0].isfinite().all()
    baseline = FlashAttentionV3()(*tensors, causal=False, attention_mask=mask)
    assert not baseline[:, 1].any()
    for one in (out, baseline):
        grads = torch.autograd.grad(one.sum(), tensors)
        assert all(grad.isfinite().all() for grad in grads) and not grads[0][:, 1].any()


def test_deterministic_gradients_are_bit_equal() -> None:
    tensors = qkv(33, grad=True, dtype=torch.float32)
    attend, runs = fused(dropout=0.3), []
    for _ in range(2):
        attend.set_deterministic(True, 5)
        runs.append(torch.autograd.grad(attend(*tensors).square().sum(), tensors))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_modules_and_benchmark_count_the_same_flops() -> None:
    """4.2: the columns of one table counted 2 and 4 S^2 H D."""
    figures = fused(heads=4).benchmark(64, batch_size=2, warmup=0, iterations=1)
    case = Case(B=2, Tq=64, Tk=64, Hq=4, Hkv=4, D=16, Dv=16, causal=True)
    assert figures["tflops"] * figures["time_ms"] * 1e9 == pytest.approx(flops(case))
