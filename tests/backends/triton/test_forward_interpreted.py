"""The Triton forward in Triton's interpreter, on the CPU: what it computes.

Tiles are 16 queries by 32 keys here, so that small shapes cross their edges.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "set TRITON_INTERPRET=1; make test does, in a process of its own, since triton.jit chooses at decoration",
        allow_module_level=True,
    )
pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import random_case, why_not
from shard_state import forward_state

from stream_attention import attention, explain, varlen_attention
from stream_attention.backends import BY_NAME
from stream_attention.backends.eager import dropout as dropout_rule
from stream_attention.backends.reference import attention as reference
from stream_attention.backends.triton.tuning import INTERPRETER, TritonConfig
from stream_attention.base.problem import Inputs, Positions, state_problem
from stream_attention.base.state import add_sink, merge
from stream_attention.gpu.merge import bind_merge
from stream_attention.gpu.prepass import Prepass
from stream_attention_tools.testing import Case, check_case, poisoned_memory
from stream_attention_tools.testing.inputs import Layout

forward = BY_NAME["triton"].forward

# An empty row takes log2(0) and infinities meet in products, on the way to a result that does not hold them.
pytestmark = pytest.mark.filterwarnings(
    "ignore:divide by zero encountered in log2:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAN, INF = math.nan, math.inf


def check(case: Case, config: TritonConfig | None = None) -> None:
    report = check_case(replace(case, backward=False), "triton", config)
    assert report.worst <= 1, report


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(B: int = 1, Tq: int = 20, Tk: int = 40, Hq: int = 2, Hkv: int = 1, D: int = 16) -> tuple[Tensor, ...]:
    return normal(B, Tq, Hq, D), normal(B, Tk, Hkv, D, seed=1), normal(B, Tk, Hkv, D, seed=2)


def offsets(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


# Where it runs


def test_auto_leaves_the_interpreter_to_tests() -> None:
    planned = explain(*qkv())
    assert planned.backend == "eager"
    assert dict(planned.passed_over)["triton"] == (
        'the Triton interpreter is for tests; to use it, pass backend="triton"',
    )
    assert explain(*qkv(), backend="triton").config == INTERPRETER


# What it means


def test_weights_are_the_odds_of_the_scores() -> None:
    query, key = torch.ones(1, 1, 1, 8), torch.tensor([0.0, math.log(3.0)]).view(1, 2, 1, 1).repeat(1, 1, 1, 8)
    value = torch.tensor([0.0, 8.0]).view(1, 2, 1, 1).repeat(1, 1, 1, 8)
    out, lse = attention(query, key, value, scale=0.125, return_lse=True, backend="triton")
    torch.testing.assert_close(out.flatten(), torch.full((8,), 6.0))
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(4.0)]))


@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("config", [None, TritonConfig(16, 16, 4, 1, num_splits=2)], ids=["whole", "split"])
def test_rows_before_the_first_key_are_empty(config: TritonConfig | None, with_sink: bool) -> None:
    query, key, value = qkv(Tq=40, Tk=18)
    sink = normal(2) if with_sink else None
    with poisoned_memory():
        if config is None:
            out, lse = attention(query, key, value, causal=True, sink=sink, return_lse=True, backend="triton")
        else:
            out, lse = forced(Inputs(query, key, value, sink=sink), config, causal=True)
    assert not out[:, :22].any()
    assert torch.equal(
        lse[:, :, :22], (torch.full((2,), -INF) if sink is None else sink)[None, :, None].expand(1, 2, 22)
    )
    assert out[:, 22:].abs().sum(-1).gt(0).all() and lse[:, :, 22:].isfinite().all()


# Agreement with the reference, within what is earned

SHAPE = Case(B=1, Tq=20, Tk=40, Hq=2, Hkv=1, D=16, Dv=16, seed=7)
TILES = [
    (1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 20, 1), (1, 1, 1, 40), (1, 2, 1, 40), (2, 1, 20, 1),
    (1, 2, 20, 40), (2, 1, 20, 40), (2, 2, 20, 40), (20, 40), (1, 40), (20, 1), (40,), (1,), (),
]  # fmt: skip
EVERYTHING: dict[str, Any] = {
    "causal": True,
    "window": (17, 9),
    "mask": (1, 2, 20, 40),
    "bias": (2, 1, 20, 40),
    "bias_hides": True,
    "alibi": "BH",
    "sink": True,
    "softcap": 1.5,
    "dropout_p": 0.3,
    "B": 2,
}
CASES: dict[str, Case] = {
    "plain": SHAPE,
    "one head of queries per head of keys": replace(SHAPE, Hkv=2, B=2),
    "gqa": replace(SHAPE, Hq=6, Hkv=2, Tq=7),
    "mqa": replace(SHAPE, Hq=3, Hkv=1),
    "causal with a longer cache": replace(SHAPE, causal=True),
    "causal square": replace(SHAPE, Tq=40, causal=True),
    "causal with more queries than keys": replace(SHAPE, Tq=40, Tk=20, causal=True),
    "window": replace(SHAPE, window=(5, 3)),
    "window to the left": replace(SHAPE, window=(5, -1)),
    "window to the right": replace(SHAPE, window=(-1, 3)),
    "window that skips whole tiles": replace(SHAPE, Tq=100, Tk=100, Hq=1, window=(3, 0)),
    "window with tiles seen whole": replace(SHAPE, Tq=70, Tk=150, Hq=1, window=(70, 40)),
    "causal window": replace(SHAPE, window=(5, 3), causal=True),
    "window that only sees itself": replace(SHAPE, window=(0, 0)),
    "window of 2**40": replace(SHAPE, Tq=40, Tk=20, window=(2**40, 2**40)),
    "window before the first key": replace(SHAPE, Tq=40, Tk=4, window=(2, 1)),
    "bias that hides": replace(SHAPE, bias=(1, 2, 20, 40), bias_hides=True),
    "bias that hides, fp32 beside bf16": replace(SHAPE, bias=(20, 40), bias_hides=True, dtype=BF16, aux_dtype=F32),
    "bias that hides, bf16 beside fp32": replace(SHAPE, bias=(20, 40), bias_hides=True, aux_dtype=BF16),
    "bias in fp64": replace(SHAPE, bias=(20, 40), aux_dtype=torch.float64),
    "alibi": replace(SHAPE, alibi="H"),
    "alibi per batch entry": replace(SHAPE, B=2, alibi="BH", causal=True),
    "alibi in bf16": replace(SHAPE, alibi="H", aux_dtype=BF16, Tq=40, Tk=20),
    "sink": replace(SHAPE, sink=True),
    "sink in bf16, with empty rows": replace(SHAPE, sink=True, aux_dtype=BF16, mask=(1, 1, 20, 40)),
    "softcap": replace(SHAPE, softcap=2.0),
    "softcap far above the scores": replace(SHAPE, softcap=1000.0),
    "dropout": replace(SHAPE, B=2, dropout_p=0.3),
    "dropout of nearly everything": replace(SHAPE, dropout_p=0.97),
    "scale of zero": replace(SHAPE, scale=0.0),
    "scale of zero, causal and softcap": replace(SHAPE, scale=0.0, causal=True, softcap=3.0),
    "negative scale": replace(SHAPE, scale=-0.3),
    "negative scale, mask and alibi": replace(SHAPE, scale=-0.3, mask=(20, 40), alibi="H", causal=True),
    "scale that fp32 cannot hold": replace(SHAPE, scale=1e-46, causal=True),
    "large scale": replace(SHAPE, scale=30.0, causal=True),
    "one query": replace(SHAPE, Tq=1, causal=True),
    "one key": replace(SHAPE, Tk=1),
    "one key, causal": replace(SHAPE, Tk=1, causal=True),
    "one of everything": Case(B=1, Tq=1, Tk=1, Hq=1, Hkv=1, D=8, Dv=8),
    "a whole tile": replace(SHAPE, Tq=16, Tk=32),
    "one row and one key more than a tile": replace(SHAPE, Tq=17, Tk=33, causal=True),
    "one row and one key less than two tiles": replace(SHAPE, Tq=31, Tk=63, causal=True),
    "no keys": replace(SHAPE, Tk=0, sink=True),
    "no queries": replace(SHAPE, Tq=0),
    "no batch": replace(SHAPE, B=0),
    "values wider than keys": replace(SHAPE, D=8, Dv=40),
    "values narrower than keys": replace(SHAPE, D=72, Dv=24, causal=True),
    "everything": replace(SHAPE, **EVERYTHING),
    "everything, fp32 parameters": replace(SHAPE, **EVERYTHING, aux_dtype=F32, Hkv=2),
    "everything with values wider than keys": replace(SHAPE, **EVERYTHING, D=24, Dv=40),
}


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    "name", ["plain", "causal with a longer cache", "everything", "softcap", "values narrower than keys"]
)
def test_agreement_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check(replace(CASES[name], dtype=dtype))


@pytest.mark.parametrize("name", CASES)
def test_agreement(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("shape", TILES, ids=str)
@pytest.mark.parametrize("modifier", ["mask", "bias"])
def test_mask_and_bias_of_every_broadcast_shape(modifier: str, shape: tuple[int, ...]) -> None:
    case = replace(SHAPE, B=2, causal=True)
    check(replace(case, mask=shape) if modifier == "mask" else replace(case, bias=shape, bias_hides=True))


@pytest.mark.parametrize("dim", [8, 24, 40, 64, 72])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
def test_head_dims(dim: int, dtype: torch.dtype) -> None:
    check(replace(SHAPE, D=dim, Dv=dim, dtype=dtype, causal=True))


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_random_cases(seed: int) -> None:
    case = replace(random_case(Random(seed), head_dims=(8, 24), max_length=40), backward=False, lse_grad=False)
    if case.sequences * case.Hq <= 12:  # a program takes 10 ms
        assert not why_not(case, "triton")
        check(case)


# Configurations: any gives the answer


def forced(inputs: Inputs, config: TritonConfig, **options: Any) -> tuple[Tensor, Tensor]:

    return forward(stated(inputs, **options), inputs, config)


def stated(inputs: Inputs, **options: Any) -> Any:
    defaults = {"q_len": 0, "k_len": 0, "causal": False, "window": (-1, -1), "softcap": 0.0, "scale": 0.25}
    return state_problem(inputs, **{**defaults, "dropout_p": 0.0, "deterministic": False, **options})


@pytest.mark.parametrize("tile", list(product((16, 32), (16, 32))), ids=str)
@pytest.mark.parametrize(
    "case",
    [
        replace(SHAPE, Tq=33, causal=True, window=(20, 0), dropout_p=0.3, sink=True),
        replace(SHAPE, B=2, mask=(2, 1, 20, 40), alibi="BH", dtype=BF16),
        Case(Hq=2, Hkv=1, lengths_q=(17, 0, 5), lengths_k=(33, 4, 5), causal=True, tail=2),
    ],
    ids=["window and dropout", "mask and alibi", "packed"],
)
def test_every_tile_gives_the_answer(tile: tuple[int, int], case: Case) -> None:
    check(case, TritonConfig(*tile, 4, 1))


SPLITS: dict[str, tuple[Case, TritonConfig]] = {
    "two": (SHAPE, TritonConfig(16, 16, 4, 1, 2)),
    "as many as tiles": (replace(SHAPE, sink=True), TritonConfig(16, 16, 4, 1, 3)),
    "more than tiles": (replace(SHAPE, Tk=17, sink=True), TritonConfig(16, 16, 4, 1, 5)),
    "causal, rows that see nothing": (replace(SHAPE, Tq=24, Tk=20, causal=True), TritonConfig(16, 16, 4, 1, 3)),
    "window, and splits nobody sees": (replace(SHAPE, Tk=80, window=(8, 0)), TritonConfig(16, 16, 4, 1, 4)),
    "everything": (replace(SHAPE, **EVERYTHING), TritonConfig(16, 16, 4, 1, 3)),
    "bf16": (replace(SHAPE, Tq=3, Tk=90, dtype=BF16, sink=True), TritonConfig(16, 32, 4, 1, 3)),
    "heads packed": (replace(SHAPE, Hq=6, Hkv=2, Tq=3), TritonConfig(16, 32, 4, 1, 1, True)),
    "heads packed, tile edge within a query": (replace(SHAPE, Hq=6, Hkv=2, Tq=7), TritonConfig(16, 16, 4, 1, 1, True)),
    "heads packed, causal": (
        replace(SHAPE, Hq=3, Tq=13, causal=True, window=(9, 0)),
        TritonConfig(16, 16, 4, 1, 1, True),
    ),
    "heads packed and split": (replace(SHAPE, Hq=6, Hkv=2, Tq=2, Tk=70), TritonConfig(16, 16, 4, 1, 3, True)),
    "heads packed and split, every modifier but dropout": (
        replace(SHAPE, **EVERYTHING | {"dropout_p": 0.0}),
        TritonConfig(16, 16, 4, 1, 2, True),
    ),
    "heads packed, packed sequences": (
        Case(Hq=4, Hkv=2, lengths_q=(5, 0, 9), lengths_k=(20, 3, 9), alibi="BH", causal=True, sink=True, tail=1),
        TritonConfig(16, 16, 4, 1, 1, True),
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_the_keys_and_packed_heads(name: str) -> None:
    check(*SPLITS[name])


def test_few_queries_pack_their_heads_by_themselves() -> None:
    query, key, value = qkv(Tq=1, Tk=300, Hq=4, Hkv=1)
    config = explain(query, key, value, causal=True, backend="triton").config
    assert config.pack_heads and config.num_splits == 1  # a CPU has no processors to spread splits over
    check(replace(SHAPE, Tq=1, Tk=300, Hq=4, causal=True))


# The merge kernel


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("dim", [8, 40])
def test_the_merge_kernel_is_the_rule_of_state(dim: int, with_sink: bool, packed: bool) -> None:
    rows = (13,) if packed else (2, 13)
    outs, lses = normal(4, *rows, 3, dim), 5 * normal(4, *rows[:-1], 3, 13, seed=1)
    lses[1, ..., 3] = lses[2, ..., 0, 5] = -INF
    lses[..., 7] = -INF  # empty in every split
    outs[lses.mT == -INF] = 0.0
    sink = normal(3, seed=2) if with_sink else None
    with poisoned_memory():
        out, lse = torch.empty(outs.shape[1:]), torch.empty(lses.shape[1:])
        bind_merge(out.device, outs, lses, sink, out, lse)(outs, lses, sink, out, lse)
    expected = merge(outs.double().unbind(), lses.double().unbind())
    if sink is not None:
        expected = add_sink(*expected, sink)
    torch.testing.assert_close((out, lse), tuple(t.float() for t in expected))
    assert not out[..., 7, :, :].any()


def test_the_merge_kernel_writes_the_dtype_of_its_output() -> None:
    outs, lses = normal(2, 1, 3, 2, 8), normal(2, 1, 2, 3)
    out, lse = torch.empty(1, 3, 2, 8, dtype=BF16), torch.empty(1, 2, 3)
    bind_merge(out.device, outs, lses, None, out, lse)(outs, lses, None, out, lse)
    torch.testing.assert_close(out, merge(outs.unbind(), lses.unbind())[0].to(BF16))


def test_a_sink_joins_once_however_many_splits_there_are() -> None:
    query, key, value = torch.zeros(1, 1, 1, 16), torch.zeros(1, 64, 1, 16), torch.ones(1, 64, 1, 16)
    inputs = Inputs(query, key, value, sink=torch.tensor([math.log(64.0)]))
    for splits in (1, 2, 4):
        out, lse = forced(inputs, TritonConfig(16, 16, 4, 1, splits))
        torch.testing.assert_close(out, torch.full_like(out, 0.5))
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(128.0)))


# Dropout: the same words as the reference, bit for bit


@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (-1, -1), (2**63 - 1, 2**33 + 5), (-(2**63), 3), (0x0123456789ABCDEF, 2**62)]
)
def test_dropout_words_are_those_of_the_reference(seed: int, offset: int) -> None:
    query, key, value = qkv(B=2, Tq=20, Tk=40, Hq=3, Hkv=3)
    inputs = Inputs(query, key, value, seed=torch.tensor([seed, offset]))
    positions = Positions(25, 3, 4, 5, q_base=10)
    problem = stated(inputs, dropout_p=0.5, positions=positions, batch_start=6)
    _, _, rows, columns, *_ = Prepass.of(problem, inputs).run(inputs)
    for p in (0.1, 0.5, 0.999):
        found = dropout_rule.keep(rows[..., :, None], columns[..., None, :], p)
        index = {"q_index": 15 + 3 * torch.arange(20), "k_index": 4 + 5 * torch.arange(40)}
        expected = reference.dropout_keep(seed, offset, 2, 3, 20, 40, p, batch_start=6, **index)
        assert torch.equal(found, expected)


def test_dropout_words_of_packed_sequences_count_within_each() -> None:
    query, key = normal(12, 2, 8), normal(14, 2, 8)
    cu_q, cu_k = offsets(5, 0, 7), offsets(6, 3, 4)
    inputs = Inputs(query, key, key, seed=torch.tensor([3, 4]), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    problem = stated(inputs, q_len=7, k_len=6, dropout_p=0.5)
    _, _, rows, columns, *_ = Prepass.of(problem, inputs).run(inputs)
    for b, (q_slice, k_slice) in enumerate(
        ((slice(0, 5), slice(0, 6)), (slice(5, 5), slice(6, 9)), (slice(5, 12), slice(9, 13)))
    ):
        found = dropout_rule.keep(rows[:, q_slice, None], columns[:, None, k_slice], 0.4)
        lengths = q_slice.stop - q_slice.start, k_slice.stop - k_slice.start
        assert torch.equal(found, reference.dropout_keep(3, 4, 1, 2, *lengths, 0.4, batch_start=b)[0])


@pytest.mark.parametrize("config", [INTERPRETER, TritonConfig(16, 16, 4, 1, 2)], ids=["whole", "split"])
def test_the_kernel_keeps_what_the_reference_keeps(config: TritonConfig) -> None:
    query, key = torch.zeros(2, 20, 2, 8), torch.zeros(2, 40, 2, 8)
    value = torch.eye(40).view(1, 40, 1, 40).expand(2, 40, 2, 40)
    out, _ = forced(Inputs(query, key, value, seed=torch.tensor([9, 8])), config, dropout_p=0.4)
    assert torch.equal(out.transpose(1, 2) != 0, reference.dropout_keep(9, 8, 2, 2, 20, 40, 0.4))
    torch.testing.assert_close(out.max(), torch.tensor(1 / 40 / 0.6))


# Explicit positions: shards merged are the whole


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
@pytest.mark.parametrize(
    "options",
    [{"causal": True, "dropout_p": 0.4}, {"causal": False, "window": (11, 4), "dropout_p": 0.0}],
    ids=["causal with dropout", "window"],
)
def test_shards_merged_are_the_whole(layout: str, options: dict[str, Any]) -> None:
    query, key, value = qkv(B=1, Tq=36, Tk=40, Hq=2, Hkv=1)
    slopes, seed, ranks = normal(1, 2, seed=3).abs(), torch.tensor([5, 6]), 2
    common = {
        "q_len": 0,
        "k_len": 0,
        "softcap": 0.0,
        "scale": 0.25,
        "deterministic": False,
        "window": (-1, -1),
    } | options
    rows, columns = torch.arange(36), torch.arange(40)
    expected, expected_lse = reference.attention(
        query, key, value, causal=options["causal"], window=common["window"], alibi_slopes=slopes, scale=0.25,
        dropout_p=options["dropout_p"], seed=seed, batch_start=3,
    )  # fmt: skip
    for q_rank in range(ranks):
        mine = rows[q_rank::ranks] if layout == "striped" else rows.chunk(ranks)[q_rank]
        states = []
        for k_rank in range(ranks):
            theirs = columns[k_rank::ranks] if layout == "striped" else columns.chunk(ranks)[k_rank]
            step = ranks if layout == "striped" else 1
            positions = Positions(4 + int(mine[0]), step, int(theirs[0]), step, q_base=4)
            inputs = Inputs(query[:, mine], key[:, theirs], value[:, theirs], alibi_slopes=slopes, seed=seed)
            states.append(forward_state(inputs, positions=positions, batch_start=3, backend="triton", **common))
            assert states[-1][0].dtype is F32
        out, lse = merge(*zip(*states, strict=True))
        torch.testing.assert_close(out, expected[:, mine].float())
        torch.testing.assert_close(lse, expected_lse[..., mine].float())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
def test_a_partial_state_is_fp32_whatever_the_inputs(dtype: torch.dtype) -> None:
    query, key, value = (t.to(dtype) for t in qkv(Tq=5, Tk=9))
    options = {"q_len": 0, "k_len": 0, "causal": True, "window": (-1, -1), "softcap": 0.0, "scale": 0.25}
    out, lse = forward_state(
        Inputs(query, key, value), positions=Positions(-30, 1, 0, 1, -30), backend="triton", dropout_p=0.0,
        deterministic=False, **options,
    )  # fmt: skip
    assert (out.dtype, lse.dtype) == (F32, F32)
    assert not out.any() and (lse == -INF).all()  # every query stands before every key


# Layouts


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["heads_first", "qkv_packed", "strided", "offset", "expanded"])
def test_layouts(layout: Layout, dtype: torch.dtype) -> None:
    case = replace(SHAPE, B=2, layout=layout, dtype=dtype, causal=True, mask=(2, 1, 20, 40), bias=(2, 20, 40))
    check(case)
    check(Case(Hq=2, Hkv=1, lengths_q=(5, 12), lengths_k=(7, 12), layout=layout, dtype=dtype, tail=1))


def test_one_tensor_misaligned_among_aligned_ones() -> None:
    tensors = qkv()
    expected = attention(*tensors, causal=True, backend="triton")
    for moved in range(3):
        shifted = list(tensors)
        buffer = torch.full((tensors[moved].numel() + 1,), NAN)
        shifted[moved] = buffer[1:].view(tensors[moved].shape).copy_(tensors[moved])
        assert torch.equal(attention(*shifted, causal=True, backend="triton"), expected)


def test_odd_strides_of_rows_and_heads() -> None:
    query, key, value = qkv(B=2, Hkv=2)
    views = []
    for tensor in (query, key, value):
        batch, rows, heads, dim = tensor.shape
        buffer = torch.full((batch * rows * heads * (dim + 3) + 100,), NAN)
        view = buffer.as_strided(tensor.shape, (rows * heads * (dim + 3) + 7, heads * (dim + 3), dim + 3, 1), 5)
        views.append(view.copy_(tensor))
    out = attention(*views, window=(9, 9), backend="triton")
    assert torch.equal(out, attention(query, key, value, window=(9, 9), backend="triton"))


def test_mask_and_bias_rows_that_cannot_be_read_in_wide_words() -> None:
    query, key, value = qkv(Tk=40)
    mask, bias = normal(20, 41) > -0.5, normal(20, 41)
    options = [(mask[:, :40], bias[:, :40]), (mask[:, 1:], bias[:, 1:]), (mask.mT[:40].mT, bias.mT[:40].mT)]
    for its_mask, its_bias in options:
        expected = attention(query, key, value, mask=its_mask, bias=its_bias, backend="reference")
        out = attention(query, key, value, mask=its_mask, bias=its_bias, backend="triton")
        torch.testing.assert_close(out, expected)
        expanded = its_mask.expand(1, 2, 20, 40), its_bias.expand(1, 2, 20, 40)
        assert torch.equal(attention(query, key, value, mask=expanded[0], bias=expanded[1], backend="triton"), out)


# NaN and infinity in what nobody sees


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("config", [INTERPRETER, TritonConfig(16, 16, 4, 1, 2, True)], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["padding mask", "bias", "causal", "window"])
def test_poison_in_keys_and_values_that_nobody_sees(name: str, config: TritonConfig, poison: float) -> None:
    query, key, value = qkv(Tq=20, Tk=40)
    hidden = torch.zeros(40, dtype=torch.bool)
    options: dict[str, Any] = {}
    tiles: dict[str, Tensor] = {}
    if name in ("padding mask", "bias"):
        hidden[[0, 5, 31, 32, 39]] = True
        tiles = {"mask": ~hidden} if name == "padding mask" else {"bias": torch.zeros(40).masked_fill(hidden, -INF)}
    elif name == "causal":
        options = {"causal": True, "positions": Positions(3, 1, 0, 1, 3)}  # the last query stands at key 22
        hidden[23:] = True
    else:
        options = {"window": (4, 0)}
        hidden[:16] = True
    inputs = Inputs(query, key, value, **{k: v.view(1, 1, 1, 40) for k, v in tiles.items()})
    expected = forced(inputs, config, **options)
    key[:, hidden], value[:, hidden] = poison, poison
    found = forced(inputs, config, **options)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[0].isfinite().all()


@pytest.mark.parametrize("tiles", ["mask", "bias"])
def test_poison_in_a_value_that_a_tile_and_positions_hide_together(tiles: str) -> None:
    query, key, value = qkv(Tq=20, Tk=40)
    shown = torch.ones(20, 40, dtype=torch.bool)
    shown[10:, 30] = False  # the rows before see keys up to 29 at most
    options = {"mask": shown} if tiles == "mask" else {"bias": torch.zeros(20, 40).masked_fill(~shown, -INF)}
    expected = attention(query, key, value, causal=True, backend="triton", **options)
    value[:, 30] = NAN
    assert torch.equal(attention(query, key, value, causal=True, backend="triton", **options), expected)
    value[:, 15] = NAN
    assert attention(query, key, value, causal=True, backend="triton", **options).isnan().all(), "all rows see key 15"


def test_poison_in_a_query_that_sees_nothing() -> None:
    query, key, value = qkv(Tq=20, Tk=10)
    query[:, :10] = NAN
    out, lse = attention(query, key, value, causal=True, return_lse=True, backend="triton")
    assert not out[:, :10].any() and (lse[..., :10] == -INF).all() and out.isfinite().all()


@pytest.mark.parametrize("extreme", [torch.finfo(F32).min, torch.finfo(BF16).min, -2.4e38, 2.4e38], ids=str)
def test_a_row_of_finite_bias_is_seen_however_large(extreme: float) -> None:
    """The lowest float is how others hide padding: a row of nothing else is the mean of the values, not empty.

    Scores are in log2 units, so beyond 2.3e38 a bias counts as 2.3e38, which only the LSE shows.
    """
    query, key, value = qkv()
    bias = torch.zeros(20, 40)
    bias[3] = extreme
    out, lse = attention(query, key, value, bias=bias, return_lse=True, backend="triton")
    expected, expected_lse = attention(query, key, value, bias=bias, return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), (expected, expected_lse.clamp(-2.3e38, 2.3e38)))


# Packed sequences

PACKED = Case(Hq=2, Hkv=1, lengths_q=(5, 0, 20, 3), lengths_k=(9, 4, 40, 0), tail=3, seed=5)
PACKED_CASES: dict[str, Case] = {
    "plain": PACKED,
    "max lengths told": replace(PACKED, max_lengths=True),
    "causal with empty rows": replace(PACKED, lengths_q=(9, 1, 33), lengths_k=(5, 1, 20), causal=True),
    "window": replace(PACKED, window=(3, 2)),
    "alibi": replace(PACKED, alibi="H", causal=True),
    "alibi per sequence": replace(PACKED, alibi="BH"),
    "sink": replace(PACKED, sink=True),
    "softcap": replace(PACKED, softcap=1.5),
    "dropout": replace(PACKED, dropout_p=0.3),
    "everything": replace(
        PACKED, causal=True, window=(9, 9), alibi="BH", sink=True, softcap=1.5, dropout_p=0.3, dtype=BF16, D=24, Dv=8
    ),
    "no sequence": replace(PACKED, lengths_q=(), lengths_k=()),
    "nothing but empty sequences": replace(PACKED, lengths_q=(0, 0), lengths_k=(3, 0)),
    "no keys": replace(PACKED, lengths_q=(3, 4), lengths_k=(0, 0), sink=True, dropout_p=0.5),
}


@pytest.mark.parametrize("name", PACKED_CASES)
def test_packed_sequences(name: str) -> None:
    check(PACKED_CASES[name])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_either_dtype_and_poison_past_the_end(dtype: torch.dtype) -> None:
    query, key, value = normal(12, 2, 16), normal(14, 1, 16, seed=1), normal(14, 1, 16, seed=2)
    query[9:], key[10:], value[10:] = NAN, NAN, NAN
    cu_q, cu_k = offsets(2, 0, 7, dtype=dtype), offsets(4, 1, 5, dtype=dtype)
    with poisoned_memory():
        out, lse = varlen_attention(
            query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True, backend="triton"
        )
    expected, expected_lse = reference.varlen_attention(
        query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True
    )
    torch.testing.assert_close((out, lse), (expected.float(), expected_lse.float()))
    assert not out[9:].any() and (lse[:, 9:] == -INF).all()


# Regressions


@pytest.mark.parametrize("strided", ["sink", "alibi_slopes", "expanded slopes", "seed", "cu_seqlens"])
def test_small_tensors_may_be_strided(strided: str) -> None:
    """Kernels read them without strides; they were read as if contiguous."""
    heads = 4
    query, key, value = torch.randn(3, 2, 20, heads, 16)
    call: Any = attention
    options: dict[str, Any] = {
        "sink": {"sink": torch.randn(heads, 3)[:, 1]},
        "alibi_slopes": {"alibi_slopes": torch.rand(heads, 2).t()},
        "expanded slopes": {"alibi_slopes": torch.rand(heads).expand(2, heads)},
        "seed": {"seed": torch.tensor([1, 99, 2])[::2], "dropout_p": 0.4},
        "cu_seqlens": {},
    }[strided]
    if strided == "cu_seqlens":
        call, (query, key, value) = varlen_attention, (t.flatten(0, 1) for t in (query, key, value))
        offsets = torch.tensor([[0, 7], [9, 7], [40, 7]])[:, 0]
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    torch.testing.assert_close(
        call(query, key, value, **options, backend="triton"), call(query, key, value, **options, backend="eager")
    )


def test_offsets_beyond_the_pack_touch_nothing_outside_it() -> None:
    """What a compiled call cannot check is held within the pack by the kernel."""
    problem_rows = 10
    query = torch.randn(problem_rows, 2, 16)
    offsets = torch.tensor([0, 4, 99])
    inputs = Inputs(query, query, query, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    options = {"causal": False, "window": (-1, -1), "softcap": 0.0, "scale": 0.25, "dropout_p": 0.0}
    problem = state_problem(inputs, q_len=6, k_len=6, deterministic=False, **options)
    out, lse = forward(problem, inputs, TritonConfig(16, 16, 4, 1))
    held = torch.tensor([0, 4, problem_rows])
    expected = varlen_attention(query, query, query, cu_seqlens_q=held, cu_seqlens_k=held, return_lse=True)
    torch.testing.assert_close((out, lse), expected)
