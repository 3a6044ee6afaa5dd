"""xformers."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from ...testing.inputs import Tensors
from ..suites import Cell
from .base import Provider, needs, without_modifiers


class Xformers(Provider):
    """xformers.ops.memory_efficient_attention, on the kernel it dispatches to."""

    name = "xformers"
    label = "xFormers"
    about = "xformers' memory_efficient_attention"

    def why_not(self, cell: Cell) -> str | None:
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        return needs(cell.case, "xformers.ops", (7, 0), dtypes) or without_modifiers(cell.case, "scale")

    def attend(self, x: Tensors) -> Tensor:
        ops = import_module("xformers.ops")
        query, key, value = x.query, x.key, x.value
        kv_heads, group = key.shape[2], query.shape[2] // key.shape[2]
        if group > 1:  # [B, T, Hkv, group, D], where keys and values repeat by a stride of 0
            query = query.unflatten(2, (kv_heads, group))
            key, value = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (key, value))
        bias = None
        if x.options["causal"] and query.shape[1] > 1:
            bias = import_module("xformers.ops.fmha.attn_bias").LowerTriangularFromBottomRightMask()
        out = ops.memory_efficient_attention(query, key, value, attn_bias=bias, scale=x.options.get("scale"))
        return out.flatten(2, 3) if group > 1 else out
