"""A mask as the library op takes it: a window, intervals, and a dense tensor for what is neither."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.problem import UNBOUNDED, Window
from .algebra import both
from .bounds import keys_per_query
from .evaluate import as_dense
from .mask import Mask
from .tile_states import least_of, most_of

FAR = 2**31 - 1
"""An end that is not bounded: behind every label but itself, which `Mask` does not take."""

MOST_BYTES = 1 << 33
"""Of a table of blocks, or a dense mask in parts, that is expanded."""


class Lowered(NamedTuple):
    """What sides of a window, intervals and a dense mask allow together."""

    window: Window = Window()
    dense: Tensor | None = None  # bool [B or 1, Hq or 1, Tq or 1, Tk or 1]
    query_bounds: Tensor | None = None  # as `Inputs` has them
    key_bounds: Tensor | None = None


_kept: WeakKeyDictionary[Mask, dict[Hashable, Lowered]] = WeakKeyDictionary()
"""By mask, for calls of these lengths with a window of their own: the layers of a model share what was made once."""

_MOST_KEPT = 8
"""Of a mask."""


def lowered(mask: Mask, q_len: int, k_len: int, device: torch.device, window: Window) -> Lowered:
    """The mask of a call of so many queries and keys that has a window too. What is made is kept as long as the mask,
    but in a graph that is captured or compiled, of which it is a part, and of what may be large."""
    of_graph = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    if of_graph or mask.blocks is not None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _lowered(mask, q_len, k_len, device, window)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    versions = [0 if tensor.is_inference() else tensor._version for _, tensor in mask.tensors()]
    key, of_mask = (q_len, k_len, device, window, stream, *versions), _kept.setdefault(mask, {})
    found = of_mask.get(key)
    if found is None:
        while len(of_mask) >= _MOST_KEPT:
            del of_mask[next(iter(of_mask))]
        with torch.inference_mode(False), torch.no_grad():
            found = of_mask[key] = _lowered(mask, q_len, k_len, device, window)
    return found


def _lowered(mask: Mask, q_len: int, k_len: int, device: torch.device, window: Window) -> Lowered:
    mask.check(q_len, k_len)
    if tuple(window) != (UNBOUNDED, UNBOUNDED):
        left, right = (None if side == UNBOUNDED else side for side in window)
        mask = both(mask, Mask(left, right))
    dense = _dense_part(mask, q_len, k_len)
    sides = mask.left, mask.right
    in_tensors = any(name not in ("dense", "blocks") for name, _ in mask.tensors())
    if not in_tensors and all(side is None or side >= 0 for side in sides):
        return Lowered(Window(*(UNBOUNDED if side is None else side for side in sides)), dense)
    label, first, last, key_bounds = mask.query_label, mask.query_start, mask.query_end, None
    if label is None:
        label = torch.arange(q_len, dtype=torch.int32, device=device)[None, None]
    elif last is None and device.type == "cpu" and not torch.compiler.is_compiling() and bool((label == FAR).any()):
        refuse("query_label", f"labels below {FAR} beside no query_end", FAR)
    of_queries = [*keys_per_query(mask, q_len, k_len, device), label]
    of_keys = [bound for bound in (first, last) if bound is not None]
    shape = torch.broadcast_shapes(*(bound.shape[:2] for bound in (*of_queries, *of_keys)))
    if of_keys:
        ends = [
            torch.full((1, 1, 1), end, dtype=torch.int32, device=device) if bound is None else bound
            for bound, end in ((first, -FAR - 1), (last, FAR))
        ]
        key_bounds = torch.stack([bound.expand(*shape, k_len) for bound in ends], 2)
    query_bounds = torch.stack([bound.expand(*shape, q_len) for bound in of_queries], 2)
    return Lowered(Window(), dense, query_bounds, key_bounds)


def walked(made: Lowered, k_len: int, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Which tiles of queries and keys kernels walk, and which of these they do not test, bool `[B, H, nQ, nK]` each: by
    least and greatest bounds, as gpu/bounds.py lists them."""
    assert made.query_bounds is not None
    start, end, label = made.query_bounds.long().unbind(2)
    q_len, is_empty = start.shape[-1], start >= end
    nearest = torch.arange(0, k_len, cols, device=start.device)
    farthest = (nearest + cols).clamp(max=k_len) - 1
    some = least_of(start.masked_fill(is_empty, FAR), q_len, rows)[..., None] <= farthest
    some = some & (most_of(end.masked_fill(is_empty, 0), q_len, rows)[..., None] > nearest)
    whole = (most_of(start, q_len, rows)[..., None] <= nearest) & (least_of(end, q_len, rows)[..., None] > farthest)
    if made.key_bounds is not None:
        first, last = made.key_bounds.long().unbind(2)
        unseen = first >= last
        low, high = (of(label, q_len, rows)[..., None] for of in (least_of, most_of))
        some = some & (least_of(first.masked_fill(unseen, FAR), k_len, cols)[..., None, :] <= high)
        some = some & (most_of(last.masked_fill(unseen, -FAR), k_len, cols)[..., None, :] > low)
        whole = whole & (most_of(first, k_len, cols)[..., None, :] <= low)
        whole = whole & (least_of(last, k_len, cols)[..., None, :] > high)
    fits = (torch.arange(0, q_len, rows, device=start.device) + rows <= q_len)[:, None] & (nearest + cols <= k_len)
    return some, some & whole & fits


def _dense_part(mask: Mask, q_len: int, k_len: int) -> Tensor | None:
    """The dense part and the table of blocks, as one dense mask."""
    if mask.blocks is None:
        return mask.dense
    parts = Mask(dense=mask.dense, blocks=mask.blocks)
    batch, heads = (1 if size is None else size for size in parts.sizes[:2])
    scores = batch * heads * q_len * k_len
    if scores > MOST_BYTES:
        hint = "Pass intervals where they can say it: a table of blocks is expanded to a dense mask here"
        refuse("mask", f"a table of blocks for at most {MOST_BYTES:,} scores", f"{scores:,}", hint)
    return as_dense(parts, None, None, q_len, k_len)
