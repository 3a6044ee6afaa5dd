"""Filling Triton's cache ahead of the calls, for a GPU that need not be here.

A call is known by its shapes: it is planned and launched on tensors without memory, and what those launches ask for is
compiled, each kernel once, in processes side by side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stream_attention.backends import COMPILED
from stream_attention.base.problem import Inputs, Problem, Wanted
from stream_attention.dispatch.plan import Plan, plan, requested
from stream_attention.dispatch.prepare import run_backward, run_forward
from stream_attention.ops.attention import attention
from stream_attention.ops.varlen import varlen_attention

from .testing.inputs import Case, Tensors, draw, stated

if TYPE_CHECKING:
    from .offline import Form


class Gpu(NamedTuple):
    """What a plan and a compiler ask of a GPU."""

    arch: int  # 90 is compute capability 9.0
    num_sms: int


class Call(NamedTuple):
    """A call by all that its kernels depend on: a case, on the backend that must compute it."""

    case: Case
    backend: str = "auto"
    parameters: bool = False  # bias, slopes and sink get gradients too

    def __str__(self) -> str:
        case = self.case
        has = ("packed", "causal", "mask", "bias", "alibi", "sink")
        words = [str(case.dtype).removeprefix("torch."), f"D={case.D}"]
        words += [f"Dv={case.Dv}"] * (case.Dv != case.D)
        words += [f"Hq/Hkv={case.Hq // case.Hkv}"] * (case.Hq != case.Hkv)
        words += [name for name in has if getattr(case, name)]
        words += [f"{name}={getattr(case, name)}" for name in ("window", "softcap", "dropout_p") if getattr(case, name)]
        return " ".join([*words, f"B={case.B} Tq={case.Tq} Tk={case.Tk}"])

    def inputs(self, device: str) -> Tensors:
        """Its inputs, and of them those that want a gradient; on "meta" they have no memory."""
        x = draw(replace(self.case, device=device))
        parameters = (x.options.get(name) for name in ("bias", "alibi_slopes", "sink") if self.parameters)
        for t in (*x.tensors.values(), *parameters):
            if t is not None:
                t.requires_grad_(self.case.backward)
        return x


def with_tiles(case: Case, mask: bool, bias: bool, alibi: bool) -> Case:
    """The case with a mask `[Tq, Tk]`, a bias `[Hq, Tq, Tk]` and a slope per head, those that are asked for."""
    tile = case.Tq, case.Tk
    return replace(
        case, mask=tile if mask else None, bias=(case.Hq, *tile) if bias else None, alibi="H" if alibi else None
    )


class Kernel(NamedTuple):
    """A kernel that calls ask for, with the first of them."""

    name: str
    key: str
    call: Call
    cached: bool  # Triton's cache has it, and what launches it

    def __str__(self) -> str:
        return f"{self.name}: {self.call}"


class Made(NamedTuple):
    """What came of a kernel that was compiled."""

    kernel: Kernel
    seconds: float
    error: str = ""


def kernels_of(calls: Iterable[Call], gpu: Gpu) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels that calls on `gpu` ask for, each once. Compiles none.

    Returns:
        The kernels, and where there is nothing to compile: reason -> the first call, in words, that it holds for.

    Raises:
        What the calls themselves would raise.
    """
    from . import launchers

    with_launchers = launchers.why_not() is None
    found: dict[str, Kernel] = {}
    without: dict[str, str] = {}
    for call in calls:

        def take(form: Form, call: Call = call) -> None:
            if (key := form.key) in found:
                return
            cached = form.is_cached and not (with_launchers and launchers.missing(form.compile()))
            found[key] = Kernel(form.name, key, call, cached)

        reason = _launch(call, gpu, take)
        if reason:
            without.setdefault(reason, str(call))
    return list(found.values()), without


def compile_ahead(kernels: Iterable[Kernel], gpu: Gpu, workers: int | None = None) -> Iterator[Made]:
    """Compile kernels into Triton's cache, in parallel, and yield what came of each."""
    # Fresh processes: a fork of one that has used CUDA, or has threads, may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(_compile, gpu=gpu), kernels)


def first_calls(calls: Iterable[Call], cached: bool = True) -> list[dict[str, Any]]:
    """Make calls on the GPU that is here, in a fresh process; `cached` False begins with an empty cache.

    Returns:
        By call, in words, how many seconds its forward and its backward took, and how many kernels were compiled.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_first_calls, list(calls), cached).result()


def _launch(call: Call, gpu: Gpu, take: Callable[[Form], None]) -> str:
    """Launch a call as it would be on `gpu`. Returns why there is nothing to compile, if there is not."""
    x, backend = call.inputs("meta"), requested(call.backend)
    problem, inputs = stated(x, x.tensors, x.options)
    problem = problem.replace(device=torch.device("cuda"), arch=gpu.arch, num_sms=gpu.num_sms)
    forward = plan(problem, backend)
    if forward.backend not in COMPILED:
        passed_over = "; ".join(f"{name}: {', '.join(why)}" for name, why in forward.passed_over if name in COMPILED)
        return f"{forward.backend}; not {passed_over}" if passed_over else forward.backend
    launch(problem, inputs, backend, call.case.backward, take)
    return ""


def launch(
    problem: Problem,
    inputs: Inputs,
    backend: str,
    backward: bool,
    take: Callable[[Form], None] = lambda form: None,
) -> None:
    """`compute` on kernels that are not run; `take` is given the form of each."""
    from .offline import launching_for

    with launching_for(problem.arch, take):
        compute(problem, inputs, backend, backward)


@torch.no_grad()
def compute(
    problem: Problem, inputs: Inputs, backend: str, backward: bool, of: Callable[[Plan], Plan] = lambda planned: planned
) -> None:
    """The forward of a call and, if asked for, its backward, by the plans `of` theirs."""
    out, lse = run_forward(of(plan(problem, backend)), inputs)
    if backward:
        wanted = Wanted(*(t is not None and t.requires_grad for t in (*inputs[:3], *inputs[4:7])))
        planned = of(plan(problem.replace(backward=True), backend))
        run_backward(planned, inputs, out, lse, torch.zeros_like(out), None, wanted)


def _compile(kernel: Kernel, gpu: Gpu) -> Made:
    """Launch the kernel's call once more, in this process, and compile the one of its kernels that is meant."""
    from . import launchers

    forms: list[Form] = []
    started = time.perf_counter()
    try:
        _launch(kernel.call, gpu, forms.append)
        form = next(form for form in forms if form.key == kernel.key)
        started = time.perf_counter()
        compiled = form.compile()
        if launchers.why_not() is None:
            for module in launchers.missing(compiled):
                launchers.build(module)
    except Exception as error:  # whatever the compiler raises is the answer
        return Made(kernel, time.perf_counter() - started, f"{type(error).__name__}: {error}")
    return Made(kernel, time.perf_counter() - started)


def _first_calls(calls: list[Call], cached: bool) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        if not cached:
            os.environ["TRITON_CACHE_DIR"] = folder
        return list(map(_first_call, calls))


def _first_call(call: Call) -> dict[str, Any]:
    import triton

    compiled: list[Any] = []
    triton.knobs.compilation.listener = lambda cache_hit, **rest: None if cache_hit else compiled.append(rest["src"])
    op: Callable[..., Any] = varlen_attention if call.case.packed else attention
    x = call.inputs("cuda")  # makes the process's CUDA context too, which is no part of the call

    def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        returned = run()
        torch.cuda.synchronize()
        return round(time.perf_counter() - begun, 3), returned

    forward, out = seconds(lambda: op(**x.tensors, **x.options, backend=call.backend))
    backward = seconds(lambda: out.backward(torch.ones_like(out)))[0] if call.case.backward else None
    return {"call": str(call), "forward": forward, "backward": backward, "compiled": len(compiled)}
