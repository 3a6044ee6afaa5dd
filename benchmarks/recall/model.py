"""A transformer that has learnt one thing: to say which value stood beside a key in its context.

A context token is the sum of a key's embedding and a value's, at its own position; a question is a key's embedding
alone, at the position after the context. So a pair lives in one place of the cache, and an accuracy tells which part of
the pairs a compressed cache still holds. Two layers, hidden 64, two query heads on one KV head, rotary base 1e6.

It has learnt to look for content and hardly minds positions (without rotation at all it still answers), so it says
nothing about whether a compressor's caches are right in position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stream_attention import attention

HIDDEN, LAYERS, QUERY_HEADS, KV_HEADS = 64, 2, 2, 1
HEAD_DIM = HIDDEN // QUERY_HEADS
KEYS, VALUES = 256, 64
ROTARY_BASE = 1e6


class Pairs(NamedTuple):
    """Contexts and what is asked of each. No key stands twice in a context, so every question has one answer."""

    keys: Tensor  # [B, T]
    values: Tensor  # [B, T]
    asked: Tensor  # [B, Tq], positions in the context

    @property
    def questions(self) -> Tensor:
        """The keys asked for. [B, Tq]"""
        return self.keys.gather(1, self.asked)

    @property
    def answers(self) -> Tensor:
        """[B, Tq]"""
        return self.values.gather(1, self.asked)


def draw(batch: int, pairs: int, questions: int, generator: torch.Generator) -> Pairs:
    """Random contexts, and as many different pairs of each to ask for."""
    keys = torch.rand(batch, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (batch, pairs), generator=generator)
    asked = torch.rand(batch, pairs, generator=generator).argsort(1)[:, :questions]
    return Pairs(keys, values, asked)


class Cache(NamedTuple):
    """What a question reads in one layer: a layer's keys and values, or what a compressor left of them."""

    key: Tensor  # [B, kept, Hkv, D]
    value: Tensor  # [B, kept, Hkv, D]
    mask: Tensor | None = None  # bool, broadcastable to [B, Hq, Tq, kept]: where slots hold no token


class Layer(NamedTuple):
    """What one layer has cached of the context, rotated at its positions, and the queries with which it read it."""

    key: Tensor  # [B, T, Hkv, D]
    value: Tensor  # [B, T, Hkv, D]
    query: Tensor  # [B, T, Hq, D]

    @property
    def cache(self) -> Cache:
        return Cache(self.key, self.value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, QUERY_HEADS * HEAD_DIM, bias=False)
        self.key = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.value = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(QUERY_HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def project(self, x: Tensor, positions: Tensor) -> Layer:
        """Key, value and query of each token, the first and last rotated."""
        x = self.norm(x)
        key, value, query = (to(x).unflatten(-1, (-1, HEAD_DIM)) for to in (self.key, self.value, self.query))
        return Layer(rotated(key, positions), value, rotated(query, positions))

    def add(self, x: Tensor, read: Tensor) -> Tensor:
        """The residual stream after what attention read, [B, T, Hq, D]."""
        x = x + self.out(read.flatten(-2))
        return x + self.mlp(x)


class Recall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Embedding(KEYS, HIDDEN)
        self.values = nn.Embedding(VALUES, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VALUES)

    def prefill(self, keys: Tensor, values: Tensor) -> list[Layer]:
        """The cache of a context [B, T], layer by layer."""
        x = self.keys(keys) + self.values(values)
        positions = torch.arange(keys.shape[1])
        layers = []
        for block in self.blocks:
            layer = block.project(x, positions)
            x = block.add(x, attention(layer.query, layer.key, layer.value, causal=True))
            layers.append(layer)
        return layers

    def answer(self, questions: Tensor, caches: Sequence[Cache], position: int) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, Tq, VALUES] for keys [B, Tq], and each layer's queries.

        `position` is the length that the context had. A question reads the caches and leaves nothing in them, so any
        number can be asked at once.
        """
        x = self.keys(questions)
        queries = []
        for block, cache in zip(self.blocks, caches, strict=True):
            query = block.project(x, torch.tensor([position])).query
            x = block.add(x, attention(query, cache.key, cache.value, mask=cache.mask))
            queries.append(query)
        return self.head(self.norm(x)), queries

    def forward(self, pairs: Pairs) -> Tensor:
        """Logits of the answers with the whole cache."""
        layers = self.prefill(pairs.keys, pairs.values)
        return self.answer(pairs.questions, [layer.cache for layer in layers], pairs.keys.shape[1])[0]


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [B, T, H, D]: channel i turns with channel i + D/2, by position · base^(−2i/D)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * ROTARY_BASE ** (-torch.arange(half) / half)  # [T, 1, D/2]
    first, second = x.split(half, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


def accuracy(logits: Tensor, answers: Tensor) -> float:
    return (logits.argmax(-1) == answers).float().mean().item()


def loss(logits: Tensor, answers: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten())
