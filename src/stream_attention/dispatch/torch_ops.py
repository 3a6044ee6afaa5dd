"""The two library ops, `stream_attention::forward` and `::backward`: one autograd boundary for dense and packed calls.

Why in this form: `Library.define` with an `autograd.Function` on the Autograd key costs a quarter of what
`torch.library.custom_op` with `register_autograd` does per call, and torch.compile, export, opcheck and selective
checkpointing see the op all the same. Forward always returns `(out, lse)`; both are differentiable. `torch.func`'s
grad and vjp work as they do on an ATen op, vmap folds or loops; second derivatives and forward mode are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ..base.problem import Inputs, Wanted
from ..gpu.scratch import empty
from . import call_key, launch_cache
from .flops import register_flop_formulas

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? query_bounds, Tensor? key_bounds, "
    "SymInt q_len, SymInt k_len, bool causal, SymInt window_left, SymInt window_right, float softcap, float scale, "
    "float dropout_p, bool deterministic, str backend"
)
_INPUTS = len(Inputs._fields)
_DIFFERENTIABLE = tuple(Inputs._fields.index(name) for name in Wanted._fields)

_library = torch.library.Library("stream_attention", "DEF")
_library.define(f"forward({_ARGUMENTS}) -> (Tensor out, Tensor lse)")
_library.define(
    "backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[] wanted, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
forward_op = torch.ops.stream_attention.forward.default
backward_op = torch.ops.stream_attention.backward.default


def _forward(call: launch_cache.PreparedCall, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    return call.forward(Inputs._make(arguments[:_INPUTS]), True)


def _backward(
    call: launch_cache.PreparedCall,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    wanted: list[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = call.backward(Inputs._make(arguments[:_INPUTS]), (out, lse, grad_out, grad_lse), tuple(wanted))
    return tuple(
        [
            grad if want and grad is not None else empty(out, (0,), (1,), out.dtype)
            for grad, want in zip(grads, wanted, strict=True)
        ]
    )


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, value = arguments[0], arguments[2]
    *lead, rows, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    out = query.new_empty((*lead, rows, heads, value.shape[-1]))
    return out, query.new_empty((*lead, heads, rows), dtype=lse_dtype)


def _fake_backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, lse: Tensor, wanted: list[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    sources = (arguments[place] for place in _DIFFERENTIABLE)
    return tuple(
        source.new_empty(source.shape) if want else out.new_empty(0)
        for source, want in zip(sources, wanted, strict=True)
    )


class _Attention(_SingleLevelFunction):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _below_autograd(forward_op, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:_INPUTS], *output)
        ctx.options = inputs[_INPUTS:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[place] for place in _DIFFERENTIABLE]
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if grad_out is not None or grad_lse is not None:
            grads = backward_op(grad_out, grad_lse, out, lse, wanted, *tensors, *ctx.options)
            for place, grad, want in zip(_DIFFERENTIABLE, grads, wanted, strict=True):
                result[place] = grad if want else None
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        _refuse_derivative("forward-mode derivative")


class _Backward(_SingleLevelFunction):
    """Makes the backward op a leaf of the graph that says why it has no gradient of its own."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _below_autograd(backward_op, arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        _refuse_derivative("second derivative")

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        _refuse_derivative("second derivative")


def _refuse_derivative(which: str) -> NoReturn:
    raise NotImplementedError(
        f"attention has no {which} on the streaming backends. "
        'Pass backend="reference": dense, O(Tq * Tk) memory, differentiable any number of times, in either mode. '
        "With the modules, call StreamMultiheadAttention with need_weights=True, or create StreamAttention with "
        "StreamAttentionConfig(enable_flash_attention=False)."
    )


def _kernel(compute: Any, inputs_at: int) -> Callable[..., Any]:
    """What an op, whose `Inputs` start at argument `inputs_at`, does below autograd."""

    def kernel(*arguments: Any) -> Any:
        return compute(launch_cache.prepared(arguments[inputs_at:]), *arguments)

    return kernel


def _autograd_kernel(op: Any, function: Any, compute: Any, inputs_at: int) -> Callable[..., Any]:
    """What `op` does on the Autograd key: one node `function` in the graph, if there is a graph.

    A compiled graph has its own: there `compute`, as the kernel below does it, is called at once, and not through the
    dispatcher, which would turn 20 arguments into C++ and back. Not where an input is more than its memory: it has no
    key."""
    # autograd.Function.apply would bind the signature anew each call (17 us), and under torch.func would start over at
    # the top of its levels. That of its base class, which `function` extends, records at the level that dispatched here
    # and no other, as an ATen op does.
    apply = function.apply

    def kernel(*arguments: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            register_flop_formulas()
        differentiable = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not differentiable and forward_ad._current_level < 0:
            with torch._C._AutoDispatchBelowAutograd():
                call = None
                given = (t for t in arguments[:inputs_at] if isinstance(t, Tensor))
                if not call_key.is_watched() and all(map(call_key.layout_of, given)):
                    call = launch_cache.kept(arguments[inputs_at:])
                return op(*arguments) if call is None else compute(call, *arguments)
        if not torch._C._are_functorch_transforms_active():
            return apply(*arguments)
        with enable_single_level_autograd_function():
            return apply(*arguments)

    return kernel


def _below_autograd(op: Any, arguments: tuple[Any, ...]) -> Any:
    """Go on to the next kernel, gradients on again: a Function turns them off, outer levels of torch.func want them.

    Below what tracks views too, as an ATen op: of an output that is a view, as that of torch's CPU op, autograd would
    refuse a change in place at once and with other words than SDPA's.
    """
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowADInplaceOrView():
        return op(*arguments)


def _vmap_rule(op: Any, inputs_at: int) -> Callable[..., Any]:
    """How `op`, whose `Inputs` start at argument `inputs_at`, is mapped over a dim, with the results of a Python loop.

    Query, key and value alone fold the dim into their batch. Everything else is that loop: a batch index would be
    another in dropout, and gradients of bias, slopes and sinks would be summed over the mapped dim.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        if size == 0:
            raise ValueError("vmap: expected a mapped dim of at least 1; got 0")
        if all(t is None for t in arguments[inputs_at + 3 : inputs_at + _INPUTS]):
            folded = op(*(_fold(a, dim, size) for a, dim in zip(arguments, in_dims, strict=True)))
            results = tuple(t.unflatten(0, (size, t.shape[0] // size)) for t in folded)
        else:
            picked = [[_pick(a, dim, i) for a, dim in zip(arguments, in_dims, strict=True)] for i in range(size)]
            results = tuple(torch.stack(ts) for ts in zip(*(op(*one) for one in picked), strict=True))
        return results, (0,) * len(results)

    return rule


def _fold(argument: Any, dim: int | None, size: int) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    mapped = argument.expand(size, *argument.shape) if dim is None else argument.movedim(dim, 0)
    return mapped.flatten(0, 1)


def _pick(argument: Any, dim: int | None, index: int) -> Any:
    return argument.select(dim, index) if isinstance(argument, Tensor) and dim is not None else argument


for _name, _op, _compute, _fake, _function, _inputs_at in (
    ("forward", forward_op, _forward, _fake_forward, _Attention, 0),
    ("backward", backward_op, _backward, _fake_backward, _Backward, 5),
):
    _library.impl(_name, _kernel(_compute, _inputs_at), "CompositeExplicitAutograd")
    _library.impl(_name, _autograd_kernel(_op, _function, _compute, _inputs_at), "Autograd")
    torch.library.register_fake(f"stream_attention::{_name}", _fake, lib=_library)
    torch.library.register_vmap(f"stream_attention::{_name}", _vmap_rule(_op, _inputs_at), lib=_library)
register_flop_formulas()
