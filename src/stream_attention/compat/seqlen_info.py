"""Where the sequences of a pack lie, as the bias classes of xformers (`attn_bias`) hold it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from ..base.errors import refuse

Device = torch.device | str | None


@dataclass
class _SeqLenInfo:
    """Where sequences of a pack lie: from `seqstart[b]` to `seqstart[b + 1]`, on a device and on the host."""

    seqstart: Tensor  # int32 [B + 1]
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    def to(self, device: Device) -> Self:
        return moved(self, device)

    @property
    def starts(self) -> Sequence[int]:
        return self.seqstart_py[:-1]

    def intervals(self) -> Iterator[tuple[int, int]]:
        """The first row of each sequence, and the one behind its last."""
        yield from pairwise(self.seqstart_py)

    @classmethod
    def from_seqlens(cls, seqlens: Sequence[int], *, device: Device = None) -> _SeqLenInfo:
        seqlens = list(seqlens)
        starts = [0, *accumulate(seqlens)]
        return _SeqLenInfo(_int32(starts, device), max(seqlens, default=-1), min(seqlens, default=-1), starts)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """The sequences of a pack `[1, N, ...]`, as many to a tensor `[n, T, ...]` as `batch_sizes` say."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            refuse("x", f"shape [1, {self.seqstart_py[-1]}, ...]", list(x.shape))
        sizes = [1] * len(self.starts) if batch_sizes is None else list(batch_sizes)
        bounds = [self.seqstart_py[n] for n in (0, *accumulate(sizes))]
        rows = [behind - first for first, behind in pairwise(bounds)]
        return [part.unflatten(1, (n, -1))[0] for n, part in zip(sizes, x.split(rows, 1), strict=True)]


@dataclass
class _Rows(_SeqLenInfo):
    """Keys of which each sequence has `seqlen` from its first place on."""

    seqlen: Tensor  # int32 [B]
    seqlen_py: Sequence[int]

    def intervals(self) -> Iterator[tuple[int, int]]:
        for start, length in zip(self.starts, self.seqlen_py, strict=False):
            yield start, start + length


@dataclass
class _PaddedSeqLenInfo(_Rows):
    """Keys of which each sequence has `padding` places."""

    padding: int

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Device = None) -> Self:
        seqlens = list(seqlens)
        if max(seqlens, default=0) > padding:
            refuse("kv_seqlen", f"at most the padding, {padding}", max(seqlens))
        starts = list(range(0, len(seqlens) * padding + 1, padding))
        longest, shortest = max(seqlens, default=0), min(seqlens, default=0)
        return cls(_int32(starts, device), longest, shortest, starts, _int32(seqlens, device), seqlens, padding)


@dataclass
class _GappySeqInfo(_Rows):
    """Keys of which each sequence begins at a place of its own."""

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Device = None
    ) -> Self:
        """`paged`: starts are those within a row of pages, and `seqlen` is where a sequence ends in it."""
        if not seqlens or len(seqstarts) != len(seqlens) + (not paged):
            refuse("kv_seqstarts", f"{len(seqlens) + (not paged)} values, at least one length", len(seqstarts))
        starts, lengths = [*seqstarts, -1] if paged else list(seqstarts), list(seqlens)
        ends = [start + n for start, n in zip(starts, lengths, strict=False)] if paged else lengths
        return cls(_int32(starts, device), max(lengths), min(lengths), starts, _int32(ends, device), ends)

    def in_rows(self, padding: int, places: int) -> Self:
        """`paged`, of sequences in rows of `places` that begin every `padding` places; on the device."""
        first = [start - row * padding for row, start in enumerate(self.starts)]
        if any(not 0 <= start < places for start in first) or self.max_seqlen > places:
            got = f"starts {first} and at most {self.max_seqlen} keys"
            refuse(
                "block_tables", f"pages for each sequence's keys, here of {places} places", got, error=AssertionError
            )
        rows = torch.arange(len(first) + 1, dtype=torch.int32, device=self.seqstart.device)
        starts = self.seqstart - padding * rows
        ends = [start + n for start, n in zip(first, self.seqlen_py, strict=True)]
        seqlen = self.seqlen + starts[:-1]
        return replace(self, seqstart=starts, seqstart_py=[*first, -1], seqlen=seqlen, seqlen_py=ends)


def moved(one: Any, device: Device) -> Any:
    """A dataclass with what has a device on another."""
    values = {field.name: getattr(one, field.name) for field in fields(one)}
    return replace(one, **{name: value.to(device) for name, value in values.items() if hasattr(value, "to")})


def _int32(values: Sequence[int], device: Device) -> Tensor:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor(values, dtype=torch.int32, device=device)
