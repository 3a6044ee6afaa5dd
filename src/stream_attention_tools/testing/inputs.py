"""Random calls of the public ops: a `Case` says which, `make` or `draw` makes its tensors, its `repr` can be pasted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import signature
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stream_attention.backends import BY_NAME
from stream_attention.base.problem import Inputs, Problem
from stream_attention.dispatch.prepare import problem_of
from stream_attention.masks import Mask, documents, from_dense
from stream_attention.ops.attention import attention, prepare_attention
from stream_attention.ops.varlen import prepare_varlen, varlen_attention

Intervals = Literal["keys", "queries", "labels", "documents", "all"]
INTERVALS: tuple[Intervals, ...] = ("keys", "queries", "labels", "documents", "all")
"""Of a `Mask`: keys per query, queries per key, both with labels, or documents by their ids."""

Layout = Literal["contiguous", "heads_first", "qkv_packed", "strided", "offset", "expanded"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "heads_first", "qkv_packed", "strided", "offset", "expanded")
"""How query, key and value lie in memory. Whatever a view leaves out of its buffer is NaN.

- `heads_first`: `[B, H, T, D]` transposed
- `qkv_packed`: slices of one buffer, heads side by side, head dims padded to the longer of D and Dv
- `strided`: every second row of a longer buffer; mask and bias are transposed views
- `offset`: contiguous, but three elements into its storage, so no pointer is aligned to more than its dtype
- `expanded`: stride 0 over the batch (packed sequences: over the heads)
"""


@dataclass(frozen=True)
class Case:
    """One random call. Two equal cases have equal inputs, on any device.

    `lengths_q` and `lengths_k` make it a packed call, in which B, Tq and Tk follow from them, plus `tail` rows past the
    last sequence. Modifiers that are tensors are given by their shape; `alibi` by "H" or "BH".
    """

    B: int = 1
    Tq: int = 16
    Tk: int = 16
    Hq: int = 2
    Hkv: int = 2
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None
    mask: tuple[int, ...] | None = None
    intervals: Intervals | None = None  # the mask is a `Mask`, with `mask` as its dense part if both are given
    bias: tuple[int, ...] | None = None
    bias_hides: bool = False  # about a fifth of the bias is -inf
    alibi: Literal["H", "BH"] | None = None
    sink: bool = False
    aux_dtype: torch.dtype | None = None  # of bias, slopes and sink; None: that of the query
    softcap: float = 0.0
    scale: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    layout: Layout = "contiguous"
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    tail: int = 0
    max_lengths: bool = False  # pass max_seqlen_q and max_seqlen_k
    backward: bool = True
    lse_grad: bool = False  # a gradient arrives through the LSE too
    row_grad: bool = True  # ALiBi slopes and sinks want gradients

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    @property
    def sequences(self) -> int:
        return self.B if self.lengths_q is None else len(self.lengths_q)

    def __repr__(self) -> str:
        """The line that reproduces it: the shapes, and every field that is not at its default."""
        shapes = ("Hq", "Hkv", "D", "Dv") if self.packed else ("B", "Tq", "Tk", "Hq", "Hkv", "D", "Dv")
        return f"Case({', '.join(f'{name}={value!r}' for name, value in self.given(*shapes).items())})"

    def given(self, *always: str) -> dict[str, Any]:
        """Its fields that are not at their defaults, and those that are named."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if name in always or value != default}


def make(case: Case) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Fresh inputs of a case: query, key, value, and the keywords of `attention` (packed: of `varlen_attention`)."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        # Drawn on the CPU in fp64, so that a case has the same values on every device, rounded once to each dtype.
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lead_q, lead_k = _leading_dims(case)
    drawn = (normal(*lead_q, case.Hq, case.D), normal(*lead_k, case.Hkv, case.D), normal(*lead_k, case.Hkv, case.Dv))
    query, key, value = _laid_out(case.layout, [x.to(case.device, case.dtype) for x in drawn])

    aux_dtype = case.aux_dtype or case.dtype
    options: dict[str, Any] = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    options |= {"scale": case.scale, "dropout_p": case.dropout_p, "deterministic": case.deterministic}
    if case.dropout_p:
        options["seed"] = case.seed
    if case.mask is not None:
        mask = torch.rand(case.mask, generator=generator) < 0.7
        if mask.dim() > 1 and mask.shape[-2] > 1:
            mask[..., 0, :] = False  # a row that sees nothing
        options["mask"] = _tile_laid_out(case.layout, mask.to(case.device))
    if case.intervals is not None:
        options["mask"] = _interval_mask(case, options.get("mask"), generator)
    if case.bias is not None:
        bias = normal(*case.bias)
        if case.bias_hides:
            bias[torch.rand(case.bias, generator=generator) < 0.2] = -torch.inf
        options["bias"] = _tile_laid_out(case.layout, bias.to(case.device, aux_dtype))
    if case.alibi is not None:
        shape = (case.Hq,) if case.alibi == "H" else (case.sequences, case.Hq)
        options["alibi_slopes"] = normal(*shape).abs().mul(0.2).to(case.device, aux_dtype)
    if case.sink:
        options["sink"] = normal(case.Hq).to(case.device, aux_dtype)
    return query, key, value, options | _packing(case, longest=case.max_lengths)


def _interval_mask(case: Case, dense: Tensor | None, generator: torch.Generator) -> Mask:
    """A random mask of a kind, some of its rows and keys with empty intervals."""

    def ints(most: int, length: int) -> Tensor:
        lead = (int(torch.randint(0, 2, (), generator=generator)) * (size - 1) + 1 for size in (case.B, case.Hq))
        return torch.randint(0, max(most, 1), (*lead, length), generator=generator, dtype=torch.int32)

    if case.intervals == "documents":
        cuts = torch.rand(5, generator=generator).sort().values
        ids = [torch.bucketize(torch.arange(n) / max(n, 1), cuts) for n in (case.Tq, case.Tk)]
        mask = documents(*ids)
    else:
        fields: dict[str, Any] = {}
        if case.intervals in ("keys", "all"):
            fields["key_start"] = ints(case.Tk, case.Tq)
            fields["key_end"] = fields["key_start"] + ints(case.Tk, case.Tq)
        if case.intervals in ("queries", "labels", "all"):
            fields["query_start"] = ints(case.Tq, case.Tk)
            fields["query_end"] = fields["query_start"] + ints(case.Tq, case.Tk)
        if case.intervals in ("labels", "all"):
            fields["query_label"] = ints(case.Tq, case.Tq)
        mask = Mask(**fields)
    mask = mask.to(case.device)
    return mask if dense is None else mask & from_dense(dense[(None,) * (4 - dense.dim())])


class Tensors(NamedTuple):
    """Inputs of one call: query, key, value, the keywords of its op, and the gradient that arrives at out.

    The op is `attention`, or `varlen_attention` where sequences are packed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    grad_out: Tensor

    @property
    def packed(self) -> bool:
        return self.query.dim() == 3

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"query": self.query, "key": self.key, "value": self.value}

    @property
    def packing(self) -> dict[str, Any]:
        """The keywords that say where packed sequences lie; a dense call has none."""
        return {name: value for name, value in self.options.items() if name.startswith(("cu_seqlens", "max_seqlen"))}

    @property
    def key_lengths(self) -> list[int]:
        """Keys of every row or packed sequence; of those it reads the offsets, which is a synchronisation."""
        if not self.packed:
            return [self.key.shape[1]] * self.key.shape[0]
        return [int(length) for length in self.options["cu_seqlens_k"].diff()]


SAME = ("window", "softcap", "scale")
"""Fields of a case that are options as they are."""


def draw(case: Case, seed: int = 0) -> Tensors:
    """Random inputs, drawn on the case's device: `make` is too slow for large cases. On "meta" they have no memory."""
    device = torch.device(case.device)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    options: dict[str, Any] = {name: value for name, value in case.given().items() if name in SAME}
    options["causal"] = case.causal
    if case.mask is not None:
        options["mask"] = torch.rand(case.mask, generator=generator, device=device) > 0.3
    if case.intervals is not None:
        options["mask"] = _interval_mask(case, options.get("mask"), torch.Generator().manual_seed(seed))
    if case.bias is not None:
        options["bias"] = normal(*case.bias, dtype=case.aux_dtype or case.dtype)
    if case.alibi is not None:
        slopes = 2.0 ** (-8.0 * torch.arange(1, case.Hq + 1, device=device) / case.Hq)
        options["alibi_slopes"] = slopes if case.alibi == "H" else slopes.expand(case.sequences, -1).contiguous()
    if case.sink:
        options["sink"] = normal(case.Hq, dtype=torch.float32)
    if case.dropout_p:
        options |= {"dropout_p": case.dropout_p, "seed": torch.tensor([seed, 0], device=device)}
    lead_q, lead_k = _leading_dims(case)
    return Tensors(
        normal(*lead_q, case.Hq, case.D),
        normal(*lead_k, case.Hkv, case.D),
        normal(*lead_k, case.Hkv, case.Dv),
        options | _packing(case, longest=True),
        normal(*lead_q, case.Hq, case.Dv),
    )


def packed(case: Case, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...] | None = None) -> Case:
    """The case with sequences of these lengths packed, keys as the queries; Tq and Tk say the longest."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    longest_q, longest_k = max(lengths_q), max(lengths_k)
    return replace(case, B=len(lengths_q), Tq=longest_q, Tk=longest_k, lengths_q=lengths_q, lengths_k=lengths_k)


def sequences(case: Case) -> list[tuple[int, int]]:
    """Queries and keys of every batch entry or packed sequence."""
    if case.lengths_q is None or case.lengths_k is None:
        return [(case.Tq, case.Tk)] * case.B
    return list(zip(case.lengths_q, case.lengths_k, strict=True))


def _leading_dims(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of query and key, in front of heads and head dim."""
    if case.lengths_q is None or case.lengths_k is None:
        return (case.B, case.Tq), (case.B, case.Tk)
    return (sum(case.lengths_q) + case.tail,), (sum(case.lengths_k) + case.tail,)


def _packing(case: Case, longest: bool) -> dict[str, Any]:
    """The keywords that say where packed sequences lie; a dense call has none."""
    options: dict[str, Any] = {}
    for side, lengths in (("q", case.lengths_q), ("k", case.lengths_k)):
        if lengths is not None:
            offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            options[f"cu_seqlens_{side}"] = offsets.to(case.device)
            if longest:
                options[f"max_seqlen_{side}"] = max(lengths, default=0)
    return options


def stated(call: Any, tensors: dict[str, Any], options: dict[str, Any]) -> tuple[Problem, Inputs]:
    """The problem that a call states, and its tensors as kernels read them; `call.packed` says which op it is of."""
    op, prepare = (varlen_attention, prepare_varlen) if call.packed else (attention, prepare_attention)
    bound = signature(op).bind(**tensors, **options)
    bound.apply_defaults()
    return problem_of(prepare(**bound.arguments))[:2]


def run(
    case: Case, tensors: dict[str, Any], options: dict[str, Any], backend: str = "auto", config: Any = None
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the op that a case calls; of the backend's forward alone where a configuration is forced."""
    if config is not None:
        return BY_NAME[backend].forward(*stated(case, tensors, options), config)
    op: Callable[..., tuple[Tensor, Tensor]] = varlen_attention if case.packed else attention
    return op(**tensors, **options, return_lse=True, backend=backend)


def _laid_out(layout: Layout, tensors: list[Tensor]) -> list[Tensor]:
    """The same values in another layout; packed `[N, H, D]` and dense `[B, T, H, D]` alike."""
    if layout == "heads_first":
        return [x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in tensors]
    if layout == "strided":
        return [_inside(x, *x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:])[..., ::2, :, :].copy_(x) for x in tensors]
    if layout == "offset":
        return [_inside(x, x.numel() + 3)[3:].view(x.shape).copy_(x) for x in tensors]
    if layout == "expanded":
        dim = 0 if tensors[0].dim() == 4 else 1
        return [x.narrow(dim, 0, min(1, x.shape[dim])).expand_as(x) if x.shape[dim] else x for x in tensors]
    if layout == "qkv_packed":
        rows, width = max(x.shape[-3] for x in tensors), max(x.shape[-1] for x in tensors)
        heads = [x.shape[-2] for x in tensors]
        slices = _inside(tensors[0], *tensors[0].shape[:-3], rows, sum(heads), width).split(heads, dim=-2)
        views = (s[..., : x.shape[-3], :, : x.shape[-1]] for s, x in zip(slices, tensors, strict=True))
        return [view.copy_(x) for view, x in zip(views, tensors, strict=True)]
    return tensors


def _tile_laid_out(layout: Layout, tile: Tensor) -> Tensor:
    """A mask or bias: transposed in memory where the layout is strided."""
    return tile.mT.contiguous().mT if layout == "strided" and tile.dim() >= 2 else tile


def _inside(like: Tensor, *shape: int) -> Tensor:
    return like.new_full(shape, torch.nan)
