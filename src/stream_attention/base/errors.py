"""Exceptions of the library, and the one sentence that refuses bad input: a plain `ValueError` or `TypeError`."""

from __future__ import annotations

from typing import Any, NoReturn


class UnsupportedProblem(ValueError):
    """The backend that was asked for by name cannot do this problem; the message says why."""


def refuse(name: str, expected: str, actual: Any, hint: str = "", error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}; got {actual}{'. ' + hint if hint else ''}")


def check_int(name: str, given: Any, least: int | None = None, error: type[Exception] = TypeError) -> int:
    """Return `given` if it is an int, no bool, of at least `least`; `error` is what another type raises."""
    if isinstance(given, bool) or not isinstance(given, int):
        refuse(name, "an int", f"{given!r} ({type(given).__name__})", error=error)
    if least is not None and given < least:
        refuse(name, f"at least {least}", given)
    return given
