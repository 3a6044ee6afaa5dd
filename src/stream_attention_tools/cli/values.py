"""Types of command-line values for argparse, each with the message of its refusal."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T", int, float)


def path_or_none(text: str) -> Path | None:
    return Path(text) if text else None


def number(kind: type[T], expected: str, holds: Callable[[T], bool]) -> Callable[[str], T]:
    """The type of a number of this kind for which `holds` is true."""

    def parsed(text: str) -> T:
        try:
            given = kind(text)
        except ValueError:
            given = None
        if given is None or not holds(given):
            raise ArgumentTypeError(f"expected {expected}; got {text!r}")
        return given

    return parsed


count = number(int, "a number of at least 1", lambda n: n >= 1)
count_or_none = number(int, "a number of at least 0", lambda n: n >= 0)
seed = number(int, "a 64-bit integer", lambda n: -(2**63) <= n < 2**63)
"""What both torch's generator and the dropout of `attention` take."""
seconds = number(float, "more than 0 seconds", lambda s: s > 0)
probability = number(float, "a probability in [0, 1)", lambda p: 0 <= p < 1)
capability = number(int, "a compute capability without its dot, 90 for 9.0", lambda cc: cc >= 10)


def device(text: str) -> str:
    """The CPU, or a CUDA device that torch finds here."""
    kind, _, index = text.partition(":")
    if text != "cpu" and (kind != "cuda" or not (index.isdecimal() or text == "cuda")):
        raise ArgumentTypeError(f"expected cpu, cuda or cuda:N; got {text!r}")
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= here:
        found = f"{here} CUDA device{'s' if here > 1 else ''}" if here else "no CUDA device"
        raise ArgumentTypeError(f"torch finds {found} here; got {text!r}")
    return text


def window(text: str) -> tuple[int, int]:
    try:
        left, right = map(int, text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"expected two ints LEFT,RIGHT, such as 1023,0; got {text!r}") from None
    return left, right
