"""Filling Triton's cache ahead of the calls, for a GPU that need not be here.

A call is known by its shapes: it is planned and launched on tensors without memory, and what those launches ask for is
compiled, each kernel once, in processes side by side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from inspect import signature
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from stream_attention.backends import COMPILED
from stream_attention.base.problem import Wanted
from stream_attention.dispatch.plan import plan
from stream_attention.dispatch.prepare import problem_of, run_backward, run_forward
from stream_attention.ops.attention import attention, prepare_attention
from stream_attention.ops.varlen import prepare_varlen, varlen_attention

if TYPE_CHECKING:
    from .offline import Form


class Gpu(NamedTuple):
    """What a plan and a compiler ask of a GPU."""

    arch: int  # 90 is compute capability 9.0
    processors: int


@dataclass(frozen=True)
class Call:
    """A call of `attention`, or of `varlen_attention` where it is packed, by all that its kernels depend on."""

    batch: int  # packed: how many sequences, all of one length
    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    causal: bool = False
    window: tuple[int, int] | None = None
    mask: bool = False  # [Tq, Tk]
    bias: bool = False  # [Hq, Tq, Tk], in the dtype of the query
    alibi: bool = False  # one fp32 slope per head
    sink: bool = False  # likewise
    softcap: float = 0.0
    dropout_p: float = 0.0
    packed: bool = False
    backward: bool = False
    parameters: bool = False  # bias, slopes and sink get gradients too
    backend: str = "auto"

    def __str__(self) -> str:
        has = ("packed", "causal", "mask", "bias", "alibi", "sink")
        words = [str(self.dtype).removeprefix("torch."), f"D={self.dim}"]
        words += [f"Dv={self.value_dim}"] * (self.value_dim != self.dim)
        words += [f"Hq/Hkv={self.heads // self.kv_heads}"] * (self.heads != self.kv_heads)
        words += [name for name in has if getattr(self, name)]
        words += [f"{name}={getattr(self, name)}" for name in ("window", "softcap", "dropout_p") if getattr(self, name)]
        return " ".join([*words, f"B={self.batch} Tq={self.q_len} Tk={self.k_len}"])

    def arguments(self, device: str) -> dict[str, Any]:
        """What the op is called with; tensors on "meta" have no memory."""

        def empty(*shape: int, dtype: torch.dtype = self.dtype, grad: bool = False) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, requires_grad=grad and self.backward)

        lead_q: tuple[int, ...] = (self.batch, self.q_len)
        lead_k: tuple[int, ...] = (self.batch, self.k_len)
        given: dict[str, Any] = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        given |= {"dropout_p": self.dropout_p, "seed": 0 if self.dropout_p else None, "backend": self.backend}
        if self.packed:
            for side, length in (("q", self.q_len), ("k", self.k_len)):
                offsets = torch.arange(self.batch + 1, dtype=torch.int32, device=device) * length
                given |= {f"cu_seqlens_{side}": offsets, f"max_seqlen_{side}": length}
            lead_q, lead_k = (self.batch * self.q_len,), (self.batch * self.k_len,)
        given["query"] = empty(*lead_q, self.heads, self.dim, grad=True)
        given["key"] = empty(*lead_k, self.kv_heads, self.dim, grad=True)
        given["value"] = empty(*lead_k, self.kv_heads, self.value_dim, grad=True)
        if self.mask:
            given["mask"] = empty(self.q_len, self.k_len, dtype=torch.bool)
        if self.bias:
            given["bias"] = empty(self.heads, self.q_len, self.k_len, grad=self.parameters)
        if self.alibi:
            given["alibi_slopes"] = empty(self.heads, dtype=torch.float32, grad=self.parameters)
        if self.sink:
            given["sink"] = empty(self.heads, dtype=torch.float32, grad=self.parameters)
        return given


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


def compile_ahead(
    kernels: Iterable[Kernel], gpu: Gpu, workers: int | None = None, done: Callable[[Made], None] = lambda made: None
) -> list[Made]:
    """Compile kernels into Triton's cache, in parallel. `done` is told of each as it is finished."""
    # Fresh processes: a fork of one that has used CUDA, or has threads, may hang.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs: list[Future[Made]] = [pool.submit(_compile, kernel, gpu) for kernel in kernels]
        made = []
        try:
            for job in as_completed(jobs):
                made.append(job.result())
                done(made[-1])
        except BaseException:  # an interrupt, or a worker that was killed
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return made


def why_no_launchers() -> str | None:
    """Why what launches a kernel, which Triton builds with a C compiler, is not built ahead too; None if it is."""
    from . import launchers

    return launchers.why_not()


class FirstCall(NamedTuple):
    """How long the first call of its kind took in a process, and how many kernels were compiled for it."""

    call: Call
    forward: float  # seconds
    backward: float | None
    compiled: int


def first_calls(calls: Iterable[Call], cached: bool = True) -> list[FirstCall]:
    """Make calls on the GPU that is here, in a fresh process; `cached` False begins with an empty cache."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_first_calls, list(calls), cached).result()


def _launch(call: Call, gpu: Gpu, take: Callable[[Form], None]) -> str:
    """Launch a call as it would be on `gpu`. Returns why there is nothing to compile, if there is not."""
    from .offline import launching_for

    op, prepare = (varlen_attention, prepare_varlen) if call.packed else (attention, prepare_attention)
    bound = signature(op).bind(**call.arguments("meta"))
    bound.apply_defaults()
    problem, inputs, backend = problem_of(prepare(**bound.arguments))
    problem = problem.replace(device=torch.device("cuda"), arch=gpu.arch, processors=gpu.processors)
    forward = plan(problem, backend)
    if forward.backend not in COMPILED:
        passed_over = "; ".join(f"{name}: {', '.join(why)}" for name, why in forward.passed_over if name in COMPILED)
        return f"{forward.backend}; not {passed_over}" if passed_over else forward.backend
    with launching_for(gpu.arch, take), torch.no_grad():
        out, lse = run_forward(forward, inputs)
        if call.backward:
            backward = plan(problem.replace(backward=True), backend)
            wanted = Wanted(*(t is not None and t.requires_grad for t in (*inputs[:3], *inputs[4:7])))
            run_backward(backward, inputs, out, lse, torch.zeros_like(out), None, wanted)
    return ""


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


def _first_calls(calls: list[Call], cached: bool) -> list[FirstCall]:
    if cached:
        return [_first_call(call) for call in calls]
    with TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        return [_first_call(call) for call in calls]


def _first_call(call: Call) -> FirstCall:
    import triton

    compiled: list[Any] = []
    triton.knobs.compilation.listener = lambda cache_hit, **rest: None if cache_hit else compiled.append(rest["src"])
    op = varlen_attention if call.packed else attention
    given = call.arguments("cuda")  # makes the process's CUDA context too, which is no part of the call
    torch.cuda.synchronize()
    begun = time.perf_counter()
    out = op(**given)
    torch.cuda.synchronize()
    forward, begun = time.perf_counter() - begun, time.perf_counter()
    if not call.backward:
        return FirstCall(call, forward, None, len(compiled))
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()
    return FirstCall(call, forward, time.perf_counter() - begun, len(compiled))
