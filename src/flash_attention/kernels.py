"""flash_attention(Q, K, V) on 2-D tensors: one sequence, one head."""

from __future__ import annotations

from torch import Tensor

from stream_attention import attention


def flash_attention(Q: Tensor, K: Tensor, V: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Attention of local queries over global keys, exact, in one streaming pass, differentiable.

    Args:
        Q: `[Tq, d]`, on any device, fp16, bf16, fp32 or fp64.
        K: `[Tk, d]`.
        V: `[Tk, dv]`.
        causal: the last query sees every key, the one before all but the last, and so on.
        scale: of the scores; None is d ** -0.5.

    Returns:
        `[Tq, dv]` in the dtype of Q.

    Raises:
        ValueError, TypeError: a bad argument, before any work.

    >>> import torch
    >>> from flash_attention.kernels import flash_attention
    >>> flash_attention(torch.randn(16, 128), torch.randn(1024, 128), torch.randn(1024, 128)).shape
    torch.Size([16, 128])
    """
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor; got {type(tensor).__name__}")
        if tensor.dim() != 2:
            raise ValueError(
                f"{name}: expected two dims [tokens, features]; got {list(tensor.shape)}. "
                "Batches and heads: stream_attention.attention, [B, T, H, D]"
            )
    return attention(*(t[None, :, None] for t in (Q, K, V)), causal=causal, scale=scale)[0, :, 0]
