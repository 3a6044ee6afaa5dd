"""The algebra of states, on states made of random numbers: no attention is computed here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from stream_attention.backends.reference import attention as reference
from stream_attention.base.state import EMPTY, add_sink, logsumexp, merge, per_row

State = tuple[Tensor, Tensor]
NAN = math.nan

seeds = st.integers(0, 2**31)


def state(seed: int, *, empty: float = 0.0, batch: int = 2, rows: int = 3, heads: int = 2, value_dim: int = 4) -> State:
    """A random fp64 state; each row is empty with probability `empty`."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(batch, rows, heads, value_dim, generator=generator, dtype=torch.float64)
    lse = 5.0 * torch.randn(batch, heads, rows, generator=generator, dtype=torch.float64)
    lse[torch.rand(lse.shape, generator=generator) < empty] = EMPTY
    return out.masked_fill(per_row(lse == EMPTY), 0.0), lse


def fold(*states: State) -> State:
    outs, lses = zip(*states, strict=True)
    return merge(outs, lses)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=False)


def of_one_row(value: float, lse: float) -> State:
    return torch.full((1, 1, 1, 1), value, dtype=torch.float64), torch.full((1, 1, 1), lse, dtype=torch.float64)


# Semantics


def test_states_of_equal_weight_average() -> None:
    out, lse = fold(of_one_row(2.0, 1.0), of_one_row(6.0, 1.0))
    assert_same((out.item(), lse.item()), (4.0, 1.0 + math.log(2)))


def test_states_weigh_as_their_sums() -> None:
    out, lse = fold(of_one_row(0.0, 0.0), of_one_row(1.0, math.log(3)))
    assert_same((out.item(), lse.item()), (0.75, math.log(4)))


def test_one_state_is_itself() -> None:
    assert_same(fold(state(0, empty=0.3)), state(0, empty=0.3))


def test_the_empty_state_changes_nothing_and_its_out_is_not_looked_at() -> None:
    out, lse = state(0)
    for rubbish in (0.0, NAN, math.inf):
        nothing = torch.full_like(out, rubbish), torch.full_like(lse, EMPTY)
        assert_same(fold((out, lse), nothing), (out, lse))
        assert_same(fold(nothing, (out, lse)), (out, lse))


def test_empty_everywhere_is_empty() -> None:
    out, lse = fold(state(0, empty=1.0), state(1, empty=1.0))
    assert (out == 0).all() and (lse == EMPTY).all()


def test_large_scores_do_not_overflow() -> None:
    out, lse = fold(of_one_row(2.0, 1e4), of_one_row(6.0, 1e4))
    assert_same((out.item(), lse.item()), (4.0, 1e4 + math.log(2)))


def test_nan_is_not_hidden() -> None:
    out, lse = fold(of_one_row(1.0, NAN), of_one_row(1.0, 0.0))
    assert out.isnan().all() and lse.isnan().all()


def test_per_row_lays_an_lse_along_an_output() -> None:
    lse = torch.arange(6.0).view(1, 2, 3)  # [B, H, T]
    assert per_row(lse).shape == (1, 3, 2, 1)
    assert per_row(lse)[0, 2, 1, 0] == lse[0, 1, 2]
    assert per_row(lse[0])[2, 1, 0] == lse[0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_outs_are_summed_in_the_dtype_of_the_lse(dtype: torch.dtype) -> None:
    states = [state(seed) for seed in range(8)]
    narrow = [(out.to(dtype), lse.float()) for out, lse in states]
    out, lse = fold(*narrow)
    exact, exact_lse = fold(*((out.double(), lse.double()) for out, lse in narrow))
    assert out.dtype is dtype and lse.dtype is torch.float32
    # One rounding, that of the result; a sum in `dtype` would round eight times.
    assert ((out.double() - exact).abs() <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-7).all()
    torch.testing.assert_close(lse, exact_lse.float())


# Agreement with the reference


@given(count=st.integers(1, 5), seed=seeds, empty=st.sampled_from([0.0, 0.4, 1.0]), packed=st.booleans())
@settings(max_examples=60, deadline=None)
def test_merge_is_the_reference(count: int, seed: int, empty: float, packed: bool) -> None:
    outs, lses = zip(*(state(seed + n, empty=empty) for n in range(count)), strict=True)
    if packed:
        outs, lses = [out[0] for out in outs], [lse[0] for lse in lses]
    assert_same(merge(outs, lses), reference.merge_states(outs, lses))


@pytest.mark.parametrize("empty", [0.0, 0.5, 1.0], ids=["every row sees", "some rows see", "no row sees"])
def test_a_sink_is_the_reference(empty: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 5, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    sees = (torch.rand(2, 1, 5, 1, generator=generator) >= empty).expand(2, 2, 5, 5)
    sink = torch.tensor([0.7, EMPTY], dtype=torch.float64)
    without = reference.attention(query, key, value, mask=sees)
    assert_same(add_sink(*without, sink), reference.attention(query, key, value, mask=sees, sink=sink))


def test_a_sink_is_a_state_with_no_value() -> None:
    out, lse = state(0, empty=0.3)
    sink = torch.tensor([0.5, -1.5], dtype=torch.float64)
    as_state = torch.zeros_like(out), sink.view(1, -1, 1).expand_as(lse)
    assert_same(add_sink(out, lse, sink), fold((out, lse), as_state))


# Gradients


def test_gradients_of_merge() -> None:
    leaves = [t.requires_grad_() for n in range(3) for t in state(n)]
    assert gradcheck(lambda *ts: merge(ts[::2], ts[1::2]), leaves)


def test_gradients_of_add_sink() -> None:
    out, lse = state(0)
    sink = torch.tensor([0.5, -1.5], dtype=torch.float64)
    assert gradcheck(add_sink, [t.requires_grad_() for t in (out, lse, sink)])


@pytest.mark.parametrize("empty", [0.4, 1.0])
@pytest.mark.parametrize("rubbish", [0.0, NAN], ids=["zeros", "nan"])
def test_gradients_beside_empty_states_are_those_of_the_reference(empty: float, rubbish: float) -> None:
    states = [state(n, empty=empty) for n in range(3)]
    outs = [out.masked_fill(per_row(lse == EMPTY), rubbish).requires_grad_() for out, lse in states]
    lses = [lse.requires_grad_() for _, lse in states]
    weight = torch.randn(2, 3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    grads = []
    for compute in (merge, reference.merge_states):
        out, lse = compute(outs, lses)
        loss = (out * weight).sum() + lse.masked_fill(lse == EMPTY, 0.0).square().sum()
        grads.append(torch.autograd.grad(loss, outs + lses))
    assert_same(*grads)


def test_the_gradient_of_an_empty_row_with_a_sink_of_minus_infinity_is_zero() -> None:
    out, lse = (t.requires_grad_() for t in state(0, empty=1.0))
    sink = torch.full((2,), EMPTY, dtype=torch.float64, requires_grad=True)
    with_sink, total = add_sink(out, lse, sink)
    grads = torch.autograd.grad(with_sink.sum() + torch.exp(total).sum(), (out, lse, sink))
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("row", [[1.0, 2.0], [1.0, EMPTY], [EMPTY, EMPTY]], ids=["full", "half", "empty"])
def test_logsumexp_has_softmax_as_gradient_and_zero_where_there_is_nothing(row: list[float]) -> None:
    x = torch.tensor(row, dtype=torch.float64, requires_grad=True)
    total = logsumexp(x, dim=0)
    assert_same(total, torch.logsumexp(x.detach(), dim=0))
    (grad,) = torch.autograd.grad(total, x)
    assert_same(grad, torch.nan_to_num(torch.softmax(x.detach(), dim=0)))


# Properties


@given(seed=seeds, empty=st.sampled_from([0.0, 0.3, 0.7]))
@settings(max_examples=40, deadline=None)
def test_merge_is_associative_and_commutative(seed: int, empty: float) -> None:
    a, b, c = (state(seed + n, empty=empty) for n in range(3))
    assert_same(fold(a, b), fold(b, a))
    assert_same(fold(fold(a, b), c), fold(a, fold(b, c)))
    assert_same(fold(fold(a, b), c), fold(a, b, c))


@given(seed=seeds, empty=st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=40, deadline=None)
def test_a_sink_may_be_merged_before_or_after(seed: int, empty: float) -> None:
    a, b = state(seed, empty=empty), state(seed + 1, empty=empty)
    sink = torch.tensor([0.5, -2.0], dtype=torch.float64)
    assert_same(add_sink(*fold(a, b), sink), fold(add_sink(*a, sink), b))


# Layouts


def test_strided_states_merge_like_contiguous_ones() -> None:
    states = [state(n, empty=0.3) for n in range(2)]
    strided = [(out.mT.contiguous().mT, lse.mT.contiguous().mT) for out, lse in states]
    assert not any(t.is_contiguous() for one in strided for t in one)
    assert_same(fold(*strided), fold(*states))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"rows": 0}])
def test_states_of_no_rows_merge(sizes: dict[str, int]) -> None:
    out, lse = fold(state(0, **sizes), state(1, **sizes))
    assert out.shape == state(0, **sizes)[0].shape and lse.shape == state(0, **sizes)[1].shape


# Regressions


def test_the_sigmoid_form_is_nan_where_this_is_not() -> None:
    """out_a + sigmoid(lse_b - lse_a) * (out_b - out_a), as in several ring attentions, is NaN for two empty rows."""
    (out_a, lse_a), (out_b, lse_b) = of_one_row(0.0, EMPTY), of_one_row(0.0, EMPTY)
    assert (out_a + torch.sigmoid(lse_b - lse_a) * (out_b - out_a)).isnan().all()
    out, lse = fold((out_a, lse_a), (out_b, lse_b))
    assert out.item() == 0.0 and lse.item() == EMPTY
