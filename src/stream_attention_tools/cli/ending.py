"""How a command ends whose reader has gone, as in `stream-attention info | head -3`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

CLOSED_PIPE = 141
"""What a shell says of a program that SIGPIPE ended."""


def quiet(command: Callable[P, int]) -> Callable[P, int]:
    """The command, returning `CLOSED_PIPE` and saying nothing where nobody reads what it prints."""

    @functools.wraps(command)
    def ended(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return command(*args, **kwargs)
            finally:  # also after --help, which leaves by SystemExit
                sys.stdout.flush()
        except BrokenPipeError:
            _let_go()
            return CLOSED_PIPE

    return ended


def _let_go() -> None:
    """Point closed streams to nowhere, or the interpreter complains when it flushes them at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
