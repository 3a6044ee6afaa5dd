"""Memory of a call: scratch in one allocation, tensors that begin with one number, and samples without memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import driver

_ALIGNMENT = 128
_WORDS = {0.0: 0, float("-inf"): 0xFF800000}
"""Numbers as 32-bit words: 0 of any dtype, -inf of fp32."""


def filled(like: Tensor, shape: Sequence[int], dtype: torch.dtype, number: float, by_driver: bool) -> Tensor:
    """A new tensor on the device of `like` that holds a number, 0 or (fp32) -inf. The driver takes half of torch's host
    time to fill it; without a driver, as in the interpreter, torch does."""
    size = dtype.itemsize * math.prod(shape)
    if not by_driver or not driver.is_available() or size % 4 or like.get_device() != torch._C._cuda_getDevice():
        return like.new_full(shape, number, dtype=dtype)
    made = like.new_empty(shape, dtype=dtype)
    if size:
        stream = torch._C._cuda_getCurrentRawStream(made.get_device())
        driver.fill_words(made.data_ptr(), _WORDS[number], size // 4, stream)
    return made


class Sample:
    """A contiguous tensor without memory, to bind a launch to; as aligned as allocations are. A tensor on torch's meta
    device would do, but takes 2 us to make."""

    __slots__ = ("dtype", "shape")
    device = torch.device("meta")

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return 0

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        strides, step = [1] * len(self.shape), 1
        for place in range(len(self.shape) - 1, -1, -1):
            strides[place] = step
            step *= max(self.shape[place], 1)
        return tuple(strides) if dim is None else strides[dim]

    def new_empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Sample:
        return Sample(shape, dtype or self.dtype)

    def new_full(self, shape: Sequence[int], number: float, dtype: torch.dtype | None = None) -> Sample:
        return Sample(shape, dtype or self.dtype)

    def __getitem__(self, place: int) -> Sample:
        return Sample(self.shape[1:], self.dtype)


class Scratch(NamedTuple):
    """Where the pieces of an allocation begin."""

    offsets: tuple[int, ...]  # in bytes
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    size: int

    @classmethod
    def of(cls, *samples: Tensor) -> Scratch:
        """Room for contiguous tensors such as these."""
        return cls.of_shapes(*((t.shape, t.dtype) for t in samples))

    @classmethod
    def of_shapes(cls, *pieces: tuple[tuple[int, ...], torch.dtype]) -> Scratch:
        offsets, end = [], 0
        for shape, dtype in pieces:
            offsets.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(offsets), tuple(shape for shape, _ in pieces), tuple(dtype for _, dtype in pieces), end)

    def allocate(self, like: Tensor, as_addresses: bool) -> tuple[Tensor, list[Any]]:
        """The memory, on the device of `like`, and its pieces: as addresses, which is quick, or as tensors."""
        memory = like.new_empty(self.size, dtype=torch.uint8)
        if as_addresses:
            base = memory.data_ptr()
            return memory, [base + offset for offset in self.offsets]
        pieces = []
        for offset, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=True):
            count = torch.Size(shape).numel() * dtype.itemsize
            pieces.append(memory[offset : offset + count].view(dtype).view(shape))
        return memory, pieces
