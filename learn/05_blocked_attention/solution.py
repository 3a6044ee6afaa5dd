"""A solution of the exercise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def blocked_attention(q: Array, k: Array, v: Array, block_q: int, block_k: int) -> tuple[Array, Array]:
    scale = np.float32(q.shape[1] ** -0.5)
    out = np.empty((len(q), v.shape[1]), np.float32)
    lse = np.empty(len(q), np.float32)
    for start_q in range(0, len(q), block_q):
        q_tile = q[start_q : start_q + block_q]
        row_max = np.full((len(q_tile), 1), -np.inf, np.float32)
        row_sum = np.zeros((len(q_tile), 1), np.float32)
        acc = np.zeros((len(q_tile), v.shape[1]), np.float32)
        for start_k in range(0, len(k), block_k):
            scores = q_tile @ k[start_k : start_k + block_k].T * scale
            new_max = np.maximum(row_max, scores.max(1, keepdims=True))
            weights = np.exp(scores - new_max)
            rescale = np.exp(row_max - new_max)
            row_sum = row_sum * rescale + weights.sum(1, keepdims=True)
            acc = acc * rescale + weights @ v[start_k : start_k + block_k]
            row_max = new_max
        out[start_q : start_q + block_q] = acc / row_sum
        lse[start_q : start_q + block_q] = (row_max + np.log(row_sum))[:, 0]
    return out, lse
