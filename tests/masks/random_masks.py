"""Random masks, and what they mean by plain Python: the oracle of the tests of masks."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from stream_attention.masks import Blocks, Mask

BATCH, HEADS = 2, 3
PARTS = ("band", "keys", "queries", "labels", "dense", "blocks")


def random_mask(random: Random, q_len: int, k_len: int, parts: tuple[str, ...] | None = None) -> Mask:
    """A mask of these parts, of some where they are None, with dims of 1 and without, for [2, 3, q_len, k_len]."""
    if parts is None:
        parts = tuple(part for part in PARTS if random.random() < 0.35)
    fields: dict[str, Any] = {}
    if "band" in parts:
        fields["left"] = random.choice([None, random.randint(-3, k_len)])
        fields["right"] = random.choice([None, random.randint(-3, k_len)])
    if "keys" in parts:
        fields["key_start"], fields["key_end"] = bounds(random, q_len, k_len)
    if "queries" in parts or "labels" in parts:
        fields["query_start"], fields["query_end"] = bounds(random, k_len, q_len)
    if "labels" in parts and (fields["query_start"] is not None or fields["query_end"] is not None):
        fields["query_label"] = ints(random, q_len, -2, q_len)
    if "dense" in parts:
        fields["dense"] = bits(random, *dims(random), random.choice([1, q_len]), random.choice([1, k_len]))
    if "blocks" in parts:
        rows, cols = random.randint(1, q_len + 1), random.randint(1, k_len + 1)
        fields["blocks"] = Blocks(bits(random, *dims(random), -(-q_len // rows), -(-k_len // cols)), rows, cols)
    return Mask(**fields)


def dims(random: Random) -> tuple[int, int]:
    return random.choice([1, BATCH]), random.choice([1, HEADS])


def bits(random: Random, *shape: int) -> Tensor:
    density = random.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    return torch.tensor([random.random() < density for _ in range(torch.Size(shape).numel())], dtype=torch.bool).view(
        shape
    )


def ints(random: Random, length: int, least: int, most: int) -> Tensor:
    shape = *dims(random), random.choice([1, length])
    values = [random.randint(least, most) for _ in range(torch.Size(shape).numel())]
    if random.random() < 0.5:  # in order, as they mostly are
        values.sort()
    return torch.tensor(values, dtype=torch.int32).view(shape)


def bounds(random: Random, length: int, most: int) -> tuple[Tensor | None, Tensor | None]:
    start, end = (random.choice([None, ints(random, length, -2, most + 2)]) for _ in range(2))
    return start, end


def spelled_out(mask: Mask, q_len: int, k_len: int) -> Tensor:
    """What the mask means, score by score: bool [2, 3, q_len, k_len]."""

    def at(tensor: Tensor, *index: int) -> int:
        return tensor[tuple(min(i, size - 1) for i, size in zip(index, tensor.shape, strict=True))].item()

    def sees(b: int, h: int, i: int, j: int) -> bool:
        position = k_len - q_len + i
        label = i if mask.query_label is None else at(mask.query_label, b, h, i)
        checks = [
            mask.left is None or j >= position - mask.left,
            mask.right is None or j <= position + mask.right,
            mask.key_start is None or j >= at(mask.key_start, b, h, i),
            mask.key_end is None or j < at(mask.key_end, b, h, i),
            mask.query_start is None or label >= at(mask.query_start, b, h, j),
            mask.query_end is None or label < at(mask.query_end, b, h, j),
            mask.dense is None or at(mask.dense, b, h, i, j),
        ]
        if mask.blocks is not None:
            table, rows, cols = mask.blocks
            checks.append(at(table, b, h, i // rows, j // cols))
        return all(checks)

    found = [sees(b, h, i, j) for b in range(BATCH) for h in range(HEADS) for i in range(q_len) for j in range(k_len)]
    return torch.tensor(found, dtype=torch.bool).view(BATCH, HEADS, q_len, k_len)


def whole(mask: Mask, q_len: int, k_len: int) -> Tensor:
    return mask.as_dense(batch=BATCH, heads=HEADS, q_len=q_len, k_len=k_len)
