"""attention(): exact dense attention, and what it shares with its packed sibling."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..base.errors import refuse
from ..base.problem import AUTO, UNBOUNDED, CallOptions, Inputs, gradient_of, sides_of
from ..base.score_function import ScoreFunction, ScoreMod
from ..dispatch import call_key, launch_cache, validate
from ..dispatch.flops import register_flop_formulas
from ..dispatch.plan import plan, requested
from ..dispatch.prepare import problem_of
from ..dispatch.torch_ops import forward_op
from ..masks.lowering import lowered
from ..masks.mask import Mask


class Options(TypedDict, total=False):
    """To a type checker: the keywords of `attention` and `varlen_attention`, but for those of one of them."""

    causal: bool
    window: tuple[int, int] | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    softcap: float
    scale: float | None
    dropout_p: float
    seed: int | Tensor | None
    deterministic: bool | None
    precision: str | None
    rotate: bool
    backend: str


class DenseOptions(Options, total=False):
    mask: Tensor | Mask | None
    bias: Tensor | None
    score_mod: ScoreMod | None


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[DenseOptions]
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[DenseOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Unpack[DenseOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
@validate.refuses_foreign
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *unexpected: Any,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    mask: Tensor | Mask | None = None,
    bias: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    precision: str | None = None,
    rotate: bool = False,
    backend: str = "auto",
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention in one streaming pass over the keys, O(N) memory, differentiable in every float argument.

    The order of the maths: scale, softcap, score_mod, + bias + ALiBi, causal and window and mask, softmax with the
    sink, dropout, times V. Everything composes. A row that sees no key gives 0, with zero gradients.

    Args:
        query: `[B, Tq, Hq, D]`, fp16, bf16, fp32 or fp64; any strides with a contiguous last dim. Tensors that look
            like `[B, H, T, D]` are computed as they are, with a warning, once in a process. A jagged nested tensor
            `[B, j, Hq, D]`, beside such keys and values, is a pack as of `varlen_attention`; so are the results.
            DTensors may be sharded by batch or heads; results are sharded likewise.
        key: `[B, Tk, Hkv, D]`; query head h reads KV head h // (Hq / Hkv).
        value: `[B, Tk, Hkv, Dv]`.
        causal: query i sees keys j <= i + Tk - Tq (bottom-right).
        window: `(left, right)`: also j in [i + Tk - Tq - left, i + Tk - Tq + right]; -1 = unbounded on that side.
        mask: a `Mask` of `stream_attention.masks`, whose tiles without a visible score are skipped; or bool, True =
            attend, broadcastable to `[B, Hq, Tq, Tk]`, never expanded in memory.
        bias: float, added to the scores, broadcastable likewise; -inf masks a key. To mask a whole row use -inf, not
            a huge number: the LSE of such a row is too coarse for the gradient.
        score_mod: `f(score, b, h, q_idx, kv_idx) -> score`, as of FlexAttention: in torch operations on tensors of no
            dimension, h the query head; of visible scores alone, and -inf masks a key. Tensors that it reads get
            gradients. Runs in plain torch, on a GPU too.
        alibi_slopes: `[Hq]` or `[B, Hq]`: adds -slope * |i + Tk - Tq - j|.
        sink: `[Hq]`: one extra logit per head in the denominator, with no value.
        softcap: c > 0 turns scaled scores s into c * tanh(s / c); a number that fp32 holds, as is the scale.
        scale: default D ** -0.5; 0.0 is a legal scale.
        dropout_p: probability in [0, 1) of dropping an attention weight; survivors are scaled by 1 / (1 - p).
        seed: an int, or an int64 tensor (seed, offset) on the query's device; None draws one there.
        deterministic: outputs and gradients bit-equal from run to run; None follows
            `torch.use_deterministic_algorithms`.
        return_lse: also return the log of the softmax denominator, `[B, Hq, Tq]`, natural log, sink included.
        precision: None computes in that of the tensors. "fp8", for inference, computes from e4m3 values with a scale
            for every 64 queries and 128 keys of a head: fp16 or bf16, D = Dv of 64, 128 or 256, causal, window and
            scale; the other modifiers and gradients are refused.
        rotate: with "fp8", rotate queries and keys by a Hadamard matrix first, against outlier channels.
        backend: "auto", or the name of the backend that must do it; "triton(block_m=64)" also forces a tile.

    Returns:
        `[B, Tq, Hq, Dv]` in the query's dtype, or `(out, lse)`.

    Raises:
        ValueError, TypeError: a bad argument, before any work; the message names it with expected and actual.
        UnsupportedProblem: the backend that was named does not support the call, or no backend supports "fp8" here;
            the message says why.

    >>> import torch
    >>> from stream_attention import attention
    >>> query, key, value = torch.randn(3, 2, 128, 8, 64)
    >>> attention(query, key[:, :, :2], value[:, :, :2], causal=True, window=(63, 0)).shape
    torch.Size([2, 128, 8, 64])
    """
    if unexpected or foreign:
        validate.unexpected(attention, unexpected, foreign)
    bounds: tuple[Tensor | None, Tensor | None] = (None, None)
    if isinstance(mask, Mask):
        mask, bounds, causal, window = as_op_takes(mask, query, key, causal, window, backend)
    tensors: tuple[Any, ...] = query, key, value, mask, bias, alibi_slopes, sink
    options = causal, window, softcap, scale, dropout_p, seed, deterministic, return_lse, backend, precision, rotate
    if score_mod is not None:
        from .score import scored

        return scored(score_mod, Inputs(*tensors)._replace(query_bounds=bounds[0], key_bounds=bounds[1]), options)
    found = None
    if launch_cache.ENABLED and not call_key.is_watched():
        found = look_up(tensors, options, bounds=bounds)
        if found is not None and found.call is not None:
            if found.call.looks_transposed and not _warned_of_layout:
                _warn_of_layout(query)
            return found.compute(return_lse)
    if type(query) is not Tensor or query.is_nested:
        elsewhere = _subclass_call(query)
        if elsewhere is not None:
            return elsewhere(dict(zip(TENSORS, tensors, strict=True)), dict(zip(OPTIONS, options, strict=True)))
    given = CallOptions(*options)
    inputs = Inputs(*tensors)._replace(query_bounds=bounds[0], key_bounds=bounds[1])
    arguments = op_arguments(checked(inputs, given, validate.attention_tensors), given)
    looks_transposed = not torch.compiler.is_compiling() and validate.looks_transposed(query, key)
    if looks_transposed and not _warned_of_layout:
        _warn_of_layout(query)
    return compute(arguments, given, found)


class Found(NamedTuple):
    """A call in the launch cache: its key, what was prepared for it before, if anything, and its tensors."""

    key: call_key.Key
    call: launch_cache.PreparedCall | None
    inputs: Inputs
    seed_number: int | None  # of a call with dropout whose seed is no tensor

    def compute(self, return_lse: bool) -> Any:
        assert self.call is not None
        inputs = self.inputs
        if self.seed_number is not _NO_DROPOUT:
            inputs = inputs._replace(seed=seed_tensor(self.seed_number, inputs.query))
        out, lse = self.call(inputs, return_lse)
        return (out, lse) if return_lse else out


_NO_DROPOUT: Any = object()
OPTIONS = CallOptions._fields
TENSORS = Inputs._fields[:7]  # those of `attention`


def compute(arguments: tuple[Any, ...], options: CallOptions, found: Found | None) -> Any:
    """Compute a call that was checked, as `arguments` of the op, and keep it where it was looked up."""
    from . import fp8

    in_fp8, lse = options.precision is not None, None
    if found is None:
        out, lse = fp8.call(arguments, options.rotate) if in_fp8 else call(arguments)
    else:
        prepared = fp8.prepare(arguments, options.rotate) if in_fp8 else launch_cache.prepare(arguments)
        inputs = Inputs._make(arguments[: len(Inputs._fields)])
        launch_cache.keep_prepared(found.key, prepared, inputs)
        out, lse = prepared(inputs, options.return_lse)
    return (out, lse) if options.return_lse else out


def look_up(
    tensors: tuple[Any, ...],
    options: tuple[Any, ...],
    cu_seqlens: tuple[Any, Any] = (None, None),
    lengths: tuple[int, int] = (0, 0),
    bounds: tuple[Any, Any] = (None, None),
) -> Found | None:
    """What the launch cache has of a call, whose tensors may be anything still; None where it must be checked first and
    is not kept."""
    query, key, value, mask, bias, slopes, sink = tensors
    if not isinstance(query, Tensor) or query.is_nested or query.dim() < 3:
        return None
    others = call_key.options_of(query.shape[-1], options)
    if others is None:
        return None
    if torch._C._is_any_autocast_enabled():
        query, key, value = in_autocast_dtype(query, key, value)
    dropout_p, seed = options[4:6]
    if mask is not None or bias is not None or slopes is not None or sink is not None or isinstance(seed, Tensor):
        for t in (*tensors[3:], None if isinstance(seed, int) else seed):
            if t is not None and (not isinstance(t, Tensor) or t.layout is not torch.strided):
                return None
        mask, bias, slopes = leading_ones(mask, 4), leading_ones(bias, 4), _contiguous(leading_ones(slopes, 2))
        sink = _contiguous(sink)
    seed_number = _NO_DROPOUT
    if dropout_p and not isinstance(seed, Tensor):
        seed_number, seed = seed, None
    inputs = Inputs(query, key, value, mask, bias, slopes, sink, _contiguous(seed), *cu_seqlens, *bounds)
    key_options = others
    if options[9] is not None or options[10] is not False:
        precision, rotate = options[9:]
        if precision != "fp8" or type(precision) is not str or type(rotate) is not bool:
            return None
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (query, key, value)):
            return None  # to be refused
        key_options = *others, precision, rotate
    elif cu_seqlens[0] is not None:
        lengths = launch_cache.planned_lengths(lengths)
    cache_key = call_key.key_of(inputs, lengths, key_options)
    if cache_key is None:
        return None
    call = launch_cache.find(cache_key, inputs, cache_key.lengths, others)
    return Found(cache_key, call, inputs, seed_number)


def as_op_takes(
    mask: Mask, query: Any, key: Any, causal: Any, window: Any, backend: Any
) -> tuple[Any, tuple[Tensor | None, Tensor | None], Any, Any]:
    """A mask of a call in the form of the op: dense mask, intervals, causal and window. As it is where tensors will be
    refused."""
    if hasattr(query, "device_mesh"):
        hint = "Pass mask.as_dense(...) as a replicated DTensor, or call it on the local shards: x.to_local()."
        refuse("mask", "a bool tensor with DTensors", "a Mask", hint, TypeError)
    if not all(isinstance(t, Tensor) and not t.is_nested and t.dim() == 4 for t in (query, key)):
        return mask, (None, None), causal, window
    validate.options(CallOptions(causal, window), query)
    batch, q_len, heads, _ = query.shape
    k_len = key.shape[1]
    if mask.device not in (None, query.device):
        hint = f"Pass mask.to({str(query.device)!r})."
        refuse("mask", f"tensors on the query's device {query.device}", mask.device, hint)
    mask.check(q_len, k_len, batch, heads)
    if requested(backend) == "reference":
        return mask.as_dense(q_len=q_len, k_len=k_len).to(query.device), (None, None), causal, window
    (left, right), dense, *bounds = lowered(mask, q_len, k_len, query.device, sides_of(causal, window))
    return dense, (bounds[0], bounds[1]), False, (left, right)


def _subclass_call(query: Any) -> Callable[..., Any] | None:
    """Who computes a call whose query is more than a plain tensor; None if it is not."""
    if not isinstance(query, Tensor):
        return None
    if query.is_nested:
        from .nested import nested_attention

        return nested_attention
    if hasattr(query, "device_mesh"):
        from .dtensor import dtensor_attention

        return partial(dtensor_attention, attention)
    return None


_warned_of_layout = False
"""Whether this process was told that tensors look transposed: once is enough, and every call would ask."""


def _warn_of_layout(query: Tensor) -> None:
    """Warn who called `attention` that the layout looks wrong. Our own callers have checked theirs."""
    global _warned_of_layout
    if sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] == "stream_attention":
        return
    _warned_of_layout = True
    _, q_len, heads, _ = query.shape
    warnings.warn(
        f"attention: query {list(query.shape)} looks like [B, H, T, D]; expected [B, T, H, D]. It is computed as "
        f"Tq={q_len}, Hq={heads}. Pass query, key and value as x.transpose(1, 2); a view is fine",
        stacklevel=3,
    )


def prepare_attention(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> tuple[Any, ...]:
    """Check a call of `attention` and turn it into arguments of the library op; nothing is computed."""
    if isinstance(others.get("mask"), Mask):
        asked = (others["mask"], query, key, *map(others.get, ("causal", "window", "backend")))
        mask, bounds, causal, window = as_op_takes(*asked)
        others |= {"mask": mask, "causal": causal, "window": window}
    else:
        bounds = None, None
    inputs, options = Inputs(query, key, value, *map(others.get, TENSORS[3:])), CallOptions.of(others)
    inputs = inputs._replace(query_bounds=bounds[0], key_bounds=bounds[1])
    return op_arguments(checked(inputs, options, validate.attention_tensors), options)


def checked(inputs: Inputs, options: CallOptions, check: Callable[..., None], *max_seqlens: int | None) -> Inputs:
    """Check a call, its tensors by `check`; returns its inputs, in autocast's dtype."""
    query, key, value = in_autocast_dtype(*inputs[:3])
    inputs = inputs._replace(query=query, key=key, value=value)
    check(inputs, *max_seqlens, may_be_empty=True)
    validate.options(options, query)
    validate.precision(options, inputs)
    return inputs


def op_arguments(inputs: Inputs, options: CallOptions, q_len: int = 0, k_len: int = 0) -> tuple[Any, ...]:
    """The flat arguments of the library ops, every default made explicit, of tensors that were checked.

    The small tensors are contiguous from here on: kernels read them without strides.
    """
    causal, window, softcap, scale, dropout_p, seed, deterministic, _, backend, _, _ = options
    left, right = (min(side, call_key.FAR_SIDE) for side in window or (UNBOUNDED, UNBOUNDED))
    scale = max(inputs.query.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    inputs = inputs._replace(
        mask=leading_ones(inputs.mask, 4),
        bias=leading_ones(inputs.bias, 4),
        alibi_slopes=_contiguous(leading_ones(inputs.alibi_slopes, 2)),
        sink=_contiguous(inputs.sink),
        seed=_contiguous(seed_tensor(seed, inputs.query)) if dropout_p else None,
        cu_seqlens_q=_contiguous(inputs.cu_seqlens_q),
        cu_seqlens_k=_contiguous(inputs.cu_seqlens_k),
        query_bounds=_contiguous(inputs.query_bounds),
        key_bounds=_contiguous(inputs.key_bounds),
    )
    numbers = float(softcap), scale, float(dropout_p)
    return (*inputs, q_len, k_len, causal, left, right, *numbers, deterministic, requested(backend))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def call(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)`: through the library op, or densely in plain torch for the reference."""
    backend = arguments[-1]
    if backend == "reference":
        return call_reference(arguments)
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack():
        register_flop_formulas()  # here too: in inference mode the op has no Autograd key
    if backend != AUTO and not torch.compiler.is_compiling() and torch.is_grad_enabled():
        inputs = arguments[: len(Inputs._fields)]
        if any(t is not None and t.requires_grad for t in inputs):
            problem, tensors, _ = problem_of(launch_cache.as_planned(arguments))
            plan(gradient_of(problem, tensors), backend)  # refuse now, not in the backward
    return forward_op(*arguments)


def call_reference(arguments: tuple[Any, ...], function: ScoreFunction | None = None) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` densely."""
    from ..backends.reference import attention as reference

    problem, inputs, _ = problem_of(arguments)
    options: dict[str, Any] = {name: getattr(inputs, name) for name in ("alibi_slopes", "sink", "seed")}
    options |= {name: getattr(problem, name) for name in ("softcap", "scale", "dropout_p")}
    options["window"] = tuple(problem.window)
    if problem.packed:
        if inputs.alibi_slopes is not None and inputs.alibi_slopes.shape[0] == 1:
            options["alibi_slopes"] = inputs.alibi_slopes[0]  # one for all sequences, as the caller gave it
        options |= {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
        out, lse = reference.varlen_attention(*inputs[:3], **options)
    else:
        options |= {"mask": inputs.mask, "bias": inputs.bias, "score_function": function}
        out, lse = reference.attention(*inputs[:3], **options)
    return out.to(problem.out_dtype), lse.to(problem.state_dtype)


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, fp16/bf16/fp32 tensors in its dtype, as SDPA takes them; else the tensors as they are."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):  # is_autocast_available does not trace in torch 2.11
        return tensors
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in narrow else t for t in tensors)


def seed_tensor(seed: int | Tensor | None, query: Tensor) -> Tensor:
    """(seed, offset) as int64 on the query's device, without a host synchronisation."""
    if isinstance(seed, Tensor):
        return seed
    if seed is None:
        return torch.randint(1 << 62, (2,), dtype=torch.int64, device=query.device)
    pair = torch.zeros(2, dtype=torch.int64, device=query.device)
    pair[:1].fill_(seed)  # an assignment would copy from the host, and wait
    return pair


def leading_ones(tensor: Tensor | None, dims: int) -> Tensor | None:
    """A view with dims of size 1 in front, until there are `dims`; itself, if there are."""
    if tensor is None or tensor.dim() >= dims:
        return tensor
    return tensor[(None,) * (dims - tensor.dim())]
