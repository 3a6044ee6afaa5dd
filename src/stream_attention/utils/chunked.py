"""MemoryEfficientAttention: attention by chunks of queries, which the backward recomputes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..base.errors import refuse
from ..core._checks import check_counts, check_heads
from ..core._masks import split_mask
from ..dispatch.validate import flags
from ..ops.attention import attention


class MemoryEfficientAttention(nn.Module):
    """Non-causal attention of `chunk_size` queries at a time, without parameters.

    `attention` needs no such chunks: its memory is linear in the length. They still save the temporary memory of a
    call, and with `use_checkpoint` the LSE and a second copy of the output, which autograd would save: the backward
    recomputes a chunk's forward instead.

    Args:
        hidden_size: of all heads together.
        num_heads: of queries; keys and values may have fewer, a divisor of these.
        chunk_size: queries at a time.
        use_checkpoint: recompute chunks in the backward. Without gradients it has no effect.

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
        flags(use_checkpoint=use_checkpoint)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.chunk_size, self.use_checkpoint = chunk_size, use_checkpoint

    def chunked_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """`[B, Tq, num_heads, Dv]` of query `[B, Tq, num_heads, head_dim]` against keys and values of any length.

        `attention_mask` is that of the other modules: bool, True = attend, or added to the scores; `[B, Tk]`,
        `[B, Tq, Tk]`, or four dims broadcastable to `[B, num_heads, Tq, Tk]`.
        """
        if not isinstance(query, Tensor) or not isinstance(key, Tensor):
            refuse("query and key", "tensors [B, T, H, D]", f"{type(query).__name__} and {type(key).__name__}")
        check_heads(self.num_heads, self.head_dim, query, key)
        mask, bias = split_mask(attention_mask, query, key)
        recompute = self.use_checkpoint and torch.is_grad_enabled()
        chunks = []
        for start in range(0, max(1, query.shape[1]), self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            call = partial(attention, query[:, rows], key, value, mask=_rows(mask, rows), bias=_rows(bias, rows))
            # No random numbers are drawn, so their state, 5 KB a chunk, is not saved.
            chunks.append(checkpoint(call, use_reentrant=False, preserve_rng_state=False) if recompute else call())
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)

    forward = chunked_attention

    def extra_repr(self) -> str:
        names = ("hidden_size", "num_heads", "chunk_size", "use_checkpoint")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    """A chunk's part of a mask or bias `[., ., Tq or 1, .]`."""
    return tensor if tensor is None or tensor.shape[2] == 1 else tensor[:, :, rows]
