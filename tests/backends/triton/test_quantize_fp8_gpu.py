"""The FP8 pre-pass on a GPU: the bits of the specification, in graphs, without synchronisation."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from gpu_tools import captured, give_memory_back, keep, without_synchronising
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

from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.base.problem import UNBOUNDED

__all__ = ["give_memory_back"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="e4m3 needs compute capability 8.9",
    ),
]

DIMS = (64, 128, 256)


# Agreement with the specification, computed on the same GPU


def test_random_calls() -> None:
    count = 200
    for seed in range(count):
        check(draw_case(random.Random(seed), longest=600, most_heads=4), "cuda", seed)
    keep({"calls": count}, "random calls", of="quantize_fp8")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("D", DIMS)
def test_every_number_is_rounded_as_specified(D: int, dtype: torch.dtype) -> None:
    x = every_number(dtype, D).cuda()
    T = x.shape[1]
    queries, _ = check(Case(D=D, Tq=T, Tk=T, Hq=1, dtype=dtype), "cuda", inputs=(x, x, x))
    assert set(queries.scales[0, : T // 64].tolist()) == {1.0}


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("D", DIMS)
def test_lengths_at_the_edges_of_blocks(D: int, dtype: torch.dtype, rotate: bool) -> None:
    for length in (1, 127, 128, 129):
        check(Case(D=D, B=3, Tq=length, Tk=length, Hq=6, Hkv=2, dtype=dtype, rotate=rotate), "cuda")
    packed = ((1, 129), (128, 0), (0, 1), (127, 128), (129, 127), (1000, 3))
    check(Case(D=D, packed=packed, Hq=6, Hkv=2, dtype=dtype, rotate=rotate, cu_dtype=torch.int64), "cuda")


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("D", DIMS)
def test_tensors_lie_as_they_lie(D: int, layout: str, rotate: bool) -> None:
    check(Case(D=D, B=2, Tq=300, Tk=500, Hq=8, Hkv=2, layout=layout, rotate=rotate), "cuda")
    check(Case(D=D, Hq=8, Hkv=2, layout=layout, packed=((130, 70), (3, 200)), rotate=rotate), "cuda")


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_the_shape_of_a_model(rotate: bool) -> None:
    """Thousands of programs, more than a GPU runs at a time."""
    check(Case(D=128, B=2, Tq=4096, Tk=4096, Hq=16, Hkv=8, rotate=rotate), "cuda")


def test_each_side_alone() -> None:
    for D in DIMS:
        check_alone(Case(D=D, B=2, Hq=4, Hkv=2), "cuda")
        check_alone(Case(D=D, Hq=4, Hkv=2, packed=((130, 70), (3, 200)), rotate=True), "cuda")


# What is no number, and what nobody sees


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("D", DIMS)
def test_nan_and_inf_stay_in_their_block(D: int, dtype: torch.dtype, rotate: bool) -> None:
    case = Case(D=D, Tq=300, Tk=300, Hq=1, dtype=dtype, rotate=rotate)
    inputs = case.inputs("cuda")
    for x in inputs:
        x[0, 3, 0, 5], x[0, 200, 0, 7], x[0, 201, 0, 7] = torch.nan, torch.inf, -torch.inf
        x[0, 256:] = torch.nan
    queries, keys = check(case, "cuda", inputs=inputs)
    assert torch.isfinite(keys.scales[0, 0]).all() and keys.scales[0, 1].tolist() == [torch.inf] * 2
    assert keys.scales[0, 2, 1] == queries.scales[0, 4] == 1.0  # of NaN alone
    codes = keys.value.view(torch.uint8)
    assert int((codes == 0x7F).sum()) == 1 + 2 + 44 * D and not (codes == 0xFF).any()


@pytest.mark.parametrize("D", DIMS)
def test_what_no_query_sees_is_zero_whatever_it_is(D: int) -> None:
    for case in (
        Case(D=D, Tq=70, Tk=600, seen=(20, 0)),
        Case(D=D, Tq=70, Tk=600, seen=(20, 30)),
        Case(D=D, Tq=70, Tk=600, seen=(UNBOUNDED, 0)),
        Case(D=D, packed=((1, 300), (200, 10), (30, 150), (10, 0)), seen=(10, 0)),
    ):
        inputs = case.inputs("cuda")
        for x in inputs[1:]:
            x[..., ~seen_keys(case, x), :, :] = torch.nan
        _, keys = check(case, "cuda", inputs=inputs)
        if not case.packed:
            assert not keys.key.isnan().any() and not keys.value.isnan().any()


# Graphs and the host


def test_a_graph_is_replayed() -> None:
    case = Case(D=128, B=2, Tq=300, Tk=500, Hq=4, Hkv=2)
    inputs = case.inputs("cuda")
    graph, got = captured(lambda: quantize(*inputs))
    for x, fresh in zip(inputs, case.inputs("cuda", seed=10), strict=True):
        x.copy_(fresh)
    graph.replay()
    want = reference_fp8.quantize_keys(*inputs[1:])
    assert torch.equal(got[1].value.view(torch.uint8), want.value.view(torch.uint8))
    assert torch.equal(got[1].scales, want.scales)


def test_the_host_never_waits() -> None:
    for case in (Case(D=128, B=2), Case(D=128, packed=((130, 70), (3, 200)), seen=(10, 0))):
        inputs, offsets = case.inputs("cuda"), case.offsets("cuda")
        quantize(*inputs, *offsets, *case.longest(), left=case.left)  # compiles
        with without_synchronising():
            quantize(*inputs, *offsets, *case.longest(), left=case.left)


# Layouts


@pytest.mark.usefixtures("give_memory_back")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_tensors_of_more_than_2_to_the_31_elements(packed: bool) -> None:
    """bf16 of 4.3 GB, whose last rows lie behind 2**31 elements, and their codes as well."""
    rows, last = 2**21 + 200, 300
    x = torch.zeros(rows, 8, 128, dtype=BF16, device="cuda")
    tail = Case(D=128, Tq=last, Tk=last, Hq=8, Hkv=8).inputs("cuda")[0][0]
    x[-last:] = tail
    begin = rows - last
    if packed:
        cu = torch.tensor([0, begin, rows], dtype=torch.int64, device="cuda")
        queries, keys = quantize(x, x, x, cu, cu, begin, begin)
        first = begin // 128 + 1
    else:  # of the last row's block on, those of zeros before it
        tail = torch.cat([tail.new_zeros(begin % 128, 8, 128), tail])
        queries, keys = quantize(x[None], x[None], x[None])
        first = begin // 128
    del x
    want, want_keys = reference_fp8.quantize_queries(tail[None]), reference_fp8.quantize_keys(tail[None], tail[None])
    count = want.query.shape[1]
    for got, wanted in (
        (queries.query[:, first * 128 :][:, :count], want.query),
        (keys.key[:, first * 128 :][:, :count], want_keys.key),
        (keys.value[:, :, first * 128 :][:, :, :count], want_keys.value),
    ):
        assert torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    assert torch.equal(keys.scales[:, first:][:, : count // 128], want_keys.scales)
    assert torch.equal(queries.scales[:, 2 * first :][:, : count // 64], want.scales)
    assert int(torch.count_nonzero(keys.value[:, :, : (first - packed) * 128].view(torch.uint8))) == 0
