"""Caches in full precision: contiguous rows, or pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks
from .base import Cache
from .write import places, take


@dataclass(frozen=True, eq=False, repr=False)
class ContiguousKV(Cache):
    """Rows of T slots each, of which the first `lengths[b]` are filled; None: all."""

    STORES = "key", "value"
    key: Tensor  # [B, T, Hkv, D]
    value: Tensor  # [B, T, Hkv, Dv]
    lengths: Tensor | None = None  # int32 [B]

    def __post_init__(self) -> None:
        checks.stores(self.STORES, *self._plain(), "B, T")
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

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        checks.span(start, stop, self.capacity)
        return self.key[:, start:stop], self.value[:, start:stop]


@dataclass(frozen=True, eq=False, repr=False)
class PagedKV(Cache):
    """Position t of row b is slot `t % page` of page `page_table[b, t // page]`.

    Pages may be in any order. Entries of the table beyond a row's length are ignored; a token whose page does not exist
    reads as NaN. Rows may share a page that none of them writes to.
    """

    STORES = "key_pages", "value_pages"
    key_pages: Tensor  # [P, page, Hkv, D]
    value_pages: Tensor  # [P, page, Hkv, Dv]
    page_table: Tensor  # int32 [B, max_pages]
    lengths: Tensor  # int32 [B]

    def __post_init__(self) -> None:
        checks.stores(self.STORES, *self._plain(), "P, page")
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

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        checks.span(start, stop, self.capacity)
        positions = torch.arange(start, stop, device=self.device).expand(self.batch, -1)
        where = places(positions, self.key_pages, self.page_table)
        return take(self.key_pages, where), take(self.value_pages, where)

    def _paged(self, lengths: Tensor, new: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
        return self.page_table, lengths, lengths + new, self.page, self.key_pages.shape[0]
