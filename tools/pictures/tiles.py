"""Tiles moving through memory: one block of queries, and the keys and values that come and go."""

from __future__ import annotations

from .canvas import box, hollow, path, picture, text

TILES = 4
CELL = 17.0
ROW = 1  # the block of queries that is being computed


def draw() -> str:
    body = [text(0, 14, "Tiles moving through memory", "title")]
    body.append(text(0, 32, "One block of queries stays on the chip. Keys and values pass by.", "quiet"))
    for step in range(TILES):
        body += _frame(1 if step % 2 == 0 else 185, 46 + 156 * (step // 2), step)
    legend = (("s0", "Q, queries"), ("s1", "K, keys"), ("s2", "V, values"), ("s3", "O, output"))
    for place, (colour, words) in enumerate(legend):
        body += [box(88 * place + 1, 369, 9, 9, colour, 0.75), text(88 * place + 14, 378, words, "quiet")]
    body.append(text(0, 398, "Dashed: scores. One tile S of them is there at a time, on the chip.", "quiet"))
    return picture("Tiles of keys and values pass through the chip, block by block", 406, body)


def _frame(left: float, top: float, step: int) -> list[str]:
    """A step: what lies in memory at the left, what is on the chip at the right."""
    body = [text(left, top + 12, f"{step + 1}. K{step + 1} and V{step + 1} come", "bold")]
    grid_x, grid_y = left + 23, top + 60
    for place in range(TILES):
        now = place == step
        body.append(box(grid_x + CELL * place, top + 22, CELL - 3, 12, "s1", 0.75 if now else 0.15))
        body.append(box(grid_x + CELL * place, top + 39, CELL - 3, 12, "s2", 0.75 if now else 0.15))
        body.append(box(left, grid_y + CELL * place, 14, CELL - 3, "s0", 0.75 if place == ROW else 0.15))
        written = place < ROW or (place == ROW and step == TILES - 1)
        body.append(box(grid_x + CELL * TILES + 5, grid_y + CELL * place, 14, CELL - 3, "s3", 0.75 if written else 0))
        for column in range(TILES):
            where = (grid_x + CELL * column, grid_y + CELL * place, CELL - 3, CELL - 3)
            if place == ROW and column == step:
                body.append(box(*where, "s5", 0.75))
            else:
                body.append(hollow(*where, "2 2"))
    body.append(text(left, top + 143, "memory", "quiet"))
    chip = left + 116
    body += [hollow(chip, top + 22, 58, 107), text(chip, top + 143, "chip", "quiet")]
    rows = (("s0", f"Q{ROW + 1}"), ("s1", f"K{step + 1}"), ("s2", f"V{step + 1}"), ("s5", "S"))
    for place, (colour, name) in enumerate(rows):
        y = top + 29 + 19 * place
        body += [box(chip + 7, y, 14, 12, colour, 0.75), text(chip + 26, y + 10, name, "quiet")]
    body.append(text(chip + 5, top + 121, "m, l, acc", "quiet"))
    if step == TILES - 1:
        y = grid_y + CELL * ROW + CELL / 2 - 1
        body.append(path(f"M{chip:g} {y:g}h-4", "axis"))
    return body
