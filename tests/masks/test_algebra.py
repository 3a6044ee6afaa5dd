"""`&`, `|` and `~` of masks are those of their dense forms, or refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from random import Random

import pytest
import torch
from tests.masks.random_masks import PARTS, random_mask, whole
from torch import Tensor

from stream_attention.masks import (
    Mask,
    blocks,
    causal,
    documents,
    from_dense,
    intervals,
    padding,
    prefix_lm,
    prefix_tree,
    window,
)

Q_LEN, K_LEN = 6, 7


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Semantics


def test_bands_meet_and_join() -> None:
    assert causal() & window(5, 3) == window(5, 0)
    assert causal() | window(5, 3) == Mask(right=3)
    assert window(2, 0) | Mask(left=-1, right=4) == window(2, 4)  # they touch
    assert window(1, 0) | Mask(left=5, right=-9) == window(1, 0)  # which is empty


def test_what_is_not_causal() -> None:
    assert ~causal() == Mask(left=-1) and ~~causal() == causal()
    assert ~Mask(left=3) == Mask(right=-4)
    assert ~~Mask() == Mask() and not (~Mask()).as_dense(q_len=3, k_len=3).any()


def test_a_part_that_allows_more_swallows_the_other() -> None:
    ids = documents(ints(0, 0, 1))
    assert causal() | (causal() & ids) == causal() & Mask(q_len=3, k_len=3)
    assert (window(3, 0) & ids) | causal() == Mask(right=0, q_len=3, k_len=3)
    assert (Mask() | ids) == Mask(q_len=3, k_len=3) and ids | ids == ids


def test_keys_per_query_meet_by_their_tighter_bounds() -> None:
    both = intervals(key_start=ints(0, 2), key_end=ints(3, 4)) & intervals(key_start=ints(1, 0), key_end=ints(9, 3))
    assert both.key_start is not None and both.key_start.tolist() == [[[1, 2]]]
    assert both.key_end is not None and both.key_end.tolist() == [[[3, 3]]]


def test_one_sided_intervals_join_without_a_look_at_values() -> None:
    either = (intervals(key_end=ints(1, 5)) | intervals(key_end=ints(2, 3))).key_end
    assert either is not None and either.tolist() == [[[2, 5]]]
    starts = ints(1, 1)
    meta = intervals(key_start=starts, key_end=ints(2, 3)).to("meta")
    other = Mask(key_start=meta.key_start, key_end=torch.ones_like(meta.key_start))
    assert (meta | other).key_start is meta.key_start


def test_intervals_that_touch_join_and_those_apart_do_not() -> None:
    first = intervals(key_start=ints(0, 4), key_end=ints(2, 4))  # the second is empty
    joined = first | intervals(key_start=ints(2, 1), key_end=ints(5, 2))
    assert joined.as_dense(k_len=6)[0, 0].int().tolist() == [[1, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"\|: expected masks that differ in one part"):
        first | intervals(key_start=ints(3, 1), key_end=ints(5, 2))


def test_an_unbounded_interval_that_is_empty_gives_way() -> None:
    joined = intervals(key_end=ints(0, 3)) | intervals(key_start=ints(4, 2), key_end=ints(5, 5))
    assert joined.as_dense(k_len=6)[0, 0].int().tolist() == [[0, 0, 0, 0, 1, 0], [1, 1, 1, 1, 1, 0]]


def test_prefix_lm_is_causal_or_a_prefix() -> None:
    prefix = causal().as_intervals(4, 5) | padding([0, 2])
    assert torch.equal(prefix.as_dense(), prefix_lm([0, 2], 4, 5).as_dense())


def test_documents_with_documents_are_pairs() -> None:
    first, second = torch.tensor([[5, 2, 5, 2, 5]]), torch.tensor([[1, 1, 2**40, 2**40, 1], [0, 0, 0, 0, 0]])
    both = documents(first) & documents(second)
    assert both.by_id and both.sizes.batch == 2
    equal = first[:, :, None] == first[:, None], second[:, :, None] == second[:, None]
    assert torch.equal(both.as_dense()[:, 0], equal[0] & equal[1])


@pytest.mark.parametrize("seed", range(5))
def test_pairs_of_many_ids_are_told_apart(seed: int) -> None:
    first, second = torch.randint(9, (2, 60), generator=torch.Generator().manual_seed(seed))
    both = documents(first) & documents(second)
    assert both.by_id and torch.equal(both.as_dense(), documents(first * 9 + second).as_dense())


def test_intervals_of_one_label_meet_and_join() -> None:
    label = ints(-3, 0, 2, -1)[None, None]
    upto, between = (
        Mask(query_end=ints(-1, 0, 2)[None, None], query_label=label),
        Mask(query_start=ints(-1, -9, 5)[None, None], query_end=ints(1, -9, 5)[None, None], query_label=label),
    )
    for found, joined in ((upto & between, torch.logical_and), (upto | between, torch.logical_or)):
        assert found.query_label is label
        assert torch.equal(found.as_dense(), joined(upto.as_dense(), between.as_dense()))


def test_padded_queries_join_ids() -> None:
    padded, joined = padding([5, 4], q_lengths=[3, 5]), documents(torch.tensor([0, 1, 0, 1, 0]))
    both = padded & joined
    apart = (
        padding([5, 4], q_lengths=[3, 5]).as_dense(batch=2, q_len=5, k_len=5)
        & documents(torch.tensor([0, 1, 0, 1, 0])).as_dense()
    )
    assert both.by_id and torch.equal(both.as_dense(), apart)


def test_the_same_ids_meet_as_themselves() -> None:
    ids = documents(torch.tensor([0, 1, 0]))
    assert ids & ids == ids and (ids & causal() & ids) == ids & causal()


def test_tables_of_one_block_size_meet_and_join() -> None:
    one, other = torch.tensor([[True, False], [True, True]]), torch.tensor([[True, True], [False, True]])
    assert torch.equal(
        (blocks(one, 2) & blocks(other, 2)).as_dense(q_len=4, k_len=4),
        blocks(one & other, 2).as_dense(q_len=4, k_len=4),
    )
    joined = blocks(one, 2) | blocks(other, 2)
    assert joined.blocks is not None and joined.blocks.table.all()


# Properties


def made(call: Callable[[], Mask]) -> tuple[Mask | None, str]:
    """The mask, or the words that refuse it."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error)


def pairs(seed: int, *parts: str) -> Iterator[tuple[Mask, Mask]]:
    """Two random masks of these parts or any, in every second pair with a common rest."""
    random = Random(seed)
    rest = tuple(part for part in ("band", "blocks", "dense") if part not in parts)
    for turn in range(10):
        a, b = (random_mask(random, Q_LEN, K_LEN, parts or None) for _ in range(2))
        if parts and turn % 2:
            common = random_mask(random, Q_LEN, K_LEN, rest)
            a, b = a & common, b & common
        yield a, b


@pytest.mark.parametrize("seed", range(20))
def test_both_is_the_and_of_dense_masks(seed: int) -> None:
    for a, b in pairs(seed):
        both, said = made(lambda a=a, b=b: a & b)
        if both is None:
            two_tables = a.blocks is not None and b.blocks is not None and a.blocks[1:] != b.blocks[1:]
            assert "Turn one into a dense mask" in said and (two_tables or a.query_label is not b.query_label)
        else:
            expected = whole(a, Q_LEN, K_LEN) & whole(b, Q_LEN, K_LEN)
            assert torch.equal(whole(both, Q_LEN, K_LEN), expected), both


@pytest.mark.parametrize("part", PARTS)
def test_either_is_the_or_of_dense_masks(part: str) -> None:
    joined = 0
    for a, b in chain.from_iterable(pairs(seed, part) for seed in range(8)):
        either, said = made(lambda a=a, b=b: a | b)
        if either is None:
            assert "from_dense(a.as_dense(...) | b.as_dense(...))" in said and part != "dense"
        else:
            joined += 1
            expected = whole(a, Q_LEN, K_LEN) | whole(b, Q_LEN, K_LEN)
            assert torch.equal(whole(either, Q_LEN, K_LEN), expected), either
    assert joined >= {"dense": 80, "band": 40, "keys": 20, "queries": 20}.get(part, 1)


@pytest.mark.parametrize("part", PARTS)
def test_the_rest_is_the_not_of_the_dense_mask(part: str) -> None:
    turned = 0
    for mask, _ in chain.from_iterable(pairs(seed, part) for seed in range(8)):
        rest, said = made(lambda mask=mask: ~mask)
        if rest is None:
            assert "from_dense(~mask.as_dense(...))" in said
        else:
            turned += 1
            assert torch.equal(whole(rest, Q_LEN, K_LEN), ~whole(mask, Q_LEN, K_LEN)), rest
    assert turned >= 30


def test_the_rest_of_a_dense_mask_with_other_parts_is_dense() -> None:
    mask = from_dense(torch.eye(4, dtype=torch.bool)) & causal() & padding([2, 3])
    assert torch.equal((~mask).as_dense(), ~mask.as_dense()) and (~mask).right is None


def test_a_dense_mask_joins_anything() -> None:
    dense = from_dense(torch.eye(4, dtype=torch.bool))
    either = dense | (window(1, 0) & padding([2, 3]))
    expected = dense.as_dense() | (window(1, 0) & padding([2, 3])).as_dense(q_len=4, k_len=4)
    assert torch.equal(either.as_dense(), expected)


# Refusals


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: padding([1, 2]) & padding([1, 2, 3]), "&: expected masks of one batch; got 2 in Mask(padding of [2])"),
        (lambda: causal() & Mask(q_len=3) | Mask(q_len=4), "|: expected masks of one q_len; got 3 in Mask(causal)"),
        (lambda: padding([1]).to("meta") & padding([1]), "&: expected masks on one device; got meta and cpu. Move one"),
        (lambda: window(2, 0) | Mask(left=-2), "|: expected masks that differ in one part"),
        (lambda: causal() | padding([2]), "Turn bands into keys per query first, by as_intervals(q_len, k_len)"),
        (lambda: ~window(2, 0), "~: expected a mask of one part, bounded on one side"),
        (lambda: ~(causal() & padding([2])), "Take from_dense(~mask.as_dense(...)), or from_function"),
        (
            lambda: documents(torch.tensor([0, 1, 0])) & prefix_tree([-1, 0, 0]),
            "&: expected queries per key of one label tensor, of none, or ids in both",
        ),
        (
            lambda: blocks(torch.ones(2, 2) > 0, 2) & blocks(torch.ones(1, 1) > 0, 4),
            "&: expected tables of one block size; got 2 x 2 and 4 x 4. Turn one into a dense mask",
        ),
    ],
)
def test_what_has_no_such_form_is_refused_with_the_way(call: Callable[[], Mask], said: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        call()
    assert said in str(caught.value)
