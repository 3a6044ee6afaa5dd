"""Choosing how to compute a problem: a pure function from `Problem` to `Plan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from .backends import AUTO, BACKENDS, BY_NAME
from .errors import UnsupportedProblem
from .problem import Problem


class Plan(NamedTuple):
    """Which backend computes a problem, how it is configured, and why each preferred one was passed over."""

    problem: Problem
    backend: str
    config: Any
    passed_over: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        kind = "backward" if self.problem.backward else "forward "
        lines = [f"{kind}  {self.problem}", f"backend   {self.backend}: {self.config}"]
        lines += [f"not       {name}: {'; '.join(reasons)}" for name, reasons in self.passed_over]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan {self.backend}: {self.config}>"


@lru_cache(maxsize=4096)
def plan(problem: Problem, backend: str = AUTO) -> Plan:
    """Plan `problem` on `backend`, or on the first that can.

    Raises `UnsupportedProblem` with the reasons if a backend named by the caller cannot do it.
    """
    if check_backend(backend) != AUTO:
        chosen = BY_NAME[backend]
        reasons = chosen.why_not(problem)
        if reasons:
            raise UnsupportedProblem(f"backend {backend!r} cannot do this problem ({problem}): {'; '.join(reasons)}")
        return Plan(problem, backend, chosen.configure(problem))
    passed_over: list[tuple[str, tuple[str, ...]]] = []
    for candidate in BACKENDS:
        reasons = candidate.why_not(problem) or candidate.why_named_only(problem)
        if not reasons:
            return Plan(problem, candidate.name, candidate.configure(problem), tuple(passed_over))
        passed_over.append((candidate.name, reasons))
    listing = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in passed_over)
    raise UnsupportedProblem(f"no backend can do this problem ({problem}):\n{listing}")


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


def check_backend(name: str) -> str:
    """Refuse names that no backend has."""
    if not isinstance(name, str) or (name != AUTO and name not in BY_NAME):
        names = ", ".join(repr(known) for known in (AUTO, *BY_NAME))
        raise ValueError(f"backend: expected one of {names}; got {name!r}")
    return name
