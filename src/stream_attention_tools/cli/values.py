"""Types of command-line values for argparse, each with the message of its refusal."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import torch


def path_or_none(text: str) -> Path | None:
    return Path(text) if text else None


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of at least 1; got {text!r}")
    return int(text)


def count_or_none(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"expected a number of at least 0; got {text!r}")
    return int(text)


def seed(text: str) -> int:
    """What both torch's generator and the dropout of `attention` take."""
    if not -(2**63) <= int(text) < 2**63:
        raise ArgumentTypeError(f"expected a 64-bit integer; got {text}")
    return int(text)


def seconds(text: str) -> float:
    if not float(text) > 0:
        raise ArgumentTypeError(f"expected more than 0 seconds; got {text}")
    return float(text)


def probability(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise ArgumentTypeError(f"expected a probability in [0, 1); got {text}")
    return float(text)


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


def capability(text: str) -> int:
    if not text.isdecimal() or int(text) < 10:
        raise ArgumentTypeError(f"expected a compute capability without its dot, 90 for 9.0; got {text!r}")
    return int(text)
