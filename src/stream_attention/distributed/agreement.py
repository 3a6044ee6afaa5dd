"""What ranks compare before they compute: one small message, so that a mistake raises an error and does not hang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from ..base.errors import refuse
from .transport import Agreement, CommunicationError, Strategy, Transport, all_gather

NAME, WIDTH = 4, 48
"""int64 elements of a call's name, and of the message, which has one size for all calls: any two can be compared."""


def agree(
    call: str, rank: int, size: int, device: torch.device, lengths: Sequence[int], parameters: Mapping[str, object]
) -> Strategy[list[list[int]]]:
    """Everyone's `lengths`, in the order of ranks.

    Raises on every rank, before any work: `CommunicationError` if ranks make another `call`, `ValueError` if a
    parameter differs between them. Parameters are compared by their repr. Synchronises with an accelerator.
    """
    if size == 1:
        return [list(lengths)]
    digests = (crc32(repr(value).encode()) for value in parameters.values())
    message = torch.tensor([*_encode(call), *lengths, *digests], dtype=torch.int64)
    message = torch.nn.functional.pad(message, (0, WIDTH - len(message)))
    gathered = yield from all_gather(rank, message.to(device), [message.shape] * size, Agreement)
    table = torch.stack(gathered).tolist()
    calls = {r: _decode(row[:NAME]) for r, row in enumerate(table)}
    others = ", ".join(f"rank {r} calls {name}" for r, name in calls.items() if name != calls[rank])
    if others:
        raise CommunicationError(
            f"rank {rank} calls {call}, and {others}. Every rank of the group must make the same calls in the same "
            "order: look for a call or a backward that depends on the rank."
        )
    for place, (name, value) in enumerate(parameters.items(), start=NAME + len(lengths)):
        differing = [r for r, row in enumerate(table) if row[place] != table[rank][place]]
        if differing:
            hint = "Every rank must make the same call."
            refuse(name, f"the same on all {size} ranks", f"{value!r} on rank {rank}, another on {differing}", hint)
    return [row[NAME : NAME + len(lengths)] for row in table]


def agreed(
    call: str, transport: Transport, device: torch.device, ranks: Iterable[tuple[Sequence[int], Mapping[str, object]]]
) -> list[list[int]]:
    """`agree` by each rank of this process, whose lengths and parameters are in `ranks`."""
    asking = zip(transport.ranks, ranks, strict=True)
    strategies = [agree(call, rank, transport.size, device, *its) for rank, its in asking]
    return transport.run(strategies, device)[0]


def described(tensor: Tensor | None) -> object:
    """A tensor as a parameter: whether there is one, its shape and its dtype; not its values."""
    return None if tensor is None else (list(tensor.shape), tensor.dtype)


def common_seed(transport: Transport, own: Tensor) -> Tensor:
    """Rank 0's (seed, offset), int64, on every rank, without a synchronisation."""
    strategies = [all_gather(rank, own, [own.shape] * transport.size) for rank in transport.ranks]
    return transport.run(strategies, own.device)[0][0]


def _encode(name: str) -> list[int]:
    """The beginning of a name as int64 elements."""
    data = name.encode()[: 8 * NAME].ljust(8 * NAME, b"\0")
    return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]


def _decode(elements: Sequence[int]) -> str:
    return b"".join(n.to_bytes(8, "little", signed=True) for n in elements).rstrip(b"\0").decode(errors="replace")
