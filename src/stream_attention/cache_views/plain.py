"""Caches in full precision: one run of slots per row, or pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import checks
from .base import Cache
from .write import Rotary, places, put, take


@dataclass(frozen=True, eq=False, repr=False)
class ContiguousKV(Cache):
    """Rows of T slots each, of which the first `lengths[b]` are taken; None: all."""

    STORES = "key", "value"
    key: Tensor  # [B, T, Hkv, D]
    value: Tensor  # [B, T, Hkv, Dv]
    lengths: Tensor | None = None  # int32 [B]

    def __post_init__(self) -> None:
        checks.floating("key", self.key, "[B, T, Hkv, D]")
        checks.floating("value", self.value, "[B, T, Hkv, Dv]", self.device)
        checks.beside("value", self.value, self.key, "key")
        if self.lengths is not None:
            checks.int32("lengths", self.lengths, (self.batch,), f"[B={self.batch}]", self.device)

    @property
    def batch(self) -> int:
        return self.key.shape[0]

    @property
    def capacity(self) -> int:
        return self.key.shape[1]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.key, self.value, None, self.lengths

    @property
    def requires_grad(self) -> bool:
        return self.key.requires_grad or self.value.requires_grad

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        checks.span(start, stop, self.capacity)
        return self.key[:, start:stop], self.value[:, start:stop]

    def _write(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        where = places(positions, self.key, None)
        put(self.key, where, key)
        put(self.value, where, value)

    def _launch(self, key: Tensor, value: Tensor, rotary: Rotary | None) -> bool:
        return _launched(key, value, self.key, self.value, None, self.lengths, self.capacity, rotary)

    def _paged(self, lengths: Tensor, new: int) -> None:
        return None


@dataclass(frozen=True, eq=False, repr=False)
class PagedKV(Cache):
    """Position t of row b is slot `t % page` of page `page_table[b, t // page]`.

    Pages may come in any order. What the table says behind a row's length is not looked at; a token before it whose
    page does not exist reads as NaN. Rows may share a page that none of them writes to.
    """

    STORES = "key_pages", "value_pages"
    key_pages: Tensor  # [P, page, Hkv, D]
    value_pages: Tensor  # [P, page, Hkv, Dv]
    page_table: Tensor  # int32 [B, max_pages]
    lengths: Tensor  # int32 [B]

    def __post_init__(self) -> None:
        checks.floating("key_pages", self.key_pages, "[P, page, Hkv, D]")
        checks.floating("value_pages", self.value_pages, "[P, page, Hkv, Dv]", self.device)
        checks.beside("value_pages", self.value_pages, self.key_pages, "key_pages")
        checks.int32("page_table", self.page_table, (None, None), "[B, max_pages]", self.device)
        checks.page_shape("key_pages", self.key_pages, self.page_table)
        checks.int32("lengths", self.lengths, (self.batch,), f"[B={self.batch}]", self.device)

    @property
    def batch(self) -> int:
        return self.page_table.shape[0]

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.key_pages.shape[1]

    @property
    def page_size(self) -> int:
        return self.page

    @property
    def capacity(self) -> int:
        return self.page_table.shape[1] * self.page

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.key_pages, self.value_pages, self.page_table, self.lengths

    @property
    def requires_grad(self) -> bool:
        return self.key_pages.requires_grad or self.value_pages.requires_grad

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        checks.span(start, stop, self.capacity)
        positions = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
        where = places(positions, self.key_pages, self.page_table)
        return take(self.key_pages, where), take(self.value_pages, where)

    def _write(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        where = places(positions, self.key_pages, self.page_table)
        put(self.key_pages, where, key)
        put(self.value_pages, where, value)

    def _launch(self, key: Tensor, value: Tensor, rotary: Rotary | None) -> bool:
        stores = self.key_pages, self.value_pages
        return _launched(key, value, *stores, self.page_table, self.lengths, self.capacity, rotary)

    def _paged(self, lengths: Tensor, new: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
        return self.page_table, lengths, lengths + new, self.page, self.key_pages.shape[0]


def _launched(
    key: Tensor,
    value: Tensor,
    key_store: Tensor,
    value_store: Tensor,
    page_table: Tensor | None,
    lengths: Tensor | None,
    capacity: int,
    rotary: Rotary | None,
) -> bool:
    """Append by the Triton kernel; False where it is not for these tensors."""
    if lengths is None or torch.compiler.is_compiling():
        return False
    tables = () if rotary is None else rotary[:2]
    held = (key, value, key_store, value_store, lengths, *tables)
    if any(type(t) is not Tensor or t.is_neg() for t in held):  # fake tensors, and others that are not their memory
        return False
    if key.dtype is torch.float64 or any(table.dtype not in checks.DTYPES for table in tables):
        return False
    launch = _launcher(key_store.device)
    if launch is None:
        return False
    launch(key, value, key_store, value_store, page_table, lengths, capacity, rotary)
    return True


@cache
def _launcher(device: torch.device) -> Callable[..., None] | None:
    """What launches the kernel on a device; None where torch operations append: there is no Triton, the GPU is one that
    no kernel is for, or the device is no GPU."""
    from ..backends import runs_triton

    if not runs_triton(device):
        return None
    from ..kernels.triton.append import launch_append

    return launch_append
