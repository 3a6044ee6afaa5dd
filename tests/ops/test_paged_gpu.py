"""paged_attention on a GPU: against fp64, in graphs, without synchronisation."""

from __future__ import annotations

import random

import paged_cases
import pytest
import torch

pytest.importorskip("triton")

from gpu_tools import captured, give_memory_back, without_synchronising
from paged_cases import check, draw, trees

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


@pytest.mark.parametrize("seed", [43, 47, 51])
def test_pages_in_e4m3(seed: int) -> None:
    check(draw(seed, BF16, e4m3=True, longest=300), "triton", "cuda")


def test_drafts_with_trees_behind_long_contexts() -> None:
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    q_lens = [16, 1, 7, 0, 16]
    tree = trees(q_lens, rng, generator)
    lengths = [4000, 3000, 9, 8, 16]
    check(draw(35, BF16, q_lens=q_lens, k_lens=lengths, window=None, **tree), "triton", "cuda")


def test_what_other_requests_do_changes_no_bit_of_an_invariant_call() -> None:
    lengths = [9000, 700, 40000]
    case = draw(36, BF16, q_lens=[1, 200, 3], k_lens=lengths, window=None, sink=None, alibi_slopes=None).to("cuda")
    query, key, value, _, keys = case.tensors
    options = {name: x for name, x in case.options.items() if not isinstance(x, torch.Tensor)} | {"causal": True}
    whole = paged_attention(*case.tensors, **case.pages, **options, batch_invariant=True)
    for request, (first, last) in enumerate([(0, 1), (1, 201), (201, 204)]):
        offsets = torch.tensor([0, last - first], dtype=torch.int32, device="cuda")
        alone = paged_attention(
            query[first:last], key, value, offsets, keys[request : request + 1],
            page_table=case.table[request : request + 1], max_seqlen_q=last - first, batch_invariant=True, **options,
        )  # fmt: skip
        assert torch.equal(whole[first:last], alone), request


def test_a_compiled_call_takes_new_lengths_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch.fx.experimental._config, "use_duck_shape", False)
    monkeypatch.setattr(paged_cases, "LAYOUTS", ("pages",))
    compiled = torch.compile(paged_attention, fullgraph=True, dynamic=True)
    plain = {"window": None, "softcap": 0.0, "scale": None, "alibi_slopes": None, "sink": None, "e4m3": False}
    plain |= {"causal": True, "tree_mask": None, "tree_offsets": None, "dims": (64, 64)}
    with torch.no_grad():
        for recompile, q_lens in ((False, [30, 1, 1]), (True, [7, 9, 200, 1]), (True, [2, 50])):
            case = draw(37, BF16, q_lens=q_lens, k_lens=[n + 100 for n in q_lens], **plain).to("cuda")
            with torch._dynamo.config.patch(error_on_recompile=recompile):
                found = compiled(*case.tensors, **case.pages)
            rows = sum(q_lens)
            assert torch.equal(found[:rows], paged_attention(*case.tensors, **case.pages)[:rows])


def test_nothing_synchronises() -> None:
    case = draw(33, BF16, q_lens=[20, 1], k_lens=[90, 70]).to("cuda")
    paged_attention(*case.tensors, **case.pages, **case.options)  # compiles
    with without_synchronising():
        paged_attention(*case.tensors, **case.pages, **case.options)
