"""Masks by name, each as a formula of (b, h, i, j), and as constructors where these can say it.

In a formula i and j are int tensors of any shape that broadcast, or of no dimension; `Call` has the sizes and the
tables that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention.masks import (
    Mask,
    causal,
    documents,
    from_dense,
    intervals,
    padding,
    prefix_lm,
    prefix_tree,
    window,
)

HEADS = 4


class Call(NamedTuple):
    q_len: int
    k_len: int

    @property
    def offset(self) -> int:
        return self.k_len - self.q_len


Formula = Callable[[Any, Any, Any, Any], Tensor]


class Case(NamedTuple):
    """What is visible, and the same by constructors; the form that from_function finds, where that is sure."""

    formula: Callable[[Call], Formula]
    built: Callable[[Call], Mask] | None = None
    found: str = ""  # "key", "query" or "dense"
    square: bool = False  # means something for Tq = Tk alone
    batch: int | None = None
    heads: int | None = None


@cache  # as it is drawn, and a function must not draw
def table(*shape: int, most: int, seed: int = 0) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def document_ids(length: int) -> Tensor:
    """Documents of 1, 127, 128, 129, 0 and 640 tokens, cut off at the length."""
    return torch.repeat_interleave(torch.arange(6), torch.tensor([1, 127, 128, 129, 0, 640 + length]))[:length]


def scattered_ids(length: int) -> Tensor:
    return table(length, most=5, seed=length)


def starts_and_ends(call: Call) -> tuple[Tensor, Tensor]:
    start = table(call.q_len, most=call.k_len + 1, seed=1)
    return start, start + table(call.q_len, most=9, seed=2) - 2


def heap_parents(length: int) -> list[int]:
    """A tree in breadth-first order, three children each."""
    return [(one - 1) // 3 if one else -1 for one in range(length)]


def ancestors(parents: list[int]) -> Tensor:
    """Who has whom above itself, itself included."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for one, parent in enumerate(parents):
        if parent >= 0:
            found[one] |= found[parent]
    return found


def per_head_window(call: Call) -> Mask:
    at = torch.arange(call.q_len) + call.offset
    reach = 2 ** torch.arange(HEADS)[:, None]
    return intervals(key_start=(at - reach)[None], key_end=(at + 1).expand(1, HEADS, -1))


def once(mask: Tensor) -> Mask:
    return from_dense(mask)


ENTRIES = 3
PREFIXES = torch.tensor([0, 7, 100])
KEYS = torch.tensor([0, 5, 1000])
ROWS = torch.tensor([9, 0, 60])

CASES = {
    "1 noop": Case(lambda c: lambda b, h, i, j: (i == i) & (j == j), lambda c: Mask()),
    "2, 3 causal": Case(lambda c: lambda b, h, i, j: j <= i + c.offset, lambda c: causal(), "key"),
    "4 causal from the top left": Case(lambda c: lambda b, h, i, j: j <= i, lambda c: Mask(right=-c.offset), "key"),
    "5 window narrower than a tile": Case(
        lambda c: lambda b, h, i, j: (j <= i + c.offset) & (j >= i + c.offset - 3), lambda c: window(3, 0), "key"
    ),
    "6 window that grows with the head": Case(
        lambda c: lambda b, h, i, j: (j <= i + c.offset) & (i + c.offset - j <= 2**h),
        per_head_window,
        "key",
        heads=HEADS,
    ),
    "7 prefix LM": Case(
        lambda c: lambda b, h, i, j: (j < 100) | (j <= i + c.offset), lambda c: prefix_lm(100, c.q_len, c.k_len), "key"
    ),
    "8 prefix LM of each entry": Case(
        lambda c: lambda b, h, i, j: (j < PREFIXES[b]) | (j <= i + c.offset),
        lambda c: prefix_lm(PREFIXES, c.q_len, c.k_len),
        "key",
        batch=ENTRIES,
    ),
    "9 documents": Case(
        lambda c: lambda b, h, i, j: document_ids(c.q_len)[i] == document_ids(c.k_len)[j],
        lambda c: documents(document_ids(c.q_len), document_ids(c.k_len)),
        "key",
    ),
    "10 documents that return": Case(
        lambda c: lambda b, h, i, j: scattered_ids(c.q_len)[i] == scattered_ids(c.k_len)[j],
        lambda c: documents(scattered_ids(c.q_len), scattered_ids(c.k_len)),
    ),
    "11 documents and window": Case(
        lambda c: (
            lambda b, h, i, j: (document_ids(c.q_len)[i] == document_ids(c.k_len)[j]) & (abs(i + c.offset - j) <= 64)
        ),
        lambda c: documents(document_ids(c.q_len), document_ids(c.k_len)) & window(64, 64),
        "key",
    ),
    "12 other documents of keys": Case(
        lambda c: lambda b, h, i, j: scattered_ids(c.q_len)[i] == document_ids(c.k_len)[j],
        lambda c: documents(scattered_ids(c.q_len), document_ids(c.k_len)),
        "key",
    ),
    "13 padded keys": Case(lambda c: lambda b, h, i, j: j < KEYS[b], lambda c: padding(KEYS), "key", batch=ENTRIES),
    "14 padded keys and queries": Case(
        lambda c: lambda b, h, i, j: (j < KEYS[b]) & (i < ROWS[b]), lambda c: padding(KEYS, ROWS), "key", batch=ENTRIES
    ),
    "15 one row sees nothing": Case(
        lambda c: lambda b, h, i, j: (i != 5) & (j >= 0), lambda c: once((torch.arange(c.q_len) != 5)[:, None]), "key"
    ),
    "16 every second row sees nothing": Case(
        lambda c: lambda b, h, i, j: i % 2 == 0, lambda c: once((torch.arange(c.q_len) % 2 == 0)[:, None]), "key"
    ),
    "17 nobody sees anything": Case(lambda c: lambda b, h, i, j: i < 0, lambda c: ~Mask(), "key"),
    "18 only the last key": Case(
        lambda c: lambda b, h, i, j: j == c.k_len - 1,
        lambda c: intervals(key_start=torch.tensor([c.k_len - 1])),
        "key",
    ),
    "19 only the diagonal": Case(lambda c: lambda b, h, i, j: i + c.offset == j, lambda c: window(0, 0), "key"),
    "20 strictly upper": Case(lambda c: lambda b, h, i, j: j > i + c.offset, lambda c: ~causal(), "key"),
    "21 window ahead": Case(
        lambda c: lambda b, h, i, j: (j >= i + c.offset) & (j - i - c.offset < 70), lambda c: window(0, 69), "key"
    ),
    "22 dilated": Case(lambda c: lambda b, h, i, j: abs(i - j) % 3 == 0),
    "23 checkerboard": Case(lambda c: lambda b, h, i, j: (i + j) % 2 == 0),
    "24 block diffusion": Case(
        lambda c: lambda b, h, i, j: block_diffusion(i, j, c.q_len // 2, 5),
        lambda c: once(block_diffusion(torch.arange(c.q_len)[:, None], torch.arange(c.k_len), c.q_len // 2, 5)),
        square=True,
    ),
    "25 shared prefix and own document": Case(
        lambda c: lambda b, h, i, j: (j < 20) | (document_ids(c.q_len)[i] == document_ids(c.k_len)[j]) & (j <= i),
        square=True,
    ),
    "26 sinks and window": Case(lambda c: lambda b, h, i, j: (j <= i + c.offset) & ((j < 4) | (i + c.offset - j < 16))),
    "27 tree": Case(
        lambda c: lambda b, h, i, j: ancestors(heap_parents(c.q_len))[i, j],
        lambda c: prefix_tree(heap_parents(c.q_len)),
        square=True,
    ),
    "28 intervals of any kind": Case(
        lambda c: lambda b, h, i, j: (starts_and_ends(c)[0][i] <= j) & (j < starts_and_ends(c)[1][i]),
        lambda c: intervals(key_start=starts_and_ends(c)[0], key_end=starts_and_ends(c)[1]),
        "key",
    ),
    "29 random bits of each head": Case(
        lambda c: lambda b, h, i, j: table(HEADS, c.q_len, c.k_len, most=100)[h, i, j] == 0,
        lambda c: once(table(HEADS, c.q_len, c.k_len, most=100) == 0),
        heads=HEADS,
    ),
    "30 neighbourhood in two dims": Case(
        lambda c: lambda b, h, i, j: natten(i, j, 10, -(-max(c) // 10), 5, 3),
    ),
    "31 Morton order": Case(lambda c: lambda b, h, i, j: morton(i, j)),
    "32 floor of negative numbers": Case(
        lambda c: lambda b, h, i, j: torch.div(i - j, 3, rounding_mode="floor") % 2 == (i - j) % 5 % 2
    ),
    "queries per key, to an end": Case(
        lambda c: lambda b, h, i, j: (i >= j) & (i < j + 3 + (j * 7) % 11),
        lambda c: intervals(
            query_start=torch.arange(c.k_len), query_end=(at := torch.arange(c.k_len)) + 3 + at * 7 % 11
        ),
    ),
}


def block_diffusion(i: Any, j: Any, half: int, size: int) -> Any:
    """Noised tokens, then clean ones: noised see their own block and clean ones before, clean all up to their own."""
    block_i, block_j = i % max(half, 1) // size, j % max(half, 1) // size
    noised_i, noised_j = i < half, j < half
    from_noised = (noised_j & (block_i == block_j)) | (~noised_j & (block_j < block_i))
    return (noised_i & from_noised) | (~noised_i & ~noised_j & (block_j <= block_i))


def natten(i: Any, j: Any, width: int, height: int, wide: int, high: int) -> Any:
    """The keys in a box of 2 wide + 1 by 2 high + 1 around the query's cell, which is moved into the canvas."""
    x, y = (
        (i % width).clamp(wide, width - 1 - wide),
        (i // width).clamp(min(high, height - 1), max(height - 1 - high, 0)),
    )
    return (abs(x - j % width) <= wide) & (abs(y - j // width) <= high)


def morton(i: Any, j: Any) -> Any:
    """Neighbours, by the coordinates that are the even and the odd bits of an index."""

    def coordinate(index: Any, bit: int) -> Any:
        found = index & 0
        for place in range(6):
            found = found | (((index >> (2 * place + bit)) & 1) << place)
        return found

    apart = [abs(coordinate(i, bit) - coordinate(j, bit)) for bit in range(2)]
    return (apart[0] <= 2) & (apart[1] <= 2)


def dense_of(case: Case, call: Call) -> Tensor:
    """The formula at every index: bool [B, H, Tq, Tk], B and H 1 where the formula has none."""
    b, h, i, j = torch.meshgrid(
        *(torch.arange(size) for size in (case.batch or 1, case.heads or 1, call.q_len, call.k_len)), indexing="ij"
    )
    return case.formula(call)(b, h, i, j)
