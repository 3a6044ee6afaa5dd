"""decode_attention(): one or a few new queries against a cache of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import validate
from ..cache_views import KVCache
from ..problem import UNBOUNDED


@torch.no_grad()
def decode_attention(
    query: Tensor,
    cache: KVCache,
    *,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    tree_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the newest tokens of each row over everything its cache holds.

    The tokens are appended first, so a row's length counts them: query t of row b stands at position
    `lengths[b] - Tq + t`. A row whose length is 0 returns 0. No gradient flows through it.

    Args:
        query: `[B, Tq, Hq, D]`, fp16, bf16, fp32 or fp64; Tq is 1, or a few that were guessed ahead.
        cache: `ContiguousKV`, `PagedKV` or `QuantizedKV` of B rows, in the query's dtype.
        causal: a query sees no key behind it. `window=(left, right)`, `alibi_slopes`, `sink`, `softcap`, `scale`: as in
            `attention`.
        tree_mask: bool `[B, Tq, Tq]`: which of the new tokens each of them sees, in place of `causal` among them; they
            see all older ones.
        return_lse: also return the log-sum-exp, `[B, Hq, Tq]`, fp32 (fp64 for fp64).
        out: `[B, Tq, Hq, Dv]` to write into.

    Raises:
        ValueError, TypeError: a bad argument, before any work; the message names it with expected and actual.

    >>> import torch
    >>> from stream_attention import ContiguousKV, decode_attention
    >>> key, value = torch.randn(2, 2, 100, 4, 16)
    >>> cache = ContiguousKV(key, value, lengths=torch.tensor([7, 100], dtype=torch.int32))
    >>> decode_attention(torch.randn(2, 1, 8, 16), cache).shape
    torch.Size([2, 1, 8, 16])
    """
    validate.decoding(query, cache, tree_mask, alibi_slopes, sink, out)
    validate.options(causal, window, softcap, scale, 0.0, None, None, return_lse, query)
    left, right = window or (UNBOUNDED, UNBOUNDED)
    if causal and tree_mask is None:
        right = 0 if right == UNBOUNDED else min(right, 0)
    lengths = cache.lengths
    if lengths is None:
        lengths = torch.full((cache.batch,), cache.capacity, dtype=torch.int32, device=query.device)
    slopes = alibi_slopes[None] if alibi_slopes is not None and alibi_slopes.dim() == 1 else alibi_slopes
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)

    from ..kernels.eager_decode import Scores, Seen, decode

    seen = Seen(lengths, None if left == UNBOUNDED else left, None if right == UNBOUNDED else right, tree_mask)
    with torch.autocast(query.device.type, enabled=False):
        result, lse = decode(query, cache, seen, Scores(scale, float(softcap), slopes, sink))
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result
