"""The bias classes of xformers: which keys a query sees, by names. `xformers.memory_efficient_attention` reads them.

Every class states its alignment and the sides of its window; nothing of size Tq x Tk exists but in `materialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..base.errors import refuse
from .seqlen_info import Device, _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo, moved

__all__ = [
    "VARLEN_BIASES",
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
]


class AttentionBias:
    """What is added to the scores: here always 0, or -inf where a key is not seen."""

    top_left: ClassVar[bool] = False
    """Whether query i stands at key i; else the last query stands at the last key."""

    _SIDES: ClassVar[tuple[int, int]] = (-1, -1)

    @property
    def sides(self) -> tuple[int, int]:
        """Keys before and behind a query's position that it sees; -1: all."""
        return self._SIDES

    def to(self, device: Device) -> Self:
        """The bias with its tensors on a device."""
        return self

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        """The bias as a tensor of a shape `[..., Tq, Tk]`: 0 and -inf. For tests: it is as large as the scores.

        >>> LowerTriangularMask().materialize((2, 3)).tolist()
        [[0.0, -inf, -inf], [0.0, 0.0, -inf]]
        """
        seen = self._seen(*shape[-2:])
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
        return bias.to(device).expand(tuple(shape))

    def _seen(self, q_len: int, k_len: int) -> Tensor:
        left, right = self.sides
        first = 0 if self.top_left else k_len - q_len
        ahead = torch.arange(k_len) - torch.arange(q_len).unsqueeze(1) - first
        return ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))


# One mask for all of a batch


class LowerTriangularMask(AttentionBias):
    """Query i sees keys j <= i: top-left."""

    top_left = True
    _SIDES = (-1, 0)

    def __init__(self, device: Device = None) -> None:
        pass

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """With a tensor `[B, H, Tq, Tk]` that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """`LowerTriangularMask`, and a tensor `[B, H, Tq, Tk]` that is added to the scores."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def to(self, device: Device) -> Self:
        return type(self)(self._bias.to(device))

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Query i sees keys j <= i + Tk - Tq."""

    _SIDES = (-1, 0)

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Of these, the last `window_size`."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The last `_window_size` keys up to the query's own, which stands at i + Tk - Tq."""

    _window_size: int

    def __post_init__(self) -> None:
        _check_window(self._window_size)

    @property
    def sides(self) -> tuple[int, int]:
        return self._window_size - 1, 0


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """`window_left` keys before the query's position i + Tk - Tq, and `window_right` behind it."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            if getattr(self, name) < 0:
                refuse(name, "at least 0", getattr(self, name))

    @property
    def sides(self) -> tuple[int, int]:
        return self.window_left, self.window_right


# Packed sequences


@dataclass
class BlockDiagonalMask(AttentionBias):
    """Queries of a sequence see the keys of that sequence."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    def to(self, device: Device) -> Self:
        return moved(self, device)

    def _seen(self, q_len: int, k_len: int) -> Tensor:
        return _blocks(self, q_len, k_len, super()._seen)

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Device = None
    ) -> Self:
        """Of sequences of these lengths; those of keys are the same where they are not given."""
        if kv_seqlen is not None and len(kv_seqlen) != len(q_seqlen):
            refuse("kv_seqlen", f"{len(q_seqlen)} lengths, as q_seqlen", len(kv_seqlen), error=AssertionError)
        queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        return cls(queries, queries if same else _SeqLenInfo.from_seqlens(kv_seqlen or [], device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """The mask of tensors `[n, T, ...]`, each of n sequences, and their pack `[1, N, ...]`."""
        mask = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])], device=tensors[0].device)
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, _pack(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """The same of queries, keys and perhaps values."""
        lengths = [[x.shape[1] for x in tensors for _ in range(x.shape[0])] for tensors in (tensors_q, tensors_k)]
        mask = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        return mask, _pack(tensors_q), _pack(tensors_k), None if tensors_v is None else _pack(tensors_v)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """A pack of queries as the tensors it was made of."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """A pack of keys or values as the tensors it was made of."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Likewise, where queries and keys lie alike."""
        if self.q_seqinfo is not self.k_seqinfo:
            refuse("tensor", "a mask with as many queries as keys", "another one", error=AssertionError)
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        cls = BlockDiagonalCausalLocalAttentionFromBottomRightMask
        return cls(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """And of these keys j <= i, from the first of the sequence: top-left."""

    top_left = True
    _SIDES = (-1, 0)


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """And of these keys those up to the query, the last of which stands at the last key."""

    _SIDES = (-1, 0)

    def __post_init__(self) -> None:
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for block, ((q_first, q_behind), (k_first, k_behind)) in enumerate(pairs):
            if k_behind - k_first < q_behind - q_first:
                got = f"{k_behind - k_first} and {q_behind - q_first} queries in block {block}"
                refuse("kv_seqlen", "as many keys as queries at least", got)


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """And of these the last `_window_size`."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)

    @property
    def sides(self) -> tuple[int, int]:
        return self._window_size - 1, 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """And of these the last `_window_size`."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_window(self._window_size)

    @property
    def sides(self) -> tuple[int, int]:
        return self._window_size - 1, 0


# Keys with room behind them, as in a cache


@dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    """Queries of a sequence see its keys, of which each sequence has `kv_padding` places."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    def to(self, device: Device) -> Self:
        return moved(self, device)

    def _seen(self, q_len: int, k_len: int) -> Tensor:
        return _blocks(self, q_len, k_len, super()._seen)

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Device = None,
    ) -> Self:
        """Of sequences with so many queries and keys. `causal_diagonal` is not read, as in xformers."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(
        self, block_tables: Tensor, page_size: int, paged_type: type[PagedBlockDiagonalPaddedKeysMask]
    ) -> PagedBlockDiagonalPaddedKeysMask:
        """The same keys in pages: int32 `[B, pages of a sequence]`."""
        keys = replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, keys, block_tables, page_size)

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """And of these those up to the query, the last of which stands at the last key."""

    _SIDES = (-1, 0)
    causal_diagonal: Any = None


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """And of these those in a window around the query, the last of which stands at the last key."""

    window_left: int
    window_right: int

    @property
    def sides(self) -> tuple[int, int]:
        return self.window_left, self.window_right

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> Self:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, None), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """And of these the last `_window_size` up to the query, the last of which stands at the last key."""

    _window_size: int

    @property
    def sides(self) -> tuple[int, int]:
        return self._window_size - 1, 0

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, None), window_size)


@dataclass
class PagedBlockDiagonalPaddedKeysMask(AttentionBias):
    """Queries of a sequence see its keys, which lie in pages `block_tables`, int32 `[B, pages of a sequence]`."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo
    block_tables: Tensor
    page_size: int

    def to(self, device: Device) -> Self:
        return moved(self, device)

    def _seen(self, q_len: int, k_len: int) -> Tensor:
        return _paged_blocks(self, q_len, k_len, super()._seen)

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Self:
        room = block_tables.shape[1] * page_size
        return cls(*_padded(q_seqlen, room, kv_seqlen, device), block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """And of these those up to the query, the last of which stands at the last key."""

    _SIDES = (-1, 0)


@dataclass
class BlockDiagonalGappyKeysMask(AttentionBias):
    """Queries of a sequence see its keys, which begin at a place of their own."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo

    def to(self, device: Device) -> Self:
        return moved(self, device)

    def _seen(self, q_len: int, k_len: int) -> Tensor:
        return _blocks(self, q_len, k_len, super()._seen)

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *, device: Device = None
    ) -> Self:
        """`kv_seqstarts` has one value more than there are sequences: how many places there are."""
        keys = _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), keys)

    def make_paged(
        self,
        block_tables: Tensor,
        page_size: int,
        notional_padding: int,
        paged_type: type[PagedBlockDiagonalGappyKeysMask],
    ) -> PagedBlockDiagonalGappyKeysMask:
        """The same keys in pages, int32 `[B, pages of a sequence]`; a sequence has `notional_padding` places."""
        if notional_padding % page_size:
            refuse("notional_padding", f"a number divisible by the page size, {page_size}", notional_padding)
        keys = self.k_seqinfo.in_rows(notional_padding, block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, keys, block_tables, page_size)


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """And of these those up to the query, the last of which stands at the last key."""

    _SIDES = (-1, 0)


@dataclass
class PagedBlockDiagonalGappyKeysMask(AttentionBias):
    """The same in pages: `k_seqinfo.seqlen` is where the keys of a sequence end in its row of pages."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo
    block_tables: Tensor
    page_size: int

    def to(self, device: Device) -> Self:
        return moved(self, device)

    def _seen(self, q_len: int, k_len: int) -> Tensor:
        return _paged_blocks(self, q_len, k_len, super()._seen)

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Self:
        keys = _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen, device=device), keys, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """And of these those up to the query, the last of which stands at the last key."""

    _SIDES = (-1, 0)


VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)
"""Biases of packs, which have one batch entry."""


def _check_window(size: int) -> None:
    if size <= 0:
        refuse("window_size", "at least 1", size)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors]).unsqueeze(0)


def _padded(
    q_seqlen: Sequence[int], padding: int, kv_seqlen: Sequence[int], device: Device
) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    if len(kv_seqlen) != len(q_seqlen):
        refuse("kv_seqlen", f"{len(q_seqlen)} lengths, as q_seqlen", len(kv_seqlen), error=AssertionError)
    keys = _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, padding, device=device)
    return _SeqLenInfo.from_seqlens(q_seqlen, device=device), keys


Seen = Callable[[int, int], Tensor]
"""Which of so many keys each of so many queries sees."""


def _blocks(bias: Any, q_len: int, k_len: int, seen: Seen) -> Tensor:
    """The keys that a pack of sequences sees, of which each sees its own."""
    for name, length, info in (("Tq", q_len, bias.q_seqinfo), ("Tk", k_len, bias.k_seqinfo)):
        if length != info.seqstart_py[-1]:
            refuse("shape", f"{name} = {info.seqstart_py[-1]}, as many as the mask has", length)
    found = torch.zeros(q_len, k_len, dtype=torch.bool)
    pairs = zip(bias.q_seqinfo.intervals(), bias.k_seqinfo.intervals(), strict=True)
    for (q_first, q_behind), (k_first, k_behind) in pairs:
        found[q_first:q_behind, k_first:k_behind] = seen(q_behind - q_first, k_behind - k_first)
    return found


def _paged_blocks(bias: Any, q_len: int, k_len: int, seen: Seen) -> Tensor:
    """The same of keys in pages: key p is slot `p % page_size` of page `block_tables[b, p // page_size]`."""
    found = torch.zeros(q_len, k_len, dtype=torch.bool)
    keys, tables = bias.k_seqinfo, bias.block_tables.cpu().long()
    for row, (first, behind) in enumerate(bias.q_seqinfo.intervals()):
        start = keys.seqstart_py[row] if isinstance(keys, _GappySeqInfo) else 0
        position = torch.arange(start, keys.seqlen_py[row])
        place = tables[row, position // bias.page_size] * bias.page_size + position % bias.page_size
        found[first:behind, place] = seen(behind - first, len(position))
    return found
