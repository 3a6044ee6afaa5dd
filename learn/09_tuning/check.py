"""Checks exercise.py on programs of which each meets another limit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import checking

PROGRAMS = (
    (32, 1, 0, 32, "one warp and nothing else: 32 programs are the most there may be"),
    (32, 8, 0, 8, "8 warps each: there is room for 64 warps"),
    (128, 4, 0, 4, "128 registers x 128 threads: 16,384 of 65,536"),
    (170, 4, 0, 2, "170 registers are handed out as 176"),
    (255, 4, 98304, 2, "255 registers are handed out as 256; the registers and the shared memory both allow 2"),
    (182, 4, 114688, 2, "twice 112 KiB and 1 KiB each are 226 of 228 KiB"),
    (64, 4, 116224, 1, "twice 113.5 KiB is 227, but the system takes 1 KiB of each: 229"),
    (179, 8, 131072, 1, "twice 128 KiB do not fit"),
    (255, 8, 229376, 1, "8 warps of 255 registers take all there are"),
)


def complaints(candidate: Callable[[int, int, int], int]) -> Iterator[str]:
    for registers, warps, shared_bytes, wanted, why in PROGRAMS:
        got = candidate(registers, warps, shared_bytes)
        if got != wanted:
            where = f"{registers} registers, {warps} warps, {shared_bytes} bytes"
            yield f"{where}: expected {wanted} ({why}); got {got}"
            return


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "programs_per_processor", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
