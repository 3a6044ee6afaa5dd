"""Attention with a function of scores: `attention(score_mod=...)`.

The function is Python, so the call is no library op: a function of autograd around the blocked pass in plain torch,
where tiles of scores are there to be given to it. A graph of torch.compile breaks here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.errors import refuse
from ..base.graph_break import graph_break
from ..base.problem import CallOptions, Inputs, Problem, Wanted, gradient_of
from ..base.score_function import ScoreFunction, ScoreMod
from ..dispatch import validate
from ..dispatch.plan import Plan, plan
from ..dispatch.prepare import problem_of, run_backward, run_forward
from .attention import call_reference, checked, op_arguments

_INPUTS = len(Inputs._fields)
_DIFFERENTIABLE = tuple(Inputs._fields.index(name) for name in Wanted._fields)


@graph_break("a score_mod is called on tiles of scores")
def scored(score_mod: ScoreMod, inputs: Inputs, options: tuple[Any, ...]) -> Any:
    """Compute a call of `attention` with a score_mod."""
    given = CallOptions(*options)
    if given.precision is not None:
        refuse("precision", "None with a score_mod", given.precision)
    arguments = op_arguments(checked(inputs, given, validate.attention_tensors), given)
    problem, inputs, backend = problem_of(arguments)
    function = ScoreFunction(score_mod, problem.device)
    for tensor in function.captured:
        if tensor.device != problem.device:
            hint = f"Move what {function.name} reads to {problem.device}"
            refuse("score_mod", f"tensors on the query's device {problem.device}", tensor.device, hint)
    if backend == "reference":
        out, lse = call_reference(arguments, function)
    else:
        problem = problem.replace(function=function.name)
        out, lse = _Scored.apply(_with(function, plan(problem, backend)), backend, *inputs, *function.captured)
    return (out, lse) if given.return_lse else out


def _with(function: ScoreFunction, planned: Plan) -> Plan:
    return planned._replace(config=planned.config._replace(score_function=function))


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, planned: Plan, backend: str, *tensors: Any) -> tuple[Tensor, Tensor]:
        out, lse = run_forward(planned, Inputs._make(tensors[:_INPUTS]))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.planned, ctx.backend = planned, backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        *tensors, out, lse = ctx.saved_tensors
        inputs, function = Inputs._make(tensors[:_INPUTS]), ctx.planned.config.score_function
        wanted = Wanted._make(ctx.needs_input_grad[2 + place] for place in _DIFFERENTIABLE)
        problem: Problem = gradient_of(ctx.planned.problem, inputs, lse_grad=grad_lse is not None)
        function.gradients = [torch.zeros_like(t, dtype=problem.state_dtype) for t in function.captured]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        planned = _with(function, plan(problem, ctx.backend))
        grads = run_backward(planned, inputs, out, lse, grad_out, grad_lse, wanted)
        found: list[Tensor | None] = [None] * (2 + _INPUTS)
        for place, grad in zip(_DIFFERENTIABLE, grads, strict=True):
            found[2 + place] = grad
        pairs = zip(function.gradients, function.captured, strict=True)
        found += [total.to(t.dtype) for total, t in pairs]
        function.gradients = []
        return tuple(found)
