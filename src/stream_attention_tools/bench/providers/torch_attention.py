"""What torch itself offers: scaled_dot_product_attention by kernel, FlexAttention, and attention written out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ...testing.inputs import Tensors, draw
from ..suites import Cell, shortened
from .base import Provider, installed, tried, without_modifiers


class Sdpa(Provider):
    """torch's scaled_dot_product_attention: the kernel it picks, or one of its kernels by name."""

    def __init__(self, name: str = "sdpa", kernel: SDPBackend | None = None, label: str = "SDPA") -> None:
        self.name, self.kernel, self.label = name, kernel, label
        which = "the kernel it picks" if kernel is None else f"its {name.removeprefix('sdpa ')} kernel"
        self.about = f"torch's scaled_dot_product_attention, {which}"

    def why_not(self, cell: Cell) -> str | None:
        case = cell.case
        if case.packed:
            return "it has no packed sequences"
        if reason := without_modifiers(case, "mask", "scale"):
            return reason
        if case.mask and case.causal:
            return "it takes a mask or causal, not both"
        if self.kernel in (None, SDPBackend.MATH):
            return None
        if case.device != "cuda":
            return f"it is a CUDA kernel, and the device is the {case.device}"
        return tried(lambda: self.attend(draw(shortened(case, rows=128, batch=1))))

    def attend(self, x: Tensors) -> Tensor:
        with self.call_context():
            return self.bare(x)().transpose(1, 2)

    def call_context(self) -> AbstractContextManager[object]:
        return nullcontext() if self.kernel is None else sdpa_kernel(self.kernel)

    def bare(self, x: Tensors) -> Callable[[], Tensor]:
        """Its result is `[B, H, T, D]`, as SDPA's is."""
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        q_len, k_len = query.shape[2], key.shape[2]
        causal, mask = x.options["causal"] and q_len > 1, x.options.get("mask")
        if causal and q_len != k_len:  # is_causal would align top-left
            causal, mask = False, causal_lower_right(q_len, k_len)
        options: dict[str, Any] = {"is_causal": causal}
        if mask is not None:
            options["attn_mask"] = mask
        if "scale" in x.options:
            options["scale"] = x.options["scale"]
        if query.shape[1] != key.shape[1]:
            options["enable_gqa"] = True
        return lambda: F.scaled_dot_product_attention(query, key, value, **options)


class Dense(Provider):
    """Matmul, softmax, matmul, holding Tq x Tk: what one writes without a library, in the dtype of the inputs."""

    name = "dense"
    label = "Dense"
    about = "matmul, softmax, matmul, as one writes it in torch"

    def why_not(self, cell: Cell) -> str | None:
        case = cell.case
        if case.packed:
            return "packed sequences are not written out here"
        return "sink and dropout are not written out here" if case.sink or case.dropout_p else None

    def attend(self, x: Tensors) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        q_len, k_len, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        options = x.options
        scores = query @ key.mT * options.get("scale", query.shape[-1] ** -0.5)
        if softcap := options.get("softcap"):
            scores = torch.tanh(scores / softcap) * softcap
        if (bias := options.get("bias")) is not None:
            scores = scores + bias
        ahead = torch.arange(k_len - q_len, k_len, device=query.device)[:, None] - torch.arange(
            k_len, device=query.device
        )
        if (slopes := options.get("alibi_slopes")) is not None:
            scores = scores - (slopes[..., None, None] * ahead.abs()).to(scores.dtype)
        if options["causal"]:
            scores = scores.masked_fill(ahead < 0, -torch.inf)
        if window := options.get("window"):
            left, right = window
            hidden = (ahead > left if left >= 0 else False) | (ahead < -right if right >= 0 else torch.tensor(False))
            scores = scores.masked_fill(hidden.to(query.device), -torch.inf)
        if (mask := options.get("mask")) is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (torch.softmax(scores, -1) @ value).transpose(1, 2)


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
        block_mask = _bottom_right(x.query.shape[1], x.key.shape[1], x.query.device) if x.options["causal"] else None
        return self.call(x, block_mask=block_mask, scale=x.options.get("scale"))

    def call(self, x: Tensors, **options: Any) -> Tensor:
        """With FlexAttention's own options."""
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        shape = (query.shape, key.shape, query.dtype, query.requires_grad, torch.is_grad_enabled())
        options["enable_gqa"] = query.shape[1] != key.shape[1]
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
