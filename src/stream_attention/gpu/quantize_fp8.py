"""The pre-pass of attention in FP8: Q, K and V become e4m3 codes with block-wise scales, in one launch.

Codes and scales lie as fp8_layout.py says and are those of backends/reference/fp8.py bit for bit: scales are powers of
two, so nothing is rounded but the codes. Rotated queries and keys are sums, in fp32 as there but in another order:
where one lies at the boundary of two codes, it may become either.

Grid: a program for every block of 128 rows of a head of V, K and Q, in this order, as those of V work longest. Heads
are innermost, since those of a row lie side by side. In a pack every sequence has programs for the longest one; those
behind its end do nothing. It reads every number once and writes every code once, and memory is what it waits for.

Blocks that a pack leaves free are not written, nor are their scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.fp8_layout import (
    BLOCK,
    LARGEST,
    SMALLEST,
    KeyCodes,
    QueryCodes,
    alloc_key_codes,
    alloc_query_codes,
    blocks_of,
)
from ..base.problem import UNBOUNDED
from . import interpreter
from .arguments import FAR, QKV_STRIDES, UNIT, cdiv, is_aligned, named, row_strides, sample
from .launch import Kernel, Launch, Sizes, jit
from .tiles import packed_rows

WARPS = {64: 4, 128: 4, 256: 8}
"""By head dim. 64 or 128 numbers of a block for each thread: by the compiler's report there is room for blocks of 128
KiB on a multiprocessor at a time. With twice as many warps, of half as many registers, as much is on its way, and it
takes 1.10 (D 128) and 1.16 (D 256) times as long (H200, sweep 16)."""

ROTATED_WARPS = {64: 4, 128: 8, 256: 8}
"""16 would have the halves of a row in different warps."""

ROWS = tl.constexpr(BLOCK)
LARGER_BF16 = tl.constexpr("{ .reg .b32 a, b; abs.bf16x2 a, $1; abs.bf16x2 b, $2; max.bf16x2 $0, a, b; }")
LARGER_FP16 = tl.constexpr("{ .reg .b32 a, b; abs.f16x2 a, $1; abs.f16x2 b, $2; max.f16x2 $0, a, b; }")
LEAST = tl.constexpr(SMALLEST)
INVERSE = tl.constexpr(1.0 / LARGEST)


@triton.jit
def load_tile(ptr, stride, rows, first, floor, limit, COLUMNS: tl.constexpr):
    """Channels of rows, [.., COLUMNS], from `first` on; zeros for rows that are not in floor to limit."""
    offs = (rows.to(tl.int64) * stride + first)[:, None] + tl.arange(0, COLUMNS)[None, :]
    return tl.load(ptr + offs, mask=((rows >= floor) & (rows < limit))[:, None], other=0.0)


@triton.jit
def larger(a, b, HARDWARE: tl.constexpr):
    """The larger of |a| and |b|, in their dtype; of a number and NaN, the number. It is found of pairs in one word, so
    that all of a block waits in 16 bits for its scale: as fp32 it would fill the registers."""
    if HARDWARE:
        asm: tl.constexpr = LARGER_BF16 if a.dtype == tl.bfloat16 else LARGER_FP16
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)
    else:
        return tl.maximum(magnitude(a.to(tl.float32), HARDWARE), magnitude(b.to(tl.float32), HARDWARE)).to(a.dtype)


@triton.jit
def magnitude(x, HARDWARE: tl.constexpr):
    """|x|. A GPU's maximum of a number and NaN is the number; NumPy's is NaN, so there is none in the interpreter."""
    x = tl.abs(x)
    if not HARDWARE:
        x = tl.where(x == x, x, 0.0)
    return x


@triton.jit
def power_of_two(largest):
    """The scale of a block with this largest magnitude, and what to multiply by instead of dividing by it: 0 for inf.
    A block of NaN alone has that of zeros."""
    largest = tl.maximum(largest, 0.0)
    bits = (tl.maximum(largest, LEAST) * INVERSE).to(tl.int32, bitcast=True)
    bits = tl.where(largest == 0.0, 0x3F800000, (bits + 0x7FFFFF) & 0x7F800000)
    return bits.to(tl.float32, bitcast=True), tl.maximum(0x7F000000 - bits, 0).to(tl.float32, bitcast=True)


FOUR = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }"
)
"""Four codes. Triton's own conversion goes by fp16 on sm_89, which it truncates to."""


@triton.jit
def code_of(x, HARDWARE: tl.constexpr):
    """The nearest e4m3 number to one of at most 448, as uint8."""
    if HARDWARE:
        return tl.inline_asm_elementwise(FOUR, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(x == x, code, 0x7F).to(tl.uint8)  # the interpreter makes a number of NaN


@triton.jit
def word_of(a, b, c, d, HARDWARE: tl.constexpr):
    """The codes of four numbers, a's in the lowest byte."""
    if HARDWARE:
        return tl.inline_asm_elementwise(FOUR, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low = code_of(a, HARDWARE).to(tl.int32) | code_of(b, HARDWARE).to(tl.int32) << 8
        return low | code_of(c, HARDWARE).to(tl.int32) << 16 | code_of(d, HARDWARE).to(tl.int32) << 24


@triton.jit
def hadamard(dtype: tl.constexpr, N: tl.constexpr):
    """`hadamard` of base/fp8_layout.py, [N, N]: -1 where i & j has an odd number of ones."""
    ones = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    ones ^= ones >> 4
    odd = (0x6996 >> (ones & 15)) & 1  # bit n of it is the parity of n
    return tl.where(odd == 1, -1.0, 1.0).to(dtype)


@triton.jit
def quantize_rotated(
    ptr, stride, floor, limit, codes_ptr, scales_ptr, D: tl.constexpr, IS_QUERY: tl.constexpr, HARDWARE: tl.constexpr
):
    """A block of rows times H. H of D channels is [[H, H], [H, -H]] of half as many, so half the products do: both
    halves of a row are rows of one product, 128 rows apart, where a thread has the same channel of both."""
    C: tl.constexpr = D // 2
    lines = tl.arange(0, 2 * ROWS)
    x = load_tile(ptr, stride, lines % ROWS, lines // ROWS * C, floor, limit, C)
    sums = tl.reshape(tl.dot(x, hadamard(x.dtype, C)), [2, ROWS, C])
    low, high = tl.split(tl.permute(sums, [1, 2, 0]))
    x = tl.permute(tl.join(low + high, low - high), [0, 2, 1])  # [128, 2, C]
    x = tl.reshape(x, [2, 64 * D])
    largest = tl.max(magnitude(x, HARDWARE), 1)
    if IS_QUERY:
        scales, factors = power_of_two(largest)
        tl.store(scales_ptr + tl.arange(0, 2), scales)
    else:
        scales, factors = power_of_two(tl.maximum(largest, tl.max(largest, 0)))
        tl.store(scales_ptr, tl.max(scales, 0) * (1.0 / D))
    codes = tl.reshape(code_of(x * factors[:, None], HARDWARE), [ROWS, D])
    tl.store(codes_ptr + tl.arange(0, ROWS)[:, None] * D + tl.arange(0, D)[None, :], codes)


@triton.jit
def quantize_rows(
    ptr, stride, floor, limit, codes_ptr, scales_ptr,
    D: tl.constexpr, IS_QUERY: tl.constexpr, ROTATE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A block of queries, which has two scales, or of keys, which has one."""
    if ROTATE:
        quantize_rotated(ptr, stride, floor, limit, codes_ptr, scales_ptr, D, IS_QUERY, HARDWARE)
    else:
        rows = tl.arange(0, 32)
        a = load_tile(ptr, stride, rows, 0, floor, limit, D)  # [32, D]
        b = load_tile(ptr, stride, rows + 32, 0, floor, limit, D)
        c = load_tile(ptr, stride, rows + 64, 0, floor, limit, D)
        d = load_tile(ptr, stride, rows + 96, 0, floor, limit, D)
        first, second = larger(a, b, HARDWARE).to(tl.float32), larger(c, d, HARDWARE).to(tl.float32)
        if IS_QUERY:
            scales, factors = power_of_two(tl.max(tl.reshape(tl.join(first, second), [32 * D, 2]), 0))
            tl.store(scales_ptr + tl.arange(0, 2), scales)
            factor, second_factor = tl.split(factors)
        else:
            scale, factor = power_of_two(tl.max(tl.maximum(first, second)))
            tl.store(scales_ptr, scale)
            second_factor = factor
        ptrs = codes_ptr + rows[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(ptrs, code_of(a.to(tl.float32) * factor, HARDWARE))
        tl.store(ptrs + 32 * D, code_of(b.to(tl.float32) * factor, HARDWARE))
        tl.store(ptrs + 64 * D, code_of(c.to(tl.float32) * second_factor, HARDWARE))
        tl.store(ptrs + 96 * D, code_of(d.to(tl.float32) * second_factor, HARDWARE))


@triton.jit
def quantize_values(
    ptr, stride, floor, limit, words_ptr, stride_word, scale_ptr, D: tl.constexpr, HARDWARE: tl.constexpr
):
    """A block of values, transposed: 32 words of four keys for every channel. A word has keys 16 a + 2 q of a block and
    those 1, 8 and 9 behind it: places 16 a + 4 q to 16 a + 4 q + 3 of ORDER."""
    offs_w = tl.arange(0, ROWS // 4)
    rows = offs_w // 4 * 16 + offs_w % 4 * 2
    a = load_tile(ptr, stride, rows, 0, floor, limit, D)  # [32, D]
    b = load_tile(ptr, stride, rows + 1, 0, floor, limit, D)
    c = load_tile(ptr, stride, rows + 8, 0, floor, limit, D)
    d = load_tile(ptr, stride, rows + 9, 0, floor, limit, D)
    largest = larger(larger(a, b, HARDWARE), larger(c, d, HARDWARE), HARDWARE)
    scale, factor = power_of_two(tl.max(largest.to(tl.float32)))
    tl.store(scale_ptr, scale)
    a, b = a.to(tl.float32) * factor, b.to(tl.float32) * factor
    words = word_of(a, b, c.to(tl.float32) * factor, d.to(tl.float32) * factor, HARDWARE)
    offs = (tl.arange(0, D).to(tl.int64) * stride_word)[:, None] + offs_w[None, :]
    tl.store(words_ptr + offs, tl.trans(words))


@triton.jit
def place_of(index, heads, tiles, length, cu_ptr, PACKED: tl.constexpr):
    """Head, sequence and block of a program; and of the sequence: its first row in memory, its first block, length."""
    head, rest = index % heads, index // heads
    tile, sequence = rest % tiles, rest // tiles
    if PACKED:
        row, count = packed_rows(cu_ptr + sequence, length)
        first = (row // ROWS).to(tl.int32) + sequence
    else:
        row, count = sequence.to(tl.int64) * 0, length
        first = sequence * tiles
    return head.to(tl.int64), sequence, tile, row, first, count


@jit
def _quantize_kernel(
    q_ptr, k_ptr, v_ptr, q_codes_ptr, k_codes_ptr, v_words_ptr, q_scales_ptr, k_scales_ptr, cu_q_ptr, cu_k_ptr,
    stride_qb: tl.int64, stride_qm: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kn: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vn: tl.int64, stride_vh: tl.int64,
    q_len: tl.int32, k_len: tl.int32, q_heads: tl.int32, kv_heads: tl.int32, q_tiles: tl.int32, k_tiles: tl.int32,
    q_blocks: tl.int64, k_blocks: tl.int64, k_programs: tl.int32, k_floor: tl.int32, left: tl.int64,
    D: tl.constexpr, UNIT: tl.constexpr, HAS_LEFT: tl.constexpr, PACKED: tl.constexpr, ROTATE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program >= 2 * k_programs:
        head, sequence, tile, row, first, count = place_of(
            program - 2 * k_programs, q_heads, q_tiles, q_len, cu_q_ptr, PACKED
        )
        if tile * ROWS < count:
            row += tile * ROWS
            ptr = q_ptr + (sequence * stride_qb + row * stride_qm + head * stride_qh) * UNIT
            block = head * q_blocks + first + tile
            codes_ptr, scales_ptr = q_codes_ptr + block * (ROWS * D), q_scales_ptr + block * 2
            rows = count - tile * ROWS
            quantize_rows(ptr, stride_qm * UNIT, 0, rows, codes_ptr, scales_ptr, D, True, ROTATE, HARDWARE)
    else:
        head, sequence, tile, row, first, count = place_of(
            program % k_programs, kv_heads, k_tiles, k_len, cu_k_ptr, PACKED
        )
        # A sequence without keys has a block too, of zeros: a kernel that computes a block for it finds no NaN.
        if (tile == 0) | (tile * ROWS < count):
            # Keys that some query of the call sees, counted from this block's first.
            if PACKED:
                floor = tile * 0
                if HAS_LEFT:
                    _, queries = packed_rows(cu_q_ptr + sequence, q_len)
                    floor = tl.maximum(count - queries - left, 0).to(tl.int32)
            else:
                floor = k_floor
            floor, limit = floor - tile * ROWS, count - tile * ROWS
            row += tile * ROWS
            block = head * k_blocks + first + tile
            if program < k_programs:
                ptr = v_ptr + (sequence * stride_vb + row * stride_vn + head * stride_vh) * UNIT
                words_ptr = v_words_ptr + (head * D * k_blocks + first + tile) * (ROWS // 4)
                scale_ptr, stride_word = k_scales_ptr + block * 2 + 1, k_blocks * (ROWS // 4)
                quantize_values(ptr, stride_vn * UNIT, floor, limit, words_ptr, stride_word, scale_ptr, D, HARDWARE)
            else:
                ptr = k_ptr + (sequence * stride_kb + row * stride_kn + head * stride_kh) * UNIT
                codes_ptr, scale_ptr = k_codes_ptr + block * (ROWS * D), k_scales_ptr + block * 2
                quantize_rows(ptr, stride_kn * UNIT, floor, limit, codes_ptr, scale_ptr, D, False, ROTATE, HARDWARE)


class Quantization(NamedTuple):
    """What a launch quantises, queries or keys and values or all three, and the codes that it writes, or samples of
    them. A side that is not quantised has no codes, and rows of the other one stand in for its rows."""

    rows: tuple[Tensor, Tensor, Tensor]  # query, key and value `[B, T, H, D]`, or of packs `[N, H, D]`
    queries: Any  # QueryCodes or None
    keys: Any  # KeyCodes or None
    ends: tuple[Tensor | None, Tensor | None]  # where sequences of a pack end, of queries and of keys
    longest: tuple[int, int]  # rows of the longest of them
    left: int
    """That side of the call's window: keys and values that no query sees by it become zeros, whatever they are. The
    last query stands at the last key, so those are the first ones."""

    @classmethod
    def of(
        cls,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor | None,
        ends: tuple[Tensor | None, Tensor | None],
        longest: tuple[int, int],
        left: int = UNBOUNDED,
        empty: Callable[..., Any] | None = None,
    ) -> Quantization:
        """With codes in memory that `empty` makes, as in fp8_layout.py. One side may be None."""
        queries = None if query is None else alloc_query_codes(query, _blocks_in(query, ends[0]), empty)
        keys = None if key is None else alloc_key_codes(key, _blocks_in(key, ends[1]), empty)
        there: Any = key if query is None else query
        rows = there, there if key is None else key, there if value is None else value
        return cls(rows, queries, keys, ends, longest, left)

    def bind(self, rotate: bool) -> Launch:
        """The kernel as a function of query, key, value, what `codes_in_order` returns, and both `ends`."""
        grid, sizes = self.sizes()
        dim, packed = self.rows[0].shape[-1], self.ends[0] is not None
        return _quantize.bind_addresses(
            grid,
            {"num_warps": (ROTATED_WARPS if rotate else WARPS)[dim]},
            self.rows[0].device,
            **named("q_ptr k_ptr v_ptr", self.rows),
            q_codes_ptr=sample((), torch.uint8),
            k_codes_ptr=sample((), torch.uint8),
            v_words_ptr=sample((), torch.int32),
            q_scales_ptr=sample((), torch.float32),
            k_scales_ptr=sample((), torch.float32),
            **named("cu_q_ptr cu_k_ptr", self.ends),
            **sizes.arguments(),
            **named("D PACKED ROTATE HARDWARE", (dim, packed, rotate, not interpreter.active())),
        )

    def sizes(self) -> tuple[int, Sizes]:
        """The grid, and the arguments that depend on lengths."""
        (query, key, _), queries, keys, ends, longest, left = self
        packed = ends[0] is not None
        batch = query.shape[0] if ends[0] is None else ends[0].shape[0] - 1
        q_len, k_len = query.shape[-3], key.shape[-3]
        q_heads, q_blocks = (0, 0) if queries is None else (query.shape[-2], queries.query.shape[1] // BLOCK)
        kv_heads, k_blocks = (0, 0) if keys is None else (key.shape[-2], keys.key.shape[1] // BLOCK)
        q_tiles, k_tiles = (cdiv(length, BLOCK) for length in (longest if packed else (q_len, k_len)))
        k_programs = batch * k_tiles * kv_heads
        k_floor = 0 if left == UNBOUNDED else max(k_len - q_len - left, 0)
        unit = UNIT if is_aligned(*self.rows) else 1
        numbers = (
            *(stride for t in self.rows for stride in row_strides(t, packed, unit)),
            *(q_len, k_len, q_heads, kv_heads, q_tiles, k_tiles, q_blocks, k_blocks),
            *(k_programs, k_floor, max(min(left, FAR), 0)),
        )
        constants = {"UNIT": unit, "HAS_LEFT": packed and left != UNBOUNDED}
        return batch * q_tiles * q_heads + 2 * k_programs, Sizes(_SIZES, numbers, constants, {})


_SIZES = f"{QKV_STRIDES} q_len k_len q_heads kv_heads q_tiles k_tiles q_blocks k_blocks k_programs k_floor left"


def _blocks_in(rows: Tensor, cu_seqlens: Tensor | None) -> int:
    """Blocks of the codes of rows."""
    batch = rows.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return blocks_of(rows.shape[-3], batch, cu_seqlens is not None)


def codes_in_order(queries: QueryCodes | None, keys: KeyCodes | None) -> tuple[Tensor, ...]:
    """Codes of queries, keys and values, scales of queries and of keys. What is not there is not written either, and
    what is stands in for it."""
    q_codes, q_scales = queries[:2] if queries is not None else (keys.key, keys.scales)  # type: ignore[union-attr]
    k_codes, v_codes, k_scales = (q_codes, q_codes, q_scales) if keys is None else keys[:3]
    return q_codes, k_codes, v_codes, q_scales, k_scales


class QuantizeKeys:
    """The launch of calls of `quantize_fp8` whose tensors lie alike."""

    def __init__(self, room: Any, launch: Launch) -> None:
        self._room, self._launch = room, launch  # samples of the codes

    @staticmethod
    def _of(key: Tensor, value: Tensor, cu_seqlens: Tensor | None, longest: int) -> Quantization:
        return Quantization.of(None, key, value, (cu_seqlens, cu_seqlens), (0, longest), empty=sample)

    @classmethod
    def prepare(cls, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, longest: int, rotate: bool) -> QuantizeKeys:
        made = cls._of(key, value, cu_seqlens, longest)
        return cls(made.keys, made.bind(rotate))

    def resized(self, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, longest: int) -> QuantizeKeys | None:
        """The same of other lengths; None where another kernel computes it, or the call is to be refused."""
        if key.shape != value.shape or not key.stride(-1) == value.stride(-1) == 1:
            return None
        made = self._of(key, value, cu_seqlens, longest)
        launch = self._launch.resized(*made.sizes())
        return None if launch is None else QuantizeKeys(made.keys, launch)

    def room(self, key: Tensor) -> KeyCodes:
        """Memory for the codes, on the device of the key."""
        *codes, rows = self._room
        return KeyCodes._make([*(sample.empty(key) for sample in codes), rows])

    def __call__(self, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, codes: KeyCodes) -> None:
        """Write the codes."""
        self._launch(key, key, value, *codes_in_order(None, codes), cu_seqlens, cu_seqlens)


_quantize = Kernel(_quantize_kernel)
