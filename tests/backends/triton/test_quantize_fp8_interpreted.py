"""The FP8 pre-pass in Triton's interpreter: the codes and scales of the specification, bit for bit."""

from __future__ import annotations

import os
import random

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

from quantize_fp8_cases import (
    BF16,
    F16,
    LAYOUTS,
    Case,
    check,
    check_alone,
    draw_case,
    every_number,
    quantize,
    seen_keys,
)

from stream_attention.base.fp8_layout import E4M3, ORDER
from stream_attention.base.problem import UNBOUNDED

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


# What it means


def test_scales_of_64_queries_and_of_128_keys() -> None:
    x = torch.zeros(1, 130, 1, 64, dtype=BF16)
    x[0, 0, 0, 0], x[0, 63, 0, 1], x[0, 64, 0, 2], x[0, 129, 0, 3] = 448, 1, 450, -7  # 450 becomes 225 = 224 beside 2
    queries, keys = quantize(x, x, x)
    assert queries.query.shape == (1, 256, 64) and keys.value.shape == (1, 64, 256)
    assert queries.scales.tolist() == [[1, 2, 2**-6, 1]]
    assert keys.scales.tolist() == [[[2, 2], [2**-6, 2**-6]]]
    assert [float(queries.query[0, i, c]) for i, c in ((0, 0), (63, 1), (64, 2), (129, 3))] == [448, 1, 224, -448]
    assert [float(keys.key[0, i, c]) for i, c in ((0, 0), (63, 1), (64, 2), (129, 3))] == [224, 0.5, 224, -448]
    assert int(queries.query.view(torch.uint8).count_nonzero()) == 4


def test_values_lie_transposed_and_in_order() -> None:
    value = torch.zeros(1, 64, 1, 64, dtype=BF16)
    value[0, :32, 0, 5] = torch.arange(32, dtype=torch.uint8).view(E4M3).bfloat16()  # key n has code n
    value[0, 0, 0, 0] = 448
    _, keys = quantize(value, value, value)
    assert keys.value.view(torch.uint8)[0, 5, :32].tolist() == list(ORDER)
    assert int(keys.value.view(torch.uint8)[0, 5, 32:].count_nonzero()) == 0


def test_a_rotated_channel_is_spread_over_all() -> None:
    x = torch.zeros(1, 1, 1, 64, dtype=BF16)
    x[0, 0, 0, 1] = 3.0
    queries, keys = quantize(x, x, x, rotate=True)
    spread = 3.0 * torch.tensor([1.0, -1.0]).repeat(32)
    assert torch.equal(queries.query[0, 0].float() * queries.scales[0, 0], spread)
    assert torch.equal(keys.key[0, 0].float() * keys.scales[0, 0, 0], spread / 64)
    assert float(keys.value[0, 1, 0].float() * keys.scales[0, 0, 1]) == 3.0


# Agreement with the specification


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_number_is_rounded_as_specified(dtype: torch.dtype) -> None:
    x = every_number(dtype, 256)
    T = x.shape[1]
    queries, _ = check(Case(D=256, Tq=T, Tk=T, Hq=1, dtype=dtype), inputs=(x, x, x))
    assert set(queries.scales[0, : T // 64].tolist()) == {1.0}


@pytest.mark.parametrize("seed", range(5))
def test_random_calls(seed: int) -> None:
    check(draw_case(random.Random(seed), longest=150, most_heads=2), seed=seed)


@pytest.mark.parametrize(
    ("D", "rotate"), [(64, True), (128, False), (256, True)], ids=["64, rotated", "128", "256, rotated"]
)
def test_lengths_at_the_edges_of_blocks(D: int, rotate: bool) -> None:
    check(Case(D=D, packed=((1, 129), (128, 0), (0, 1), (127, 128), (129, 127)), Hq=1, rotate=rotate))


@pytest.mark.parametrize("packed", [(), ((130, 3), (2, 129))], ids=["dense", "packed"])
def test_each_side_alone(packed: tuple[tuple[int, int], ...]) -> None:
    check_alone(Case(Hq=1, packed=packed))


# What is no number, and what nobody sees


@pytest.mark.parametrize(("dtype", "rotate"), [(F16, False), (BF16, True)], ids=["fp16", "bf16, rotated"])
def test_nan_and_inf_stay_in_their_block(dtype: torch.dtype, rotate: bool) -> None:
    case = Case(Tq=300, Tk=300, Hq=1, dtype=dtype, rotate=rotate)
    query, key, value = case.inputs()
    for x in (query, key, value):
        x[0, 3, 0, 5], x[0, 200, 0, 7], x[0, 201, 0, 7] = torch.nan, torch.inf, -torch.inf
        x[0, 256:] = torch.nan
    queries, keys = check(case, inputs=(query, key, value))
    assert torch.isfinite(keys.scales[0, 0]).all() and keys.scales[0, 1].tolist() == [torch.inf] * 2
    assert keys.scales[0, 2, 1] == queries.scales[0, 4] == 1.0  # of NaN alone
    assert int(keys.value[0, :, :128].isnan().sum()) == 1 and int(keys.value[0, :, 128:256].isnan().sum()) == 2


@pytest.mark.parametrize(
    "case",
    [
        Case(Tq=20, Tk=200, Hq=1, seen=(20, 0)),
        Case(Tq=20, Tk=200, Hq=1, seen=(UNBOUNDED, 0)),
        Case(Tq=200, Tk=20, Hq=1, seen=(20, 5)),
        Case(Tq=20, Tk=200, Hq=1, seen=(20, 30)),
        Case(packed=((1, 200), (20, 10), (30, 150), (10, 0)), Hq=1, seen=(10, 0)),
        Case(packed=((1, 20), (20, 10)), Hq=1, seen=(2**31 - 1, 0)),
    ],
    ids=str,
)
def test_what_no_query_sees_is_zero_whatever_it_is(case: Case) -> None:
    query, key, value = case.inputs()
    for x in (key, value):
        x[..., ~seen_keys(case, key), :, :] = torch.nan
    _, keys = check(case, inputs=(query, key, value))
    if not case.packed:
        assert not keys.key.isnan().any() and not keys.value.isnan().any()


# Packs


def test_a_pack_has_the_codes_of_its_sequences_one_by_one() -> None:
    case = Case(packed=((129, 130), (1, 128), (0, 5)), Hq=1, unused=17)
    query, key, value = case.inputs()
    cu_q, cu_k = case.offsets()
    assert cu_q is not None and cu_k is not None
    queries, keys = check(case)
    for n in range(3):
        rows, key_rows = slice(*cu_q[n : n + 2].tolist()), slice(*cu_k[n : n + 2].tolist())
        alone, alone_keys = quantize(query[None, rows], key[None, key_rows], value[None, key_rows])
        first, first_key = (int(cu[n]) // 128 + n for cu in (cu_q, cu_k))
        codes = queries.query[:, first * 128 :][:, : alone.query.shape[1]]
        assert torch.equal(codes.view(torch.uint8), alone.query.view(torch.uint8))
        codes = keys.value[:, :, first_key * 128 :][:, :, : alone_keys.value.shape[2]]
        assert torch.equal(codes.contiguous().view(torch.uint8), alone_keys.value.view(torch.uint8))
        assert torch.equal(keys.scales[:, first_key:][:, : alone_keys.scales.shape[1]], alone_keys.scales)


@pytest.mark.parametrize("offsets", [[0, 900, 200], [0, -7, 300]], ids=str)
def test_offsets_that_are_wrong_are_held_within_the_pack(offsets: list[int]) -> None:
    case = Case(packed=((100, 100), (100, 100)), Hq=1)
    query, key, value = case.inputs()
    cu = torch.tensor(offsets, dtype=torch.int32)
    queries, keys = quantize(query, key, value, cu, cu, 128, 128)
    assert queries.query.shape == (1, 3 * 128, 64) and keys.key.shape == (1, 3 * 128, 64)


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_lie_as_they_lie(layout: str) -> None:
    check(Case(B=2, Tq=10, Tk=10, Hq=2, Hkv=2, layout=layout))
    check(Case(Hq=1, Hkv=2, layout=layout, packed=((10, 3), (10, 9)), rotate=True))


# Nothing


@pytest.mark.parametrize(
    "case",
    [
        Case(B=0),
        Case(Tq=0, Tk=0),
        Case(Tq=0, Tk=130),
        Case(Tq=130, Tk=0),
        Case(packed=((0, 0), (0, 0))),
        Case(packed=((0, 0), (0, 0)), unused=3),
        Case(packed=((0, 4), (0, 0))),
    ],
    ids=str,
)
def test_nothing(case: Case) -> None:
    queries, keys = check(case)
    assert queries.query.dtype is keys.value.dtype is E4M3


def test_a_pack_of_no_sequence() -> None:
    none, cu = torch.zeros(0, 2, 64, dtype=BF16), torch.zeros(1, dtype=torch.int32)
    queries, keys = quantize(none, none, none, cu, cu)
    assert queries.query.shape == (2, 0, 64) and keys.value.shape == (2, 64, 0) and keys.scales.shape == (2, 0, 2)
