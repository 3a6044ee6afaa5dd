"""torch's `flex_attention`, in its layout `[B, H, T, D]`, on a CPU with a backward.

Its block masks and their functions are torch's own; here they become a `Mask`, once for each block mask.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from ..base.errors import refuse
from ..base.score_function import ScoreMod
from ..masks import Mask, from_block_mask
from ..ops.attention import attention
from .errors import refuse_missing

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` by `attention`, differentiable in tensors that a score_mod
    reads too. It need not be compiled.

    Args:
        query: `[B, Hq, Tq, D]`; key `[B or 1, Hkv, Tk, D]`; value `[B or 1, Hkv, Tk, Dv]`.
        score_mod: runs in plain torch: docs/score_functions.md.
        block_mask: becomes a `Mask` at its first use, by evaluating its function; tiles that it masks are skipped.
        enable_gqa: must be set where there are fewer KV heads than query heads.
        return_lse, return_aux: also return the LSE `[B, Hq, Tq]`, or an `AuxOutput` with it.
        kernel_options: of torch's kernels; not looked at.

    Raises:
        ValueError: shapes, heads, or a block mask of other lengths.
        NotImplementedError: `max_scores` of `return_aux`.

    >>> import torch
    >>> from stream_attention.compat.flex import create_block_mask, flex_attention
    >>> query = torch.randn(1, 4, 100, 16, requires_grad=True)
    >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 100, 100, device="cpu")
    >>> flex_attention(query, query, query, block_mask=mask).sum().backward()
    >>> query.grad.shape
    torch.Size([1, 4, 100, 16])
    """
    if return_aux is not None:
        if return_lse:
            refuse("return_lse", "False beside return_aux", return_lse)
        if return_aux.max_scores:
            refuse_missing("return_aux.max_scores", "False", True, "The LSE is there: AuxRequest(lse=True).")
    heads_first = {"query": query, "key": key, "value": value}
    for name, tensor in heads_first.items():
        if isinstance(tensor, Tensor) and tensor.dim() != 4:
            refuse(name, "[B, H, T, D]", list(tensor.shape))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        hint = "For fewer KV heads pass enable_gqa=True."
        refuse("key", f"as many heads as the query, {query.shape[1]}", key.shape[1], hint)
    if key.shape[0] != query.shape[0] and key.shape[0] == 1:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    out, lse = attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        score_mod=score_mod,
        mask=None if block_mask is None else _mask_of(block_mask),
        scale=scale,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


_masks: WeakKeyDictionary[BlockMask, Mask] = WeakKeyDictionary()


def _mask_of(block_mask: BlockMask) -> Mask:
    """The mask of a block mask, made at its first use."""
    found = _masks.get(block_mask)
    if found is None:
        found = _masks[block_mask] = from_block_mask(block_mask)
    return found
