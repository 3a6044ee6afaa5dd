"""Check the exercise: python learn/01_gpu_basics/check.py [--solution]"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checking

CASES = {  # name: block shape (x, y), rows, cols
    "one block, exactly": ((8, 4), 4, 8),
    "several blocks": ((8, 4), 8, 32),
    "blocks that reach past both edges": ((8, 4), 9, 21),
    "blocks higher than wide": ((4, 16), 20, 10),
    "one row": ((32, 1), 1, 50),
}


def complaints(candidate: Callable[..., int | None]) -> Iterator[str]:
    for name, (dim, rows, cols) in CASES.items():
        done: Counter[int] = Counter()
        for by in range(-(-rows // dim[1])):
            for bx in range(-(-cols // dim[0])):
                for ty in range(dim[1]):
                    for tx in range(dim[0]):
                        index = candidate((bx, by), dim, (tx, ty), rows, cols)
                        if index is not None:
                            done[index] += 1
        sentence = _wrong(done, rows, cols)
        if sentence:
            yield f"{name} ({rows} x {cols}, blocks of {dim[0]} x {dim[1]}): {sentence}"
    lines = {(candidate((0, 0), (32, 1), (x, 0), 64, 64) or 0) * 4 // 128 for x in range(32)}
    if len(lines) > 1:
        yield f"a warp reads from {len(lines)} lines of 128 bytes where 1 has it all: let x run along the columns."


def _wrong(done: Counter[int], rows: int, cols: int) -> str:
    outside = [index for index in done if not 0 <= index < rows * cols]
    missing = [index for index in range(rows * cols) if index not in done]
    twice = [index for index, times in done.items() if times > 1]
    if outside:
        return f"element {outside[0]} is outside: the matrix has {rows * cols}. Which threads should do nothing?"
    if twice:
        place = divmod(twice[0], cols)
        return f"element {twice[0]}, row {place[0]} column {place[1]}, is added {done[twice[0]]} times. By whom?"
    if missing:
        return f"nobody adds element {missing[0]}, row {missing[0] // cols} column {missing[0] % cols}."
    return ""


def main(argv: list[str] | None = None) -> int:
    return checking.run(__file__, "element_of", complaints, argv)


if __name__ == "__main__":
    sys.exit(main())
