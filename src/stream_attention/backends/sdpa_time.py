"""The portable kernel beside torch's own, timed once on a GPU whose generation our kernels never ran on.

Its tiles are guesses there. Where they are slower, "auto" leaves what torch's op can do to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..base.problem import Inputs, Problem, Wanted
from ..gpu import decode_tuning
from . import installed, probe
from .base import Backend
from .hopper.tuning import tile_widths
from .self_check import normal_numbers, plain_problem, saved_for_backward

LENGTH, HEADS = 2048, 16
"""Of the problem that is timed: causal, one batch entry, bf16. A tenth of a millisecond or more on any GPU of today."""

MARGIN = 1.03
"""Ratios below this are noise."""


def why_leave(problem: Problem) -> tuple[str, ...]:
    """Why "auto" leaves a problem to torch's own op, in a sentence; empty if it does not."""
    found = None if problem.arch in installed.RAN_ON else answer(problem)
    return () if found is None or found.yes else (f"on this GPU torch's own op is preferred: {found.words}",)


def answer(problem: Problem) -> probe.Answer | None:
    """Whether the portable kernel is as fast as torch's own, timed where it can be; None: nothing is known, or torch's
    op cannot do it."""
    if problem.fp8 or problem.cached or problem.packed or problem.dtype.itemsize != 2:
        return None
    from .eager import tuning

    if tuning.why_not_cuda(problem) or tuning.why_not_cuda_flash(problem) or decode_tuning.few_queries(problem):
        return None
    from .eager import Eager
    from .triton import Triton

    question = f"the portable kernel is as fast as torch's: {problem.kind}, D={tile_widths(problem)[0]}"
    return probe.ask(question, problem, partial(compare, problem, Triton(), Eager()))


def compare(problem: Problem, portable: Backend, torchs: Backend, length: int = LENGTH) -> probe.Answer:
    """Time both on a plain problem of the same direction and head dim."""
    normal = normal_numbers(problem.device)
    dim, _ = tile_widths(problem)
    inputs = Inputs(*(normal(1, length, HEADS, dim) for _ in range(3)))
    stated = plain_problem(problem, inputs)
    try:
        saved = saved_for_backward(torchs, stated, inputs) if problem.backward else ()
        torchs_call = _call(torchs, stated, inputs, saved)
    except RuntimeError as error:  # this torch was not built for this GPU
        return probe.Answer(True, f"torch's op raises {type(error).__name__}")
    try:
        calls = _call(portable, stated, inputs, saved), torchs_call
    except Exception as error:  # no C compiler, say: the call will say so
        raise probe.Unanswered from error
    try:
        ours, theirs = (statistics.median(times) for times in zip(*(map(_ms, calls) for _ in range(7)), strict=True))
    except (TimeoutError, RuntimeError) as error:  # a GPU that others use, or an older error of the device
        raise probe.Unanswered from error
    words = f"{problem.kind} of 1x{length}x{HEADS}x{dim}, bf16, causal: {ours:.3g} ms, torch's {theirs:.3g} ms"
    return probe.Answer(ours <= MARGIN * theirs, words)


def _call(backend: Backend, problem: Problem, inputs: Inputs, saved: tuple[Any, ...]) -> Any:
    """A prepared call, which was made twice: the first compiles."""
    config = backend.configure(problem)
    if problem.backward:
        backward = backend.prepare_backward(problem, inputs, config, *saved, wanted=Wanted())
        call: Callable[[], Any] = partial(backward, inputs, *saved)
    else:
        call = partial(backend.prepare(problem, inputs, config), inputs, True)
    call()
    call()
    return call


def _ms(call: Any, repeats: int = 8) -> float:
    """Milliseconds of a call, of several that are queued one behind the other."""
    stream = torch.cuda.current_stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    for _ in range(repeats):
        call()
    end.record(stream)
    probe.wait_for(stream)
    return begin.elapsed_time(end) / repeats
