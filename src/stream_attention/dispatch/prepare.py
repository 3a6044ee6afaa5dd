"""From the arguments of an op to prepared launches: the problem, its plan, and what a backend makes of both."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from ..backends import BY_NAME, installed
from ..base.graph_break import graph_break
from ..base.problem import (
    Backward,
    Forward,
    Gradients,
    Inputs,
    Problem,
    Request,
    Results,
    Wanted,
    padded_to,
    state_problem,
)
from .plan import Plan

_INPUTS = len(Inputs._fields)


def problem_of(arguments: tuple[Any, ...]) -> tuple[Problem, Inputs, str]:
    """Split the flat arguments of an op into the problem they state, its tensors, and the backend asked for."""
    q_len, k_len, causal, left, right, softcap, scale, dropout_p, deterministic, backend = arguments[_INPUTS:]
    inputs = Inputs(*arguments[:_INPUTS])
    problem = state_problem(inputs, q_len, k_len, causal, (left, right), softcap, scale, dropout_p, deterministic)
    return problem, inputs, backend


def prepare_forward(planned: Plan, inputs: Inputs) -> Forward:
    """The planned forward of every call whose tensors lie as these `inputs` do."""
    warn_if_lacking(planned)
    problem, value_dim = planned.problem, inputs.value.shape[-1]
    backend = BY_NAME[planned.backend]
    forward = backend.prepare(problem, _padded(inputs, problem), planned.config)
    if not backend.compiles:
        forward = without_autocast(forward, problem.device.type)
    if planned.padded_from is None:
        return forward

    def run(inputs: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        out, lse = forward(_padded(inputs, problem), with_lse)
        return out[..., :value_dim].contiguous(), lse

    return run


_warned: set[str] = set()
_warn = graph_break("a warning is shown")(warn)


def warn_if_lacking(planned: Plan) -> None:
    """Warn, once in a process, where a call misses a faster backend for a reason of the installation alone, and say
    what to type."""
    problem = planned.problem
    if problem.device.type != "cuda" or (torch.compiler.is_compiling() and not BY_NAME[planned.backend].compiles):
        return  # torch's ops are traced: a warning would break the graph
    for name, reasons in planned.passed_over:
        backend, (reason, *more) = BY_NAME[name], reasons
        if (
            more
            or not isinstance(reason, installed.Lacking)
            or (command := installed.remedy(name, problem)) is None
            or any(applies for applies, _ in backend.reasons(problem, Request()))
            or backend.why_named_only(problem)
        ):
            continue
        if reason not in _warned:
            _warned.add(reason)
            runs = f'stream_attention: {problem.kind} runs on backend "{planned.backend}", not on "{name}"'
            others = "; or set STREAM_ATTENTION_HOPPER to on (run them anyway) or off (say no more)"
            has_setting = name == "gluon" and installed.HAS_TRITON
            _warn(f"{runs}: {reason}. To change that: {command}{others if has_setting else ''}")
        return


def run_forward(planned: Plan, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute a planned forward."""
    out, lse = prepare_forward(planned, inputs)(inputs, True)
    assert lse is not None
    return out, lse


def prepare_backward(planned: Plan, inputs: Inputs, given: Results, wanted: Wanted) -> Backward:
    """The planned backward of every call whose tensors lie as these do. Kernels read rows of `out` and `grad_out`
    element after element; an expanded gradient, such as that of sum(), is copied."""
    warn_if_lacking(planned)
    problem = planned.problem
    read, saved = _padded(inputs, problem), _as_kernels_read(planned, *given)
    backend = BY_NAME[planned.backend]
    backward = backend.prepare_backward(problem, read, planned.config, *saved, wanted=wanted)
    if not backend.compiles:
        backward = _contiguous(without_autocast(backward, problem.device.type))
    if all(one is other for one, other in zip((*inputs, *given), (*read, *saved), strict=True)):
        return backward

    def run(inputs: Inputs, *given: Any) -> Gradients:
        grads = backward(_padded(inputs, problem), *_as_kernels_read(planned, *given))
        query, key, value = (
            None if grad is None else grad[..., : t.shape[-1]].contiguous()
            for grad, t in zip(grads[:3], inputs[:3], strict=True)
        )
        return grads._replace(query=query, key=key, value=value)

    return run


def run_backward(planned: Plan, inputs: Inputs, *given_and_wanted: Any) -> Gradients:
    """Compute a planned backward, of `Results` and of the gradients wanted."""
    *given, wanted = given_and_wanted
    return prepare_backward(planned, inputs, tuple(given), wanted)(inputs, *given)


def _padded(inputs: Inputs, problem: Problem) -> Inputs:
    """Query, key and value with zeros behind them, as wide as the problem's."""
    query, key = (padded_to(t, problem.head_dim) for t in inputs[:2])
    return inputs._replace(query=query, key=key, value=padded_to(inputs.value, problem.value_dim))


def _as_kernels_read(planned: Plan, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Results:
    if out.stride(-1) != 1:
        out = out.contiguous()
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    out, grad_out = (padded_to(t, planned.problem.value_dim) for t in (out, grad_out))
    return out, lse.contiguous(), grad_out, None if grad_lse is None else grad_lse.contiguous()


def _contiguous(backward: Backward) -> Backward:
    """Gradients as the op declares them: torch's kernels return them as the inputs lie."""

    def run(*arguments: Any) -> Gradients:
        return Gradients._make([None if grad is None else grad.contiguous() for grad in backward(*arguments)])

    return run


def without_autocast(function: Any, device: str) -> Any:
    def run(*arguments: Any) -> Any:
        with no_autocast(device):
            return function(*arguments)

    return run


def no_autocast(device: str) -> AbstractContextManager[Any]:
    """Kernels choose their own precision. Entering torch.autocast costs 3 us even where it is off already."""
    if torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
