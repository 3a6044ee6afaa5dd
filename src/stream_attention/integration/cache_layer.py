"""The base of our cache layers: it counts the tokens of a row, and stores them without padding."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..base.errors import refuse
from ..base.kv_layouts import KVCache
from .placeholder import Cached, placeholder_kv


class StreamLayer(CacheLayerMixin):
    """One layer's cache. `total` counts the columns of the attention mask, padding and dropped tokens included.

    For the first tokens the model gets back the tensors that it passed. Later ones get placeholder keys (see
    `placeholder`) of `total` tokens.
    """

    kv: Any  # a cache; None before the first tokens
    is_sliding = False
    is_croppable = False  # cropping is not exact

    def __init__(self, padding: Tensor | None) -> None:
        super().__init__()
        self.padding = padding  # bool [B, T], True = a real token: of the prompt
        self._forget()

    def _forget(self) -> None:
        self.kv = None
        self.total = 0
        self.rows: list[int] = []  # tokens in each row, equal to `kv.lengths` on the device
        self.pads: list[int] = []  # padding of each row, before its first token
        self.is_initialized = False

    # What a subclass implements

    @abstractmethod
    def _start(self, key: Tensor, value: Tensor) -> None:
        """Store the first tokens `[B, n, Hkv, .]`, of which row b has `rows[b]`, its first."""

    @abstractmethod
    def _extend(self, key: Tensor, value: Tensor) -> KVCache | list[Tensor]:
        """Append n tokens to every row; returns the cache to attend to, or keys and values."""

    @abstractmethod
    def _drop(self, count: int) -> None:
        """Remove the last tokens of every row."""

    @abstractmethod
    def _select(self, index: Tensor) -> None:
        """Replace row i by row index[i]."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all its tensors."""

    def _observe(self, query: Tensor, options: dict[str, Any]) -> None:
        """Called after the attention of these queries, with its scale, softcap and sink."""

    # What transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing: the cache is allocated with its first tokens."""

    @torch.no_grad()
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append n tokens, `[B, Hkv, n, .]`, and return what the attention function is to read."""
        if key_states.requires_grad or value_states.requires_grad:
            refuse("key_states", "tensors without a gradient", "a gradient", "Call the model under torch.no_grad().")
        value_states = value_states.to(key_states.dtype)  # under autocast they differ
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        batch, new = key.shape[:2]
        if self.total == 0:
            self.pads = self._padding_of(batch, new)
            self.rows = [new - pad for pad in self.pads]
            self._nan = key.new_full((), torch.nan)
            self._start(rolled(key, self.pads), rolled(value, self.pads))
            self.total, self.is_initialized = new, True
            key_states.stream_cached = Cached(None, self._observe)  # type: ignore[attr-defined]
            return key_states, value_states
        if batch != len(self.rows):
            refuse("key_states", f"the {len(self.rows)} rows of the cache", batch, "A new batch needs a new cache.")
        self.total += new
        read = self._extend(key, value)
        kv = None if isinstance(read, list) else read
        keys, values = read if isinstance(read, list) else placeholder_kv(self._nan, read, self.total)
        padding = self.padding is not None, any(self.pads)
        keys.stream_cached = Cached(kv, self._observe, new, *padding)  # type: ignore[attr-defined]
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens so far, which is the position of the next one."""
        return self.total

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Columns of a mask and the first one: all tokens so far, as the placeholder keys have them.

        `query` is the number of new tokens; before transformers 5.4, their positions.
        """
        return self.total + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """Unbounded: -1."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5

    def reset(self) -> None:
        """Drop all tokens, and the padding, which was that of the last prompt."""
        self.padding = None
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove that many of the last tokens, passed as a negative number; a positive one is how many to keep."""
        given = int(tokens_to_remove)  # transformers counts draft tokens on the device
        count = -given if given <= 0 else max(0, self.total - given)
        if count == 0:
            return
        if count > min(self.rows, default=0):
            refuse("crop", f"at most the {min(self.rows, default=0)} tokens of every row", count)
        self._drop(count)
        self.rows = [row - count for row in self.rows]
        self.total -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.total:
            self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.kv is None:
            return
        if len({*self.rows}) > 1 or len({*self.pads}) > 1:
            order = indices.tolist()
            self.rows, self.pads = [self.rows[i] for i in order], [self.pads[i] for i in order]
        else:
            self.rows, self.pads = self.rows[:1] * len(indices), self.pads[:1] * len(indices)
        self._select(indices.to(self.kv.device))

    def offload(self) -> None:
        refuse("offload", "no call: the cache stays on its device", "one", "Use fewer bits or a smaller budget.")

    prefetch = offload

    # For subclasses

    def _padding_of(self, batch: int, new: int) -> list[int]:
        """How many of the first tokens of each row are padding."""
        if self.padding is None:
            return [0] * batch
        rows, columns = self.padding.shape
        if batch % rows:
            refuse("attention_mask", f"a mask of the {batch} rows of the prompt, or of a part of them", rows)
        pads = [pad for pad in (~self.padding).sum(1).tolist() for _ in range(batch // rows)]  # beams are adjacent
        if not max(pads) <= new <= columns:
            expected = f"a first call with {max(pads)} to {columns} tokens, all padding among them"
            refuse("key_states", expected, new, "The mask is that of the prompt.")
        return pads


def rolled(x: Tensor, by: list[int]) -> Tensor:
    """x `[B, T, ...]` with row b rolled left by by[b]."""
    if not any(by):
        return x
    at = torch.arange(x.shape[1], device=x.device) + torch.tensor(by, device=x.device).unsqueeze(1)
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), at % x.shape[1]]
