"""paged_attention on a GPU: against fp64, in graphs, without synchronisation."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gpu_tools import captured, give_memory_back, without_synchronising
from paged_cases import check, draw

from stream_attention import paged_attention, paged_plan

__all__ = ["give_memory_back"]

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed: int) -> None:
    check(draw(seed, (torch.float16, BF16)[seed % 2], longest=300), "triton", "cuda", listed=seed % 3 == 0)


def test_tokens_of_long_and_of_short_requests() -> None:
    lengths = [5, 9000, 1, 700, 33000, 64]
    check(draw(30, BF16, q_lens=[1] * 6, k_lens=lengths, window=None), "triton", "cuda")


def test_prompts_and_tokens_in_one_call() -> None:
    check(draw(31, BF16, q_lens=[700, 1, 1, 0, 90], k_lens=[2000, 3000, 1, 8, 90], window=None), "triton", "cuda")


def test_a_graph_serves_other_requests_than_it_was_captured_with() -> None:
    """Of as many queries in all; offsets, lengths, pages and tokens are read when it runs."""
    case, other = (
        draw(32, BF16, q_lens=q_lens, k_lens=[90, 70, 33], window=None, alibi_slopes=None, sink=None).to("cuda")
        for q_lens in ([20, 1, 3], [2, 2, 20])
    )
    tensors = [t.clone() for t in case.tensors]
    pages = case.pages | {"max_seqlen_q": 20}
    graph, out = captured(lambda: paged_attention(*tensors, **pages, **case.options))
    for held, new in zip((*tensors, case.table), (*other.tensors, other.table), strict=True):
        held.copy_(new)
    graph.replay()
    expected = paged_attention(*other.tensors, **other.pages | {"max_seqlen_q": 20}, **other.options)
    rows = sum(other.q_lens)
    assert torch.equal(out[:rows], expected[:rows])


def test_layers_with_a_plan_and_without_give_the_same_bits() -> None:
    case = draw(34, BF16, q_lens=[30, 1, 1], k_lens=[500, 9000, 3], window=None).to("cuda")
    plan = paged_plan(*case.tensors, **case.pages)
    with_plan, without = (
        paged_attention(*case.tensors, **case.pages, **case.options, plan=one) for one in (plan, None)
    )
    assert torch.equal(with_plan, without)


def test_nothing_synchronises() -> None:
    case = draw(33, BF16, q_lens=[20, 1], k_lens=[90, 70]).to("cuda")
    paged_attention(*case.tensors, **case.pages, **case.options)  # compiles
    with without_synchronising():
        paged_attention(*case.tensors, **case.pages, **case.options)
