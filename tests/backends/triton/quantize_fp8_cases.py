"""What tests of the FP8 pre-pass share: inputs of many sizes, and comparison with the specification, code by code."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.base.fp8_layout import BLOCK, KeyCodes, QueryCodes, first_block
from stream_attention.base.problem import UNBOUNDED
from stream_attention.gpu.quantize_fp8 import Quantization, codes_in_order

F16, BF16 = torch.float16, torch.bfloat16

LAYOUTS = ("contiguous", "heads first", "joined", "odd", "expanded")


class Case(NamedTuple):
    """A call; `packed` are the lengths of sequences, (queries, keys) of each."""

    D: int = 64
    B: int = 1
    Tq: int = 130
    Tk: int = 200
    Hq: int = 2
    Hkv: int = 1
    dtype: torch.dtype = BF16
    packed: tuple[tuple[int, int], ...] = ()
    layout: str = "contiguous"
    rotate: bool = False
    seen: tuple[int, int] | None = None
    cu_dtype: torch.dtype = torch.int32
    unused: int = 0  # rows of a pack behind its last sequence

    @property
    def left(self) -> int:
        """That side of the window."""
        return UNBOUNDED if self.seen is None else self.seen[0]

    def inputs(self, device: str = "cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        sides = (self.Tq, self.Hq), (self.Tk, self.Hkv), (self.Tk, self.Hkv)
        if self.packed:
            q_rows, k_rows = (sum(lengths) + self.unused for lengths in zip(*self.packed, strict=True))
            sides = (q_rows, self.Hq), (k_rows, self.Hkv), (k_rows, self.Hkv)
        lead = () if self.packed else (self.B,)
        query, key, value = (
            laid_out(numbers((*lead, rows, heads, self.D), self.dtype, seed + n).to(device), self.layout)
            for n, (rows, heads) in enumerate(sides)
        )
        return query, key, value

    def offsets(self, device: str = "cpu") -> tuple[Tensor | None, Tensor | None]:
        if not self.packed:
            return None, None
        q, k = (
            torch.tensor([0, *lengths], dtype=self.cu_dtype).cumsum(0, dtype=self.cu_dtype).to(device)
            for lengths in zip(*self.packed, strict=True)
        )
        return q, k

    def longest(self) -> tuple[int, int]:
        q, k = (max(lengths) for lengths in zip(*self.packed, strict=True)) if self.packed else (0, 0)
        return q, k


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normal ones, of another magnitude every 50 rows, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    rows = torch.arange(shape[-3]) // 50
    magnitudes = torch.randint(-12, 9, (int(rows.max()) + 1 if len(rows) else 0,), generator=generator)
    x *= torch.exp2(magnitudes.float())[rows][:, None, None]
    return x.masked_fill(torch.rand(shape, generator=generator) < 0.05, 0.0).to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers (but "expanded": those of the first head), otherwise in memory."""
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "joined":
        return torch.stack([x, -x, 3 * x], -3)[..., 0, :, :]
    if layout == "odd":
        wide = torch.zeros((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype, device=x.device)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "expanded":
        return x[..., :1, :].expand(x.shape)
    return x


Tensors = tuple[Tensor, Tensor, Tensor]


def written(made: Quantization, rotate: bool = False) -> Any:
    """Launch it: the codes of queries and of keys."""
    made.bind(rotate)(*made.rows, *codes_in_order(made.queries, made.keys), *made.ends)
    return made.queries, made.keys


def quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    q_longest: int = 0,
    k_longest: int = 0,
    rotate: bool = False,
    left: int = UNBOUNDED,
) -> tuple[QueryCodes, KeyCodes]:
    """Codes of all three, in one launch."""
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (q_longest, k_longest)
    made: tuple[QueryCodes, KeyCodes] = written(Quantization.of(query, key, value, ends, longest, left), rotate)
    return made


def check(case: Case, device: str = "cpu", seed: int = 0, inputs: Tensors | None = None) -> tuple[QueryCodes, KeyCodes]:
    """The codes of a case, from one launch, that are those of the specification."""
    query, key, value = inputs or case.inputs(device, seed)
    offsets, longest = case.offsets(device), case.longest()
    got = quantize(query, key, value, *offsets, *longest, case.rotate, case.left)
    want = reference_fp8.quantize_queries(query, offsets[0], case.rotate)
    same_queries(case, got[0], want, case.rotate)
    seen = seen_keys(case, key)
    key, value = (torch.where(seen[:, None, None], x, 0.0) for x in (key, value))
    want_keys = reference_fp8.quantize_keys(key, value, offsets[1], case.rotate)
    same_keys(case, got[1], want_keys, case.rotate)
    return got


def check_alone(case: Case, device: str = "cpu") -> None:
    """Each side in a launch of its own has the codes that it has in one for all."""
    query, key, value = case.inputs(device)
    offsets, longest = case.offsets(device), case.longest()
    queries, keys = quantize(query, key, value, *offsets, *longest, case.rotate)
    alone = written(Quantization.of(query, None, None, offsets, longest), case.rotate)
    assert alone[1] is None
    same_queries(case, alone[0], queries, False)
    alone = written(Quantization.of(None, key, value, offsets, longest), case.rotate)
    assert alone[0] is None
    same_keys(case, alone[1], keys, False)


def seen_keys(case: Case, key: Tensor) -> Tensor:
    """Which rows of keys some query sees, from the definition: the last query stands at the last key."""
    seen = torch.ones(key.shape[-3], dtype=torch.bool)
    if case.seen is not None:
        left, right = case.seen
        lengths = case.packed or ((case.Tq, case.Tk),)
        start = 0
        for queries, keys in lengths:
            distance = torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None]
            sees = ((distance >= -left) | (left == UNBOUNDED)) & ((distance <= right) | (right == UNBOUNDED))
            if queries:  # where there is no query, nobody looks
                seen[start : start + keys] = sees.any(0)
            start += keys
    return seen.to(key.device)


def same_queries(case: Case, got: QueryCodes, want: QueryCodes, rotate: bool) -> None:
    used = used_blocks(case, 0)
    assert got.query.shape == want.query.shape and got.scales.shape == want.scales.shape and got.rows == want.rows
    places = [2 * block + half for block in used for half in (0, 1)]
    same_numbers(got.scales[:, places], want.scales[:, places])
    same_codes(blocks(got.query, used), blocks(want.query, used), rotate)


def same_keys(case: Case, got: KeyCodes, want: KeyCodes, rotate: bool) -> None:
    used = used_blocks(case, 1)
    assert got.key.shape == want.key.shape and got.value.shape == want.value.shape and got.rows == want.rows
    same_numbers(got.scales[:, used], want.scales[:, used])
    same_codes(blocks(got.key, used), blocks(want.key, used), rotate)
    same_codes(blocks(got.value.mT, used), blocks(want.value.mT, used), rotate=False)


def used_blocks(case: Case, side: int) -> list[int]:
    """Blocks that sequences have, one of keys also where they are none; a pack leaves some free, which nobody writes.
    Keys of a sequence without queries are not looked at where a window decides what is seen of them."""
    rows, batch, cu_seqlens = (case.Tq, case.Tk)[side], case.B, case.offsets()[side]
    lengths = [rows] * batch
    if cu_seqlens is not None:
        lengths = [late - early for early, late in pairwise(cu_seqlens.tolist())]
    firsts = [first_block(sequence, rows, cu_seqlens) for sequence in range(len(lengths))]
    counts = [max(side * bool(any(lengths)), -(-length // BLOCK)) for length in lengths]
    if side and case.seen is not None:
        queries = [queries for queries, _ in case.packed] or [case.Tq] * batch
        counts = [count if some else 0 for count, some in zip(counts, queries, strict=True)]
    return [first + n for first, count in zip(firsts, counts, strict=True) for n in range(count)]


def blocks(codes: Tensor, used: list[int]) -> Tensor:
    """`[H, NB * 128, D]` as bytes, those blocks alone."""
    heads, rows, dim = codes.shape
    return codes.view(torch.uint8).reshape(heads, rows // BLOCK, BLOCK, dim)[:, used]


def same_numbers(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got, want), f"{int((got != want).sum())} of {got.numel()} scales differ"


def same_codes(got: Tensor, want: Tensor, rotate: bool) -> None:
    """Bit for bit, but for the sign of NaN. A rotated row is a sum: where it lies at a boundary of codes, it may be
    either; and a sum of 0 has no sign."""
    got, want = (torch.where(codes & 0x7F == 0x7F, 0x7F, codes) for codes in (got, want))
    if not rotate:
        assert torch.equal(got, want), f"{int((got != want).sum())} of {got.numel()} codes differ"
        return
    assert torch.equal(got == 0x7F, want == 0x7F)
    got, want = ((codes & 0x7F).int() * torch.where(codes < 0x80, 1, -1) for codes in (got, want))
    difference = (got - want).abs()
    assert int(difference.max() if difference.numel() else 0) <= 1
    differ = int(difference.count_nonzero())
    assert differ <= 2 + 1e-4 * got.numel(), f"{differ} of {got.numel()} codes differ"


def draw_case(draw: random.Random, longest: int, most_heads: int) -> Case:
    edges = [n for n in (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257) if n <= longest]

    def length() -> int:
        return draw.choice(edges) if draw.random() < 0.5 else draw.randint(1, longest)

    heads = draw.randint(1, most_heads)
    packed = tuple((length(), length()) for _ in range(draw.randint(1, 3))) if draw.random() < 0.5 else ()
    return Case(
        D=draw.choice([64, 64, 128, 256]),
        B=draw.choice([1, 2]),
        Tq=length(),
        Tk=length(),
        Hq=heads * draw.choice([1, 2]),
        Hkv=heads,
        dtype=draw.choice([F16, BF16]),
        packed=packed,
        layout=draw.choice(LAYOUTS),
        rotate=draw.random() < 0.3,
        seen=draw.choice([None, (draw.randint(0, 200), UNBOUNDED), (draw.randint(0, 200), 0), (UNBOUNDED, 0)]),
        cu_dtype=draw.choice([torch.int32, torch.int64]),
        unused=draw.choice([0, 0, 40]),
    )


def every_number(dtype: torch.dtype, dim: int) -> Tensor:
    """All that a dtype has from -448 to 448, `[1, T, 1, dim]`, with a 448 in every 64 rows, so that scales are 1."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[x.float().abs() <= 448]
    rows = -(-len(x) // (dim - 1) // 64) * 64
    tile = torch.zeros(rows, dim, dtype=dtype)
    tile[:, -1] = 448
    flat = torch.zeros(rows * (dim - 1), dtype=dtype)
    flat[: len(x)] = x
    tile[:, :-1] = flat.view(rows, dim - 1)
    return tile[None, :, None]
