"""What is said of the losses of an FP8 backward, on small cases, and that the emulation is of what it says."""

from __future__ import annotations

import torch
from benchmarks.studies import fp8_backward_error as study
from benchmarks.studies.fp8_backward_error import GRAD, KINDS, NORMAL, Inputs, losses

from stream_attention.backends.reference import fp8 as reference_fp8

DQ, DK, DV = range(3)


# Semantics


def test_what_is_exact_are_the_gradients_of_attention() -> None:
    x = Inputs(*torch.randn(4, 64, study.DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    q, k, v = (one.clone().requires_grad_() for one in x[:3])
    torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].backward(x.grad)
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
    for ours, theirs in zip(study.backward(x, hidden, lambda y: y), (q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_codes_are_those_of_the_forward() -> None:
    x = torch.randn(2, 256, 1, study.DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    x *= torch.logspace(-3, 3, 256, base=2.0)[:, None, None]
    query, (key, value) = x[0, :, 0].double(), x[:, :, 0].double()
    keys, values = reference_fp8.dequantized_keys(reference_fp8.quantize_keys(x[:1], x[1:]))
    queries = reference_fp8.dequantized_queries(reference_fp8.quantize_queries(x[:1]))
    assert torch.equal(study._coded(query, 64, study.DIM), queries[0])
    assert torch.equal(study._coded(key, 128, study.DIM), keys[0])
    assert torch.equal(study._coded(value, 128, study.DIM), values[0])


def test_sums_differ_in_where_they_are_cut_off_alone() -> None:
    few, many = torch.ones(2, 64), torch.ones(2, 1 << 15)
    for sums in (study.exact_sums, study.unit_sums, study.two_levels):
        assert (sums(few, few) == 64).all()
    assert (study.two_levels(many, many) == 1 << 15).all()
    assert (study.unit_sums(many + 2**-3, many) < 1.1 * (1 << 15)).all()


# What is claimed


def test_codes_cost_4_to_6_percent_where_bf16_costs_a_quarter_of_one() -> None:
    found = losses(NORMAL, True, 256, 256, heads=2)
    assert max(found["bf16"].error) < 0.0035
    for name in ("FP8, exact sums", "matrix units", "two levels"):
        assert all(0.03 < error < 0.065 for error in found[name].error), name
    coarser, finer = found["dS in e5m2"].error, found["FP8, exact sums"].error
    assert coarser[DK] > 1.2 * finer[DK] and coarser[DQ] == finer[DQ] and coarser[DV] == finer[DV]


def test_gradients_of_one_sign_need_two_levels() -> None:
    found = losses(GRAD, False, 2048, 128, heads=1)
    exact, left, anew = (found[name] for name in ("FP8, exact sums", "matrix units", "two levels"))
    assert anew.error[DV] < 1.02 * exact.error[DV] < 0.006 and left.error[DV] > 4 * exact.error[DV]
    assert left.less[DV] - exact.less[DV] > 0.02 and abs(anew.less[DV] - exact.less[DV]) < 0.0003
    assert abs(left.error[DK] - exact.error[DK]) < 0.001, "terms of both signs"


def test_delta_wants_the_weights_that_made_out_to_add_up_to_1() -> None:
    found = losses(KINDS["dO and V of mean 1"], True, 256, 256, heads=1)
    uneven, even = found["FP8, exact sums"].error, found["delta by rounded weights"].error
    assert min(uneven[:DV]) > 0.08 and max(even[:DV]) < 0.06 and uneven[DV] == even[DV]


def test_an_outlier_channel_wants_rotation_and_the_lse_of_the_same_codes() -> None:
    plain = losses(KINDS["1 channel of Q and K times 8"], False, 256, 256, heads=1)
    rotated = losses(KINDS["the same, rotated"], False, 256, 256, heads=1)
    for without, turned in zip(plain["two levels"].error, rotated["two levels"].error, strict=True):
        assert without > 2 * turned
    assert min(plain["after a bf16 forward"].error) > 0.5
