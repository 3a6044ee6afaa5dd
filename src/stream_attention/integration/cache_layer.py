"""What every cache layer of ours does: it counts the tokens seen, and holds those of each row without their padding."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..cache_views import KVCache
from ..errors import refuse
from .placeholder import Observer, hollow, observed


class StreamLayer(CacheLayerMixin):
    """One layer's cache. `seen` counts the columns of the attention mask, padding and dropped tokens included.

    The first tokens are attended to as they came: the model gets the very tensors that it passed. Later ones get hollow
    keys (see `placeholder`) that stand for as many tokens as were seen.
    """

    is_sliding = False
    is_croppable = False  # not without a trace

    def __init__(self, padding: Tensor | None) -> None:
        super().__init__()
        self.padding = padding  # bool [B, T], True = a real token: of the prompt
        self.kv: KVCache | None = None
        self._forget()

    def _forget(self) -> None:
        self.kv = None
        self.seen = 0
        self.rows: list[int] = []  # tokens that each row holds, as `kv.lengths` says on the device
        self.pads: list[int] = []  # of each row, before its first token
        self.is_initialized = False

    # What a layer is

    @abstractmethod
    def _start(self, key: Tensor, value: Tensor) -> None:
        """Hold the first tokens `[B, n, Hkv, .]`, of which row b has `rows[b]`, its first."""

    @abstractmethod
    def _extend(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Hold n tokens more in every row; returns keys and values for the model."""

    @abstractmethod
    def _drop(self, count: int) -> None:
        """Forget the last tokens of every row."""

    @abstractmethod
    def _select(self, index: Tensor) -> None:
        """Hold, as row i, what row index[i] held."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all that it holds."""

    @property
    def _observer(self) -> Observer | None:
        """Who is told the queries."""
        return None

    # What transformers calls

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing: what is held is made when its first tokens come."""

    @torch.no_grad()
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take n tokens more, `[B, Hkv, n, .]`, and return what the attention function is to read."""
        if key_states.requires_grad or value_states.requires_grad:
            refuse("key_states", "tensors without a gradient", "a gradient", "Call the model under torch.no_grad().")
        value_states = value_states.to(key_states.dtype)  # under autocast they differ
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        batch, new = key.shape[:2]
        if self.seen == 0:
            self.pads = self._padding_of(batch, new)
            self.rows = [new - pad for pad in self.pads]
            self._nan = key.new_full((), torch.nan)
            self._start(rolled(key, self.pads), rolled(value, self.pads))
            self.seen, self.is_initialized = new, True
            return observed(key_states, self._observer), value_states
        if batch != len(self.rows):
            refuse("key_states", f"the {len(self.rows)} rows of the cache", batch, "A new batch needs a new cache.")
        self.seen += new
        keys, values = self._extend(key, value)
        keys.stream_new = new  # type: ignore[attr-defined]
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens seen, which is where the next one stands."""
        return self.seen

    def get_mask_sizes(self, query: int | Tensor) -> tuple[int, int]:
        """Columns of a mask and where they start: all that were seen, as the hollow keys have them.

        `query` is how many new tokens there are; before transformers 5.4, their positions.
        """
        return self.seen + (query if isinstance(query, int) else query.shape[0]), 0

    def get_max_length(self) -> int:
        """No end: -1."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, by the name that it has before transformers 5."""
        return -1

    def reset(self) -> None:
        """Forget all, and what was known of padding, which was that of the last prompt."""
        self.padding = None
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget as many of the last tokens, said as a negative number; a positive one is how many to remember."""
        given = int(tokens_to_remove)  # transformers counts guesses on the device
        count = -given if given <= 0 else max(0, self.seen - given)
        if count == 0:
            return
        if count > min(self.rows, default=0):
            refuse("crop", f"at most the {min(self.rows, default=0)} tokens that every row holds", count)
        self._drop(count)
        self.rows = [row - count for row in self.rows]
        self.seen -= count

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.seen:
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
        refuse("offload", "a cache that stays on its device", "a call", "Fewer bits, or a smaller budget, save memory.")

    prefetch = offload

    # For those who are layers

    def _hollow(self, kv: KVCache) -> list[Tensor]:
        return hollow(self._nan, kv, self.seen, self.padding is not None, any(self.pads), self._observer)

    def _padding_of(self, batch: int, new: int) -> list[int]:
        """How many of the first tokens of each row are padding."""
        if self.padding is None:
            return [0] * batch
        rows, columns = self.padding.shape
        if batch % rows:
            refuse("attention_mask", f"a mask of the {batch} rows of the prompt, or of a part of them", rows)
        pads = [pad for pad in (~self.padding).sum(1).tolist() for _ in range(batch // rows)]  # beams lie side by side
        if not max(pads) <= new <= columns:
            expected = f"a prompt that begins with {max(pads)} to {columns} tokens, all padding among them"
            refuse("key_states", expected, new, "The mask is that of the prompt.")
        return pads


def rolled(x: Tensor, by: list[int]) -> Tensor:
    """x `[B, T, ...]` with row b turned left by by[b], so that what was there is first."""
    if not any(by):
        return x
    at = torch.arange(x.shape[1], device=x.device) + torch.tensor(by, device=x.device).unsqueeze(1)
    return x[torch.arange(x.shape[0], device=x.device).unsqueeze(1), at % x.shape[1]]
