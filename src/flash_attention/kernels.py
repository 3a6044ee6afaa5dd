"""flash_attention(Q, K, V) on 2-D tensors: one sequence, one head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stream_attention import attention
from stream_attention.base.errors import refuse
from stream_attention.dispatch import validate


def flash_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    enable_distributed: bool = False,
    process_group: Any = None,
) -> Tensor:
    """Attention of local queries over global keys, exact, in one streaming pass, differentiable.

    Args:
        Q: `[Tq, d]`, on any device, fp16, bf16, fp32 or fp64.
        K: `[Tk, d]`.
        V: `[Tk, dv]`.
        causal: the last query sees every key, the one before all but the last, and so on.
        scale: of the scores; None is d ** -0.5.
        enable_distributed: the ranks of a group, each of which has all of Q, K and V, divide the queries among them,
            and each gets the whole result. A script that torchrun starts first calls
            `stream_attention.distributed.initialize()`. False computes on this process alone.
        process_group: of these ranks; None is the default group.

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
        validate.is_tensor(name, tensor)
        if tensor.dim() != 2:
            hint = "Batches and heads: stream_attention.attention, [B, T, H, D]"
            refuse(name, "two dims [tokens, features]", list(tensor.shape), hint)
    heads = [t[None, :, None] for t in (Q, K, V)]
    if enable_distributed:
        from stream_attention.distributed.query_shard import query_sharded_attention

        return query_sharded_attention(*heads, group=process_group, causal=causal, scale=scale)[0, :, 0]
    if process_group is not None:
        refuse("process_group", "None without enable_distributed=True", type(process_group).__name__)
    return attention(*heads, causal=causal, scale=scale)[0, :, 0]
