"""The portable FP8 kernel in Triton's interpreter, on the CPU: what it computes."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

import triton
import triton.language as tl
from fp8_cases import BASE, CASES, CAUSAL, check, random_case

from stream_attention.backends import BY_NAME
from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.backends.triton.forward_fp8 import place_of_key
from stream_attention.backends.triton.tuning import Tile
from stream_attention.base.fp8_layout import E4M3, LARGEST, ORDER
from stream_attention_tools.testing.fp8 import attend_to_codes

# An empty row takes log2(0) and infinities meet in products, on the way to a result that does not hold them.
pytestmark = pytest.mark.filterwarnings(
    "ignore:divide by zero encountered in log2:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)

CONFIG = Tile(64, 64, 4, 1)
forward_fp8 = partial(attend_to_codes, BY_NAME["triton"])


# What it stands on


@triton.jit
def _places_kernel(out_ptr):
    columns = tl.arange(0, 128)
    tl.store(out_ptr + columns, place_of_key(columns))


def test_columns_are_keys_in_the_order_of_v() -> None:
    places = torch.empty(128, dtype=torch.int32)
    _places_kernel[(1,)](places)
    assert places.tolist() == [32 * block + place for block in range(4) for place in ORDER]


@triton.jit
def _convert_kernel(x_ptr, codes_ptr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    tl.store(codes_ptr + offs, tl.load(x_ptr + offs).to(tl.float8e4nv))


def test_the_interpreter_rounds_to_e4m3_as_gpus_do() -> None:
    """To the nearest, ties to even, the largest for what is larger, subnormal numbers too."""
    exact = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middles = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(side)) for side in (-math.inf, math.inf)]
    x = torch.cat([exact, middles, *beside, torch.tensor([449.0, 465.0, 1e30])])
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, 2048 - 2 * len(x)))
    codes = torch.empty(2048, dtype=E4M3)
    _convert_kernel[(1,)](x, codes, 2048)
    assert torch.equal(codes.view(torch.uint8), x.clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8))


# What it means


def test_weights_are_the_odds_of_the_scores() -> None:
    """Odds of 1 to 3: the second key's weight is the largest, 2^8, which is a code, and the first has no value."""
    case = replace(BASE, Tq=1, Tk=2, Hq=1, scale=math.log(3.0))
    problem, queries, keys, _, _ = case.codes()
    queries.query.view(torch.uint8).zero_()
    keys.key.view(torch.uint8).zero_()
    keys.value.view(torch.uint8).zero_()
    queries.scales.fill_(1.0)
    keys.scales.fill_(1.0)
    queries.query[0, 0, 0] = 1.0
    keys.key[0, 0, 0], keys.key[0, 1, 0] = -1.0, 0.0
    keys.value[0, :, 1] = 8.0  # key 1 stands in column 1
    out, lse = forward_fp8(problem, queries, keys, None, None, CONFIG)
    torch.testing.assert_close(out.flatten(), torch.full((64,), 6.0, dtype=out.dtype))
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(4 / 3)]))


def test_rows_before_the_first_key_are_empty() -> None:
    arguments = replace(BASE, Tq=100, Tk=30, window=CAUSAL).codes()
    out, lse = forward_fp8(*arguments, CONFIG)
    assert not out[:, :70].any() and bool((lse[..., :70] == -math.inf).all())
    assert out[:, 70:].abs().sum(-1).gt(0).all() and lse[..., 70:].isfinite().all()


@pytest.mark.parametrize("name", ["no keys", "no queries"])
def test_of_nothing_comes_nothing(name: str) -> None:
    out, lse = forward_fp8(*CASES[name].codes(), CONFIG)
    assert out.shape == (1, CASES[name].Tq, 2, 64) and lse.shape == (1, 2, CASES[name].Tq)
    assert not out.any() and bool((lse == -math.inf).all())


# Agreement with the specification, within what is earned


@pytest.mark.parametrize("name", CASES)
def test_agreement(name: str) -> None:
    assert check(CASES[name], forward_fp8).worst <= 1


@pytest.mark.parametrize("tile", [(64, 32), (64, 128), (128, 32), (128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize(
    "name", ["window of both sides, with blocks seen whole", "packed, causal", "scales of every block its own"]
)
def test_every_tile_gives_the_answer(name: str, tile: tuple[int, int]) -> None:
    assert check(CASES[name], forward_fp8, Tile(*tile, 4, 1)).worst <= 1


def test_random_cases() -> None:
    rng = Random(3)
    for _ in range(25):
        assert check(random_case(rng), forward_fp8, Tile(rng.choice((64, 128)), 64, 4, 1)).worst <= 1


# What is hidden, and what is not there


def test_no_code_behind_a_sequence_or_outside_its_blocks_is_seen() -> None:
    """Whatever lies in blocks that a pack leaves free, and in keys behind the end of a sequence."""
    case = replace(BASE, lengths=((20, 100), (30, 20)), window=CAUSAL)
    problem, queries, keys, cu_q, cu_k = case.codes()
    expected = forward_fp8(problem, queries, keys, cu_q, cu_k, CONFIG)
    keys.key[:, 100:128] = 1.0
    keys.key[:, 148:] = 1.0
    queries.query[:, 158:] = 1.0
    out, lse = forward_fp8(problem, queries, keys, cu_q, cu_k, CONFIG)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_offsets_beyond_the_pack_are_held_within_it() -> None:
    case = replace(BASE, lengths=((20, 30), (30, 20)))
    problem, queries, keys, cu_q, cu_k = case.codes()
    assert cu_q is not None and cu_k is not None
    beyond = cu_q.clone(), cu_k.clone()
    beyond[0][-1], beyond[1][-1] = 1 << 20, 1 << 20
    out, lse = forward_fp8(problem, queries, keys, *beyond, CONFIG)
    expected = reference_fp8.attention(problem, queries, keys, cu_q, cu_k)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    assert out.isfinite().all()
