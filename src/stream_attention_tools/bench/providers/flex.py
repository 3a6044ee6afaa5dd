"""FlexAttention, compiled."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ...testing.inputs import Tensors
from ..suites import Cell
from .base import Provider, installed, without_modifiers


class Flex(Provider):
    """torch.nn.attention.flex_attention through torch.compile; its block mask is made once, outside the timing."""

    name = "flex"
    label = "Flex"
    about = "torch's flex_attention, compiled"

    def __init__(self, function: Any = None) -> None:
        self.function = function or torch.compile(flex_attention, dynamic=False)
        self._seen: set[tuple[Any, ...]] = set()

    def why_not(self, cell: Cell) -> str | None:
        case = cell.case
        if reason := without_modifiers(case, "scale"):
            return reason
        if cell.chunk:
            return "it compiles for every number of keys, and chunks come with ever more of them"
        if case.device == "cuda":
            return None if installed("triton") else "to compile for a GPU it needs triton"
        if cell.direction != "forward":
            return "it has no backward on the CPU"
        compilers = (os.environ.get("CXX"), "g++", "clang++")
        return None if any(c and shutil.which(c) for c in compilers) else "to compile for a CPU it needs a C++ compiler"

    def attend(self, x: Tensors) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        shape = (query.shape, key.shape, query.dtype, query.requires_grad, torch.is_grad_enabled())
        options = {
            "block_mask": _bottom_right(query.shape[2], key.shape[2], query.device) if x.options["causal"] else None,
            "scale": x.options.get("scale"),
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if shape in self._seen:
            return self.function(query, key, value, **options).transpose(1, 2)
        # The first call compiles: each shape for itself however many there are, and a graph may be kept for the
        # backward to be timed again and again.
        with torch._dynamo.config.patch(recompile_limit=1000), torch._functorch.config.patch(donated_buffer=False):
            out = self.function(query, key, value, **options)
        self._seen.add(shape)
        return out.transpose(1, 2)


@lru_cache(maxsize=64)
def _bottom_right(q_len: int, k_len: int, device: torch.device) -> BlockMask:
    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return row + (k_len - q_len) >= column

    return create_block_mask(sees, None, None, q_len, k_len, device=device)
