"""What ranks must agree on before they compute: one small message, so that a mistake is an error and not a hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch

from ..errors import refuse
from .transport import Agreement, Strategy, all_gather


def agree(
    rank: int, size: int, device: torch.device, lengths: Sequence[int], facts: Mapping[str, object]
) -> Strategy[list[list[int]]]:
    """Everyone's `lengths`, in the order of ranks.

    Raises on every rank, before any work, if a fact is not the same on all of them; a fact is compared by its repr.
    On an accelerator this waits for it.
    """
    numbers = [*lengths, *(crc32(repr(fact).encode()) for fact in facts.values())]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyones = yield from all_gather(rank, mine, [mine.shape] * size, Agreement)
    table = [numbers] if size == 1 else torch.stack(everyones).tolist()
    for place, (name, fact) in enumerate(facts.items(), start=len(lengths)):
        column = [row[place] for row in table]
        others = [r for r, digest in enumerate(column) if digest != column[rank]]
        if others:
            hint = "Every rank must make the same call."
            refuse(name, f"the same on all {size} ranks", f"{fact!r} on rank {rank}, another on {others}", hint)
    return [row[: len(lengths)] for row in table]
