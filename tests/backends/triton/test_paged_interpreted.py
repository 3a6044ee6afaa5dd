"""The Triton kernels of paged_attention, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from paged_cases import check, draw
from torch import Tensor

from stream_attention import paged_attention, paged_plan
from stream_attention.backends.installed import interpreting
from stream_attention.gpu import work_list
from stream_attention_tools.testing import poisoned_memory

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="TRITON_INTERPRET=1 is not set: `make test` runs these"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed: int) -> None:
    check(draw(seed), "triton", listed=seed % 3 == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_problems_in_16_bits(dtype: torch.dtype) -> None:
    for seed in range(50, 56):
        check(draw(seed, dtype), "triton")


def test_many_requests_and_long_ones() -> None:
    """More than are looked at together; of a long one the keys are split."""
    check(draw(60, q_lens=[1] * 150, k_lens=[3] * 149 + [900]), "triton")
    check(draw(61, q_lens=[1], k_lens=[700], window=None), "triton")
    check(draw(62, q_lens=[130, 1, 0, 70], k_lens=[300, 500, 4, 70]), "triton")


@pytest.mark.parametrize("requests", [0, 2])
def test_no_queries(requests: int) -> None:
    case = draw(4, q_lens=[0] * requests, k_lens=[4] * requests, alibi_slopes=None)
    out, lse = paged_attention(*case.tensors, **case.pages, **case.options, return_lse=True, backend="triton")
    assert not out.any() and (lse == -torch.inf).all()


def test_rows_of_no_request_stay_as_they_are_in_an_out_that_is_given() -> None:
    case = draw(63, q_lens=[2, 0, 3], k_lens=[9, 5, 0])
    query = torch.cat([case.tensors[0][:5], torch.full_like(case.tensors[0][:1], torch.nan).expand(4, -1, -1)])
    case = replace(case, tensors=(query, *case.tensors[1:]))
    out = paged_attention(*case.tensors, **case.pages, **case.options, backend="triton")
    assert not out[2:].any() and out[:2].all()
    wide = torch.full((9, out.shape[1] + 1, out.shape[2] + 8), 7.0)
    given = wide[:, :-1, :-8]
    found = paged_attention(*case.tensors, **case.pages, **case.options, out=given, backend="triton")
    assert found is given and torch.equal(given[:5], out[:5]) and (given[5:] == 7).all()
    assert (wide[:, -1] == 7).all() and (wide[:, :, -8:] == 7).all()
    with poisoned_memory():
        _, lse = paged_attention(
            *case.tensors, **case.pages, **case.options, out=given, return_lse=True, backend="triton"
        )
    assert (lse[:, 5:] == -torch.inf).all() and not lse.isnan().any()


def test_a_wrong_entry_of_the_table_reaches_its_own_request_alone() -> None:
    case = draw(5, q_lens=[2, 3, 1], k_lens=[20, 20, 20], window=None, sink=None)
    clean = paged_attention(*case.tensors, **case.pages, **case.options, backend="triton")
    case.table[1, 0] = -1
    out = paged_attention(*case.tensors, **case.pages, **case.options, validate=False, backend="triton")
    assert torch.equal(out[:2], clean[:2]) and torch.equal(out[5:6], clean[5:6]) and out[2:5].isnan().any()


def test_two_calls_give_the_same_bits() -> None:
    case = draw(64, torch.bfloat16, q_lens=[1, 40, 3], k_lens=[600, 300, 9])
    first, second = (paged_attention(*case.tensors, **case.pages, **case.options, backend="triton") for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dims", [(80, 80), (96, 96), (192, 128), (256, 256)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    for seed in (70, 71):
        check(draw(seed, longest=20, dims=dims), "triton")


@pytest.mark.parametrize("seed", range(80, 90))
def test_batch_invariant_problems(seed: int) -> None:
    check(draw(seed, batch_invariant=True), "triton")


def test_what_other_requests_do_changes_no_bit_of_an_invariant_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long keys of one query, which are split; a prompt; and a request that is alone or beside these."""
    for name in ("_INVARIANT_KEYS", "_INVARIANT_SPLITS"):
        monkeypatch.setattr(work_list, name, triton.language.constexpr({"_INVARIANT_KEYS": 64}.get(name, 4)))
    case = draw(91, q_lens=[1, 40, 3], k_lens=[500, 90, 70], window=None, sink=None, alibi_slopes=None)
    query, key, value, _, lengths = case.tensors
    options = {name: x for name, x in case.options.items() if not isinstance(x, Tensor)} | {"causal": True}
    invariant = {"batch_invariant": True, "backend": "triton", **options}
    whole = paged_attention(*case.tensors, **case.pages, **invariant)
    plain = paged_attention(*case.tensors, **case.pages, **{**invariant, "batch_invariant": False})
    torch.testing.assert_close(whole, plain)
    for request, (first, last) in enumerate([(0, 1), (1, 41), (41, 44)]):
        offsets = torch.tensor([0, last - first], dtype=torch.int32)
        alone = paged_attention(
            query[first:last], key, value, offsets, lengths[request : request + 1],
            page_table=case.table[request : request + 1], max_seqlen_q=last - first, **invariant,
        )  # fmt: skip
        assert torch.equal(whole[first:last], alone), request


def test_a_plan_of_an_invariant_step_is_another() -> None:
    case = draw(92, q_lens=[1, 4], k_lens=[60, 9], window=None)
    plan = paged_plan(*case.tensors, **case.pages, backend="triton", batch_invariant=True)
    same = {**case.pages, **case.options, "backend": "triton"}
    with_plan, without = (
        paged_attention(*case.tensors, **same, batch_invariant=True, plan=one) for one in (plan, None)
    )
    assert torch.equal(with_plan, without)
    with pytest.raises(ValueError, match="plan: expected one made for tiles and sizes"):
        paged_attention(*case.tensors, **same, plan=plan)


def test_a_plan_serves_calls_that_differ_in_what_it_does_not_depend_on() -> None:
    case = draw(65, q_lens=[1, 40, 0, 3], k_lens=[600, 300, 4, 9], window=(100, 0))
    plan = paged_plan(*case.tensors, **case.pages, window=(100, 0), backend="triton")
    for more in ({}, {"softcap": 3.0}, {"causal": False, "window": (100, -1)}):
        options = case.options | more
        own = paged_attention(*case.tensors, **case.pages, **options, backend="triton")
        assert torch.equal(paged_attention(*case.tensors, **case.pages, **options, plan=plan, backend="triton"), own)


def test_a_request_reads_no_pages_of_its_neighbour_in_the_list() -> None:
    """Its length, which nobody checked, says more than it has pages: it is clamped to these."""
    case = draw(66, q_lens=[2, 2], k_lens=[30, 30], window=None, alibi_slopes=None, causal=True)
    listed, page = case.listed, case.tensors[1].shape[1]
    offsets = listed["kv_indptr"]
    shorter = listed | {"kv_indptr": torch.stack([offsets[0], offsets[1], offsets[1]]), "validate": False}
    lengths = torch.tensor([30 + 3 * page, 7], dtype=torch.int32)
    tensors = (*case.tensors[:4], lengths)
    own = -(-30 // page) * page
    key, value = (t.nan_to_num(0.5) for t in tensors[1:3])
    tensors = (tensors[0], key, value, tensors[3], lengths)
    out = paged_attention(*tensors, **shorter, **case.options, backend="triton")
    clamped = torch.tensor([own, 0], dtype=torch.int32)
    expected = paged_attention(*tensors[:4], clamped, **shorter, **case.options, backend="eager")
    torch.testing.assert_close(out[:4], expected[:4])


def test_a_list_with_room_for_more_keys_than_32_bits_count() -> None:
    case = draw(67, q_lens=[3], k_lens=[20], window=None)
    listed = case.listed
    pages = torch.zeros((1 << 31) // case.tensors[1].shape[1] + 5, dtype=torch.int32)
    pages[: listed["kv_indices"].numel()] = listed["kv_indices"]
    out = paged_attention(*case.tensors, **listed | {"kv_indices": pages}, **case.options, backend="triton")
    assert torch.equal(out, paged_attention(*case.tensors, **listed, **case.options, backend="triton"))
