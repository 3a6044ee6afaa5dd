"""Ours in FP8: the whole call with its pre-pass, rotated, and the kernel alone."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stream_attention.backends import BACKENDS, BY_NAME
from stream_attention.backends.reference import fp8 as reference_fp8
from stream_attention.base.fp8_layout import BLOCK, SHIFT, first_block
from stream_attention.base.problem import AUTO, UNBOUNDED
from stream_attention.dispatch.plan import plan

from ...testing.fp8 import attend_to_codes
from ...testing.inputs import Tensors, draw
from ..suites import Cell, shortened
from .base import without_modifiers
from .ours import Ours


class Fp8(Ours):
    """`attention(precision="fp8")`, quantisation included.

    Its answer is compared with attention over the specification's quantised values, within twice what rounding the
    weights to e4m3 may cost there. What quantisation loses is the `rms_error` of the results.
    """

    def __init__(self, name: str = "e4m3", rotate: bool = False, backend: str = AUTO) -> None:
        super().__init__(name, backend, precision="fp8", rotate=rotate)
        self.rotate = rotate
        self.about = f'attention(precision="fp8"{", rotate=True" if rotate else ""}), quantisation included'

    def why_not(self, cell: Cell) -> str | None:
        if cell.direction != "forward":
            return "FP8 is for inference and has no backward"
        if reason := without_modifiers(cell.case, "window", "scale", "lengths_q"):
            return reason
        if cell.case.dtype not in (torch.float16, torch.bfloat16) or cell.case.D not in (64, 128, 256):
            return "FP8 quantises float16 and bfloat16 at head dims 64, 128 and 256"
        if self.backend != AUTO:
            return None
        problem = self._problem(draw(shortened(cell.case, rows=128, batch=1)))
        reasons = {one.name: one.why_not(problem) or one.why_named_only(problem) for one in BACKENDS}
        return None if not all(reasons.values()) else "; ".join(f"{n}: {', '.join(r)}" for n, r in reasons.items())

    def reference_inputs(self, x: Tensors) -> Tensors:
        """The specification's quantised values, rotated or not: e4m3 numbers and their scales are exact in bf16."""
        offsets = x.options.get("cu_seqlens_q"), x.options.get("cu_seqlens_k")
        queries = reference_fp8.quantize_queries(x.query, offsets[0], self.rotate)
        keys = reference_fp8.quantize_keys(x.key, x.value, offsets[1], self.rotate)
        key, value = reference_fp8.dequantized_keys(keys)
        return x._replace(
            query=_gathered(reference_fp8.dequantized_queries(queries), x.query, offsets[0]),
            key=_gathered(key, x.key, offsets[1]),
            value=_gathered(value, x.value, offsets[1]),
        )

    def tolerance_sources(self, x: Tensors) -> list[Tensor]:
        return [_weights_rounded(x)]


class Fp8Kernel(Fp8):
    """The same on values that were quantised before: no figure for a call, but what its pre-pass is added to."""

    def __init__(self, backend: str = AUTO) -> None:
        super().__init__("e4m3 kernel", backend=backend)
        self.about = "its kernel alone, on values that were quantised before"
        self._coded = WeakTensorKeyDictionary()

    def attend(self, x: Tensors) -> Tensor:
        if x.query not in self._coded:
            planned = plan(self._problem(x), self.backend)
            offsets = x.options.get("cu_seqlens_q"), x.options.get("cu_seqlens_k")
            queries = reference_fp8.quantize_queries(x.query, offsets[0])
            keys = reference_fp8.quantize_keys(x.key, x.value, offsets[1])
            call = BY_NAME[planned.backend], planned.problem, queries, keys, *offsets, planned.config
            self._coded[x.query] = partial(attend_to_codes, *call)
        out: Tensor = self._coded[x.query]()[0]
        return out


def _gathered(rows: Tensor, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Rows `[H, NB * 128, D]` of all sequences where they lie in `like`."""
    found = torch.zeros_like(like)
    if cu_seqlens is None:
        parts = [(found[b], first_block(b, like.shape[1], None)) for b in range(like.shape[0])]
    else:
        parts = [
            (found[first:last], first_block(b, 0, cu_seqlens)) for b, (first, last) in enumerate(pairwise(cu_seqlens))
        ]
    for part, block in parts:
        part.copy_(rows[:, block * BLOCK : block * BLOCK + part.shape[0]].transpose(0, 1))
    return found


def _weights_rounded(x: Tensors) -> Tensor:
    """Attention in fp64 but for the weights that multiply values, as backends/reference/fp8.py rounds them."""
    group = x.query.shape[2] // x.key.shape[2]
    query, key, value = (t[0].double().transpose(0, 1) for t in (x.query, x.key, x.value))
    key, value = (t.repeat_interleave(group, 0) for t in (key, value))
    scores = query @ key.mT * (x.options.get("scale", query.shape[-1] ** -0.5) / math.log(2))
    distance = torch.arange(key.shape[1], device=key.device) - x.options["q_positions"][:, None]
    left, right = x.options.get("window", (UNBOUNDED, UNBOUNDED))
    if x.options["causal"]:
        right = 0
    if left != UNBOUNDED:
        scores = scores.masked_fill(distance < -left, -math.inf)
    if right != UNBOUNDED:
        scores = scores.masked_fill(distance > right, -math.inf)
    top = scores.amax(-1, keepdim=True).ceil()
    weights = torch.exp2(scores - top.masked_fill(top == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    weights = reference_fp8.to_e4m3(weights * 2.0**SHIFT).double() * 2.0**-SHIFT
    return (weights @ value / total.masked_fill(total == 0, 1.0)).transpose(0, 1)[None]
