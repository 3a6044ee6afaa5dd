"""Masks of trees of tokens: shared prompts with their continuations, drafts of speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import refuse
from .mask import Mask


def prefix_tree(
    parents: Tensor | Sequence[int] | Sequence[Sequence[int]],
    lengths: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Mask:
    """A token sees its segment up to itself, and all tokens of the segments on the way to its root.

    Tokens lie segment after segment, in the order of `parents`; where each segment comes with all that continues it
    behind it (depth-first order) the mask is an interval of queries per key, which needs no labels. Otherwise the label
    of a query is its place in such an order.

    Args:
        parents: for each segment the number of the one that it continues, -1 for a root: integers `[N]`, or `[B, N]`
            for a tree per batch entry. Parents may come after their children. They are read on the host.
        lengths: tokens of each segment, of the same shape, or `[N]` for all trees. None: one each.

    Raises:
        ValueError, TypeError: a parent that is no segment, a cycle, a negative length, or trees of several lengths.

    >>> prefix_tree([-1, 0, 1, 0]).as_dense()[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    >>> prefix_tree([-1, 0, 0], lengths=[2, 1, 1]).as_dense()[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    device = parents.device if isinstance(parents, Tensor) else None
    trees = _rows("parents", parents)
    sizes = [[1] * len(tree) for tree in trees] if lengths is None else _rows("lengths", lengths)
    if len(sizes) == 1:
        sizes = sizes * len(trees)
    if [len(tree) for tree in trees] != [len(size) for size in sizes]:
        shown = " and ".join(f"[{len(rows)}, {len(rows[0])}]" for rows in (trees, sizes))
        refuse("lengths", "a length for each segment", shown)
    totals = {sum(size) for size in sizes}
    if len(totals) != 1:
        refuse("lengths", "as many tokens in each tree", sorted(totals))
    orders, ends = zip(*(_depth_first(tree, size) for tree, size in zip(trees, sizes, strict=True)), strict=True)
    start = torch.tensor(orders, dtype=torch.int32, device=device)[:, None]
    end = torch.tensor(ends, dtype=torch.int32, device=device)[:, None]
    tokens = totals.pop()
    label = None if all(order == list(range(tokens)) for order in orders) else start
    words = f"prefix tree of {len(trees[0])} segments, {tokens} tokens"
    return Mask(query_start=start, query_end=end, query_label=label, q_len=tokens, k_len=tokens, words=words)


def _rows(name: str, given: Any) -> list[list[int]]:
    """Integers `[N]` or `[B, N]` as lists, one for each tree."""
    tensor = given if isinstance(given, Tensor) else torch.as_tensor(given)
    if tensor.dtype.is_floating_point or tensor.dtype is torch.bool:
        refuse(name, "a dtype of integers", tensor.dtype, error=TypeError)
    if tensor.dim() not in (1, 2) or tensor.numel() == 0:
        refuse(name, "shape [N] or [B, N], with a segment at least", list(tensor.shape))
    return tensor.view(-1, tensor.shape[-1]).tolist()


def _depth_first(parents: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """For each token, as they lie, its place in depth-first order, and the end of its subtree there."""
    children: list[list[int]] = [[] for _ in parents]
    roots: list[int] = []
    for segment, parent in enumerate(parents):
        if not -1 <= parent < len(parents):
            refuse("parents", f"-1, or a segment below {len(parents)}", f"{parent} for segment {segment}")
        (roots if parent == -1 else children[parent]).append(segment)
    if min(lengths) < 0:
        refuse("lengths", "at least 0", min(lengths))
    first = [-1] * len(parents)  # place of a segment's first token
    tokens = list(lengths)  # of a segment and all that continues it
    order: list[int] = []
    stack = roots[::-1]
    place = 0
    while stack:
        segment = stack.pop()
        order.append(segment)
        first[segment] = place
        place += lengths[segment]
        stack += children[segment][::-1]
    if len(order) < len(parents):
        refuse("parents", "trees, each with a root", f"a cycle at segment {first.index(-1)}")
    for segment in reversed(order):
        if parents[segment] != -1:
            tokens[parents[segment]] += tokens[segment]
    places: list[int] = []
    ends: list[int] = []
    for segment, length in enumerate(lengths):
        places += range(first[segment], first[segment] + length)
        ends += [first[segment] + tokens[segment]] * length
    return places, ends
