"""Ours: `attention` and `varlen_attention` on each backend, and two ways to look at parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from stream_attention.backends import BY_NAME
from stream_attention.backends.eager import tuning as eager_tuning
from stream_attention.base.problem import AUTO, Problem
from stream_attention.dispatch.plan import Plan, plan
from stream_attention.dispatch.prepare import run_forward
from stream_attention.ops.attention import attention
from stream_attention.ops.explain import problems_of_call
from stream_attention.ops.varlen import varlen_attention

from ...testing.inputs import Case, Tensors, draw, stated
from ..suites import Cell, shortened
from .base import Provider


class Ours(Provider):
    """`attention`, packed `varlen_attention`, on one backend, or on the one it plans by itself ("stream").

    `options` are beside those of the cell.
    """

    ours = True

    def __init__(self, name: str, backend: str | None = None, **options: Any) -> None:
        self.name = self.label = name
        self.backend, self.options = backend or name, options
        given = "".join(f" with {option}={value}" for option, value in options.items())
        where = "the backend it plans" if backend == AUTO else f"the backend {self.backend}"
        self.about = f"attention() on {where}{given}"

    def why_not(self, cell: Cell) -> str | None:
        if self.backend not in (AUTO, *BY_NAME):
            return f"this version has no {self.backend} backend"
        if self.backend == AUTO:
            return None
        problem = self._problem(draw(shortened(self.case(cell.case), rows=128, batch=1)))
        problems = [problem] if cell.direction == "forward" else [problem, problem.replace(backward=True)]
        reasons = [reason for one in problems for reason in BY_NAME[self.backend].why_not(one)]
        return "; ".join(dict.fromkeys(reasons)) or None

    def attend(self, x: Tensors) -> Tensor:
        op: Callable[..., Tensor] = varlen_attention if x.packed else attention
        return op(x.query, x.key, x.value, **x.options, **self.options, backend=self.backend)

    def bare(self, x: Tensors) -> Callable[[], object]:
        query, key, value, causal = x.query, x.key, x.value, x.options["causal"]
        if self.backend != AUTO or self.options or len(x.options) > 1:
            return super().bare(x)
        return lambda: attention(query, key, value, causal=causal)

    def ran(self, x: Tensors, backward: bool = False) -> str | None:
        problem = self._problem(x)
        planned = plan(problem.replace(backward=True) if backward else problem, self.backend)
        return f"{planned.backend}: {planned.config}"

    def _problem(self, x: Tensors) -> Problem:
        return problems_of_call(x.query, x.key, x.value, **x.options, **self.options)[0][0]


class Plain(Ours):
    """`attention` without the cell's modifiers: what they cost is measured against it.

    "plain gluon" is that on one backend, which the same backend with the modifiers is compared with.
    """

    def __init__(self, backend: str = AUTO) -> None:
        super().__init__("plain" if backend == AUTO else f"plain {backend}", backend)
        self.label = self.name.capitalize()
        self.about += " without the cell's modifiers, heads all with their own keys: what they cost"

    def case(self, case: Case) -> Case:
        kept = {"B", "Tq", "Tk", "Hq", "D", "Dv", "dtype", "device", "causal", "seed", "lengths_q", "lengths_k"}
        return Case(**{name: value for name, value in vars(case).items() if name in kept}, Hkv=case.Hq)


class Blocked(Provider):
    """The eager backend's blocked pass, also where it would call torch's flash op."""

    name = label = "blocked"
    about = "the eager backend's blocked pass alone"
    ours = True

    def why_not(self, cell: Cell) -> str | None:
        if cell.case.packed:
            return "it is forced on dense calls alone"
        return None if cell.direction == "forward" else "forced by hand, it bypasses autograd: forward only"

    def attend(self, x: Tensors) -> Tensor:
        problem, inputs = stated(x, x.tensors, x.options)
        return run_forward(Plan(problem, "eager", eager_tuning.blocked(problem)), inputs)[0]
