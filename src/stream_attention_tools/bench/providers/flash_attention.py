"""Other libraries, each where it can be imported: FlashAttention, versions 2 to 4, and xformers."""

from __future__ import annotations

import ctypes
import lzma
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...testing.inputs import Tensors
from ..suites import Cell
from .base import Provider, installed, needs, tried, without_modifiers

HALVES = (torch.float16, torch.bfloat16)


class FlashAttention2(Provider):
    """FlashAttention-2: flash_attn_func and flash_attn_varlen_func, layout, GQA and causal alignment as ours."""

    name = "fa2"
    label = "FA2"
    about = "FlashAttention-2"
    module = "flash_attn"
    capability = (8, 0)
    called_with: tuple[str, ...] = ("scale", "lengths_q")

    def why_not(self, cell: Cell) -> str | None:
        reason = needs(cell.case, self.module, self.capability, HALVES)
        return reason or without_modifiers(cell.case, *self.called_with)

    def attend(self, x: Tensors) -> Tensor:
        library = import_module(self.module)
        function = library.flash_attn_varlen_func if x.packed else library.flash_attn_func
        options = {"softmax_scale": x.options.get("scale"), "causal": x.options["causal"]}
        returned = function(x.query, x.key, x.value, **x.packing, **options)
        return returned[0] if isinstance(returned, tuple) else returned  # some versions return the LSE too


class FlashAttention4(FlashAttention2):
    """FlashAttention-4: flash_attn.cute, compiled by its own DSL on first use."""

    name = "fa4"
    label = "FA4"
    about = "FlashAttention-4"
    module = "flash_attn.cute"
    capability = (9, 0)
    called_with = ("scale",)


class FlashAttention3(FlashAttention2):
    """FlashAttention-3: flash_attn_interface, or a folder with its extension `fa3.so.xz` and `libcudart.so.12`."""

    name = "fa3"
    label = "FA3"
    about = "FlashAttention-3"
    module = "flash_attn_interface"

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._ops: Any = None

    def why_not(self, cell: Cell) -> str | None:
        case = cell.case
        if self.folder is None and not installed(self.module):
            return f"{self.module} is not installed, and no --fa3 DIR was given"
        if case.device != "cuda" or torch.cuda.get_device_capability() != (9, 0):
            return "it runs on Hopper (sm_90) alone"
        if case.dtype not in HALVES:
            return "it computes in float16 and bfloat16"
        if self.folder is None:
            return super().why_not(cell)
        return without_modifiers(case, "lengths_q") or tried(self._load)

    def attend(self, x: Tensors) -> Tensor:
        if self.folder is None:
            return super().attend(x)
        return _FlashAttention3.apply(x.query, x.key, x.value, x.options["causal"], x.packing, self._ops)

    def bare(self, x: Tensors) -> Callable[[], object]:
        if self.folder is None:
            return super().bare(x)
        forward, query, key, value = self._ops.fwd.default, x.query, x.key, x.value
        options = _forward_options(x.options["causal"], x.packing)
        return lambda: forward(query, key, value, **options)

    def _load(self) -> None:
        if self._ops is not None:
            return
        assert self.folder is not None
        # One folder for the process: a library that is loaded must stay where it is.
        unpacked = Path(tempfile.mkdtemp(prefix="fa3-")) / "fa3.so"
        with lzma.open(self.folder / "fa3.so.xz") as packed, unpacked.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
        ctypes.CDLL(str(self.folder / "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(unpacked))
        self._ops = torch.ops.flash_attn_3


def _forward_options(causal: bool, packing: dict[str, Any]) -> dict[str, Any]:
    """The op splits keys by a guess, which for packed sequences takes the longest for the only one: its own Python
    function never splits, and neither do packed calls here."""
    return {"is_causal": causal, **packing, **({"num_splits": 1} if packing else {})}


class _FlashAttention3(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, packing: dict[str, Any], ops: Any
    ) -> Tensor:
        out, lse, *_ = ops.fwd(query, key, value, **_forward_options(causal, packing))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options, ctx.ops = {"is_causal": causal, **packing}, ops
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        results = tuple(torch.empty_like(t) for t in (query, key, value))
        ctx.ops.bwd(grads[0], query, key, value, out, lse, *results, **ctx.options, deterministic=False)
        return (*results, None, None, None)


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
