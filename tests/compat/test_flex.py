"""torch's flex_attention by ours, against torch's own forward, and gradients against attention written out."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from stream_attention.compat import flex, install
from stream_attention.compat.flex import AuxRequest, and_masks, create_block_mask, flex_attention, or_masks

B, HQ, HKV, TQ, TK, D = 2, 4, 2, 150, 200, 16
IDS = torch.arange(TK) // 60
theirs = torch_flex.flex_attention


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + TK - TQ >= kv_idx


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return IDS[q_idx] == IDS[kv_idx]


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= 10 * (h + 1)


def softcapped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 5 * torch.tanh(score / 5) + (kv_idx - q_idx) * 2.0 ** (-h - 1)


def inputs(kv_batch: int = B) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, HQ, TQ, D), (kv_batch, HKV, TK, D), (kv_batch, HKV, TK, D)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def made(mask_mod: Any, heads: int | None = None) -> Any:
    return create_block_mask(mask_mod, None, heads, TQ, TK, device="cpu")


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a scale": {"scale": 0.3},
    "a score function": {"score_mod": softcapped},
    "causal": {"block_mask": made(causal)},
    "documents, causal": {"block_mask": made(and_masks(causal, documents))},
    "one or the other, and a score function": {
        "block_mask": made(or_masks(causal, documents)),
        "score_mod": softcapped,
    },
    "a mask of each head": {"block_mask": made(by_head, HQ)},
    "options of its kernels": {"kernel_options": {"BLOCK_M": 64}},
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_torch(name: str) -> None:
    options = CASES[name]
    given = inputs()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs(*given, **options, enable_gqa=True, return_lse=True)
    found = flex_attention(*given, **options, enable_gqa=True, return_lse=True)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype is other.dtype
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    assert torch.equal(flex_attention(*given, **options, enable_gqa=True), found[0])


def test_gradients_are_those_of_attention_written_out() -> None:
    slopes = torch.rand(HQ, requires_grad=True)
    leaves = [t.requires_grad_() for t in inputs()]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    out = flex_attention(*leaves, score_mod, made(causal), enable_gqa=True)
    query, key, value = (t.double() for t in leaves)
    key, value = (t.repeat_interleave(HQ // HKV, 1) for t in (key, value))
    distance = (torch.arange(TQ)[:, None] - torch.arange(TK)).abs()
    scores = query @ key.mT * D**-0.5 - slopes.double()[:, None, None] * distance
    visible = torch.arange(TQ)[:, None] + TK - TQ >= torch.arange(TK)
    wanted = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), [*leaves, slopes])
    exact = torch.autograd.grad((wanted * weights).sum(), [*leaves, slopes])
    for one, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


def test_one_batch_entry_of_keys_serves_all_queries() -> None:
    query, key, value = inputs(kv_batch=1)
    expected = flex_attention(query, key.expand(B, -1, -1, -1), value.expand(B, -1, -1, -1), enable_gqa=True)
    assert torch.equal(flex_attention(query, key, value, enable_gqa=True), expected)


def test_the_lse_comes_as_an_aux_output() -> None:
    out, aux = flex_attention(*inputs(), enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux.lse.shape == (B, HQ, TQ) and aux.max_scores is None
    assert torch.equal(out, flex_attention(*inputs(), enable_gqa=True))


def test_a_block_mask_is_evaluated_once_and_not_kept() -> None:
    calls = []

    def counted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        calls.append(1)
        return q_idx >= kv_idx

    flex._masks.clear()
    mask = create_block_mask(counted, None, None, TQ, TK, device="cpu")
    flex_attention(*inputs(), block_mask=mask, enable_gqa=True)
    before = len(calls)
    flex_attention(*inputs(), block_mask=mask, enable_gqa=True)
    assert len(calls) == before
    del mask
    gc.collect()
    assert not flex._masks


def test_flex_is_replaced_and_restored() -> None:
    with install("flex") as installed, install("flex") as again:
        assert installed.active and not again.active
        assert torch_flex.flex_attention is flex_attention
    assert torch_flex.flex_attention is theirs


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "fewer heads without saying so": ({"enable_gqa": False}, ValueError, "as many heads as the query, 4; got 2"),
    "the largest score": ({"return_aux": AuxRequest(max_scores=True)}, NotImplementedError, "max_scores"),
    "both ways of the LSE": ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, ValueError, "return_lse"),
    "a mask of other lengths": (
        {"block_mask": create_block_mask(causal, None, None, TQ, TK + 1, device="cpu")}, ValueError, "Tk=200"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name: str) -> None:
    options, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        flex_attention(*inputs(), **{"enable_gqa": True, **options})
