"""attention(score_mod=...): functions of scores and indices, against the specification in fp64 and FlexAttention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from stream_attention import UnsupportedProblem, attention, explain, masks
from stream_attention_tools.testing import peak_bytes
from stream_attention_tools.testing.tolerance import FORWARD_FACTOR, GRADIENT_FACTOR

B, TQ, TK, HQ, HKV, D = 2, 40, 55, 4, 2, 16
Mod = Callable[[Any, Any, Any, Any, Any], Any]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


RELATIVE = normal(HQ, TQ + TK).requires_grad_()
BUCKETS = (torch.arange(-TQ, TK).abs() + 1).log2().int()
BY_BUCKET = normal(HQ, 8, seed=1).requires_grad_()
ROWS = normal(TK, seed=2).requires_grad_()
GATE, LEARNED = torch.nn.Parameter(normal(HQ, seed=3)), torch.nn.Parameter(torch.tensor(0.3))
IDS = torch.arange(TK) // 20
HALF = normal(TK + 8, seed=4).bfloat16()[::2].requires_grad_()

MODS: dict[str, tuple[Mod, list[Tensor]]] = {
    "nothing": (lambda s, b, h, q, k: s, []),
    "33 ALiBi with sign, by query head": (lambda s, b, h, q, k: s + (k - q) * 2.0 ** (-8.0 * (h + 1) / HQ), []),
    "34 buckets, and a table used twice": (
        lambda s, b, h, q, k: s + BY_BUCKET[h, BUCKETS[k - q + TQ]] + ROWS[q] + ROWS[k], [BY_BUCKET, ROWS]
    ),
    "35 softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), []),
    "37 causal by -inf": (lambda s, b, h, q, k: torch.where(k <= q, s, -float("inf")), []),
    "37 a row of nothing but -inf": (lambda s, b, h, q, k: torch.where(q == 3, -float("inf"), s), []),
    "38 log of gelu": (lambda s, b, h, q, k: torch.log(torch.nn.functional.gelu(s) + 1), []),
    "39 a factor that is learned": (lambda s, b, h, q, k: s * torch.exp(LEARNED), [LEARNED]),
    "39 square and absolute value": (lambda s, b, h, q, k: s**2 + s.abs(), []),
    "39 no score at all": (lambda s, b, h, q, k: RELATIVE[h, q - k + TK], [RELATIVE]),
    "a relative table and a gate": (lambda s, b, h, q, k: s * GATE[h] + RELATIVE[h, q - k + TK], [GATE, RELATIVE]),
    "ids of documents": (lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s, -float("inf")), []),
    "a table in bf16 with gaps": (lambda s, b, h, q, k: s + HALF[k % 31], [HALF]),
}  # fmt: skip


def results(mod: Mod, tables: list[Tensor], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    shapes = (B, TQ, HQ, D), (B, TK, HKV, D), (B, TK, HKV, D)
    inputs = [normal(*shape, seed=n).to(dtype).requires_grad_() for n, shape in enumerate(shapes)]
    out, lse = attention(*inputs, score_mod=mod, return_lse=True, **options)
    total = (out * normal(*out.shape, seed=8)).sum() + (lse.clamp(min=-1e4) * normal(*lse.shape, seed=9)).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, [*inputs, *tables], materialize_grads=True)]


OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal, softcap, dropout": {"causal": True, "softcap": 3.0, "dropout_p": 0.2, "seed": 3},
    "mask, ALiBi, sink, window": {
        "mask": masks.documents(torch.arange(TQ) // 15, torch.arange(TK) // 15),
        "alibi_slopes": normal(HQ).abs(),
        "sink": normal(HQ),
        "window": (30, 5),
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODS)
def test_outputs_and_gradients_are_those_of_the_specification(name: str, options: str) -> None:
    (mod, tables), given = MODS[name], OPTIONS[options]
    ours = results(mod, tables, torch.float32, **given)
    exact = results(mod, tables, torch.float64, **given, backend="reference")
    eager = results(mod, tables, torch.float32, **given, backend="reference")
    for place, (one, spec, narrow) in enumerate(zip(ours, exact, eager, strict=True)):
        assert torch.equal(one.isinf(), spec.isinf()) and not one.isnan().any()
        finite = ~spec.isinf()
        one, spec, narrow = one.double()[finite], spec.double()[finite], narrow.double()[finite]
        factor = FORWARD_FACTOR if place < 2 else GRADIENT_FACTOR
        eps = torch.finfo(ours[place].dtype).eps
        allowed = factor * (narrow - spec).abs().max() + 32 * eps * spec.abs().max()
        assert (one - spec).abs().max() <= allowed, f"result {place}"


@pytest.mark.parametrize("name", MODS)
def test_a_function_means_what_it_means_to_flex_attention(name: str) -> None:
    mod, _ = MODS[name]
    inputs = [normal(B, T, H, D, seed=n) for n, (T, H) in enumerate([(TQ, HQ), (TK, HKV), (TK, HKV)])]
    heads_first = [t.transpose(1, 2) for t in inputs]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = flex_attention(*heads_first, score_mod=mod, enable_gqa=True)
        torch.testing.assert_close(attention(*inputs, score_mod=mod), theirs.transpose(1, 2), atol=2e-5, rtol=2e-5)


def test_hidden_scores_are_not_the_functions_business() -> None:
    """36: a division by zero, and a table that ends, where a mask hides; tables get finite gradients."""
    table = torch.rand(TK - 5, requires_grad=True)

    def divided(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * table[k] / (q + TK - TQ - k)

    strictly = masks.Mask(right=-1) & masks.padding([TK - 5] * B)
    found = results(divided, [table], torch.float32, mask=strictly)
    exact = results(divided, [table], torch.float64, mask=strictly, backend="reference")
    for one, spec in zip(found, exact, strict=True):
        assert torch.equal(one.isfinite(), spec.isfinite()) and not one.isnan().any()
        torch.testing.assert_close(one[one.isfinite()].double(), spec[spec.isfinite()].double(), atol=1e-3, rtol=1e-3)


def test_what_the_function_masks_may_be_nan() -> None:
    query, key, value = normal(1, 30, 2, 16), normal(1, 30, 2, 16, seed=1), normal(1, 30, 2, 16, seed=2)
    spoilt = [t.clone() for t in (key, value)]
    for t in spoilt:
        t[:, 10:20] = torch.nan

    def without(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where((k >= 10) & (k < 20), -float("inf"), s)

    clean = attention(query, key, value, score_mod=without)
    assert torch.equal(attention(query, key, spoilt[1], score_mod=without), clean)


def test_builtins_are_functions_too() -> None:
    inputs = [normal(1, 300, 2, 16, seed=n) for n in range(3)]
    capped = attention(*inputs, score_mod=lambda s, b, h, q, k: 2 * torch.tanh(s / 2), causal=True)
    torch.testing.assert_close(capped, attention(*inputs, softcap=2.0, causal=True), atol=2e-6, rtol=2e-6)


def test_a_new_length_prepares_nothing_and_memory_is_that_of_tiles() -> None:
    inputs = [normal(1, 4096, 2, 16, seed=n).requires_grad_() for n in range(3)]

    def step() -> None:
        attention(*inputs, score_mod=MODS["35 softcap"][0]).sum().backward()

    assert peak_bytes(step) < 48 << 20, "scores of 4k x 4k of two heads are 128 MB"


def test_a_compiled_graph_breaks_and_computes_the_same() -> None:
    inputs = [normal(1, 20, 2, 16, seed=n) for n in range(3)]
    mod = MODS["35 softcap"][0]
    compiled = torch.compile(lambda *its: attention(*its, score_mod=mod) + 1, backend="eager")
    torch.testing.assert_close(compiled(*inputs), attention(*inputs, score_mod=mod) + 1)


def test_bf16_and_a_row_of_lse() -> None:
    inputs = [normal(1, 64, 2, 16, seed=n).bfloat16() for n in range(3)]
    out, lse = attention(*inputs, score_mod=MODS["35 softcap"][0], return_lse=True)
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32


def test_explain_says_which_function(capsys: pytest.CaptureFixture[str]) -> None:
    def relative(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + (q - k)

    plan = explain(*torch.randn(3, 1, 8, 2, 64), score_mod=relative)
    said = capsys.readouterr().out
    assert plan.backend == "eager" and "score_mod=relative" in said and "does not support score functions" in said


def branches(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s if q > k else -s


def draws(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + torch.rand(())


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a branch": (branches, {}, ValueError, "branches: expected torch operations on its arguments; got a branch"),
    "random numbers": (draws, {}, ValueError, "draws: expected a function of its arguments; got one that draws"),
    "a number": (lambda *_: 1.0, {}, TypeError, "expected a tensor returned; got float"),
    "a bool": (lambda s, b, h, q, k: q > k, {}, TypeError, "floating dtype; got torch.bool. A mask_mod is a mask"),
    "a row": (lambda s, b, h, q, k: s + torch.ones(3), {}, ValueError, "expected a tensor of no dimension returned"),
    "four arguments": (lambda b, h, q, k: q > k, {}, TypeError, r"expected a function \(score, b, h, q_idx, kv_idx\)"),
    "no function": (3, {}, TypeError, "score_mod: expected a function"),
    "in fp8": (lambda s, *_: s, {"precision": "fp8"}, ValueError, "precision: expected None with a score_mod"),
    "another device": (
        lambda s, b, h, q, k: s + torch.ones(8, device="meta", requires_grad=True)[q], {}, RuntimeError, "meta"
    ),
    "a backend that has none": (lambda s, *_: s, {"backend": "triton"}, UnsupportedProblem, "score functions"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_functions_are_refused_in_words(name: str) -> None:
    mod, options, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        attention(*torch.randn(3, 1, 8, 2, 16), score_mod=mod, **options)
