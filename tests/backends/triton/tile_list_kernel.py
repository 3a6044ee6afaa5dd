"""A kernel that lists the tiles of a pack and does nothing else."""

from __future__ import annotations

import triton.language as tl

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


kernel = Kernel(_list_kernel)
