"""A model of the shape of Llama-3-8B with random weights, and what a pass through it costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Shape(NamedTuple):
    layers: int
    hidden: int = 4096
    mlp: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256

    @property
    def of_layers(self) -> int:
        """Weights of matrix products, without the head's."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    def flops(self, tokens: int, pairs: int, logits: int) -> float:
        """Of a pass: so many tokens, query-key pairs of a head, and tokens that have logits."""
        attention = 4 * self.heads * self.head_dim * pairs * self.layers
        return 2.0 * self.of_layers * tokens + attention + 2.0 * self.hidden * self.vocabulary * logits

    def told(self) -> str:
        return (
            f"{self.layers} layers of Llama-3-8B's shape: hidden {self.hidden}, MLP {self.mlp}, {self.heads}/"
            f"{self.kv_heads} heads of {self.head_dim}, vocabulary {self.vocabulary}, random bf16 weights"
        )


TINY = Shape(2, hidden=64, mlp=96, heads=4, kv_heads=2, head_dim=16, vocabulary=128)


def made(shape: Shape, device: str, longest: int) -> Any:
    """The model in bf16, its weights drawn on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=longest,
        rope_theta=500000.0,
        initializer_range=1.28 * shape.hidden**-0.5,  # 0.02 for 4096: scores of a tiny one have the same spread
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device), _default(torch.bfloat16):
        return LlamaForCausalLM(config)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
