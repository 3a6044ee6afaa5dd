"""Memory of a call: scratch in one allocation, and tensors that begin with one number."""

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
