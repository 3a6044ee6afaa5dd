"""A repeated call on a GPU: equal to the first, in the current stream, in graphs, and seen by Triton's hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import attention
from stream_attention.ops import recall

pytestmark = pytest.mark.gpu


def tensors(T: int = 300, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return list(torch.randn(3, 2, T, 8, 64, device="cuda", generator=generator).bfloat16().unbind())


@pytest.fixture(autouse=True)
def _forget() -> None:
    recall._known.clear()


def ordinary(*qkv: Tensor, **options: Any) -> Tensor:
    """The same call in a way that is never repeated: a seed is given, though nothing is dropped."""
    return attention(*qkv, **options, seed=0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (64, 0)}, {"softcap": 5.0}], ids=str)
def test_a_repeat_is_equal(options: dict[str, Any]) -> None:
    attention(*tensors(), **options)
    assert len(recall._known) == 1
    for seed in range(1, 4):
        qkv = tensors(seed=seed)
        assert torch.equal(attention(*qkv, **options), ordinary(*qkv, **options))
    assert len(recall._known) == 1


def test_one_query_against_many_keys() -> None:
    query, (_, key, value) = tensors()[0][:, :1], tensors(T=9000)
    first = attention(query, key, value)
    assert len(recall._known) == 1
    assert torch.equal(attention(query, key, value), first)


@pytest.mark.parametrize("lengths", [(300, 300), (1, 9000)], ids=["whole", "split"])
def test_what_is_remembered_keeps_no_memory(lengths: tuple[int, int]) -> None:
    attention(*torch.randn(3, 1, 8, 2, 64, device="cuda").bfloat16().unbind())  # whatever the first call ever keeps
    before = torch.cuda.memory_allocated()
    query, (_, key, value) = tensors(T=lengths[0])[0], tensors(T=lengths[1])
    attention(query, key, value)
    del query, _, key, value
    assert len(recall._known) == 2 and torch.cuda.memory_allocated() == before


def test_it_runs_in_the_current_stream() -> None:
    q, k, v = tensors()
    expected = attention(q, k, v)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = q * 2.0
        out = attention(late, k, v)  # queued behind the sleep, or it would read what is not there yet
        again = attention(q, k, v)
    side.synchronize()
    assert torch.equal(again, expected)
    assert torch.equal(out, ordinary(q * 2.0, k, v))


def test_it_replays_in_a_graph() -> None:
    q, k, v = tensors()
    attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    q.copy_(tensors(seed=1)[0])
    graph.replay()
    assert torch.equal(out, ordinary(q, k, v))


def test_hooks_of_a_profiler_see_the_launch() -> None:
    import triton

    q, k, v = tensors()
    attention(q, k, v)
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        attention(q, k, v)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["_forward_kernel"]


def test_another_layout_after_a_repeat_is_not_taken_for_it() -> None:
    q, k, v = tensors()
    attention(q, k, v)
    shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    for other in (shifted, strided, q[:1].expand(2, -1, -1, -1)):
        assert torch.equal(attention(other, k, v), ordinary(other, k, v))
