"""What the `main` of every command does: parse, run, and turn refusals, Ctrl-C and a closed pipe into exit codes."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

P = ParamSpec("P")

CLOSED_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended, as in `stream-attention info | head -3`."""


class Refused(Exception):
    """A command line that cannot be run; the message says why, and the exit code is 2."""


def command(
    prog: str,
    docstring: str | None,
    add_flags: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
    refused: tuple[type[Exception], ...] = (Refused,),
    interrupted: str = "interrupted; its files are complete or unchanged",
    parser: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> Callable[..., int]:
    """The `main(argv=None, prog=prog)` of a command: its exit code, 2 where it is refused, 130 where interrupted.

    It is described by its module's docstring without the name; lines that are indented stay as they are. `run` gets the
    flags that `add_flags` adds, and `prog` beside them.
    """
    _, _, text = (docstring or "").partition(": ")
    about = text[:1].upper() + text[1:]
    formatter = argparse.RawDescriptionHelpFormatter if "\n    " in about else argparse.HelpFormatter

    @quiet
    def main(argv: Sequence[str] | None = None, prog: str = prog) -> int:
        made = parser(prog=prog, description=about, formatter_class=formatter)
        add_flags(made)
        options = made.parse_args(argv, argparse.Namespace(prog=prog))
        try:
            return run(options)
        except refused as why:
            print(f"{prog}: {why}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{prog}: {interrupted}", file=sys.stderr)
            return 130

    return main


def results(path: Path, where: str = "") -> dict[str, Any]:
    """What a results file holds; refused, behind `where`, if it is none."""
    from ..bench.results import load  # not for commands that read none

    try:
        return load(path)
    except OSError as error:
        raise Refused(f"{where}{path}: expected a results file; got {error.strerror or error}.") from None
    except ValueError as error:
        what = f"{error}" if type(error) is ValueError else f"expected JSON; got {error}"
        raise Refused(f"{where}{path}: {what}.") from None


def quiet(main: Callable[P, int]) -> Callable[P, int]:
    """The function, returning `CLOSED_PIPE` without a traceback where nobody reads what it prints."""

    @functools.wraps(main)
    def ended(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:  # also after --help, which leaves by SystemExit
                sys.stdout.flush()
        except BrokenPipeError:
            for stream in (sys.stdout, sys.stderr):  # or the interpreter complains when it flushes them at its end
                try:
                    stream.flush()
                except BrokenPipeError:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            return CLOSED_PIPE

    return ended
