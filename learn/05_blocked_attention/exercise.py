"""Exercise: attention in blocks, with the log-sum-exp of every row. Fill the gap, then run

python learn/05_blocked_attention/check.py
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def blocked_attention(q: Array, k: Array, v: Array, block_q: int, block_k: int) -> tuple[Array, Array]:
    """out `[Tq, Dv]` and lse `[Tq]` of q `[Tq, D]`, k `[Tk, D]` and v `[Tk, Dv]`; the scale is D^-0.5.

    Lengths need not be multiples of the blocks. Never hold more scores than block_q x block_k at once.
    """
    out = np.empty((len(q), v.shape[1]), np.float32)
    lse = np.empty(len(q), np.float32)
    for start_q in range(0, len(q), block_q):
        q_tile = q[start_q : start_q + block_q]
        row_max = np.full((len(q_tile), 1), -np.inf, np.float32)
        row_sum = np.zeros((len(q_tile), 1), np.float32)
        acc = np.zeros((len(q_tile), v.shape[1]), np.float32)
        for start_k in range(0, len(k), block_k):
            keys = slice(start_k, start_k + block_k)
            raise NotImplementedError(f"Take k[keys] and v[keys] into row_max, row_sum and acc. First: {keys}.")
        out[start_q : start_q + block_q] = acc / row_sum
        lse[start_q : start_q + block_q] = (row_max + np.log(row_sum))[:, 0]
    return out, lse
