"""The earned tolerance of FP8: what a correct kernel gives passes, and mistakes do not.

A kernel is emulated in torch: it streams blocks of keys, and its sums of products keep as many bits as it is told.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from benchmarks.studies.matrix_units import MATRIX_UNIT_BITS, matrix_unit_sums
from fp8_tolerance import FP32_BITS, check_fp8, check_with_sums
from torch import Tensor

from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.base.fp8_layout import BLOCK, E4M3, ORDER, QUERY_BLOCK, KeyCodes, QueryCodes, first_block
from stream_attention.base.problem import UNBOUNDED, Inputs, Problem, state_problem

F16, BF16 = torch.float16, torch.bfloat16
Codes = tuple[Problem, QueryCodes, KeyCodes, Tensor | None, Tensor | None]


def codes(
    lengths: list[tuple[int, int]],
    *,
    packed: bool = False,
    D: int = 64,
    heads: tuple[int, int] = (1, 1),
    window: tuple[int, int] = (-1, -1),
    kind: str = "normal",
    dtype: torch.dtype = BF16,
    seed: int = 0,
) -> Codes:
    """Of sequences with these lengths of (queries, keys), which are equal where they are not packed."""
    generator = torch.Generator().manual_seed(seed)
    (q_rows, k_rows), (q_most, k_most) = (tuple(map(f, zip(*lengths, strict=True))) for f in (sum, max))
    q, k, v = (
        torch.randn(n, h, D, generator=generator)
        for n, h in zip((q_rows, k_rows, k_rows), (*heads, heads[1]), strict=True)
    )
    if kind == "outliers":
        q[..., 3] *= 20
        k[..., 3] *= 20
    elif kind == "heavy":
        q, k, v = q**3, k**3, v**3
    elif kind == "same":
        v = torch.full_like(v, 1.37)
    elif kind == "one sign":
        k[..., 3] *= 30
        v[..., 5] += 10
    q = q * {"small": 0.1, "large": 4.0, "huge": 1000.0}.get(kind, 1.0)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    cu_q = cu_k = None
    if packed:
        cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in zip(*lengths, strict=True))
    else:
        q, k, v = (x.view(len(lengths), -1, *x.shape[1:]) for x in (q, k, v))
    problem = state_problem(
        Inputs(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k),
        q_len=q_most,
        k_len=k_most,
        causal=False,
        window=window,
        softcap=0.0,
        scale=D**-0.5,
        dropout_p=0.0,
        deterministic=False,
    ).replace(fp8=True)
    return problem, reference_fp8.quantize_queries(q, cu_q), reference_fp8.quantize_keys(k, v, cu_k), cu_q, cu_k


def product(a: Tensor, b: Tensor, bits: int) -> Tensor:
    """a b^T of codes `[H, m, K]` and `[H, n, K]`."""
    return (a.double() @ b.double().mT).float() if bits == FP32_BITS else matrix_unit_sums(a, b, bits).float()


def emulated(
    problem: Problem,
    queries: QueryCodes,
    keys: KeyCodes,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    *,
    bits: int = FP32_BITS,
    block: int = 64,
    from_right: bool = False,
    lazy: bool = False,
    sums: torch.dtype = torch.float32,
    mistake: str = "",
) -> tuple[Tensor, Tensor]:
    """`lazy`: tops as in the Hopper kernel, raised where sums of 16 weights are above 448, by their exponents."""
    outs, lses = [], []
    heads, dim, count = keys.value.shape
    back = torch.tensor(sorted(range(32), key=ORDER.__getitem__))
    value = keys.value.float()
    if mistake != "values in natural order":
        value = value.view(heads, dim, count // 32, 32)[..., back].view(heads, dim, count)
    for sequence in range(problem.batch):
        q_len, k_len, offset = problem.q_len, problem.k_len, problem.q_start - problem.k_start
        if cu_q is not None and cu_k is not None:
            q_len, k_len = (int(cu[sequence + 1] - cu[sequence]) for cu in (cu_q, cu_k))
            offset = k_len - q_len
        offset += mistake == "causal edge off by one"
        q_first = first_block(sequence, problem.q_len, cu_q) * BLOCK
        k_first = first_block(sequence, problem.k_len, cu_k) * BLOCK
        q = queries.query[:, q_first : q_first + q_len].float()
        q_scales = queries.scales.repeat_interleave(QUERY_BLOCK, 1)[:, q_first : q_first + q_len]
        row_top = torch.full(q.shape[:2], -math.inf)
        row_sum, acc = torch.zeros(q.shape[:2]), torch.zeros(*q.shape[:2], dim, dtype=sums)
        starts = list(range(0, k_len, block))
        for start in reversed(starts) if from_right else starts:
            rows = slice(k_first + start, k_first + start + block)
            k = keys.key[:, rows].float().repeat_interleave(problem.group, 0)
            v = value[:, :, rows].repeat_interleave(problem.group, 0)
            scales = keys.scales[:, (k_first + start) // BLOCK].repeat_interleave(problem.group, 0)
            if mistake == "scale of one block" and start == starts[-1]:
                scales = scales * torch.tensor([1.0, 2.0])
            x = product(q, k, bits) * (q_scales * (problem.scale / math.log(2)) * scales[:, :1])[..., None]
            j = start + torch.arange(block)[None, :]
            distance = j - torch.arange(q_len)[:, None] - offset
            hidden = (j >= k_len) | (distance < -problem.left if problem.left != UNBOUNDED else False)
            hidden = hidden | (distance > problem.right if problem.right != UNBOUNDED else False)
            if mistake == "a missing key":
                hidden = hidden | (j == k_len // 2)
            x = x.masked_fill(hidden, -math.inf)
            new_top = torch.maximum(row_top, x.amax(-1).ceil())
            finite = new_top.masked_fill(new_top == -math.inf, 0.0)
            if lazy and (row_top > -math.inf).any():  # maxima are for rows that have seen no key, and for a first block
                lower = torch.where(row_top == -math.inf, finite, row_top)
                of_16 = torch.exp2(x - (lower - 8)[..., None]).unflatten(-1, (-1, 8)).sum(-2)
                largest = of_16.amax(-1)
                raised = lower + (largest.frexp().exponent - 8).clamp(min=0)
                raised = torch.where(largest > 448, raised, lower)
                new_top = torch.where(largest.isfinite(), torch.where(new_top == -math.inf, new_top, raised), new_top)
                finite = new_top.masked_fill(new_top == -math.inf, 0.0)
            weights, shrink = torch.exp2(x - (finite - 8)[..., None]), torch.exp2(row_top - finite)
            row_top, row_sum = new_top, row_sum * shrink + weights.sum(-1)
            added = product(weights.clamp(max=448).to(E4M3).float(), v, bits) * scales[:, 1:, None]
            acc = (acc.float() * shrink[..., None] + added).to(sums)
        seen = row_sum != 0
        outs.append((acc.float() / row_sum.masked_fill(~seen, 1.0)[..., None]).to(problem.dtype))
        lses.append(torch.where(seen, math.log(2) * (row_top - 8 + row_sum.log2()), -math.inf))
    if problem.packed:
        return torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)
    return torch.stack(outs).transpose(1, 2), torch.stack(lses)


@pytest.mark.parametrize("terms", ["equal", "positive", "normal"])
def test_matrix_units_add_as_an_h200_does(terms: str) -> None:
    """Mean and size of the errors of sums that an H200 left to them."""
    make = {
        "equal": lambda *shape: torch.full(shape, 1.125),
        "positive": lambda *shape: torch.rand(shape) + 0.1,
        "normal": torch.randn,
    }[terms]
    found = json.loads((Path(__file__).parents[3] / "benchmarks/results/h200/fp8_sums.json").read_text())["sums"]
    torch.manual_seed(0)
    for row in (row for row in found if row["terms"] == terms and 32 <= row["count"] <= 256):
        a, b = (make(1, 400, row["count"]).to(E4M3).float() for _ in range(2))
        exact, squares = a.double() @ b.double().mT, a.double().square() @ b.double().square().mT
        errors = (matrix_unit_sums(a, b) - exact) / torch.hypot(exact, squares.sqrt())
        nearly = 1e-6 if terms == "equal" else 0.05
        assert errors.square().mean().sqrt().item() == pytest.approx(row["rms"], rel=nearly), row
        assert terms == "normal" or errors.mean().item() == pytest.approx(row["mean"], rel=nearly), row


def test_the_exponent_of_a_term_is_that_of_its_factors() -> None:
    """1.875 * 1.875 is above 2, and has the exponent 0: two terms of 2^-13 beside it are not cut off."""
    a = torch.tensor([[[1.875, 2.0**-7, 2.0**-7]]])
    b = torch.tensor([[[1.875, 2.0**-6, 2.0**-6]]])
    assert matrix_unit_sums(a, b).item() == 1.875**2 + 2.0**-12
    assert matrix_unit_sums(a[..., :2], b[..., :2]).item() == 1.875**2, "which the new sum has no bit for"


def random_codes(rng: Random) -> Codes:
    def length() -> int:
        return rng.choice((1, 2, 3, 7, 32, 33, 64, 65, 100, 127, 128, 129))

    packed, kv_heads = rng.random() < 0.3, rng.choice((1, 1, 2))
    lengths = [(length(), length()) for _ in range(rng.choice((1, 2)))]
    return codes(
        lengths if packed else lengths[:1] * len(lengths),
        packed=packed,
        D=rng.choice((64, 64, 64, 128)),
        heads=(kv_heads * rng.choice((1, 2)), kv_heads),
        window=(rng.choice((-1, -1, -1, 0, 5)), rng.choice((-1, 0, 0, 7))),
        kind=rng.choice(("normal", "small", "large", "huge", "outliers", "heavy", "same", "one sign")),
        dtype=rng.choice((F16, BF16)),
        seed=rng.getrandbits(32),
    )


# What is right passes


@pytest.mark.parametrize(("bits", "count"), [(FP32_BITS, 200), (MATRIX_UNIT_BITS, 60)])
def test_a_correct_kernel_passes_whatever_its_blocks(bits: int, count: int) -> None:
    rng = Random(bits)
    for _ in range(count):
        problem = random_codes(rng)
        blocks: dict[str, Any] = {"block": rng.choice((64, 128)), "from_right": rng.random() < 0.5}
        blocks["lazy"] = rng.random() < 0.5
        assert check_with_sums(bits, *emulated(*problem, bits=bits, **blocks), *problem).worst <= 1


@pytest.mark.parametrize("loud", [1, 16, 128])
def test_a_row_loses_little_of_its_sum_whatever_the_tops(loud: int) -> None:
    """Many small weights beside a few large ones, in the second block: what becomes 0, and may, is n 2^-17."""
    count, small = 4096, 2.0**-13
    key = torch.zeros(1, count, 1, 64)
    key[..., 0] = -13.0
    some = torch.arange(loud) * (8 if loud < 128 else 1) + (count - 256)  # columns of one sum of 16; or a block
    key[:, some] = 0.0
    value = torch.ones(1, count, 1, 64)
    value[:, some] = -1.0
    query = torch.zeros(1, 64, 1, 64)
    query[..., 0] = 1.0
    problem = codes([(64, count)])[0].replace(scale=math.log(2), q_heads=1, kv_heads=1)
    all_codes = reference_fp8.quantize_queries(query), reference_fp8.quantize_keys(key, value)
    exact = ((count - loud) * small - loud) / ((count - loud) * small + loud)
    lost = {}
    for lazy in (False, True):
        out, _ = emulated(problem, *all_codes, None, None, block=128, from_right=True, lazy=lazy)
        lost[lazy] = (out.double() - exact).abs().max().item() / 2
    bound = count * 2.0**-17
    assert max(lost.values()) <= bound + 2.0**-8, "of bf16"
    assert (lost[True] > 0.4 * bound) == (loud == 16), "the most is lost where sums of 16 are of equal weights"


def test_the_specification_rounded_passes() -> None:
    problem = codes([(70, 200)], window=(-1, 0))
    out, lse = reference_fp8.attention(*problem)
    report = check_fp8(out.bfloat16(), lse.float(), *problem)
    assert report.worst <= 1 and report.distance < 0.7


def test_there_is_less_to_earn_where_sums_are_of_fp32() -> None:
    problem = codes([(70, 200)])
    results = emulated(*problem, bits=MATRIX_UNIT_BITS)
    assert check_with_sums(MATRIX_UNIT_BITS, *results, *problem).worst <= 1
    with pytest.raises(AssertionError, match="lse"):
        check_fp8(*results, *problem)


def test_nothing_seen_is_nothing_wrong() -> None:
    problem = codes([(5, 0), (0, 3)], packed=True)
    assert check_fp8(*emulated(*problem), *problem).worst == 0


# What is wrong does not


@pytest.mark.parametrize("bits", [FP32_BITS, MATRIX_UNIT_BITS])
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("scale of one block", "row, error, distance"),
        ("values in natural order", "row, error, distance"),
        ("a missing key", "row, error, distance, lse"),
        ("causal edge off by one", "row, error, distance, lse"),
    ],
)
def test_mistakes_are_refused(mistake: str, words: str, bits: int) -> None:
    problem = codes([(256, 256)], window=(-1, 0))
    with pytest.raises(AssertionError, match=words):
        check_with_sums(bits, *emulated(*problem, bits=bits, mistake=mistake), *problem)


def test_one_key_of_two_thousand_is_missed() -> None:
    problem = codes([(64, 2048)])
    with pytest.raises(AssertionError, match="distance, lse"):
        check_with_sums(MATRIX_UNIT_BITS, *emulated(*problem, mistake="a missing key"), *problem)


def test_sums_of_blocks_in_bf16_are_refused() -> None:
    problem = codes([(64, 2048)])
    with pytest.raises(AssertionError, match="distance"):
        check_fp8(*emulated(*problem, sums=BF16), *problem)


def test_and_on_matrix_units_where_scores_are_small() -> None:
    problem = codes([(64, 4096)], kind="small", dtype=F16)
    with pytest.raises(AssertionError, match="distance"):
        check_with_sums(MATRIX_UNIT_BITS, *emulated(*problem, sums=BF16), *problem)


@pytest.mark.parametrize("bits", [FP32_BITS, MATRIX_UNIT_BITS])
def test_an_lse_that_is_off_is_refused(bits: int) -> None:
    problem = codes([(64, 512)])
    out, lse = emulated(*problem)
    with pytest.raises(AssertionError, match="tolerance: lse;"):
        check_with_sums(bits, out, lse + 1e-3, *problem)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
@pytest.mark.parametrize("which", ["out", "lse"])
def test_one_number_is_enough(which: str, value: float) -> None:
    problem = codes([(64, 200)])
    out, lse = emulated(*problem)
    (out if which == "out" else lse).view(-1)[37] = value
    with pytest.raises(AssertionError, match="tolerance"):
        check_with_sums(MATRIX_UNIT_BITS, out, lse, *problem)


def test_rows_of_no_key_are_zero_and_no_other_row_is() -> None:
    problem = codes([(64, 40)], window=(-1, 0))
    out, lse = emulated(*problem)
    for place, number, words in ((3, 1e-30, "are not 0"), (3, math.nan, "are not 0")):
        wrong = out.clone()
        wrong[0, place, 0, 5] = number
        with pytest.raises(AssertionError, match=words):
            check_fp8(wrong, lse, *problem)
    for place in (3, 40):
        wrong = lse.clone()
        wrong[0, 0, place] = 0.0 if place == 3 else -math.inf
        with pytest.raises(AssertionError, match="for other rows"):
            check_fp8(out, wrong, *problem)


def test_rows_of_no_sequence_are_zero() -> None:
    problem = codes([(10, 20)], packed=True)
    out, lse = emulated(*problem)
    tail = torch.zeros(2, 1, 64, dtype=BF16), torch.full((1, 2), -math.inf)
    assert check_fp8(torch.cat([out, tail[0]]), torch.cat([lse, tail[1]], 1), *problem).worst <= 1
    with pytest.raises(AssertionError, match="of no sequence"):
        check_fp8(torch.cat([out, tail[0] + 1]), torch.cat([lse, tail[1]], 1), *problem)


def test_shapes_and_dtypes_are_those_of_the_problem() -> None:
    problem = codes([(10, 20)])
    out, lse = emulated(*problem)
    for wrong, words in (
        ((out.float(), lse), "out is torch.float32"),
        ((out, lse.double()), "lse is torch.float64"),
        ((out[:, :9], lse), "out is"),
        ((out, lse.mT), "lse is"),
    ):
        with pytest.raises(AssertionError, match=words):
            check_fp8(*wrong, *problem)
