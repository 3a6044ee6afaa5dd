"""Kernels that find out which work there is, and do none of it."""

from __future__ import annotations

import triton.language as tl

from stream_attention.gpu.decode_tiles import split_of_item
from stream_attention.gpu.launch import Kernel, jit
from stream_attention.gpu.tile_list import list_tiles


@jit
def _list_kernel(
    list_ptr, cu_q_ptr, cu_k_ptr,
    sequences: tl.int32, q_rows: tl.int32, k_rows: tl.int32, covered: tl.int32, most_tiles: tl.int32,
    most_seen: tl.int32, right: tl.int32,
    TILE: tl.constexpr, OF: tl.constexpr, ORDERED: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    list_tiles(
        list_ptr, cu_q_ptr, cu_k_ptr, sequences, q_rows, k_rows, covered, most_tiles, most_seen, right,
        TILE, OF, ORDERED, HAS_RIGHT,
    )  # fmt: skip


@jit
def _split_kernel(
    lengths_ptr, found_ptr, batch: tl.int32, capacity: tl.int32, num_splits: tl.int32, q_len: tl.int32, left: tl.int32,
    tiles: tl.int32, at_a_time: tl.int32, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
):  # fmt: skip
    """Grid: the items. Batch entry, split and keys of a split of each."""
    item = tl.program_id(0)
    entry, split, keys = split_of_item(
        item, lengths_ptr, batch, capacity, num_splits, q_len, left, tiles, at_a_time, BLOCK_N, HAS_LEFT
    )
    tl.store(found_ptr + 3 * item, entry)
    tl.store(found_ptr + 3 * item + 1, split)
    tl.store(found_ptr + 3 * item + 2, keys)


tiles_of_a_pack = Kernel(_list_kernel)
splits_by_length = Kernel(_split_kernel)
