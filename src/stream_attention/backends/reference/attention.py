"""The specification: attention written as its mathematics, dense, in plain differentiable torch operations.

For query row i and key j of one batch and head, at positions x_i and y_j,

    s_ij = f(softcap(scale * q_i . k_j)) + bias_ij - slope * |x_i - y_j|       softcap(s) = c * tanh(s / c)
    s_ij = -inf  where causal, window, mask or a -inf bias hides key j from query i
    lse_i = log(exp(sink) + sum_j exp(s_ij))
    p_ij = exp(s_ij - lse_i)
    out_i = sum_j p_ij * keep_ij / (1 - dropout_p) * v_j

and a row that sees nothing has out 0, lse -inf (or its sink) and zero gradients. Every other kernel is tested against
this file and none imports it. It is slow, it holds Tq x Tk, and it can be differentiated any number of times, in either
mode, and mapped.

Two ways to compute: in float64 it is the oracle; in the dtype of the inputs it is "the same-dtype eager computation"
from whose error the other kernels' tolerance is derived. One code path serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.score_function import ScoreFunction

Word = int | Tensor
"""Unsigned 32-bit words: a Python int, or an int64 tensor of values in [0, 2**32)."""

_LOW_32 = 0xFFFFFFFF


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    batch_start: int = 0,
    compute_dtype: torch.dtype = torch.float64,
    score_function: ScoreFunction | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of query [B, Tq, Hq, D] over key [B, Tk, Hkv, D] and value [B, Tk, Hkv, Dv].

    Returns out [B, Tq, Hq, Dv] in `compute_dtype` and lse [B, Hq, Tq] in `compute_dtype`, or float32 if that is wider.
    The arguments are those of `stream_attention.attention`, and these say which part of a whole this call is:

    - `q_positions` [Tq], `k_positions` [Tk]: where rows stand, for causal, window and ALiBi. Default: `arange(Tk)` for
      the keys, and for the queries the last Tq positions of that range, so that the last query meets the last key.
    - `q_index` [Tq], `k_index` [Tk], `batch_start`: the i, j and first b that dropout counts with. Default: from 0.

    >>> q, k, v = torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    >>> attention(q, k, v, causal=True)[0].flatten().tolist()
    [1.0, 2.0]
    """
    batch, q_len, q_heads, head_dim = query.shape
    k_len, kv_heads = key.shape[1:3]
    group = q_heads // max(kv_heads, 1)
    device = query.device
    wide_dtype = torch.promote_types(compute_dtype, torch.float32)
    scale = max(head_dim, 1) ** -0.5 if scale is None else scale
    if q_positions is None:
        q_positions = torch.arange(q_len, device=device) + (k_len - q_len)
    if k_positions is None:
        k_positions = torch.arange(k_len, device=device)
    ahead = q_positions[:, None] - k_positions[None, :]  # [Tq, Tk], how far the query stands past the key

    # Which keys each query sees.
    visible = torch.ones(batch, q_heads, q_len, k_len, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (ahead >= 0)
    if window is not None:
        left, right = window
        if left >= 0:
            visible = visible & (ahead <= left)
        if right >= 0:
            visible = visible & (ahead >= -right)
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias != -torch.inf)

    # Rows that take no part may hold anything, NaN included, and 0 * NaN is NaN: they become 0 before they are used.
    query_sees = visible.any(-1)  # [B, Hq, Tq]
    key_is_seen = visible.unflatten(1, (kv_heads, group)).any(2).any(2)  # [B, Hkv, Tk]
    query = _zero_unless(query_sees.transpose(1, 2), query).to(compute_dtype)
    key = _zero_unless(key_is_seen.transpose(1, 2), key).to(compute_dtype)
    value = _zero_unless(key_is_seen.transpose(1, 2), value).to(compute_dtype)
    key = key.repeat_interleave(group, dim=2)  # query head h reads KV head h // group
    value = value.repeat_interleave(group, dim=2)

    # Scores [B, Hq, Tq, Tk].
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if score_function is not None:
        rows = torch.arange(q_len, device=device) if q_index is None else q_index
        columns = torch.arange(k_len, device=device) if k_index is None else k_index
        entries = torch.arange(batch, device=device) + batch_start
        indices = (x.int() for x in (entries, torch.arange(q_heads, device=device), rows, columns))
        scores = score_function(scores, visible, *indices)
        visible = visible & (scores != -torch.inf)  # which hides like a mask
        value = _zero_unless(visible.any(2).transpose(1, 2), value)
    if bias is not None:
        scores = scores + bias.to(compute_dtype)
    if alibi_slopes is not None:
        # Neither slopes nor distances above 256 are bf16 numbers: the penalty is rounded once, when it is complete.
        penalty = alibi_slopes.to(wide_dtype)[..., None, None] * ahead.abs()
        scores = scores - penalty.to(compute_dtype)
    logits = torch.where(visible, scores, -torch.inf)
    if sink is not None:
        sink_column = sink.to(compute_dtype)[None, :, None, None].expand(batch, q_heads, q_len, 1)
        logits = torch.cat([logits, sink_column], dim=-1)

    # Softmax. A row of nothing but -inf would give NaN, so it is computed as a row of zeros and then replaced.
    alive = (logits != -torch.inf).any(-1)  # [B, Hq, Tq]
    logits = torch.where(alive[..., None], logits, 0.0)
    lse = torch.where(alive, torch.logsumexp(logits.to(wide_dtype), dim=-1), -torch.inf)
    probabilities = torch.softmax(logits, dim=-1)[..., :k_len]
    probabilities = torch.where(visible & alive[..., None], probabilities, 0.0)

    if dropout_p > 0.0:
        if seed is None:
            seed = torch.randint(2**63 - 1, (2,), device=device)
        seed, offset = (seed, 0) if isinstance(seed, int) else (seed[0], seed[1])
        part: dict[str, Any] = {"batch_start": batch_start, "q_index": q_index, "k_index": k_index, "device": device}
        keep = dropout_keep(seed, offset, batch, q_heads, q_len, k_len, dropout_p, **part)
        probabilities = torch.where(keep, probabilities / (1.0 - dropout_p), 0.0)
    return torch.einsum("bhij,bjhd->bihd", probabilities, value), lse


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention within each of the sequences packed into query [Nq, Hq, D], key [Nk, Hkv, D] and value [Nk, Hkv, Dv].

    Sequence b owns rows `cu_seqlens[b]` to `cu_seqlens[b + 1]`; rows past the last entry see nothing and hold anything.
    Returns out [Nq, Hq, Dv] and lse [Hq, Nq]. In dropout b is the sequence, and i and j count within it.
    """
    if dropout_p > 0.0 and seed is None:
        seed = torch.randint(2**63 - 1, (2,), device=query.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    # Widened once, so that gradients of the sequences are summed wide and not in a narrow dtype one by one.
    wide_dtype = torch.promote_types(compute_dtype, torch.float32)
    sink = None if sink is None else sink.to(wide_dtype)
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.to(wide_dtype)
    options: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    options |= {"dropout_p": dropout_p, "seed": seed, "compute_dtype": compute_dtype}
    outs, lses = [], []
    for b in range(len(starts_q) - 1):
        rows = slice(starts_q[b], starts_q[b + 1])
        columns = slice(starts_k[b], starts_k[b + 1])
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        its = query[None, rows], key[None, columns], value[None, columns]
        out, lse = attention(*its, alibi_slopes=slopes, sink=sink, batch_start=b, **options)
        outs.append(out[0])
        lses.append(lse[0])
    tail, q_heads = query.shape[0] - starts_q[-1], query.shape[1]
    outs.append(query.new_zeros(tail, q_heads, value.shape[-1], dtype=compute_dtype))
    lses.append(query.new_full((q_heads, tail), -torch.inf, dtype=wide_dtype))
    return torch.cat(outs), torch.cat(lses, dim=-1)


def attention_mass(
    query: Tensor,
    key: Tensor,
    *,
    row_weights: Tensor | None = None,
    per_query_head: bool = False,
    compute_dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Tensor:
    """The probabilities of `attention` summed over the queries, each times its row weight: mass_j = sum_i w_i p_ij.

    `row_weights` is [B, Hq, Tq]; `options` are those of `attention`. Returns [B, Hkv, Tk], summed over the query heads
    that share a key, or [B, Hq, Tk] per query head.
    """
    batch, k_len, kv_heads, _ = key.shape
    # Value j is the j-th unit vector, so that a row of the output is the row of probabilities.
    units = torch.eye(k_len, dtype=query.dtype, device=key.device)[None, :, None].expand(batch, k_len, kv_heads, k_len)
    probabilities = attention(query, key, units, compute_dtype=compute_dtype, **options)[0].transpose(1, 2)
    if row_weights is not None:
        probabilities = probabilities * row_weights.to(compute_dtype)[..., None]
    mass = probabilities.sum(2)
    return mass if per_query_head else mass.unflatten(1, (kv_heads, -1)).sum(2)


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, compute_dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """The state of a union of disjoint sets of keys, from the states of the sets.

    outs are [B, Tq, Hq, Dv] (packed: [Nq, Hq, Dv]) and lses [B, Hq, Tq] (packed: [Hq, Nq]), one of each per set:

        lse = log(sum_n exp(lse_n))        out = sum_n exp(lse_n - lse) * out_n

    A set that a row sees nothing of has lse -inf, and its out is not looked at. Empty in every set: out 0, lse -inf.
    """
    parts = torch.stack([lse.to(compute_dtype) for lse in lses])  # [n, B, Hq, Tq]
    there = parts != -torch.inf
    alive = there.any(0)
    parts = torch.where(alive, parts, 0.0)  # -inf minus -inf would be NaN
    lse = torch.logsumexp(parts, dim=0)
    weights = torch.exp(parts - lse)
    stacked = torch.stack([out.to(compute_dtype) for out in outs])  # [n, B, Tq, Hq, Dv]
    stacked = _zero_unless(there.transpose(-1, -2), stacked)
    out = (weights.transpose(-1, -2)[..., None] * stacked).sum(0)
    return out, torch.where(alive, lse, -torch.inf)


def dropout_keep(
    seed: Word,
    offset: Word,
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    dropout_p: float,
    *,
    batch_start: int = 0,
    q_index: Tensor | None = None,
    k_index: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which probabilities survive dropout: bool [B, Hq, Tq, Tk], a function of (seed, offset, b, h, i, j) alone.

    `seed` and `offset` are 64-bit integers (ints, or int64 tensors of no dimension); `heads` is Hq. b counts from
    `batch_start`; i and j are `arange`, unless `q_index` [Tq] and `k_index` [Tk] say which rows of the whole these are.
    """
    b = batch_start + torch.arange(batch, device=device)
    head = b[:, None] * heads + torch.arange(heads, device=device)  # [B, Hq]
    i = torch.arange(q_len, device=device) if q_index is None else q_index.long()
    j = torch.arange(k_len, device=device) if k_index is None else k_index.long()
    word = dropout_word(seed, offset, head[:, :, None, None], i[:, None], j[None, :])
    threshold = int(dropout_p * 2**32)  # exact: a power of two only moves the exponent
    return torch.as_tensor(word >= threshold)


def dropout_word(seed: Word, offset: Word, head: Word, i: Word, j: Word) -> Word:
    """The 32 random bits of element (i, j) of one batch and head, `head` = b * Hq + h; all arguments broadcast.

    mix32(r_i ^ c_j): one Philox word per row and one per column, from even and odd streams, then a mixer per element.
    """
    key = _halves(seed)
    row = philox4x32_10((i & _LOW_32, (2 * head) & _LOW_32, *_halves(offset)), key)[0]
    column = philox4x32_10((j & _LOW_32, (2 * head + 1) & _LOW_32, *_halves(offset)), key)[0]
    return mix32(row ^ column)


def philox4x32_10(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Ten rounds of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW_32, (k1 + 0xBB67AE85) & _LOW_32
    return c0, c1, c2, c3


def mix32(x: Word) -> Word:
    """A bijection of 32-bit words in which every bit of x reaches every bit of the result (Wellons' lowbias32)."""
    x = x ^ (x >> 16)
    x = _multiply(x, 0x7FEB352D)[1]
    x = x ^ (x >> 15)
    x = _multiply(x, 0x846CA68B)[1]
    return x ^ (x >> 16)


def _multiply(x: Word, constant: int) -> tuple[Word, Word]:
    """High and low word of the 64-bit product of two 32-bit words; x goes by halves, since int64 holds only 63 bits."""
    low_product = (x & 0xFFFF) * constant
    middle = (x >> 16) * constant + (low_product >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_product & 0xFFFF)


def _halves(x: Word) -> tuple[Word, Word]:
    """Low and high word of a 64-bit integer, of its two's complement if it is negative."""
    return x & _LOW_32, (x >> 32) & _LOW_32


def _zero_unless(condition: Tensor, rows: Tensor) -> Tensor:
    """rows [..., D] where condition [...] holds, else 0; the gradient stops there too, whatever it is."""
    return torch.where(condition[..., None], rows, 0.0)
