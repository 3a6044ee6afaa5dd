"""The specification of attention in FP8: which codes tensors become, and what is computed from codes, in fp64.

For rows i of queries and j of keys with codes q, k, v and the scales of their blocks,

    x_ij = (q_i . k_j) qs_i ks_j * scale / ln 2          hidden keys: -inf
    M_i = ceil(max_j x_ij)                               an integer, so that to rescale by it rounds nothing
    w_ij = 2^(x_ij - M_i)
    out_i = sum_j e4m3(2^8 w_ij) 2^-8 vs_j v_j / sum_j w_ij          lse_i = ln 2 (M_i + log2 sum_j w_ij)

Only the weights that multiply values are rounded, not those of the denominator. A kernel that streams rounds relative
to the maximum so far: since that is an integer too, it finds the same codes, but for weights below 2^-14 of the
largest, which are subnormal, and which it rounds as finely or finer. One that rounds relative to another integer, as
the Hopper kernel does by sums of 16 weights, has others subnormal: those below 2^-13 of the largest such sum. Either
way a row loses at most n 2^-17 of its sum. `rounded=False` leaves the rounding of weights out: what is exact for these
codes, against which errors are measured (tests/backends/triton/fp8_tolerance.py).

Dense, slow, on any device; no other kernel imports it.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from ...base.fp8_layout import (
    BLOCK,
    E4M3,
    LARGEST,
    QUERY_BLOCK,
    SHIFT,
    SMALLEST,
    CodedInputs,
    KeyCodes,
    QueryCodes,
    alloc_key_codes,
    alloc_query_codes,
    blocks_of,
    first_block,
)
from ...base.fp8_layout import dequantized_keys as dequantized_keys
from ...base.fp8_layout import dequantized_queries as dequantized_queries
from ...base.fp8_layout import hadamard as hadamard
from ...base.fp8_layout import in_order as in_order
from ...base.problem import UNBOUNDED, Forward, Inputs, Problem
from ...gpu.scratch import Outputs


def power_of_two(largest: Tensor) -> Tensor:
    """The scale of a block whose largest magnitude is this: the bits of a power of two are those of an exponent. A
    block of zeros has 1, so that sums in its units stay as large as they were."""
    bits = (largest.float().clamp(min=SMALLEST) * (1 / LARGEST)).view(torch.int32)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(largest == 0, 1.0, scale)


def to_e4m3(x: Tensor) -> Tensor:
    """Rounded to the nearest code; what is too large becomes the largest, NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def quantize_queries(query: Tensor, cu_seqlens: Tensor | None = None, rotate: bool = False) -> QueryCodes:
    """Codes of query `[B, T, H, D]`, or of a pack `[N, H, D]`."""
    sequences, blocks = _sequences(query, cu_seqlens)
    codes = alloc_query_codes(query, blocks)
    codes.query.view(torch.uint8).zero_()
    codes.scales.fill_(1.0)
    for first, rows in sequences:
        ours, scales = _quantized(_rotated(rows, rotate), QUERY_BLOCK)
        codes.query[:, first * BLOCK :][:, : ours.shape[1]] = ours
        codes.scales[:, first * (BLOCK // QUERY_BLOCK) :][:, : scales.shape[1]] = scales
    return codes


def quantize_keys(key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None, rotate: bool = False) -> KeyCodes:
    """Codes of key and value `[B, T, H, D]`, or of packs `[N, H, D]`. A rotated key's scale is D times smaller."""
    sequences, blocks = _sequences(key, cu_seqlens)
    codes = alloc_key_codes(key, blocks)
    codes.key.view(torch.uint8).zero_()
    codes.value.view(torch.uint8).zero_()
    codes.scales.fill_(1.0)
    smaller = key.shape[-1] if rotate else 1
    for (first, keys), (_, values) in zip(sequences, _sequences(value, cu_seqlens)[0], strict=True):
        if cu_seqlens is not None and not keys.shape[1]:  # a block of zeros
            keys = values = keys.new_zeros((keys.shape[0], 1, keys.shape[2]))
        ours, scales = _quantized(_rotated(keys, rotate), BLOCK)
        theirs, value_scales = _quantized(values, BLOCK)
        rows = slice(first * BLOCK, first * BLOCK + ours.shape[1])
        codes.key[:, rows] = ours
        codes.value[:, :, rows] = in_order(theirs).transpose(1, 2)
        codes.scales[:, first : first + scales.shape[1], 0] = scales / smaller
        codes.scales[:, first : first + scales.shape[1], 1] = value_scales
    return codes


def attention(
    problem: Problem,
    queries: QueryCodes,
    keys: KeyCodes,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    rounded: bool = True,
) -> tuple[Tensor, Tensor]:
    """out `[B, Tq, Hq, D]` and lse `[B, Hq, Tq]` in fp64; packed: `[Nq, Hq, D]` and `[Hq, Nq]`."""
    query, (key, value) = dequantized_queries(queries), dequantized_keys(keys)
    outs, lses = [], []
    for sequence in range(problem.batch):
        q_len, k_len = problem.q_len, problem.k_len
        offset = problem.q_start - problem.k_start
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            q_len, k_len = (int(cu[sequence + 1] - cu[sequence]) for cu in (cu_seqlens_q, cu_seqlens_k))
            offset = k_len - q_len
        q_first = first_block(sequence, problem.q_len, cu_seqlens_q) * BLOCK
        k_first = first_block(sequence, problem.k_len, cu_seqlens_k) * BLOCK
        k = key[:, k_first : k_first + k_len].repeat_interleave(problem.group, 0)
        v = value[:, k_first : k_first + k_len].repeat_interleave(problem.group, 0)
        x = query[:, q_first : q_first + q_len] @ k.transpose(1, 2) * (problem.scale / math.log(2))
        distance = torch.arange(k_len, device=x.device)[None] - torch.arange(q_len, device=x.device)[:, None] - offset
        if problem.left != UNBOUNDED:
            x = x.masked_fill(distance < -problem.left, -math.inf)
        if problem.right != UNBOUNDED:
            x = x.masked_fill(distance > problem.right, -math.inf)
        row_max = x.amax(-1, keepdim=True).ceil() if k_len else x.new_full((*x.shape[:2], 1), -math.inf)
        p = torch.exp2(x - row_max.masked_fill(row_max == -math.inf, 0.0))
        row_sum = p.sum(-1, keepdim=True)
        if rounded:
            p = to_e4m3(p * 2.0**SHIFT).double() * 2.0**-SHIFT
        outs.append(p @ v / row_sum.masked_fill(row_sum == 0, 1.0))
        lses.append((math.log(2) * (row_max + row_sum.log2()))[..., 0])
    if problem.packed:
        return torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)
    return torch.stack(outs).transpose(1, 2), torch.stack(lses)


def prepare_fp8(problem: Problem, inputs: Inputs | CodedInputs, config: str, rotate: bool) -> Forward:
    """The forward from tensors, or from keys and values that are codes."""
    if problem.empty:
        return lambda inputs, with_lse: Outputs.of(problem, inputs.query.shape[-3]).allocate(inputs.query)

    def forward(inputs: Inputs | CodedInputs, with_lse: bool) -> tuple[Tensor, Tensor]:
        ends = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        keys = inputs.kv.codes if isinstance(inputs, CodedInputs) else _visible_codes(problem, inputs, rotate)
        queries = quantize_queries(inputs.query, ends[0], rotate)
        out, lse = Outputs.of(problem, queries.rows).allocate(inputs.query)
        rows, row_lses = attention(problem, queries, keys, *ends)
        count = rows.shape[-3]  # rows of a pack behind its last sequence see no key
        out[..., :count, :, :] = rows
        lse[..., :count] = row_lses
        return out, lse

    return forward


def _visible_codes(problem: Problem, inputs: Inputs, rotate: bool) -> KeyCodes:
    """Codes of keys and values, 0 where no query of the call sees them: those have no say in a scale."""
    key, value = inputs[1:3]
    if problem.left != UNBOUNDED or problem.right != UNBOUNDED:
        hidden = _hidden(problem, inputs)[:, None, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    return quantize_keys(key, value, inputs.cu_seqlens_k, rotate)


def _hidden(problem: Problem, inputs: Inputs) -> Tensor:
    """Keys that no query of the call sees, `[Tk]` or of a pack `[Nk]`."""
    q_ends, k_ends = [0, problem.q_len], [0, problem.k_len]
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
        q_ends, k_ends = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    hidden = torch.ones(inputs.key.shape[-3], dtype=torch.bool, device=inputs.key.device)
    for (q_first, q_last), (k_first, k_last) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        queries, keys = q_last - q_first, k_last - k_first
        floor = 0 if problem.left == UNBOUNDED else max(keys - queries - problem.left, 0)
        limit = keys if problem.right == UNBOUNDED else min(keys + problem.right, keys)
        hidden[k_first + floor : k_first + max(limit, 0)] = False
    return hidden


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> tuple[list[tuple[int, Tensor]], int]:
    """Each sequence's first block with its rows `[H, T, D]`, and how many blocks there are in all."""
    if cu_seqlens is None:
        batch, rows = x.shape[:2]
        parts = [(first_block(b, rows, None), x[b].transpose(0, 1)) for b in range(batch)]
        return parts, blocks_of(rows, batch, packed=False)
    batch = cu_seqlens.shape[0] - 1
    ends = cu_seqlens.tolist()
    parts = [(first_block(b, 0, cu_seqlens), x[ends[b] : ends[b + 1]].transpose(0, 1)) for b in range(batch)]
    return parts, blocks_of(x.shape[0], batch, packed=True)


def _rotated(rows: Tensor, rotate: bool) -> Tensor:
    return rows.float() @ hadamard(rows.shape[-1], rows.device) if rotate else rows.float()


def _quantized(rows: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes of `[H, T, D]` in whole blocks of 128 rows, and a scale for every `block` rows."""
    heads, count, dim = rows.shape
    padded = rows.float().new_zeros((heads, -(-count // BLOCK) * BLOCK, dim))
    padded[:, :count] = rows
    blocks = padded.view(heads, -1, block * dim)
    largest = blocks.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(-1)
    scales = power_of_two(largest)
    return to_e4m3(blocks / scales[..., None]).view(padded.shape), scales
