"""Which masks are measured, at which sizes, and the bars."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stream_attention.masks import Mask, causal, documents, intervals, padding, prefix_lm, prefix_tree, window
from stream_attention.masks.functions import MaskMod

from ..workloads.batches import Heads

PACK = (9200, 416, 1504, 2808, 64, 696, 5120, 1000, 256, 3304, 128, 1208, 560, 2040, 832, 3632)
"""Documents of the causal pack: 32,768 tokens."""


class Sizes(NamedTuple):
    """Of the cases on a device."""

    batch: int
    length: int
    heads: Heads
    document: int
    window: int  # how many keys a query sees, its own counted
    pack: tuple[int, ...]
    pack_heads: Heads
    trunk: int
    branches: int
    branch: int
    dtype: torch.dtype


SIZES = {
    "cuda": Sizes(
        batch=4,
        length=4096,
        heads=Heads(16, 16, 128),
        document=700,
        window=256,
        pack=PACK,
        pack_heads=Heads(64, 8, 128),
        trunk=8192,
        branches=16,
        branch=1024,
        dtype=torch.bfloat16,
    ),
    "cpu": Sizes(
        batch=1,
        length=4096,
        heads=Heads(8, 8, 64),
        document=700,
        window=256,
        pack=tuple(length // 8 for length in PACK),
        pack_heads=Heads(8, 1, 64),
        trunk=1360,  # a sixth, as the branches
        branches=16,
        branch=171,
        dtype=torch.float32,
    ),
}


class Problem(NamedTuple):
    """A call with a mask, and what others need to compute the same."""

    batch: int
    length: int
    heads: Heads
    mask: Mask | None = None
    sees: MaskMod | None = None  # the mask as a function of indices, for FlexAttention
    lengths: tuple[int, ...] = ()  # of packed sequences that have the same result; (): there are none
    tokens: Tensor | None = None  # of the rows of these sequences; None: the tokens of the call, one after the other
    causal: bool = False  # of these sequences
    window: tuple[int, int] | None = None
    bias: Literal["", "constant", "learned"] = ""

    @property
    def density(self) -> float:
        """The share of the scores that are visible."""
        return (
            1.0
            if self.mask is None
            else self.mask.density(batch=self.batch, heads=self.heads.query, q_len=self.length, k_len=self.length)
        )

    @property
    def flops(self) -> float:
        """Of a forward: two products of the visible scores."""
        return 4 * self.batch * self.heads.query * self.heads.dim * self.length**2 * self.density


class Bar(NamedTuple):
    """Our speed over a peer's, at least."""

    peer: str
    forward: float | None
    backward: float | None


class Case(NamedTuple):
    name: str
    make: Callable[[Sizes, str], Problem]
    bars: dict[str, tuple[Bar, ...]]  # by device


def ids(lengths: tuple[int, ...], device: str) -> Tensor:
    """The document of each token."""
    return torch.repeat_interleave(torch.tensor(lengths)).to(device)


def cut(length: int, size: int) -> tuple[int, ...]:
    """Lengths of documents of this size; the last is what remains."""
    return tuple(min(size, length - start) for start in range(0, length, size))


def of_documents(s: Sizes, device: str) -> Problem:
    lengths = cut(s.length, s.document)
    document = ids(lengths, device)

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return document[q_idx] == document[kv_idx]

    mask = documents(lengths=torch.tensor(lengths, device=device), total=s.length)
    return Problem(s.batch, s.length, s.heads, mask, sees, lengths * s.batch)


def of_a_pack(s: Sizes, device: str) -> Problem:
    document, total = ids(s.pack, device), sum(s.pack)

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    mask = causal() & documents(lengths=torch.tensor(s.pack, device=device), total=total)
    return Problem(1, total, s.pack_heads, mask, sees, s.pack, causal=True)


def of_a_tree(s: Sizes, device: str) -> Problem:
    """The sequences that have the same result are the branches, each behind its own copy of the trunk."""
    total = s.trunk + s.branches * s.branch
    index = torch.arange(total, device=device)
    end = torch.where(index < s.trunk, total, index + s.branch - (index - s.trunk) % s.branch)

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx < end[kv_idx])

    mask = prefix_tree([-1] + [0] * s.branches, lengths=[s.trunk] + [s.branch] * s.branches).to(device)
    copies = [torch.cat([index[: s.trunk], own]) for own in index[s.trunk :].split(s.branch)]
    lengths = (s.trunk + s.branch,) * s.branches
    return Problem(1, total, s.heads, mask, sees, lengths, torch.cat(copies), causal=True)


def of_padding(s: Sizes, device: str) -> Problem:
    """Keys alone, of other numbers in each batch entry."""
    lengths = torch.tensor([s.length - s.length * (n + 1) // (s.batch + 1) for n in range(s.batch)], device=device)

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < lengths[b]

    return Problem(s.batch, s.length, s.heads, padding(lengths), sees)


def of_a_prefix_lm(s: Sizes, device: str) -> Problem:
    lengths = torch.tensor([s.length * (n + 1) // (2 * s.batch) for n in range(s.batch)], device=device)

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    return Problem(s.batch, s.length, s.heads, prefix_lm(lengths, s.length), sees)


def of_a_window_in_documents(s: Sizes, device: str) -> Problem:
    plain = of_documents(s, device)
    assert plain.mask is not None and plain.sees is not None
    same_document = plain.sees

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < s.window) & same_document(b, h, q_idx, kv_idx)

    sides = s.window - 1, 0
    return plain._replace(mask=window(*sides) & plain.mask, sees=sees, causal=True, window=sides)


def of_a_window_per_head(s: Sizes, device: str) -> Problem:
    """Head h sees T / 2, T / 4, T / 8 or T / 16 keys, its own counted."""
    widths = torch.tensor([s.length >> (h % 4 + 1) for h in range(s.heads.query)], device=device)

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < widths[h])

    start = (torch.arange(s.length, device=device) - widths[:, None] + 1).clamp(min=0)
    mask = intervals(key_start=start[None]) & causal()
    return Problem(s.batch, s.length, s.heads, mask, sees)


def with_a_bias(s: Sizes, device: str) -> Problem:
    return Problem(s.batch, s.length, s.heads, bias="constant")


def with_a_learned_bias(s: Sizes, device: str) -> Problem:
    return Problem(s.batch, s.length, s.heads, bias="learned")


TWICE_DENSE = (Bar("dense mask", 2.0, 2.0),)

CASES = [
    Case("documents of 700", of_documents, {"cuda": (Bar("flex", 1.6, 1.4),), "cpu": TWICE_DENSE}),
    Case("causal pack", of_a_pack, {"cuda": (Bar("varlen", 0.95, 0.95), Bar("fa3", 1.0, 1.0))}),
    Case("prefix tree", of_a_tree, {"cuda": (Bar("unshared pack", 3.3, 3.0),), "cpu": TWICE_DENSE}),
    Case("padding", of_padding, {}),
    Case("prefix LM", of_a_prefix_lm, {}),
    Case("window 256 in documents of 700", of_a_window_in_documents, {}),
    Case("a window per head", of_a_window_per_head, {}),
    Case("bias", with_a_bias, {"cuda": (Bar("plain", 1 / 1.35, 1 / 1.6),)}),
    Case("bias with its gradient", with_a_learned_bias, {"cuda": (Bar("plain", None, 1 / 2.1),)}),
]

NEW_LENGTH_MS = 100.0
"""What the first call of a new length may take on a GPU: a compilation takes seconds."""


def offsets(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
