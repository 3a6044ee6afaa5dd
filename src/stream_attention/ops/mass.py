"""attention_mass(): how much attention each key receives, without the attention matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.eager.tuning import blocked
from ..base.errors import refuse
from ..base.problem import CallOptions, Inputs
from ..dispatch import validate
from ..dispatch.prepare import problem_of
from .attention import call, in_autocast_dtype, leading_ones, op_arguments


@torch.no_grad()
def attention_mass(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    window_queries: int | None = None,
    row_weights: Tensor | None = None,
    per_query_head: bool = False,
) -> Tensor:
    """The attention weights of each key, summed over the queries and over the query heads that share it.

    A second streaming pass over the keys makes the weights again, exp(score - lse), from the log-sum-exp that the
    attention saved, tile by tile: O(N) memory. A row that sees no key adds nothing and any other adds 1 in all, less
    what its sink takes. No gradient flows through it.

    Args:
        query: `[B, Tq, Hq, D]`, fp16, bf16, fp32 or fp64.
        key: `[B, Tk, Hkv, D]`.
        lse: `[B, Hq, Tq]`, as `attention(..., return_lse=True)` of the same arguments returned it; None runs that
            attention first.
        causal, window, mask, bias, alibi_slopes, sink, softcap, scale: as in `attention`, and as they were there.
        window_queries: only the last so many queries count.
        row_weights: float, `[B, Tq]` or `[B, Hq, Tq]`: what a query counts. One that counts 0 may hold anything.
        per_query_head: do not sum over the query heads that share a key.

    Returns:
        `[B, Hkv, Tk]`, or `[B, Hq, Tk]` per query head: fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError, TypeError: a bad argument, before any work; the message names it with expected and actual.

    >>> import torch
    >>> from stream_attention import attention, attention_mass
    >>> query, key, value = torch.randn(3, 1, 100, 4, 16)
    >>> out, lse = attention(query, key, value, causal=True, return_lse=True)
    >>> mass = attention_mass(query, key, lse, causal=True)
    >>> mass.shape, round(float(mass[0, 0].sum()))
    (torch.Size([1, 4, 100]), 100)
    """
    query, key = in_autocast_dtype(query, key)
    options = CallOptions(causal, window, softcap, scale)
    validate.attention_tensors(Inputs(query, key, key, mask, bias, alibi_slopes, sink), may_be_empty=True)
    validate.options(options, query)
    _check_rows(query, lse, window_queries, row_weights, per_query_head)
    mask, bias = leading_ones(mask, 4), leading_ones(bias, 4)
    if row_weights is not None and row_weights.dim() == 2:
        row_weights = row_weights.unsqueeze(1)
    if window_queries is not None and window_queries < query.shape[1]:
        last = slice(query.shape[1] - window_queries, None)
        query = query[:, last]
        mask, bias = (x if x is None or x.shape[2] == 1 else x[:, :, last] for x in (mask, bias))
        lse, row_weights = (x if x is None else x[:, :, last] for x in (lse, row_weights))
    arguments = op_arguments(Inputs(query, key, key, mask, bias, alibi_slopes, sink), options)
    if lse is None:
        _, lse = call(arguments)
    # The pass reads no value, so the narrowest there is stands in for it.
    problem, inputs, _ = problem_of((query, key, key[..., :1], *arguments[3:]))
    lse = lse.to(problem.state_dtype)
    if row_weights is not None:
        row_weights = row_weights.to(lse.dtype).expand_as(lse)

    from ..backends.eager.blocked import key_mass

    with torch.autocast(problem.device.type, enabled=False):
        return key_mass(problem, inputs, blocked(problem), lse, row_weights, per_query_head)


def _check_rows(
    query: Tensor, lse: Tensor | None, window_queries: int | None, row_weights: Tensor | None, per_query_head: bool
) -> None:
    batch, q_len, q_heads, _ = query.shape
    per_row = (batch, q_heads, q_len)
    for name, tensor, shapes in (("lse", lse, [per_row]), ("row_weights", row_weights, [(batch, q_len), per_row])):
        if tensor is None:
            continue
        validate.floating(name, tensor, query)
        if tensor.shape not in shapes:
            refuse(name, f"shape {' or '.join(str(list(shape)) for shape in shapes)}", list(tensor.shape))
    validate.optional_int("window_queries", window_queries, 1)
    validate.flags(per_query_head=per_query_head)
