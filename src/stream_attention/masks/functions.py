"""Masks from functions of indices, as those of FlexAttention: evaluated once, and kept as intervals where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.errors import check_int, refuse
from ..base.score_function import GatherByIndex, name_of, refusing_branches, takes
from .evaluate import STRIP
from .mask import Mask
from .tile_states import FULL, PARTIAL

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`mask_mod(b, h, q_idx, kv_idx)` on int32 tensors of no dimension; True = attend."""


def from_function(
    mask_mod: MaskMod,
    batch: int | None,
    heads: int | None,
    q_len: int,
    k_len: int,
    device: torch.device | str | None = None,
) -> Mask:
    """The mask of a function `mask_mod(b, h, q_idx, kv_idx) -> bool`, as FlexAttention has them.

    The function is called here and never again: on strips of rows, mapped over all indices by `torch.vmap`. The result
    is keys per query where those of every query are one interval, else queries per key likewise, else dense; dims of
    batch and heads that change nothing are 1. It takes O(Tq * Tk) time, and memory of O(Tk) unless it is dense.

    Args:
        mask_mod: as for FlexAttention: `q_idx` counts from 0, so causal for Tq != Tk is `q_idx + Tk - Tq >= kv_idx`;
            `h` is the query head. Tensors that it reads must be on `device`.
        batch, heads: sizes of the call; None where the function does not depend on them.
        q_len, k_len: lengths of the call. The mask fits no others.
        device: where indices and the mask are; None is torch's default.

    Raises:
        ValueError, TypeError: a function of other arguments, whose result is no bool tensor of no dimension, or that
            branches on its arguments; the message names it.

    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> mask = from_function(causal, None, None, 3, 3)
    >>> mask, mask.key_end.tolist()
    (Mask(causal of [3, 3]), [[[1, 2, 3]]])
    """
    hint = "A score_mod is no mask: return where it is not -inf"
    takes("mask_mod", mask_mod, "(b, h, q_idx, kv_idx)", 4, hint)
    name = name_of(mask_mod)
    for said, size in (("batch", batch), ("heads", heads)):
        if size is not None:
            check_int(said, size, least=1)
    for said, size in (("q_len", q_len), ("k_len", k_len)):
        check_int(said, size, least=0)
    target = torch.empty(0, device=device).device
    return _recognised(_Evaluated(_checked(mask_mod, name), name, batch or 1, heads or 1, q_len, k_len, target))


def _recognised(evaluated: _Evaluated) -> Mask:
    """The mask in the first form that can say it: keys per query, queries per key, dense."""
    q_len, k_len = evaluated.q_len, evaluated.k_len
    words = f"{evaluated.name} of [{q_len}, {k_len}]"
    if not (q_len and k_len):
        return Mask(q_len=q_len, k_len=k_len, words=words)
    evaluated = _without_idle_dims(evaluated)
    fields = _keys_per_query(evaluated)
    if fields is None:
        fields = _queries_per_key(evaluated)
    if fields is None:
        fields = {"dense": _dense(evaluated)}
    found: dict[str, Any] = {part: _collapsed(tensor) for part, tensor in fields.items()}
    return Mask(**found, q_len=q_len, k_len=k_len, words=words)


def from_block_mask(block_mask: Any) -> Mask:
    """The mask of a `torch.nn.attention.flex_attention.BlockMask`: its lengths, its lists of blocks and its mask_mod.

    Raises:
        TypeError: anything else.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> from_block_mask(create_block_mask(causal, None, None, 8, 8, device="cpu"))
    Mask(causal of [8, 8])
    """
    if not all(hasattr(block_mask, name) for name in ("seq_lengths", "kv_num_blocks", "kv_indices", "mask_mod")):
        hint = "A function goes to from_function, a table of blocks to blocks"
        refuse("block_mask", "a BlockMask of FlexAttention", type(block_mask).__name__, hint, TypeError)
    rows, cols = block_mask.BLOCK_SIZE
    q_len, k_len = block_mask.seq_lengths
    states = _listed(block_mask.kv_num_blocks, block_mask.kv_indices).to(torch.int8) * PARTIAL
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        states = torch.where(full, FULL, states)
    name = name_of(block_mask.mask_mod)
    function = _checked(block_mask.mask_mod, name)
    batch, heads = states.shape[:2]
    lists = _Lists(states, rows, cols)
    return _recognised(_Evaluated(function, name, batch, heads, q_len, k_len, states.device, lists))


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """The table of blocks, bool, whose columns the first `counts` entries of each row of `indices` name."""
    entries = torch.arange(indices.shape[-1], device=indices.device)
    is_listed = entries < counts[..., None]
    table = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool, device=indices.device)
    places = torch.where(is_listed, indices, indices.shape[-1]).to(torch.int64)  # others into a column that is dropped
    return table.scatter_(-1, places, True)[..., :-1]


class _Lists(NamedTuple):
    """The lists of a BlockMask as a table: a block that is full, or masked, does not ask the function."""

    states: Tensor  # int8 [B, H, blocks of queries, blocks of keys]: SKIP, PARTIAL or FULL
    rows: int
    cols: int


class _Evaluated(NamedTuple):
    """A function and the sizes to evaluate it for."""

    function: MaskMod
    name: str
    batch: int
    heads: int
    q_len: int
    k_len: int
    device: torch.device
    lists: _Lists | None = None

    def rows(self, first: int, last: int) -> Tensor:
        """Bool `[B, H, last - first, Tk]`."""
        mapped: Any = self.function
        for level in reversed(range(4)):
            mapped = torch.vmap(mapped, in_dims=tuple(0 if at == level else None for at in range(4)))
        counts = (0, self.batch), (0, self.heads), (first, last), (0, self.k_len)
        places = [torch.arange(*count, dtype=torch.int32, device=self.device) for count in counts]
        with torch.no_grad(), GatherByIndex(), refusing_branches(self.name):
            found: Tensor = mapped(*places)
        if self.lists is None:
            return found
        states, rows, cols = self.lists
        its_states = states[:, :, places[2] // rows][..., places[3] // cols]
        return (its_states == FULL) | ((its_states == PARTIAL) & found)

    def strips(self) -> Iterator[tuple[int, Tensor]]:
        step = max(1, STRIP // max(1, self.batch * self.heads * self.k_len))
        for first in range(0, self.q_len, step):
            yield first, self.rows(first, min(first + step, self.q_len))


def _checked(mask_mod: MaskMod, name: str) -> MaskMod:
    """The function, whose result is looked at."""

    def call(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found: Any = mask_mod(b, h, q_idx, kv_idx)
        if not isinstance(found, Tensor):
            hint = "A constant is b.new_ones((), dtype=torch.bool)" if isinstance(found, bool) else ""
            refuse(name, "a bool tensor returned", type(found).__name__, hint, TypeError)
        if found.dtype is not torch.bool:
            hint = "Compare: score != -inf, or x != 0"
            refuse(name, "dtype torch.bool returned (True = attend)", found.dtype, hint, TypeError)
        if found.dim():
            hint = "Indices are tensors of no dimension, one score at a time; reduce by any() or all()"
            refuse(name, "a tensor of no dimension returned", list(found.shape), hint)
        return found

    return call


def _without_idle_dims(evaluated: _Evaluated) -> _Evaluated:
    """Without the dims of batch and heads that the function does not read: vmap expands those, with a stride of 0."""
    batch, heads = evaluated.rows(0, 1).stride()[:2]
    return evaluated._replace(batch=evaluated.batch if batch else 1, heads=evaluated.heads if heads else 1)


def _keys_per_query(evaluated: _Evaluated) -> dict[str, Tensor] | None:
    """Bounds of the keys of each query; None where they are no interval."""
    starts, ends = [], []
    for _, strip in evaluated.strips():
        start, end, count = _run(strip)
        if not bool((end - start == count).all()):
            return None
        starts.append(start)
        ends.append(end)
    return _bounded("key", torch.cat(starts, dim=-1), torch.cat(ends, dim=-1), evaluated.k_len)


def _queries_per_key(evaluated: _Evaluated) -> dict[str, Tensor] | None:
    """Bounds of the queries of each key; None where they are no interval."""
    shape = evaluated.batch, evaluated.heads, evaluated.k_len
    start, end, count = (torch.zeros(shape, dtype=torch.int32, device=evaluated.device) for _ in range(3))
    for first, strip in evaluated.strips():
        its_start, its_end, its_count = _run(strip.mT)
        start = torch.where((count == 0) & (its_count > 0), first + its_start, start)
        end = torch.where(its_count > 0, first + its_end, end)
        count = count + its_count
        if not bool((end - start == count).all()):
            return None
    return _bounded("query", start, end, evaluated.q_len)


def _dense(evaluated: _Evaluated) -> Tensor:
    shape = evaluated.batch, evaluated.heads, evaluated.q_len, evaluated.k_len
    whole = torch.empty(shape, dtype=torch.bool, device=evaluated.device)
    for first, strip in evaluated.strips():
        whole[:, :, first : first + strip.shape[2]] = strip
    return whole


def _run(seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the last dim the first element that holds, the end of the last, and how many hold: int32, 0 where none."""
    bits = seen.contiguous().view(torch.uint8)  # faster in torch's reductions than bool
    count = bits.sum(-1, dtype=torch.int32)
    start = bits.argmax(-1).to(torch.int32)  # the first of equals
    end = seen.shape[-1] - bits.flip(-1).argmax(-1).to(torch.int32)
    return start, torch.where(count > 0, end, 0), count


def _bounded(side: str, start: Tensor, end: Tensor, most: int) -> dict[str, Tensor]:
    """The bounds that mask anything. Empty intervals are [0, 0)."""
    found = {}
    if bool((start > 0).any()):
        found[f"{side}_start"] = start
    if bool((end < most).any()):
        found[f"{side}_end"] = end
    return found


def _collapsed(tensor: Tensor) -> Tensor:
    """The tensor with dims of batch and heads of 1 where all entries are equal."""
    for dim in range(2):
        first = tensor.narrow(dim, 0, 1)
        if tensor.shape[dim] > 1 and bool((tensor == first).all()):
            tensor = first
    return tensor.contiguous()
