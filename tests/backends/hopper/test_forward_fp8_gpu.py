"""Attention in FP8 on a GPU, by the Hopper kernel and the portable one, from the pre-pass to the result."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fp8_cases import CAUSAL, Fp8Call, compile_call, draw_call, kernel_of
from fp8_tolerance import check_fp8
from gpu_tools import BF16, captured, compile_ahead, give_memory_back, keep, without_synchronising
from quantize_fp8_cases import quantize

from stream_attention import attention, attention_fp8, explain, quantize_fp8, varlen_attention
from stream_attention.backends import BY_NAME
from stream_attention.backends.hopper import forward_fp8_sm90
from stream_attention.backends.hopper.fp8_tuning import GLUON, configure
from stream_attention.backends.reference import attention as reference
from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.gpu.fp8_call import Fp8Call as codes_call
from stream_attention.gpu.scratch import Outputs
from stream_attention_tools.testing.fp8 import attend_to_codes

__all__ = ["give_memory_back"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="it is for Hopper"
    ),
]

BACKENDS = ("gluon", "triton")
LOG2E = 1.4426950408889634
PROBLEMS = {"gluon": 200, "triton": 60}
NAMED = {
    "one query": Fp8Call(Tq=1, Tk=1000),
    "one key": Fp8Call(Tk=1),
    "rows that see nothing": Fp8Call(Tq=300, Tk=100, window=CAUSAL),
    "a window between blocks": Fp8Call(Tq=700, Tk=900, window=(100, 30)),
    "many heads of one": Fp8Call(Hq=16, Hkv=1, window=CAUSAL),
    "lengths at the edges of blocks": Fp8Call(lengths=((1, 129), (128, 128), (0, 5), (127, 0), (129, 1), (64, 192))),
    "causal packs": Fp8Call(lengths=((300, 300), (7, 400), (500, 129)), window=CAUSAL, D=64),
    "wide": Fp8Call(D=256, Tq=500, Tk=1300, window=CAUSAL),
    "rotated": Fp8Call(kind="outliers", rotate=True, window=CAUSAL),
    "large scores": Fp8Call(kind="large scores"),
    "rising scores": Fp8Call(kind="rising scores", Tk=900),
    "jumping scores": Fp8Call(kind="jumping scores", Tq=700, Tk=700, window=CAUSAL),
    "jumping scores in a window": Fp8Call(kind="jumping scores", D=64, Tq=500, Tk=777, window=(300, 50)),
    "jumping scores before an odd edge": Fp8Call(kind="jumping scores", Tq=300, Tk=777, window=CAUSAL),
    "jumping scores in packs": Fp8Call(kind="jumping scores", D=64, lengths=((300, 700), (7, 400), (0, 9), (500, 129))),
}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    calls = [(call, name) for name in BACKENDS for call in (*NAMED.values(), *map(draw_call, range(PROBLEMS[name])))]
    few = {(kernel_of(call), name): (call, name) for call, name in calls}
    compile_ahead(compile_call, *zip(*few.values(), strict=True))


def compare(call: Fp8Call, backend: str) -> float:
    query, key, value, *cu = call.tensors()
    problem = call.stated(query, key, value, *cu)
    options = {"window": call.window, "scale": problem.scale, "return_lse": True, "backend": backend}
    if call.lengths:
        packs = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
        packs |= {"max_seqlen_q": problem.q_len, "max_seqlen_k": problem.k_len}
        out, lse = varlen_attention(query, key, value, **packs, precision="fp8", rotate=call.rotate, **options)
    else:
        out, lse = attention(query, key, value, precision="fp8", rotate=call.rotate, **options)
    asked = problem.q_len, problem.k_len, call.rotate, problem.left
    queries, keys = quantize(query, key, value, *cu, *asked)
    return check_fp8(out, lse, problem, queries, keys, *cu).worst


@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize("name", NAMED)
def test_named_calls(name: str, by: str) -> None:
    compare(NAMED[name], by)


@pytest.mark.parametrize("by", BACKENDS)
def test_random_problems(by: str) -> None:
    worst, failed = 0.0, []
    for seed in range(PROBLEMS[by]):
        try:
            worst = max(worst, compare(draw_call(seed), by))
        except AssertionError as error:
            failed.append(f"{seed}: {error}"[:300])
    keep(
        {"problems": PROBLEMS[by], "failed": len(failed), "worst": worst},
        f"random problems, {by}",
        of="gluon_forward_fp8",
    )
    assert not failed, "\n".join(failed)


def test_auto_takes_the_hopper_kernel() -> None:
    query, key, value, *_ = Fp8Call().tensors()
    assert explain(query, key, value, precision="fp8").backend == "gluon"


# Sums over many keys


@pytest.mark.parametrize("D", [64, 128, 256])
def test_sums_over_64k_keys_are_exact(D: int) -> None:
    """Values of mean 2: sums that the matrix units keep to themselves lose a share of every block."""
    call = Fp8Call(D=D, B=1, Tq=128, Tk=65536, Hq=1, Hkv=1)
    query, key, value, *_ = call.tensors()
    value = value + 2.0
    problem = call.stated(query, key, value, None, None)
    queries, keys = quantize(query, key, value)
    exact, _ = reference_fp8.attention(problem, queries, keys, rounded=False)

    def bias(two_level: bool) -> float:
        alone = GLUON[D]._replace(two_level=False, apart=False, parts=1, conditional_rescale=False, sums_first=False)
        config = GLUON[D] if two_level else alone
        out, _ = attend_to_codes(BY_NAME["gluon"], problem, queries, keys, None, None, config)
        return ((out.double() - exact).mean() / exact.mean()).item()

    two, one = bias(True), bias(False)
    keep({"blocks added in fp32": two, "left to the matrix units": one}, f"bias at 64k keys, d{D}", "gluon_forward_fp8")
    assert abs(two) < 2e-3 and abs(one) > 10 * abs(two)


# Tops that are too low


def lost_tiles(call: Fp8Call, *tensors: Tensor, **config: Any) -> tuple[int, Tensor, Tensor]:
    """How many tiles are computed again, out and lse; of other tensors, by a kernel configured otherwise."""
    query, key, value, *cu = tensors or call.tensors()
    cu = cu or [None, None]
    problem = call.stated(query, key, value, *cu)
    queries, keys = quantize(query, key, value, *cu, problem.q_len, problem.k_len)
    out, lse = Outputs.of(problem, queries.rows).allocate(queries.scales)
    words = lse.new_zeros(1 + problem.num_sms, dtype=torch.int32)
    chosen = configure(problem)._replace(**config)
    ends, outputs = (cu[0], cu[1]), Outputs(out, lse, False)
    launch = forward_fp8_sm90.bind_fp8(codes_call(problem, queries, keys, ends, chosen, outputs, words, out.device))
    scales = keys.scales.view(torch.int64)
    launch(queries.query, keys.key, keys.value, queries.scales, scales, *cu, out, lse, words)
    assert not (words[1:] % 16).any(), "a tile is lost still"
    return int((words[1:] // 16).sum()), out, lse


@pytest.mark.parametrize(
    "call",
    [
        Fp8Call(Tq=3000, Tk=3000, Hq=16),
        Fp8Call(Tq=1000, Tk=1077, window=CAUSAL),
        Fp8Call(D=64, Tq=1000, Tk=777, window=(100, 30)),
        Fp8Call(D=64, lengths=((300, 700), (7, 400), (0, 9), (500, 129)), window=CAUSAL),
        Fp8Call(kind="large scores", Tq=500, Tk=2000),
    ],
    ids=["full", "causal", "window", "packed", "large scores"],
)
def test_no_tile_is_computed_again_without_need(call: Fp8Call) -> None:
    assert lost_tiles(call)[0] == 0


@pytest.mark.parametrize("D", [64, 128])
def test_tiles_whose_weights_fp32_cannot_hold_are_computed_again(D: int) -> None:
    """Programs have three tiles and more, of which any may be lost: first, last, one after the other."""
    call = Fp8Call(D=D, Tq=3000, Tk=640, Hq=16, Hkv=2, kind="jumping scores")
    size = GLUON[D].warpgroups
    loud = [any(group % 3 == 0 for group in range(first, min(first + size, 47))) for first in range(0, 47, size)]
    count, *results = lost_tiles(call)
    assert count == sum(loud) * 2 * 16, "each once that has one of the loud groups of 64 queries"
    for one in range(1, 3):
        again = lost_tiles(call, q_slots=one)
        assert again[0] == count and all(map(torch.equal, again[1:], results)), f"{one} slots of Q"
    query, key, value, *_ = call.tensors()
    first = key.shape[1] // 4
    scores = torch.einsum("bthd,bshd->bhts", query[:, :64].float(), key.float().repeat_interleave(8, 2))
    jump = (scores[..., :first].amax(-1) - scores[..., -128:].amax(-1)) * (LOG2E / D**0.5)
    assert GLUON[D].conditional_rescale and jump.min() > 150, "no tile overflows"
    compare(call, "gluon")
    run = partial(attention, query, key, value, precision="fp8", backend="gluon", return_lse=True)
    out, lse = run()
    for _ in range(20):
        again = run()
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    # Whether other heads lose tiles changes nothing here.
    query[:, :, 1::2] *= 0.01
    mixed = run()
    assert torch.equal(mixed[0][:, :, ::2], out[:, :, ::2]) and torch.equal(mixed[1][:, ::2], lse[:, ::2])


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "pack"])
def test_rows_of_the_next_sequence_lose_no_tile(packed: bool) -> None:
    """A tile of 192 rows reaches into the next sequence, whose queries are loud beside keys of this one that jump."""
    call = Fp8Call(D=64, B=2, Tq=128, Tk=640, kind="jumping scores")
    query, key, value, *_ = call.tensors()
    query[1], key[1] = query[0] * 100, key[1] * 1e-4
    query[0] *= 0.01

    def run(count: int) -> tuple[int, Tensor]:
        tensors = [t[:count].contiguous() for t in (query, key, value)]
        if packed:
            starts = [n * torch.arange(count + 1, device="cuda", dtype=torch.int32) for n in (128, 640)]
            tensors = [*(t.flatten(0, 1) for t in tensors), *starts]
        lost, out, _ = lost_tiles(replace(call, B=count, lengths=((128, 640),) * count * packed), *tensors)
        return lost, out.view(count, *query.shape[1:])[0]

    as_one = torch.cat((query[:1], query[1:]), 1), key[:1].contiguous(), value[:1].contiguous()
    assert lost_tiles(replace(call, B=1, Tq=256), *as_one)[0] > 0, "they would"
    both, alone = run(2), run(1)
    assert both[0] == alone[0] == 0 and torch.equal(both[1], alone[1])


@pytest.mark.parametrize("D", [64, 128])
def test_a_key_that_is_nan_reaches_who_sees_it(D: int) -> None:
    query, key, value, *_ = Fp8Call(D=D, Tq=700, Tk=700).tensors()
    key[:, 300] = torch.nan
    out, lse = attention(query, key, value, causal=True, precision="fp8", backend="gluon", return_lse=True)
    assert out[:, :300].isfinite().all() and lse[..., :300].isfinite().all()
    assert out[:, 300:].isnan().all() and lse[..., 300:].isnan().all()


# What is promised of every kernel


@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_bit_equal_from_run_to_run_and_in_any_batch(D: int, by: str) -> None:
    query, key, value, *_ = Fp8Call(D=D, B=5, Tq=1000, Tk=1000, Hq=16, Hkv=4).tensors()
    run = partial(attention, causal=True, precision="fp8", backend=by)
    first = run(query, key, value)
    for _ in range(20):
        assert torch.equal(run(query, key, value), first)
    order = torch.tensor([3, 0, 4, 2, 1], device="cuda")
    assert torch.equal(run(query[order], key[order], value[order]), first[order])


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_keys_that_are_codes_already_give_the_same_bits(rotate: bool) -> None:
    query, key, value, *_ = Fp8Call(Tq=700, Tk=900).tensors()
    whole = attention(query, key, value, causal=True, precision="fp8", rotate=rotate, return_lse=True)
    parts = attention_fp8(query, quantize_fp8(key, value, rotate=rotate), causal=True, return_lse=True)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_in_a_graph_without_synchronising() -> None:
    query, key, value, *_ = Fp8Call(Tq=700, Tk=900).tensors()
    run = partial(attention, query, key, value, causal=True, precision="fp8")
    expected = run()
    with without_synchronising():
        run()
    graph, out = captured(run)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
    query.copy_(query.flip(1))
    graph.replay()
    assert torch.equal(out, run())


def test_two_streams_at_once() -> None:
    query, key, value, *_ = Fp8Call(B=4, Tq=3000, Tk=3000).tensors()
    expected = attention(query, key, value, precision="fp8")
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    torch.cuda.synchronize()
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(attention(query, key, value, precision="fp8"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("by", BACKENDS)
def test_what_no_query_sees_does_not_exist(by: str) -> None:
    query, key, value, *_ = Fp8Call(Tq=100, Tk=600, window=(50, 0)).tensors()
    clean = attention(query, key, value, window=(50, 0), precision="fp8", backend=by)
    key[:, :440], value[:, :440] = torch.nan, torch.inf
    out = attention(query, key, value, window=(50, 0), precision="fp8", backend=by)
    assert torch.isfinite(clean).all() and torch.equal(out, clean)


def test_rotation_helps_against_outliers() -> None:
    query, key, value = (
        (torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)).to("cuda", BF16)
        for shape in [(2, 1000, 4, 128)] * 3
    )
    exact, _ = reference.attention(query, key, value)
    errors = [
        ((attention(query, key, value, precision="fp8", rotate=rotate) - exact).norm() / exact.norm()).item()
        for rotate in (False, True)
    ]
    keep(
        {"plain": errors[0], "rotated": errors[1]},
        "error with outliers in one number of a thousand",
        "gluon_forward_fp8",
    )
    assert errors[1] < errors[0] < 0.5


@pytest.mark.usefixtures("give_memory_back")
def test_more_than_2_to_the_31_codes() -> None:
    shape = 17, 8192, 128, 128
    query, key, value = (torch.randn(shape, device="cuda", dtype=BF16) for _ in range(3))
    out = attention(query, key, value, causal=True, precision="fp8")
    for entry in (0, 16):
        part = slice(entry, entry + 1)
        alone = attention(query[part], key[part], value[part], causal=True, precision="fp8")
        assert torch.equal(out[part], alone)
