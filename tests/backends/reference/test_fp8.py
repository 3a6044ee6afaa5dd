"""The specification of FP8: its quantised values are checked by hand, what it computes against the dense reference."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.backends.reference import attention as reference
from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.base.fp8_layout import (
    BLOCK,
    E4M3,
    HEAD_DIMS,
    LARGEST,
    ORDER,
    QUERY_BLOCK,
    SHIFT,
    SMALLEST,
    blocks_of,
    first_block,
)
from stream_attention.base.problem import KV, UNBOUNDED, Hardware, Operands, Problem, Scores, Shape

INF = math.inf
BF16 = torch.bfloat16
CODES = torch.arange(256, dtype=torch.uint8).view(E4M3).double()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def qkv(
    B: int = 2, Tq: int = 70, Tk: int = 150, Hq: int = 4, Hkv: int = 2, D: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    return randn(B, Tq, Hq, D, seed=1), randn(B, Tk, Hkv, D, seed=2), randn(B, Tk, Hkv, D, seed=3)


def problem_of(query: Tensor, key: Tensor, batch: int, longest: tuple[int, int], **facts: Any) -> Problem:
    (q_heads, dim), packed = query.shape[-2:], query.dim() == 3
    stated = Problem(
        Shape(batch, longest[0], q_heads, key.shape[-2], dim, dim),
        KV("packed" if packed else "dense", longest[1]),
        Operands(query.dtype),
        Hardware(query.device),
        scores=Scores(dim**-0.5),
    )
    return stated.replace(q_start=longest[1] - longest[0], **facts)


# Where a key stands


def test_the_order_is_that_of_fragments() -> None:
    assert sorted(ORDER) == list(range(32))
    assert list(ORDER) == torch.arange(32).reshape(2, 2, 4, 2).permute(0, 2, 1, 3).flatten().tolist()
    for place, key in enumerate(ORDER):
        # In a row of an accumulator, lane n of 4 has columns 8 b + 2 n and the next; in a row of an FP8 operand it has
        # four from 16 a + 4 n on. A key's weight is an operand of the lane that computed it, in the same half of 32.
        assert key % 8 // 2 == place % 16 // 4 and key // 16 == place // 16


@pytest.mark.parametrize("seed", range(20))
def test_sequences_of_a_pack_have_blocks_of_their_own(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 127, 128, 129, draw.randint(0, 1000)]) for _ in range(draw.randint(1, 9))]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    rows = int(cu[-1]) + draw.choice([0, 50])
    firsts = [first_block(n, rows, cu) for n in range(len(lengths))] + [blocks_of(rows, len(lengths), packed=True)]
    for length, (first, next_first) in zip(lengths, pairwise(firsts), strict=True):
        assert first + -(-length // BLOCK) <= next_first


def test_where_rows_stand_and_what_stands_behind_them() -> None:
    query, key, value = qkv(B=2, Tq=130, Tk=100, Hq=1, Hkv=1)
    queries, keys = reference_fp8.quantize_queries(query), reference_fp8.quantize_keys(key, value)
    assert queries.query.shape == (1, 4 * BLOCK, 64) and queries.scales.shape == (1, 4 * BLOCK // QUERY_BLOCK)
    assert keys.key.shape == (1, 2 * BLOCK, 64) and keys.value.shape == (1, 64, 2 * BLOCK)
    assert (queries.rows, keys.rows) == (130, 100)
    got_queries, (got_keys, got_values) = (
        reference_fp8.dequantized_queries(queries),
        reference_fp8.dequantized_keys(keys),
    )
    for got, x, length in ((got_queries, query, 130), (got_keys, key, 100), (got_values, value, 100)):
        got = got.view(2, -1, 64)
        assert torch.allclose(got[:, :length], x[:, :, 0].double(), rtol=2**-4, atol=2**-9)
        assert int(got[:, length:].count_nonzero()) == 0
    # Key 2 of a block has place 4 of it.
    assert ORDER[4] == 2 and float(keys.value[0, 5, 4]) * float(keys.scales[0, 0, 1]) == float(got_values[0, 2, 5])


# Scales and codes


def test_scales_are_the_smallest_powers_of_two_that_do() -> None:
    powers = torch.exp2(torch.arange(-59.0, 100.0))
    exact = LARGEST * powers
    largest = torch.cat([exact, exact.nextafter(torch.tensor(INF)), exact.nextafter(torch.tensor(0.0)), powers * 1.37])
    scale = reference_fp8.power_of_two(largest)
    assert (torch.frexp(scale)[0] == 0.5).all()
    assert (largest / scale <= LARGEST).all() and (largest / scale > LARGEST / 2).all()


def test_scales_at_the_ends() -> None:
    least = float(reference_fp8.power_of_two(torch.tensor(SMALLEST)))
    largest = torch.tensor([0.0, 1e-38, SMALLEST / 3, INF, 3.3e38])
    assert reference_fp8.power_of_two(largest).tolist() == [1.0, least, least, INF, 2.0**120]


def test_codes_are_the_nearest() -> None:
    numbers = CODES[CODES >= 0].unique()
    between = (numbers[1:] + numbers[:-1]) / 2
    even = torch.where(torch.arange(len(between)) % 2 == 0, numbers[:-1], numbers[1:])  # codes count from 0 upwards
    nudge = torch.tensor(1e-6)
    for sign in (1.0, -1.0):
        assert torch.equal(reference_fp8.to_e4m3(sign * numbers.float()).double(), sign * numbers)
        assert torch.equal(reference_fp8.to_e4m3(sign * between.float()).double(), sign * even)
        for near, want in ((between * (1 - nudge), numbers[:-1]), (between * (1 + nudge), numbers[1:])):
            assert torch.equal(reference_fp8.to_e4m3(sign * near.float()).double(), sign * want)
    assert reference_fp8.to_e4m3(torch.tensor([500.0, -INF, 1e9])).double().tolist() == [448, -448, 448]
    assert bool(reference_fp8.to_e4m3(torch.tensor(torch.nan)).isnan())


def test_nan_has_no_say_in_a_scale_and_inf_has() -> None:
    key = torch.zeros(1, 256, 1, 64)
    key[0, 0, 0, 0], key[0, 1, 0, 0] = torch.nan, 3.0
    key[0, 200, 0, 0], key[0, 201, 0, 0] = INF, 3.0
    codes = reference_fp8.quantize_keys(key, key)
    assert codes.scales.tolist() == [[[2**-7, 2**-7], [INF, INF]]]
    assert codes.key[0, [0, 1, 200, 201], 0].isnan().tolist() == [True, False, True, False]
    assert float(codes.key[0, 1, 0]) == 384.0 and float(codes.key[0, 201, 0]) == 0.0


# Rotation


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_hadamard(dim: int) -> None:
    h = reference_fp8.hadamard(dim)
    assert set(h.unique().tolist()) == {-1.0, 1.0} and torch.equal(h, h.T)
    assert torch.equal(h @ h, dim * torch.eye(dim))
    half = reference_fp8.hadamard(dim // 2)
    assert torch.equal(h, torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)]))
    assert torch.equal(reference_fp8.hadamard(2), torch.tensor([[1.0, 1.0], [1.0, -1.0]]))


def test_rotation_changes_no_score_and_no_value() -> None:
    query, key, value = qkv(B=1, Hq=1, Hkv=1)
    want = query[0, :, 0].double() @ key[0, :, 0].double().T
    plain, rotated = (reference_fp8.quantize_keys(key, value, rotate=rotate) for rotate in (False, True))
    queries = reference_fp8.quantize_queries(query, rotate=True)
    got = reference_fp8.dequantized_queries(queries)[0, :70] @ reference_fp8.dequantized_keys(rotated)[0][0, :150].T
    assert float((got - want).abs().max() / want.abs().max()) < 0.05  # the codes' rounding
    assert torch.equal(plain.value.view(torch.uint8), rotated.value.view(torch.uint8))
    assert torch.equal(plain.scales[..., 1], rotated.scales[..., 1])


def test_rotation_spreads_one_channel_over_all() -> None:
    key = torch.zeros(1, 1, 1, 128)
    key[0, 0, 0, 77] = 7.0
    codes = reference_fp8.quantize_keys(key, key, rotate=True)
    assert float(codes.scales[0, 0, 0]) == 2.0**-6 / 128  # 7 is 448 / 64
    assert torch.equal(codes.key[0, 0].float(), LARGEST * reference_fp8.hadamard(128)[77])


# Attention


@pytest.mark.parametrize(
    "window",
    [(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (20, 0), (3, 5), (200, UNBOUNDED)],
    ids=["full", "causal", "causal window", "window", "far"],
)
@pytest.mark.parametrize("lengths", [(70, 150), (150, 70), (1, 129)], ids=str)
def test_without_rounding_it_is_attention_of_what_codes_mean(lengths: tuple[int, int], window: tuple[int, int]) -> None:
    query, key, value = qkv(B=1, Tq=lengths[0], Tk=lengths[1])
    queries, keys = reference_fp8.quantize_queries(query), reference_fp8.quantize_keys(key, value)
    problem = problem_of(query, key, 1, lengths, left=window[0], right=window[1])
    out, lse = reference_fp8.attention(problem, queries, keys, rounded=False)
    q = reference_fp8.dequantized_queries(queries)[:, : lengths[0]]
    k, v = (x[:, : lengths[1]] for x in reference_fp8.dequantized_keys(keys))
    want, want_lse = reference.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), window=window)
    assert out.shape == (1, lengths[0], 4, 64) and lse.shape == (1, 4, lengths[0])
    assert torch.allclose(out, want, rtol=1e-12, atol=1e-12) and torch.allclose(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_rounded_weights_by_hand() -> None:
    """Two keys, scores 0 and -0.5 in powers of two: weights 1 and 2^-1/2, of which the second has code 176 / 256."""
    query, key, value = (torch.zeros(1, rows, 1, 64) for rows in (1, 2, 2))
    query[0, 0, 0, 0], key[0, 1, 0, 0] = 1.0, -0.5
    value[0, 0, 0, 0], value[0, 1, 0, 1] = 1.0, 1.0
    problem = problem_of(query, key, 1, (1, 2), scale=math.log(2))
    codes = reference_fp8.quantize_queries(query), reference_fp8.quantize_keys(key, value)
    out, lse = reference_fp8.attention(problem, *codes)
    total = 1 + 2**-0.5
    assert out[0, 0, 0, :3].tolist() == pytest.approx([1 / total, 176 / 256 / total, 0.0], rel=1e-12)
    assert float(lse) == pytest.approx(math.log(total), rel=1e-12)


def test_a_row_that_sees_nothing_is_empty() -> None:
    query, key, value = qkv(B=1, Tq=5, Tk=3, Hq=1, Hkv=1)
    codes = reference_fp8.quantize_queries(query), reference_fp8.quantize_keys(key, value)
    out, lse = reference_fp8.attention(problem_of(query, key, 1, (5, 3), right=0), *codes)
    assert lse[0, 0, :2].tolist() == [-INF, -INF] and bool(lse[0, 0, 2:].isfinite().all())
    assert int(out[0, :2].count_nonzero()) == 0 and bool(out.isfinite().all())


def test_no_key_at_all() -> None:
    query, key, value = qkv(B=1, Tq=5, Tk=0, Hq=1, Hkv=1)
    codes = reference_fp8.quantize_queries(query), reference_fp8.quantize_keys(key, value)
    out, lse = reference_fp8.attention(problem_of(query, key, 1, (5, 0)), *codes)
    assert int(out.count_nonzero()) == 0 and bool((lse == -INF).all())


def test_a_larger_integer_maximum_finds_the_same_codes_unless_they_are_subnormal() -> None:
    weights = torch.rand(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).pow(3)
    codes = reference_fp8.to_e4m3(weights * 2.0**SHIFT).double()
    for more in range(1, 12):  # the maximum that a stream had before is smaller by this: weights beside it are larger
        later = reference_fp8.to_e4m3(weights * 2.0 ** (SHIFT - more)).double() * 2.0**more
        normal = weights * 2.0 ** (SHIFT - more) >= 2.0**-6
        assert torch.equal(codes[normal], later[normal])
        assert float((later - codes).abs().max()) <= 2.0 ** (more - 10)  # half of the subnormals' distance
        assert bool(normal.any()) and (more < 4 or not bool(normal.all()))


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_a_pack_is_its_sequences_one_by_one(rotate: bool) -> None:
    lengths = ((70, 150), (1, 128), (130, 0), (0, 9), (129, 129))
    cu_q, cu_k = (torch.tensor([0, *side]).cumsum(0) for side in zip(*lengths, strict=True))
    query, key, value = (x[0] for x in qkv(B=1, Tq=int(cu_q[-1]), Tk=int(cu_k[-1])))
    codes = (
        reference_fp8.quantize_queries(query, cu_q, rotate),
        reference_fp8.quantize_keys(key, value, cu_k, rotate),
    )
    problem = problem_of(query, key, len(lengths), (130, 150), left=40, right=0)
    out, lse = reference_fp8.attention(problem, *codes, cu_q, cu_k)
    assert out.shape == (len(query), 4, 64) and lse.shape == (4, len(query))
    for n, (q_len, k_len) in enumerate(lengths):
        rows, key_rows = slice(*cu_q[n : n + 2].tolist()), slice(*cu_k[n : n + 2].tolist())
        q, k, v = query[None, rows], key[None, key_rows], value[None, key_rows]
        alone = problem_of(q, k, 1, (q_len, k_len), left=40, right=0)
        want, want_lse = reference_fp8.attention(
            alone, reference_fp8.quantize_queries(q, rotate=rotate), reference_fp8.quantize_keys(k, v, rotate=rotate)
        )
        assert torch.allclose(out[rows], want[0], rtol=1e-12, atol=1e-12)
        assert torch.allclose(lse[:, rows], want_lse[0], rtol=1e-12, atol=1e-12)


def test_rounding_costs_no_more_than_half_a_step() -> None:
    """e4m3 has steps of 1/8 at least at its binade's start: a weight is off by 1/16 at most, and so is their mean."""
    query, key, value = qkv()
    codes = reference_fp8.quantize_queries(query), reference_fp8.quantize_keys(key, value)
    problem = problem_of(query, key, 2, (70, 150), right=0)
    (out, lse), (exact, exact_lse) = (
        reference_fp8.attention(problem, *codes, rounded=rounded) for rounded in (True, False)
    )
    assert torch.equal(lse, exact_lse)
    error = (out - exact).abs().max()
    assert 0.0 < float(error) <= float(value.float().abs().max()) / 16 * 1.25  # codes of values are off as well
