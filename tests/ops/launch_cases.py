"""Public calls, and what may change between two of them: the cases that the tests of the launch cache share.

A `Call` is a public function with its arguments. A builder makes one from `Sizes` and a seed: calls of two seeds differ
in their values alone. A `Variation` changes one thing: a size, how a tensor lies in memory, an option, the state
of torch around the call, the gradients. `stale` runs a varied call in between calls that are in the cache, and compares
every outcome bit for bit with the one that is computed with the cache turned off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stream_attention import (
    ContiguousKV,
    FusedOnlineAttention,
    PagedKV,
    Rotary,
    StreamAttention,
    StreamAttentionConfig,
    StreamMultiheadAttention,
    attention,
    attention_fp8,
    attention_mass,
    decode_attention,
    decode_workspace,
    force_backend,
    merge_states,
    quantize_fp8,
    quantize_kv,
    varlen_attention,
    write_kv,
)
from stream_attention.dispatch import launch_cache

# Calls


@dataclass(frozen=True)
class Sizes:
    """Of a base call, small where kernels run on a CPU; and where and by which backend it is computed."""

    B: int = 2
    Tq: int = 5
    Tk: int = 7
    Hq: int = 4
    Hkv: int = 2
    D: int = 8
    Dv: int = 8
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: str = "auto"
    deterministic: bool | None = None
    capacity: int = 64  # tokens for which a cache has room
    group: int = 8  # tokens of a quantised block
    fp8_backend: str = "reference"


ALL = frozenset({"query", "key", "value", "bias", "alibi_slopes", "sink", "x", "out", "lse"})
"""Arguments that may have a gradient."""


@dataclass(frozen=True)
class Call:
    op: Callable[..., Any]
    tensors: dict[str, Tensor]  # arguments by name
    options: dict[str, Any] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()  # the keywords of the public function
    wanted: frozenset[str] = frozenset()  # arguments that want a gradient
    state: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()  # entered around the forward
    backward_state: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()
    through: tuple[int, ...] = (0, 1)  # results that a gradient arrives at
    arriving: Callable[[Tensor], Tensor] = lambda grad: grad  # how that gradient lies in memory


class Source:
    """Random tensors of one seed."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.sizes, self.generator = sizes, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        return drawn.to(self.sizes.device, dtype or self.sizes.dtype)

    def below(self, end: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(end, shape, generator=self.generator).to(self.sizes.device, dtype)

    def qkv(self) -> dict[str, Tensor]:
        s = self.sizes
        query = self.normal(s.B, s.Tq, s.Hq, s.D)
        return {"query": query, "key": self.normal(s.B, s.Tk, s.Hkv, s.D), "value": self.normal(s.B, s.Tk, s.Hkv, s.Dv)}

    def mask(self, *shape: int) -> Tensor:
        return self.below(4, *shape) > 0


Builder = Callable[[Sizes, int], Call]


def keywords(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def dense(wanted: frozenset[str] = ALL, **options: Any) -> Builder:
    """A builder of `attention`; an option may be a function from the source of random tensors to a tensor."""

    def build(sizes: Sizes, seed: int) -> Call:
        source = Source(sizes, seed)
        tensors = source.qkv()
        made = {name: value(source) if callable(value) else value for name, value in options.items()}
        tensors |= {name: value for name, value in made.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in made.items() if not isinstance(value, Tensor)}
        common = {"backend": sizes.backend, "deterministic": sizes.deterministic}
        return Call(attention, tensors, common | rest, keywords(attention), wanted & tensors.keys())

    return build


def packed(wanted: frozenset[str] = ALL, told: bool = True, **options: Any) -> Builder:
    """A builder of `varlen_attention`: three sequences whose lengths are those of the seed, in as many rows."""

    def build(sizes: Sizes, seed: int) -> Call:
        source = Source(sizes, seed)
        rows_q, rows_k = 3 * sizes.Tq, 3 * sizes.Tk
        query = source.normal(rows_q, sizes.Hq, sizes.D)
        key, value = source.normal(rows_k, sizes.Hkv, sizes.D), source.normal(rows_k, sizes.Hkv, sizes.Dv)
        tensors = {"query": query, "key": key, "value": value}
        most = {}
        for name, rows in (("q", rows_q), ("k", rows_k)):
            first, second = sorted(source.below(rows + 1, 2).tolist())
            ends = [0, first, second, rows - seed % 2]  # an odd seed leaves a row that is in no sequence
            ends = [min(end, ends[-1]) for end in ends]
            tensors[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=torch.int32, device=sizes.device)
            most[f"max_seqlen_{name}"] = rows
        made = {name: value(source) if callable(value) else value for name, value in options.items()}
        tensors |= {name: value for name, value in made.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in made.items() if not isinstance(value, Tensor)}
        common = {"backend": sizes.backend, "deterministic": sizes.deterministic} | (most if told else {})
        wants = wanted & tensors.keys()
        return Call(varlen_attention, tensors, common | rest, keywords(varlen_attention), wants)

    return build


def decode_contiguous(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, **options: Any) -> Any:
    return decode_attention(query, ContiguousKV(key, value, lengths), **options)


def decode_paged(query: Tensor, key: Tensor, value: Tensor, page_table: Tensor, lengths: Tensor, **options: Any) -> Any:
    return decode_attention(query, PagedKV(key, value, page_table, lengths), **options)


def decode_quantised(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, format: str, group: int, **options: Any
) -> Any:
    cache = quantize_kv(ContiguousKV(key, value, lengths), format, group=group, residual=group)
    return decode_attention(query, cache, **options)


def decode_with_room(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, out: Tensor, **options: Any) -> Any:
    """With `out` and a workspace; what was written is returned."""
    cache = ContiguousKV(key, value, lengths)
    room = {name: options[name] for name in ("backend",) if name in options}
    result = decode_attention(query, cache, out=out, workspace=decode_workspace(query, cache, **room), **options)
    returned = result[0] if isinstance(result, tuple) else result
    assert returned is out
    return result if isinstance(result, tuple) else (result, out.clone())


def cached(kind: str, q_len: int = 1, **options: Any) -> Builder:
    """A builder of `decode_attention`, of rows whose lengths are those of the seed."""

    def build(sizes: Sizes, seed: int) -> Call:
        source = Source(sizes, seed)
        rows, capacity, common = sizes.B, sizes.capacity, {"backend": sizes.backend}
        tensors = {"query": source.normal(rows, q_len, sizes.Hq, sizes.D)}
        lengths = (source.below(capacity - sizes.Tk + 1, rows) + sizes.Tk).int()
        shape: tuple[int, ...] = (rows, capacity)
        if kind == "paged":
            page = sizes.group * 2
            shape = (rows * capacity // page + 1, page)
            order = torch.randperm(shape[0], generator=source.generator)[: rows * capacity // page]
            tensors["page_table"] = order.view(rows, -1).int().to(sizes.device)
        tensors |= {
            "key": source.normal(*shape, sizes.Hkv, sizes.D),
            "value": source.normal(*shape, sizes.Hkv, sizes.Dv),
            "lengths": lengths,
        }
        if kind == "quantised":
            common |= {"format": "int8", "group": sizes.group}
        op = {"contiguous": decode_contiguous, "paged": decode_paged, "quantised": decode_quantised}.get(kind)
        if op is None:
            op = decode_with_room
            tensors["out"] = torch.zeros(rows, q_len, sizes.Hq, sizes.Dv, dtype=sizes.dtype, device=sizes.device)
        made = {name: value(source) if callable(value) else value for name, value in options.items()}
        tensors |= {name: value for name, value in made.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in made.items() if not isinstance(value, Tensor)}
        return Call(op, tensors, common | rest, keywords(decode_attention) - {"out", "workspace"})

    return build


def fp8(sizes: Sizes, seed: int) -> Call:
    source = Source(replace(sizes, D=64, Dv=64, dtype=torch.bfloat16), seed)
    options = {"precision": "fp8", "backend": sizes.fp8_backend}
    return Call(attention, source.qkv(), options, keywords(attention))


def _of_codes(query: Tensor, key: Tensor, value: Tensor, rotate: bool = False, **options: Any) -> Any:
    return attention_fp8(query, quantize_fp8(key, value, rotate=rotate), **options)


def fp8_codes(sizes: Sizes, seed: int) -> Call:
    return replace(
        fp8(sizes, seed), op=_of_codes, options={"backend": sizes.fp8_backend}, takes=keywords(attention_fp8)
    )


def _codes(key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return quantize_fp8(key, value, **options).codes[:3]


def quantised_to_fp8(sizes: Sizes, seed: int) -> Call:
    tensors = fp8(sizes, seed).tensors
    del tensors["query"]
    return Call(_codes, tensors, {}, keywords(quantize_fp8))


def _appended(
    key: Tensor,
    value: Tensor,
    key_store: Tensor,
    value_store: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    page_table: Tensor | None = None,
    interleaved: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """What a cache holds after an append."""
    stores = key_store, value_store
    cache = ContiguousKV(*stores, lengths) if page_table is None else PagedKV(*stores, page_table, lengths)
    cache.append(key, value, rotary=Rotary(cos, sin, interleaved), **options)
    return key_store.clone(), value_store.clone(), lengths.clone()


def appended(kind: str, tokens: int = 1) -> Builder:
    """A builder of `append`, to the caches that are decoded."""

    def build(sizes: Sizes, seed: int) -> Call:
        tensors = cached(kind)(sizes, seed).tensors
        del tensors["query"]
        tensors |= {"key_store": tensors.pop("key"), "value_store": tensors.pop("value")}
        tensors["lengths"] -= tokens
        source = Source(sizes, seed + 10)
        tensors["key"] = source.normal(sizes.B, tokens, sizes.Hkv, sizes.D)
        tensors["value"] = source.normal(sizes.B, tokens, sizes.Hkv, sizes.Dv)
        angles = source.normal(sizes.capacity, sizes.D // 4, dtype=torch.float32)
        takes = keywords(ContiguousKV.append) - {"rotary"} | {"interleaved"}
        return Call(_appended, tensors | {"cos": angles.cos(), "sin": angles.sin()}, {}, takes)

    return build


def _written(key_pages: Tensor, value_pages: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    """What pages hold after new tokens were written to them."""
    write_kv(key_pages=key_pages, value_pages=value_pages, **arguments)
    return key_pages.clone(), value_pages.clone()


def written(dtype: torch.dtype | None = None, **options: Any) -> Builder:
    """A builder of `write_kv`, to pages in which keys and values lie side by side; `dtype`: another one than theirs."""

    def build(sizes: Sizes, seed: int) -> Call:
        source = Source(sizes, seed)
        dims, heads, tokens, page = (sizes.D, sizes.Dv), sizes.Hkv, 2 * sizes.B, sizes.group
        pages = source.normal(tokens, page, heads, sum(dims), dtype=dtype).split(dims, -1)
        slots = torch.randperm(tokens * page, generator=source.generator)[:tokens].to(sizes.device)
        slots[1::4] = -1
        tensors = {"key": source.normal(tokens, heads, dims[0]), "value": source.normal(tokens, heads, dims[1])}
        tensors |= {"key_pages": pages[0], "value_pages": pages[1], "slots": slots}
        made = {name: value(source) if callable(value) else value for name, value in options.items()}
        tensors |= {name: value for name, value in made.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in made.items() if not isinstance(value, Tensor)}
        return Call(_written, tensors, rest, keywords(write_kv))

    return build


def mass(sizes: Sizes, seed: int) -> Call:
    tensors = Source(sizes, seed).qkv()
    del tensors["value"]
    return Call(attention_mass, tensors, {"causal": True}, keywords(attention_mass))


def _merged(out: Tensor, lse: Tensor) -> Any:
    return merge_states(out.unbind(), lse.unbind())


def merged(sizes: Sizes, seed: int) -> Call:
    source = Source(sizes, seed)
    out = source.normal(3, sizes.B, sizes.Tq, sizes.Hq, sizes.Dv)
    lse = source.normal(3, sizes.B, sizes.Hq, sizes.Tq, dtype=torch.float32)
    return Call(_merged, {"out": out, "lse": lse}, {}, frozenset(), frozenset({"out", "lse"}))


def multihead(sizes: Sizes, seed: int) -> Call:
    torch.manual_seed(seed)
    width = sizes.Hq * sizes.D
    module = StreamMultiheadAttention(width, sizes.Hq, batch_first=True, device=sizes.device, dtype=sizes.dtype)
    source = Source(sizes, seed)
    x = source.normal(sizes.B, sizes.Tq, width)
    padding = torch.arange(sizes.Tq, device=sizes.device) >= source.below(sizes.Tq, sizes.B, 1) + 1
    tensors = {"query": x, "key": x, "value": x, "key_padding_mask": padding}
    return Call(module, tensors, {"need_weights": False}, frozenset({"attn_mask"}), frozenset({"query"}))


def stream_module(sizes: Sizes, seed: int) -> Call:
    torch.manual_seed(seed)
    config = StreamAttentionConfig(
        num_heads=sizes.Hq, head_dim=sizes.D, use_fp16=sizes.dtype is torch.float16, use_qkv_projections=True
    )
    module = StreamAttention(config).to(sizes.device, sizes.dtype)
    x = Source(sizes, seed).normal(sizes.B, sizes.Tq, sizes.Hq * sizes.D)
    return Call(module, {"hidden_states": x}, {}, frozenset({"causal"}), frozenset({"hidden_states"}))


def fused_module(sizes: Sizes, seed: int) -> Call:
    module = FusedOnlineAttention(sizes.Hq, sizes.D, device=sizes.device, backend=sizes.backend)
    tensors = Source(sizes, seed).qkv()
    takes = frozenset({"causal", "return_lse", "dropout_p", "deterministic"})
    return Call(module, tensors, {"deterministic": sizes.deterministic}, takes, ALL & tensors.keys())


def hugging_face(sizes: Sizes, seed: int) -> Call:
    """The function that transformers calls, on heads before tokens."""
    from stream_attention.integration.forward import stream_attention_forward

    module = nn.Module()
    module.is_causal = True

    def forward(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        return stream_attention_forward(module, *heads_first, options.pop("attention_mask", None), **options)

    tensors = Source(sizes, seed).qkv()
    takes = frozenset({"scaling", "softcap", "is_causal", "sliding_window"})
    return Call(forward, tensors, {}, takes, ALL & tensors.keys())


def everything(source: Source, name: str) -> Tensor:
    s = source.sizes
    return {
        "mask": lambda: source.mask(s.B, 1, s.Tq, s.Tk),
        "bias": lambda: source.normal(1, s.Hq, s.Tq, s.Tk),
        "alibi_slopes": lambda: source.normal(s.Hq, dtype=torch.float32).abs(),
        "sink": lambda: source.normal(s.Hq, dtype=torch.float32),
        "seed": lambda: source.below(1000, 2),
    }[name]()


def tensor(name: str) -> Callable[[Source], Tensor]:
    return lambda source: everything(source, name)


DENSE: dict[str, Builder] = {
    "plain": dense(),
    "plain, no gradients": dense(wanted=frozenset()),
    "causal": dense(causal=True),
    "window": dense(window=(3, 1), return_lse=True),
    "mask": dense(mask=tensor("mask")),
    "mask, no gradients": dense(wanted=frozenset(), mask=tensor("mask")),
    "bias": dense(bias=tensor("bias")),
    "alibi": dense(causal=True, alibi_slopes=tensor("alibi_slopes")),
    "sink": dense(sink=tensor("sink"), return_lse=True),
    "softcap": dense(softcap=2.0),
    "dropout": dense(dropout_p=0.3, seed=7),
    "dropout, seed drawn": dense(dropout_p=0.3),
    "all modifiers": dense(
        causal=True,
        window=(4, -1),
        softcap=4.0,
        scale=0.3,
        dropout_p=0.3,
        return_lse=True,
        **{name: tensor(name) for name in ("mask", "bias", "alibi_slopes", "sink", "seed")},
    ),
}
PACKED: dict[str, Builder] = {
    "packed": packed(causal=True),
    "packed, no gradients": packed(wanted=frozenset(), window=(3, 1), return_lse=True),
    "packed, lengths read": packed(told=False, sink=tensor("sink")),
}
DECODE: dict[str, Builder] = {
    "decode": cached("contiguous"),
    "decode, three queries": cached("contiguous", 3, window=(9, 0), return_lse=True),
    "decode, modifiers": cached("contiguous", sink=tensor("sink"), alibi_slopes=tensor("alibi_slopes"), softcap=2.0),
    "decode, paged": cached("paged"),
    "decode, quantised": cached("quantised"),
    "decode, out given": cached("room"),
}
OTHER: dict[str, Builder] = {
    "fp8": fp8,
    "fp8, codes": fp8_codes,
    "quantize_fp8": quantised_to_fp8,
    "append": appended("contiguous"),
    "append, three tokens in pages": appended("paged", 3),
    "write_kv": written(),
    "write_kv in e4m3": written(
        torch.float8_e4m3fn,
        k_scale=0.5,
        v_scale=lambda source: source.normal(source.sizes.Hkv, dtype=torch.float32).abs(),
    ),
    "attention_mass": mass,
    "merge_states": merged,
    "StreamMultiheadAttention": multihead,
    "StreamAttention": stream_module,
    "FusedOnlineAttention": fused_module,
}
CALLS = DENSE | PACKED | DECODE | OTHER

# Variations


@dataclass(frozen=True)
class Variation:
    """One change. `applies` says to which base calls; one that is `refused` must raise, cached or not."""

    sizes: Callable[[Sizes], Sizes] = lambda sizes: sizes
    change: Callable[[Call], Call] = lambda call: call
    applies: Callable[[Call], bool] = lambda call: True
    refused: bool = False


def of_tensor(name: str, change: Callable[[Tensor], Any], refused: bool = False) -> Variation:
    def changed(call: Call) -> Call:
        return replace(call, tensors=call.tensors | {name: change(call.tensors[name])})

    return Variation(change=changed, applies=lambda call: name in call.tensors, refused=refused)


def of_options(refused: bool = False, **options: Any) -> Variation:
    def changed(call: Call) -> Call:
        left = {name: t for name, t in call.tensors.items() if name not in options}
        return replace(call, tensors=left, options=call.options | options, wanted=call.wanted & left.keys())

    return Variation(change=changed, applies=lambda call: options.keys() <= call.takes, refused=refused)


def given(name: str, make: Callable[[Call], Any], refused: bool = False) -> Variation:
    """An optional argument that depends on the shapes of the call."""

    def changed(call: Call) -> Call:
        value = make(call)
        if not isinstance(value, Tensor):
            return of_options(**{name: value}).change(call)
        rest = {option: v for option, v in call.options.items() if option != name}
        wanted = call.wanted | ({name} & ALL if call.wanted else frozenset())
        return replace(call, tensors=call.tensors | {name: value}, options=rest, wanted=wanted)

    def applies(call: Call) -> bool:
        return name in call.takes and "query" in call.tensors

    return Variation(change=changed, applies=applies, refused=refused)


def in_state(*contexts: Callable[[], AbstractContextManager[Any]]) -> Variation:
    return Variation(change=lambda call: replace(call, state=contexts))


def resized(**by: int) -> Variation:
    return Variation(sizes=lambda sizes: replace(sizes, **{name: getattr(sizes, name) + n for name, n in by.items()}))


SIZES: dict[str, Variation] = {
    "another batch": resized(B=1),
    "batch 1": Variation(sizes=lambda s: replace(s, B=1)),
    "more queries": resized(Tq=3),
    "one query": Variation(sizes=lambda s: replace(s, Tq=1)),
    "more keys": resized(Tk=4),
    "more queries than keys": Variation(sizes=lambda s: replace(s, Tq=s.Tk + 2)),
    "more queries and keys": resized(Tq=4, Tk=4),
    "lengths exchanged": Variation(sizes=lambda s: replace(s, Tq=s.Tk, Tk=s.Tq)),
    "more query heads": Variation(sizes=lambda s: replace(s, Hq=2 * s.Hq)),
    "more key heads": Variation(sizes=lambda s: replace(s, Hkv=2 * s.Hkv)),
    "one key head": Variation(sizes=lambda s: replace(s, Hkv=1)),
    "wider heads": Variation(sizes=lambda s: replace(s, D=2 * s.D, Dv=2 * s.Dv)),
    "wider queries and keys": Variation(sizes=lambda s: replace(s, D=2 * s.D)),
    "wider values": Variation(sizes=lambda s: replace(s, Dv=2 * s.Dv)),
    "an odd head dim": Variation(sizes=lambda s: replace(s, D=s.D - 3, Dv=s.Dv - 3)),
    "more room in the cache": Variation(sizes=lambda s: replace(s, capacity=2 * s.capacity)),
    "float64": Variation(sizes=lambda s: replace(s, dtype=torch.float64)),
    "bfloat16": Variation(sizes=lambda s: replace(s, dtype=torch.bfloat16)),
    "float16": Variation(sizes=lambda s: replace(s, dtype=torch.float16)),
    "no queries": Variation(sizes=lambda s: replace(s, Tq=0)),
    "no keys": Variation(sizes=lambda s: replace(s, Tk=0)),
    "no batch": Variation(sizes=lambda s: replace(s, B=0)),
}


class Subclass(Tensor):
    """A tensor that is more than a tensor to whoever asks for its type."""


def off_by_one(t: Tensor) -> Tensor:
    """The same values, one element behind an aligned address."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def with_gaps(t: Tensor) -> Tensor:
    """Rows apart from each other, each of them contiguous."""
    return t.new_empty(*t.shape[:-1], t.shape[-1] + 8)[..., : t.shape[-1]].copy_(t)


def every_other(t: Tensor) -> Tensor:
    """No contiguous last dim."""
    return t.new_empty(*t.shape, 2)[..., 0].copy_(t)


def transposed(t: Tensor) -> Tensor:
    """The first two dims exchanged in memory."""
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else with_gaps(t)


def expanded(t: Tensor) -> Tensor:
    """The first of dim 0 for all of them, with a stride of 0."""
    return t[:1].expand_as(t)


def negated(t: Tensor) -> Tensor:
    """The same values as a view with the negative bit."""
    return torch._neg_view(t.neg())


def in_inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def other_dtype(t: Tensor) -> Tensor:
    others = {torch.float32: torch.float64, torch.int32: torch.int64, torch.int64: torch.int32, torch.bool: torch.uint8}
    return t.to(others.get(t.dtype, torch.float32))


LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "off by one element": off_by_one,
    "with gaps": with_gaps,
    "every other element": every_other,
    "transposed": transposed,
    "expanded": expanded,
    "of another dtype": other_dtype,
    "an inference tensor": in_inference,
    "a subclass": lambda t: t.as_subclass(Subclass),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "one dim less": lambda t: t[0],
    "cut in dim 0": lambda t: t[:-1],
    "cut in the last dim": lambda t: t[..., :-1],
    "None": lambda t: None,
    "a list": lambda t: [0.0],
}
FLOATING_LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "negated": negated,
    "a parameter": nn.Parameter,
}


def layouts(call: Call) -> dict[str, Variation]:
    """Every tensor of a call, every way in which it may come."""
    found = {}
    for name, t in call.tensors.items():
        ways = LAYOUTS | (FLOATING_LAYOUTS if t.is_floating_point() else {})
        found |= {f"{name} {way}": of_tensor(name, change) for way, change in ways.items()}
    return found


def zeros_without_memory(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device)


def _alias(call: Call) -> Call:
    return replace(call, tensors=call.tensors | {"value": call.tensors["key"]})


def _dims(call: Call) -> tuple[int, int, int, int]:
    query, key = call.tensors["query"], call.tensors["key"]
    return query.shape[0], query.shape[-2], query.shape[1], key.shape[1]


def _filled(call: Call, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    query = call.tensors["query"]
    values = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    return values.to(query.device, dtype or query.dtype)


def _mask(call: Call, *dims: int) -> Tensor:
    """A mask whose shape has the sizes of the given dims, and ones in the others."""
    sizes = _dims(call)
    order = sizes[0], sizes[1], sizes[2], sizes[3]
    return _filled(call, *(order[n] if n in dims else 1 for n in range(4))) > -0.5


def _per_row(call: Call) -> Tensor:
    rows = call.tensors["cu_seqlens_q"].numel() - 1 if "cu_seqlens_q" in call.tensors else _dims(call)[0]
    return _filled(call, rows, _dims(call)[1], dtype=torch.float32)


OPTIONS: dict[str, Variation] = {
    "causal": of_options(causal=True),
    "not causal": of_options(causal=False),
    "a window": of_options(window=(2, 0)),
    "a wider window": of_options(window=(4, 1)),
    "a window without a left side": of_options(window=(-1, 2)),
    "a window wider than 64 bits": of_options(window=(1 << 70, 0)),
    "no window": of_options(window=None),
    "softcap": of_options(softcap=3.0),
    "an integer softcap": of_options(softcap=3),
    "no softcap": of_options(softcap=0.0),
    "scale": of_options(scale=0.5),
    "an integer scale": of_options(scale=1),
    "scale 0": of_options(scale=0.0),
    "a negative scale": of_options(scale=-0.5),
    "the default scale": of_options(scale=None),
    "return_lse": of_options(return_lse=True),
    "no lse": of_options(return_lse=False),
    "dropout": of_options(dropout_p=0.5, seed=3),
    "less dropout": of_options(dropout_p=0.1, seed=7),
    "another seed": of_options(dropout_p=0.3, seed=8),
    "a seed that is drawn": of_options(dropout_p=0.3, seed=None),
    "a seed and no dropout": of_options(dropout_p=0.0, seed=3),
    "deterministic": of_options(deterministic=True),
    "not deterministic": of_options(deterministic=False),
    "eager": of_options(backend="eager"),
    "reference": of_options(backend="reference"),
    "rotated": of_options(rotate=True),
    "interleaved pairs": of_options(interleaved=True),
    "values of lengths not looked at": of_options(validate=False),
    "a scale of keys": of_options(k_scale=0.25),
    "a scale of keys in a tensor": of_options(k_scale=torch.tensor(0.25)),
    "a scale of values": of_options(v_scale=3),
    "no scales": of_options(k_scale=None, v_scale=None),
    "pages of one token": Variation(
        change=lambda call: replace(
            call, tensors=call.tensors | {name: t.flatten(0, 1) for name, t in call.tensors.items() if "pages" in name}
        ),
        applies=lambda call: "key_pages" in call.tensors,
    ),
    "a key is the value": Variation(
        change=_alias,
        applies=lambda call: (
            call.tensors.keys() >= {"key", "value"} and call.tensors["key"].shape == call.tensors["value"].shape
        ),
    ),
    "a mask of all dims": given("mask", lambda call: _mask(call, 0, 1, 2, 3)),
    "a mask of keys": given("mask", lambda call: _mask(call, 3)),
    "a mask of rows and keys": given("mask", lambda call: _mask(call, 2, 3)),
    "a mask of two dims": given("mask", lambda call: _mask(call, 2, 3)[0, 0]),
    "an expanded mask": given("mask", lambda call: _mask(call, 3).expand(*_mask(call, 0, 1, 2, 3).shape)),
    "no mask": of_options(mask=None),
    "a bias": given("bias", lambda call: _mask(call, 1, 2, 3).to(call.tensors["query"].dtype)),
    "a bias of keys": given("bias", lambda call: _mask(call, 3).to(call.tensors["query"].dtype)),
    "a bias in float64": given("bias", lambda call: _mask(call, 2, 3).double()),
    "no bias": of_options(bias=None),
    "slopes": given("alibi_slopes", lambda call: _filled(call, _dims(call)[1], dtype=torch.float32)),
    "slopes of every row": given("alibi_slopes", _per_row),
    "no slopes": of_options(alibi_slopes=None),
    "a sink": given("sink", lambda call: _filled(call, _dims(call)[1], dtype=torch.float32)),
    "a sink in the query's dtype": given("sink", lambda call: _filled(call, _dims(call)[1])),
    "no sink": of_options(sink=None),
    "a seed in a tensor": given("seed", lambda call: torch.tensor([3, 4], device=call.tensors["query"].device)),
    "max_seqlen not given": of_options(max_seqlen_q=None, max_seqlen_k=None),
    "other offsets": of_tensor("cu_seqlens_q", lambda t: torch.cat((t[:1], t[:-2] * 0 + 1, t[-1:]))),
    "shorter lengths": of_tensor("lengths", lambda t: (t // 2).clamp(min=1)),
    "other pages": of_tensor("page_table", lambda t: t.flip(1)),
    "batch invariant": of_options(batch_invariant=True),
    "int4": Variation(
        change=lambda call: replace(call, options=call.options | {"format": "int4"}),
        applies=lambda call: "format" in call.options,
    ),
    "scaling": of_options(scaling=0.5),
    "a sliding window": of_options(sliding_window=2),
    **{
        # torch's own CPU op, which has no softcap, reads memory that is not there (torch 2.13; so does its SDPA)
        f"{name} of zeros without memory": replace(
            of_tensor(name, zeros_without_memory), applies=lambda call: bool(call.options.get("softcap"))
        )
        for name in ("query", "key", "value")
    },
}


@contextmanager
def deterministic_torch() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def precision(value: str) -> AbstractContextManager[None]:
    return _setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


def autocast_flag(device: str) -> AbstractContextManager[None]:
    """Autocast of a device that need not be there."""
    return _setting(
        lambda: torch.is_autocast_enabled(device), lambda value: torch.set_autocast_enabled(device, value), True
    )


def _autocast(device: str, *args: Any, **options: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast(device, *args, **options)


def states(device: str) -> dict[str, Variation]:
    """What torch is told around a call, of which its arguments say nothing."""

    def follows_torch(call: Call) -> Call:
        options = call.options | ({"deterministic": None} if "deterministic" in call.takes else {})
        return replace(call, options=options, state=(deterministic_torch,), backward_state=(deterministic_torch,))

    bf16, f16 = _autocast(device, torch.bfloat16), _autocast(device, torch.float16)
    return {
        "no_grad": in_state(torch.no_grad),
        "inference mode": in_state(torch.inference_mode),
        "grad turned on in no_grad": in_state(torch.no_grad, torch.enable_grad),
        "autocast to bfloat16": in_state(bf16),
        "autocast to float16": in_state(f16),
        "autocast off in autocast": in_state(bf16, _autocast(device, enabled=False)),
        "autocast without gradients": in_state(torch.no_grad, bf16),
        "autocast in the backward alone": Variation(change=lambda call: replace(call, backward_state=(bf16,))),
        "autocast of another device": in_state(lambda: autocast_flag("cpu" if device == "cuda" else "cuda")),
        "torch.use_deterministic_algorithms": Variation(change=follows_torch),
        "forced eager": in_state(lambda: force_backend("eager")),
        "forced reference": in_state(lambda: force_backend("reference")),
        "forced reference in the backward alone": Variation(
            change=lambda call: replace(call, backward_state=(lambda: force_backend("reference"),))
        ),
        "float32 products in medium precision": in_state(lambda: precision("medium")),
        "float32 products in high precision": in_state(lambda: precision("high")),
        "default dtype float64": in_state(lambda: default_dtype(torch.float64)),
        "default device": in_state(lambda: torch.device(device)),
    }


def wants(*names: str) -> Variation:
    return Variation(
        change=lambda call: replace(call, wanted=frozenset(names) & call.tensors.keys()),
        applies=lambda call: not names or bool(call.tensors.keys() & set(names)),
    )


def arrives(arriving: Callable[[Tensor], Tensor], **also: Any) -> Variation:
    return Variation(
        change=lambda call: replace(call, arriving=arriving, **also), applies=lambda call: bool(call.wanted)
    )


def _through(*results: int) -> Variation:
    def changed(call: Call) -> Call:
        return replace(call, options=call.options | {"return_lse": True}, through=results)

    return Variation(change=changed, applies=lambda call: bool(call.wanted) and "return_lse" in call.takes)


GRADIENTS: dict[str, Variation] = {
    "none wanted": wants(),
    "all wanted": wants(*ALL),
    **{f"{name} alone": wants(name) for name in sorted(ALL)},
    "query and value": wants("query", "value"),
    "through the output": _through(0),
    "through the lse": _through(1),
    "through both": _through(0, 1),
    "a gradient as of sum()": arrives(lambda grad: grad.flatten()[0].expand(grad.shape)),
    "a gradient with equal columns": arrives(lambda grad: grad[..., :1].expand_as(grad)),
    "a transposed gradient": arrives(transposed),
    "a gradient with rows as columns": arrives(lambda grad: grad.mT.contiguous().mT),
    "a gradient off by one element": arrives(off_by_one),
    "a gradient with gaps": arrives(with_gaps),
    "a negated gradient": arrives(negated),
    "a gradient of zeros without memory": arrives(zeros_without_memory),
    "a gradient of a subclass": arrives(lambda grad: grad.as_subclass(Subclass)),
}


def refusals() -> dict[str, Variation]:
    """Arguments that are refused, of calls whose tensors are those of a call in the cache.

    Some equal a legal value in a dict, as 1 equals True, and some cannot be hashed.
    """
    bad: dict[str, dict[str, Any]] = {
        "causal": {"a number": 1, "zero": 0, "None": None, "a list": [True]},
        "window": {
            "floats": (1.0, 0),
            "bools": (True, False),
            "a list": [3, 1],
            "three sides": (1, 0, 0),
            "a list inside": ([1], 0),
            "below -1": (-2, 0),
        },
        "softcap": {"negative": -1.0, "nan": float("nan"), "a bool": False, "None": None, "huge": 1e39},
        "scale": {"nan": float("nan"), "a bool": True, "a string": "1", "a tensor": torch.ones(())},
        "dropout_p": {"2": 2.0, "a bool": False, "negative": -0.1, "nan": float("nan")},
        "seed": {"a float": 1.5, "a bool": True, "of 64 bits": 1 << 63, "int32": torch.tensor([1, 2]).int()},
        "deterministic": {"a number": 1, "zero": 0},
        "return_lse": {"a number": 1, "None": None},
        "backend": {"unknown": "cuda", "None": None, "a list": ["eager"]},
        "precision": {"unknown": "int8"},
        "rotate": {"without fp8": 1},
        "is_causal": {"of others": True},
        "num_splits": {"zero": 0, "a bool": True},
        "batch_invariant": {"a number": 1},
        "max_seqlen_q": {"negative": -1, "a float": 3.0},
        "k_scale": {"zero": 0.0, "negative": -1.0, "nan": float("nan"), "a bool": True, "a list": [1.0]},
    }
    found = {
        f"{name} {kind}": of_options(refused=True, **{name: value})
        for name, values in bad.items()
        for kind, value in values.items()
    }
    unknown = found["is_causal of others"]
    found["is_causal of others"] = replace(unknown, applies=lambda call: "backend" in call.takes)

    def of_dims(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Call], Tensor]:
        return lambda call: torch.ones(*shape, dtype=dtype, device=call.tensors["query"].device)

    bools, integers = torch.bool, torch.int64
    found |= {
        "a float mask": given("mask", lambda call: _mask(call, 2, 3).float(), refused=True),
        "a mask of no shape here": given("mask", of_dims(3, 11, dtype=bools), refused=True),
        "an integer bias": given("bias", lambda call: _mask(call, 2, 3).long(), refused=True),
        "a bias of no shape here": given("bias", of_dims(3, 11), refused=True),
        "slopes of no shape here": given("alibi_slopes", of_dims(3), refused=True),
        "an integer sink": given("sink", lambda call: of_dims(_dims(call)[1], dtype=integers)(call), refused=True),
        "a sink of no shape here": given("sink", of_dims(3), refused=True),
        "offsets that decrease": of_tensor("cu_seqlens_q", lambda t: t.flip(0), refused=True),
        "offsets not from 0": of_tensor("cu_seqlens_k", lambda t: t + 1, refused=True),
        "offsets beyond the rows": of_tensor("cu_seqlens_k", lambda t: t * 2 + t.sign(), refused=True),
        "one sequence less": of_tensor("cu_seqlens_q", lambda t: t[:-1], refused=True),
        "a length beyond the capacity": of_tensor("lengths", lambda t: t + 10_000, refused=True),
        "a negative length": of_tensor("lengths", lambda t: -t, refused=True),
        "lengths in int64": of_tensor("lengths", lambda t: t.long(), refused=True),
        "a slot that does not exist": of_tensor("slots", lambda t: t + 10_000, refused=True),
        "fewer tokens than slots": of_tensor("value", lambda t: t[1:], refused=True),
        "a page that does not exist": of_tensor("page_table", lambda t: t + 10_000, refused=True),
        "an expanded out": of_tensor("out", expanded, refused=True),
        "a negated out": of_tensor("out", negated, refused=True),
        "out of another dtype": of_tensor("out", lambda t: t.double(), refused=True),
    }
    found["an expanded out"] = replace(
        found["an expanded out"], applies=lambda call: "out" in call.tensors and "query" in call.tensors
    )
    for name in ("a negated out", "out of another dtype"):
        found[name] = replace(found[name], applies=found["an expanded out"].applies)
    for name in ("query", "key", "sink"):
        found[f"a gradient of the {name} of a cache"] = Variation(
            change=lambda call, name=name: replace(call, wanted=frozenset({name})),
            applies=lambda call, name=name: (
                call.tensors.keys() >= {"query", "lengths", name} and (name == "query" or "format" not in call.options)
            ),  # a quantised copy of keys has no gradient
            refused=True,
        )
    found["causal None"] = replace(found["causal None"], applies=lambda call: "softcap" in call.takes)
    return found


def variations(group: str, call: Call, device: str) -> dict[str, Variation]:
    """The variations of a group that apply to a call."""
    if group == "layouts":
        return layouts(call)
    found = {"sizes": SIZES, "options": OPTIONS, "gradients": GRADIENTS}.get(group)
    if found is None:
        found = states(device) if group == "states" else refusals()
    return {name: one for name, one in found.items() if one.applies(call)}


GROUPS = ("sizes", "layouts", "options", "states", "gradients", "refusals")

# Outcomes


class Outcome(NamedTuple):
    """All that a caller sees of a call: results and gradients, or the type and the words of its refusal."""

    tensors: tuple[Tensor | None, ...]
    error: str


def run(call: Call) -> Outcome:
    """Compute a call, and its gradients where a result has any."""
    tensors: dict[int, Any] = {}
    leaves: list[Tensor] = []
    arguments: dict[str, Any] = {}
    for name, given in call.tensors.items():
        if id(given) not in tensors:
            wants = name in call.wanted and isinstance(given, Tensor) and given.is_floating_point()
            own = given
            if isinstance(given, nn.Parameter):
                own = nn.Parameter(given.detach())
            elif wants and not given.is_inference():
                own = given.detach().requires_grad_()
            tensors[id(given)] = own
            if isinstance(own, Tensor) and own.requires_grad:
                leaves.append(own)
        arguments[name] = tensors[id(given)]
    if isinstance(call.op, nn.Module):
        leaves += call.op.parameters()
    torch.manual_seed(11)
    try:
        with ExitStack() as stack:
            for enter in call.state:
                stack.enter_context(enter())
            returned = call.op(**arguments, **call.options)
        results = [t for t in (returned if isinstance(returned, tuple) else (returned,)) if t is not None]
        found: list[Tensor | None] = list(results)
        roots = [t for n, t in enumerate(results) if n in call.through and t.requires_grad]
        if roots:
            source = torch.Generator().manual_seed(12)
            grads = [torch.randn(t.shape, generator=source).to(t.device, t.dtype) for t in roots]
            with ExitStack() as stack:
                for enter in call.backward_state:
                    stack.enter_context(enter())
                found += torch.autograd.grad(roots, leaves, [call.arriving(g) for g in grads], allow_unused=True)
    except Exception as error:
        return Outcome((), f"{type(error).__name__}: {error}")
    return Outcome(tuple(found), "")


@contextmanager
def uncached() -> Iterator[None]:
    """The ordinary way: no call in this block is served from the cache."""
    before = launch_cache.ENABLED
    launch_cache.ENABLED = False
    try:
        yield
    finally:
        launch_cache.ENABLED = before


def expected(call: Call) -> Outcome:
    with uncached():
        return run(call)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(actual: Outcome, wanted: Outcome) -> str:
    """How two outcomes differ; nothing if a caller could not tell one from the other."""
    if actual.error != wanted.error:
        return f"{actual.error or 'no error'!r} instead of {wanted.error or 'no error'!r}"
    if len(actual.tensors) != len(wanted.tensors):
        return f"{len(actual.tensors)} results and gradients instead of {len(wanted.tensors)}"
    for n, (a, b) in enumerate(zip(actual.tensors, wanted.tensors, strict=True)):
        if a is None or b is None:
            if a is not b:
                return f"tensor {n}: {'None' if a is None else 'a tensor'} instead of {'None' if b is None else 'one'}"
            continue
        seen = [
            (type(t).__name__, t.dtype, t.shape, t.stride(), t.device, t.requires_grad, t.is_leaf, t.is_inference())
            for t in (a, b)
        ]
        if seen[0] != seen[1]:
            return f"tensor {n}: {seen[0]} instead of {seen[1]}"
        if a.device.type != "meta" and not same_bits(a, b):
            apart = (a.detach().double() - b.detach().double()).abs().max().item()
            return f"tensor {n}: values up to {apart:.2e} apart"
    return ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    with torch.inference_mode():
        plain = [t.as_subclass(Tensor).resolve_neg().contiguous() for t in (a, b)]
        if a.is_floating_point():
            plain = [t.view(_INTEGERS[t.element_size()]) for t in plain]
        return torch.equal(*plain)


def stale(
    name: str, group: str, sizes: Sizes, only: Callable[[str], bool] = lambda name: True, quick: bool = False
) -> list[str]:
    """What goes wrong when calls that were varied come in between calls that are in the cache; nothing, if all is well.

    The base call is made twice, with other values each time. Then every varied call is made twice likewise, the first
    time with the base call in the cache, the second time with itself; and after each the base call again. `quick`: once
    each, and the base call at the end.
    """
    build, ordinary = CALLS[name], Variation()

    def made(variation: Variation, seed: int) -> Call:
        """Anew for every run: what a call writes into an argument must not be there already."""
        return variation.change(build(variation.sizes(sizes), seed))

    launch_cache.clear()
    failures = []
    base = {seed: expected(made(ordinary, seed)) for seed in (0, 1)}
    for seed, wanted in base.items():
        assert not wanted.error, f"the base call is refused: {wanted.error}"
        if found := difference(run(made(ordinary, seed)), wanted):
            failures.append(f"base call, seed {seed}: {found}")
    for which, variation in variations(group, build(sizes, 0), sizes.device).items():
        if not only(which):
            continue
        for seed in (2,) if variation.refused or quick else (2, 3):
            try:
                made(variation, seed)
            except (ValueError, RuntimeError, NotImplementedError):
                break  # there is no such tensor, or no such module
            wanted = expected(made(variation, seed))
            if variation.refused and not wanted.error:
                failures.append(f"{which}: expected to be refused with the cache turned off, and was not")
            if found := difference(run(made(variation, seed)), wanted):
                failures.append(f"{which}, seed {seed}: {found}")
        if not quick and (found := difference(run(made(ordinary, 1)), base[1])):
            failures.append(f"base call after {which}: {found}")
    if found := difference(run(made(ordinary, 1)), base[1]):
        failures.append(f"base call at the end: {found}")
    return failures
