"""One shard of a call, for callers in this package that merge states themselves: its state, and its gradients.

A shard's inputs are dense and in the form kernels read; `options` are keywords of `state_problem`. There is no sink: it
belongs to the merge, once. Calls are prepared once and kept in the launch cache, as those of public functions are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..backends import BY_NAME
from ..base.problem import AUTO, Backward, Gradients, Inputs, Positions, Problem, Wanted, state_problem
from ..dispatch import call_key, launch_cache
from ..dispatch.plan import Plan, plan, requested
from ..dispatch.prepare import prepare_backward, prepare_forward
from .merge import fold_state


def forward_into(
    inputs: Inputs, out: Tensor, lse: Tensor, *, resumes: bool, backend: str = AUTO, **options: Any
) -> None:
    """A shard's state, written where `out [B, Tq, Hq, Dv]`, fp32, and `lse [B, Hq, Tq]` lie, rows of larger tensors;
    if it resumes, merged into the state of other keys that is there. Without gradients."""
    backend, states = requested(backend), (out, lse)

    def prepare() -> Callable[[Inputs, Tensor, Tensor], None]:
        return _prepare_into(plan(_problem(inputs, **options), backend), inputs, *states, resumes)

    call = _prepared((resumes, backend, *options.items()), inputs, states, prepare)
    if launch_cache.COMPARE:
        states = out.clone(), lse.clone()
        prepare()(inputs, *states)
    launch_cache.labelled("forward", call, inputs, out, lse)
    if launch_cache.COMPARE:
        launch_cache.compare((out, lse), states)


def backward_step(inputs: Inputs, *given: Any, wanted: Wanted, backend: str = AUTO, **options: Any) -> Gradients:
    """One shard's gradients in fp32, to be summed over the shards, given `Results` of whole rows."""
    backend, (*_, grad_lse) = requested(backend), given

    def prepare() -> Backward:
        row_grad = wanted.alibi_slopes or wanted.sink
        stated = _problem(inputs, **options)
        problem = stated.replace(backward=True, lse_grad=grad_lse is not None, row_grad=row_grad)
        return prepare_backward(plan(problem, backend), inputs, given, wanted)

    call = _prepared((wanted, backend, *options.items()), inputs, given, prepare)
    grads: Gradients = launch_cache.labelled("backward", call, inputs, *given)
    if launch_cache.COMPARE and (options["deterministic"] or inputs.query.is_cpu):
        launch_cache.compare(grads, prepare()(inputs, *given))
    return grads


def _prepared(
    options: tuple[Any, ...], inputs: Inputs, others: tuple[Tensor | None, ...], prepare: Callable[[], Any]
) -> Any:
    """What was prepared for a call whose tensors lie as these do, or is prepared now. `others` are not inputs."""
    key, layouts = None, [None if t is None else call_key.layout_of(t) for t in others]
    if launch_cache.ENABLED and not call_key.is_watched() and call_key.NO_LAYOUT not in layouts:
        key = call_key.key_of(inputs, (0, 0), ("shard", *options, *layouts))
    call = None if key is None else launch_cache.find(key)
    if call is None:
        call = prepare()
        if key is not None:
            launch_cache.keep(key, call)
    return call


def _prepare_into(
    planned: Plan, inputs: Inputs, out: Tensor, lse: Tensor, resumes: bool
) -> Callable[[Inputs, Tensor, Tensor], None]:
    if planned.padded_from is None:
        backend = BY_NAME[planned.backend]
        into = backend.prepare_into(planned.problem, inputs, planned.config, out, lse, resumes)
        if into is not None:
            return into
    forward = prepare_forward(planned, inputs)

    def run(inputs: Inputs, out: Tensor, lse: Tensor) -> None:
        more_out, more_lse = forward(inputs, True)
        assert more_lse is not None
        if resumes:
            fold_state(out, lse, more_out, more_lse)
        else:
            out.copy_(more_out)
            lse.copy_(more_lse)

    return run


def _problem(inputs: Inputs, *, positions: Positions, **options: Any) -> Problem:
    assert inputs.sink is None and inputs.cu_seqlens_q is None
    return state_problem(inputs, positions=positions, partial=True, **options)
