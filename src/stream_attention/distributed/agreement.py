"""What ranks must agree on before they compute: one small message, so that a mistake is an error and not a hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from ..errors import refuse
from .transport import Agreement, CommunicationError, Strategy, all_gather

NAME, WIDTH = 4, 48
"""int64 numbers of a call's name, and of the whole message: one size for all calls, so that any two can be compared."""


def agree(
    call: str, rank: int, size: int, device: torch.device, lengths: Sequence[int], facts: Mapping[str, object]
) -> Strategy[list[list[int]]]:
    """Everyone's `lengths`, in the order of ranks.

    Raises on every rank, before any work: `CommunicationError` if ranks are in another `call`, `ValueError` if a fact
    is not the same on all of them; a fact is compared by its repr. On an accelerator this waits for it.
    """
    if size == 1:
        return [list(lengths)]
    numbers = [*_numbers(call), *lengths, *(crc32(repr(fact).encode()) for fact in facts.values())]
    mine = torch.zeros(WIDTH, dtype=torch.int64)
    mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    everyones = yield from all_gather(rank, mine.to(device), [mine.shape] * size, Agreement)
    table = torch.stack(everyones).tolist()
    calls = {r: _text(row[:NAME]) for r, row in enumerate(table)}
    elsewhere = ", ".join(f"rank {r} calls {name}" for r, name in calls.items() if name != calls[rank])
    if elsewhere:
        raise CommunicationError(
            f"rank {rank} calls {call}, and {elsewhere}. Every rank of the group must make the same calls in the same "
            "order: look for a call or a backward that depends on the rank."
        )
    for place, (name, fact) in enumerate(facts.items(), start=NAME + len(lengths)):
        column = [row[place] for row in table]
        others = [r for r, digest in enumerate(column) if digest != column[rank]]
        if others:
            hint = "Every rank must make the same call."
            refuse(name, f"the same on all {size} ranks", f"{fact!r} on rank {rank}, another on {others}", hint)
    return [row[NAME : NAME + len(lengths)] for row in table]


def described(tensor: Tensor | None) -> object:
    """A tensor as a fact: whether there is one, its shape and its dtype; not what it holds."""
    return None if tensor is None else (list(tensor.shape), tensor.dtype)


def _numbers(name: str) -> list[int]:
    """The beginning of a name, as numbers."""
    data = name.encode()[: 8 * NAME].ljust(8 * NAME, b"\0")
    return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]


def _text(numbers: Sequence[int]) -> str:
    return b"".join(n.to_bytes(8, "little", signed=True) for n in numbers).rstrip(b"\0").decode(errors="replace")
