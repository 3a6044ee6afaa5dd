"""attention_mass: what a key received, from the LSE, against the reference's weights summed."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import attention, attention_mass, force_backend
from stream_attention.backends.eager import blocked as eager
from stream_attention.backends.eager.tuning import EagerConfig
from stream_attention.backends.reference import attention as reference
from stream_attention.base.problem import CallOptions, Inputs
from stream_attention.dispatch.prepare import problem_of
from stream_attention.ops.attention import op_arguments
from stream_attention_tools.testing import Case, make, peak_bytes, poisoned_memory

NAN = math.nan


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Semantics


def test_a_key_receives_what_each_query_that_sees_it_has_to_give() -> None:
    """With scale 0 a query of a causal row gives each key before it the same."""
    query, key = drawn(1, 4, 1, 8), drawn(1, 4, 1, 8, seed=1)
    mass = attention_mass(query, key, causal=True, scale=0.0)
    expected = torch.tensor([1 + 1 / 2 + 1 / 3 + 1 / 4, 1 / 2 + 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 4])
    torch.testing.assert_close(mass[0, 0], expected)
    exact = reference.attention_mass(query, key, causal=True, scale=0.0)
    torch.testing.assert_close(exact[0, 0], expected.double(), rtol=1e-6, atol=0)


def test_every_row_that_sees_something_gives_one_and_any_other_nothing() -> None:
    query, key = drawn(2, 9, 4, 8), drawn(2, 5, 2, 8, seed=1)
    mass = attention_mass(query, key, causal=True)  # the first four rows see nothing
    torch.testing.assert_close(mass.sum(-1), torch.full((2, 2), 5.0 * 2))
    hidden = torch.zeros(2, 1, 9, 5, dtype=torch.bool)
    assert torch.equal(attention_mass(query, key, mask=hidden), torch.zeros(2, 2, 5))


def test_the_sink_takes_its_part() -> None:
    query, key = drawn(1, 3, 1, 8), drawn(1, 3, 1, 8, seed=1)
    mass = attention_mass(query, key, scale=0.0, sink=torch.zeros(1))
    torch.testing.assert_close(mass, torch.full((1, 1, 3), 3 * 0.25))
    blind = attention_mass(query, key, sink=torch.zeros(1), mask=torch.zeros(3, 3, dtype=torch.bool))
    assert torch.equal(blind, torch.zeros(1, 1, 3))


def test_padding_receives_nothing_and_may_hold_anything() -> None:
    query, key = drawn(2, 6, 4, 8), drawn(2, 7, 2, 8, seed=1)
    real = torch.arange(7) < torch.tensor([[7], [4]])
    alone = attention_mass(query[1:], key[1:, :4])
    key[1, 4:] = NAN
    mass = attention_mass(query, key, mask=real[:, None, None, :])
    assert torch.equal(mass[1, :, 4:], torch.zeros(2, 3))
    torch.testing.assert_close(mass[1:, :, :4], alone)


def test_only_the_last_queries_vote_where_that_is_asked() -> None:
    query, key, bias = drawn(2, 12, 4, 8), drawn(2, 20, 2, 8, seed=1), drawn(2, 1, 12, 20, seed=2)
    _, lse = attention(query, key, key, causal=True, bias=bias, return_lse=True)
    last = attention_mass(query[:, -3:], key, causal=True, bias=bias[:, :, -3:])
    for its_lse in (None, lse):
        mass = attention_mass(query, key, its_lse, causal=True, bias=bias, window_queries=3)
        torch.testing.assert_close(mass, last)
    everyone = attention_mass(query, key, lse, causal=True, bias=bias)
    assert torch.equal(attention_mass(query, key, lse, causal=True, bias=bias, window_queries=99), everyone)


def test_a_row_counts_what_its_weight_says_and_one_of_weight_0_may_hold_anything() -> None:
    query, key = drawn(2, 6, 4, 8), drawn(2, 7, 2, 8, seed=1)
    weights = torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]])
    exact = reference.attention_mass(query, key, row_weights=weights[:, None].expand(2, 4, 6))
    query.masked_fill_(weights[..., None, None] == 0, NAN)
    mass = attention_mass(query, key, row_weights=weights)
    torch.testing.assert_close(mass.double(), exact, atol=1e-6, rtol=1e-5)
    per_head = torch.stack([weights, weights, 0 * weights, 3 * weights], 1)
    by_head = attention_mass(query, key, row_weights=per_head)
    torch.testing.assert_close(by_head.sum(-1), per_head.sum(-1).view(2, 2, 2).sum(2))


def test_a_nan_in_a_bias_reaches_the_keys_that_its_row_sees_and_no_other() -> None:
    query, key, bias = drawn(2, 6, 4, 8), drawn(2, 6, 2, 8, seed=1), drawn(2, 1, 6, 6, seed=2)
    bias[0, 0, 1, 4] = NAN  # hidden
    bias[1, 0, 3, 1] = NAN
    without = torch.ones(2, 4, 6)
    without[1, :, 3] = 0.0
    rest = attention_mass(query, key, causal=True, bias=bias, row_weights=without)
    exact = reference.attention_mass(query, key, causal=True, bias=bias.nan_to_num(), row_weights=without)
    torch.testing.assert_close(rest.double(), exact, atol=1e-6, rtol=1e-5)
    rest[1, :, :4] = NAN
    mass = attention_mass(query, key, causal=True, bias=bias)
    torch.testing.assert_close(mass, rest, equal_nan=True)


def test_query_heads_that_share_a_key_are_summed_or_not() -> None:
    query, key = drawn(2, 5, 6, 8), drawn(2, 9, 2, 8, seed=1)
    each = attention_mass(query, key, causal=True, per_query_head=True)
    assert each.shape == (2, 6, 9)
    torch.testing.assert_close(each.view(2, 2, 3, 9).sum(2), attention_mass(query, key, causal=True))


def test_no_queries_no_keys_no_batch() -> None:
    assert torch.equal(attention_mass(drawn(1, 0, 2, 4), drawn(1, 3, 1, 4)), torch.zeros(1, 1, 3))
    assert attention_mass(drawn(1, 3, 2, 4), drawn(1, 0, 1, 4)).shape == (1, 1, 0)
    assert attention_mass(drawn(0, 3, 2, 4), drawn(0, 5, 1, 4)).shape == (0, 1, 5)


def test_no_heads_and_no_dims() -> None:
    assert attention_mass(drawn(1, 3, 0, 4), drawn(1, 5, 0, 4)).shape == (1, 0, 5)
    assert torch.equal(attention_mass(drawn(1, 3, 0, 4), drawn(1, 5, 2, 4)), torch.zeros(1, 2, 5))
    torch.testing.assert_close(attention_mass(drawn(1, 3, 4, 0), drawn(1, 5, 2, 0)), torch.full((1, 2, 5), 6 / 5))


def test_no_gradient_flows_and_autocast_rounds_the_inputs_alone() -> None:
    query, key = drawn(1, 8, 2, 16).requires_grad_(), drawn(1, 8, 2, 16, seed=1)
    assert not attention_mass(query, key).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        mass = attention_mass(query, key)
    assert mass.dtype is torch.float32
    rounded = attention_mass(query.bfloat16(), key.bfloat16())
    torch.testing.assert_close(mass, rounded, rtol=0, atol=0)


# Agreement with the reference

CASES = {
    "plain": Case(B=2, Tq=33, Tk=65),
    "causal, more keys": Case(B=2, Tq=40, Tk=300, Hq=4, causal=True),
    "causal, more queries": Case(Tq=70, Tk=30, causal=True),
    "several tiles": Case(Tq=600, Tk=1100, Hq=2, Hkv=1, causal=True),
    "window": Case(Tq=90, Tk=90, window=(7, 3)),
    "mask per row": Case(B=2, Tq=20, Tk=31, Hq=4, mask=(2, 1, 20, 31)),
    "mask per head": Case(B=2, Tq=20, Tk=31, Hq=4, mask=(4, 1, 31)),
    "bias that hides": Case(B=2, Tq=20, Tk=31, bias=(2, 1, 20, 31), bias_hides=True),
    "alibi": Case(B=2, Tq=20, Tk=50, Hq=4, alibi="BH", causal=True),
    "sink and softcap": Case(B=2, Tq=20, Tk=50, Hq=4, sink=True, softcap=2.0, scale=1.0),
    "everything": Case(
        B=2, Tq=50, Tk=70, Hq=4, causal=True, window=(30, 0), mask=(2, 4, 50, 70), bias=(1, 4, 1, 70), alibi="H",
        sink=True, softcap=5.0, layout="strided",
    ),
    "fp64": Case(B=2, Tq=20, Tk=50, dtype=torch.float64, causal=True),
    "bf16": Case(B=2, Tq=50, Tk=70, Hq=4, dtype=torch.bfloat16, causal=True),
    "fp16, heads first": Case(B=2, Tq=50, Tk=70, Hq=4, dtype=torch.float16, layout="heads_first", sink=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("given", ["lse", "no lse"])
def test_it_is_the_weights_of_the_reference_summed(name: str, given: str) -> None:
    """Within twice the error of the dense sum in fp32, and what the rounding of the LSE does to a weight."""
    case = CASES[name]
    query, key, value, options = make(case)
    for unused in ("dropout_p", "deterministic"):
        options.pop(unused)
    _, lse = attention(query, key, value, return_lse=True, **options)
    weights = torch.rand(case.B, case.Hq, case.Tq, generator=torch.Generator().manual_seed(5))
    wide = {n: x.double() if isinstance(x, Tensor) and x.dtype is not torch.bool else x for n, x in options.items()}
    work = torch.promote_types(case.dtype, torch.float32)
    for per_head in (False, True):
        for rows in (None, weights):
            said: dict[str, Any] = {"row_weights": rows, "per_query_head": per_head}
            exact = reference.attention_mass(query.double(), key.double(), **wide, **said)
            dense = reference.attention_mass(query.to(work), key.to(work), compute_dtype=work, **options, **said)
            with poisoned_memory():
                mass = attention_mass(query, key, lse if given == "lse" else None, **options, **said)
            assert mass.dtype is work and mass.shape == exact.shape
            noise = torch.finfo(work).eps * (1 + float(lse[lse > -torch.inf].abs().max())) * float(exact.max())
            error = float((mass.double() - exact).abs().max())
            assert error <= 2 * float((dense.double() - exact).abs().max()) + noise


def test_tiles_of_any_size_give_the_same() -> None:
    case = Case(B=3, Tq=37, Tk=53, Hq=4, causal=True, mask=(3, 1, 1, 53), sink=True)
    query, key, _, options = make(case)
    options.pop("dropout_p")
    options.pop("deterministic")
    exact = reference.attention_mass(query, key, **options).float()
    inputs = Inputs(query, key, key, options["mask"], None, None, options["sink"])
    problem, inputs, _ = problem_of(op_arguments(inputs, CallOptions(causal=True, deterministic=False)))
    _, lse = attention(query, key, key, return_lse=True, **options)
    for blocks in ((1, 5, 7), (2, 64, 3), (3, 1, 64)):
        mass = eager.key_mass(problem, inputs, EagerConfig("blocked", *blocks), lse, None, False)
        torch.testing.assert_close(mass, exact)


def test_the_forced_backend_computes_the_lse() -> None:
    query, key = drawn(1, 8, 2, 16), drawn(1, 8, 2, 16, seed=1)
    with force_backend("reference"):
        torch.testing.assert_close(attention_mass(query, key), attention_mass(query, key))


# Memory and time


def test_memory_grows_with_the_length() -> None:
    peaks = []
    for length in (512, 4096, 8192):  # the first one warms up
        query, key = drawn(1, length, 1, 16), drawn(1, length, 1, 16, seed=1)
        peaks.append(peak_bytes(lambda: attention_mass(query, key, causal=True)))  # noqa: B023
    assert peaks[2] < 2.6 * peaks[1] and peaks[2] < 8192**2 / 8, peaks


def test_a_window_costs_the_masses_and_what_it_sees() -> None:
    length = 1 << 20
    query, key = drawn(1, 1, 1, 64), drawn(1, 1, 1, 64, seed=1).expand(-1, length, -1, -1)
    mass: list[Tensor] = []
    peak = peak_bytes(lambda: mass.append(attention_mass(query, key, window=(3, 0))))
    assert peak < 1.1 * mass[0].numel() * 4, f"{peak} bytes, {mass[0].numel() * 4} of them the masses"
    torch.testing.assert_close(mass[0][..., -4:], torch.full((1, 1, 4), 0.25))
    assert not mass[0][..., :-4].any()


def test_it_costs_no_more_than_an_attention_of_the_same_pass() -> None:
    """The pass leaves out P V of the blocked forward, and the running maximum."""
    query, key = drawn(1, 1024, 4, 64), drawn(1, 1024, 4, 64, seed=1)
    slopes = torch.zeros(4)  # the blocked pass, with or without them
    _, lse = attention(query, key, key, causal=True, alibi_slopes=slopes, return_lse=True)
    best = [math.inf, math.inf]
    for _ in range(7):
        for index, run in enumerate(
            (
                lambda: attention(query, key, key, causal=True, alibi_slopes=slopes),
                lambda: attention_mass(query, key, lse, causal=True, alibi_slopes=slopes),
            )
        ):
            began = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - began)
    assert best[1] < best[0], best


# Refusals


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"lse": torch.zeros(1, 4, 2)}, ValueError, r"lse: expected shape \[1, 2, 4\]; got \[1, 4, 2\]"),
        ({"lse": torch.zeros(1, 2, 4).int()}, TypeError, "lse: expected a floating dtype .*; got torch.int32"),
        ({"lse": 3.0}, TypeError, "lse: expected a torch.Tensor; got float"),
        ({"lse": torch.zeros(1, 2, 4, device="meta")}, ValueError, "lse: expected the query's device cpu; got meta"),
        ({"row_weights": torch.zeros(4)}, ValueError, r"row_weights: expected shape \[1, 4\] or \[1, 2, 4\]"),
        ({"window_queries": 0}, ValueError, "window_queries: expected at least 1; got 0"),
        ({"window_queries": 1.5}, TypeError, "window_queries: expected an int or None; got 1.5"),
        ({"per_query_head": 1}, TypeError, "per_query_head: expected a bool; got 1"),
        ({"key": torch.zeros(2, 4, 2, 8)}, ValueError, "expected the query's batch size B=1"),
        ({"key": torch.zeros(1, 4, 3, 8)}, ValueError, "query: expected a multiple of the 3 KV heads"),
        ({"mask": torch.zeros(4, 4)}, TypeError, "mask: expected dtype torch.bool"),
        ({"causal": 1}, TypeError, "causal: expected a bool"),
        ({"window": (1, -2)}, ValueError, "window: expected sides of at least -1"),
        ({"softcap": -1.0}, ValueError, "softcap: expected 0"),
        ({"scale": NAN}, ValueError, "scale: expected a finite number"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    call: dict[str, Any] = {"query": torch.zeros(1, 4, 2, 8), "key": torch.zeros(1, 4, 2, 8)} | change
    with pytest.raises(error, match=words):
        attention_mass(**call)
