"""Gradient checkpointing: what a backward needs is computed again in place of being kept, but for attention itself.

Attention is the worst part of a block to compute twice, quadratic where everything else is linear, and the cheapest to
keep: one output and one number per row and head. So the policy here keeps `(out, lse)` of every call of `attention`
and `varlen_attention` and recomputes the rest. It can, because the forward is a library op (ops/library.py), which
selective checkpointing sees; an autograd.Function it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import refuse
from ..ops.library import forward_op

_OPTIONS = (
    *(name for name, one in signature(checkpoint).parameters.items() if one.kind is one.KEYWORD_ONLY),
    "preserve_rng_state",  # which torch takes from its **kwargs
)
"""What torch.utils.checkpoint.checkpoint takes beside the function and its arguments."""


def stream_checkpoint_policy(also: Iterable[torch._ops.OpOverload] = ()) -> dict[str, Any]:
    """Options for `torch.utils.checkpoint.checkpoint` that keep what attention computed and recompute the rest.

    `also`: further ops to keep, such as `torch.ops.aten.mm.default`. The result may be passed on to whatever passes its
    keywords to torch's function: `gradient_checkpoint_sequential(..., **stream_checkpoint_policy())`, or a transformers
    model's `gradient_checkpointing_enable(stream_checkpoint_policy())`. Works under `torch.compile` too, where the
    partitioner obeys it.

    What is kept must not be written to before the backward: torch raises where it was.

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
    """Call functions one after another, and keep for the backward only what goes into each of `segments` runs of them.

    The backward computes a segment again when it gets there, so the memory is that of the segments' inputs and of one
    segment: least at about the square root of the number of functions. Gradients are those of plain calls, bit for bit
    where the functions give the same bits again; random numbers are drawn again as they were.

    Args:
        functions: each is called with what the one before it returned, a tuple as several arguments.
        segments: 1 to as many as there are functions; they are divided as evenly as can be.
        args: arguments of the first function.
        kwargs: options of `torch.utils.checkpoint.checkpoint`, `**stream_checkpoint_policy()` for instance;
            `use_reentrant` is False unless it is said. Keywords for the functions would be ambiguous: bind them with
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
    if isinstance(segments, bool) or not isinstance(segments, int):
        refuse("segments", "an int", f"{segments!r} ({type(segments).__name__})", error=TypeError)
    if not 1 <= segments <= len(steps):
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
