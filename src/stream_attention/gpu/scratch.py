"""Memory of a call: results, scratch in one allocation, and samples without memory, from which all are allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.problem import Problem
from ..base.state import EMPTY
from . import driver

UNIT = 8
"""Elements in a wide word: 16 bytes of a dtype of two."""

_ALIGNMENT = 128
_WORDS = {0.0: 0, float("-inf"): 0xFF800000}
"""Numbers as 32-bit words: 0 of any dtype, -inf of fp32."""

_guards: Any = torch._C._dynamo.guards
"""What the graphs of torch.compile allocate with, on the current device: a third of the host time of new_empty."""


def empty(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor on the device of `like`, not initialised."""
    made: Tensor
    if like.is_cpu:
        made = _guards._empty_strided_cpu(shape, strides, dtype)
    elif like.is_cuda and like.get_device() == torch._C._cuda_getDevice():
        made = _guards._empty_strided_cuda(shape, strides, dtype)
    else:
        made = torch.empty_strided(shape, strides, dtype=dtype, device=like.device)
    return made


class Sample:
    """A tensor without memory, as aligned as allocations are, contiguous unless its strides are given: to bind a launch
    to, and to allocate. A tensor on torch's meta device takes 2 us to make."""

    __slots__ = ("_strides", "dtype", "shape")
    device = torch.device("meta")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._strides = strides  # None: computed when asked for

    def data_ptr(self) -> int:
        return 0

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        strides = self._strides
        if strides is None:
            step, found = 1, []
            for size in self.shape[:0:-1]:
                found.append(step)
                step *= size or 1
            strides = self._strides = (step, *found[::-1]) if self.shape else ()
        return strides if dim is None else strides[dim]

    def __getitem__(self, place: int) -> Sample:
        return Sample(self.shape[1:], self.dtype)

    def empty(self, like: Tensor) -> Tensor:
        """Such a tensor on the device of `like`, not initialised."""
        return empty(like, self.shape, self.stride(), self.dtype)

    def filled(self, like: Tensor, number: float, by_driver: bool) -> Tensor:
        """One that holds a number, 0 or (fp32) -inf. The driver takes half of torch's host time to fill it; without a
        driver, as in the interpreter, torch does."""
        made, size = self.empty(like), self.dtype.itemsize * math.prod(self.shape)
        if not by_driver or not driver.is_available() or size % 4 or like.get_device() != torch._C._cuda_getDevice():
            return made.fill_(number)
        if size:
            stream = torch._C._cuda_getCurrentRawStream(made.get_device())
            driver.fill_words(made.data_ptr(), _WORDS[number], size // 4, stream)
        return made


def empty_like(rows: Tensor, query: Tensor, sample: Sample) -> Tensor:
    """A tensor with the shape of `rows` and the strides of `sample`, which do not depend on the rows of a pack."""
    return empty(query, (*rows.shape,), sample.stride(), sample.dtype)


OUTPUT_STRIDES = "stride_ob stride_om stride_oh stride_lb stride_lh"


class Outputs(NamedTuple):
    """What a forward returns: out `[B, Tq, Hq, Dv]` and lse `[B, Hq, Tq]`; packed: `[Nq, Hq, Dv]` and `[Hq, Nq]`."""

    out: Any  # samples
    lse: Any
    has_unwritten_rows: bool  # there may be rows that no program writes: results are filled with 0 and -inf first

    @classmethod
    def of(cls, problem: Problem, rows: int, clears_tail: bool = False) -> Outputs:
        """Those of `rows` queries. `clears_tail`: the kernel, or a launch before it, clears rows of a pack that no tile
        computes."""
        lead, heads = () if problem.packed else (problem.batch,), problem.q_heads
        out = Sample((*lead, rows, heads, problem.value_dim), problem.out_dtype)
        return cls(
            out, Sample((*lead, heads, rows), torch.float32), problem.empty or (problem.packed and not clears_tail)
        )

    def resized(self, rows: int) -> Outputs:
        """Those of another number of queries."""
        out, lse, has_unwritten_rows = self
        *lead, _, heads, dim = out.shape
        of_out: tuple[int, ...] = (heads * dim, dim, 1)
        of_lse: tuple[int, ...] = (rows, 1)
        if lead:
            of_out, of_lse = (rows * heads * dim, *of_out), (heads * rows, *of_lse)
        resized_out = Sample((*lead, rows, heads, dim), out.dtype, of_out)
        return Outputs(resized_out, Sample((*lead, heads, rows), lse.dtype, of_lse), has_unwritten_rows)

    def strides(self, packed: bool) -> tuple[int, ...]:
        """`OUTPUT_STRIDES`: those of out in wide words, and of lse."""
        heads, rows = self.lse.shape[-2:]
        width = self.out.shape[-1] // UNIT
        of_row = heads * width
        return (0, of_row, width, 0, rows) if packed else (rows * of_row, of_row, width, heads * rows, rows)

    def allocate_pack(self, query: Tensor, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Those of a pack with as many rows as `query`, whatever this one has; it has no rows that are not written."""
        rows, (_, heads, dim) = query.shape[0], self.out.shape
        out = empty(query, (rows, heads, dim), self.out.stride(), self.out.dtype)
        return out, empty(query, (heads, rows), (rows, 1), torch.float32) if with_lse else None

    def samples(self) -> tuple[Any, Any]:
        """Both without memory."""
        return self.out, self.lse

    def allocate(self, query: Tensor, by_driver: bool = False, with_lse: bool = True) -> tuple[Tensor, Any]:
        """`by_driver`: the kernel is compiled, so there is a driver that can fill memory."""
        if self.has_unwritten_rows:
            out = self.out.filled(query, 0.0, by_driver)
            return out, self.lse.filled(query, EMPTY, by_driver) if with_lse else None
        return self.out.empty(query), self.lse.empty(query) if with_lse else None


class Scratch(NamedTuple):
    """Pieces of one allocation, which launches take as they take contiguous tensors."""

    offsets: list[int]  # in bytes
    ends: list[int]
    dtypes: list[torch.dtype]
    size: int

    @classmethod
    def of(cls, *samples: Any) -> Scratch:
        """Room for tensors such as these."""
        dtypes = [t.dtype for t in samples]
        return cls.of_sizes([t.numel() * t.dtype.itemsize for t in samples], dtypes)

    @classmethod
    def of_sizes(cls, sizes: Iterable[int], dtypes: list[torch.dtype]) -> Scratch:
        """Room for pieces of so many bytes."""
        offsets, ends, end = [], [], 0
        for size in sizes:
            offsets.append(end)
            ends.append(end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(offsets, ends, dtypes, end)

    def allocate(self, like: Tensor, as_addresses: bool) -> tuple[Tensor, list[Any]]:
        """The memory, on the device of `like`, and its pieces: as addresses, which is quick, or as flat tensors."""
        memory = empty(like, (self.size,), (1,), torch.uint8)
        if as_addresses:
            base = memory.data_ptr()
            return memory, [base + offset for offset in self.offsets]
        places = zip(self.offsets, self.ends, self.dtypes, strict=True)
        return memory, [memory[offset:end].view(dtype) for offset, end, dtype in places]
