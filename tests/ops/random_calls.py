"""Random public calls as dicts of plain values, and what they compute: for test_random_launches.py."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import stream_attention as sa
from stream_attention.ops import decode

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

Call = dict[str, Any]

# What may change. A value that stands here twice is drawn twice as often.

LENGTHS = (
    *(0, 1, 1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 301, 511, 512, 513),
    *(1000, 1023, 1024, 1025, 1800, 1900, 1901, 1920, 2047, 2048, 2049, 2100),
)  # fmt: skip
LAYOUTS = (
    *["rows"] * 12,
    *("by head", "by head", "gapped", "every other row", "shifted", "shifted by 16 bytes", "odd rows", "one head"),
    *("one entry", "odd sizes of 1", "channels apart", "negative", "parameter"),
)  # fmt: skip
OFTEN_NONE = (None,) * 6

SHAPE = {
    "q_len": LENGTHS,
    "k_len": LENGTHS,
    "q_heads": (8, 8, 8, 4, 6, 1, 16),
    "kv_heads": (4, 4, 8, 2, 1),
    "dims": (*[(64, 64)] * 4, (128, 128), (128, 128), (256, 256), (40, 40), (64, 128), (192, 128), (16, 16), (100, 60)),
    "dtype": (*[BF16] * 8, F16, F16, F32, F32, F64),
    "q_layout": LAYOUTS,
    "k_layout": LAYOUTS,
    "v_layout": LAYOUTS,
    "shared": ("", "", "", "", "k is v", "fused"),
    "v_rows": (0, 0, 0, 0, 0, 0, 0, 0, 0, -1),
}
STATE = {
    "grad_mode": (*["on"] * 6, "off", "inference", "inference tensors"),
    "autocast": (*OFTEN_NONE, *OFTEN_NONE, BF16, F16),
    "tf32": (False, False, True),
    "algorithms": (False, False, False, True),
    "forced": (*["auto"] * 12, "triton", "gluon", "triton(block_m=64)", "eager", "reference"),
    "mode": (*OFTEN_NONE, *OFTEN_NONE, "dispatch"),
    "profiled": (*[False] * 40, True),
}
ATTENTION = {
    "causal": (False, True, True, 1),
    "window": (*OFTEN_NONE, (100, 0), (100, 5), (0, 0), (-1, 0), (300, -1), (1 << 40, 3), (1 << 70, 7), [5, 5]),
    "scale": (*OFTEN_NONE, 0.5, 0.125, 0.0, -0.0, -0.25, 1, float("nan"), 1e-38),
    "backend": (*["auto"] * 12, "gluon", "gluon", "triton", "triton(block_m=64)", "triton(block_n=32)", "eager"),
    "return_lse": (False, False, True),
}
SCORES = {
    "softcap": (*[0.0] * 8, 9.0, 9.0, 20.0, 1),
    "dropout_p": (*[0.0] * 8, 0.1, 0.5, False),
    "seed": (None, None, 3, "tensor"),
    "deterministic": (*OFTEN_NONE, True, False),
    "alibi_slopes": (*OFTEN_NONE, "heads", "batch", "grad", "apart"),
    "sink": (*OFTEN_NONE, "heads", "grad", "apart"),
}
MASKS = {
    "mask": (*OFTEN_NONE, "full", "one head", "keys", "no batch", "apart"),
    "bias": (*OFTEN_NONE, "full", "one head", "grad", "fp32", "apart"),
}
WANTED = {"wanted": ("", "qkv", "qkv", "qkv", "q", "kv", "v", "k")}
PACK = {
    "sequences": (3, 3, 3, 1, 8),
    "more_rows": (0, 0, 1, 7, 300),
    "offsets": (torch.int32, torch.int32, torch.int64),
    "longest": ("given", "given", "given", "too long", "read"),
}
BATCH = {"batch": (2, 2, 1, 3)}
FP8 = {"rotate": (False, False, True, 1), "dims": ((64, 64), (64, 64), (128, 128), (256, 256), (96, 96))}
FP8 |= {"dtype": (BF16, BF16, F16, F32)}
CACHE = {
    "cache": ("rows", "rows", "pages of 16", "pages of 64", "int4", "int8", "fp8", "int4 in pages"),
    "capacity": (256, 320, 512, 1024, 1088, 1920),
    "cache_layout": ("rows", "rows", "by head", "gapped", "shifted", "k is v"),
    "lengths": ("given", "given", "apart", None),
    "kv_heads": (2, 2, 4, 1),
    "dims": ((64, 64), (64, 64), (128, 128), (32, 32)),
    "new_cache": (False, True),
}
DECODE = {
    "tokens": (1, 1, 1, 2, 3, 5, 17, 0),
    "num_splits": (*OFTEN_NONE, 1, 2, 7, True),
    "batch_invariant": (False, False, False, True),
    "tree": (*OFTEN_NONE, "given"),
    "out": (*OFTEN_NONE, "rows", "gapped"),
    "workspace": (*OFTEN_NONE, "given"),
    "seed": (None,),
}
APPEND = {
    "tokens": (1, 1, 2, 3, 16, 64, 65, 255, 600, 0),
    "pairs": (0, 16, 16, 8),
    "interleaved": (False, False, True),
    "angles": (F32, BF16),
}
KINDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "dense": BATCH | SHAPE | STATE | ATTENTION | SCORES | MASKS | WANTED,
    "plain": BATCH | SHAPE | STATE | ATTENTION | WANTED,
    "packed": PACK | SHAPE | STATE | ATTENTION | SCORES | WANTED,
    "plain pack": PACK | SHAPE | STATE | ATTENTION | WANTED,
    "fp8": BATCH | SHAPE | STATE | ATTENTION | FP8 | WANTED,
    "fp8 pack": PACK | SHAPE | STATE | ATTENTION | FP8,
    "quantize_fp8": BATCH | SHAPE | STATE | FP8,
    "quantize_fp8, a pack": PACK | SHAPE | STATE | FP8,
    "attention_fp8": BATCH | SHAPE | STATE | ATTENTION | FP8,
    "attention_fp8, a pack": PACK | SHAPE | STATE | ATTENTION | FP8,
    "decode": BATCH | SHAPE | STATE | ATTENTION | SCORES | CACHE | DECODE,
    "decode_contiguous": BATCH | SHAPE | STATE | ATTENTION | SCORES | CACHE | DECODE,
    "append": BATCH | SHAPE | STATE | CACHE | APPEND,
}
SIZES = ("q_len", "k_len", "batch", "tokens", "sequences", "more_rows")


def drawn(rng: random.Random, kind: str) -> Call:
    call = {name: rng.choice(values) for name, values in KINDS[kind].items()} | {"kind": kind}
    plain = [name for name in call if name in STATE | SCORES | MASKS or name.endswith("layout")]
    for name in rng.sample(plain, k=len(plain) * 3 // 4):  # most calls change few things from what is plain
        call[name] = KINDS[kind][name][0]
    return call


def changed(rng: random.Random, call: Call) -> Call:
    """The call with some values changed: often its sizes alone, or what is asked for."""
    fields = KINDS[call["kind"]]
    asked = [name for name in fields if name in STATE | ATTENTION | SCORES | WANTED]
    names = rng.choice([[name for name in fields if name in SIZES]] * 3 + [asked, [*fields]])
    changes = {name: rng.choice(fields[name]) for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2, 3))))}
    for name in changes:
        if name in ("q_len", "k_len") and rng.random() < 0.5:
            changes[name] = rng.randint(1, 2100)
    if rng.random() < 0.1 and "k_len" in fields:
        changes |= {"q_len": call["k_len"], "k_len": call["q_len"]}
    return call | changes


# Tensors


def laid_out(layout: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """Memory `[..., T, H, D]` that is not written, except of codes and lengths."""
    *lead, rows, heads, dim = shape

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    if layout == "by head":
        return empty(*lead, heads, rows, dim).transpose(-2, -3)
    if layout == "gapped":
        return empty(*lead, rows, heads, dim + 8)[..., :dim]
    if layout == "every other row":
        return empty(*lead, 2 * rows, heads, dim)[..., ::2, :, :]
    if layout.startswith("shifted"):
        by = 1 if layout == "shifted" else 16 // dtype.itemsize
        return empty(*lead, rows * heads * dim + by).flatten()[by : by + empty(*shape).numel()].view(shape)
    if layout == "odd rows":
        return empty(*lead, rows, heads * dim + 1)[..., : heads * dim].unflatten(-1, (heads, dim))
    if layout == "one head":
        return empty(*lead, rows, 1, dim).expand(shape)
    if layout == "one entry" and lead:
        return empty(1, rows, heads, dim).expand(shape)
    if layout == "odd sizes of 1":
        made = empty(*shape)
        strides = [3 if size == 1 else stride for size, stride in zip(shape, made.stride(), strict=True)]
        return made.as_strided(shape, strides)
    if layout == "channels apart":
        return empty(*lead, rows, heads, 2 * dim)[..., ::2]
    if layout == "negative":
        return torch._neg_view(empty(*shape))
    return empty(*shape)


def rows_of(call: Call) -> dict[str, Tensor]:
    """Query, key and value of a call."""
    dtype, (dim, value_dim) = call["dtype"], call["dims"]
    q_len, k_len = bounded(call)
    lead, q_rows, k_rows = [call.get("batch", 0)], q_len, k_len
    if "sequences" in call:
        more = call["more_rows"]
        lead, q_rows, k_rows = [], call["sequences"] * q_len + more, call["sequences"] * k_len + more
    sizes = {
        "query": (*lead, q_rows, call["q_heads"], dim),
        "key": (*lead, k_rows, call["kv_heads"], dim),
        "value": (*lead, max(0, k_rows + call["v_rows"]), call["kv_heads"], value_dim),
    }
    if call["shared"] == "fused" and q_rows == k_rows and dim == value_dim:
        heads = (call["q_heads"], call["kv_heads"], call["kv_heads"])
        found = dict(zip(sizes, torch.empty(*lead, q_rows, sum(heads), dim, dtype=dtype).split(heads, -2), strict=True))
    else:
        found = {name: laid_out(call[f"{name[0]}_layout"], *shape, dtype=dtype) for name, shape in sizes.items()}
        if call["shared"] == "k is v" and dim == value_dim:
            found["value"] = found["key"]
    apart = {}
    for name, t in found.items():
        wants = name[0] in call.get("wanted", "")
        if call[f"{name[0]}_layout"] == "parameter":
            t = torch.nn.Parameter(t, requires_grad=wants)
        elif wants:
            t = t.detach().requires_grad_()
        apart[name] = apart["key"] if name == "value" and found["value"] is found["key"] else t
    return apart


def bounded(call: Call) -> tuple[int, int]:
    """The lengths of a call, which are short where something is computed on the CPU after all."""
    by_torch = "eager" in (call.get("backend"), call["forced"]) or call["forced"] == "reference"
    most = 40 if by_torch or call["dtype"] is F64 or ("mask" in call and (call["mask"] or call["bias"])) else 1 << 20
    return min(call["q_len"], most), min(call["k_len"], most)


def head_numbers(kind: str | None, batch: int, heads: int) -> Tensor | None:
    """Slopes or sinks."""
    if kind is None:
        return None
    if kind == "apart":
        return torch.ones(2 * heads)[::2]
    return torch.ones(batch, heads) if kind == "batch" else torch.ones(heads).requires_grad_(kind == "grad")


def scores_of(call: Call, batch: int) -> dict[str, Any]:
    """The arguments that are tensors, beside query, key and value."""
    (q_len, k_len), heads = bounded(call), call["q_heads"]
    found: dict[str, Any] = {
        "alibi_slopes": head_numbers(call["alibi_slopes"], batch, heads),
        "sink": head_numbers(call["sink"], batch, heads),
    }
    shapes = {
        "full": (batch, heads, q_len, k_len), "one head": (batch, 1, q_len, k_len), "keys": (batch, 1, 1, k_len),
        "no batch": (q_len, k_len), "grad": (1, heads, q_len, k_len), "fp32": (batch, heads, q_len, k_len),
        "apart": (batch, heads, q_len, 2 * k_len),
    }  # fmt: skip
    if kind := call.get("mask"):
        found["mask"] = torch.ones(shapes[kind], dtype=torch.bool)[..., :: 2 if kind == "apart" else 1]
    if kind := call.get("bias"):
        dtype = F32 if kind == "fp32" else call["dtype"]
        found["bias"] = torch.zeros(shapes[kind], dtype=dtype)[..., :: 2 if kind == "apart" else 1]
        found["bias"].requires_grad_(kind == "grad")
    return found


def cache_of(call: Call, made: dict[Any, Any]) -> Any:
    """A cache, one of those that were `made` before unless a new one is asked for: at other addresses."""
    names = (*CACHE, "batch")
    key = tuple(call[name] for name in names if name != "new_cache")
    if call["new_cache"] or key not in made:
        if len(made) > 20:
            made.clear()
        made[key] = new_cache(call)
    return made[key]


def new_cache(call: Call) -> Any:
    kind, capacity, batch, layout = call["cache"], call["capacity"], call["batch"], call["cache_layout"]
    heads, (dim, value_dim), page = call["kv_heads"], call["dims"], 16 if kind == "pages of 16" else 64
    paged = "pages" in kind
    lead = (batch * capacity // page, page) if paged else (batch, capacity)
    key, value = (laid_out(layout, *lead, heads, width, dtype=BF16).zero_() for width in (dim, value_dim))
    if layout == "k is v":
        value = key
    lengths = torch.full((2 * batch,), capacity - 70, dtype=torch.int32)
    lengths = lengths[::2] if call["lengths"] == "apart" else lengths[:batch].clone()
    if paged:
        cache: Any = sa.PagedKV(key, value, torch.zeros(batch, capacity // page, dtype=torch.int32), lengths)
    else:
        cache = sa.ContiguousKV(key, value, lengths if call["lengths"] or kind in ("int4", "int8", "fp8") else None)
    quantised = next((name for name in ("int4", "int8", "fp8") if kind.startswith(name)), None)
    if quantised is None:
        return cache
    with torch.inference_mode(False), torch.no_grad():
        return sa.quantize_kv(cache, quantised, group=64, residual=64)


# Calls


class Prepared(NamedTuple):
    """A call with its tensors, as a function that may be called several times."""

    compute: Callable[[], Any]
    tensors: list[Tensor]


def prepared(call: Call, caches: dict[Any, Any]) -> Prepared:
    kind = call["kind"]
    inference = call["grad_mode"] == "inference tensors"
    with torch.inference_mode(inference), torch.set_grad_enabled(not inference):
        if kind == "append":
            return of_append(call, caches)
        if kind.startswith("decode"):
            return of_decode(call, caches)
        return of_fp8_codes(call) if "_fp8" in kind else of_attention(call)


def asked(call: Call, fields: dict[str, Any], *but: str) -> dict[str, Any]:
    return {name: call[name] for name in fields if name not in but}


def ends_of(call: Call, suffix: str, rows: int, longest: int) -> dict[str, Any]:
    """Offsets of a pack, whose sequences are of one length."""
    ends = {f"cu_seqlens{suffix}": torch.arange(call["sequences"] + 1, dtype=call["offsets"]) * longest}
    if call["longest"] != "read":
        ends[f"max_seqlen{suffix}"] = longest + (5000 if call["longest"] == "too long" else 0)
    return ends


def of_attention(call: Call) -> Prepared:
    rows, options = rows_of(call), asked(call, ATTENTION)
    q_len, k_len = bounded(call)
    function: Any = sa.attention
    if "softcap" in call:
        options |= asked(call, SCORES, "seed") | scores_of(call, call.get("batch", call.get("sequences", 1)))
        options["seed"] = torch.ones(2, dtype=torch.int64) if call["seed"] == "tensor" else call["seed"]
    if "rotate" in call:
        options |= {"precision": "fp8", "rotate": call["rotate"]}
    if "sequences" in call:
        function = sa.varlen_attention
        ends = ends_of(call, "_q", rows["query"].shape[0], q_len) | ends_of(call, "_k", rows["key"].shape[0], k_len)
        options |= ends
    given = [t for t in (*rows.values(), *options.values()) if isinstance(t, Tensor)]
    return Prepared(lambda: function(*rows.values(), **options), given)


def of_fp8_codes(call: Call) -> Prepared:
    query, key, value = rows_of(call).values()
    q_len, k_len = bounded(call)
    packed = "sequences" in call
    of_keys = ends_of(call, "", key.shape[0], k_len) if packed else {}
    of_query = ends_of(call, "_q", query.shape[0], q_len) if packed else {}

    def quantised() -> Any:
        return sa.quantize_fp8(key, value, rotate=call["rotate"], **of_keys)

    tensors = [query, key, value, *(t for t in (*of_keys.values(), *of_query.values()) if isinstance(t, Tensor))]
    if call["kind"].startswith("quantize"):
        return Prepared(lambda: quantised().codes[:3], tensors)
    options = asked(call, ATTENTION)
    return Prepared(lambda: sa.attention_fp8(query, quantised(), **of_query, **options), tensors)


def of_decode(call: Call, caches: dict[Any, Any]) -> Prepared:
    cache, batch, tokens, heads = cache_of(call, caches), call["batch"], call["tokens"], call["q_heads"]
    query = laid_out(call["q_layout"], batch, tokens, heads, call["dims"][0], dtype=call["dtype"])
    options = asked(call, ATTENTION) | asked(call, DECODE, "tokens", "tree", "seed")
    options |= {name: t for name, t in scores_of(call, batch).items() if name in ("alibi_slopes", "sink")}
    options["softcap"] = call["softcap"]
    if call["tree"]:
        options["tree_mask"] = torch.ones(batch, tokens, tokens, dtype=torch.bool)
    if call["out"]:
        options["out"] = laid_out(call["out"], batch, tokens, heads, call["dims"][1], dtype=call["dtype"])
    if options["workspace"]:
        options["workspace"] = torch.empty(1 << 20, dtype=torch.float32)
    given = [t for t in (query, *options.values(), *cache.tensors) if isinstance(t, Tensor)]
    if call["kind"] == "decode_contiguous" and call["cache"] == "rows" and call["lengths"]:
        window, scale = (call["window"] or (0,))[0], call["scale"] or 0.5
        tensors = query, cache.key, cache.value, cache.lengths, options["sink"]
        return Prepared(lambda: decode.decode_contiguous(*tensors, window, call["softcap"], scale), given)
    # A copy has the tensors of a cache, but not what the cache keeps of them.
    with_layout = [cache]
    return Prepared(
        lambda: sa.decode_attention(query, with_layout.pop() if with_layout else copy.copy(cache), **options), given
    )


def of_append(call: Call, caches: dict[Any, Any]) -> Prepared:
    cache, tokens, (dim, value_dim) = cache_of(call, caches), call["tokens"], call["dims"]
    key, value = (
        laid_out(call[layout], call["batch"], tokens + more, call["kv_heads"], width, dtype=call["dtype"])
        for layout, width, more in (("k_layout", dim, 0), ("v_layout", value_dim, call["v_rows"] if tokens else 0))
    )
    angles = torch.ones(2, call["capacity"], call["pairs"] or 1, dtype=call["angles"])
    rotary = sa.Rotary(*angles, call["interleaved"]) if call["pairs"] else None

    def compute() -> None:
        cache.append(key, value, rotary=rotary)

    return Prepared(compute, [key, value, *angles, *(t for t in cache.tensors if t is not None)])
