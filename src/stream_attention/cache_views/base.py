"""What every cache can do, whatever holds its tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..errors import refuse
from . import checks
from .codes import Coding
from .write import Rotary, check_new, rotate

if TYPE_CHECKING:
    from typing import Self


class Cache(ABC):
    """Keys and values of the earlier tokens of B rows, of which row b holds `lengths[b]`."""

    lengths: Tensor | None
    STORES: ClassVar[tuple[str, str]]
    """The fields that hold keys and values in `dtype`, all or some."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Rows."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens that a row can hold."""

    @abstractmethod
    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys `[B, n, Hkv, D]` and values `[B, n, Hkv, Dv]` of the positions from start to stop, in `dtype`.

        What stands at positions from `lengths[b]` on may be anything, NaN included: the reader leaves it out. Takes
        memory for the tile alone.
        """

    def _plain(self) -> tuple[Tensor, Tensor]:
        """Keys `[..., Hkv, D]` and values `[..., Hkv, Dv]`: the tensors of `STORES`."""
        key, value = self.STORES
        return getattr(self, key), getattr(self, value)

    @abstractmethod
    def _write(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Write tokens to positions int64 `[B, n]`, which count up from `lengths[b]`; drop what has no room."""

    def _launch(self, key: Tensor, value: Tensor, rotary: Rotary | None) -> bool:
        """Append by a kernel and return True; False where none is for these tensors, and nothing was done."""
        return False

    @abstractmethod
    def _paged(self, lengths: Tensor, new: int) -> tuple[Tensor, Tensor, Tensor, int, int] | None:
        """(page table, how many tokens of each row lie in pages, and will with `new` more, page size, pages)."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All its tensors in the order of kernels' parameters, of which the last are page table and lengths."""

    @property
    @abstractmethod
    def requires_grad(self) -> bool:
        """Whether a tensor that it holds requires a gradient, which nothing here gives it."""

    def __repr__(self) -> str:
        kind = f"pages of {self.page_size}" if self.page_size else "rows"
        coded = "" if self.coding is None else f" in {self.coding.format}"
        dims = self.head_dim if self.head_dim == self.value_dim else f"{self.head_dim} and {self.value_dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"<{type(self).__name__}: {self.batch} rows of up to {self.capacity} tokens, {kind}{coded}, "
            f"{self.kv_heads} heads of {dims}, {dtype} on {self.device}>"
        )

    def __getstate__(self) -> dict[str, object]:
        """Without the layout of its tensors that `decode_attention` keeps here: others of the same fields lie anew."""
        return {name: value for name, value in self.__dict__.items() if name != "_layout"}

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 where rows lie in one run."""
        return 0

    @property
    def coding(self) -> Coding | None:
        """How numbers are coded; None: as they came."""
        return None

    @property
    def kv_heads(self) -> int:
        return self._plain()[0].shape[2]

    @property
    def head_dim(self) -> int:
        return self._plain()[0].shape[3]

    @property
    def value_dim(self) -> int:
        return self._plain()[1].shape[3]

    @property
    def device(self) -> torch.device:
        return self._plain()[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._plain()[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that it holds, lengths and page table included."""
        held = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]  # each is a dataclass
        return sum(one.nbytes for one in held if hasattr(one, "nbytes"))

    def append(self, key: Tensor, value: Tensor, *, rotary: Rotary | None = None, validate: bool | None = None) -> Self:
        """Write n new tokens to every row, key `[B, n, Hkv, D]` and value `[B, n, Hkv, Dv]`, and return the cache.

        Row b's stand at `lengths[b]` to `lengths[b] + n - 1` and `lengths` is advanced by n, both in place and without
        a synchronisation, so that a CUDA graph may replay it. `rotary` turns the keys by these positions first.

        `validate=True` looks at lengths and pages first and raises where a row has no room, or no page, for the new
        tokens, where its length is negative, where the rotary table is too short, and where two rows would write to one
        page. On a CPU that is the default. On a GPU it is a synchronisation, so there it has to be asked for. Not
        validated, tokens without room are dropped and the length stays at `capacity`, so that the queries of that step
        stand too early; no other row suffers.

        One kernel does it where there is Triton and a GPU for it (a row of many tokens takes a second, tiny one), with
        the bits of the torch operations that do it elsewhere: for a `QuantizedKV`, in fp64, under `torch.compile`, on
        other devices and without Triton. No gradient flows through it; key and value may not overlap the cache.
        """
        lengths = self.lengths
        if lengths is None:
            refuse(
                "lengths",
                "an int32 tensor [B] in a cache to append to",
                None,
                "Pass lengths=torch.zeros(B, dtype=torch.int32).",
            )
        check_new(key, value, rotary, self._plain()[0], (self.batch, self.kv_heads, self.head_dim, self.value_dim))
        n = key.shape[1]
        if n > self.capacity:
            refuse("key", f"at most {self.capacity} tokens, the capacity of a row", n)
        for name, written in zip(self.STORES, self._plain(), strict=True):
            checks.writable(name, written)
        checks.writable("lengths", lengths)
        if checks.should_validate(validate, lengths):
            self.validate(n, first=lengths)
            if rotary is not None and n:
                checks.room(lengths, n, rotary.cos.shape[0], "the rotary table's positions")
        if not self._launch(key, value, rotary):
            self._operate(key, value, rotary, lengths)
        return self

    @torch.no_grad()
    def _operate(self, key: Tensor, value: Tensor, rotary: Rotary | None, lengths: Tensor) -> None:
        """Append by torch operations."""
        n = key.shape[1]
        positions = lengths.long().unsqueeze(1) + torch.arange(n, device=self.device)
        if rotary is not None:
            key = rotate(key, positions, rotary)
        self._write(key, value, positions)
        lengths.add_(n).clamp_(max=self.capacity)

    def validate(self, new: int = 0, *, first: Tensor | None = None) -> None:
        """Raise if a length is out of range, leaves no room for `new` tokens, or needs a page that there is not, or if
        the new tokens would go to a page that two rows have.

        `first` int `[B]`: the first position of each row that is still read; pages before it may be gone. None: 0.
        Reads the lengths and the page table: on a GPU a synchronisation.
        """
        checks.count("new", new, 0)
        if self.lengths is None:
            return
        if first is not None:
            checks.tensor("first", first, self.device)
            if first.shape != self.lengths.shape or first.is_floating_point():
                refuse("first", f"integers of shape [B={self.batch}]", f"{first.dtype} of shape {list(first.shape)}")
        checks.room(self.lengths, new, self.capacity)
        paged = self._paged(self.lengths, new)
        if paged is not None:
            checks.pages(*paged, first)
