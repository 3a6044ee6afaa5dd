"""A mask as the library op takes it: a window, intervals, and a dense tensor for what is neither."""

from __future__ import annotations

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

FAR = 2**31 - 1
"""An end that is not bounded."""

MOST_BYTES = 1 << 33
"""Of a table of blocks, or a dense mask in parts, that is expanded."""


class Lowered(NamedTuple):
    """What sides of a window, intervals and a dense mask allow together."""

    window: Window = Window()
    dense: Tensor | None = None  # bool [B or 1, Hq or 1, Tq or 1, Tk or 1]
    query_bounds: Tensor | None = None  # as `Inputs` has them
    key_bounds: Tensor | None = None


_kept: WeakKeyDictionary[Mask, dict[tuple[int, int, torch.device, Window], Lowered]] = WeakKeyDictionary()
"""By mask, for calls of these lengths with a window of their own: the layers of a model share what was made once."""


def lowered(mask: Mask, q_len: int, k_len: int, device: torch.device, window: Window) -> Lowered:
    """The mask of a call of so many queries and keys that has a window too. What is made is kept as long as the mask,
    but in a graph that is captured or compiled: there it is a part of the graph."""
    if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return _lowered(mask, q_len, k_len, device, window)
    of_mask = _kept.setdefault(mask, {})
    found = of_mask.get((q_len, k_len, device, window))
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            found = of_mask[q_len, k_len, device, window] = _lowered(mask, q_len, k_len, device, window)
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
    if mask.device is None:  # sides below 0 alone
        mask = mask.as_intervals(q_len, k_len).to(device)
    label = mask.query_label
    if label is None:
        label = torch.arange(q_len, dtype=torch.int32, device=mask.device)[None, None]
    first, last, key_bounds = mask.query_start, mask.query_end, None
    of_queries = [*keys_per_query(mask, q_len, k_len), label]
    of_keys = [bound for bound in (first, last) if bound is not None]
    shape = torch.broadcast_shapes(*(bound.shape[:2] for bound in (*of_queries, *of_keys)))
    if of_keys:
        ends = [
            torch.full((1, 1, 1), end, dtype=torch.int32, device=mask.device) if bound is None else bound
            for bound, end in ((first, -FAR - 1), (last, FAR))
        ]
        key_bounds = torch.stack([bound.expand(*shape, k_len) for bound in ends], 2)
    query_bounds = torch.stack([bound.expand(*shape, q_len) for bound in of_queries], 2)
    return Lowered(Window(), dense, query_bounds, key_bounds)


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
