"""The interface of caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..errors import check_int, refuse
from . import checks
from .quantized_tensor import Coding
from .write import Rotary, check_new, places, put, rotate

if TYPE_CHECKING:
    from typing import Self


class Cache(ABC):
    """Keys and values of the earlier tokens of B rows, of which row b has `lengths[b]`."""

    lengths: Tensor | None
    STORES: ClassVar[tuple[str, str]]
    """The fields with keys and values in `dtype`, all or some."""

    prepared_append: ClassVar[Callable[..., Callable[[], None] | None]] = lambda *_: None
    """`(cache, key, value, rotary, is_checked)`: the append by a kernel, or None. Set by ops/append.py."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Rows."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The most tokens of a row."""

    @abstractmethod
    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys `[B, n, Hkv, D]` and values `[B, n, Hkv, Dv]` of the positions from start to stop, in `dtype`.

        Positions from `lengths[b]` on have undefined values, NaN included: the reader masks them. Takes memory for the
        tile alone.
        """

    def _plain(self) -> tuple[Tensor, Tensor]:
        """Keys `[..., Hkv, D]` and values `[..., Hkv, Dv]`: the tensors of `STORES`."""
        key, value = self.STORES
        return getattr(self, key), getattr(self, value)

    def _write(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Write tokens to positions int64 `[B, n]`, counting up from `lengths[b]`; drop those beyond the capacity."""
        stores = self._plain()
        where = places(positions, stores[0], getattr(self, "page_table", None))
        for store, new in zip(stores, (key, value), strict=True):
            put(store, where, new)

    def _paged(self, lengths: Tensor, new: int) -> tuple[Tensor, Tensor, Tensor, int, int] | None:
        """(page table, tokens of each row in pages now, and with `new` more, page size, pages)."""
        return None

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All its tensors in the order of kernels' parameters, of which the last are page table and lengths."""

    @property
    def requires_grad(self) -> bool:
        """Whether one of its tensors requires a gradient, which decoding does not compute."""
        for t in self.tensors:  # noqa: SIM110  # any(...) takes twice the time
            if t is not None and t.requires_grad:
                return True
        return False

    def __repr__(self) -> str:
        kind = f"pages of {self.page_size}" if self.page_size else "rows"
        quantized = "" if self.coding is None else f" in {self.coding.format}"
        dims = self.head_dim if self.head_dim == self.value_dim else f"{self.head_dim} and {self.value_dim}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"<{type(self).__name__}: {self.batch} rows of up to {self.capacity} tokens, {kind}{quantized}, "
            f"{self.kv_heads} heads of {dims}, {dtype} on {self.device}>"
        )

    def __getstate__(self) -> dict[str, object]:
        """Without the layout of its tensors that `decode_attention` keeps here: others of the same fields lie anew."""
        return {name: value for name, value in self.__dict__.items() if name != "_layout"}

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 where the cache is not paged."""
        return 0

    @property
    def coding(self) -> Coding | None:
        """The quantisation; None: full precision."""
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
        """Bytes of all its tensors, lengths and page table included."""
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]  # each is a dataclass
        return sum(one.nbytes for one in values if hasattr(one, "nbytes"))

    def append(self, key: Tensor, value: Tensor, *, rotary: Rotary | None = None, validate: bool | None = None) -> Self:
        """Write n new tokens to every row, key `[B, n, Hkv, D]` and value `[B, n, Hkv, Dv]`, and return the cache.

        Their positions in row b are `lengths[b]` to `lengths[b] + n - 1`, and `lengths` is advanced by n, both in place
        and without a synchronisation, so that a CUDA graph may replay it. `rotary` rotates the keys by these positions
        first.

        `validate=True` reads lengths and pages first and raises where a row has no capacity, or no page, for the new
        tokens, where its length is negative, where the rotary table is too short, and where two rows would write to one
        page. On a CPU that is the default. On a GPU it is a synchronisation, so it is off by default. Without it,
        tokens beyond the capacity are dropped and the length stays at `capacity`, so that the positions of the queries
        of that step are too small; other rows are not affected.

        One Triton kernel does it on GPUs that support it (a row of many tokens takes a second, tiny one), with the same
        bits as the torch operations that do it elsewhere: for a `QuantizedKV`, in fp64, under `torch.compile`, on other
        devices and without Triton. It is not differentiable; key and value may not overlap the cache.
        """
        call = Cache.prepared_append(self, key, value, rotary, False)
        lengths = self._check_append(key, value, rotary) if call is None else self.lengths
        assert lengths is not None
        if checks.should_validate(validate, lengths):
            self.validate(key.shape[1], first=lengths)
            if rotary is not None and key.shape[1]:
                checks.capacity(lengths, key.shape[1], rotary.cos.shape[0], "the rotary table's positions")
        call = call or Cache.prepared_append(self, key, value, rotary, True)
        if call is None:
            self._operate(key, value, rotary, lengths)
        else:
            call()
        return self

    def _check_append(self, key: Tensor, value: Tensor, rotary: Rotary | None) -> Tensor:
        """Check all of an append but the values of lengths and pages; returns the lengths."""
        lengths = self.lengths
        if lengths is None:
            hint = "Pass lengths=torch.zeros(B, dtype=torch.int32)."
            refuse("lengths", "an int32 tensor [B] in a cache to append to", None, hint)
        check_new(key, value, rotary, self._plain()[0], (self.batch, self.kv_heads, self.head_dim, self.value_dim))
        if key.shape[1] > self.capacity:
            refuse("key", f"at most {self.capacity} tokens, the capacity of a row", key.shape[1])
        for name, written in zip(self.STORES, self._plain(), strict=True):
            checks.writable(name, written)
        checks.writable("lengths", lengths)
        return lengths

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
        """Raise if a length is out of range, exceeds the capacity with `new` more tokens or needs a missing page, or if
        the new tokens would be written to a page that two rows share.

        `first` int `[B]`: the first position of each row that is still read; pages before it may be freed. None: 0.
        Reads the lengths and the page table: on a GPU a synchronisation.
        """
        check_int("new", new, 0)
        if self.lengths is None:
            return
        if first is not None:
            checks.tensor("first", first, self.device)
            if first.shape != self.lengths.shape or first.is_floating_point():
                refuse("first", f"integers of shape [B={self.batch}]", f"{first.dtype} of shape {list(first.shape)}")
        checks.capacity(self.lengths, new, self.capacity)
        paged = self._paged(self.lengths, new)
        if paged is not None:
            checks.pages(*paged, first)
