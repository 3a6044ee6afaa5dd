"""Prefix trees: a token sees its ancestors, wherever they lie."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from stream_attention.masks import prefix_tree


def by_ancestors(parents: list[int], lengths: list[int]) -> Tensor:
    """Who sees whom, by walking from each token to its root."""
    segment = [one for one, length in enumerate(lengths) for _ in range(length)]

    def above(one: int) -> set[int]:
        return set() if parents[one] == -1 else {parents[one], *above(parents[one])}

    return torch.tensor(
        [
            [s in above(t) or (s == t and j <= i) for j, s in enumerate(segment)]
            for i, t in enumerate(segment)
        ]
    )  # fmt: skip


def random_tree(random: Random, segments: int) -> list[int]:
    return [-1 if one == 0 or random.random() < 0.1 else random.randrange(one) for one in range(segments)]


def in_order(parents: list[int]) -> list[int]:
    """The same tree with its segments in depth-first order."""
    order: list[int] = []

    def visit(one: int) -> None:
        order.append(one)
        for child, parent in enumerate(parents):
            if parent == one:
                visit(child)

    for root in [one for one, parent in enumerate(parents) if parent == -1]:
        visit(root)
    place = {one: at for at, one in enumerate(order)}
    return [-1 if parents[one] == -1 else place[parents[one]] for one in order]


def test_a_prompt_with_two_answers() -> None:
    mask = prefix_tree([-1, 0, 0], lengths=[1, 2, 1])
    assert mask.as_dense()[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert mask.query_label is None and mask.sizes == (None, None, 4, 4)


def test_a_parent_may_come_after_its_child() -> None:
    assert prefix_tree([1, -1]).as_dense()[0, 0].int().tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_in_any_order_is_its_ancestors(seed: int) -> None:
    random = Random(seed)
    parents = random_tree(random, random.randint(1, 12))
    lengths = [random.randint(0, 3) for _ in parents]
    lengths[0] += 1
    order = list(range(len(parents)))
    random.shuffle(order)
    place = {one: at for at, one in enumerate(order)}
    shuffled = [-1 if parents[one] == -1 else place[parents[one]] for one in order]
    sizes = [lengths[one] for one in order]
    assert torch.equal(prefix_tree(shuffled, sizes).as_dense()[0, 0], by_ancestors(shuffled, sizes))


@pytest.mark.parametrize("seed", range(10))
def test_depth_first_order_needs_no_labels(seed: int) -> None:
    parents = in_order(random_tree(Random(seed), 15))
    mask = prefix_tree(parents)
    assert mask.query_label is None and mask.query_start is not None
    assert mask.query_start.flatten().tolist() == list(range(15))
    assert torch.equal(mask.as_dense()[0, 0], by_ancestors(parents, [1] * 15))


def test_a_tree_for_each_batch_entry() -> None:
    parents, lengths = [[-1, 0, 1], [-1, 0, 0]], [[1, 1, 2], [2, 1, 1]]
    mask = prefix_tree(torch.tensor(parents), torch.tensor(lengths))
    assert mask.sizes == (2, None, 4, 4)
    for b in range(2):
        assert torch.equal(mask.as_dense()[b, 0], by_ancestors(parents[b], lengths[b]))
    assert torch.equal(prefix_tree(parents, [2, 1, 1]).as_dense()[1, 0], by_ancestors(parents[1], [2, 1, 1]))


def test_a_long_chain_is_causal() -> None:
    """Deeper than Python's recursion."""
    length = 3000
    ends = prefix_tree([*range(-1, length - 1)]).query_end
    assert ends is not None and bool((ends == length).all())


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([-1, 2],), ValueError, "parents: expected -1, or a segment below 2; got 2 for segment 1"),
        (([-1, -2],), ValueError, "parents: expected -1, or a segment below 2; got -2 for segment 1"),
        (([-1, 2, 1],), ValueError, "parents: expected trees, each with a root; got a cycle at segment 1"),
        (([-1, 0.5],), TypeError, "parents: expected a dtype of integers; got torch.float32"),
        (([],), (TypeError, ValueError), "parents: expected"),
        (([-1, 0], [1]), ValueError, "lengths: expected a length for each segment; got [1, 2] and [1, 1]"),
        (([-1, 0], [1, -1]), ValueError, "lengths: expected at least 0; got -1"),
        (
            ([[-1, 0], [-1, 0]], [[1, 1], [1, 2]]),
            ValueError,
            "lengths: expected as many tokens in each tree; got [",
        ),
    ],
)
def test_what_is_no_tree_is_refused(arguments: tuple[Any, ...], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        prefix_tree(*arguments)
    assert said in str(caught.value)
