"""Gradient checkpointing: the backward recomputes activations instead of saving them, except those of attention.

Attention is the most expensive part of a block to recompute, quadratic where everything else is linear, and the
cheapest to save: one output and one LSE per row and head. So the policy here saves `(out, lse)` of every call of
`attention` and `varlen_attention` and recomputes the rest. The forward is a library op (dispatch/torch_ops.py), which
selective checkpointing sees; it would not see an autograd.Function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..base.errors import check_int, refuse
from ..dispatch.torch_ops import forward_op

_OPTIONS = (
    *(name for name, one in signature(checkpoint).parameters.items() if one.kind is one.KEYWORD_ONLY),
    "preserve_rng_state",  # which torch takes from its **kwargs
)
"""The options of torch.utils.checkpoint.checkpoint."""


def stream_checkpoint_policy(also: Iterable[torch._ops.OpOverload] = ()) -> dict[str, Any]:
    """Options for `torch.utils.checkpoint.checkpoint` that save the results of attention and recompute the rest.

    `also`: further ops whose results are saved, such as `torch.ops.aten.mm.default`. Pass the options to any function
    that forwards them to torch's: `gradient_checkpoint_sequential(..., **stream_checkpoint_policy())`, or a
    transformers model's `gradient_checkpointing_enable(stream_checkpoint_policy())`. Under `torch.compile` the
    partitioner follows the policy.

    Saved tensors must not be written to before the backward: torch raises where they were.

    >>> import torch
    >>> from stream_attention import attention
    >>> from torch.utils.checkpoint import checkpoint
    >>> query, key, value = torch.randn(3, 1, 64, 4, 16).requires_grad_()
    >>> def block(query):
    ...     return attention(query.tanh(), key, value)  # tanh runs twice, attention once
    >>> checkpoint(block, query, **stream_checkpoint_policy()).sum().backward()
    """
    kept: tuple[Any, ...] = (forward_op, *also)
    for op in kept:
        if not isinstance(op, torch._ops.OpOverload):
            hint = "An op has overloads: torch.ops.aten.mm.default is one."
            refuse("also", "torch ops with their overload", repr(op), hint, TypeError)
    policy = save_attention if len(kept) == 1 else partial(_save, frozenset(kept))
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy)}


def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy itself, for `create_selective_checkpoint_contexts` and for policies that ask this one first."""
    return _save((forward_op,), ctx, op, *args, **kwargs)


def _save(kept: Iterable[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def gradient_checkpoint_sequential(
    functions: nn.Sequential | nn.ModuleList | Sequence[Callable[..., Any]], segments: int, *args: Any, **kwargs: Any
) -> Any:
    """Call functions one after another, and save for the backward only the inputs of each of `segments` groups of them.

    The backward recomputes a segment when it needs it, so the memory is that of the segments' inputs and of one
    segment: least at about the square root of the number of functions. Gradients are those of plain calls, bit for bit
    where the functions are deterministic; random numbers are reproduced.

    Args:
        functions: each is called with the result of the one before it, a tuple as several arguments.
        segments: from 1 to the number of functions, which are divided evenly among them.
        args: arguments of the first function.
        kwargs: options of `torch.utils.checkpoint.checkpoint`, `**stream_checkpoint_policy()` for instance;
            `use_reentrant` is False by default. Keywords for the functions would be ambiguous: bind them with
            functools.partial.

    >>> import torch
    >>> from torch import nn
    >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    >>> gradient_checkpoint_sequential(layers, 3, torch.randn(2, 8)).sum().backward()
    """
    steps: tuple[Any, ...] = tuple(functions)
    for step in steps:
        if not callable(step):
            refuse("functions", "callables", type(step).__name__, error=TypeError)
    if not 1 <= check_int("segments", segments) <= len(steps):
        refuse("segments", f"1 to the number of functions, {len(steps)}", segments)
    unknown = sorted(set(kwargs) - set(_OPTIONS))
    if unknown:
        hint = "Bind arguments of the functions with functools.partial."
        refuse(", ".join(unknown), f"options of torch's checkpoint ({', '.join(_OPTIONS)})", "others", hint, TypeError)
    options = {"use_reentrant": False, **kwargs}
    values: Any = args
    for index in range(segments):
        run = partial(_run, steps[index * len(steps) // segments : (index + 1) * len(steps) // segments])
        values = checkpoint(run, *_arguments(values), **options)
    return values


def _run(steps: Sequence[Callable[..., Any]], *values: Any) -> Any:
    result: Any = values
    for step in steps:
        result = step(*_arguments(result))
    return result


def _arguments(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
