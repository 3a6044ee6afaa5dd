"""The Gluon forward on a Hopper GPU: random problems against fp64, and what only a GPU shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import attention, explain, varlen_attention
from stream_attention.backends import BY_NAME
from stream_attention.dispatch import launch_cache
from stream_attention_tools.testing import Case, check_case
from stream_attention_tools.testing.inputs import stated

pytest.importorskip("triton")

from gpu_tools import BF16, F16, captured, keep, normal, qkv, without_synchronising
from random_problems import Drawn, draw, run_all

pytestmark = pytest.mark.gpu

BASE = Case(B=2, Tq=300, Tk=500, Hq=4, Hkv=2, D=128, Dv=128, dtype=BF16, device="cuda", causal=True, backward=False)
PACKED = replace(BASE, lengths_q=(130, 64, 0, 257, 1, 500), lengths_k=(100, 300, 50, 257, 0, 700), tail=5)
NAMED: dict[str, Case] = {
    "d64": replace(BASE, D=64, Dv=64),
    "d64 full": replace(BASE, D=64, Dv=64, causal=False),
    "d256": replace(BASE, D=256, Dv=256),
    "d256 full": replace(BASE, D=256, Dv=256, causal=False),
    "d96": replace(BASE, D=96, Dv=96),
    "d192 and 128": replace(BASE, D=192, Dv=128),
    "fp16": replace(BASE, dtype=F16),
    "aligned": replace(BASE, Tq=512, Tk=512),
    "aligned d64": replace(BASE, Tq=640, Tk=640, D=64, Dv=64),
    "aligned d64, long": replace(BASE, Tq=1300, Tk=1300, D=64, Dv=64),
    "aligned d256": replace(BASE, Tq=512, Tk=512, D=256, Dv=256),
    "aligned d256 dropout": replace(BASE, Tq=300, Tk=300, D=256, Dv=256, dropout_p=0.3),
    "an aligned chunk": replace(BASE, Tq=200, Tk=456),
    "aligned, no row sees all": replace(BASE, Tq=456, Tk=200),
    "full": replace(BASE, causal=False),
    "one row": replace(BASE, Tq=1, Tk=1),
    "more queries than keys": replace(BASE, Tq=500, Tk=100),
    "window": replace(BASE, causal=False, window=(70, 33)),
    "left edge": replace(BASE, causal=False, window=(70, -1)),
    "a window behind which keys are unseen": replace(BASE, Tq=100, Tk=900, window=(50, 0)),
    "a window before all keys": replace(BASE, Tq=400, Tk=10, causal=False, window=(0, 0)),
    "softcap": replace(BASE, softcap=5.0),
    "alibi": replace(BASE, alibi="H"),
    "sink": replace(BASE, sink=True),
    "dropout": replace(BASE, dropout_p=0.3),
    "dropout d64": replace(BASE, dropout_p=0.3, D=64, Dv=64),
    "dropout d256": replace(BASE, dropout_p=0.3, D=256, Dv=256),
    "everything": replace(BASE, window=(200, 0), softcap=5.0, alibi="BH", sink=True, dropout_p=0.3),
    "packed": replace(PACKED, causal=False),
    "packed causal": PACKED,
    "packed d64": replace(PACKED, D=64, Dv=64),
    "packed d256": replace(PACKED, D=256, Dv=256),
    "packed d256 window": replace(PACKED, D=256, Dv=256, window=(70, 0)),
    "packed d192 and 128": replace(PACKED, D=192, Dv=128),
    "packed beside tiles": replace(
        PACKED,
        D=64,
        Dv=64,
        Hq=16,
        Hkv=4,
        lengths_q=(0, 1, 63, 64, 65, 192, 193),
        lengths_k=(5, 1, 63, 64, 65, 192, 193),
    ),
    "heads first": replace(BASE, layout="heads_first"),
    "scale 0": replace(BASE, scale=0.0),
    "a negative scale": replace(BASE, scale=-0.2),
}


@pytest.fixture(scope="module", autouse=True)
def drawn() -> Drawn:
    if reasons := BY_NAME["gluon"].why_not(_problem()):
        pytest.skip("; ".join(reasons))
    return draw(problems=5000, templates=40, variants=64, also=list(NAMED.values()), backward=False, backend="gluon")


def _problem() -> Any:
    from stream_attention.ops.explain import problems_of_call

    return problems_of_call(*qkv(D=128), causal=True)[0][0]


def ours(*tensors: Tensor, **options: Any) -> Any:
    return attention(*tensors, **options, backend="gluon")


def test_random_problems_agree_within_what_is_earned(drawn: Drawn) -> None:
    summary = run_all(drawn)
    keep(summary, "random problems", of="gluon_forward")
    assert not summary["failed"], "\n\n".join(summary["failures"])


@pytest.mark.parametrize("name", NAMED)
def test_named_problems(name: str) -> None:
    check_case(NAMED[name], "gluon")


def test_auto_takes_it_for_long_calls_and_triton_for_short_ones() -> None:
    assert explain(*qkv(B=4, Tq=2048, Tk=2048, Hq=16, Hkv=16, D=128), causal=True).backend == "gluon"
    assert explain(*qkv(D=128), causal=True).backend == "triton"


def test_two_hundred_runs_are_bit_equal() -> None:
    query, key, value = qkv(B=4, Tq=1000, Tk=1500, Hq=8, Hkv=2, D=128)
    out, lse = ours(query, key, value, causal=True, return_lse=True)
    for _ in range(200):
        again, its_lse = ours(query, key, value, causal=True, return_lse=True)
        assert torch.equal(again, out) and torch.equal(its_lse, lse)


def test_a_repeat_is_the_first_call() -> None:
    launch_cache.clear()
    query, key, value = qkv(D=128)
    first, lse = ours(query, key, value, causal=True, return_lse=True)
    assert launch_cache.size() == 1
    again = ours(query, key, value, causal=True)
    fresh = normal(*query.shape, seed=9)
    assert torch.equal(again, first)
    assert torch.equal(ours(fresh, key, value, causal=True), ours(fresh, key, value, causal=True, seed=0))
    assert torch.equal(ours(query, key, value, causal=True, return_lse=True)[1], lse)


def test_two_streams_at_once() -> None:
    problems = [qkv(B=2, Tq=1500, Tk=1500, Hq=8, Hkv=8, D=dim) for dim in (128, 64)]
    expected = [ours(*tensors, causal=True) for tensors in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    outs: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for tensors, stream, its in zip(problems, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                its.append(ours(*tensors, causal=True))
    torch.cuda.synchronize()
    for its, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in its)


def test_it_replays_in_a_graph_and_does_not_synchronise() -> None:
    query, key, value = qkv(D=128)
    ours(query, key, value, causal=True)
    with without_synchronising():
        ours(query, key, value, causal=True)
    graph, out = captured(lambda: ours(query, key, value, causal=True))
    query.copy_(normal(*query.shape, seed=7))
    for _ in range(3):
        graph.replay()
    assert torch.equal(out, ours(query, key, value, causal=True))


def test_one_graph_serves_packs_of_other_lengths() -> None:
    query, key, value = normal(900, 4, 128), normal(900, 2, 128, seed=1), normal(900, 2, 128, seed=2)
    offsets = torch.tensor([0, 300, 500, 900], dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        lengths = {"max_seqlen_q": 900, "max_seqlen_k": 900}
        return varlen_attention(
            query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, backend="gluon", **lengths
        )

    graph, out = captured(call)
    offsets.copy_(torch.tensor([0, 1, 899, 900], dtype=torch.int32, device="cuda"))
    graph.replay()
    assert torch.equal(out, call())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_partial_state_is_the_output_before_it_is_rounded(dim: int) -> None:
    query, key, value = qkv(B=2, Tq=500, Tk=700, Hq=4, Hkv=2, D=dim)
    rounded, lse = ours(query, key, value, causal=True, return_lse=True)
    case = replace(BASE, Tq=500, Tk=700, D=dim, Dv=dim)
    problem, inputs = stated(case, {"query": query, "key": key, "value": value}, {"causal": True})
    problem = problem.replace(partial=True)
    state, its_lse = BY_NAME["gluon"].forward(problem, inputs, BY_NAME["gluon"].configure(problem))
    assert state.dtype is torch.float32 and torch.equal(state.to(BF16), rounded) and torch.equal(its_lse, lse)


def test_nan_in_keys_that_nobody_sees_stays_there() -> None:
    query, key, value = qkv(Tq=100, Tk=900, D=128)
    hidden = slice(0, 900 - 100 - 50)
    clean = ours(query, key, value, causal=True, window=(50, 0))
    key[:, hidden], value[:, hidden] = float("nan"), float("nan")
    assert torch.equal(ours(query, key, value, causal=True, window=(50, 0)), clean)


def test_nan_in_a_key_that_is_seen_shows_in_the_output_and_the_lse() -> None:
    query, key, value = qkv(Tq=300, Tk=300, D=128)
    clean, clean_lse = ours(query, key, value, causal=True, return_lse=True)
    key[:, 200] = float("nan")
    out, lse = ours(query, key, value, causal=True, return_lse=True)
    assert torch.equal(out[:, :200], clean[:, :200]) and torch.equal(lse[..., :200], clean_lse[..., :200])
    assert out[:, 200:].isnan().all() and lse[..., 200:].isnan().all()


def test_a_call_of_more_elements_than_32_bits() -> None:
    many = torch.empty(17, 128 * 1024, 8, 128, dtype=BF16, device="cuda")  # 2.3e9 elements
    many[-1, -1024:] = normal(1024, 8, 128, seed=3)
    last = many[-1:, -1024:]
    copy = last.clone()
    assert torch.equal(ours(last, last, last, causal=True), ours(copy, copy, copy, causal=True))
    huge = many.as_strided((17, 1024, 8, 128), many.stride(), 127 * 1024 * 8 * 128)  # every last 1024 rows
    out = ours(huge, huge, huge, causal=True)
    assert torch.equal(out[-1:], ours(copy, copy, copy, causal=True))


def test_what_tma_cannot_read_is_refused_by_name_and_left_to_triton() -> None:
    query, key, value = qkv(B=4, Tq=2048, Tk=2048, Hq=16, Hkv=16, D=128)
    odd = torch.empty(query.numel() + 1, dtype=BF16, device="cuda")[1:].view(query.shape).copy_(query)
    assert explain(odd, key, value).backend == "triton"
    with pytest.raises(ValueError, match="16-byte aligned"):
        ours(odd, key, value)
    torch.testing.assert_close(attention(odd, key, value), attention(query, key, value), rtol=2e-2, atol=2e-2)
