"""Keys and values in e4m3 with block-wise scales, for calls that compute in FP8."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import refuse
from ..fp8_layout import BLOCK, E4M3, KeyCodes, blocks_of, dequantized_keys, first_block, hadamard, key_shapes


@dataclass(frozen=True, eq=False, repr=False)
class Fp8KV:
    """Keys and values in e4m3, with a scale for every 128 rows of a head: `quantize_fp8` makes it, `attention_fp8`
    reads it.

    A block's scale is that of all its rows, so tokens cannot be appended: a cache that grows is several of these,
    merged by their LSEs (`merge_states`) with each other and with the latest keys in full precision.
    """

    codes: KeyCodes  # quantised values and scales, in the layout of base/fp8_layout.py
    shape: tuple[int, ...]  # of the key and value that were quantised: [B, Tk, Hkv, D], packed [Nk, Hkv, D]
    dtype: torch.dtype  # likewise
    rotate: bool = False  # keys are rotated by a Hadamard matrix, as queries must be
    cu_seqlens: Tensor | None = None  # packed only: [sequences + 1]
    max_seqlen: int = 0  # the longest sequence

    def __post_init__(self) -> None:
        packed = self.cu_seqlens is not None
        if len(self.shape) != (3 if packed else 4):
            refuse("shape", "[Nk, Hkv, D]" if packed else "[B, Tk, Hkv, D]", list(self.shape))
        *_, rows, heads, dim = self.shape
        blocks = blocks_of(rows, self.batch, packed)
        shapes, dtypes = key_shapes(heads, dim, blocks), (E4M3, E4M3, torch.float32)
        for name, tensor, shape, dtype in zip(("key", "value", "scales"), self.codes[:3], shapes, dtypes, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
                got = f"{tensor.dtype} of shape {list(tensor.shape)}, strides {tensor.stride()}"
                refuse(f"codes.{name}", f"contiguous {dtype} of shape {list(shape)}", got)
            if tensor.device != self.device:
                refuse(f"codes.{name}", f"a tensor on {self.device}, as the keys", f"one on {tensor.device}")
        if self.codes.rows != rows:
            refuse("codes.rows", f"{rows}, as in shape", self.codes.rows)
        if packed and rows and not 0 < self.max_seqlen <= rows:
            refuse("max_seqlen", f"the longest of the sequences, from 1 to {rows}", self.max_seqlen)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def batch(self) -> int:
        """Rows, or packed sequences."""
        return self.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def kv_heads(self) -> int:
        return self.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.codes.key.device

    @property
    def lengths(self) -> Tensor:
        """Keys of every row or packed sequence, `[B]`."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff()
        return torch.full((self.batch,), self.shape[1], device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of quantised values, scales and offsets; sequences are padded to whole blocks."""
        tensors = self.codes[:3] if self.cu_seqlens is None else (*self.codes[:3], self.cu_seqlens)
        return sum(tensor.nbytes for tensor in tensors)

    def __repr__(self) -> str:
        packed = f"{self.shape[0]} keys in {self.batch} packed sequences"
        keys = packed if self.packed else f"{self.batch} rows of {self.shape[1]} keys"
        rotated = ", rotated" if self.rotate else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<Fp8KV: {keys}{rotated}, {self.kv_heads} heads of {self.head_dim}, of {dtype} on {self.device}>"

    def to(self, device: torch.device | str) -> Fp8KV:
        """The same on another device."""
        codes = self.codes._replace(
            **{name: getattr(self.codes, name).to(device) for name in ("key", "value", "scales")}
        )
        offsets = None if self.cu_seqlens is None else self.cu_seqlens.to(device)
        return replace(self, codes=codes, cu_seqlens=offsets)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """Key and value in their original shape and dtype, with the quantisation error, rotated back.

        For debugging: it takes memory for them in fp64. Packed rows outside all sequences are 0.
        """
        key, value = dequantized_keys(self.codes)
        if self.rotate:
            key = key @ hadamard(self.head_dim, self.device).double()
        found = []
        for rows in (key, value):
            whole = rows.new_zeros(self.shape)
            ends = [0] * (self.batch + 1) if self.cu_seqlens is None else self.cu_seqlens.tolist()
            for index in range(self.batch):
                first = first_block(index, 0 if self.packed else self.shape[1], self.cu_seqlens) * BLOCK
                place = whole[ends[index] : ends[index + 1]] if self.packed else whole[index]
                place.copy_(rows[:, first : first + place.shape[0]].transpose(0, 1))
            found.append(whole.to(self.dtype))
        return found[0], found[1]
