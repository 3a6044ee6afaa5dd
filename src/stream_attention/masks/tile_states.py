"""Which tiles of scores a kernel may skip, and which need no test of their elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..base.errors import check_int
from .bounds import keys_per_query, queries_per_key

if TYPE_CHECKING:
    from .mask import Blocks, Mask

SKIP, PARTIAL, FULL = 0, 1, 2
"""What is visible of a tile: nothing, some of it perhaps, and all of it."""

_FAR = 2**32
"""Above every label and bound."""

States = tuple[Tensor, Tensor]
"""Of each tile, bool `[B or 1, H or 1, nQ, nK]`: whether something may be visible, and whether all of it is."""


def tiles(
    mask: Mask,
    q_len: int,
    k_len: int,
    rows: int,
    cols: int,
    batch: int | None = None,
    heads: int | None = None,
) -> Tensor:
    """What is visible of each tile of rows x cols scores: int8 `[B', H', ceil(Tq / rows), ceil(Tk / cols)]`.

    0: nothing, the tile may be skipped. 2: all scores that exist are visible, none needs a test. 1: anything else. B'
    and H' are `batch` and `heads` where given, else 1 where the mask does not depend on them.

    0 and 2 are never wrong. 1 is exact for a mask of a band, of keys per query, of queries per key without labels, of
    either of these with a band, dense, or of blocks. Labels are compared by their least and greatest in a tile, and
    several parts one by one, so that a tile may be 1 without need. Nothing waits for the device.

    Raises:
        ValueError, TypeError: sizes that the mask does not fit, or a tile without rows or columns.

    >>> from stream_attention.masks import causal, tiles
    >>> tiles(causal(), 5, 5, rows=2, cols=2)[0, 0].tolist()
    [[1, 0, 0], [2, 1, 0], [2, 2, 2]]
    """
    for name, size in (("rows", rows), ("cols", cols)):
        check_int(name, size, least=1)
    mask.check(q_len, k_len, batch, heads)
    found = [_of_intervals(*keys_per_query(mask, q_len, k_len), rows, cols, k_len)]
    if mask.query_label is not None:
        found.append(_of_labels(mask, q_len, k_len, rows, cols))
    elif mask.query_start is not None or mask.query_end is not None:
        turned = _of_intervals(*queries_per_key(mask, q_len, k_len), cols, rows, q_len)
        found.append((turned[0].mT, turned[1].mT))
    if mask.dense is not None:
        found.append(_of_dense(mask.dense, q_len, k_len, rows, cols))
    if mask.blocks is not None:
        found.append(_of_blocks(mask.blocks, q_len, k_len, rows, cols))
    some, all_of_it = found[0]
    for other, whole in found[1:]:
        some, all_of_it = some & other, all_of_it & whole
    states = some.to(torch.int8) + (some & all_of_it).to(torch.int8)
    wanted = [size if asked is None else asked for size, asked in zip(states.shape, (batch, heads), strict=False)]
    return states.expand(*wanted, *states.shape[2:])


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


def _of_intervals(start: Tensor, end: Tensor, rows: int, cols: int, k_len: int) -> States:
    """Of intervals in [0, Tk] for each row, by counting in each tile the rows that see some of it, and all of it.

    A row adds 1 where its first tile begins and takes it off behind its last, so the counts are running sums.
    """
    q_len, n_q, n_k = start.shape[-1], _blocks(start.shape[-1], rows), _blocks(k_len, cols)
    end = torch.maximum(start, end)
    touched = _covered(start // cols, (end + cols - 1) // cols, start < end, rows, n_q, n_k)
    # The last tile ends with the keys.
    inside = (start + cols - 1) // cols, torch.where(end == k_len, n_k, end // cols)
    covered = _covered(*inside, inside[0] < inside[1], rows, n_q, n_k)
    there = torch.arange(n_q, device=start.device) * rows
    return touched > 0, covered == (q_len - there).clamp(max=rows)[:, None]


def _covered(first: Tensor, last: Tensor, counts: Tensor, rows: int, n_q: int, n_k: int) -> Tensor:
    """How many rows of each block of rows have a range [first, last) of tiles that contains the tile."""
    shape = first.shape[:-1]
    block = torch.arange(first.shape[-1], device=first.device) // rows
    line = torch.arange(shape.numel(), device=first.device).view(*shape, 1) * n_q + block  # [B, H, Tq]
    changes = torch.zeros(shape.numel() * n_q * (n_k + 1), dtype=torch.int32, device=first.device)
    ones = counts.to(torch.int32).flatten()
    changes.scatter_add_(0, (line * (n_k + 1) + first).flatten(), ones)
    changes.scatter_add_(0, (line * (n_k + 1) + last).flatten(), -ones)
    return changes.view(*shape, n_q, n_k + 1).cumsum(-1, dtype=torch.int32)[..., :n_k]


def _of_labels(mask: Mask, q_len: int, k_len: int, rows: int, cols: int) -> States:
    """Of labels, by the least and greatest of a block of queries, and the bounds of a block of keys."""
    given = mask.query_label, mask.query_start, mask.query_end
    label, start, end = (None if one is None else one.to(torch.int64) for one in given)
    assert label is not None
    least, most = least_of(label, q_len, rows)[..., None], most_of(label, q_len, rows)[..., None]
    some = all_of_it = torch.ones_like(least, dtype=torch.bool)
    keys = torch.broadcast_tensors(*(bound for bound in (start, end) if bound is not None))
    is_empty = keys[0] >= keys[-1] if len(keys) == 2 else torch.zeros_like(keys[0], dtype=torch.bool)
    if start is not None:
        there = torch.where(is_empty, _FAR, keys[0])
        some = some & (least_of(there, k_len, cols)[..., None, :] <= most)
        all_of_it = all_of_it & (most_of(keys[0], k_len, cols)[..., None, :] <= least)
    if end is not None:
        there = torch.where(is_empty, -_FAR, keys[-1])
        some = some & (most_of(there, k_len, cols)[..., None, :] > least)
        all_of_it = all_of_it & (least_of(keys[-1], k_len, cols)[..., None, :] > most)
    return some, all_of_it


def _of_dense(dense: Tensor, q_len: int, k_len: int, rows: int, cols: int) -> States:
    some = most_of(most_of(dense, k_len, cols).mT, q_len, rows).mT
    return some, least_of(least_of(dense, k_len, cols).mT, q_len, rows).mT


def most_of(values: Tensor, length: int, size: int) -> Tensor:
    """The greatest value of each block of `size` of the last dim, which is `length` long or 1, the same for all."""
    if values.shape[-1] == 1:
        return values.expand(*values.shape[:-1], _blocks(length, size))
    least = False if values.dtype is torch.bool else -_FAR
    return pad(values, (0, -length % size), value=least).unflatten(-1, (_blocks(length, size), size)).amax(-1)


def least_of(values: Tensor, length: int, size: int) -> Tensor:
    """As `most_of`, the least."""
    return ~most_of(~values, length, size)  # the complement of an int is -1 - x


def _of_blocks(blocks: Blocks, q_len: int, k_len: int, rows: int, cols: int) -> States:
    """By the number of visible blocks that a tile overlaps: differences of sums over the blocks before its corners."""
    before = pad(blocks.table.to(torch.int32), (1, 0, 1, 0)).cumsum(-1, dtype=torch.int32).cumsum(-2, dtype=torch.int32)
    device = blocks.table.device
    top, bottom = _overlapped(q_len, rows, blocks.rows, device)
    left, right = _overlapped(k_len, cols, blocks.cols, device)
    top, bottom = top[:, None], bottom[:, None]
    seen = before[..., bottom, right] - before[..., top, right] - before[..., bottom, left] + before[..., top, left]
    return seen > 0, seen == (bottom - top) * (right - left)


def _overlapped(length: int, size: int, block: int, device: torch.device) -> States:
    """The first block that each tile overlaps, and the one behind its last."""
    first = torch.arange(_blocks(length, size), device=device) * size
    last = (first + size).clamp(max=length)
    return first // block, (last + block - 1) // block
