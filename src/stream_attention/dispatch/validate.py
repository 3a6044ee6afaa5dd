"""Every check of user input, in one place.

A check names the argument, says what was expected and what came, and runs before any work. Nothing here reads the
values of a tensor on an accelerator, unless a caller asks for that synchronisation by `validate=True`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy

from ..base.errors import refuse
from ..base.fp8_layout import HEAD_DIMS as FP8_HEAD_DIMS
from ..base.kv_layouts import ContiguousKV, Fp8KV, KVCache, PagedKV, QuantizedKV, checks
from ..base.problem import UNBOUNDED, CallOptions, DecodeInputs, Inputs
from ..masks.mask import Mask

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST, SMALLEST = 2.3e38, 1.2e-38
"""Of a scale and of a softcap, whatever the dtype of the tensors: kernels take them in fp32, and in units of log2."""

FP8_HINT = "Pass it to attention_fp8(query, kv)."

_ADDED = "added to the scores, -inf masks a key"
_ATTENDS = "boolean, True = attend"
FOREIGN = {
    # what other libraries call an argument -> what it is called here, and what to know about it
    "is_causal": {"causal": "aligned bottom-right"},
    "attn_mask": {"mask": _ATTENDS, "bias": f"floating, {_ADDED}", "attention_mask": f"{_ATTENDS}; floating: {_ADDED}"},
    "attn_bias": {"bias": _ADDED, "attention_mask": f"floating, {_ADDED}"},
    "attention_mask": {"mask": f"{_ATTENDS}; padding [B, Tk] is padding[:, None, None]", "bias": f"floating, {_ADDED}"},
    "mask": {"attention_mask": _ATTENDS},
    "bias": {"attention_mask": f"floating, {_ADDED}"},
    "softmax_scale": {"scale": "None is D ** -0.5"},
    "sm_scale": {"scale": "None is D ** -0.5"},
    "window_size": {"window": "a tuple (left, right), -1 = unbounded"},
    "dropout": {"dropout_p": "a probability; 0.0 outside of training"},
    "return_attn_probs": {"return_lse": "returns (out, lse); attention weights are not materialised"},
    "return_softmax_lse": {"return_lse": "returns (out, lse)"},
    "block_table": {"page_table": "int32 [B, pages of a request]"},
    "block_tables": {"page_table": "int32 [B, pages of a request]"},
    "cache_seqlens": {"seqused_k": "int32 [B], the keys of each request, its new ones counted"},
    "cu_seqlens_k": {"seqused_k": "int32 [B], the keys of each request, its new ones counted"},
    "sliding_window": {"window": "a tuple (left, right): (width - 1, 0)"},
    "logits_soft_cap": {"softcap": "0.0 is none"},
    "k_descale": {"k_scale": "a number, or fp32 [], [Hkv] or [B, Hkv]"},
    "v_descale": {"v_scale": "a number, or fp32 [], [Hkv] or [B, Hkv]"},
    "sinks": {"sink": "[Hq]"},
    "s_aux": {"sink": "[Hq]"},
    "key_padding_mask": {
        "mask": "boolean, True = attend: ~key_padding_mask[:, None, None]",
        "attention_mask": "boolean, True = attend: ~key_padding_mask",
    },
}
"""Keywords that a caller may know from elsewhere."""

_PACKED = "is an argument of varlen_attention, for packed sequences"
NOT_HERE = {
    "enable_gqa": "leave `enable_gqa` out: Hq may be any multiple of Hkv here",
    **{name: f"`{name}` {_PACKED}" for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")},
    "cache_seqlens": "`cache_seqlens` are the lengths of a cache here: ContiguousKV(key, value, lengths)",
    "block_table": "`block_table` is part of a cache here: PagedKV(key_pages, value_pages, page_table, lengths)",
}
"""Keywords of other libraries that no argument of ours replaces, and what to do instead."""

MOST_HEADS = 256
"""A call with more heads than this, each with keys of its own, has its lengths where the heads belong."""

Function = TypeVar("Function", bound=Callable[..., Any])


def refuses_foreign(function: Function) -> Function:
    """For a function with `*unexpected` or `**foreign`, which are there for `unexpected` to refuse in words: its
    signature, as `help` and `inspect` show it, without the two."""
    whole = signature(function)
    shown = [p for p in whole.parameters.values() if p.name not in ("unexpected", "foreign")]
    function.__signature__ = whole.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def unexpected(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Iterable[str]) -> NoReturn:
    """Refuse positional arguments or keywords that a function does not have."""
    name, own = function.__qualname__.removesuffix(".forward"), signature(function).parameters
    if arguments:
        taken = [p.name for p in own.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        others = ", ".join(p.name for p in own.values() if p.kind is Parameter.KEYWORD_ONLY and p.annotation != "None")
        meant = f", as in causal={arguments[0]}" if isinstance(arguments[0], bool) else f": {others}"
        raise TypeError(
            f"{name}() takes {len(taken)} positional arguments, {', '.join(taken)}; got {len(taken) + len(arguments)}. "
            f"The others are passed by name{meant}"
        )
    own_names = [name for name, p in own.items() if p.annotation != "None"]  # what may only be None is refused anyway
    for keyword in keywords:
        here = [f"`{ours}` here ({note})" for ours, note in FOREIGN.get(keyword, {}).items() if ours in own_names]
        if here:
            raise TypeError(f"{name}(): `{keyword}` is called {' or '.join(here)}")
        if keyword in NOT_HERE:
            raise TypeError(f"{name}(): {NOT_HERE[keyword]}")
    raise TypeError(f"{name}() got an unexpected keyword argument {next(iter(keywords))!r}")


def bound(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> dict[str, Any]:
    """The arguments of a call by name, with defaults; refuses those that the function does not have."""
    try:
        found = signature(function).bind(*arguments, **keywords)
    except TypeError as error:
        if unknown := keywords.keys() - signature(function).parameters.keys():
            unexpected(function, (), sorted(unknown))
        raise TypeError(f"{function.__name__}() {error}") from None
    found.apply_defaults()
    return found.arguments


def looks_transposed(query: Tensor, key: Tensor, by_strides: bool = True) -> bool:
    """Whether a dense call that was checked looks as if its tensors were `[B, H, T, D]`.

    As many KV heads as query heads, and either more than `MOST_HEADS`, or 8 for each of several queries, of which there
    are at least as many as keys. In the second case, `by_strides`, query and key also lie as `[B, T, H, D]` does after
    `.transpose(1, 2)`: the stride of dim 1 is smaller than that of dim 2.
    """
    (q_len, heads), (k_len, kv_heads) = query.shape[1:3], key.shape[1:3]
    if not type(q_len) is type(heads) is type(k_len) is int or heads != kv_heads:  # symbolic sizes are not asked
        return False
    if heads > MOST_HEADS:
        return True
    if q_len < 2 or heads < 8 * q_len or k_len > q_len:
        return False
    return not by_strides or all(t.shape[1] == 1 or t.stride(1) < t.stride(2) for t in (query, key))


def is_tensor(name: str, given: Any) -> None:
    """Refuse what is no tensor."""
    if not isinstance(given, Tensor):
        refuse(name, "a torch.Tensor", type(given).__name__, hint_about(given), TypeError)


def hint_about(given: Any) -> str:
    """What to do with something that is no tensor."""
    if isinstance(given, Proxy):
        return "torch.fx.symbolic_trace is not supported: use torch.export, or torch.fx.wrap the calling function."
    if isinstance(given, Mask):
        return "Here a dense one is read: mask.as_dense(q_len=..., k_len=...)."
    if callable(given) or hasattr(given, "kv_num_blocks"):
        return "A function becomes a Mask by masks.from_function, a BlockMask by masks.from_block_mask."
    return FP8_HINT if isinstance(given, Fp8KV) else ""


def attention_tensors(inputs: Inputs, may_be_empty: bool = False) -> None:
    """Check the tensors of a dense call. `may_be_empty`: also without heads, or with head dims of 0."""
    query, key, value, mask, bias, alibi_slopes, sink, *_ = inputs
    _qkv(query, key, value, "[B, Tq, Hq, D]", "[B, Tk, Hkv, D]", "[B, Tk, Hkv, Dv]", may_be_empty)
    batch, q_len, q_heads, _ = query.shape
    k_len = key.shape[1]
    if key.shape[0] != batch or value.shape[0] != batch:
        found = f"key B={key.shape[0]}, value B={value.shape[0]}"
        refuse("key and value", f"the query's batch size B={batch}", found)
    if mask is not None:
        tensor_beside("mask", mask, query)
        if mask.dtype is not torch.bool:
            hint = "Pass an additive float mask as `bias`."
            refuse("mask", "dtype torch.bool (True = attend)", mask.dtype, hint, TypeError)
        _broadcastable("mask", mask, (batch, q_heads, q_len, k_len))
    if bias is not None:
        floating("bias", bias, query, "Pass a boolean mask as `mask`.")
        _broadcastable("bias", bias, (batch, q_heads, q_len, k_len))
    per_head(alibi_slopes, sink, query, batch, q_heads)


def varlen_tensors(
    inputs: Inputs, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, may_be_empty: bool = False
) -> None:
    """Check the tensors of a packed call, as those of a dense one, but not the values of `cu_seqlens`."""
    query, key, value, mask, bias, alibi_slopes, sink, _, cu_seqlens_q, cu_seqlens_k, *_ = inputs
    for name, refused in (("mask", mask), ("bias", bias)):
        if refused is not None:
            refuse(name, "None for packed sequences", "a value", "Use attention() with padded sequences.")
    _qkv(query, key, value, "[Nq, Hq, D]", "[Nk, Hkv, D]", "[Nk, Hkv, Dv]", may_be_empty)
    cu_seqlens_q = _offsets("cu_seqlens_q", cu_seqlens_q, query)
    cu_seqlens_k = _offsets("cu_seqlens_k", cu_seqlens_k, query)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        expected = f"as many sequences as cu_seqlens_q, shape {list(cu_seqlens_q.shape)}"
        refuse("cu_seqlens_k", expected, list(cu_seqlens_k.shape))
    optional_int("max_seqlen_q", max_seqlen_q)
    optional_int("max_seqlen_k", max_seqlen_k)
    per_head(alibi_slopes, sink, query, cu_seqlens_q.shape[0] - 1, query.shape[1])


def nested_tensors(query: Any, key: Any, value: Any, mask: Tensor | None, bias: Tensor | None) -> None:
    """Check the tensors of a dense call whose query is a nested tensor, but not what is checked of their rows."""
    for name, refused in (("mask", mask), ("bias", bias)):
        if refused is not None:
            refuse(name, "None with nested tensors", "a value", "Pad them: x.to_padded_tensor(0.0).")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not getattr(tensor, "is_nested", False):
            refuse(name, "a nested tensor like the query", _describe(tensor), error=TypeError)
        if tensor.layout is not torch.jagged:
            hint = "torch.nested.nested_tensor(..., layout=torch.jagged) makes one."
            refuse(name, "a nested tensor of layout torch.jagged", tensor.layout, hint, TypeError)
        ragged = tensor._ragged_idx
        if tensor.dim() != 4 or ragged != 1:
            hint = "Pass x.transpose(1, 2)." if tensor.dim() == 4 and ragged == 2 else ""
            refuse(name, "[B, j, H, D] with ragged j", f"{tensor.dim()} dims, of which dim {ragged} is ragged", hint)
        if tensor.lengths() is not None:
            refuse(name, "sequences without gaps between them", "gaps", "Call .contiguous() on it first.")
    if key.shape[0] != query.shape[0] or value.shape[:2] != key.shape[:2]:
        sizes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        hint = "To build value with the key's lengths: nested_tensor_from_jagged(rows, key.offsets())."
        refuse("key and value", "the query's B, and the same lengths in both", sizes, hint)


def cu_seqlens_values(name: str, offsets: list[int], rows: int, longest: int | None) -> int:
    """Check cumulative lengths that are known on the host; returns the longest sequence, or what was passed for it."""
    lengths = [late - early for early, late in pairwise(offsets)]
    if offsets[0] != 0:
        refuse(name, "0 as the first value", offsets[0])
    for index, length in enumerate(lengths):
        if length < 0:
            refuse(name, "non-decreasing values", f"{offsets[index : index + 2]} at {index}")
    if offsets[-1] > rows:
        refuse(name, f"a last value of at most the {rows} packed rows", offsets[-1])
    if longest is not None and longest < max(lengths, default=0):
        refuse(name.replace("cu_seqlens", "max_seqlen"), f"at least the longest sequence, {max(lengths)}", longest)
    return max(lengths, default=0) if longest is None else longest


def options(given: CallOptions, query: Tensor) -> None:
    """Check what is not a tensor of the maths; `precision` checks the precision."""
    causal, window, softcap, scale, dropout_p, seed, deterministic, return_lse, *_ = given
    flags(causal=causal, return_lse=return_lse)
    if deterministic is not None and not isinstance(deterministic, bool):
        refuse("deterministic", "a bool, or None for torch's own setting", _describe(deterministic), error=TypeError)
    if window is not None:
        if not isinstance(window, tuple) or len(window) != 2 or not all(_is_int(side) for side in window):
            hint = "For the last n keys including the query's own, pass (n - 1, 0); -1 leaves a side open."
            refuse("window", "a tuple of two ints (left, right), or None", _describe(window), hint, TypeError)
        if window[0] < -1 or window[1] < -1:
            refuse("window", "sides of at least -1 (-1 = unbounded)", window)
    real("softcap", softcap)
    if softcap < 0:
        refuse("softcap", "0 (off) or a positive number", softcap)
    if scale is not None:
        real("scale", scale)
        if abs(scale) > LARGEST:
            refuse("scale", f"at most {LARGEST:g} in absolute value, so that fp32 can represent it", scale)
    if softcap:
        least = max(SMALLEST, abs(scale or 0.0) / LARGEST)  # their quotient is in fp32 too
        if not least <= softcap <= LARGEST:
            hint = "For no cap, pass 0." if softcap > 1 else ""
            refuse("softcap", f"0 (off) or from {least:g} to {LARGEST:g}, so that fp32 can represent it", softcap, hint)
    real("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        refuse("dropout_p", "a probability in [0, 1)", dropout_p)
    if isinstance(seed, Tensor):
        tensor_beside("seed", seed, query)
        if seed.dtype is not torch.int64 or seed.shape != (2,):
            refuse("seed", "an int, or an int64 tensor of shape [2]: (seed, offset)", _describe(seed), error=TypeError)
    else:
        seed_number(seed, "an int, an int64 tensor of shape [2], or None")


def seed_number(seed: Any, expected: str = "an int or None") -> None:
    """Check a seed that is no tensor."""
    if seed is not None and not _is_int(seed):
        refuse("seed", expected, _describe(seed), error=TypeError)
    if seed is not None and not -(1 << 63) <= seed < 1 << 63:
        refuse("seed", "a 64-bit int", seed)


def flags(**given: Any) -> None:
    """Check what is either True or False."""
    for name, flag in given.items():
        if not isinstance(flag, bool):
            refuse(name, "a bool", _describe(flag), error=TypeError)


def precision(given: CallOptions, inputs: Inputs) -> None:
    """Check the precision of a call whose tensors and other options were checked."""
    precision, rotate = given.precision, given.rotate
    if precision is None and rotate is False:
        return
    if precision not in (None, "fp8"):
        error = ValueError if isinstance(precision, str) else TypeError
        refuse("precision", '"fp8", or None (the dtype of the tensors)', _describe(precision), error=error)
    flags(rotate=rotate)
    if precision is None:
        refuse("rotate", 'False without precision="fp8"', rotate, 'Pass precision="fp8", or leave rotate out.')
    for name in ("mask", "bias", "alibi_slopes", "sink"):
        if getattr(inputs, name) is not None:
            refuse(name, 'None with precision="fp8"', "a tensor", "Leave precision out.")
    for name in ("softcap", "dropout_p"):
        if number := getattr(given, name):
            refuse(name, '0 with precision="fp8"', number, "Leave precision out.")
    tensors = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    _fp8_tensors(tensors, 'with precision="fp8"', "leave precision out")


def fp8_keys(key: Tensor, value: Tensor, rotate: bool, cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
    """Check keys and values to quantise, but not the values of `cu_seqlens`."""
    shape = "[B, Tk, Hkv, D]" if cu_seqlens is None else "[Nk, Hkv, D]"
    for name, tensor in (("key", key), ("value", value)):
        _rows(name, tensor, shape, key, "key")
    if value.dtype is not key.dtype:
        refuse("value", f"the key's dtype {key.dtype}", value.dtype, error=TypeError)
    if value.shape != key.shape:
        refuse("value", f"the key's shape {list(key.shape)}", list(value.shape))
    flags(rotate=rotate)
    if cu_seqlens is not None:
        _offsets("cu_seqlens", cu_seqlens, key)
    elif max_seqlen is not None:
        refuse("max_seqlen", "None without cu_seqlens", max_seqlen)
    optional_int("max_seqlen", max_seqlen)
    _fp8_tensors({"key": key, "value": value}, "for FP8 quantisation", "detach the tensors")


def fp8_query(query: Tensor, kv: Any, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> None:
    """Check the tensors of a call on an `Fp8KV`, which was checked when it was made."""
    if not isinstance(kv, Fp8KV):
        refuse("kv", "an Fp8KV", type(kv).__name__, "To make one, call quantize_fp8(key, value).", TypeError)
    if (cu_seqlens_q is None) == kv.packed:
        given = "None" if cu_seqlens_q is None else "a tensor"
        refuse("cu_seqlens_q", "offsets for packed kv" if kv.packed else "None for kv that is not packed", given)
    shape = "[Nq, Hq, D]" if kv.packed else "[B, Tq, Hq, D]"
    _rows("query", query, shape, query)
    _fp8_tensors({"query": query}, "with an Fp8KV", "call attention()")
    if query.device != kv.device:
        refuse("query", f"the device of kv, {kv.device}", query.device)
    if query.shape[-1] != kv.head_dim or (not kv.packed and query.shape[0] != kv.batch):
        batch = "" if kv.packed else f"B={kv.batch}, "
        refuse("query", f"{batch}D={kv.head_dim} to match kv", list(query.shape), f"The layout is {shape}.")
    grouped(query, kv.kv_heads)
    if cu_seqlens_q is not None:
        _offsets("cu_seqlens_q", cu_seqlens_q, query)
        if cu_seqlens_q.shape[0] != kv.batch + 1:
            refuse("cu_seqlens_q", f"as many sequences as kv, shape [{kv.batch + 1}]", list(cu_seqlens_q.shape))
    elif max_seqlen_q is not None:
        refuse("max_seqlen_q", "None without cu_seqlens_q", max_seqlen_q)
    optional_int("max_seqlen_q", max_seqlen_q)


def _fp8_tensors(tensors: dict[str, Tensor], where: str, otherwise: str) -> None:
    """Check what is quantised: its dtype, its head dim, and that no gradient is required."""
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            refuse(name, f"dtype float16 or bfloat16 {where}", tensor.dtype, error=TypeError)
        if tensor.shape[-1] not in FP8_HEAD_DIMS:
            refuse(name, f"D = Dv of 64, 128 or 256 {where}", list(tensor.shape))
        if tensor.shape[-2] < 1:
            refuse(name, f"at least one head {where}", list(tensor.shape))
    if len({tensor.shape[-1] for tensor in tensors.values()}) > 1:
        refuse("value", f"D = Dv of 64, 128 or 256 {where}", list(tensors["value"].shape))
    wanted = [name for name, tensor in tensors.items() if torch.is_grad_enabled() and tensor.requires_grad]
    wanted += _with_tangent(tensors)
    if wanted:
        hint = f"FP8 supports inference only: use torch.no_grad(), or {otherwise}."
        refuse(wanted[0], f"a tensor that does not require a gradient {where}", "one that does", hint)
    if torch._C._are_functorch_transforms_active():
        refuse("query" if "query" in tensors else "key", f"a call outside torch.func transforms {where}", "one inside")


def _with_tangent(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Names of those that forward-mode differentiation has given a tangent."""
    if forward_ad._current_level < 0:
        return []
    given = ((name, t) for name, t in tensors.items() if t is not None)
    return [name for name, tensor in given if forward_ad.unpack_dual(tensor).tangent is not None]


def decoding(inputs: DecodeInputs) -> None:
    """Check the tensors of a call on a cache, whose own fields were checked when it was made."""
    query, _, tree_mask, alibi_slopes, sink, out, *_ = inputs
    cache: Any = inputs.cache
    if not isinstance(cache, (ContiguousKV, PagedKV, QuantizedKV)):
        hint = FP8_HINT if isinstance(cache, Fp8KV) else "To make one, call ContiguousKV(key, value)."
        refuse("cache", "a ContiguousKV, PagedKV or QuantizedKV", type(cache).__name__, hint, TypeError)
    tensor_beside("query", query, query)
    if query.dim() != 4:
        refuse("query", "shape [B, Tq, Hq, D]", list(query.shape))
    batch, q_len, q_heads, dim = query.shape
    if query.dtype is not cache.dtype:
        hint = "Autocast does not convert a cache: call query.to(cache.dtype), or allocate the cache in that dtype."
        refuse("query", f"the cache's dtype {cache.dtype}", query.dtype, hint, TypeError)
    if query.device != cache.device:
        refuse("query", f"the cache's device {cache.device}", query.device)
    if batch != cache.batch or dim != cache.head_dim:
        refuse("query", f"[B={cache.batch}, Tq, Hq, D={cache.head_dim}] to match the cache", list(query.shape))
    grouped(query, cache.kv_heads)
    if tree_mask is not None:
        tensor_beside("tree_mask", tree_mask, query)
        if tree_mask.dtype is not torch.bool:
            refuse("tree_mask", "dtype torch.bool (True = attend)", tree_mask.dtype, error=TypeError)
        if tree_mask.shape != (batch, q_len, q_len):
            hint = "One tree for all rows: tree.expand(B, -1, -1)." if tree_mask.dim() == 2 else ""
            refuse("tree_mask", f"shape [B={batch}, Tq={q_len}, Tq={q_len}]", list(tree_mask.shape), hint)
    per_head(alibi_slopes, sink, query, batch, q_heads)
    if out is not None:
        tensor_beside("out", out, query)
        shape = (batch, q_len, q_heads, cache.value_dim)
        if out.shape != shape or out.dtype is not query.dtype:
            refuse("out", f"{query.dtype} of shape {list(shape)}", f"{out.dtype} of shape {list(out.shape)}")
        if out.is_neg():
            refuse("out", "a materialised tensor", "a negated view", "Call out.resolve_neg().")
        if checks.has_shared_places(out):
            refuse("out", "no overlapping elements", f"an expanded tensor, strides {out.stride()}")


def lengths_and_pages(cache: KVCache, q_len: int, left: int, look: bool | None) -> None:
    """Check the values of a cache's lengths, and that the pages are there which `q_len` queries see that look `left`
    positions back: if asked to `look`, by default on a CPU."""
    lengths = cache.lengths
    if lengths is None:
        return
    if checks.should_validate(look, lengths):
        first = None if left == UNBOUNDED else (lengths.long() - q_len - left).clamp_(min=0)
        cache.validate(first=first)


def without_gradient(function: str, differentiable: str, **given: Any) -> None:
    """Refuse tensors, and a cache of tensors, that require a gradient while gradients are on: none would come."""
    if not torch.is_grad_enabled():
        return
    for name, one in given.items():
        if getattr(one, "requires_grad", False):
            hint = f"{function} is not differentiable: call it under torch.no_grad(), or use {differentiable}."
            refuse(name, "requires_grad=False", "requires_grad=True with gradients enabled", hint)


def without_tangent(hint: str, **given: Tensor | None) -> None:
    """Refuse tensors with a tangent, of forward-mode differentiation: nothing would come of it."""
    for name in _with_tangent(given):
        refuse(name, "a tensor without a tangent", "one with a tangent (forward-mode AD)", hint)


def splits(num_splits: Any, batch_invariant: Any) -> None:
    """Check how a call on a cache wants its keys split."""
    flags(batch_invariant=batch_invariant)
    optional_int("num_splits", num_splits, 1)
    if num_splits is not None and num_splits > 65536:
        refuse("num_splits", "at most 65536", num_splits)


def workspace(given: Tensor | None, query: Tensor, numbers: int) -> None:
    """Check the workspace of a call on a cache that needs so many fp32 numbers."""
    if given is None:
        return
    tensor_beside("workspace", given, query)
    hint = "To make one, call decode_workspace(query, cache) with the same num_splits, batch_invariant and backend."
    if given.dtype is not torch.float32 or given.dim() != 1 or not given.is_contiguous():
        refuse("workspace", "a contiguous 1-D float32 tensor", f"{given.dtype}, {list(given.shape)}", hint)
    if given.numel() < numbers:
        refuse("workspace", f"at least {numbers} elements", given.numel(), hint)
    if given.data_ptr() % 16:
        refuse("workspace", "a 16-byte aligned tensor", f"address {given.data_ptr()}", hint)


def sequence(name: str, given: Any) -> tuple[Any, ...]:
    """What was given as a sequence of tensors, or as one stacked in dim 0."""
    if not isinstance(given, Iterable):
        refuse(name, "a sequence of tensors, or one stacked in dim 0", _describe(given), error=TypeError)
    return tuple(given)


def states(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> None:
    """Check states that are to be merged."""
    if not outs or len(outs) != len(lses):
        refuse("outs and lses", "as many outs as lses, at least one", f"{len(outs)} and {len(lses)}")
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, tensor in ((f"outs[{index}]", out), (f"lses[{index}]", lse)):
            floating(name, tensor, outs[0])
        if out.dim() not in (3, 4) or out.shape != outs[0].shape:
            refuse(f"outs[{index}]", "[B, Tq, Hq, Dv] or [Nq, Hq, Dv], the same for all", list(out.shape))
        *lead, rows, heads, _ = out.shape
        if lse.shape != (*lead, heads, rows):
            refuse(f"lses[{index}]", f"shape {[*lead, heads, rows]} to match its out", list(lse.shape))


def _offsets(name: str, cu_seqlens: Any, beside: Tensor) -> Tensor:
    tensor_beside(name, cu_seqlens, beside)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        refuse(name, "dtype torch.int32 or torch.int64", cu_seqlens.dtype, error=TypeError)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        refuse(name, "shape [sequences + 1]", list(cu_seqlens.shape))
    return cu_seqlens


def whole_int(name: str, given: Any, least: int, hint: str = "") -> None:
    """Refuse what is no int of at least `least`."""
    if not _is_int(given):
        hint = hint or ("Call int() on it, which on a GPU waits for it." if isinstance(given, Tensor) else "")
        refuse(name, "an int", _describe(given), hint, TypeError)
    if given < least:
        refuse(name, f"at least {least}", given)


def optional_int(name: str, given: Any, least: int = 0) -> None:
    """Refuse what is neither None nor an int of at least `least`."""
    if given is not None and not _is_int(given):
        refuse(name, "an int or None", _describe(given), error=TypeError)
    if given is not None and given < least:
        refuse(name, f"at least {least}", given)


def _qkv(
    query: Tensor, key: Tensor, value: Tensor, q_shape: str, k_shape: str, v_shape: str, may_be_empty: bool
) -> None:
    for name, tensor, shape in (("query", query, q_shape), ("key", key, k_shape), ("value", value, v_shape)):
        _rows(name, tensor, shape, query)
        if tensor.dtype not in DTYPES:
            is_fp8 = tensor.is_floating_point() and tensor.element_size() == 1
            hint = 'Pass float16 or bfloat16 with precision="fp8", which quantises them.' if is_fp8 else ""
            refuse(name, "dtype float16, bfloat16, float32 or float64", tensor.dtype, hint, TypeError)
        if tensor.dtype is not query.dtype:
            refuse(name, f"the query's dtype {query.dtype}", tensor.dtype, error=TypeError)
        if not may_be_empty and (tensor.shape[-1] < 1 or tensor.shape[-2] < 1):
            refuse(name, "at least one head and one head dim", list(tensor.shape))
    if key.shape[-1] != query.shape[-1]:
        refuse("key", f"the query's head dim D={query.shape[-1]}", list(key.shape))
    if value.shape[-3] != key.shape[-3] or value.shape[-2] != key.shape[-2]:
        refuse("value", f"the key's length and heads, {list(key.shape[:-1])} + [Dv]", list(value.shape))
    heads = key.shape[-2]
    if (query.shape[-2] % heads if heads else query.shape[-2]) != 0:
        shapes = f"{list(query.shape)} with key {list(key.shape)}"
        words = f"a multiple of the {heads} KV heads as Hq" if heads else "no heads, as the key has none"
        refuse("query", words, shapes, f"The layout is {q_shape}.")


def grouped(query: Tensor, kv_heads: int, hint: str = "") -> None:
    if query.shape[-2] < 1 or query.shape[-2] % kv_heads:
        refuse("query", f"a multiple of the {kv_heads} KV heads as Hq", list(query.shape), hint)


def per_head(alibi_slopes: Tensor | None, sink: Tensor | None, query: Tensor, batch: int, heads: int) -> None:
    if alibi_slopes is not None:
        floating("alibi_slopes", alibi_slopes, query)
        if alibi_slopes.shape not in ((heads,), (batch, heads)):
            refuse("alibi_slopes", f"shape [Hq={heads}] or [B={batch}, Hq={heads}]", list(alibi_slopes.shape))
    if sink is not None:
        floating("sink", sink, query)
        if sink.shape != (heads,):
            refuse("sink", f"shape [Hq={heads}]", list(sink.shape))


def _rows(name: str, tensor: Any, shape: str, beside: Tensor, whose: str = "query") -> None:
    """Check a query, key or value of a shape such as "[B, Tk, Hkv, D]"."""
    tensor_beside(name, tensor, beside, whose)
    if tensor.dim() != 1 + shape.count(","):
        refuse(name, f"shape {shape}", list(tensor.shape))
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        refuse(name, "a contiguous last dim", f"strides {tensor.stride()}", "Call .contiguous() on it first.")


def tensor_beside(name: str, tensor: Any, beside: Tensor, whose: str = "query") -> None:
    is_tensor(name, tensor)
    if tensor.is_nested:
        hint = "Pass query, key and value all jagged, or pack them and call varlen_attention."
        refuse(name, "a strided tensor", "a nested one", hint, TypeError)
    if hasattr(tensor, "device_mesh"):
        refuse(name, "a plain tensor", "a DTensor", "Pass its local shard, .to_local().", TypeError)
    if tensor.layout is not torch.strided:
        refuse(name, "a strided tensor", tensor.layout, error=TypeError)
    if tensor.device != beside.device:
        refuse(name, f"the {whose}'s device {beside.device}", tensor.device)


def floating(name: str, tensor: Any, beside: Tensor, hint: str = "") -> None:
    tensor_beside(name, tensor, beside)
    if tensor.dtype not in DTYPES:
        refuse(name, "a floating dtype (float16, bfloat16, float32 or float64)", tensor.dtype, hint, TypeError)


def _broadcastable(name: str, tensor: Tensor, target: tuple[int, ...]) -> None:
    aligned = tensor.dim() <= 4 and all(
        size == 1 or size == full for size, full in zip(reversed(tensor.shape), reversed(target), strict=False)
    )
    if not aligned:
        hint = f"Pass [B, Tk] as {name}[:, None, None, :], [B, Tq, Tk] as {name}[:, None]." if tensor.dim() < 4 else ""
        refuse(name, f"broadcastable to [B, Hq, Tq, Tk] = {list(target)}", list(tensor.shape), hint)


def real(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, (int, float, torch.SymInt, torch.SymFloat)):
        refuse(name, "a number", _describe(number), error=TypeError)
    if not -math.inf < number < math.inf:  # unlike math.isfinite, traceable for a symbolic float
        refuse(name, "a finite number", number)


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def _describe(x: Any) -> str:
    return f"{x.dtype} tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"{x!r} ({type(x).__name__})"
