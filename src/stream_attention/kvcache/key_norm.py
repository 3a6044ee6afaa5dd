"""key_norm: keys of small norm are kept, since they get the most attention. Needs no query."""

from __future__ import annotations

import torch
from torch import Tensor

from .compression_spec import CompressionSpec
from .compressor import KVCompressor
from .select import Heads, best, checked_heads


class KeyNormCompressor(KVCompressor):
    """Keeps the keys of the smallest norm (Devoto et al., "A simple and effective L2 norm-based strategy", 2024).

    In trained models such keys get most of the attention. This is empirical: measure your model.
    """

    def __init__(self, *, heads: Heads = "each") -> None:
        self.heads = checked_heads(heads)

    def _choose(self, spec: CompressionSpec) -> Tensor:
        return best(-norms(spec.keys), spec, self.heads)

    def _described(self, spec: CompressionSpec) -> str:
        return "key_norm"


def norms(x: Tensor) -> Tensor:
    """The norm of each token of `[B, T, Hkv, D]`: fp32 (fp64) `[B, Hkv, T]`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=wide).transpose(1, 2)
