"""MemoryEfficientAttention: attention by chunks of queries, none of which keeps anything for the backward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core._masks import split_mask
from ..core._measure import check_counts
from ..errors import refuse
from ..ops.attention import attention


class MemoryEfficientAttention(nn.Module):
    """Non-causal attention of `chunk_size` queries at a time, without parameters.

    `attention` needs no such chunks: its memory grows with the length and not with its square. What they still save is
    what one call works with at a time, and with `use_checkpoint` the LSE and a second copy of the output, which
    autograd would keep: the backward computes a chunk's forward again instead.

    Args:
        hidden_size: of all heads together.
        num_heads: of queries; keys and values may have fewer, a divisor of these.
        chunk_size: queries at a time.
        use_checkpoint: compute chunks again in the backward. Without gradients it changes nothing.

    >>> import torch
    >>> module = MemoryEfficientAttention(hidden_size=64, num_heads=4, chunk_size=128)
    >>> query, key, value = torch.randn(3, 2, 300, 4, 16)
    >>> module.chunked_attention(query, key, value).shape
    torch.Size([2, 300, 4, 16])
    """

    def __init__(self, hidden_size: int, num_heads: int, chunk_size: int = 512, use_checkpoint: bool = True) -> None:
        super().__init__()
        check_counts(hidden_size=hidden_size, num_heads=num_heads, chunk_size=chunk_size)
        if hidden_size % num_heads:
            refuse("hidden_size", f"a multiple of num_heads {num_heads}", hidden_size)
        if not isinstance(use_checkpoint, bool):
            refuse("use_checkpoint", "a bool", f"{use_checkpoint!r}", error=TypeError)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.chunk_size, self.use_checkpoint = chunk_size, use_checkpoint

    def chunked_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """`[B, Tq, num_heads, Dv]` of query `[B, Tq, num_heads, head_dim]` against keys and values of any length.

        `attention_mask` is that of the other modules: bool, True = attend, or added to the scores; `[B, Tk]`,
        `[B, Tq, Tk]`, or four dims broadcastable to `[B, num_heads, Tq, Tk]`.
        """
        if not isinstance(query, Tensor) or query.dim() != 4 or query.shape[2:] != (self.num_heads, self.head_dim):
            got = list(query.shape) if isinstance(query, Tensor) else type(query).__name__
            refuse("query", f"a tensor [B, Tq, {self.num_heads}, {self.head_dim}]", got)
        if not isinstance(key, Tensor) or key.dim() != 4:
            got = list(key.shape) if isinstance(key, Tensor) else type(key).__name__
            refuse("key", f"a tensor [B, Tk, Hkv, {self.head_dim}]", got)
        mask, bias = split_mask(attention_mask, query, key)
        again = self.use_checkpoint and torch.is_grad_enabled()
        chunks = []
        for start in range(0, max(1, query.shape[1]), self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            call = partial(attention, query[:, rows], key, value, mask=_rows(mask, rows), bias=_rows(bias, rows))
            # Without the state of the random numbers, 5 KB a chunk: none are drawn.
            chunks.append(checkpoint(call, use_reentrant=False, preserve_rng_state=False) if again else call())
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)

    forward = chunked_attention

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, chunk_size={self.chunk_size}, "
            f"use_checkpoint={self.use_checkpoint}"
        )


def _rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    """A chunk's part of a mask or bias `[., ., Tq or 1, .]`."""
    return tensor if tensor is None or tensor.shape[2] == 1 else tensor[:, :, rows]
