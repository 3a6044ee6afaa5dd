"""Choosing how to compute a problem: a pure function from `Problem` and `Request` to `Plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from warnings import warn

from ..backends import BACKENDS, BY_NAME
from ..backends.base import NO_DECODING
from ..base.errors import UnsupportedProblem
from ..base.problem import AUTO, Problem, Request


class Plan(NamedTuple):
    """Which backend computes a problem, how it is configured, and why each preferred one was passed over."""

    problem: Problem  # as the kernel computes it
    backend: str
    config: Any
    passed_over: tuple[tuple[str, tuple[str, ...]], ...] = ()
    forced: tuple[tuple[str, int], ...] = ()  # fields of `config` that the caller set
    padded_from: tuple[int, int] | None = None  # D and Dv of the call, where the problem has wider ones

    def __str__(self) -> str:
        kind, problem, padded = self.problem.kind, self.problem, ""
        forced = f" (forced: {', '.join(f'{name}={value}' for name, value in self.forced)})" if self.forced else ""
        if self.padded_from:
            padded = f"; head dims padded with zeros to {problem.head_dim} and {problem.value_dim}"
            problem = problem.replace(head_dim=self.padded_from[0], value_dim=self.padded_from[1])
        lines = [f"{kind:8}  {problem}", f"backend   {self.backend}: {self.config}{forced}{padded}"]
        lines += [f"not       {name}: {'; '.join(reasons)}" for name, reasons in self.passed_over]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan {self.backend}: {self.config}>"


LENGTHS_ALIKE = 128
"""Lengths that round up to the same multiple of this, or below it to the same power of two, share a plan: each length
of a growing cache would plan anew."""


@lru_cache(maxsize=4096)
def plan(problem: Problem, request: Request | str = AUTO, *, backend: str | None = None) -> Plan:
    """Plan `problem` on the backend that is requested, or on the first that can.

    As a string the request is a backend's name. Fields of the configuration stand behind it, "triton(block_m=64,
    num_warps=8)": they are forced, the others stay planned. A backward is planned as if they were not there: they are
    those of a forward.

    Raises `UnsupportedProblem` with the reasons if a backend named by the caller cannot do it.
    """
    if backend is not None:
        warn("plan(backend=...) is deprecated; use plan(problem, request)", DeprecationWarning, stacklevel=2)
        request = backend
    if isinstance(request, str):
        request = parse(request)
    rounded = _rounded(problem)
    if rounded is None:
        return _plan(problem, request)
    try:
        planned = _plan(rounded, request)
    except UnsupportedProblem:
        return _plan(problem, request)  # in whose words its own lengths are
    if not BY_NAME[planned.backend].compiles:  # it cuts its tiles to the problem: each length has its own plan
        return _plan(problem, request)
    if planned.padded_from:
        wide = planned.problem
        problem = problem.replace(head_dim=wide.head_dim, value_dim=wide.value_dim, tma_compatible=wide.tma_compatible)
    return planned._replace(problem=problem)


def _rounded(problem: Problem) -> Problem | None:
    """The problem with lengths that others share, the last query at the last key as before; None if it is that."""
    q_more, k_more = (rounded_length(length) - length for length in (problem.q_len, problem.k_len))
    if problem.partial or problem.cached or problem.device.type != "cuda" or not (q_more or k_more):
        return None
    shift = 0 if problem.packed else k_more - q_more
    return problem.replace(
        q_len=problem.q_len + q_more,
        k_len=problem.k_len + k_more,
        q_start=problem.q_start + shift,
        q_base=problem.q_base + shift,
    )


def rounded_length(length: int) -> int:
    """The length that shares its plan with this one."""
    if length <= 1:
        return length
    return -(-length // LENGTHS_ALIKE) * LENGTHS_ALIKE if length > LENGTHS_ALIKE else 1 << (length - 1).bit_length()


@lru_cache(maxsize=4096)
def _plan(problem: Problem, request: Request) -> Plan:
    named = request.backend != AUTO
    passed_over: list[tuple[str, tuple[str, ...]]] = []
    for backend in (BY_NAME[request.backend],) if named else BACKENDS:
        asked, padded, padded_from = _padded(problem, backend.dim_multiple)
        reasons = backend.why_not(asked, request) or (() if named else backend.why_named_only(asked))
        if not reasons:
            config, forced = backend.configure(padded, request), () if problem.backward else request.forced
            return Plan(padded, backend.name, config, tuple(passed_over), forced, padded_from)
        passed_over.append((backend.name, reasons))
    raise UnsupportedProblem(_refusal(problem, request, passed_over))


def _refusal(problem: Problem, request: Request, against: list[tuple[str, tuple[str, ...]]]) -> str:
    """That no backend can do a problem, or not the one that was named, and why."""
    listing = "\n" + "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in against)
    what = f"decode {problem}" if problem.cached else f"do this problem ({problem})"
    if request.backend == AUTO:
        return f"no backend can {what}:{listing}"
    (_, reasons), named = against[0], repr(spell(request.backend, **dict(request.forced)))
    if reasons == (NO_DECODING,):
        decoders = (backend.name for backend in BACKENDS if backend.decode_kernels)
        return f"backend {named} {NO_DECODING}; pass one of {_listed((AUTO, *decoders))}"
    return f"backend {named} cannot {what}:{listing if problem.cached else ' ' + '; '.join(reasons)}"


def _padded(problem: Problem, multiple: int) -> tuple[Problem, Problem, tuple[int, int] | None]:
    """What a backend is asked, what its kernel computes, and the head dims of the call if they are padded for it.

    Padded tensors are copies, which TMA can address. FP8 takes three head dims alone.
    """
    dims = problem.head_dim, problem.value_dim
    wide = tuple(-(-dim // multiple) * multiple for dim in dims)
    if problem.fp8 or problem.cached or wide == dims:
        return problem, problem, None
    all_copied = wide[0] != dims[0] and wide[1] != dims[1]
    asked = problem.replace(tma_compatible=problem.tma_compatible or all_copied)
    return asked, asked.replace(head_dim=wide[0], value_dim=wide[1]), dims


def forget_plans() -> None:
    """Plan everything anew: what plans depend on beside their problems, such as the installed Triton, has changed."""
    plan.cache_clear()
    _plan.cache_clear()


# A plain module global, not a context variable: torch.compile guards on it and recompiles when it changes.
_forced = AUTO


@contextmanager
def force_backend(name: str) -> Iterator[None]:
    """Run every call in this block that leaves `backend="auto"` on the backend `name`. Process-wide; meant for tests.

    >>> from stream_attention import attention, force_backend
    >>> import torch
    >>> with force_backend("reference"):
    ...     attention(*torch.randn(3, 1, 4, 2, 8)).shape
    torch.Size([1, 4, 2, 8])
    """
    global _forced
    previous, _forced = _forced, check_backend(name)
    try:
        yield
    finally:
        _forced = previous


def requested(backend: str) -> str:
    """The backend a call asks for: its own argument, else the forced one."""
    return _forced if check_backend(backend) == AUTO else backend


def check_backend(backend: str) -> str:
    """Refuse names that no backend has, and configurations that it does not take."""
    if not isinstance(backend, str) or (backend != AUTO and backend not in BY_NAME):
        parse(backend)
    return backend


def spell(backend: str, **forced: int) -> str:
    """How a call asks for `backend` with fields of its configuration forced; the inverse of what `plan` reads.

    >>> from stream_attention.dispatch.plan import spell
    >>> spell("triton", block_m=64, num_warps=8)
    'triton(block_m=64, num_warps=8)'
    """
    return f"{backend}({', '.join(f'{name}={value}' for name, value in forced.items())})" if forced else backend


def parse(backend: str) -> Request:
    """What a caller asks for by a backend's name, with the fields forced on its configuration if there are any.

    Plain string methods, no cache and no regular expression: torch.compile traces through this.
    """
    name, bracket, rest = backend.partition("(") if isinstance(backend, str) else ("", "", "")
    if backend != AUTO and name not in BY_NAME:
        raise ValueError(f"backend: expected one of {_listed((AUTO, *BY_NAME))}; got {backend!r}")
    if not bracket:
        return Request(name)
    legal = BY_NAME[name].forceable
    if not legal:
        raise ValueError(f"backend: expected {name!r}, which accepts no configuration; got {backend!r}")
    if not rest.endswith(")"):
        raise ValueError(f"backend: expected a closing bracket at the end; got {backend!r}")
    forced: dict[str, int] = {}
    for pair in rest[:-1].split(","):
        field, equals, number = (piece.strip() for piece in pair.partition("="))
        if not equals or field not in legal or field in forced:
            raise ValueError(f"backend: expected name=value once for any of {_listed(legal)}; got {backend!r}")
        values = [str(value) for value in legal[field]]
        if number not in values:
            raise ValueError(f"backend: expected one of {', '.join(values)} for {field}; got {number!r} in {backend!r}")
        forced[field] = int(number)
    return Request(name, tuple(forced.items()))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
