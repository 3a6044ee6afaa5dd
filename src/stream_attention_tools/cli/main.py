"""stream-attention COMMAND ...: the commands of this package under one name. `COMMAND --help` says what each takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from stream_attention import __version__

from .command import quiet

COMMANDS = {
    "info": ("info", "what is enabled on this machine, what is not, and the command that would enable it"),
    "plan": ("plan", "which kernel would run for a call of given shapes, and why not another"),
    "cluster": ("cluster", "what attention takes on many GPUs, by scheme, and which one to take: a prediction"),
    "warmup": ("warmup", "compile kernels into Triton's cache ahead of their first call, also without a GPU"),
    "benchmark": ("benchmark", "measure attention here, beside its peers"),
    "test": ("accuracy", "compare attention with the fp64 reference"),
    "migrate": ("migrate", "print calls of other attention libraries in Python files, and what each becomes"),
    "report": ("report", "write benchmark results into the tables of pages"),
}
"""Name -> (module of this folder, one line). A module is imported when its command runs, and not before."""


@quiet
def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    name = parser.parse_args(words[:1]).command
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        parser.error(f"expected a command, one of {known}; got {'none' if name is None else repr(name)}")
    module = import_module(f".{COMMANDS[name][0]}", __package__)
    return int(module.main(words[1:], prog=f"{parser.prog} {name}"))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {line}" for name, (_, line) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="stream-attention",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description=f"Exact attention for PyTorch in one streaming pass.\n\ncommands:\n{listing}",
        epilog="'%(prog)s COMMAND --help' says what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
