"""A repeated call computes what the first one did. Run with TRITON_INTERPRET=1; a GPU runs test_recall_gpu.py."""

from __future__ import annotations

import gc
import timeit
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import attention
from stream_attention.backends import interpreting
from stream_attention.ops import recall
from stream_attention.ops.attention import prepare_attention
from stream_attention.ops.library import problem_of

pytestmark = pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these")


def tensors(Tq: int = 20, Tk: int = 20, heads: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, Tq, heads, 16, generator=generator).half()
    key, value = (torch.randn(2, Tk, 2, 16, generator=generator).half() for _ in range(2))
    return query, key, value


@pytest.fixture(autouse=True)
def _forget() -> None:
    recall._known.clear()


def ordinary(*qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The same call in a way that is never repeated: a seed is given, though nothing is dropped."""
    return attention(*qkv, **options, seed=0, return_lse=True, backend="triton")


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (5, 2)}, {"softcap": 2.0}, {"scale": 0.5}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_the_second_call_is_a_repeat_and_equal(options: dict[str, Any]) -> None:
    attention(*tensors(), **options, backend="triton")
    assert len(recall._known) == 1
    fresh = tensors(seed=1)
    out, lse = attention(*fresh, **options, return_lse=True, backend="triton")
    assert len(recall._known) == 1
    expected_out, expected_lse = ordinary(*fresh, **options)
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


def test_a_repeat_checks_and_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attention(*tensors(), backend="triton")
    with monkeypatch.context() as patched:
        patched.setattr("stream_attention.ops.attention.prepare_attention", None)  # calling it would raise
        out = attention(*tensors(seed=1), backend="triton")
    assert torch.equal(out, ordinary(*tensors(seed=1))[0])


def test_splits_are_repeated_with_their_merge() -> None:
    qkv = tensors(Tq=1, Tk=600)
    first = attention(*qkv, backend="triton")
    assert len(recall._known) == 1
    assert torch.equal(attention(*qkv, backend="triton"), first)
    assert torch.equal(ordinary(*qkv)[0], first)


def test_strided_views_are_read_where_they_lie() -> None:
    packed = torch.randn(2, 20, 3, 4, 16).half()
    views = packed.unbind(2)
    first = attention(*views, backend="triton")
    packed.mul_(-1)
    again = attention(*views, backend="triton")
    assert len(recall._known) == 1 and not torch.equal(first, again)
    assert torch.equal(again, ordinary(*views)[0])


@pytest.mark.parametrize("lengths", [(20, 20), (1, 600)], ids=["whole", "split"])
def test_what_is_remembered_keeps_no_tensor_alive(lengths: tuple[int, int]) -> None:
    qkv = tensors(*lengths)
    out, lse = attention(*qkv, return_lse=True, backend="triton")
    watched = [weakref.ref(t) for t in (*qkv, out, lse)]
    assert len(recall._known) == 1
    del qkv, out, lse
    gc.collect()
    assert [reference() for reference in watched] == [None] * 5


def test_results_are_fresh_memory_each_time() -> None:
    qkv = tensors()
    outs = [attention(*qkv, backend="triton") for _ in range(3)]
    assert len({out.data_ptr() for out in outs}) == 3


def test_empty_calls_give_empty_results_again() -> None:
    q, k, v = tensors()
    for _ in range(2):
        assert attention(q[:0], k[:0], v[:0], backend="triton").shape == (0, 20, 4, 16)
        assert not attention(q, k[:, :0], v[:, :0], backend="triton").any()
    assert not recall._known


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "MOST", 3)
    for length in range(1, 6):
        q, k, v = tensors(Tq=length)
        attention(q, k, v, backend="triton")
        assert len(recall._known) <= 3


@pytest.mark.serial
def test_a_repeat_costs_the_host_less_than_half_of_checking_and_stating_the_call() -> None:
    """Without the launch. A third here; on an H200 the bar is a C++ op's time (tests/test_results.py)."""
    qkv = tensors()
    attention(*qkv, backend="triton")
    (facts,) = recall._known
    recall._known[facts] = lambda query, key, value, return_lse: query

    def ordinary() -> object:
        plain = (False, None, None, None, None, None, 0.0, None, 0.0, None, None, False, "triton")
        return problem_of(prepare_attention(*qkv, *plain))

    def best(function: Callable[[], object]) -> float:
        return min(timeit.repeat(function, number=2000, repeat=7))

    with torch.no_grad():
        assert best(lambda: attention(*qkv, backend="triton")) < 0.5 * best(ordinary)
