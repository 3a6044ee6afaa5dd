"""Exceptions of the library, and the one sentence that refuses bad input: a plain `ValueError` or `TypeError`."""

from __future__ import annotations

from typing import Any, NoReturn


class UnsupportedProblem(ValueError):
    """The backend that was asked for by name cannot do this problem; the message says why."""


def refuse(name: str, expected: str, actual: Any, hint: str = "", error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name}: expected {expected}; got {actual}{'. ' + hint if hint else ''}")
