"""Few queries against many keys by the decode kernel, on a GPU: what `attention` does for a model that generates."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from few_cases import BASE, NAMED
from gpu_tools import BF16, captured, compile_ahead, keep, normal

from stream_attention import ContiguousKV, attention, decode_attention, explain
from stream_attention.gpu.decode_tuning import DecodeConfig
from stream_attention_tools.offline import launching_for
from stream_attention_tools.testing import Case, check_case
from stream_attention_tools.testing.inputs import make

pytestmark = pytest.mark.gpu

CASES = {name: replace(case, device="cuda", backward=False) for name, case in NAMED.items()}
LONG = {
    "8k": replace(CASES["wide"], B=1, Tk=8192, Hq=32, Hkv=8),
    "8 rows of 32k": replace(CASES["wide"], B=8, Tk=32_768, Hq=32, Hkv=8),
}


def compile_case(case: Case) -> str:
    """Compile what a case launches; what went wrong, or nothing."""
    try:
        query, key, value, options = make(case)
        with launching_for(90, lambda form: form.compile()):
            attention(query, key, value, **options, backend="triton")
    except Exception as error:
        return f"{case!r}: {type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_ahead(compile_case, [*CASES.values(), LONG["8k"]])


@pytest.mark.parametrize("name", CASES)
def test_agreement(name: str) -> None:
    query, key, value, options = make(CASES[name])
    assert isinstance(explain(query, key, value, **options).config, DecodeConfig)
    assert check_case(CASES[name], "triton").worst <= 1


@pytest.mark.parametrize("name", LONG)
def test_it_is_what_a_cache_gives(name: str) -> None:
    query, key, value, _ = make(LONG[name])
    out, lse = attention(query, key, value, causal=True, return_lse=True)
    theirs, their_lse = decode_attention(query, ContiguousKV(key, value), return_lse=True)
    assert torch.equal(out, theirs) and torch.equal(lse, their_lse)


def test_a_model_that_generates_gets_each_of_its_steps() -> None:
    """Keys are new tensors, of one more token, at every step, and layers of a step repeat the call of the first."""
    store = normal(2, 2, 700, 2, 64)
    for tokens in range(500, 560):
        for layer in range(3):
            query, key, value = normal(2, 1, 4, 64, seed=layer), *(x[:, :tokens].clone() for x in store + layer)
            with torch.no_grad():
                out = attention(query, key, value, causal=True)
            assert torch.equal(out, decode_attention(query, ContiguousKV(key, value)))


def test_a_repeat_returns_the_lse_if_it_is_asked_for() -> None:
    query, key, value = normal(1, 1, 8, 64), *normal(2, 1, 900, 2, 64)
    with torch.no_grad():
        first = attention(query, key, value, return_lse=True)
        again = attention(query, key, value, return_lse=True)
        alone = attention(query, key, value)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert torch.equal(alone, first[0])


def test_a_graph_replays() -> None:
    query, key, value = normal(1, 1, 8, 64), *normal(2, 1, 900, 2, 64)
    with torch.no_grad():
        graph, out = captured(lambda: attention(query, key, value))
        query.copy_(normal(*query.shape, seed=5))
        graph.replay()
        assert torch.equal(out, attention(query, key, value))


def test_a_repeat_costs_the_host_little() -> None:
    """In a model of 32 layers this is the host's whole part of attention; kept with the results."""
    query, key, value, _ = make(replace(BASE, device="cuda", B=1, Tk=512, Hq=32, Hkv=8, D=128, Dv=128, dtype=BF16))
    with torch.no_grad():
        for _ in range(5):
            attention(query, key, value, causal=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(500):
            attention(query, key, value, causal=True)
        taken = (time.perf_counter() - began) / 500 * 1e6
        torch.cuda.synchronize()
    keep({"microseconds": round(taken, 1)}, "host time of a repeated call", of="few")
    assert taken < 60, f"{taken:.0f} us"
