"""Files that are written whole or not at all. The standard library alone: tools load this file without torch."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

Content = str | bytes | Callable[[IO[bytes]], object]
"""Text, which becomes UTF-8; bytes; or a function that writes into a binary file."""


def write_file(path: str | os.PathLike[str], content: Content) -> None:
    """Write a file beside `path`, then rename it, so that a write that fails leaves what was there.

    Folders around it are made. A symbolic link stays, and what it points to is replaced. A new file gets the mode that
    `open` gives, an old one keeps its own. A device or a pipe is written to as it is.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    target = _target(path)
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            _fill(file, content)
        return
    beside, descriptor = _opened_beside(target)
    try:
        with open(descriptor, "wb") as file:
            if target.exists():
                beside.chmod(stat.S_IMODE(target.stat().st_mode))
            _fill(file, content)
            file.flush()
            os.fsync(descriptor)  # a full disk may say so only here
        os.replace(beside, target)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            beside.unlink()
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError that `write_file` would, as far as that is known before there is anything to write."""
    target = _target(path)
    if target.exists() and not target.is_file():
        return
    beside, descriptor = _opened_beside(target)
    os.close(descriptor)
    beside.unlink()


def save_figure(figure: Any, path: str | os.PathLike[str], dpi: int) -> None:
    """Draw a figure of matplotlib into a file of the format that its name ends in; .png where it ends in none."""
    named = Path(path) if Path(path).suffix else Path(f"{os.fspath(path)}.png")
    write_file(named, lambda file: figure.savefig(file, format=named.suffix[1:], dpi=dpi))


def _target(path: str | os.PathLike[str]) -> Path:
    """What is written where `path` is asked for, its folder made; an OSError where it cannot be."""
    given = Path(path)
    is_special = given.exists() and not given.is_file()  # a pipe has no real path
    target = given if is_special else Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target.parent)) from None
    return target


def _opened_beside(target: Path) -> tuple[Path, int]:
    beside = target.with_name(f".{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        return beside, os.open(beside, flags, 0o666)  # less what the umask takes
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None


def _fill(file: IO[bytes], content: Content) -> None:
    if callable(content):
        content(file)
    else:
        file.write(content.encode() if isinstance(content, str) else content)
