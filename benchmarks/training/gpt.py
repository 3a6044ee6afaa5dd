"""A small GPT that is told from outside how to attend, so that two trainings differ in nothing but that.

Four layers of width 1024 with eight heads of 128, rotary positions, RMSNorm before each part, a GELU MLP four times as
wide: 51 million parameters, in fp32. Under bf16 autocast the products are bf16 while the residual stream, the norms and
the loss stay fp32; queries, keys and values reach every attention in the dtype that the products have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stream_attention import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: query, key and value to output, all `[B, T, H, D]`."""

HEAD_DIM = 128
ROTARY_BASE = 1e4


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, causal=True)


def ours_deterministic(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, causal=True, deterministic=True)


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


class Size(NamedTuple):
    vocabulary: int
    context: int = 2048
    width: int = 1024
    layers: int = 4

    @property
    def head_dim(self) -> int:
        """128, or half the width of a model too narrow for two such heads."""
        return min(HEAD_DIM, self.width // 2)

    @property
    def heads(self) -> int:
        return self.width // self.head_dim


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.norm = nn.RMSNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(size.width),
            nn.Linear(size.width, 4 * size.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        read = attend(rotated(query, cos, sin), rotated(key, cos, sin), value)
        x = x + self.out(read.flatten(-2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """The weights are those of the seed, on any device: they are drawn on the CPU."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        half = size.head_dim // 2
        angles = torch.arange(size.context)[:, None, None] * ROTARY_BASE ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)  # [T, 1, D/2]
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._draw(torch.Generator().manual_seed(seed), size.layers)

    def _draw(self, generator: torch.Generator, layers: int) -> None:
        """Matrices of 0.02, those that write into the residual stream smaller, so that its size is one at any depth."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                writes = name.endswith(("out.weight", "mlp.3.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if writes else 0.02, generator=generator)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Mean loss in nats of every next token of `[B, T + 1]`."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]], attend)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[B, T, H, D]`, in its dtype: channel i turns with channel i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)
