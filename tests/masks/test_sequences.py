"""padding, documents, prefix_lm: masks of batches of sequences."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention import attention, varlen_attention
from stream_attention.masks import Mask, causal, documents, padding, prefix_lm, window


def equal_ids(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    return of_queries[..., :, None] == of_keys[..., None, :]


# Semantics


def test_padding_masks_keys_behind_the_length_and_queries_that_are_none() -> None:
    assert padding([0, 2]).as_dense(q_len=1, k_len=3)[:, 0, 0].int().tolist() == [[0, 0, 0], [1, 1, 0]]
    both = padding(torch.tensor([2, 3]), q_lengths=[1, 0]).as_dense(q_len=2, k_len=3)
    assert both[:, 0].int().tolist() == [[[1, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]]


def test_documents_that_stand_together_are_intervals() -> None:
    ids = torch.tensor([[4, 4, 9, 9, 9], [1, 0, 0, 0, 2]])
    mask = documents(ids)
    assert mask.key_start is not None and mask.key_start.tolist() == [[[0, 0, 2, 2, 2]], [[0, 1, 1, 1, 4]]]
    assert mask.key_end is not None and mask.key_end.tolist() == [[[2, 2, 5, 5, 5]], [[1, 4, 4, 4, 5]]]
    assert mask.query_start is None and repr(mask) == "Mask(documents of [2, 5])"


def test_documents_that_return_are_compared_by_id() -> None:
    mask = documents(torch.tensor([4, 9, 4]))
    assert mask.by_id and mask.key_start is None and mask.query_label is not None


def test_lengths_and_offsets_are_documents_one_after_the_other() -> None:
    ids = documents(torch.tensor([0, 2, 2, 2, 3, 3]))
    lengths, offsets = [1, 0, 3, 2], torch.tensor([0, 1, 1, 4, 6], dtype=torch.int32)
    for mask in (documents(lengths=lengths), documents(lengths=torch.tensor(lengths)), documents(cu_seqlens=offsets)):
        assert torch.equal(mask.as_dense(), ids.as_dense()) and repr(mask) == "Mask(4 documents of [6])"


def test_tokens_outside_of_all_documents_see_nothing() -> None:
    mask = documents(cu_seqlens=torch.tensor([1, 3]), total=5)
    assert mask.as_dense()[0, 0].int().tolist() == [[0] * 5, [0, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0] * 5, [0] * 5]


def test_the_caller_may_vouch() -> None:
    together, apart = torch.tensor([5, 5, 3]), torch.tensor([5, 3, 5])
    assert torch.equal(documents(together, contiguous=True).as_dense(), documents(together).as_dense())
    assert documents(together, contiguous=True).key_end is not None
    assert documents(together, contiguous=False).by_id
    assert torch.equal(documents(apart, contiguous=False).as_dense()[0, 0], equal_ids(apart, apart))


def test_a_prefix_is_seen_by_all_and_the_rest_is_causal() -> None:
    assert prefix_lm([0, 3], 3).as_dense()[:, 0].int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    ]
    assert prefix_lm(2, 2, 4).as_dense()[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


# Properties


@pytest.mark.parametrize("seed", range(30))
def test_documents_are_the_equality_of_ids(seed: int) -> None:
    random = Random(seed)

    def ids(*shape: int) -> Tensor:
        values = torch.tensor([random.randint(-2, 3) for _ in range(torch.Size(shape).numel())]).view(shape)
        values = values.sort(-1).values if random.random() < 0.5 else values
        return values * random.choice([1, 2**40])

    of_queries = ids(*random.choice([(), (2,)]), 6)
    of_keys = ids(*random.choice([(), (2,)]), random.randint(1, 7))
    mask = documents(of_queries, of_keys)
    assert torch.equal(mask.as_dense(batch=2)[:, 0], equal_ids(of_queries, of_keys).expand(2, -1, -1))
    same = documents(of_queries)
    assert torch.equal(same.as_dense(batch=2)[:, 0], equal_ids(of_queries, of_queries).expand(2, -1, -1))


def test_documents_of_no_keys() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert documents(torch.tensor([1, 2]), empty).as_dense().shape == (1, 1, 2, 0)
    assert documents(empty).as_dense().shape == (1, 1, 0, 0)


def test_causal_documents_are_varlen_attention() -> None:
    offsets = torch.tensor([0, 3, 10, 11], dtype=torch.int32)
    query, key, value = torch.randn(3, 11, 2, 8)
    packed = varlen_attention(query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, window=(4, 0))
    mask = documents(cu_seqlens=offsets) & causal() & window(4, 0)
    dense = attention(query[None], key[None], value[None], mask=mask.as_dense())
    torch.testing.assert_close(dense[0], packed)


# Refusals


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: padding(3), ValueError, "lengths: expected shape [B]; got []"),
        (lambda: padding([1.5]), TypeError, "lengths: expected a dtype of integers; got torch.float32"),
        (lambda: padding([1], torch.ones(1, 1).int()), ValueError, "q_lengths: expected shape [B]; got [1, 1]"),
        (lambda: padding([1, 2], [1, 2, 3]), ValueError, "query_end: expected B=2 or 1"),
        (documents, ValueError, "documents: expected one of ids, lengths and cu_seqlens; got none of them"),
        (
            lambda: documents(torch.zeros(3).int(), lengths=[3]),
            ValueError,
            "documents: expected one of ids, lengths and cu_seqlens; got ids and lengths",
        ),
        (lambda: documents(torch.zeros(3)), TypeError, "ids: expected a dtype of integers; got torch.float32"),
        (lambda: documents(torch.zeros(1, 1, 3).int()), ValueError, "ids: expected shape [T] or [B, T]; got [1, 1, 3]"),
        (
            lambda: documents(torch.zeros(2, 3).int(), torch.zeros(3, 3).int()),
            ValueError,
            "key_ids: expected B=2, as of ids; got B=3",
        ),
        (lambda: documents(lengths=[3], contiguous=True), ValueError, "contiguous: expected None beside lengths"),
        (lambda: documents(torch.zeros(3).int(), total=3), ValueError, "total: expected None beside ids; got 3"),
        (
            lambda: documents(cu_seqlens=torch.zeros(0).int()),
            ValueError,
            "cu_seqlens: expected at least one offset; got none",
        ),
        (
            lambda: documents(cu_seqlens=torch.tensor([0, 4, 3])),
            ValueError,
            "cu_seqlens: expected no document of fewer than 0 tokens; got [4, -1]",
        ),
        (lambda: documents(lengths=[2, -1]), ValueError, "lengths: expected no document of fewer than 0 tokens"),
        (lambda: prefix_lm(2, 4.0), TypeError, "q_len: expected an int; got 4.0"),
        (lambda: prefix_lm(2.5, 4), TypeError, "lengths: expected a dtype of integers"),
        (
            lambda: prefix_lm(2, 4).as_dense(q_len=5, k_len=5),
            ValueError,
            "key_end: expected Tq=5, as the call has",
        ),
        (lambda: prefix_lm(2, 1).check(k_len=5), ValueError, "k_len: expected Tk=5, as the call has; got 1"),
    ],
)
def test_what_is_no_sequence_is_refused(call: Callable[[], Mask], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cu_seqlens": torch.tensor([30, 64])}, "cu_seqlens: expected 0 as the first offset; got 30"),
        ({"cu_seqlens": torch.tensor([0, 30, 10, 40]), "total": 40}, "no document of fewer than 0 tokens"),
        ({"lengths": [10, -5, 35], "total": 40}, "no document of fewer than 0 tokens"),
        ({"lengths": [30, 30], "total": 40}, "total: expected at least the 60 tokens of lengths; got 40"),
        ({"lengths": [[30, 34], [10, 54]]}, r"Documents that differ by batch entry go by ids \[B, T\]"),
        ({"ids": [30, 34]}, r"Lengths go by name: lengths="),
    ],
)
def test_documents_that_cannot_be_are_refused(given: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        documents(**given)
