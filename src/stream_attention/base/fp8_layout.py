"""How Q, K and V lie in memory as e4m3 codes with block-wise scales: what the pre-pass writes and the kernels read.

Every sequence begins with a new block of 128 rows, so a block belongs to one sequence and one head, and no kernel asks
whether a row is its neighbour's. Rows behind a sequence's end are codes of 0; a packed sequence without keys has a
block of such. Heads come first: what a tile of one head reads lies side by side.

A scale is a power of two, the smallest with amax / scale <= 448, the largest number of e4m3. Scaling by it rounds
nothing, so whoever computes a code finds the same one, and an e4m3 number is as precise in one binade as in the next: a
scale of amax / 448 would gain at most one bit, and that for numbers below 2**-6 of their block's scale alone.

V lies transposed, as Hopper's FP8 products read both operands along the sum, and its keys in every 32 in the order
`ORDER`: a thread's weights, which it has as columns of the first product, are its operands of the second one then,
without a word changing lanes (backends/hopper/forward_fp8_sm90.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Rows of a block; keys and values have one scale each for it."""

QUERY_BLOCK = 64
"""Rows of queries that share a scale: those of a warpgroup."""

LARGEST = 448.0
"""The largest number of e4m3."""

SMALLEST = 2.0**-60
"""Blocks whose largest magnitude is smaller are scaled as if it were this, so that scales of a call stay within what
fp32 can hold beside each other."""

SHIFT = 8
"""Weights are rounded to e4m3 as 2**SHIFT times what they are beside the row's maximum: at most 256, and precise down
to 2**-14 of it. A kernel may take another power of two, as forward_fp8_sm90.py does; what a row can lose is in
backends/reference/fp8.py."""

ORDER = tuple(16 * a + 8 * b + 2 * q + e for a in range(2) for q in range(4) for b in range(2) for e in range(2))
"""Which of 32 keys stands where in V."""

HEAD_DIMS = (64, 128, 256)

E4M3 = torch.float8_e4m3fn


class KeyCodes(NamedTuple):
    """Keys and values. NB blocks: `blocks_of`; where a sequence begins: `first_block`."""

    key: Tensor  # e4m3 [Hkv, NB * 128, D]
    value: Tensor  # e4m3 [Hkv, D, NB * 128]
    scales: Tensor  # fp32 [Hkv, NB, 2]: of a block's keys, and of its values
    rows: int  # of the tensors that were quantised: T, or N of a pack


class CodedInputs(NamedTuple):
    """`problem.Inputs` of a call whose keys and values are codes."""

    query: Tensor  # [B, Tq, Hq, D], packed: [Nq, Hq, D]
    key: Tensor  # those of kv
    value: Tensor
    mask: None = None
    bias: None = None
    alibi_slopes: None = None
    sink: None = None
    seed: None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    query_bounds: None = None
    key_bounds: None = None
    kv: Any = None  # an Fp8KV


class QueryCodes(NamedTuple):
    query: Tensor  # e4m3 [Hq, NB * 128, D]
    scales: Tensor  # fp32 [Hq, NB * 2]
    rows: int


def blocks_of(rows: int, batch: int, packed: bool) -> int:
    """Blocks that are allocated: `rows` in each of `batch` sequences, or in all of a pack together."""
    return rows // BLOCK + batch if packed else batch * -(-rows // BLOCK)


def first_block(sequence: int, rows: int, cu_seqlens: Tensor | None) -> int:
    """The block that a sequence begins with. In a pack some stay free, so that nobody has to add up lengths: a
    sequence from row c0 to c1 has at most c1 // 128 - c0 // 128 + 1 blocks."""
    if cu_seqlens is None:
        return sequence * -(-rows // BLOCK)
    return int(cu_seqlens[sequence]) // BLOCK + sequence


def key_shapes(heads: int, dim: int, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of the codes of keys and of values, and of their scales."""
    return (heads, blocks * BLOCK, dim), (heads, dim, blocks * BLOCK), (heads, blocks, 2)


def alloc_query_codes(query: Tensor, blocks: int, empty: Callable[..., Any] | None = None) -> QueryCodes:
    """Memory for codes; `empty(shape, dtype=...)` makes it, else the query's device."""
    (rows, heads, dim), make = query.shape[-3:], empty or query.new_empty
    codes = make((heads, blocks * BLOCK, dim), dtype=E4M3)
    return QueryCodes(codes, make((heads, blocks * (BLOCK // QUERY_BLOCK)), dtype=torch.float32), rows)


def alloc_key_codes(key: Tensor, blocks: int, empty: Callable[..., Any] | None = None) -> KeyCodes:
    """Likewise."""
    (rows, heads, dim), make = key.shape[-3:], empty or key.new_empty
    of_keys, of_values, of_scales = key_shapes(heads, dim, blocks)
    return KeyCodes(make(of_keys, dtype=E4M3), make(of_values, dtype=E4M3), make(of_scales, dtype=torch.float32), rows)


def in_order(rows: Tensor) -> Tensor:
    """`[H, T, D]` with every 32 rows in the order in which V has them."""
    heads, count, dim = rows.shape
    places = torch.tensor(ORDER, device=rows.device)
    return rows.view(torch.uint8).view(heads, count // 32, 32, dim)[:, :, places].view(heads, count, dim).view(E4M3)


def dequantized_queries(codes: QueryCodes) -> Tensor:
    """What the codes mean, fp64 `[Hq, NB * 128, D]`."""
    return codes.query.double() * codes.scales.double().repeat_interleave(QUERY_BLOCK, 1)[..., None]


def dequantized_keys(codes: KeyCodes) -> tuple[Tensor, Tensor]:
    """Keys and values, fp64 `[Hkv, NB * 128, D]` each, values in the order of keys again. Rotated keys stay so."""
    scales = codes.scales.double().repeat_interleave(BLOCK, 1)
    heads, dim, count = codes.value.shape
    back = torch.tensor(sorted(range(32), key=ORDER.__getitem__), device=codes.value.device)
    value = codes.value.double().view(heads, dim, count // 32, 32)[..., back].view(heads, dim, count).transpose(1, 2)
    return codes.key.double() * scales[..., :1], value * scales[..., 1:]


def hadamard(dim: int, device: torch.device | str = "cpu") -> Tensor:
    """+1 and -1, symmetric, with rows that are orthogonal: element (i, j) is negative where i & j has an odd number of
    ones. Its square is `dim`, so q H . k H = dim * q . k, and an outlier of one channel is spread over all."""
    i = torch.arange(dim, device=device)
    ones = (i[:, None] & i[None, :])[..., None] >> torch.arange(8, device=device) & 1
    return 1.0 - 2.0 * (ones.sum(-1) % 2)
